"""Writes and deletes the records of keys, one by one, in a write transaction.

`value_writer`, `map_writer`, `list_writer` and `set_writer` make the content of the records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import lmdb

from state_backend.codec.keep_by_order import RowOrder
from state_backend.codec.reductions import Reduction
from state_backend.lmdb.events import EventWriter
from state_backend.lmdb.key_counts import KeyCounts
from state_backend.lmdb.order_table import OrderTable
from state_backend.lmdb.record_format import (
    COUNTED_AT,
    DROPPED_ENTRY,
    EXPIRY_AT,
    FIELD_POSITION_BYTES,
    FIRST_LARGE,
    FORM_AT,
    ID_BYTES,
    KEY_ENTRY,
    LARGE_MAP,
    MAP_ENTRY,
    NEVER,
    LargeMap,
    Table,
    Tables,
    checked_rows,
    expiry_entry,
    expiry_of,
    find,
    id_of,
    name_of,
    payload_of,
)
from state_backend.model.descriptor import Kind
from state_backend.model.slots import POSITION_BYTES, store_key_of
from state_backend.store.changed_keys import ChangedKeys
from state_backend.store.key_events import KeyEvent


class KeyWriter:
    """Writes and deletes the records of keys, and updates the counts, the expiry index and the changed keys with them.

    Attributes:
        changed: The number of changes so far that made a difference.
        events: Records the events of keys; None: they are not recorded.
    """

    def __init__(self, txn: lmdb.Transaction[bytes], tables: Tables, counts: KeyCounts, now_ms: int) -> None:
        self.txn = txn
        self.tables = tables
        self.counts = counts
        self.meta = counts.meta
        self.now_ms = now_ms
        self.records = Table(txn, tables.keys, POSITION_BYTES)
        self.fields = Table(txn, tables.fields, ID_BYTES + FIELD_POSITION_BYTES)
        self.orders = OrderTable(txn, tables.orders)
        self.field_expiry = txn.cursor(db=tables.field_expiry)
        self.changed_keys = ChangedKeys()
        self.events: EventWriter | None = None
        self.changed = 0

    def find(self, key: bytes) -> tuple[bytes, bytes | None]:
        """Return a key's store key and record, expired or not; for a missing key the next free store key and None."""
        return find(self.records.get, store_key_of(key), key)

    def find_live(self, key: bytes) -> tuple[bytes, bytes | None]:
        """Return a key's store key and record; a record that has expired is deleted first."""
        at, record = self.find(key)
        if record is not None and not self.is_live(record):
            self.delete(at, record)
            return self.find(key)
        return at, record

    def is_live(self, record: bytes) -> bool:
        """Return whether a key is live: neither the key has expired, nor all fields of a large map."""
        if 0 < expiry_of(record) <= self.now_ms:
            return False
        return record[FORM_AT] != LARGE_MAP or LargeMap.of(payload_of(record)).is_live(self.field_expiry, self.now_ms)

    def put(self, at: bytes, old: bytes | None, new: bytes) -> None:
        """Write a key's record over the old one, and drop the old one's rows in other tables if the id differs."""
        self.records.put(at, new)
        self.changed_keys.add(name_of(new))
        if old is None:
            self.counts.add(at, new, 1)
        elif old[COUNTED_AT] != new[COUNTED_AT] or new[FORM_AT] == LARGE_MAP:
            self.counts.add(at, old, -1)
            self.counts.add(at, new, 1)
        old_next_expiry_ms = 0
        if old is not None and old[FORM_AT] >= FIRST_LARGE:
            if id_of(old) != id_of(new):
                self.drop(old)
            elif old[FORM_AT] == LARGE_MAP:
                old_next_expiry_ms = LargeMap.of(payload_of(old)).next_expiry_ms
        if new[FORM_AT] == LARGE_MAP:
            self._move_map_entry(old_next_expiry_ms, LargeMap.of(payload_of(new)))
        if new[EXPIRY_AT] != (old[EXPIRY_AT] if old is not None else NEVER):
            self._move_entry(at[:POSITION_BYTES], expiry_of(old) if old is not None else 0, expiry_of(new))

    def delete(self, at: bytes, record: bytes) -> None:
        """Delete a key's record, and drop its rows in other tables."""
        self.changed_keys.add(name_of(record))
        self.drop(record)
        self.orders.delete_all(name_of(record))
        self.counts.add(at, record, -1)
        self.records.delete(at)
        expire_at_ms = expiry_of(record)
        if expire_at_ms:
            self._move_entry(at[:POSITION_BYTES], expire_at_ms, 0)

    def change(self, at: bytes, old: bytes | None, new: bytes | None) -> None:
        """Write a key's record, or delete the old one if `new` is None; count the change if the record differs."""
        if new == old:
            return
        if new is not None:
            self.put(at, old, new)
        elif old is not None:
            self.delete(at, old)
        self.changed += 1

    def drop(self, record: bytes) -> None:
        """Drop a record's rows in other tables: `lmdb.expiry` removes them later, in batches."""
        if record[FORM_AT] < FIRST_LARGE:
            return
        if record[FORM_AT] == LARGE_MAP and (next_expiry_ms := LargeMap.of(payload_of(record)).next_expiry_ms):
            self.txn.delete(expiry_entry(next_expiry_ms, MAP_ENTRY, id_of(record)), db=self.tables.expiry)
        self.txn.put(expiry_entry(0, DROPPED_ENTRY, id_of(record)), b"", db=self.tables.expiry)

    def _move_entry(self, position: bytes, before: int, after: int) -> None:
        """Move a key's entry in the expiry index. The old entry stays if another key of the position needs it."""
        if before and not self.records.expires_at(position, before):
            self.txn.delete(expiry_entry(before, KEY_ENTRY, position), db=self.tables.expiry)
        if after:
            self.txn.put(expiry_entry(after, KEY_ENTRY, position), b"", db=self.tables.expiry)

    def _move_map_entry(self, before: int, large: LargeMap) -> None:
        """Move a large map's entry in the expiry index."""
        if before == large.next_expiry_ms:
            return
        if before:
            self.txn.delete(expiry_entry(before, MAP_ENTRY, large.prefix), db=self.tables.expiry)
        if large.next_expiry_ms:
            self.txn.put(expiry_entry(large.next_expiry_ms, MAP_ENTRY, large.prefix), b"", db=self.tables.expiry)

    def item_names(self, prefix: bytes) -> set[bytes]:
        """Return the names of all fields of a large map, or of all members of a large set."""
        names = set()
        with self.txn.cursor(db=self.tables.fields) as cursor:
            if cursor.set_range(prefix):
                for at, item in checked_rows(cursor):
                    if not at.startswith(prefix):
                        break
                    names.add(name_of(item))
        return names

    def report(self, key: bytes, *events: KeyEvent) -> None:
        """Record events of a key, if events are recorded."""
        if self.events is not None:
            self.events.add(key, bytes(events))


class WrittenState(NamedTuple):
    """The facts of a state that a write transaction needs.

    Args:
        is_replaced: The epoch has the state's full content.
    """

    number: int
    kind: Kind
    is_replaced: bool
    length_max: int | None
    reduction: Reduction | None
    row_order: RowOrder | None
    writer: KindWriter

    @property
    def folds(self) -> bool:
        """Whether the changes of the state are folded into its stored values."""
        return self.reduction is not None or self.row_order is not None


class KindWriter(ABC):
    """Writes the keys of one kind of state."""

    def __init__(self, keys: KeyWriter) -> None:
        self._keys = keys

    @abstractmethod
    def apply(
        self,
        at: bytes,
        old: bytes | None,
        rows: Iterable[tuple[Any, ...]],
        state: WrittenState,
        *,
        keeps_old: bool,
    ) -> None:
        """Apply the changes of one key, given its store key and its live record.

        Args:
            rows: See `records.rows_in`; without FOLDs.
            keeps_old: False if the changes replace the record's content.
        """
