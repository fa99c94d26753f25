"""A state store in all of its partitions: whole states and changes, as Arrow batches of its states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import pyarrow as pa

from state_backend.checkpoint.decoding import RowFormat, decoded, of_family
from state_backend.checkpoint.files import CheckpointFiles
from state_backend.checkpoint.hdfs_store import HdfsStore
from state_backend.checkpoint.metadata import BatchCommit
from state_backend.checkpoint.records import Records
from state_backend.checkpoint.rocksdb_store import RocksDbStore
from state_backend.checkpoint.states import DEFAULT_STORE, State
from state_backend.model.errors import CheckpointDamagedError

# Version N is the state after batch N - 1.
FIRST_VERSION = 1


class StoreFiles(Protocol):
    """The files of one store in one partition. unique_id: that of a version's files, in checkpoint format 2."""

    def changes(self, version: int, unique_id: str | None, id_before: Callable[[], str | None]) -> Iterator[Records]:
        """Yield the changes that made a version, in their order. id_before: returns the id of the version before."""

    def whole(self, version: int, unique_id: str | None) -> Iterator[Records]:
        """Yield the whole state as of a version: puts of distinct keys."""

    def families(self) -> dict[str, int]:
        """Return the numbers of the column families by name."""


@dataclass(frozen=True)
class Provider:
    """How a state store provider of Spark stores its files. has_versions: a version byte precedes each row."""

    open: Callable[[CheckpointFiles, str, bool], StoreFiles]
    has_versions: bool


PROVIDERS = {
    "HDFSBackedStateStoreProvider": Provider(HdfsStore, has_versions=False),
    "RocksDBStateStoreProvider": Provider(RocksDbStore, has_versions=True),
}


@dataclass(frozen=True)
class StateStore:
    """A store of an operator. place: its number among the operator's stores.

    commit_of: returns a batch's commit, which names the files of checkpoint format 2.
    """

    files: CheckpointFiles
    provider: Provider
    operator: int
    name: str
    states: tuple[State, ...]
    place: int
    has_checksums: bool
    commit_of: Callable[[int], BatchCommit]

    def partitions(self) -> list[int]:
        """Return the numbers of the partitions that have been written, in order."""
        return self.files.numbers(f"state/{self.operator}")

    def has_change_log(self, batch: int) -> bool:
        """Tell whether the changes of a batch are in files of their own, and need not be found by comparison."""
        if self.provider.open is HdfsStore:
            return True
        partition = next(iter(self.partitions()), 0)
        version = str(batch + FIRST_VERSION)
        names = self.files.names(self.folder(partition))
        return any(
            name.endswith(".changelog") and name.removesuffix(".changelog").partition("_")[0] == version
            for name in names
        )

    def folder(self, partition: int) -> str:
        """Return the folder of a partition's files."""
        return store_folder(self.operator, partition, self.name)

    def changes(self, partition: int, batch: int) -> Iterator[tuple[State, pa.RecordBatch]]:
        """Yield the changes that a batch made to a partition, in the order of the batch's task."""
        opened = self._open(partition)
        id_before = partial(self._unique_id, partition, batch - 1)
        changes = opened.changes(batch + FIRST_VERSION, self._unique_id(partition, batch), id_before)
        yield from self._decoded(opened, changes, partition)

    def whole(self, partition: int, batch: int) -> Iterator[tuple[State, pa.RecordBatch]]:
        """Yield the whole state of a partition after a batch; no key is repeated."""
        opened = self._open(partition)
        whole = opened.whole(batch + FIRST_VERSION, self._unique_id(partition, batch))
        yield from self._decoded(opened, whole, partition)

    def _open(self, partition: int) -> StoreFiles:
        return self.provider.open(self.files, self.folder(partition), self.has_checksums)

    def _unique_id(self, partition: int, batch: int) -> str | None:
        """Return the id of a partition's files after a batch; None in checkpoint format 1."""
        ids = self.commit_of(batch).ids.get(self.operator)
        if ids is None:
            return None
        if partition >= len(ids) or self.place >= len(ids[partition]):
            name = self.files.name(f"commits/{batch}")
            raise CheckpointDamagedError(f"{name} is damaged: it has no id for partition {partition}")
        return ids[partition][self.place]

    def _decoded(
        self, opened: StoreFiles, blocks: Iterable[Records], partition: int
    ) -> Iterator[tuple[State, pa.RecordBatch]]:
        row_format = RowFormat(self.provider.has_versions, self.has_checksums, self.files.name(self.folder(partition)))
        families = opened.families() if any(state.family is not None for state in self.states) else {}
        for records in blocks:
            for state in self.states:
                if state.family is None:
                    yield state, decoded(records, state, row_format)
                elif state.family in families:  # a variable has no family before it is first used
                    chosen = of_family(records, families[state.family])
                    if len(chosen):
                        yield state, decoded(chosen, state, row_format)


def store_folder(operator: int, partition: int, store: str) -> str:
    """Return the folder of a store in a partition."""
    folder = f"state/{operator}/{partition}"
    return folder if store == DEFAULT_STORE else f"{folder}/{store}"
