"""Events of keys in an LMDB store: the batches of events (see `key_events`), and the events of a changed key.

Rows of the table `meta`. Numbers in names are big endian, so that batches are in order:

    b"events"              -> id (8) | first u64 | next u64 | bytes u64: the stored batches, and their total size
    b"events", serial (8)  -> a batch
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import lmdb

from state_backend.codec import packed_list, packed_map, packed_sorted
from state_backend.codec.checksums import checked, with_checksum
from state_backend.lmdb.record_format import (
    FORM_AT,
    LARGE_MAP,
    LONG_LIST,
    LONG_LIST_PAYLOAD,
    SCORE,
    SHORT_LIST,
    SMALL_MAP,
    SMALL_SET,
    SMALL_SORTED_SET,
    LargeMap,
    expiry_of,
    field_store_key,
    find,
    payload_of,
)
from state_backend.model.descriptor import Kind
from state_backend.model.records import Op
from state_backend.store.key_events import KeyEvent, StoredEventBatches, pack

# About the size of a key's events in a batch, without the key.
EVENT_OVERHEAD_BYTES = 6

# Indexes in a row (see `records.rows_in`).
OP_AT, FIELD_AT, VALUE_AT = 1, 3, 4

EVENTS = b"events"
BATCHES = struct.Struct("<8sQQQ")


def stored_event_batches_of(stored: bytes | None) -> StoredEventBatches | None:
    """Read the row that lists the stored batches; None if events are not recorded."""
    return None if stored is None else StoredEventBatches(*BATCHES.unpack(checked(stored)))


def batch_name(serial: int) -> bytes:
    """Return the name of a batch's row."""
    return EVENTS + serial.to_bytes(8, "big")


class EventWriter:
    """Writes the events of one write transaction, in batches; `finish` writes the last batch."""

    def __init__(
        self, txn: lmdb.Transaction[bytes], table: Any, epoch: int, term: int, batch_bytes: int, events_bytes_max: int
    ) -> None:
        self._txn, self._table = txn, table
        self._epoch, self._term = epoch, term
        self._batch_bytes, self._events_bytes_max = batch_bytes, events_bytes_max
        self._batches = stored_event_batches_of(txn.get(EVENTS, db=table)) or StoredEventBatches(os.urandom(8))
        self._keys: list[bytes] = []
        self._events: list[bytes] = []
        self._bytes = 0

    def add(self, key: bytes, events: bytes) -> None:
        """Add the events of a key, a byte for each event."""
        self._keys.append(key)
        self._events.append(events)
        self._bytes += len(key) + EVENT_OVERHEAD_BYTES
        if self._bytes >= self._batch_bytes:
            self._write()

    def finish(self) -> None:
        """Write the last batch, and the row that lists the batches."""
        if self._keys:
            self._write()
        self._txn.put(EVENTS, with_checksum(BATCHES.pack(*self._batches)), db=self._table)

    def _write(self) -> None:
        """Write a batch. While all batches together are too large, delete the oldest."""
        packed = with_checksum(pack(self._epoch, self._term, self._keys, self._events))
        self._keys, self._events, self._bytes = [], [], 0
        id_, first, after, size = self._batches
        self._txn.put(batch_name(after), packed, db=self._table)
        after, size = after + 1, size + len(packed)
        while size > self._events_bytes_max and first < after - 1:
            name = batch_name(first)
            size -= len(self._txn.get(name, db=self._table) or b"")
            self._txn.delete(name, db=self._table)
            first += 1
        self._batches = StoredEventBatches(id_, first, after, size)


def delete_event_batches(txn: lmdb.Transaction[bytes], table: Any, batches_max: int) -> bool:
    """Delete up to `batches_max` batches; True if none remains."""
    stored = stored_event_batches_of(txn.get(EVENTS, db=table))
    if stored is None:
        return True
    first = min(stored.first + batches_max, stored.next)
    for serial in range(stored.first, first):
        txn.delete(batch_name(serial), db=table)
    if first == stored.next:
        txn.delete(EVENTS, db=table)
        return True
    txn.put(EVENTS, with_checksum(BATCHES.pack(*stored._replace(first=first))), db=table)
    return False


# -- the events of a changed key, derived from its record before the epoch and after it --------------------------------

# The event for added or changed items, and the event for removed items.
CHANGED = {Kind.MAP: KeyEvent.FIELDS_SET, Kind.SET: KeyEvent.MEMBERS_ADDED, Kind.SORTED_SET: KeyEvent.SCORES_SET}
REMOVED = {
    Kind.MAP: KeyEvent.FIELDS_DELETED,
    Kind.SET: KeyEvent.MEMBERS_REMOVED,
    Kind.SORTED_SET: KeyEvent.SCORES_REMOVED,
}


def _members(packed: bytes) -> Iterator[tuple[bytes, bytes]]:
    return ((member, b"") for member in packed_list.elements(packed))


def _scores(packed: bytes) -> Iterator[tuple[bytes, bytes]]:
    return ((member, SCORE.pack(score)) for member, score in packed_sorted.scores_of(packed).items())


UNPACKED = {Kind.MAP: packed_map.pairs, Kind.SET: _members, Kind.SORTED_SET: _scores}
# Functions that return (name, value) of the items of a small map or set.
UNPACKED_BY_FORM = {SMALL_MAP: packed_map.pairs, SMALL_SET: _members, SMALL_SORTED_SET: _scores}

GetItem = Callable[[bytes], bytes | None]


class Items(NamedTuple):
    """Some fields of a map, or members of a set: (value, expire_at_ms) by name."""

    found: Mapping[bytes, tuple[bytes, int]]
    size: int


NO_ITEMS = Items({}, 0)


def items_of(record: bytes | None, names: Sequence[bytes], get: GetItem) -> Items:
    """Return the items of a map or set that have some names; missing ones are left out."""
    if record is None:
        return NO_ITEMS
    form, payload = record[FORM_AT], payload_of(record)
    if form in UNPACKED_BY_FORM:
        found = dict(UNPACKED_BY_FORM[form](payload))
        return Items({name: (found[name], 0) for name in names if name in found}, len(found))
    # The payload of a large map or set begins with its id and its size.
    number, size, *_ = struct.unpack_from("<QQ", payload)
    items = {}
    for name in names:
        _, item = find(get, field_store_key(number, name), name)
        if item is not None:
            items[name] = (payload_of(item), expiry_of(item))
    return Items(items, size)


class KeyBefore(NamedTuple):
    """A key before an epoch changes it.

    Args:
        rows: The epoch's changes of the key (see `records.rows_in`).
        first_events: The events of a stale record that the changes replace (see `stale_events`).
    """

    kind: Kind
    rows: Sequence[tuple[Any, ...]]
    record: bytes | None
    first_events: bytes
    names: Sequence[bytes]
    items: Items


def key_before(
    kind: Kind, rows: Sequence[tuple[Any, ...]], record: bytes | None, first_events: bytes, get: GetItem
) -> KeyBefore:
    """Describe a key that these rows are about to change."""
    if kind not in CHANGED:
        return KeyBefore(kind, rows, record, first_events, (), NO_ITEMS)
    names = dict.fromkeys(row[FIELD_AT] for row in rows if row[FIELD_AT] is not None)
    for _, op, _, field, value, _ in rows:
        if field is None and op == Op.PUT and value:
            names |= dict.fromkeys(name for name, _ in UNPACKED[kind](value))
    return KeyBefore(kind, rows, record, first_events, list(names), items_of(record, list(names), get))


def events_between(was: KeyBefore, record: bytes | None, get: GetItem) -> bytes:
    """Return the events of a key in an epoch, given its record after the epoch.

    The events are in the order in which Redis sends them for commands that make the same changes.
    """
    return was.first_events + bytes(_events(was, record, get))


def _events(was: KeyBefore, record: bytes | None, get: GetItem) -> Iterator[KeyEvent]:
    old = was.record
    if record is None:
        if old is not None:
            if was.kind in REMOVED and was.rows[-1][FIELD_AT] is not None:
                yield REMOVED[was.kind]
            yield KeyEvent.DELETED
        return
    if was.kind is Kind.VALUE:
        if record != old:
            yield from (KeyEvent.NEW,) if old is None else ()
            yield KeyEvent.SET
            yield from (KeyEvent.EXPIRY_SET,) if expiry_of(record) else ()
        return
    if was.kind is Kind.LIST:
        yield from _list_events(was, record)
    else:
        yield from _item_events(was, items_of(record, was.names, get))
    expire_at_ms, old_expire_at_ms = expiry_of(record), 0 if old is None else expiry_of(old)
    if expire_at_ms != old_expire_at_ms:
        yield KeyEvent.EXPIRY_SET if expire_at_ms else KeyEvent.EXPIRY_REMOVED


def _list_events(was: KeyBefore, record: bytes) -> Iterator[KeyEvent]:
    if record == was.record:
        return
    old = was.record
    appended = 0
    for row in was.rows:
        if row[OP_AT] == Op.APPEND:
            appended += 1
        else:
            if old is not None:
                yield KeyEvent.DELETED
            old = None
            appended = packed_list.count(row[VALUE_AT]) if row[OP_AT] == Op.PUT and row[VALUE_AT] else 0
    if old is None:
        yield KeyEvent.NEW
    if appended:
        yield KeyEvent.APPENDED
    if _length(record) < _length(old) + appended:
        yield KeyEvent.TRIMMED


def _length(record: bytes | None) -> int:
    if record is None:
        return 0
    if record[FORM_AT] == SHORT_LIST:
        return packed_list.count(payload_of(record))
    assert record[FORM_AT] == LONG_LIST
    _, start, end = LONG_LIST_PAYLOAD.unpack(payload_of(record))
    return int(end - start)


def _item_events(was: KeyBefore, now: Items) -> Iterator[KeyEvent]:
    then = was.items
    if was.record is None:
        yield KeyEvent.NEW
    if any(then.found.get(name) != item for name, item in now.found.items()):
        yield CHANGED[was.kind]
    if any(
        expire_at_ms and then.found.get(name, (b"", 0))[1] != expire_at_ms
        for name, (_, expire_at_ms) in now.found.items()
    ):
        yield KeyEvent.FIELD_EXPIRY_SET
    if then.size - len(then.found) > now.size - len(now.found) or not then.found.keys() <= now.found.keys():
        yield REMOVED[was.kind]


def stale_events(record: bytes, now_ms: int, is_same_state: bool) -> bytes:
    """Return the events of a stale record, which has expired, or whose state the epoch replaces: it is deleted."""
    if 0 < expiry_of(record) <= now_ms:
        return bytes((KeyEvent.EXPIRED,))
    has_expired = record[FORM_AT] == LARGE_MAP and LargeMap.of(payload_of(record)).may_have_expired(now_ms)
    return (
        bytes((KeyEvent.FIELDS_EXPIRED, KeyEvent.DELETED))
        if has_expired and is_same_state
        else bytes((KeyEvent.DELETED,))
    )
