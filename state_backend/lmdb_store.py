"""The default store: one LMDB environment per job generation, read by any number of processes.

Tables (LMDB databases) of an environment; all numbers in names are big endian, so that byte order is their order:

    keys    position (6)                      -> record of a key
            position (6), ordinal (2)         -> records of further keys with the same position, from ordinal 1 up
    fields  map id (8), field position (6)    -> record of a large map's field; ordinals as above
    maps    map id (8)                        -> the map's key
    blocks  elements of long lists (see `lmdb_lists`)
    expiry  expire_at_ms (8), b"k" or b"f", name of the record's position in `keys` or `fields` -> nothing
    meta    b"applied"                        -> JSON: what the store holds (see `store.Applied`), states, counters
            b"changed", epoch (8)             -> the keys that one of the last epochs changed (see `changed_keys`)

    record  name length u32 | expire_at_ms i64, 0 for never | state number u16 | form u8 | name | payload
            name is the key or the field; little endian; the form tells what the payload is:
    VALUE   the value's bytes
    PACKED  a small map (see `packed_map`)
    LARGE   map id u64 | number of fields u64 | 1 if a field may expire; its fields are records in `fields`
    SHORT   a short list (see `packed_list`)
    LONG    list id u64 | start u64 | end u64; its elements are in `blocks`

A small map becomes large when it outgrows `packed_map.FIELDS_MAX` or `BYTES_MAX`, or when a field gets an expiry.
LMDB runs without fsync: the applied epoch is written in the same transaction as its changes, so that a killed process
loses nothing; a machine that crashed may, so a store made before the machine's last boot is thrown away.
Writemap stays off: with it a full disk is a signal that ends the process, not an error.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from binascii import crc_hqx
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from random import randrange
from typing import Any, NamedTuple
from zlib import crc32

import lmdb
import pyarrow as pa

from state_backend import changed_keys, packed_list, packed_map
from state_backend.changed_keys import EPOCHS_KEPT, ChangedKeys
from state_backend.descriptor import Kind, StateDescriptor
from state_backend.errors import KeyConflictError, StoreError, StoreFullError, WrongKindError
from state_backend.lmdb_lists import ListBlocks, LongList
from state_backend.records import Change, Op, rows_in
from state_backend.slots import (
    HASH_BITS,
    PLACE,
    POSITION_BYTES,
    POSITIONS,
    SLOTS,
    field_position_of,
    place_of,
    places_of,
    slot_of,
)
from state_backend.store import Applied, Entry, EpochChanges, Snapshot, Store, Values

# Address space, not disk: the file grows as it is written (guess; a state server holds a part of a job).
MAP_BYTES_MAX = 1 << 40 if struct.calcsize("P") == 8 else 1 << 30
READERS_MAX = 512
# Beyond what LMDB asks for: a cache line per reader, and a header. LMDB takes a longer file as it is.
LOCK_BYTES = 64 << 10
FORMAT = 2

HEADER = struct.Struct("<IqHB")
read_header = HEADER.unpack_from
LARGE_MAP = struct.Struct("<QQB")
LONG_LIST = struct.Struct("<QQQ")
VALUE, PACKED, LARGE, SHORT, LONG = range(5)
KINDS = (Kind.VALUE, Kind.MAP, Kind.MAP, Kind.LIST, Kind.LIST)
NEVER = bytes(8)  # expire_at_ms as it lies in a record
NAME_AT = HEADER.size
FIELD_POSITION_BYTES = 6
MAP_ID_BYTES = 8

TABLES = (b"keys", b"fields", b"maps", b"blocks", b"expiry", b"meta")
PUT = int(Op.PUT)
# EIO: what LMDB makes of a write that was cut short, and that is how a disk fills up.
NO_ROOM = tuple(map(os.strerror, (ENOSPC, EDQUOT, EFBIG, EIO)))
STATE_AND_KEY = itemgetter(0, 2)  # of a row (see `records.rows_in`)


def _boot_id() -> str:
    """Return what differs after each boot of the machine; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _boot_mark() -> str:
    return f"{FORMAT} {_boot_id()}"


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

    def names(self) -> list[str]:
        """Return the states' names by their numbers."""
        return list(self.state_numbers)


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
        self._map_bytes_max = map_bytes_max
        with self._explained(lmdb.Error, OSError):
            self._env = self._open(readonly=True) if is_reader else self._open_to_write()
            try:
                self.keys, self.fields, self.maps, self.blocks, self.expiry, self.meta = (
                    self._env.open_db(name, create=not is_reader) for name in TABLES
                )
            except lmdb.Error:
                self._env.close()
                raise
        if not is_reader:
            self.clear_stale_readers()

    def _open_to_write(self) -> lmdb.Environment:
        """Open the folder; one that cannot be trusted is made anew."""
        boot = self.path / "boot"
        is_kept = boot.is_file() and boot.read_text() == _boot_mark()
        if is_kept:
            try:
                self._allocate_lock_file()
                return self._open(readonly=False)
            except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError):
                pass
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        self._allocate_lock_file()
        env = self._open(readonly=False)
        boot.write_text(_boot_mark())
        return env

    def _allocate_lock_file(self) -> None:
        """Take the lock file's room on the disk at once: LMDB maps it, and a page without room is a signal (SIGBUS)."""
        lock = self.path / "lock.mdb"
        if not lock.exists():
            try:
                lock.write_bytes(bytes(LOCK_BYTES))
            except OSError:
                lock.unlink(missing_ok=True)
                raise

    def _open(self, *, readonly: bool) -> lmdb.Environment:
        return lmdb.open(
            str(self.path),
            map_size=self._map_bytes_max,
            max_dbs=len(TABLES),
            max_readers=READERS_MAX,
            readonly=readonly,
            sync=False,
            metasync=False,
            readahead=False,
        )

    @contextmanager
    def _explained(self, *kinds: type[Exception]) -> Iterator[None]:
        try:
            yield
        except kinds as error:
            if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or any(text in str(error) for text in NO_ROOM):
                raise StoreFullError(
                    f"no room in the store {self.path}: {error}; make room on the disk, or raise its limit"
                ) from error
            raise StoreError(f"the store {self.path} cannot be used: {error}") from error

    def begin(self) -> lmdb.Transaction[bytes]:
        """Open a read transaction on `keys`; pages it sees are kept until it ends."""
        try:
            return self._env.begin(db=self.keys, buffers=False)
        except lmdb.Error as error:
            raise StoreError(f"the store {self.path} cannot be read: {error}") from error

    @contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction[bytes]]:
        """A write transaction; it commits if the block ends without an error, and then its errors are ours."""
        with self._explained(lmdb.Error), self._env.begin(write=True, buffers=False) as txn:
            yield txn

    def read_meta(self, txn: lmdb.Transaction[bytes]) -> _Meta:
        """Return the `applied` record that a transaction sees."""
        stored = txn.get(b"applied", db=self.meta)
        return _Meta(Applied(self.generation)) if stored is None else _Meta.from_bytes(stored)

    @property
    def applied(self) -> Applied:
        with self.begin() as txn:
            return self.read_meta(txn).applied

    def apply(self, epoch: EpochChanges, states: Sequence[StateDescriptor]) -> int:
        with self._writing() as txn:
            work = _Transaction(self, txn, epoch.clock_ms)
            work.declare(states, epoch.replaces)
            for run in epoch.runs:
                work.apply(run)
            work.remove_untouched(epoch.replaces)
            work.keep_changed_keys(epoch.epoch)
            work.meta.applied = replace(work.meta.applied, epoch=epoch.epoch, term=epoch.term, clock_ms=epoch.clock_ms)
            work.finish()
            return work.changed

    def remove_expired(self, now_ms: int, keys_max: int) -> int:
        if not self._has_expired(now_ms):
            return 0
        with self._writing() as txn:
            work = _Transaction(self, txn, now_ms)
            removed = work.remove_expired(keys_max)
            work.finish()
            return removed

    def _has_expired(self, now_ms: int) -> bool:
        with self.begin() as txn, txn.cursor(db=self.expiry) as cursor:
            return bool(cursor.first()) and int.from_bytes(cursor.key()[:8], "big") <= now_ms

    def snapshot(self, now_ms: int) -> LmdbSnapshot:
        return LmdbSnapshot(self, now_ms)

    def clear_stale_readers(self) -> int:
        """Free the reader slots of processes that died; their old pages would be kept for ever. Returns how many."""
        with self._explained(lmdb.Error):
            return int(self._env.reader_check())

    def used_bytes(self) -> tuple[int, int]:
        """Return how much of the file is in use, and how much is free pages that wait to be used again."""
        tables = (self.keys, self.fields, self.maps, self.blocks, self.expiry, self.meta)
        with self._explained(lmdb.Error), self._env.begin() as txn:
            stats = [txn.stat(table) for table in tables]
            pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
            page_bytes = stats[0]["psize"]
            return pages * page_bytes, (self._env.info()["last_pgno"] + 1 - pages) * page_bytes

    def copy_to(self, path: Path) -> None:
        """Copy the store without its free pages. The folder appears as a whole; the call takes as long as the copy."""
        unfinished = path.with_name("copy")
        shutil.rmtree(unfinished, ignore_errors=True)
        with self._explained(lmdb.Error, OSError):
            try:
                unfinished.mkdir()
                self._env.copy(str(unfinished), compact=True)
                (unfinished / "boot").write_text(_boot_mark())
                unfinished.rename(path)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)

    def close(self) -> None:
        self._env.close()


# A table of records is found by a position and a name. The first record stands at the position itself, further names
# that share it at position + ordinal without a gap: one look-up tells that a position is free, and nearly every look-up
# is one.


def _find(get: Callable[[bytes], bytes | None], position: bytes, name: bytes) -> tuple[bytes, bytes | None]:
    """Return the place of a name and its record; for a missing name the next free place and None."""
    at = position
    ordinal = 0
    while (record := get(at)) is not None:
        if record.startswith(name, NAME_AT) and read_header(record)[0] == len(name):
            return at, record
        ordinal += 1
        at = position + ordinal.to_bytes(2, "big")
    return at, None


class _Table:
    """A table of records in a write transaction: one cursor, which finds the next row of sorted ones on its page."""

    def __init__(self, txn: lmdb.Transaction[bytes], table: Any, position_bytes: int) -> None:
        self._cursor = txn.cursor(db=table)
        self._position_bytes = position_bytes
        self.get: Callable[[bytes], bytes | None] = self._cursor.get
        self.put = self._cursor.put

    def delete(self, at: bytes) -> None:
        """Take a record out and close the gap with the last one of its position."""
        position, ordinal = at[: self._position_bytes], int.from_bytes(at[self._position_bytes :], "big")
        last_at, last = at, None
        while (record := self.get(position + (ordinal + 1).to_bytes(2, "big"))) is not None:
            ordinal += 1
            last_at, last = position + ordinal.to_bytes(2, "big"), record
        if last is not None:
            self.put(at, last)
        if self._cursor.set_key(last_at):
            self._cursor.delete()

    def is_shared(self, position: bytes) -> bool:
        """Tell whether more than one name stands at a position."""
        return self.get(position + b"\0\1") is not None


def _record(name: bytes, payload: bytes, expire_at_ms: int | None, state: int, form: int) -> bytes:
    # 0 stands for never, so a time at or before 1970 becomes the first millisecond after.
    at_ms = 0 if expire_at_ms is None else max(expire_at_ms, 1)
    return HEADER.pack(len(name), at_ms, state, form) + name + payload


def _expiry_of(record: bytes) -> int:
    return int.from_bytes(record[4:12], "little")


def _state_number(record: bytes) -> int:
    return record[12] | record[13] << 8


def _payload(record: bytes) -> bytes:
    return record[NAME_AT + int.from_bytes(record[:4], "little") :]


def _name(record: bytes) -> bytes:
    return record[NAME_AT : NAME_AT + int.from_bytes(record[:4], "little")]


class _State(NamedTuple):
    """A state as a write transaction needs it."""

    number: int
    kind: Kind
    is_replaced: bool
    length_max: int | None


class _Transaction:
    """The changes of one write transaction; `finish` writes the counts that belong to them."""

    def __init__(self, store: LmdbStore, txn: lmdb.Transaction[bytes], now_ms: int) -> None:
        self._store = store
        self._txn = txn
        self._now_ms = now_ms
        self._keys = _Table(txn, store.keys, POSITION_BYTES)
        self._fields = _Table(txn, store.fields, MAP_ID_BYTES + FIELD_POSITION_BYTES)
        self._lists = ListBlocks(txn, store.blocks)
        self.meta = store.read_meta(txn)
        self._counts = {number: self.meta.applied.keys.get(name, 0) for name, number in self.meta.state_numbers.items()}
        self._expiring = self.meta.applied.expiring
        self._states: dict[str, _State] = {}
        self._replaced_numbers: set[int] = set()
        self._touched: set[bytes] = set()
        self._changed_keys = ChangedKeys()
        self.changed = 0

    def keep_changed_keys(self, epoch: int) -> None:
        """Write which keys were changed, and delete what is kept of epochs that are too old for it."""
        put, delete, meta = self._txn.put, self._txn.delete, self._store.meta
        last = self.meta.applied.epoch
        for old in range(max(0, last + 1 - EPOCHS_KEPT), min(last, epoch - EPOCHS_KEPT) + 1):
            delete(_changed_name(old), db=meta)
        put(_changed_name(epoch), self._changed_keys.pack(), db=meta)

    def finish(self) -> None:
        """Write the `applied` record."""
        names = self.meta.names()
        keys = {names[number]: count for number, count in self._counts.items() if count}
        self.meta.applied = replace(self.meta.applied, keys=keys, expiring=self._expiring)
        self._txn.put(b"applied", self.meta.to_bytes(), db=self._store.meta)

    def declare(self, states: Sequence[StateDescriptor], replaces: frozenset[str]) -> None:
        """Learn the states that changes may name, and those whose whole content this epoch brings."""
        for state in states:
            number = self.meta.number_of(state.name)
            self._states[state.name] = _State(number, state.kind, state.name in replaces, state.length_max)
            self._counts.setdefault(number, 0)
        self._replaced_numbers = {self.meta.state_numbers[name] for name in replaces & self.meta.state_numbers.keys()}

    def apply(self, run: pa.RecordBatch) -> None:
        """Apply a run. The changes of one key lie together in it, so that a map is read and written once."""
        find, get, now_ms, touched = _find, self._keys.get, self._now_ms, self._touched
        for (name, key), rows in groupby(rows_in(run), STATE_AND_KEY):
            state = self._states.get(name)
            if state is None:
                raise StoreError(f"a change names the state {name!r}, which is not among {sorted(self._states)}")
            at, record = find(get, place_of(key), key)
            if record is not None:
                _, expire_at_ms, number, form = read_header(record)
                if number != state.number or form == LARGE or 0 < expire_at_ms <= now_ms:
                    at, record = self._make_way(at, record, key, state)
            is_first = True
            if self._replaced_numbers:
                is_first = key not in touched
                touched.add(key)
            if state.kind is Kind.VALUE:
                *_, last = rows
                self._apply_to_value(at, record, last, state.number)
            elif state.kind is Kind.LIST:
                is_kept = not (state.is_replaced and is_first)
                self._apply_to_list(at, record, list(map(Change._make, rows)), state, is_kept=is_kept)
            else:
                changes = list(map(Change._make, rows))
                if state.is_replaced and is_first and record is not None:
                    at, record, changes = self._without_other_fields(at, record, changes)
                self._apply_to_map(at, record, changes, state.number)

    def _make_way(self, at: bytes, record: bytes, key: bytes, state: _State) -> tuple[bytes, bytes | None]:
        """Remove what stands at a key if it is dead, or of another state that this epoch replaces; return the place."""
        if self._is_live(record):
            number = _state_number(record)
            if number == state.number:
                return at, record
            if number not in self._replaced_numbers or key in self._touched:
                raise KeyConflictError(self._conflict(key, number, state.number))
            self.changed += 1
        self._delete_key(at, record)
        return _find(self._keys.get, place_of(key), key)

    def _is_live(self, record: bytes) -> bool:
        if 0 < _expiry_of(record) <= self._now_ms:
            return False
        payload = _payload(record)
        if record[14] != LARGE or not payload[16]:
            return True
        return any(not 0 < _expiry_of(each) <= self._now_ms for each in self._fields_of(payload))

    def _conflict(self, key: bytes, one: int, other: int) -> str:
        names = self.meta.names()
        return (
            f"the states {names[one]!r} and {names[other]!r} both made the key {key[:100]!r}; "
            f"give them key formats that cannot make the same key"
        )

    # Keys ------------------------------------------------------------------------------------------------------

    def _put_key(self, at: bytes, old: bytes | None, new: bytes) -> None:
        """Write a key's record and keep the expiry index and the counts in step."""
        self._keys.put(at, new)
        self._changed_keys.add(_name(new))
        if old is None:
            self._counts[_state_number(new)] += 1
        if new[4:12] != (old[4:12] if old is not None else NEVER):
            before, after = _expiry_of(old) if old is not None else 0, _expiry_of(new)
            self._expiring += (after > 0) - (before > 0)
            self._index_expiry(self._keys, b"k", at[:POSITION_BYTES], before, after)

    def _delete_key(self, at: bytes, record: bytes) -> None:
        self._changed_keys.add(_name(record))
        self._drop_parts(record)
        self._counts[_state_number(record)] -= 1
        expire_at_ms = _expiry_of(record)
        if expire_at_ms:
            self._expiring -= 1
            self._index_expiry(self._keys, b"k", at[:POSITION_BYTES], expire_at_ms, 0)
        self._keys.delete(at)

    def _drop_parts(self, record: bytes) -> None:
        """Delete what of a key lies outside of its record."""
        if record[14] == LARGE:
            self._drop_fields(_payload(record))
        elif record[14] == LONG:
            self._lists.drop(LONG_LIST.unpack(_payload(record))[0])

    def _index_expiry(self, table: _Table, tag: bytes, position: bytes, before: int, after: int) -> None:
        """Move a record's line in the expiry index. A shared position keeps its old line: another name may need it,
        and a line without an expired record is dropped when it comes due."""
        if before and not table.is_shared(position):
            self._txn.delete(before.to_bytes(8, "big") + tag + position, db=self._store.expiry)
        if after:
            self._txn.put(after.to_bytes(8, "big") + tag + position, b"", db=self._store.expiry)

    # Values ----------------------------------------------------------------------------------------------------

    def _apply_to_value(self, at: bytes, old: bytes | None, row: tuple[Any, ...], number: int) -> None:
        _, op, key, _, value, expire_at_ms = row
        if op == PUT:
            new = _record(key, value or b"", expire_at_ms, number, VALUE)
            if new != old:
                self._put_key(at, old, new)
                self.changed += 1
        elif old is not None:
            self._delete_key(at, old)
            self.changed += 1

    # Lists -----------------------------------------------------------------------------------------------------

    def _apply_to_list(
        self, at: bytes, old: bytes | None, changes: list[Change], state: _State, *, is_kept: bool
    ) -> None:
        """Apply the changes of one key: what they append to what is left of the list after the last whole one."""
        appended: list[bytes] = []
        for change in changes:
            if change.op == Op.APPEND:
                appended.append(change.value or b"")
            else:
                is_kept = False
                appended = packed_list.elements(change.value) if change.op == Op.PUT and change.value else []
        last = changes[-1]
        if is_kept and old is not None and old[14] == LONG:
            which = self._lists.append(LongList(*LONG_LIST.unpack(_payload(old))), appended)
            self._put_long_list(at, old, last, which, state)
            return
        elements = [*packed_list.elements(_payload(old)), *appended] if is_kept and old is not None else appended
        elements = elements[-state.length_max :] if state.length_max else elements
        if not elements:
            if old is not None:
                self._delete_key(at, old)
                self.changed += 1
            return
        packed = packed_list.pack(elements)
        if len(elements) > packed_list.ELEMENTS_MAX or len(packed) > packed_list.BYTES_MAX:
            if old is not None:
                self._drop_parts(old)
            list_id = self.meta.next_map_id
            self.meta.next_map_id += 1
            self._put_long_list(at, old, last, self._lists.append(LongList(list_id, 0, 0), elements), state)
            return
        new = _record(last.key, packed, last.expire_at_ms, state.number, SHORT)
        if new != old:
            if old is not None:
                self._drop_parts(old)
            self._put_key(at, old, new)
            self.changed += 1

    def _put_long_list(self, at: bytes, old: bytes | None, last: Change, which: LongList, state: _State) -> None:
        if state.length_max is not None:
            which = self._lists.trim(which, state.length_max)
        new = _record(last.key, LONG_LIST.pack(*which), last.expire_at_ms, state.number, LONG)
        self._put_key(at, old, new)
        self.changed += 1

    # Maps ------------------------------------------------------------------------------------------------------

    def _without_other_fields(
        self, at: bytes, old: bytes, changes: list[Change]
    ) -> tuple[bytes, bytes | None, list[Change]]:
        """Make the changes of a map's fields those of the whole map: what they do not name goes."""
        key = changes[0].key
        if any(change.field is None for change in changes):
            return at, old, changes
        if _expiry_of(old):
            self._delete_key(at, old)
            return *_find(self._keys.get, place_of(key), key), changes
        payload = _payload(old)
        names = map(_name, self._fields_of(payload)) if old[14] == LARGE else dict(packed_map.pairs(payload))
        gone = set(names).difference(change.field for change in changes)
        return at, old, [Change("", Op.DELETE, key, name) for name in gone] + changes

    def _apply_to_map(self, at: bytes, old: bytes | None, changes: list[Change], number: int) -> None:
        """Apply the changes of one key: whole replacements and clears first, then fields on what is left."""
        key = changes[0].key
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
            at, old = self._find_live(key)
        if old is not None and _expiry_of(old) and len(changes) > 1:
            # A map that becomes empty in between loses its expiry: one change after the other.
            for change in changes:
                self._change_fields(*self._find_live(key), {change.field or b"": change}, number)
        else:
            self._change_fields(at, old, {change.field or b"": change for change in changes}, number)

    def _find_live(self, key: bytes) -> tuple[bytes, bytes | None]:
        at, record = _find(self._keys.get, place_of(key), key)
        if record is not None and not self._is_live(record):
            self._delete_key(at, record)
            return _find(self._keys.get, place_of(key), key)
        return at, record

    def _change_fields(self, at: bytes, old: bytes | None, changes: dict[bytes, Change], number: int) -> None:
        if old is not None and old[14] == LARGE:
            self._change_large_map(at, old, changes, _expiry_of(old))
        else:
            self._change_small_map(at, old, changes, number)

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
        puts = {name: Change("", Op.PUT, whole.key, name, value) for name, value in fields.items()}
        if old is not None and old[14] == LARGE:
            gone = set(map(_name, self._fields_of(_payload(old)))) - fields.keys()
            puts |= {name: Change("", Op.DELETE, whole.key, name) for name in gone}
            self._change_large_map(at, old, puts, whole.expire_at_ms)
        else:
            self._make_large_map(at, old, whole.key, whole.expire_at_ms, number, puts)
            self.changed += 1

    def _change_small_map(self, at: bytes, old: bytes | None, changes: dict[bytes, Change], number: int) -> None:
        before = dict(packed_map.pairs(_payload(old))) if old is not None else {}
        fields = dict(before)
        expiring = {name: change for name, change in changes.items() if change.op == Op.PUT and change.expire_at_ms}
        for name, change in changes.items():
            if change.op == Op.PUT:
                fields[name] = change.value or b""
            else:
                fields.pop(name, None)
        self.changed += sum(name in expiring or before.get(name) != fields.get(name) for name in changes)
        key = next(iter(changes.values())).key
        expire_at_ms = _expiry_of(old) or None if old is not None else None
        if not fields:
            if old is not None:
                self._delete_key(at, old)
        elif (
            expiring
            or len(fields) > packed_map.FIELDS_MAX
            or (len(packed := packed_map.pack(fields.items())) > packed_map.BYTES_MAX)
        ):
            puts = {name: Change("", Op.PUT, key, name, value) for name, value in fields.items()} | expiring
            self._make_large_map(at, old, key, expire_at_ms, number, puts)
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
            place, record = self._find_field(map_id, name)
            self._put_field(place, record, _record(name, change.value or b"", change.expire_at_ms, 0, VALUE))
        can_expire = any(change.expire_at_ms is not None for change in puts.values())
        payload = LARGE_MAP.pack(map_id, len(puts), can_expire)
        self._put_key(at, old, _record(key, payload, expire_at_ms, number, LARGE))

    def _change_large_map(self, at: bytes, old: bytes, changes: dict[bytes, Change], expire_at_ms: int | None) -> None:
        map_id, size, can_expire = LARGE_MAP.unpack(_payload(old))
        changed_before = self.changed
        for name, change in changes.items():
            place, record = self._find_field(map_id, name)
            if change.op == Op.PUT:
                new = _record(name, change.value or b"", change.expire_at_ms, 0, VALUE)
                if new == record:
                    continue
                self._put_field(place, record, new)
                size += record is None
                can_expire |= change.expire_at_ms is not None
            elif record is not None:
                self._delete_field(place, record)
                size -= 1
            else:
                continue
            self.changed += 1
        if not size:
            self._delete_key(at, old)
            return
        payload = LARGE_MAP.pack(map_id, size, can_expire)
        new = _record(_name(old), payload, expire_at_ms or None, _state_number(old), LARGE)
        if new != old:
            self._put_key(at, old, new)
        elif self.changed != changed_before:
            self._changed_keys.add(_name(old))

    # Fields of large maps ------------------------------------------------------------------------------------------

    def _find_field(self, map_id: int, name: bytes) -> tuple[bytes, bytes | None]:
        return _find(self._fields.get, _field_place(map_id, name), name)

    def _put_field(self, at: bytes, old: bytes | None, new: bytes) -> None:
        self._fields.put(at, new)
        before, after = _expiry_of(old) if old is not None else 0, _expiry_of(new)
        if before != after:
            self._index_expiry(self._fields, b"f", at[: MAP_ID_BYTES + FIELD_POSITION_BYTES], before, after)

    def _delete_field(self, at: bytes, record: bytes) -> None:
        if expire_at_ms := _expiry_of(record):
            self._index_expiry(self._fields, b"f", at[: MAP_ID_BYTES + FIELD_POSITION_BYTES], expire_at_ms, 0)
        self._fields.delete(at)

    def _fields_of(self, payload: bytes) -> Iterator[bytes]:
        """Iterate over the records of a large map's fields."""
        prefix = payload[:8][::-1]  # little endian in the record, big endian in a place
        with self._txn.cursor(db=self._store.fields) as cursor:
            if cursor.set_range(prefix):
                for at, record in cursor.iternext():
                    if not at.startswith(prefix):
                        return
                    yield record

    def _drop_fields(self, payload: bytes) -> None:
        """Delete a large map's fields. Their lines in the expiry index stay until they come due and find nothing."""
        prefix = payload[:8][::-1]
        with self._txn.cursor(db=self._store.fields) as cursor:
            found = cursor.set_range(prefix)
            while found and cursor.key().startswith(prefix):
                found = cursor.delete() and bool(cursor.key())
        self._txn.delete(prefix, db=self._store.maps)

    # Whole states, expiry ----------------------------------------------------------------------------------------

    def remove_untouched(self, states: frozenset[str]) -> None:
        """Delete every key of the replaced states that this epoch did not name."""
        if not any(self._counts.get(number) for number in self._replaced_numbers):
            return
        gone: list[bytes] = []
        with self._txn.cursor(db=self._store.keys) as cursor:
            for _, record in cursor.iternext():
                if _state_number(record) in self._replaced_numbers and (name := _name(record)) not in self._touched:
                    gone.append(name)
        for name in gone:
            at, found = _find(self._keys.get, place_of(name), name)
            if found is not None:
                self._delete_key(at, found)
                self.changed += 1

    def remove_expired(self, keys_max: int) -> int:
        """Work off lines of the expiry index that are due, oldest first: remove what they stand for."""
        keys_before = sum(self._counts.values())
        done = 0
        with self._txn.cursor(db=self._store.expiry) as cursor:
            while done < keys_max and cursor.first():
                line = cursor.key()
                if int.from_bytes(line[:8], "big") > self._now_ms:
                    break
                cursor.delete()
                done += max(1, self._remove_at(line[8:9], line[9:]))
        removed_keys = keys_before - sum(self._counts.values())
        applied = self.meta.applied
        self.meta.applied = replace(applied, expired_keys=applied.expired_keys + removed_keys)
        return done

    def _remove_at(self, tag: bytes, position: bytes) -> int:
        """Remove the expired records at one position; return how many."""
        table = self._keys if tag == b"k" else self._fields
        removed = 0
        ordinal = 0
        at = position
        while (record := table.get(at)) is not None:
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
        at, record = _find(self._keys.get, place_of(key), key)
        if record is None:
            raise StoreError(f"a field of a missing map stands in the store {self._store.path}")
        self._change_large_map(at, record, {name: Change("", Op.DELETE, key, name)}, _expiry_of(record))


def _field_place(map_id: int, name: bytes) -> bytes:
    return map_id.to_bytes(MAP_ID_BYTES, "big") + field_position_of(name).to_bytes(FIELD_POSITION_BYTES, "big")


def _changed_name(epoch: int) -> bytes:
    return b"changed" + epoch.to_bytes(8, "big")


class LmdbSnapshot(Snapshot):
    """A view of an LMDB store: one read transaction, moved on by `renew`."""

    def __init__(self, store: LmdbStore, now_ms: int) -> None:
        self._store = store
        self._txn = store.begin()
        self._now_ms = now_ms
        self._meta: _Meta | None = None
        self.version = self._txn.id()

    def renew(self, now_ms: int) -> None:
        self._txn.abort()  # py-lmdb keeps the transaction's reader slot and takes it again: 0.2 us for both
        self._txn = self._store.begin()
        self._now_ms = now_ms
        if self.version != (version := self._txn.id()):
            self._meta = None
            self.version = version

    def close(self) -> None:
        self._txn.abort()

    def _known(self) -> _Meta:
        if self._meta is None:
            self._meta = self._store.read_meta(self._txn)
        return self._meta

    @property
    def applied(self) -> Applied:
        return self._known().applied

    def changed_since(self, epoch: int) -> Sequence[bytes] | None:
        epochs = range(epoch + 1, self.applied.epoch + 1)
        if epoch > self.applied.epoch or len(epochs) > EPOCHS_KEPT:
            return None
        get, meta = self._txn.get, self._store.meta
        return changed_keys.unpack_all(get(_changed_name(each), db=meta) for each in epochs)

    def _live(self, key: bytes) -> bytes | None:
        """Return a key's record, or None if it is missing or expired."""
        _, record = _find(self._txn.get, place_of(key), key)
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
        state = self._known().names()[_state_number(record)]
        return Entry(_name(record), state, KINDS[record[14]], _expiry_of(record) or None)

    def value(self, key: bytes) -> bytes | None:
        # The hot path of GET: `place_of` in line, and the record's header read once.
        slot = slot_of(key) if b"{" in key else crc_hqx(key, 0) & 16383
        record = self._txn.get(PLACE.pack(slot, crc32(key)))
        if record is None:
            return None
        length, expire_at_ms, _, form = read_header(record)
        if length != len(key) or not record.startswith(key, NAME_AT):  # another key of the same position
            _, record = _find(self._txn.get, place_of(key), key)
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
        payload = _payload(record)
        if record[14] == PACKED:
            return [packed_map.find(payload, name) for name in names]
        map_id = int.from_bytes(payload[:8], "little")
        return [self._large_field(map_id, name) for name in names]

    def _large_field(self, map_id: int, name: bytes) -> bytes | None:
        _, record = _find(self._get_field, _field_place(map_id, name), name)
        if record is None or 0 < _expiry_of(record) <= self._now_ms:
            return None
        return record[NAME_AT + len(name) :]

    def _get_field(self, at: bytes) -> bytes | None:
        record: bytes | None = self._txn.get(at, db=self._store.fields)
        return record

    def _live_fields(self, record: bytes, cursor_at: int = 0) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Iterate over (place, name, value) of a large map's live fields, from a field position on."""
        return ((at, _name(each), _payload(each)) for at, each in self._live_field_records(record, cursor_at))

    def _live_field_records(self, record: bytes, cursor_at: int = 0) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over (place, record) of a large map's live fields, from a field position on."""
        prefix = _payload(record)[:8][::-1]
        with self._txn.cursor(db=self._store.fields) as cursor:
            if not cursor.set_range(prefix + cursor_at.to_bytes(FIELD_POSITION_BYTES, "big")):
                return
            for at, each in cursor.iternext():
                if not at.startswith(prefix):
                    return
                if not 0 < _expiry_of(each) <= self._now_ms:
                    yield at, each

    def field_expiries(self, key: bytes, names: Sequence[bytes]) -> list[int | None]:
        record = self._map(key)
        if record is None:
            return [None] * len(names)
        payload = _payload(record)
        if record[14] == PACKED:
            return [None if packed_map.find(payload, name) is None else 0 for name in names]
        map_id = int.from_bytes(payload[:8], "little")
        found = (_find(self._get_field, _field_place(map_id, name), name)[1] for name in names)
        return [None if each is None or not self._is_live(each) else _expiry_of(each) for each in found]

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

    def list_size(self, key: bytes) -> int:
        record = self._of_kind(key, Kind.LIST)
        if record is None:
            return 0
        payload = _payload(record)
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
        payload = _payload(record)
        if record[14] == SHORT:
            return iter([(payload, start, stop)])
        which = LongList(*LONG_LIST.unpack(payload))
        return ListBlocks(self._txn, self._store.blocks).parts(which, start, stop)

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

    def changes(self) -> Iterator[Change]:
        names = self._known().names()
        with self._txn.cursor(db=self._store.keys) as records:
            for _, record in records.iternext():
                if self._is_live(record):
                    yield from self._changes_of(record, names[_state_number(record)])

    def _changes_of(self, record: bytes, state: str) -> Iterator[Change]:
        """Return what makes one key; a large map begins with one field where the map itself has an expiry to carry."""
        key, payload, expire_at_ms = _name(record), _payload(record), _expiry_of(record) or None
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
            yield Change(state, Op.PUT, key, _name(each), _payload(each), _expiry_of(each) or None)

    def random_entry(self) -> Entry | None:
        start = randrange(SLOTS) << HASH_BITS | randrange(1 << HASH_BITS)
        for begin in (start, 0):
            _, found = self.scan(begin, 1)
            if found:
                return found[0]
        return None
