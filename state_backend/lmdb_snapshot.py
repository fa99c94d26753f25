"""Reading an LMDB store: a view of one epoch, in one read transaction."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from random import randrange
from zlib import crc32

import lmdb

from state_backend import changed_keys, packed_list, packed_map
from state_backend.changed_keys import EPOCHS_KEPT
from state_backend.descriptor import Kind
from state_backend.errors import WrongKindError
from state_backend.lmdb_layout import (
    FIELD_POSITION_BYTES,
    KINDS,
    LARGE,
    LONG,
    LONG_LIST,
    MAP_ID_BYTES,
    NAME_AT,
    PACKED,
    SHORT,
    VALUE,
    Meta,
    Tables,
    changed_name,
    expiry_of,
    field_place,
    find,
    name_of,
    payload_of,
    read_header,
    read_meta,
    state_number_of,
)
from state_backend.lmdb_lists import ListBlocks, LongList
from state_backend.records import Change, Op
from state_backend.slots import HASH_BITS, PLACE, POSITION_BYTES, POSITIONS, SLOTS, place_of, places_of, slot_of
from state_backend.store import Applied, Entry, Snapshot, Values


class LmdbSnapshot(Snapshot):
    """A view of an LMDB store: one read transaction, moved on by `renew`."""

    def __init__(
        self, begin: Callable[[], lmdb.Transaction[bytes]], tables: Tables, generation: str, now_ms: int
    ) -> None:
        self._begin = begin
        self._tables = tables
        self._generation = generation
        self._txn = begin()
        self._now_ms = now_ms
        self._meta: Meta | None = None
        self.version = self._txn.id()

    def renew(self, now_ms: int) -> None:
        self._txn.abort()  # py-lmdb keeps the transaction's reader slot and takes it again: 0.2 us for both
        self._txn = self._begin()
        self._now_ms = now_ms
        if self.version != (version := self._txn.id()):
            self._meta = None
            self.version = version

    def close(self) -> None:
        self._txn.abort()

    def _known(self) -> Meta:
        if self._meta is None:
            self._meta = read_meta(self._txn, self._tables, self._generation)
        return self._meta

    @property
    def applied(self) -> Applied:
        return self._known().applied

    def changed_since(self, epoch: int) -> Sequence[bytes] | None:
        epochs = range(epoch + 1, self.applied.epoch + 1)
        if epoch > self.applied.epoch or len(epochs) > EPOCHS_KEPT:
            return None
        get, meta = self._txn.get, self._tables.meta
        return changed_keys.unpack_all(get(changed_name(each), db=meta) for each in epochs)

    def _live(self, key: bytes) -> bytes | None:
        """Return a key's record, or None if it is missing or expired."""
        _, record = find(self._txn.get, place_of(key), key)
        return record if record is not None and self._is_live(record) else None

    def _is_live(self, record: bytes) -> bool:
        expire_at_ms = expiry_of(record)
        if 0 < expire_at_ms <= self._now_ms:
            return False
        if record[14] == LARGE and payload_of(record)[16]:
            return next(self._live_fields(record), None) is not None
        return True

    def entry(self, key: bytes) -> Entry | None:
        record = self._live(key)
        return None if record is None else self._entry(record)

    def _entry(self, record: bytes) -> Entry:
        state = self._known().names()[state_number_of(record)]
        return Entry(name_of(record), state, KINDS[record[14]], expiry_of(record) or None)

    def value(self, key: bytes) -> bytes | None:
        # The hot path of GET: `place_of` in line, and the record's header read once.
        slot = slot_of(key) if b"{" in key else crc_hqx(key, 0) & 16383
        record = self._txn.get(PLACE.pack(slot, crc32(key)))
        if record is None:
            return None
        length, expire_at_ms, _, form = read_header(record)
        if length != len(key) or not record.startswith(key, NAME_AT):  # another key of the same position
            _, record = find(self._txn.get, place_of(key), key)
            if record is None:
                return None
            length, expire_at_ms, _, form = read_header(record)
        if 0 < expire_at_ms <= self._now_ms:
            return None
        if form != VALUE:
            if not self._is_live(record):
                return None
            raise WrongKindError(f"{key[:100]!r} holds a {KINDS[form]}, not a value")
        value: bytes = record[NAME_AT + length :]
        return value

    def values(self, keys: Sequence[bytes], bytes_max: int) -> Values:
        found: list[bytes | None] = []
        expiring: set[bytes] = set()
        left: set[bytes] = set()
        get, now_ms = self._txn.get, self._now_ms
        for key, place in zip(keys, places_of(keys), strict=True):
            value: bytes | None = get(place)
            if value is not None:
                length, expire_at_ms, _, form = read_header(value)
                if form != VALUE or length != len(key) or not value.startswith(key, NAME_AT):
                    value = None  # another kind, or another key of the same position
                    left.add(key)
                else:
                    value = value[NAME_AT + length :]
                    if expire_at_ms:
                        expiring.add(key)
                        value = value if expire_at_ms > now_ms else None
                    if value is not None and len(value) > bytes_max:
                        value = None
                        left.add(key)
            found.append(value)
        return Values(found, expiring, left)

    def _map(self, key: bytes) -> bytes | None:
        """Return the record of a live map, or None."""
        return self._of_kind(key, Kind.MAP)

    def _of_kind(self, key: bytes, kind: Kind) -> bytes | None:
        record = self._live(key)
        if record is not None and KINDS[record[14]] is not kind:
            raise WrongKindError(f"{key[:100]!r} holds a {KINDS[record[14]]}, not a {kind}")
        return record

    def field(self, key: bytes, name: bytes) -> bytes | None:
        return self.fields(key, (name,))[0]

    def fields(self, key: bytes, names: Sequence[bytes]) -> list[bytes | None]:
        record = self._map(key)
        if record is None:
            return [None] * len(names)
        payload = payload_of(record)
        if record[14] == PACKED:
            return [packed_map.find(payload, name) for name in names]
        map_id = int.from_bytes(payload[:8], "little")
        return [self._large_field(map_id, name) for name in names]

    def _large_field(self, map_id: int, name: bytes) -> bytes | None:
        _, record = find(self._get_field, field_place(map_id, name), name)
        if record is None or 0 < expiry_of(record) <= self._now_ms:
            return None
        return record[NAME_AT + len(name) :]

    def _get_field(self, at: bytes) -> bytes | None:
        record: bytes | None = self._txn.get(at, db=self._tables.fields)
        return record

    def _live_fields(self, record: bytes, cursor_at: int = 0) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Iterate over (place, name, value) of a large map's live fields, from a field position on."""
        return ((at, name_of(each), payload_of(each)) for at, each in self._live_field_records(record, cursor_at))

    def _live_field_records(self, record: bytes, cursor_at: int = 0) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over (place, record) of a large map's live fields, from a field position on."""
        prefix = payload_of(record)[:8][::-1]
        with self._txn.cursor(db=self._tables.fields) as cursor:
            if not cursor.set_range(prefix + cursor_at.to_bytes(FIELD_POSITION_BYTES, "big")):
                return
            for at, each in cursor.iternext():
                if not at.startswith(prefix):
                    return
                if not 0 < expiry_of(each) <= self._now_ms:
                    yield at, each

    def field_expiries(self, key: bytes, names: Sequence[bytes]) -> list[int | None]:
        record = self._map(key)
        if record is None:
            return [None] * len(names)
        payload = payload_of(record)
        if record[14] == PACKED:
            return [None if packed_map.find(payload, name) is None else 0 for name in names]
        map_id = int.from_bytes(payload[:8], "little")
        found = (find(self._get_field, field_place(map_id, name), name)[1] for name in names)
        return [None if each is None or not self._is_live(each) else expiry_of(each) for each in found]

    def map_size(self, key: bytes) -> int:
        record = self._map(key)
        if record is None:
            return 0
        payload = payload_of(record)
        if record[14] == PACKED:
            return packed_map.count(payload)
        if payload[16]:
            return sum(1 for _ in self._live_fields(record))
        return int.from_bytes(payload[8:16], "little")

    def map_pairs(self, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        record = self._map(key)
        if record is None:
            return iter(())
        if record[14] == PACKED:
            return packed_map.pairs(payload_of(record))
        return ((name, value) for _, name, value in self._live_fields(record))

    def packed_map(self, key: bytes) -> bytes | None:
        record = self._map(key)
        return payload_of(record) if record is not None and record[14] == PACKED else None

    def scan_map(self, key: bytes, cursor: int, count: int) -> tuple[int, list[tuple[bytes, bytes]]]:
        record = self._map(key)
        if record is None:
            return 0, []
        if record[14] == PACKED:
            return 0, list(packed_map.pairs(payload_of(record)))
        found: list[tuple[bytes, bytes]] = []
        last = b""
        if cursor >> 8 * FIELD_POSITION_BYTES:
            return 0, []
        for at, name, value in self._live_fields(record, cursor):
            position = at[MAP_ID_BYTES : MAP_ID_BYTES + FIELD_POSITION_BYTES]
            if len(found) >= count and position != last:
                return int.from_bytes(position, "big"), found
            found.append((name, value))
            last = position
        return 0, found

    def list_size(self, key: bytes) -> int:
        record = self._of_kind(key, Kind.LIST)
        if record is None:
            return 0
        payload = payload_of(record)
        return packed_list.count(payload) if record[14] == SHORT else LongList(*LONG_LIST.unpack(payload)).size

    def list_parts(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        return (packed_list.part(*each) for each in self._list_blocks(key, start, stop))

    def list_elements(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        return chain.from_iterable(packed_list.elements(*each) for each in self._list_blocks(key, start, stop))

    def _list_blocks(self, key: bytes, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
        """Iterate over (packed list, first, last + 1 in it) for a range of a list."""
        record = self._of_kind(key, Kind.LIST)
        if record is None:
            return iter(())
        payload = payload_of(record)
        if record[14] == SHORT:
            return iter([(payload, start, stop)])
        which = LongList(*LONG_LIST.unpack(payload))
        return ListBlocks(self._txn, self._tables.blocks).parts(which, start, stop)

    def scan(self, cursor: int, count: int) -> tuple[int, list[Entry]]:
        found: list[Entry] = []
        if cursor >= POSITIONS:
            return 0, found
        last = b""
        with self._txn.cursor(db=self._tables.keys) as records:
            if not records.set_range(cursor.to_bytes(POSITION_BYTES, "big")):
                return 0, found
            for at, record in records.iternext():
                position = at[:POSITION_BYTES]
                if len(found) >= count and position != last:
                    return int.from_bytes(position, "big"), found
                last = position
                if self._is_live(record):
                    found.append(self._entry(record))
        return 0, found

    def changes(self) -> Iterator[Change]:
        names = self._known().names()
        with self._txn.cursor(db=self._tables.keys) as records:
            for _, record in records.iternext():
                if self._is_live(record):
                    yield from self._changes_of(record, names[state_number_of(record)])

    def _changes_of(self, record: bytes, state: str) -> Iterator[Change]:
        """Return what makes one key; a large map begins with one field where the map itself has an expiry to carry."""
        key, payload, expire_at_ms = name_of(record), payload_of(record), expiry_of(record) or None
        if record[14] == LONG:
            for element in self.list_elements(key, 0, self.list_size(key)):
                yield Change(state, Op.APPEND, key, None, element, expire_at_ms)
            return
        if record[14] != LARGE:
            yield Change(state, Op.PUT, key, None, payload, expire_at_ms)
            return
        if expire_at_ms is not None:
            _, name, value = next(self._live_fields(record))
            yield Change(state, Op.PUT, key, None, packed_map.pack([(name, value)]), expire_at_ms)
        for _, each in self._live_field_records(record):
            yield Change(state, Op.PUT, key, name_of(each), payload_of(each), expiry_of(each) or None)

    def random_entry(self) -> Entry | None:
        start = randrange(SLOTS) << HASH_BITS | randrange(1 << HASH_BITS)
        for begin in (start, 0):
            _, found = self.scan(begin, 1)
            if found:
                return found[0]
        return None
