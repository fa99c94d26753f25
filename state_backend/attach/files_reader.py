"""The reader of an attachment that reads Spark's own files, without Spark.

A whole state is read partition by partition, and written in files of bounded size. If it is large, several processes
read it. The changes of a batch are few, and become one file, or bytes in the epoch. A batch that only repartitioned the
state is read as a whole state.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from state_backend.attach.attachment import ChangeFiles, StateReader
from state_backend.attach.folder_watch import FolderWatch
from state_backend.attach.read_ahead import ReadAhead
from state_backend.attach.record_writer import RecordWriter
from state_backend.attach.rows import BoundState
from state_backend.attach.shard import Place, Share, joined, places_of, processes_for, rows_at, write_in_processes
from state_backend.checkpoint.checkpoint import Checkpoint, Layout
from state_backend.checkpoint.states import State, lasting_name
from state_backend.log.epochs import EpochContent
from state_backend.model.errors import DescriptorError, PurgedVersionError, UnsupportedStateError

logger = logging.getLogger("sparkis.attach")

CHANGELOG_SETTING = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"
# Batches are read one after the other: reading several at once gains nothing. So this only bounds one call, for which
# `stop` waits.
BATCHES_MAX = 16
# After this time, several processes read the rest of a whole state. A process takes half a second to start.
SHARED_AFTER_S = 2.0
# Without a change log, each batch costs two reads of the whole state. So a pause follows, as long as the read, but
# at most this long (guess).
COMPARISON_PAUSE_S_MAX = 5.0


class FilesReader(StateReader):
    """Reads the files in the attachment's thread."""

    batches_max = BATCHES_MAX

    def __init__(self, checkpoint: Checkpoint, states: Sequence[BoundState]) -> None:
        self.descriptors = tuple(state.descriptor for state in states)
        self.identities = {state.descriptor.name: state.identity for state in states}
        self._checkpoint = checkpoint
        self._states = tuple(states)
        self._writer = RecordWriter(states)
        self._compares_snapshots = False
        self._newest: Layout | None = None  # the layout that was read last
        self._ahead: ReadAhead | None = None
        self._watch = FolderWatch()  # for the thread that reads ahead

    def snapshot(self, writer: ChangeFiles, batch: int) -> EpochContent:
        """Write the whole state as of a batch."""
        layout = self._layout(batch)
        waiting = deque(places_of(layout))
        shared_at_s = time.monotonic() + SHARED_AFTER_S

        def first_ones() -> Iterator[Place]:
            while waiting and (processes_for(waiting) == 1 or time.monotonic() < shared_at_s):
                yield waiting.popleft()

        written = [self._writer.write(writer.change_files(batch), rows_at(layout, first_ones()), is_whole=True)]
        if waiting:
            share = Share(self._checkpoint.location, self._states, batch, tuple(waiting), writer.root, writer.folder)
            written.append(write_in_processes(share))
        return replace(joined(written), replaces=tuple(state.name for state in self.descriptors))

    def changes(self, writer: ChangeFiles, first: int, last: int) -> Iterator[tuple[int, EpochContent]]:
        """Write the changes of some batches, and yield them in order."""
        for batch in range(first, last + 1):
            if self._newest is None or self._newest.batch != batch - 1:
                before = self._checkpoint.partition_count(batch - 1)
            else:
                before = self._newest.partition_count
            layout = self._layout(batch)
            if layout.partition_count != before:
                yield batch, self.snapshot(writer, batch)
                continue
            content = None
            if (ahead := self._ahead_of(writer, batch)) is not None:
                self._ahead = None
                content = ahead.content(layout)
            if content is None:
                decoded = (each for store in layout.stores for each in store.changes(store.partitions, batch))
                content = self._writer.write(writer.change_files(batch), decoded, is_whole=False)
            yield batch, content

    def read_ahead(self, writer: ChangeFiles, batch: int) -> None:
        """Begin to read the changes of the next batch before its commit, in a thread."""
        is_remote = "://" in self._checkpoint.location
        if is_remote or self._compares_snapshots or self._ahead_of(writer, batch) is not None:
            return
        self.close()
        self._ahead = ReadAhead(self._checkpoint, self._writer, writer, batch, self._watch)

    def _ahead_of(self, writer: ChangeFiles, batch: int) -> ReadAhead | None:
        ahead = self._ahead
        return ahead if ahead is not None and ahead.place == (writer.folder, batch) else None

    def close(self) -> None:
        """Stop reading ahead."""
        ahead = self._ahead
        if ahead is not None:
            ahead.stop()

    def pause_s(self, read_s: float) -> float:
        """Return the pause after a read that took `read_s` seconds."""
        return min(read_s, COMPARISON_PAUSE_S_MAX) if self._compares_snapshots else 0.0

    def _layout(self, batch: int) -> Layout:
        """Return the layout as of a batch; DescriptorError if an attached state has another form in it."""
        layout = self._checkpoint.layout(batch)
        found = {(state.operator, state.name): state for state in layout.states}
        for bound in self._states:
            state = found.get((bound.state.operator, bound.state.name))
            for unread in layout.unread:
                if state is None and unread.operator == bound.state.operator:
                    raise UnsupportedStateError(str(unread))
            if state is None or _form(state) != _form(bound.state):
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
        self._newest = layout
        return layout


def _form(state: State) -> tuple[object, ...]:
    """Return what must not change while an attachment follows a state. Another version of Spark does not change it."""
    return state.key, state.value, lasting_name(state.operator_name)


class FollowedFiles:
    """A checkpoint as an attachment sees it; see `FollowedCheckpoint`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.is_local = "://" not in checkpoint.location
        # Spark's form of the path: both readers write the same location, so one continues the other's job.
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
