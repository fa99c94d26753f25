"""Writes decoded rows of a checkpoint as change records: in files of bounded size, or as bytes in the epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import chain

import pyarrow as pa

from state_backend.attach.state_encoder import StateEncoder, newest_of_each
from state_backend.checkpoint.stores import Decoded
from state_backend.codec.row_encoding import SkippedRows, in_runs, names_of, sorted_by_position
from state_backend.log.change_files import STATE_FILE_BYTES_MAX, ChangeFileWriter
from state_backend.log.epochs import ChangeFile, EpochContent
from state_backend.model.records import positions_in

logger = logging.getLogger("sparkis.attach")


class ChangeWriter:
    """Writes the rows of some states. sources: the operators and names of the states in the checkpoint."""

    def __init__(self, states: Sequence[StateEncoder]) -> None:
        self._states = tuple(states)
        self.sources = frozenset((each.state.operator, each.state.name) for each in states)
        self._names = names_of([state.plan for state in states])
        self._has_reported = False  # one example of a skipped row is logged
        self._is_list = [state.state.is_list for state in states]

    def write(self, target: ChangeFileWriter, decoded: Decoded, *, is_complete: bool) -> EpochContent:
        """Write rows; the last row of a key counts.

        Args:
            is_complete: Each key occurs once, so that no rows are merged.
        """
        skipped = SkippedRows()
        runs = self.runs(decoded, skipped, is_complete=is_complete)
        files: list[ChangeFile] = []
        inline: list[bytes] = []
        rows = 0
        for first in runs:
            part = _FileRuns(chain((first,), runs))
            file, stream = target.write(part)
            files += [file] if file is not None else []
            inline += [stream] if stream is not None else []
            rows += part.rows
        if skipped.count and not self._has_reported:
            self._has_reported = True
            logger.warning("a row is left out, and others like it will be; STATE JOBS counts them: %s", skipped.example)
        return EpochContent(files, inline, rows, skipped_rows=skipped.count)

    def runs(self, decoded: Decoded, skipped: SkippedRows, *, is_complete: bool) -> Iterator[pa.RecordBatch]:
        """Yield rows as sorted runs of change records.

        Args:
            is_complete: As in `write`.
        """
        for run in in_runs(self._encoded(decoded, skipped)):
            ordered = sorted_by_position(run)
            positions = positions_in(ordered)
            may_repeat_keys = not is_complete and bool((positions[1:] == positions[:-1]).any())
            yield newest_of_each(ordered, self._is_list) if may_repeat_keys else ordered

    def _encoded(self, decoded: Decoded, skipped: SkippedRows) -> Iterator[pa.RecordBatch]:
        numbers: dict[tuple[int, str], list[int]] = {}
        for number, bound in enumerate(self._states):
            numbers.setdefault((bound.state.operator, bound.state.name), []).append(number)
        for state, rows in decoded:
            for number in numbers.get((state.operator, state.name), ()):
                yield self._states[number].encoded(rows, number, self._names, skipped)


class _FileRuns:
    """The runs of one file: as many of the remaining runs as fit."""

    def __init__(self, runs: Iterator[pa.RecordBatch]) -> None:
        self._runs = runs
        self.rows = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        size = 0
        for run in self._runs:
            self.rows += run.num_rows
            size += run.nbytes
            yield run
            if size >= STATE_FILE_BYTES_MAX:
                return
