"""A state store in all of its partitions: whole states and changes, as Arrow batches of its states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import NamedTuple

import pyarrow as pa

from state_backend.checkpoint.compression import unreadable
from state_backend.checkpoint.decoding import RowFormat, decoded, of_family
from state_backend.checkpoint.files import CheckpointFiles, FileIdentity
from state_backend.checkpoint.hdfs_store import HdfsStore
from state_backend.checkpoint.metadata import BatchCommit
from state_backend.checkpoint.records import Records
from state_backend.checkpoint.rocksdb_store import RocksDbStore
from state_backend.checkpoint.states import DEFAULT_STORE, State
from state_backend.model.errors import CheckpointFormatError

# Version N is the state after batch N - 1.
FIRST_VERSION = 1
NO_FAMILY = -1
# Records are joined up to this size before they are decoded (guess).
JOINED_BYTES = 1 << 20
# The number of files that are read from an object store at the same time: a request takes tens of milliseconds (guess).
READS_AT_A_TIME = 16


# The files of one store in one partition.
StoreFiles = HdfsStore | RocksDbStore
Decoded = Iterator[tuple[State, pa.RecordBatch]]


@dataclass(frozen=True)
class Provider:
    """How a state store provider of Spark stores its files.

    Args:
        has_versions: A version byte precedes each row.
    """

    open: Callable[[CheckpointFiles, str, bool], StoreFiles]
    has_versions: bool


PROVIDERS = {
    "HDFSBackedStateStoreProvider": Provider(HdfsStore, has_versions=False),
    "RocksDBStateStoreProvider": Provider(RocksDbStore, has_versions=True),
}


class PartitionRecords(NamedTuple):
    """A partition's records in blocks, and the numbers of its column families by name."""

    partition: int
    families: Mapping[str, int]
    blocks: Iterator[Records]


@dataclass(frozen=True)
class StateStore:
    """A store of an operator.

    Args:
        index: Its number among the operator's stores.
        partitions: The numbers of those that have been written, in order.
        commit_of: Returns a batch's commit, which names the files of checkpoint format 2.
    """

    files: CheckpointFiles
    provider: Provider
    operator: int
    name: str
    states: tuple[State, ...]
    index: int
    has_checksums: bool
    partitions: tuple[int, ...]
    commit_of: Callable[[int], BatchCommit]

    def has_change_log(self, batch: int) -> bool:
        """Return whether the changes of a batch are in files of their own. All partitions of a batch are alike."""
        if not self.partitions:
            return True
        committed_ns = self.files.modified_ns(f"commits/{batch}")
        for partition in self.partitions:
            store, unique_id = self._open(partition), self._unique_id(partition, batch)
            found = store.has_changes(batch + FIRST_VERSION, unique_id, committed_ns)
            if found is not None:
                return found
        return False

    def can_be_compared(self, batch: int) -> bool:
        """Return whether the changes of a batch without a change log can be found by comparing two snapshots.

        The batch after the query has stopped writing change logs has no snapshot of the version before.
        """
        version = batch + FIRST_VERSION
        if version == FIRST_VERSION:
            return True
        return not self.has_change_log(batch - 1) and all(
            self._open(partition).has_snapshot(version - 1, self._unique_id(partition, batch - 1))
            for partition in self.partitions
        )

    def identity_of_changes(self, partition: int, batch: int) -> FileIdentity | None:
        """Return the identity of the file with a partition's changes in a batch, in format 1; None if it is missing."""
        name = self._open(partition).name_of_changes(batch + FIRST_VERSION, None)
        return self.files.identity(f"{self.folder(partition)}/{name}")

    def folder(self, partition: int) -> str:
        """Return the folder of a partition's files."""
        return store_folder(self.operator, partition, self.name)

    def changes(self, partitions: Iterable[int], batch: int) -> Decoded:
        """Yield the changes that a batch made to some partitions; those of a partition in the order of its task."""

        has_change_log = cache(lambda: self.has_change_log(batch))

        def read(partition: int) -> PartitionRecords:
            store = self._open(partition)
            version, unique_id = batch + FIRST_VERSION, self._unique_id(partition, batch)
            if has_change_log():
                blocks = store.changes(version, unique_id)
            else:
                before = None if version == FIRST_VERSION else self._unique_id(partition, batch - 1)
                blocks = store.difference(version, unique_id, before)
            return PartitionRecords(partition, self._families(store), blocks)

        yield from self._decoded(self._each(read, partitions))

    def whole(self, partitions: Iterable[int], batch: int) -> Decoded:
        """Yield the whole state of some partitions after a batch; no key is repeated."""

        def read(partition: int) -> PartitionRecords:
            store = self._open(partition)
            blocks = store.whole(batch + FIRST_VERSION, self._unique_id(partition, batch))
            return PartitionRecords(partition, self._families(store), blocks)

        yield from self._decoded(map(read, partitions))

    def _each(self, read: Callable[[int], PartitionRecords], partitions: Iterable[int]) -> Iterator[PartitionRecords]:
        """Open partitions, several at the same time if each request takes long."""
        if not self.files.is_remote:
            yield from map(read, partitions)
            return
        remaining = iter(partitions)
        with ThreadPoolExecutor(READS_AT_A_TIME) as threads:
            while some := list(islice(remaining, READS_AT_A_TIME)):
                yield from threads.map(read, some)

    def _families(self, store: StoreFiles) -> Mapping[str, int]:
        return store.families() if any(state.family is not None for state in self.states) else {}

    def _open(self, partition: int) -> StoreFiles:
        return self.provider.open(self.files, self.folder(partition), self.has_checksums)

    def _unique_id(self, partition: int, batch: int) -> str | None:
        """Return the id of a partition's files after a batch; None in checkpoint format 1."""
        ids = self.commit_of(batch).ids.get(self.operator)
        if ids is None:
            return None
        if partition >= len(ids) or self.index >= len(ids[partition]):
            name = self.files.name(f"commits/{batch}")
            raise unreadable(name, f"it has no id for partition {partition}")
        return ids[partition][self.index]

    def _decoded(self, opened: Iterable[PartitionRecords]) -> Decoded:
        """Decode the records of partitions. Small blocks are decoded together: each costs about the same."""
        waiting: dict[State, list[tuple[int, Records]]] = {}
        sizes = dict.fromkeys(self.states, 0)
        for each in opened:
            for records in each.blocks:
                for state in self.states:
                    chosen = self._records_of(state, records, each.families)
                    if not len(chosen):
                        continue
                    waiting.setdefault(state, []).append((each.partition, chosen))
                    sizes[state] += len(chosen.content)
                    if sizes[state] >= JOINED_BYTES:
                        yield state, self._joined(state, waiting.pop(state))
                        sizes[state] = 0
        for state, parts in waiting.items():
            yield state, self._joined(state, parts)

    @staticmethod
    def _records_of(state: State, records: Records, families: Mapping[str, int]) -> Records:
        if state.family is None:
            return records
        # A variable has no family before it is first used.
        return of_family(records, families.get(state.family, NO_FAMILY))

    def _joined(self, state: State, parts: Sequence[tuple[int, Records]]) -> pa.RecordBatch:
        try:
            return decoded(Records.joined([records for _, records in parts]), state, self._format(parts[0][0]))
        except CheckpointFormatError:
            for partition, records in parts:
                decoded(records, state, self._format(partition))  # raises the error with the partition's name
            raise

    def _format(self, partition: int) -> RowFormat:
        return RowFormat(self.provider.has_versions, self.has_checksums, self.files.name(self.folder(partition)))


def store_folder(operator: int, partition: int, store: str) -> str:
    """Return the folder of a store in a partition."""
    folder = f"state/{operator}/{partition}"
    return folder if store == DEFAULT_STORE else f"{folder}/{store}"
