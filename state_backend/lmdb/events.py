"""Keeps what happens to keys in LMDB (see `key_events`), and finds it out.

b"events"              -> id (8) | first u64 | next u64 | bytes u64: which portions there are, and what they take
b"events", serial (8)  -> a portion, big endian in the name so that they are in order
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import lmdb

from state_backend.codec import packed_list, packed_map, packed_sorted
from state_backend.codec.checksums import opened, sealed
from state_backend.lmdb.layout import (
    FEW,
    LARGE,
    LONG,
    LONG_LIST,
    PACKED,
    RANKED,
    SCORE,
    SHORT,
    LargeMap,
    expiry_of,
    field_place,
    find,
    payload_of,
)
from state_backend.model.descriptor import Kind
from state_backend.model.records import Op
from state_backend.store.key_events import Kept, What, pack

# Beside a key's own bytes.
EVENT_OVERHEAD_BYTES = 6

EVENTS = b"events"
KEPT = struct.Struct("<8sQQQ")


def kept_of(stored: bytes | None) -> Kept | None:
    """Return which portions there are; None if none are kept."""
    return None if stored is None else Kept(*KEPT.unpack(opened(stored)))


def portion_name(serial: int) -> bytes:
    """Return the name of a portion in the table."""
    return EVENTS + serial.to_bytes(8, "big")


class KeyEvents:
    """The events of one write transaction; `finish` writes what is left of them."""

    def __init__(
        self, txn: lmdb.Transaction[bytes], table: Any, epoch: int, term: int, portion_bytes: int, kept_bytes_max: int
    ) -> None:
        self._txn, self._table = txn, table
        self._epoch, self._term = epoch, term
        self._portion_bytes, self._kept_bytes_max = portion_bytes, kept_bytes_max
        self._kept = kept_of(txn.get(EVENTS, db=table)) or Kept(os.urandom(8))
        self._keys: list[bytes] = []
        self._whats: list[bytes] = []
        self._bytes = 0

    def add(self, key: bytes, what: bytes) -> None:
        """Note what happened to a key."""
        self._keys.append(key)
        self._whats.append(what)
        self._bytes += len(key) + EVENT_OVERHEAD_BYTES
        if self._bytes >= self._portion_bytes:
            self._write()

    def finish(self) -> None:
        """Write the rest, and let go of the oldest portions if there are too many."""
        if self._keys:
            self._write()
        self._txn.put(EVENTS, sealed(KEPT.pack(*self._kept)), db=self._table)

    def _write(self) -> None:
        packed = sealed(pack(self._epoch, self._term, self._keys, self._whats))
        self._keys, self._whats, self._bytes = [], [], 0
        kept_id, first, after, size = self._kept
        self._txn.put(portion_name(after), packed, db=self._table)
        after, size = after + 1, size + len(packed)
        while size > self._kept_bytes_max and first < after - 1:
            name = portion_name(first)
            size -= len(self._txn.get(name, db=self._table) or b"")
            self._txn.delete(name, db=self._table)
            first += 1
        self._kept = Kept(kept_id, first, after, size)


def forget(txn: lmdb.Transaction[bytes], table: Any, most: int) -> bool:
    """Delete about `most` portions; True if there is nothing left of them."""
    kept = kept_of(txn.get(EVENTS, db=table))
    if kept is None:
        return True
    first = min(kept.first + most, kept.next)
    for serial in range(kept.first, first):
        txn.delete(portion_name(serial), db=table)
    if first == kept.next:
        txn.delete(EVENTS, db=table)
        return True
    txn.put(EVENTS, sealed(KEPT.pack(*kept._replace(first=first))), db=table)
    return False


# What an epoch did to a key is told by how the key was before and how it is after ------------------------------------

# By kind: something came in or changed; something went.
CHANGED = {Kind.MAP: What.FIELDS_SET, Kind.SET: What.MEMBERS_ADDED, Kind.SORTED_SET: What.SCORES_SET}
GONE = {Kind.MAP: What.FIELDS_DELETED, Kind.SET: What.MEMBERS_REMOVED, Kind.SORTED_SET: What.SCORES_REMOVED}


def _members(packed: bytes) -> Iterator[tuple[bytes, bytes]]:
    return ((member, b"") for member in packed_list.elements(packed))


def _scores(packed: bytes) -> Iterator[tuple[bytes, bytes]]:
    return ((member, SCORE.pack(score)) for member, score in packed_sorted.scores_of(packed).items())


PACKED_OF = {Kind.MAP: packed_map.pairs, Kind.SET: _members, Kind.SORTED_SET: _scores}
# Of small ones: what is in them, by name. Large ones have a record for each part; their payload begins with an id and
# how many there are.
NAMED_IN = {PACKED: packed_map.pairs, FEW: _members, RANKED: _scores}

GetPart = Callable[[bytes], bytes | None]


class Inside(NamedTuple):
    """Some parts of a map or a set, by name: what they are, and when they expire; and how many there are in all."""

    parts: Mapping[bytes, tuple[bytes, int]]
    size: int


NOTHING_INSIDE = Inside({}, 0)


def inside(record: bytes | None, names: Sequence[bytes], get: GetPart) -> Inside:
    """Look for some names in a map or a set."""
    if record is None:
        return NOTHING_INSIDE
    form, payload = record[14], payload_of(record)
    if form in NAMED_IN:
        found = dict(NAMED_IN[form](payload))
        return Inside({name: (found[name], 0) for name in names if name in found}, len(found))
    number, size, *_ = struct.unpack_from("<QQ", payload)
    parts = {}
    for name in names:
        _, part = find(get, field_place(number, name), name)
        if part is not None:
            parts[name] = (payload_of(part), expiry_of(part))
    return Inside(parts, size)


class Before(NamedTuple):
    """A key before an epoch changed it. told: what has to be said first, of what stood there and was dead."""

    kind: Kind
    rows: Sequence[tuple[Any, ...]]
    record: bytes | None
    told: bytes
    names: Sequence[bytes]
    inside: Inside


def before(kind: Kind, rows: Sequence[tuple[Any, ...]], record: bytes | None, told: bytes, get: GetPart) -> Before:
    """Look at a key that is about to be changed by these rows (see `records.rows_in`)."""
    if kind not in CHANGED:
        return Before(kind, rows, record, told, (), NOTHING_INSIDE)
    names = dict.fromkeys(row[3] for row in rows if row[3] is not None)
    for _, op, _, field, value, _ in rows:
        if field is None and op == Op.PUT and value:
            names |= dict.fromkeys(name for name, _ in PACKED_OF[kind](value))
    wanted = list(names)
    return Before(kind, rows, record, told, wanted, inside(record, wanted, get))


def what_happened(was: Before, record: bytes | None, get: GetPart) -> bytes:
    """Tell what an epoch did to a key, in the order in which commands that do the same would tell it."""
    return was.told + bytes(_changes(was, record, get))


def _changes(was: Before, record: bytes | None, get: GetPart) -> Iterator[What]:
    old = was.record
    if record is None:
        if old is not None:
            if was.kind in GONE and was.rows[-1][3] is not None:
                yield GONE[was.kind]
            yield What.DELETED
        return
    if was.kind is Kind.VALUE:
        if record != old:
            yield from (What.NEW,) if old is None else ()
            yield What.SET
            yield from (What.EXPIRY_SET,) if expiry_of(record) else ()
        return
    if was.kind is Kind.LIST:
        yield from _list_changes(was, record)
    else:
        yield from _part_changes(was, record, inside(record, was.names, get))
    expires_ms, expired_ms = expiry_of(record), 0 if old is None else expiry_of(old)
    if expires_ms != expired_ms:
        yield What.EXPIRY_SET if expires_ms else What.EXPIRY_REMOVED


def _list_changes(was: Before, record: bytes) -> Iterator[What]:
    if record == was.record:
        return
    old = was.record
    appended = 0
    for row in was.rows:
        if row[1] == Op.APPEND:
            appended += 1
        else:
            if old is not None:
                yield What.DELETED
            old = None
            appended = packed_list.count(row[4]) if row[1] == Op.PUT and row[4] else 0
    if old is None:
        yield What.NEW
    if appended:
        yield What.APPENDED
    if _length(record) < _length(old) + appended:
        yield What.TRIMMED


def _length(record: bytes | None) -> int:
    if record is None:
        return 0
    if record[14] == SHORT:
        return packed_list.count(payload_of(record))
    assert record[14] == LONG
    _, start, end = LONG_LIST.unpack(payload_of(record))
    return int(end - start)


def _part_changes(was: Before, record: bytes, now: Inside) -> Iterator[What]:
    then = was.inside
    if was.record is None:
        yield What.NEW
    if any(then.parts.get(name) != part for name, part in now.parts.items()):
        yield CHANGED[was.kind]
    if any(due_ms and then.parts.get(name, (b"", 0))[1] != due_ms for name, (_, due_ms) in now.parts.items()):
        yield What.FIELD_EXPIRY_SET
    if then.size - len(then.parts) > now.size - len(now.parts) or not then.parts.keys() <= now.parts.keys():
        yield GONE[was.kind]


def dead_events(record: bytes, now_ms: int, is_of_same_state: bool) -> bytes:
    """Tell what becomes of what stands in a new key's way: it has expired, or an epoch replaces its state."""
    if 0 < expiry_of(record) <= now_ms:
        return bytes((What.EXPIRED,))
    has_expired = record[14] == LARGE and LargeMap.of(payload_of(record)).may_have_expired(now_ms)
    return bytes((What.FIELDS_EXPIRED, What.DELETED)) if has_expired and is_of_same_state else bytes((What.DELETED,))
