"""The reader of an attachment that reads Spark's own files, without Spark.

A whole state is read partition by partition, and written in files of bounded size. The changes of a batch are few, and
become one file, or bytes in the epoch. If either takes longer than a bound, several processes read the remaining
partitions (see `partition_share`), and each writes files of its own. A key is in one partition only, so the order of
its changes stays. Two kinds of batches are read as a whole state: one that only repartitioned the state, and the first
one after the query has stopped writing change logs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from state_backend.attach.attachment import ChangeFiles, StateReader
from state_backend.attach.change_writer import ChangeWriter
from state_backend.attach.partition_share import (
    PartitionShare,
    ShareProcesses,
    StorePartition,
    joined,
    partitions_of,
    processes_for,
    rows_of,
)
from state_backend.attach.read_ahead import ReadAhead
from state_backend.attach.state_encoder import StateEncoder
from state_backend.checkpoint.checkpoint import BatchStores, Checkpoint
from state_backend.checkpoint.states import State, stable_name
from state_backend.folder_watch import FolderWatch
from state_backend.log.epochs import EpochContent
from state_backend.model.errors import DescriptorError, PurgedVersionError, UnsupportedStateError

logger = logging.getLogger("sparkis.attach")

CHANGELOG_SETTING = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"
# Batches are read one by one; this bounds one call, so that `stop` is quick.
BATCHES_MAX = 16
# Without a change log, each batch costs two reads of the whole state. So a pause follows, as long as the read, but
# at most this long (guess).
COMPARISON_PAUSE_S_MAX = 5.0


class FilesReader(StateReader):
    """Reads the files in the attachment's thread."""

    batches_max = BATCHES_MAX

    def __init__(self, checkpoint: Checkpoint, states: Sequence[StateEncoder]) -> None:
        self.descriptors = tuple(state.descriptor for state in states)
        self.identities = {state.descriptor.name: state.identity for state in states}
        self._checkpoint = checkpoint
        self._states = tuple(states)
        self._writer = ChangeWriter(states)
        self._compares_snapshots = False
        self._newest: BatchStores | None = None  # the stores that were read last
        self._ahead: ReadAhead | None = None
        self._watch = FolderWatch()  # for the thread that reads ahead
        self._processes = ShareProcesses()

    def snapshot(self, writer: ChangeFiles, batch: int) -> EpochContent:
        """Write the whole state as of a batch."""
        batch_stores = self._batch_stores(batch)
        parallel_at_s = time.monotonic() + self._processes.needed_after_s
        written = self._written(writer, batch_stores, partitions_of(batch_stores), parallel_at_s, is_complete=True)
        return replace(written, replaces=tuple(state.name for state in self.descriptors))

    def changes(self, writer: ChangeFiles, first: int, last: int) -> Iterator[tuple[int, EpochContent]]:
        """Write the changes of some batches, and yield them in order."""
        for batch in range(first, last + 1):
            if self._newest is None or self._newest.batch != batch - 1:
                before = self._checkpoint.partition_count(batch - 1)
            else:
                before = self._newest.partition_count
            batch_stores = self._batch_stores(batch)
            is_known = not self._compares_snapshots or all(
                store.has_change_log(batch) or store.can_be_compared(batch) for store in batch_stores.stores
            )
            if batch_stores.partition_count != before or not is_known:
                yield batch, self.snapshot(writer, batch)
                continue
            yield batch, self._changes(writer, batch_stores)

    def _changes(self, writer: ChangeFiles, batch_stores: BatchStores) -> EpochContent:
        """Write the changes of a committed batch, as far as they were not written before the commit."""
        parallel_at_s = time.monotonic() + self._processes.needed_after_s
        partitions, written = partitions_of(batch_stores), []
        if (ahead := self._ahead_of(writer, batch_stores.batch)) is not None:
            self._ahead = None
            if self._compares_snapshots:
                ahead.stop()  # it may have read a change log of an earlier run
            elif (content := ahead.content(batch_stores, parallel_at_s)) is not None:
                written.append(content)
                partitions = [partition for partition in partitions if partition not in ahead.partitions]
        if partitions:
            written.append(self._written(writer, batch_stores, partitions, parallel_at_s, is_complete=False))
        return joined(written)

    def _written(
        self,
        writer: ChangeFiles,
        batch_stores: BatchStores,
        partitions: Iterable[StorePartition],
        parallel_at_s: float,
        *,
        is_complete: bool,
    ) -> EpochContent:
        """Write some partitions: the first ones here, and those that are left at a time in several processes."""
        waiting = deque(partitions)

        def partitions_read_here() -> Iterator[StorePartition]:
            while waiting and (processes_for(waiting) == 1 or time.monotonic() < parallel_at_s):
                yield waiting.popleft()

        rows = rows_of(batch_stores, partitions_read_here(), is_complete=is_complete)
        written = [self._writer.write(writer.change_files(batch_stores.batch), rows, is_complete=is_complete)]
        if waiting:
            location, log = self._checkpoint.location, (writer.root, writer.folder)
            share = PartitionShare(location, self._states, batch_stores.batch, is_complete, tuple(waiting), *log)
            written.append(self._processes.write(share))
        return joined(written)

    def read_ahead(self, writer: ChangeFiles, batch: int) -> None:
        """Begin to read the changes of the next batch before its commit, in a thread."""
        self._processes.end_idle()
        is_remote = "://" in self._checkpoint.location
        if is_remote or self._compares_snapshots or self._ahead_of(writer, batch) is not None:
            return
        self._stop_ahead()
        self._ahead = ReadAhead(self._checkpoint, self._writer, writer, batch, self._watch)

    def _ahead_of(self, writer: ChangeFiles, batch: int) -> ReadAhead | None:
        ahead = self._ahead
        return ahead if ahead is not None and ahead.folder_and_batch == (writer.folder, batch) else None

    def close(self) -> None:
        """Stop reading ahead, and end the processes after their current read."""
        self._stop_ahead()
        self._processes.close()

    def _stop_ahead(self) -> None:
        ahead = self._ahead
        if ahead is not None:
            ahead.stop()

    def pause_s(self, read_s: float) -> float:
        """Return the pause after a read that took `read_s` seconds."""
        return min(read_s, COMPARISON_PAUSE_S_MAX) if self._compares_snapshots else 0.0

    def _batch_stores(self, batch: int) -> BatchStores:
        """Return the attached states as of a batch; DescriptorError if one has another form in it."""
        batch_stores = self._checkpoint.batch_stores(batch)
        found = {(state.operator, state.name): state for state in batch_stores.states}
        for bound in self._states:
            state = found.get((bound.state.operator, bound.state.name))
            for unread in batch_stores.unread:
                if state is None and unread.operator == bound.state.operator:
                    raise UnsupportedStateError(str(unread))
            if state is None or _form(state) != _form(bound.state):
                raise DescriptorError(
                    f"state {bound.descriptor.name!r}: {bound.columns.names.source} has another schema since batch "
                    f"{batch}, or is gone: the query's plan has changed. Attach again, with --on-mismatch replace"
                )
        batch_stores = batch_stores.only(self._writer.sources)
        compares = not all(store.has_change_log(batch) for store in batch_stores.stores)
        if compares and not self._compares_snapshots:
            logger.warning(
                "%s keeps its state in RocksDB without a change log, so each batch is found by comparing two "
                "snapshots of the whole state. Start the query with %s=true to make that cheap",
                self._checkpoint.location,
                CHANGELOG_SETTING,
            )
        self._compares_snapshots = compares
        self._newest = batch_stores
        return batch_stores


def _form(state: State) -> tuple[object, ...]:
    """Return what must not change while an attachment follows a state. Another version of Spark does not change it."""
    return state.key, state.value, stable_name(state.operator_name)


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
        """Return whether a batch is committed, and not purged. Checks one file."""
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
