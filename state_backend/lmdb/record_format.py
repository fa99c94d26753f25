"""The layout of a store in LMDB: its tables and records, and how a record is found. Other modules write and read them.

A table is a database of the LMDB environment. A row's name is its key in LMDB. Numbers in names are big endian, so that
rows are in the order of the numbers:

    keys          position (6)                          -> the record of a key
                  position (6), ordinal (2)             -> the record of a further key with the same position; ordinals
                                                           begin at 1
    fields        map id (8), field position (6)        -> the record of a large map's field; ordinals as above
                  set id (8), field position (6)        -> the record of a large set's member; its payload is empty, or
                                                           the score (8)
    maps          map id (8)                            -> the large map's key
    field_expiry  map id (8), expire_at_ms (8), field position (6)
                                                        -> nothing; a field at that position expires at that time
    blocks        list id (8), ...                      -> elements of a long list (see `lmdb.lists`)
                  value id (8), number of a piece (8)   -> a piece of a long value
                  set id (8), number of a node (8)      -> a node of a large sorted set (see `lmdb.ranks`)
    expiry        the expiry index; its rows are called entries
                  expire_at_ms (8), b"k", position (6)  -> nothing; a key at that position expires at that time
                  next_expiry_ms (8), b"m", map id (8)  -> nothing; no field of this large map expires before that time
                  next_expiry_ms (8), b"n", map id (8)  -> nothing; the next field of this large map is announced at
                                                           that time; only if the map's b"m" entry was processed (see
                                                           `Meta.announced`)
                  0 (8), b"d", id (8)                   -> nothing; the rows of this id are dropped: no key has them
    meta          b"applied"                            -> JSON: the last epoch and counts (see `store.AppliedEpoch`),
                                                           states, counters
                  b"changed", epoch (8)                 -> the keys that one of the last epochs changed (see
                                                           `changed_keys`)
                  b"events"..                           -> events of keys, while clients subscribe to them (see
                                                           `lmdb.events`)
                  b"expired", batch (8)                 -> the keys that one of the last batches announced, or fields of
                                                           them
                  b"slot", slot (2)                     -> the number of keys of each state (see `SLOT_COUNT`); only if
                                                           the store does not own all slots, or once did not
    orders                                              the orders of values, for the next write (see `order_table`)

A record, little endian. The name is the key, the field or the member:

    name length u32 | expire_at_ms i64, 0 for never | state number u16 | form u8 | name | payload | checksum u32

The form is the kind of the payload:

    VALUE             the value's bytes
    SMALL_MAP         a small map (see `packed_map`)
    SHORT_LIST        a short list (see `packed_list`)
    SMALL_SET         a small set (see `packed_list`), in byte order
    SMALL_SORTED_SET  a small sorted set (see `packed_sorted`)
    LARGE_MAP         map id u64 | fields u64 | expiring fields u64 | next_expiry_ms i64: no field expires before that
                      time (0: no field expires)
    LONG_LIST         list id u64 | start u64 | end u64; the elements are in `blocks`
    LONG_VALUE        a value above `PIECE_BYTES`: value id u64 | length u64; the pieces, of that size except the last,
                      are in `blocks`. So scans and reads of a part copy no full value, and LMDB needs no long run of
                      free pages for it
    LARGE_SET         set id u64 | members u64 | 0 u64
    LARGE_SORTED_SET  set id u64 | members u64 | number of its next node u64

Every value of every table that is not empty ends with its checksum, the CRC-32 of the bytes before (see `checksums`).

A small map becomes large when it exceeds `packed_map.FIELDS_MAX` or `BYTES_MAX`, or when a field gets an expiry. When a
key's record is deleted, its rows in other tables stay at first, because there may be millions. They get an entry in the
expiry index, and are removed in batches as expired keys are. Ids are never reused.
"""

from __future__ import annotations

import json
import struct
from binascii import crc_hqx
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple
from zlib import crc32

import lmdb

from state_backend.codec.checksums import CHECK_BYTES, CRC_RESIDUE, checked, checksum, damaged, with_checksum
from state_backend.model.descriptor import Kind
from state_backend.model.errors import StoreDamagedError
from state_backend.model.slot_set import SlotSet
from state_backend.model.slots import HASH_BITS, POSITION_BYTES
from state_backend.store.slot_ownership import SlotOwnership
from state_backend.store.store import AppliedEpoch

# The version of this layout. A store of another version is rebuilt.
FORMAT = 10

HEADER = struct.Struct("<IqHB")
read_header = HEADER.unpack_from
LARGE_MAP_PAYLOAD = struct.Struct("<QQQq")
LONG_LIST_PAYLOAD = struct.Struct("<QQQ")
LONG_VALUE_PAYLOAD = struct.Struct("<QQ")
LARGE_SET_PAYLOAD = struct.Struct("<QQQ")
SCORE = struct.Struct("<d")
# The id of a map or set and a field's position (see `slots.field_hash_position`).
FIELD_STORE_KEY = struct.Struct(">QIH")
# The forms of records, in two groups of five: records of the second group have rows in other tables, whose names begin
# with the id that the payload begins with.
VALUE, SMALL_MAP, SHORT_LIST, SMALL_SET, SMALL_SORTED_SET = range(5)
LARGE_MAP, LONG_LIST, LONG_VALUE, LARGE_SET, LARGE_SORTED_SET = range(5, 10)
FIRST_LARGE = LARGE_MAP
# The kind of each form.
KINDS = (
    Kind.VALUE,
    Kind.MAP,
    Kind.LIST,
    Kind.SET,
    Kind.SORTED_SET,
    Kind.MAP,
    Kind.LIST,
    Kind.VALUE,
    Kind.SET,
    Kind.SORTED_SET,
)
# Offsets in a record.
EXPIRY_AT, STATE_AT, FORM_AT, NAME_AT = slice(4, 12), slice(12, 14), 14, HEADER.size
COUNTED_AT = slice(4, NAME_AT)  # the parts that the counts depend on: expiry, state and form
NEVER = bytes(8)  # expire_at_ms as a record has it
FIELD_POSITION_BYTES = 6
ID_BYTES = 8
SLOT_BYTES = 2
# Offsets in the names of rows, of `field_expiry` and of `expiry`.
FIELD_EXPIRY_TIME_AT, FIELD_EXPIRY_POSITION_AT = slice(ID_BYTES, ID_BYTES + 8), slice(ID_BYTES + 8, None)
ENTRY_TIME_AT, ENTRY_TAG_AT, ENTRY_NAME_AT = slice(0, 8), slice(8, 9), slice(9, None)
# Sixteen of LMDB's pages without their header and the checksum. Reading a piece takes some 30 us (measured).
PIECE_BYTES = (64 << 10) - 16 - CHECK_BYTES

# A state's number and the number of its keys in a slot; or one of the two below and the number of such keys.
SLOT_COUNT = struct.Struct("<Iq")
EXPIRING, EXPIRING_MAPS = 1 << 16, (1 << 16) + 1

# Tags of entries of the expiry index. Entries of the same time are processed in this order.
DROPPED_ENTRY, KEY_ENTRY, MAP_ENTRY, FIELD_ENTRY = b"d", b"k", b"m", b"n"

TABLES = (b"keys", b"fields", b"maps", b"field_expiry", b"blocks", b"expiry", b"meta", b"orders")


class Tables(NamedTuple):
    """The open tables of an environment, in the order of `TABLES`."""

    keys: Any
    fields: Any
    maps: Any
    field_expiry: Any
    blocks: Any
    expiry: Any
    meta: Any
    orders: Any


@dataclass
class Meta:
    """The `applied` record: the store's epoch and counts, and the numbers that its records use.

    announced: the last entry of the expiry index that was announced. The keys of this entry and of all entries before
        it are in no count, and clients were notified of them, whether or not the keys are removed yet.
    slot_ownership: None if the store has always owned all slots; then no keys are counted by slot.
    """

    applied: AppliedEpoch
    state_numbers: dict[str, int] = field(default_factory=dict)
    next_id: int = 1
    announced: bytes = b""
    slot_ownership: SlotOwnership | None = None

    def to_bytes(self) -> bytes:
        content = vars(self.applied) | {
            "state_numbers": self.state_numbers,
            "next_id": self.next_id,
            "announced": self.announced.hex(),
        }
        if self.slot_ownership is not None:
            content["slots"] = self.slot_ownership.to_json()
        return with_checksum(json.dumps(content).encode())

    @classmethod
    def from_bytes(cls, stored: bytes) -> Meta:
        content = json.loads(stored)
        numbers, next_id = content.pop("state_numbers"), content.pop("next_id")
        announced, slots = bytes.fromhex(content.pop("announced")), content.pop("slots", None)
        return cls(AppliedEpoch(**content), numbers, next_id, announced, slots and SlotOwnership.from_json(slots))

    @property
    def announced_ms(self) -> int:
        """The time up to which expired keys were announced."""
        return int.from_bytes(self.announced[ENTRY_TIME_AT], "big")

    def new_id(self) -> int:
        """Return an id for a new map, list, set or long value."""
        self.next_id += 1
        return self.next_id - 1

    def number_of(self, state: str) -> int:
        return self.state_numbers.setdefault(state, len(self.state_numbers))

    def names(self) -> list[str]:
        """Return the states' names by their numbers."""
        return list(self.state_numbers)


def read_meta(txn: lmdb.Transaction[bytes], tables: Tables, generation: str) -> Meta:
    """Return the `applied` record in a transaction."""
    stored = txn.get(b"applied", db=tables.meta)
    return Meta(AppliedEpoch(generation)) if stored is None else Meta.from_bytes(checked(stored))


# A record is found by its position and its name. The store key of a record is the key of its row: the position for the
# first record of a position, and position + ordinal for further ones. Ordinals have no gap, so one look-up shows that a
# position is free, and nearly all records are found with one look-up.


def find(get: Callable[[bytes], bytes | None], position: bytes, name: bytes) -> tuple[bytes, bytes | None]:
    """Return the store key of a name and its record; for a missing name the next free one and None.

    StoreDamagedError if one of the records at this position is damaged.
    """
    at = position
    ordinal = 0
    while (record := get(at)) is not None:
        if checksum(record) != CRC_RESIDUE:
            raise damaged()
        if record.startswith(name, NAME_AT) and read_header(record)[0] == len(name):
            return at, record
        ordinal += 1
        at = position + ordinal.to_bytes(2, "big")
    return at, None


def ranges_of(slots: SlotSet, position: int) -> Iterator[tuple[int, int]]:
    """Iterate over [first, last) positions of some slots, from a position on."""
    ends = ((first << HASH_BITS, (last + 1) << HASH_BITS) for first, last in slots.ranges)
    return ((max(position, start), end) for start, end in ends if position < end)


def records_of_slots(records: lmdb.Cursor[bytes], slots: SlotSet, position: int = 0) -> Iterator[tuple[bytes, bytes]]:
    """Iterate over (store key, record) of the keys in some slots, from a position on."""
    for start, end in ranges_of(slots, position):
        if records.set_range(start.to_bytes(POSITION_BYTES, "big")):
            end_at = end.to_bytes(POSITION_BYTES, "big")
            for at, record in records.iternext():
                if at >= end_at:
                    break
                if checksum(record) != CRC_RESIDUE:
                    raise damaged()
                yield at, record


def checked_rows(records: lmdb.Cursor[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Iterate over (store key, record) from a cursor's row on; StoreDamagedError for a damaged record."""
    for at, record in records.iternext():
        if checksum(record) != CRC_RESIDUE:
            raise damaged()
        yield at, record


class Table:
    """A table of records in a write transaction. It has one cursor: sorted look-ups often stay on the cursor's page."""

    def __init__(self, txn: lmdb.Transaction[bytes], table: Any, position_bytes: int) -> None:
        self._cursor = txn.cursor(db=table)
        self._position_bytes = position_bytes
        self.get: Callable[[bytes], bytes | None] = self._cursor.get
        self.put = self._cursor.put
        self.put_many = self._cursor.putmulti

    def delete(self, at: bytes) -> None:
        """Delete a record; the last record of the same position moves to its store key."""
        position, ordinal = at[: self._position_bytes], int.from_bytes(at[self._position_bytes :], "big")
        last_at, last = at, None
        while (record := self.get(position + (ordinal + 1).to_bytes(2, "big"))) is not None:
            ordinal += 1
            last_at, last = position + ordinal.to_bytes(2, "big"), record
        if last is not None:
            self.put(at, last)
        if self._cursor.set_key(last_at):
            self._cursor.delete()

    def at(self, position: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over (store key, record) of a position."""
        at, ordinal = position, 0
        while (record := self.get(at)) is not None:
            if checksum(record) != CRC_RESIDUE:
                raise damaged()
            yield at, record
            ordinal += 1
            at = position + ordinal.to_bytes(2, "big")

    def expires_at(self, position: bytes, at_ms: int) -> bool:
        """Return whether one of the records at a position expires at a time."""
        return any(expiry_of(record) == at_ms for _, record in self.at(position))


def make_record(name: bytes, payload: bytes, expire_at_ms: int | None, state: int, form: int) -> bytes:
    # 0 means never, so a time at or before 1970 becomes the first millisecond after it.
    at_ms = 0 if expire_at_ms is None else max(expire_at_ms, 1)
    return with_checksum(HEADER.pack(len(name), at_ms, state, form) + name + payload)


def expiry_of(record: bytes) -> int:
    return int.from_bytes(record[EXPIRY_AT], "little")


def state_number_of(record: bytes) -> int:
    return int.from_bytes(record[STATE_AT], "little")


def payload_of(record: bytes) -> bytes:
    return record[NAME_AT + int.from_bytes(record[:4], "little") : -CHECK_BYTES]


def name_of(record: bytes) -> bytes:
    return record[NAME_AT : NAME_AT + int.from_bytes(record[:4], "little")]


class LargeMap(NamedTuple):
    """The payload of a large map. Its size includes expired fields that are not yet removed."""

    map_id: int
    size: int
    expiring: int
    next_expiry_ms: int

    @classmethod
    def of(cls, payload: bytes) -> LargeMap:
        return cls(*LARGE_MAP_PAYLOAD.unpack(payload))

    def pack(self) -> bytes:
        return LARGE_MAP_PAYLOAD.pack(*self)

    @property
    def prefix(self) -> bytes:
        """The prefix of the names of its rows in `fields` and `field_expiry`."""
        return self.map_id.to_bytes(ID_BYTES, "big")

    def may_have_expired(self, now_ms: int) -> bool:
        """Return whether a field may have expired; if not, `size` is the number of live fields."""
        return 0 < self.next_expiry_ms <= now_ms

    def is_live(self, field_expiry: lmdb.Cursor[bytes], now_ms: int) -> bool:
        """Return whether any field is live, with one look-up in `field_expiry`, however many have expired."""
        if self.expiring < self.size or not self.may_have_expired(now_ms):
            return True
        return field_expiry.set_range(field_expiry_name(self.prefix, now_ms + 1)) and field_expiry.key().startswith(
            self.prefix
        )


class LargeSet(NamedTuple):
    """The payload of a large set, or of a large sorted set."""

    set_id: int
    size: int
    next_node: int

    @classmethod
    def of(cls, payload: bytes) -> LargeSet:
        return cls(*LARGE_SET_PAYLOAD.unpack(payload))

    def pack(self) -> bytes:
        return LARGE_SET_PAYLOAD.pack(*self)

    @property
    def prefix(self) -> bytes:
        """The prefix of the names of its rows: of members and nodes."""
        return self.set_id.to_bytes(ID_BYTES, "big")


def field_expiry_name(prefix: bytes, at_ms: int, position: bytes = b"") -> bytes:
    return prefix + at_ms.to_bytes(8, "big") + position


def expiry_entry(at_ms: int, tag: bytes, name: bytes) -> bytes:
    return at_ms.to_bytes(8, "big") + tag + name


def id_in(payload: bytes) -> bytes:
    """Return the id that a payload begins with, big endian: the prefix of the names of its rows."""
    return payload[:ID_BYTES][::-1]


def id_of(record: bytes) -> bytes:
    """Return the prefix of the names of a record's rows in other tables; empty if it has no such rows."""
    return id_in(payload_of(record)) if record[FORM_AT] >= FIRST_LARGE else b""


def piece_name(value_id: bytes, number: int) -> bytes:
    return value_id + number.to_bytes(8, "big")


def read_piece(txn: lmdb.Transaction[bytes], tables: Tables, value_id: bytes, number: int) -> bytes:
    """Return a piece of a long value; StoreDamagedError if it is missing or damaged."""
    stored = txn.get(piece_name(value_id, number), db=tables.blocks)
    if stored is None:
        raise StoreDamagedError("a piece of a long value is missing in the store; the store is rebuilt from the log")
    return checked(stored)


def field_store_key(map_id: int, name: bytes) -> bytes:
    return FIELD_STORE_KEY.pack(map_id, crc32(name), crc_hqx(name, 0))


def field_store_keys(map_id: int, names: Sequence[bytes]) -> Iterator[bytes]:
    """Return the store keys of several fields of a map, or members of a set. The loops run in C."""
    return map(FIELD_STORE_KEY.pack, repeat(map_id), map(crc32, names), map(crc_hqx, names, repeat(0)))


def changed_name(epoch: int) -> bytes:
    return b"changed" + epoch.to_bytes(8, "big")


def expired_name(expiry_batch: int) -> bytes:
    return b"expired" + expiry_batch.to_bytes(8, "big")


def slot_counts_name(slot: bytes) -> bytes:
    return b"slot" + slot
