"""The reader of an attachment that reads Spark's own files, without Spark.

A whole state is read partition by partition, and written in files of bounded size. The changes of a batch are few, and
become one file, or bytes in the epoch. A batch that was only written anew, in another number of partitions, is read as
a whole state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import chain

import pyarrow as pa

from state_backend.attach.attachment import StateReader
from state_backend.attach.rows import BoundState, newest_of_each
from state_backend.checkpoint.checkpoint import Checkpoint, Layout
from state_backend.checkpoint.states import State
from state_backend.codec.row_encoding import in_runs, names_of, sorted_by_position
from state_backend.log.epochs import ChangeFile, EpochContent
from state_backend.log.log_writer import LogWriter
from state_backend.model.errors import DescriptorError, PurgedVersionError

logger = logging.getLogger("sparkis.attach")

PARTITIONS_SETTING = "spark.sql.shuffle.partitions"
CHANGELOG_SETTING = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"
# One batch after the other: there is nothing to be gained by reading several at once.
BATCHES_MAX = 16
# A whole state is written in files of about this size (guess).
FILE_BYTES_MAX = 256 << 20
# Rows of partitions are joined up to these limits before they are encoded (guess).
JOINED_ROWS = 16_384
JOINED_BYTES = 4 << 20
# Without a change log, each batch costs two reads of the whole state. So a pause follows, as long as the read, and at
# most so many seconds (guess).
COMPARISON_PAUSE_S_MAX = 5.0

Decoded = Iterator[tuple[State, pa.RecordBatch]]


class FilesReader(StateReader):
    """Reads the files in the attachment's thread."""

    batches_max = BATCHES_MAX

    def __init__(self, checkpoint: Checkpoint, states: Sequence[BoundState]) -> None:
        self.descriptors = tuple(state.descriptor for state in states)
        self.identities = {state.descriptor.name: state.identity for state in states}
        self._checkpoint = checkpoint
        self._states = tuple(states)
        self._names = names_of([state.plan for state in states])
        self._is_list = [state.state.is_list for state in states]
        self._compares_snapshots = False

    def snapshot(self, writer: LogWriter, batch: int) -> EpochContent:
        """Write the whole state as of a batch."""
        replaces = tuple(state.name for state in self.descriptors)
        return self._written(writer, batch, self._whole(self._layout(batch)), replaces)

    def changes(self, writer: LogWriter, first: int, last: int) -> Iterator[tuple[int, EpochContent]]:
        """Write the changes of some batches, and yield them in order."""
        for batch in range(first, last + 1):
            if self._partitions(batch) != self._partitions(batch - 1):
                yield batch, self.snapshot(writer, batch)
            else:
                yield batch, self._written(writer, batch, self._changed(self._layout(batch)))

    def pause_s(self, read_s: float) -> float:
        """Return the pause after a read that took `read_s` seconds."""
        return min(read_s, COMPARISON_PAUSE_S_MAX) if self._compares_snapshots else 0.0

    def _partitions(self, batch: int) -> str | None:
        return self._checkpoint.offsets(batch).settings.get(PARTITIONS_SETTING)

    def _layout(self, batch: int) -> Layout:
        """Return the layout as of a batch; DescriptorError if an attached state has another form in it."""
        layout = self._checkpoint.layout(batch)
        found = {(state.operator, state.name): state for state in layout.states}
        for bound in self._states:
            state = found.get((bound.state.operator, bound.state.name))
            if state is None or (state.key, state.value, state.operator_name) != (
                bound.state.key,
                bound.state.value,
                bound.state.operator_name,
            ):
                raise DescriptorError(
                    f"state {bound.descriptor.name!r}: {bound.columns.names.source} has another schema since batch "
                    f"{batch}, or is gone: the query's plan has changed. Attach again, with --on-mismatch replace"
                )
        compares = not all(store.has_change_log(batch) for store in layout.stores)
        if compares and not self._compares_snapshots:
            logger.warning(
                "%s keeps its state in RocksDB without a change log, so each batch is found by comparing two "
                "snapshots of the whole state. Start the query with %s=true to make that cheap",
                self._checkpoint.location,
                CHANGELOG_SETTING,
            )
        self._compares_snapshots = compares
        return layout

    @staticmethod
    def _whole(layout: Layout) -> Decoded:
        for store in layout.stores:
            for partition in store.partitions():
                yield from store.whole(partition, layout.batch)

    @staticmethod
    def _changed(layout: Layout) -> Decoded:
        for store in layout.stores:
            for partition in store.partitions():
                yield from store.changes(partition, layout.batch)

    def _written(self, writer: LogWriter, batch: int, decoded: Decoded, replaces: tuple[str, ...] = ()) -> EpochContent:
        """Write rows as change files."""
        runs = self._runs(decoded, is_whole=bool(replaces))
        files: list[ChangeFile] = []
        inline: list[bytes] = []
        rows = 0
        for first in runs:
            part = _Part(chain((first,), runs))
            file, stream = writer.change_files(batch).write(part)
            files += [file] if file is not None else []
            inline += [stream] if stream is not None else []
            rows += part.rows
        return EpochContent(files, inline, rows, replaces=replaces)

    def _runs(self, decoded: Decoded, *, is_whole: bool) -> Iterator[pa.RecordBatch]:
        for run in in_runs(self._encoded(decoded)):
            yield sorted_by_position(run if is_whole else newest_of_each(run, self._is_list))

    def _encoded(self, decoded: Decoded) -> Iterator[pa.RecordBatch]:
        numbers: dict[tuple[int, str], list[int]] = {}
        for number, bound in enumerate(self._states):
            numbers.setdefault((bound.state.operator, bound.state.name), []).append(number)
        for state, rows in _joined(decoded):
            for number in numbers.get((state.operator, state.name), ()):
                yield self._states[number].encoded(rows, number, self._names)


def _joined(decoded: Decoded) -> Decoded:
    """Join the rows of small partitions by state: each batch of rows costs about the same, however small it is."""
    waiting: dict[State, list[pa.RecordBatch]] = {}
    sizes: dict[State, int] = {}
    for state, rows in decoded:
        if rows.num_rows:
            waiting.setdefault(state, []).append(rows)
            sizes[state] = sizes.get(state, 0) + rows.nbytes
            if sizes[state] >= JOINED_BYTES or sum(map(len, waiting[state])) >= JOINED_ROWS:
                yield state, pa.concat_batches(waiting.pop(state))
                sizes.pop(state)
    for state, batches in waiting.items():
        yield state, pa.concat_batches(batches)


class _Part:
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
            if size >= FILE_BYTES_MAX:
                return


class FollowedFiles:
    """A checkpoint as an attachment sees it; see `FollowedCheckpoint`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.is_local = "://" not in checkpoint.location
        # As Spark names it, so that one reader takes a job over from the other.
        self.location = f"file:{checkpoint.location}" if self.is_local else checkpoint.location

    def query_id(self) -> str:
        """Return the query's id; CheckpointError if this is not a checkpoint."""
        return self._checkpoint.query_id

    def is_committed(self, batch: int) -> bool:
        """Tell whether a batch is committed, and not purged. Checks one file."""
        return self._checkpoint.is_committed(batch)

    def newest(self) -> int | None:
        """Return the number of the last committed batch, or None."""
        return self._checkpoint.newest_batch()

    def batch_time_ms(self, batch: int) -> int | None:
        """Return the timestamp at which Spark planned a batch; None if the batch is purged."""
        try:
            return self._checkpoint.offsets(batch).timestamp_ms
        except PurgedVersionError:
            return None

    def ends_of(self, batch: int) -> tuple[str, ...]:
        """Return the end offset of each source in a batch; () if unknown."""
        return self._checkpoint.source_offsets(batch)
