"""One of the two stores of fresh values: keys, each with the last row of it that came."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb

from state_backend.codec.checksums import checked, with_checksum
from state_backend.lmdb.record_format import Meta, changed_name, find
from state_backend.lmdb.snapshot import LmdbSnapshot
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.slots import store_key_of
from state_backend.store.changed_keys import ChangedKeys
from state_backend.store.store import AppliedEpoch, EpochChanges
from state_backend.store.uncommitted import FreshSnapshot

if TYPE_CHECKING:
    import pyarrow as pa

# The record in `meta` with what is known of the layer, as JSON.
FRESH = b"fresh"
# The size of LMDB's map: address space. Values have a bound of their own (see `values`), and the file exceeds them by
# the pages that readers keep for a moment (guess).
MAP_BYTES_MAX = 64 << 30


class LayerSnapshot(LmdbSnapshot, FreshSnapshot):
    """A view of a layer."""

    _notes: Mapping[str, Any] | None = None  # of `_notes_version`
    _notes_version = -1

    @property
    def notes(self) -> Mapping[str, Any]:
        """What is known of the layer; empty at first."""
        if self._notes is None or self._notes_version != self.version:
            self._notes = _notes_in(self._txn.get(FRESH, db=self._tables.meta))
            self._notes_version = self.version
        return self._notes

    @property
    def batch(self) -> int:
        return int(self.notes.get("batch", -1))

    def has(self, key: bytes) -> bool:
        return find(self._txn.get, store_key_of(key), key)[1] is not None


class Layer(LmdbStore):
    """A store whose epochs are frames of rows. Any process of the server writes it, one at a time.

    The number of an epoch never goes back, also when the layer is cleared: so its readers find the keys that changed.
    """

    def __init__(self, path: Path, generation: str) -> None:
        super().__init__(path, generation, map_bytes_max=MAP_BYTES_MAX)
        self._notes: Mapping[str, Any] = {}

    def snapshot(self, now_ms: int) -> LayerSnapshot:
        return LayerSnapshot(self.begin, self.tables, self.generation, now_ms, self._env, self._file)

    def notes(self) -> Mapping[str, Any]:
        """Return what is known of the layer."""
        with self.begin() as txn:
            return _notes_in(txn.get(FRESH, db=self.tables.meta))

    def file_bytes(self) -> int:
        """Return the size of the file: with free pages, and with those that it has grown by since."""
        return (int(self._env.info()["last_pgno"]) + 1) * self._page_bytes

    def put(
        self, runs: Sequence[pa.RecordBatch], states: Sequence[StateDescriptor], notes: Mapping[str, Any], now_ms: int
    ) -> None:
        """Write rows, and what is known of the layer from now on."""
        self._notes = notes
        self.apply(EpochChanges(self.applied.epoch + 1, 0, now_ms, runs), states)

    def _apply(self, txn: lmdb.Transaction[bytes], *changes: Any) -> None:
        super()._apply(txn, *changes)
        self._write_notes(txn, self._notes)

    def note(self, notes: Mapping[str, Any]) -> None:
        """Write what is known of the layer from now on."""
        with self._write_transaction() as txn:
            self._write_notes(txn, notes)

    def _write_notes(self, txn: lmdb.Transaction[bytes], notes: Mapping[str, Any]) -> None:
        txn.put(FRESH, with_checksum(json.dumps(notes).encode()), db=self.tables.meta)

    def clear(self, notes: Mapping[str, Any]) -> None:
        """Remove all keys, as an epoch that changes them."""
        changed = ChangedKeys()
        with closing(self.snapshot(0)) as snapshot:
            epoch = snapshot.applied.epoch + 1
            for keys in _scanned(snapshot.scan):
                changed.extend(keys)
                if changed.is_full:
                    break
        packed = changed.pack()
        with self._write_transaction() as txn:
            for table in self.tables:
                txn.drop(table, delete=False)
            meta = Meta(AppliedEpoch(self.generation, epoch))
            txn.put(b"applied", meta.to_bytes(), db=self.tables.meta)
            txn.put(changed_name(epoch), with_checksum(packed) if packed else packed, db=self.tables.meta)
            self._write_notes(txn, notes)


def _notes_in(stored: bytes | None) -> Mapping[str, Any]:
    return {} if stored is None else json.loads(checked(stored))


def _scanned(scan: Callable[[int, int], tuple[int, list[bytes]]]) -> Iterator[Sequence[bytes]]:
    """Iterate over all keys, some at a time."""
    cursor = 0
    while True:
        cursor, keys = scan(cursor, 1024)
        yield keys
        if not cursor:
            return
