"""The default store: one LMDB environment per job generation, read by any number of processes.

Tables (LMDB databases) of an environment; all numbers in names are big endian, so that byte order is their order:

    keys    position (6)                      -> record of a key
            position (6), ordinal (2)         -> records of further keys with the same position, from ordinal 1 up
    fields  map id (8), field position (6)    -> record of a large map's field; ordinals as above
    maps    map id (8)                        -> the map's key
    expiry  expire_at_ms (8), b"k" or b"f", name of the record's position in `keys` or `fields` -> nothing
    meta    b"applied"                        -> JSON: what the store holds (see `store.Applied`), states, counters

    record  name length u32 | expire_at_ms i64, 0 for never | state number u16 | form u8 | name | payload
            name is the key or the field; little endian; the form tells what the payload is:
    VALUE   the value's bytes
    PACKED  a small map (see `packed_map`)
    LARGE   map id u64 | number of fields u64 | 1 if a field may expire; its fields are records in `fields`

A small map becomes large when it outgrows `packed_map.FIELDS_MAX` or `BYTES_MAX`, or when a field gets an expiry.
LMDB runs without fsync: the applied epoch is written in the same transaction as its changes, so that a killed process
loses nothing; a machine that crashed may, so a store made before the machine's last boot is thrown away.
Writemap stays off: with it a full disk is a signal that ends the process, not an error.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from random import randrange
from typing import Any

import lmdb

from state_backend import packed_map
from state_backend.descriptor import Kind, StateDescriptor
from state_backend.errors import KeyConflictError, StoreError, StoreFullError, WrongKindError
from state_backend.records import Change, Op, changes_in
from state_backend.slots import HASH_BITS, POSITION_BYTES, POSITIONS, SLOTS, field_position_of, position_of
from state_backend.store import Applied, Entry, EpochChanges, Snapshot, Store

# Address space, not disk: the file grows as it is written (guess; a state server holds a part of a job).
MAP_BYTES_MAX = 1 << 40 if struct.calcsize("P") == 8 else 1 << 30
READERS_MAX = 512
FORMAT = 1

HEADER = struct.Struct("<IqHB")
LARGE_MAP = struct.Struct("<QQB")
VALUE, PACKED, LARGE = 0, 1, 2
NAME_AT = HEADER.size
FIELD_POSITION_BYTES = 6
MAP_ID_BYTES = 8


def _boot_id() -> str:
    """Return what differs after each boot of the machine; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass
class _Meta:
    """The `applied` record: what the store holds and the numbers its records use."""

    applied: Applied
    state_numbers: dict[str, int] = field(default_factory=dict)
    next_map_id: int = 1

    def to_bytes(self) -> bytes:
        content = asdict(self.applied) | {
            "state_numbers": self.state_numbers,
            "next_map_id": self.next_map_id,
        }
        return json.dumps(content).encode()

    @classmethod
    def from_bytes(cls, stored: bytes) -> _Meta:
        content = json.loads(stored)
        numbers, next_map_id = content.pop("state_numbers"), content.pop("next_map_id")
        return cls(Applied(**content), numbers, next_map_id)

    def number_of(self, state: str) -> int:
        return self.state_numbers.setdefault(state, len(self.state_numbers))


class LmdbStore(Store):
    """A store in a folder. One process opens it to write; others read it with `is_reader=True`.

    LMDB forbids to open one folder twice in a process: the writer's own readers use its `snapshot`.
    """

    def __init__(
        self,
        path: str | Path,
        generation: str,
        *,
        is_reader: bool = False,
        map_bytes_max: int = MAP_BYTES_MAX,
    ) -> None:
        self.path = Path(path)
        self.generation = generation
        if not is_reader:
            self._discard_if_stale()
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._env = lmdb.open(
                str(self.path),
                map_size=map_bytes_max,
                max_dbs=8,
                max_readers=READERS_MAX,
                readonly=is_reader,
                sync=False,
                metasync=False,
                readahead=False,
            )
        except lmdb.Error as error:
            raise StoreError(f"cannot open the store {self.path}: {error}") from error
        create = not is_reader
        self.keys = self._env.open_db(b"keys", create=create)
        self.fields = self._env.open_db(b"fields", create=create)
        self.maps = self._env.open_db(b"maps", create=create)
        self.expiry = self._env.open_db(b"expiry", create=create)
        self.meta = self._env.open_db(b"meta", create=create)
        if not is_reader:
            (self.path / "boot").write_text(f"{FORMAT} {_boot_id()}")
            self.clear_stale_readers()

    def _discard_if_stale(self) -> None:
        """Remove the folder if it was written before the last boot or by another format."""
        boot = self.path / "boot"
        if self.path.exists() and (not boot.exists() or boot.read_text() != f"{FORMAT} {_boot_id()}"):
            shutil.rmtree(self.path)

    def begin(self) -> lmdb.Transaction[bytes]:
        """Open a read transaction on `keys`; pages it sees are kept until it ends."""
        return self._env.begin(db=self.keys, buffers=False)

    def read_meta(self, txn: lmdb.Transaction[bytes]) -> _Meta:
        """Return the `applied` record that a transaction sees."""
        stored = txn.get(b"applied", db=self.meta)
        return _Meta(Applied(self.generation)) if stored is None else _Meta.from_bytes(stored)

    @property
    def applied(self) -> Applied:
        with self._env.begin() as txn:
            return self.read_meta(txn).applied

    def apply(self, epoch: EpochChanges, states: Sequence[StateDescriptor]) -> int:
        kinds = {state.name: state.kind for state in states}
        with self._writing() as txn:
            work = _Transaction(self, txn, epoch.clock_ms)
            for run in epoch.runs:
                work.apply(changes_in(run), kinds, keeps_touched=bool(epoch.replaces))
            work.remove_untouched(epoch.replaces)
            work.meta.applied = replace(work.meta.applied, epoch=epoch.epoch, term=epoch.term, clock_ms=epoch.clock_ms)
            work.finish()
            return work.changed

    def remove_expired(self, now_ms: int, keys_max: int) -> int:
        if not self._has_expired(now_ms):
            return 0
        with self._writing() as txn:
            work = _Transaction(self, txn, now_ms)
            removed = work.remove_expired(keys_max)
            applied = work.meta.applied
            work.meta.applied = replace(applied, expired_keys=applied.expired_keys + removed)
            work.finish()
            return removed

    def _has_expired(self, now_ms: int) -> bool:
        with self._env.begin(db=self.expiry) as txn, txn.cursor() as cursor:
            return bool(cursor.first()) and int.from_bytes(cursor.key()[:8], "big") <= now_ms

    def _writing(self) -> _Writing:
        return _Writing(self)

    def snapshot(self, now_ms: int) -> LmdbSnapshot:
        return LmdbSnapshot(self, now_ms)

    def clear_stale_readers(self) -> int:
        """Free the reader slots of processes that died; their old pages would be kept for ever. Returns how many."""
        return int(self._env.reader_check())

    def close(self) -> None:
        self._env.close()


class _Writing:
    """A write transaction whose errors are ours; it commits if the block ends without one."""

    def __init__(self, store: LmdbStore) -> None:
        self._store = store

    def __enter__(self) -> lmdb.Transaction[bytes]:
        self._txn = self._store._env.begin(write=True, buffers=False)
        return self._txn

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._txn.commit()
            else:
                self._txn.abort()
        except lmdb.Error as failed:
            error = failed
        if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or (
            isinstance(error, (lmdb.Error, OSError)) and "No space left" in str(error)
        ):
            raise StoreFullError(
                f"no room in the store {self._store.path}: {error}; make room on the disk, or raise its limit"
            ) from error
        if isinstance(error, lmdb.Error):
            raise StoreError(f"the store {self._store.path} failed: {error}") from error


class _Chain:
    """A table of records found by a position and a name; names that share a position stand one behind the other.

    The first record stands at the position itself, others at position + ordinal without a gap, so that one look-up
    tells that a position is free, and nearly every look-up is one.
    """

    def __init__(self, txn: lmdb.Transaction[bytes], table: Any) -> None:
        self.txn = txn
        self._table = table

    def get(self, at: bytes) -> bytes | None:
        """Return the record at an exact place."""
        record: bytes | None = self.txn.get(at, db=self._table)
        return record

    def find(self, position: bytes, name: bytes) -> tuple[bytes, bytes | None]:
        """Return the place of a name and its record; for a missing name the next free place and None."""
        at = position
        ordinal = 0
        while (record := self.txn.get(at, db=self._table)) is not None:
            if record.startswith(name, NAME_AT) and int.from_bytes(record[:4], "little") == len(name):
                return at, record
            ordinal += 1
            at = position + ordinal.to_bytes(2, "big")
        return at, None

    def put(self, at: bytes, record: bytes) -> None:
        """Write a record at a place that `find` returned."""
        self.txn.put(at, record, db=self._table)

    def delete(self, at: bytes, position_bytes: int) -> None:
        """Take a record out and close the gap with the last one of its position."""
        position, ordinal = at[:position_bytes], int.from_bytes(at[position_bytes:], "big")
        last_at, last = at, None
        while (record := self.txn.get(position + (ordinal + 1).to_bytes(2, "big"), db=self._table)) is not None:
            ordinal += 1
            last_at, last = position + ordinal.to_bytes(2, "big"), record
        if last is not None:
            self.txn.put(at, last, db=self._table)
        self.txn.delete(last_at, db=self._table)

    def is_shared(self, position: bytes) -> bool:
        """Tell whether more than one name stands at a position."""
        return self.txn.get(position + b"\0\1", db=self._table) is not None


def _record(name: bytes, payload: bytes, expire_at_ms: int | None, state: int, form: int) -> bytes:
    return HEADER.pack(len(name), expire_at_ms or 0, state, form) + name + payload


def _expiry_of(record: bytes) -> int:
    return int.from_bytes(record[4:12], "little", signed=True)


def _payload(record: bytes) -> bytes:
    return record[NAME_AT + int.from_bytes(record[:4], "little") :]


def _name(record: bytes) -> bytes:
    return record[NAME_AT : NAME_AT + int.from_bytes(record[:4], "little")]


class _Transaction:
    """The changes of one write transaction; `finish` writes the counts that belong to them."""

    def __init__(self, store: LmdbStore, txn: lmdb.Transaction[bytes], now_ms: int) -> None:
        self._store = store
        self._txn = txn
        self._now_ms = now_ms
        self._keys = _Chain(txn, store.keys)
        self._fields = _Chain(txn, store.fields)
        self.meta = store.read_meta(txn)
        self._counts = dict(self.meta.applied.keys)
        self._expiring = self.meta.applied.expiring
        self._touched: set[bytes] = set()
        self.changed = 0

    def finish(self) -> None:
        """Write the `applied` record."""
        keys = {state: count for state, count in self._counts.items() if count}
        self.meta.applied = replace(self.meta.applied, keys=keys, expiring=self._expiring)
        self._txn.put(b"applied", self.meta.to_bytes(), db=self._store.meta)

    def apply(self, changes: Iterable[Change], kinds: dict[str, Kind], *, keeps_touched: bool) -> None:
        """Apply a run. The changes of one key lie together in it, so that a map is read and written once."""
        for key, of_key in groupby(changes, key=lambda change: change.key):
            if keeps_touched:
                self._touched.add(key)
            position = position_of(key).to_bytes(POSITION_BYTES, "big")
            at, record = self._keys.find(position, key)
            if record is not None and 0 < _expiry_of(record) <= self._now_ms:
                self._delete_key(at, record)
                at, record = self._keys.find(position, key)
            group = list(of_key)
            state = group[0].state
            number = self.meta.number_of(state)
            for change in group:
                if change.state != state:
                    raise KeyConflictError(self._conflict(key, state, change.state))
            if record is not None and record[12] | record[13] << 8 != number:
                raise KeyConflictError(self._conflict(key, self._state_of(record), state))
            if kinds[state] is Kind.VALUE:
                self._apply_to_value(at, record, group[-1], number)
            else:
                self._apply_to_map(at, record, group, number)

    def _state_of(self, record: bytes) -> str:
        number = record[12] | record[13] << 8
        return next(name for name, each in self.meta.state_numbers.items() if each == number)

    @staticmethod
    def _conflict(key: bytes, one: str, other: str) -> str:
        return (
            f"the states {one!r} and {other!r} both made the key {key[:100]!r}; "
            f"give them key formats that cannot make the same key"
        )

    # Keys ------------------------------------------------------------------------------------------------------

    def _put_key(self, at: bytes, old: bytes | None, new: bytes) -> None:
        """Write a key's record and keep the expiry index and the counts in step."""
        self._keys.put(at, new)
        state = self._state_of(new)
        if old is None:
            self._counts[state] = self._counts.get(state, 0) + 1
        before, after = _expiry_of(old) if old else 0, _expiry_of(new)
        self._expiring += (after > 0) - (before > 0)
        self._index_expiry(self._keys, b"k", at[:POSITION_BYTES], before, after)

    def _delete_key(self, at: bytes, record: bytes) -> None:
        if record[14] == LARGE:
            self._drop_fields(_payload(record))
        state = self._state_of(record)
        self._counts[state] -= 1
        expire_at_ms = _expiry_of(record)
        self._expiring -= expire_at_ms > 0
        self._index_expiry(self._keys, b"k", at[:POSITION_BYTES], expire_at_ms, 0)
        self._keys.delete(at, POSITION_BYTES)

    def _index_expiry(self, chain: _Chain, tag: bytes, position: bytes, before: int, after: int) -> None:
        """Move a record's line in the expiry index. A shared position keeps its old line: another name may need it,
        and a line without an expired record is dropped when it comes due."""
        if before == after:
            return
        if before and not chain.is_shared(position):
            self._txn.delete(before.to_bytes(8, "big") + tag + position, db=self._store.expiry)
        if after:
            self._txn.put(after.to_bytes(8, "big") + tag + position, b"", db=self._store.expiry)

    # Values ----------------------------------------------------------------------------------------------------

    def _apply_to_value(self, at: bytes, old: bytes | None, change: Change, number: int) -> None:
        if change.op != Op.PUT:
            if old is not None:
                self._delete_key(at, old)
                self.changed += 1
            return
        new = _record(change.key, change.value or b"", change.expire_at_ms, number, VALUE)
        if new != old:
            self._put_key(at, old, new)
            self.changed += 1

    # Maps ------------------------------------------------------------------------------------------------------

    def _apply_to_map(self, at: bytes, old: bytes | None, changes: list[Change], number: int) -> None:
        """Apply the changes of one key: whole replacements and clears first, then fields on what is left."""
        last_whole = max((index for index, change in enumerate(changes) if change.field is None), default=-1)
        if last_whole >= 0:
            whole = changes[last_whole]
            if whole.op == Op.PUT and whole.value is not None and packed_map.count(whole.value):
                self._replace_map(at, old, whole, number)
            elif old is not None:
                self._delete_key(at, old)
                self.changed += 1
            changes = changes[last_whole + 1 :]
            if not changes:
                return
            at, old = self._keys.find(at[:POSITION_BYTES], whole.key)
        last_of_field = {change.field or b"": change for change in changes}
        if old is not None and old[14] == LARGE:
            self._change_large_map(at, old, last_of_field)
        else:
            self._change_small_map(at, old, changes[0].key, last_of_field, number)

    def _replace_map(self, at: bytes, old: bytes | None, whole: Change, number: int) -> None:
        packed = whole.value or b""
        if packed_map.count(packed) <= packed_map.FIELDS_MAX and len(packed) <= packed_map.BYTES_MAX:
            new = _record(whole.key, packed, whole.expire_at_ms, number, PACKED)
            if new == old:
                return
            if old is not None and old[14] == LARGE:
                self._drop_fields(_payload(old))
            self._put_key(at, old, new)
            self.changed += 1
            return
        fields = dict(packed_map.pairs(packed))
        puts = {name: Change(whole.state, Op.PUT, whole.key, name, value) for name, value in fields.items()}
        if old is not None and old[14] == LARGE and _expiry_of(old) == (whole.expire_at_ms or 0):
            map_id = _payload(old)[:8]
            gone = {name for name, _, _ in self._fields_of(int.from_bytes(map_id, "little"))} - fields.keys()
            puts |= {name: Change(whole.state, Op.DELETE, whole.key, name) for name in gone}
            self._change_large_map(at, old, puts)
            return
        if old is not None:
            self._delete_key(at, old)
            at, _ = self._keys.find(at[:POSITION_BYTES], whole.key)
        self._make_large_map(at, None, whole.key, whole.expire_at_ms, number, puts)
        self.changed += 1

    def _change_small_map(
        self, at: bytes, old: bytes | None, key: bytes, changes: dict[bytes, Change], number: int
    ) -> None:
        fields = dict(packed_map.pairs(_payload(old))) if old is not None else {}
        before = dict(fields)
        expiring = [change for change in changes.values() if change.op == Op.PUT and change.expire_at_ms]
        for name, change in changes.items():
            if change.op == Op.PUT:
                fields[name] = change.value or b""
            else:
                fields.pop(name, None)
        self.changed += sum(before.get(name) != fields.get(name) for name in changes)
        expire_at_ms = _expiry_of(old) or None if old is not None else None
        if not fields:
            if old is not None:
                self._delete_key(at, old)
        elif (
            expiring
            or len(fields) > packed_map.FIELDS_MAX
            or (len(packed := packed_map.pack(fields.items())) > packed_map.BYTES_MAX)
        ):
            puts = {name: Change("", Op.PUT, key, name, value) for name, value in fields.items()}
            puts |= {change.field or b"": change for change in expiring}
            self._make_large_map(at, old, key, expire_at_ms, number, puts)
            self.changed += sum(before.get(change.field or b"") == change.value for change in expiring)
        elif fields != before:
            self._put_key(at, old, _record(key, packed, expire_at_ms, number, PACKED))

    def _make_large_map(
        self,
        at: bytes,
        old: bytes | None,
        key: bytes,
        expire_at_ms: int | None,
        number: int,
        puts: dict[bytes, Change],
    ) -> None:
        """Write a map as a record per field, and its key's record over `old`."""
        map_id = self.meta.next_map_id
        self.meta.next_map_id += 1
        self._txn.put(map_id.to_bytes(MAP_ID_BYTES, "big"), key, db=self._store.maps)
        for name, change in puts.items():
            self._put_field(map_id, name, change.value or b"", change.expire_at_ms)
        can_expire = any(change.expire_at_ms for change in puts.values())
        payload = LARGE_MAP.pack(map_id, len(puts), can_expire)
        self._put_key(at, old, _record(key, payload, expire_at_ms, number, LARGE))

    def _change_large_map(self, at: bytes, old: bytes, changes: dict[bytes, Change]) -> None:
        map_id, size, can_expire = LARGE_MAP.unpack(_payload(old))
        for name, change in changes.items():
            place, record = self._fields.find(_field_place(map_id, name), name)
            is_gone = record is None or 0 < _expiry_of(record) <= self._now_ms
            if change.op == Op.PUT:
                new = _record(name, change.value or b"", change.expire_at_ms, 0, VALUE)
                if new == record:
                    continue
                self._put_field(map_id, name, change.value or b"", change.expire_at_ms)
                size += record is None
                can_expire |= bool(change.expire_at_ms)
            else:
                if record is not None:
                    self._delete_field(place, record)
                    size -= 1
                if is_gone:
                    continue
            self.changed += 1
        if not size:
            self._delete_key(at, old)
            return
        number = old[12] | old[13] << 8
        new = _record(_name(old), LARGE_MAP.pack(map_id, size, can_expire), _expiry_of(old), number, LARGE)
        if new != old:
            self._put_key(at, old, new)

    # Fields of large maps ------------------------------------------------------------------------------------------

    def _put_field(self, map_id: int, name: bytes, value: bytes, expire_at_ms: int | None) -> None:
        position = _field_place(map_id, name)
        at, old = self._fields.find(position, name)
        self._fields.put(at, _record(name, value, expire_at_ms, 0, VALUE))
        self._index_expiry(self._fields, b"f", position, _expiry_of(old) if old else 0, expire_at_ms or 0)

    def _delete_field(self, at: bytes, record: bytes) -> None:
        position_bytes = MAP_ID_BYTES + FIELD_POSITION_BYTES
        self._index_expiry(self._fields, b"f", at[:position_bytes], _expiry_of(record), 0)
        self._fields.delete(at, position_bytes)

    def _fields_of(self, map_id: int) -> list[tuple[bytes, bytes, bytes]]:
        """Return (name, place, record) of every field of a map."""
        prefix = map_id.to_bytes(MAP_ID_BYTES, "big")
        with self._txn.cursor(db=self._store.fields) as cursor:
            found = []
            if cursor.set_range(prefix):
                for at, record in cursor.iternext():
                    if not at.startswith(prefix):
                        break
                    found.append((_name(record), at, record))
            return found

    def _drop_fields(self, payload: bytes) -> None:
        """Delete a large map's fields. Their lines in the expiry index stay until they come due and find nothing."""
        prefix = payload[:8][::-1]  # little endian in the record, big endian in a place
        with self._txn.cursor(db=self._store.fields) as cursor:
            while cursor.set_range(prefix) and cursor.key().startswith(prefix):
                cursor.delete()
        self._txn.delete(prefix, db=self._store.maps)

    # Whole states, expiry ----------------------------------------------------------------------------------------

    def remove_untouched(self, states: frozenset[str]) -> None:
        """Delete every key of the replaced states that this epoch did not name."""
        numbers = {self.meta.state_numbers[state] for state in states if state in self.meta.state_numbers}
        if not numbers:
            return
        gone: list[bytes] = []
        with self._txn.cursor(db=self._store.keys) as cursor:
            for _, record in cursor.iternext():
                if record[12] | record[13] << 8 in numbers and (name := _name(record)) not in self._touched:
                    gone.append(name)
        for name in gone:
            at, found = self._keys.find(position_of(name).to_bytes(POSITION_BYTES, "big"), name)
            if found is not None:
                self._delete_key(at, found)
                self.changed += 1

    def remove_expired(self, keys_max: int) -> int:
        """Remove keys and fields whose time has come, oldest first."""
        removed = 0
        with self._txn.cursor(db=self._store.expiry) as cursor:
            while removed < keys_max and cursor.first():
                line = cursor.key()
                if int.from_bytes(line[:8], "big") > self._now_ms:
                    break
                cursor.delete()
                removed += self._remove_at(line[8:9], line[9:])
        return removed

    def _remove_at(self, tag: bytes, position: bytes) -> int:
        """Remove the expired records at one position; return how many."""
        chain = self._keys if tag == b"k" else self._fields
        removed = 0
        ordinal = 0
        at = position
        while (record := chain.get(at)) is not None:
            if 0 < _expiry_of(record) <= self._now_ms:
                if tag == b"k":
                    self._delete_key(at, record)
                else:
                    self._expire_field(position, _name(record))
                removed += 1  # another record now stands here, if there was one behind
            else:
                ordinal += 1
                at = position + ordinal.to_bytes(2, "big")
        return removed

    def _expire_field(self, position: bytes, name: bytes) -> None:
        """Delete one field, its map's count going down with it."""
        key = self._txn.get(position[:MAP_ID_BYTES], db=self._store.maps)
        if key is None:
            raise StoreError(f"a field of an unknown map stands in the store {self._store.path}")
        at, record = self._keys.find(position_of(key).to_bytes(POSITION_BYTES, "big"), key)
        if record is None:
            raise StoreError(f"a field of a missing map stands in the store {self._store.path}")
        self._change_large_map(at, record, {name: Change("", Op.DELETE, key, name)})


def _field_place(map_id: int, name: bytes) -> bytes:
    return map_id.to_bytes(MAP_ID_BYTES, "big") + field_position_of(name).to_bytes(FIELD_POSITION_BYTES, "big")


class LmdbSnapshot(Snapshot):
    """A view of an LMDB store: one read transaction, moved on by `renew`."""

    def __init__(self, store: LmdbStore, now_ms: int) -> None:
        self._store = store
        self._txn = store.begin()
        self._keys = _Chain(self._txn, store.keys)
        self._fields = _Chain(self._txn, store.fields)
        self._now_ms = now_ms
        self._meta: _Meta | None = None

    def renew(self, now_ms: int) -> None:
        self._txn.abort()  # py-lmdb keeps the transaction's reader slot and takes it again: 0.2 us for both
        self._txn = self._keys.txn = self._fields.txn = self._store.begin()
        self._now_ms = now_ms
        self._meta = None

    def close(self) -> None:
        self._txn.abort()

    def _known(self) -> _Meta:
        if self._meta is None:
            self._meta = self._store.read_meta(self._txn)
        return self._meta

    @property
    def applied(self) -> Applied:
        return self._known().applied

    def _live(self, key: bytes) -> bytes | None:
        """Return a key's record, or None if it is missing or expired."""
        _, record = self._keys.find(position_of(key).to_bytes(POSITION_BYTES, "big"), key)
        return record if record is not None and self._is_live(record) else None

    def _is_live(self, record: bytes) -> bool:
        expire_at_ms = _expiry_of(record)
        if 0 < expire_at_ms <= self._now_ms:
            return False
        if record[14] == LARGE and _payload(record)[16]:
            return next(self._live_fields(record), None) is not None
        return True

    def entry(self, key: bytes) -> Entry | None:
        record = self._live(key)
        return None if record is None else self._entry(record)

    def _entry(self, record: bytes) -> Entry:
        number = record[12] | record[13] << 8
        state = next(name for name, each in self._known().state_numbers.items() if each == number)
        kind = Kind.VALUE if record[14] == VALUE else Kind.MAP
        return Entry(_name(record), state, kind, _expiry_of(record) or None)

    def value(self, key: bytes) -> bytes | None:
        record = self._txn.get(position_of(key).to_bytes(POSITION_BYTES, "big"))
        if record is None:
            return None
        if not (record.startswith(key, NAME_AT) and int.from_bytes(record[:4], "little") == len(key)):
            _, record = self._keys.find(position_of(key).to_bytes(POSITION_BYTES, "big"), key)
            if record is None:
                return None
        if record[14] != VALUE:
            if not self._is_live(record):
                return None
            raise WrongKindError(f"{key[:100]!r} holds a map, not a value")
        expire_at_ms = int.from_bytes(record[4:12], "little")
        if 0 < expire_at_ms <= self._now_ms:
            return None
        value: bytes = record[NAME_AT + len(key) :]
        return value

    def _map(self, key: bytes) -> bytes | None:
        """Return the record of a live map, or None."""
        record = self._live(key)
        if record is not None and record[14] == VALUE:
            raise WrongKindError(f"{key[:100]!r} holds a value, not a map")
        return record

    def field(self, key: bytes, name: bytes) -> bytes | None:
        return self.fields(key, (name,))[0]

    def fields(self, key: bytes, names: Sequence[bytes]) -> list[bytes | None]:
        record = self._map(key)
        if record is None:
            return [None] * len(names)
        payload = _payload(record)
        if record[14] == PACKED:
            return [packed_map.find(payload, name) for name in names]
        map_id = int.from_bytes(payload[:8], "little")
        return [self._large_field(map_id, name) for name in names]

    def _large_field(self, map_id: int, name: bytes) -> bytes | None:
        _, record = self._fields.find(_field_place(map_id, name), name)
        if record is None or 0 < _expiry_of(record) <= self._now_ms:
            return None
        return record[NAME_AT + len(name) :]

    def _live_fields(self, record: bytes, cursor_at: int = 0) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Iterate over (place, name, value) of a large map's live fields, from a field position on."""
        prefix = _payload(record)[:8][::-1]
        with self._txn.cursor(db=self._store.fields) as cursor:
            if not cursor.set_range(prefix + cursor_at.to_bytes(FIELD_POSITION_BYTES, "big")):
                return
            for at, each in cursor.iternext():
                if not at.startswith(prefix):
                    return
                if not 0 < _expiry_of(each) <= self._now_ms:
                    yield at, _name(each), _payload(each)

    def map_size(self, key: bytes) -> int:
        record = self._map(key)
        if record is None:
            return 0
        payload = _payload(record)
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
            return packed_map.pairs(_payload(record))
        return ((name, value) for _, name, value in self._live_fields(record))

    def packed_map(self, key: bytes) -> bytes | None:
        record = self._map(key)
        return _payload(record) if record is not None and record[14] == PACKED else None

    def scan_map(self, key: bytes, cursor: int, count: int) -> tuple[int, list[tuple[bytes, bytes]]]:
        record = self._map(key)
        if record is None:
            return 0, []
        if record[14] == PACKED:
            return 0, list(packed_map.pairs(_payload(record)))
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

    def scan(self, cursor: int, count: int) -> tuple[int, list[Entry]]:
        found: list[Entry] = []
        if cursor >= POSITIONS:
            return 0, found
        last = b""
        with self._txn.cursor(db=self._store.keys) as records:
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

    def random_entry(self) -> Entry | None:
        start = randrange(SLOTS) << HASH_BITS | randrange(1 << HASH_BITS)
        for begin in (start, 0):
            _, found = self.scan(begin, 1)
            if found:
                return found[0]
        return None
