"""One write transaction of an LMDB store: an epoch's changes, or the removal of what has expired.

Keeps the expiry index, the counts and the changed keys in step with the records (see `lmdb_layout`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import lmdb
import pyarrow as pa

from state_backend import packed_list, packed_map
from state_backend.changed_keys import EPOCHS_KEPT, ChangedKeys
from state_backend.descriptor import Kind, StateDescriptor
from state_backend.errors import KeyConflictError, StoreError
from state_backend.lmdb_layout import (
    FIELD_POSITION_BYTES,
    LARGE,
    LARGE_MAP,
    LONG,
    LONG_LIST,
    MAP_ID_BYTES,
    NEVER,
    PACKED,
    SHORT,
    VALUE,
    Meta,
    Table,
    Tables,
    changed_name,
    expiry_of,
    field_place,
    find,
    make_record,
    name_of,
    payload_of,
    read_header,
    state_number_of,
)
from state_backend.lmdb_lists import ListBlocks, LongList
from state_backend.records import Change, Op, rows_in
from state_backend.slots import POSITION_BYTES, place_of

PUT = int(Op.PUT)
STATE_AND_KEY = itemgetter(0, 2)  # of a row (see `records.rows_in`)


class _State(NamedTuple):
    """A state as a write transaction needs it."""

    number: int
    kind: Kind
    is_replaced: bool
    length_max: int | None


class LmdbTransaction:
    """The changes of one write transaction; `finish` writes the counts that belong to them."""

    def __init__(self, txn: lmdb.Transaction[bytes], tables: Tables, meta: Meta, now_ms: int) -> None:
        self._txn = txn
        self._tables = tables
        self._now_ms = now_ms
        self._keys = Table(txn, tables.keys, POSITION_BYTES)
        self._fields = Table(txn, tables.fields, MAP_ID_BYTES + FIELD_POSITION_BYTES)
        self._lists = ListBlocks(txn, tables.blocks)
        self.meta = meta
        self._counts = {number: self.meta.applied.keys.get(name, 0) for name, number in self.meta.state_numbers.items()}
        self._expiring = self.meta.applied.expiring
        self._states: dict[str, _State] = {}
        self._replaced_numbers: set[int] = set()
        self._touched: set[bytes] = set()
        self._changed_keys = ChangedKeys()
        self.changed = 0

    def keep_changed_keys(self, epoch: int) -> None:
        """Write which keys were changed, and delete what is kept of epochs that are too old for it."""
        put, delete, meta = self._txn.put, self._txn.delete, self._tables.meta
        last = self.meta.applied.epoch
        for old in range(max(0, last + 1 - EPOCHS_KEPT), min(last, epoch - EPOCHS_KEPT) + 1):
            delete(changed_name(old), db=meta)
        put(changed_name(epoch), self._changed_keys.pack(), db=meta)

    def finish(self) -> None:
        """Write the `applied` record."""
        names = self.meta.names()
        keys = {names[number]: count for number, count in self._counts.items() if count}
        self.meta.applied = replace(self.meta.applied, keys=keys, expiring=self._expiring)
        self._txn.put(b"applied", self.meta.to_bytes(), db=self._tables.meta)

    def declare(self, states: Sequence[StateDescriptor], replaces: frozenset[str]) -> None:
        """Learn the states that changes may name, and those whose whole content this epoch brings."""
        for state in states:
            number = self.meta.number_of(state.name)
            self._states[state.name] = _State(number, state.kind, state.name in replaces, state.length_max)
            self._counts.setdefault(number, 0)
        self._replaced_numbers = {self.meta.state_numbers[name] for name in replaces & self.meta.state_numbers.keys()}

    def apply(self, run: pa.RecordBatch) -> None:
        """Apply a run. The changes of one key lie together in it, so that a map is read and written once."""
        get, now_ms, touched = self._keys.get, self._now_ms, self._touched
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
            number = state_number_of(record)
            if number == state.number:
                return at, record
            if number not in self._replaced_numbers or key in self._touched:
                raise KeyConflictError(self._conflict(key, number, state.number))
            self.changed += 1
        self._delete_key(at, record)
        return find(self._keys.get, place_of(key), key)

    def _is_live(self, record: bytes) -> bool:
        if 0 < expiry_of(record) <= self._now_ms:
            return False
        payload = payload_of(record)
        if record[14] != LARGE or not payload[16]:
            return True
        return any(not 0 < expiry_of(each) <= self._now_ms for each in self._fields_of(payload))

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
        self._changed_keys.add(name_of(new))
        if old is None:
            self._counts[state_number_of(new)] += 1
        if new[4:12] != (old[4:12] if old is not None else NEVER):
            before, after = expiry_of(old) if old is not None else 0, expiry_of(new)
            self._expiring += (after > 0) - (before > 0)
            self._index_expiry(self._keys, b"k", at[:POSITION_BYTES], before, after)

    def _delete_key(self, at: bytes, record: bytes) -> None:
        self._changed_keys.add(name_of(record))
        self._drop_parts(record)
        self._counts[state_number_of(record)] -= 1
        expire_at_ms = expiry_of(record)
        if expire_at_ms:
            self._expiring -= 1
            self._index_expiry(self._keys, b"k", at[:POSITION_BYTES], expire_at_ms, 0)
        self._keys.delete(at)

    def _drop_parts(self, record: bytes) -> None:
        """Delete what of a key lies outside of its record."""
        if record[14] == LARGE:
            self._drop_fields(payload_of(record))
        elif record[14] == LONG:
            self._lists.drop(LONG_LIST.unpack(payload_of(record))[0])

    def _index_expiry(self, table: Table, tag: bytes, position: bytes, before: int, after: int) -> None:
        """Move a record's line in the expiry index. A shared position keeps its old line: another name may need it,
        and a line without an expired record is dropped when it comes due."""
        if before and not table.is_shared(position):
            self._txn.delete(before.to_bytes(8, "big") + tag + position, db=self._tables.expiry)
        if after:
            self._txn.put(after.to_bytes(8, "big") + tag + position, b"", db=self._tables.expiry)

    # Values ----------------------------------------------------------------------------------------------------

    def _apply_to_value(self, at: bytes, old: bytes | None, row: tuple[Any, ...], number: int) -> None:
        _, op, key, _, value, expire_at_ms = row
        if op == PUT:
            new = make_record(key, value or b"", expire_at_ms, number, VALUE)
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
            which = self._lists.append(LongList(*LONG_LIST.unpack(payload_of(old))), appended)
            self._put_long_list(at, old, last, which, state)
            return
        elements = [*packed_list.elements(payload_of(old)), *appended] if is_kept and old is not None else appended
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
        new = make_record(last.key, packed, last.expire_at_ms, state.number, SHORT)
        if new != old:
            if old is not None:
                self._drop_parts(old)
            self._put_key(at, old, new)
            self.changed += 1

    def _put_long_list(self, at: bytes, old: bytes | None, last: Change, which: LongList, state: _State) -> None:
        if state.length_max is not None:
            which = self._lists.trim(which, state.length_max)
        new = make_record(last.key, LONG_LIST.pack(*which), last.expire_at_ms, state.number, LONG)
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
        if expiry_of(old):
            self._delete_key(at, old)
            return *find(self._keys.get, place_of(key), key), changes
        payload = payload_of(old)
        names = map(name_of, self._fields_of(payload)) if old[14] == LARGE else dict(packed_map.pairs(payload))
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
        if old is not None and expiry_of(old) and len(changes) > 1:
            # A map that becomes empty in between loses its expiry: one change after the other.
            for change in changes:
                self._change_fields(*self._find_live(key), {change.field or b"": change}, number)
        else:
            self._change_fields(at, old, {change.field or b"": change for change in changes}, number)

    def _find_live(self, key: bytes) -> tuple[bytes, bytes | None]:
        at, record = find(self._keys.get, place_of(key), key)
        if record is not None and not self._is_live(record):
            self._delete_key(at, record)
            return find(self._keys.get, place_of(key), key)
        return at, record

    def _change_fields(self, at: bytes, old: bytes | None, changes: dict[bytes, Change], number: int) -> None:
        if old is not None and old[14] == LARGE:
            self._change_large_map(at, old, changes, expiry_of(old))
        else:
            self._change_small_map(at, old, changes, number)

    def _replace_map(self, at: bytes, old: bytes | None, whole: Change, number: int) -> None:
        packed = whole.value or b""
        if packed_map.count(packed) <= packed_map.FIELDS_MAX and len(packed) <= packed_map.BYTES_MAX:
            new = make_record(whole.key, packed, whole.expire_at_ms, number, PACKED)
            if new == old:
                return
            if old is not None and old[14] == LARGE:
                self._drop_fields(payload_of(old))
            self._put_key(at, old, new)
            self.changed += 1
            return
        fields = dict(packed_map.pairs(packed))
        puts = {name: Change("", Op.PUT, whole.key, name, value) for name, value in fields.items()}
        if old is not None and old[14] == LARGE:
            gone = set(map(name_of, self._fields_of(payload_of(old)))) - fields.keys()
            puts |= {name: Change("", Op.DELETE, whole.key, name) for name in gone}
            self._change_large_map(at, old, puts, whole.expire_at_ms)
        else:
            self._make_large_map(at, old, whole.key, whole.expire_at_ms, number, puts)
            self.changed += 1

    def _change_small_map(self, at: bytes, old: bytes | None, changes: dict[bytes, Change], number: int) -> None:
        before = dict(packed_map.pairs(payload_of(old))) if old is not None else {}
        fields = dict(before)
        expiring = {name: change for name, change in changes.items() if change.op == Op.PUT and change.expire_at_ms}
        for name, change in changes.items():
            if change.op == Op.PUT:
                fields[name] = change.value or b""
            else:
                fields.pop(name, None)
        self.changed += sum(name in expiring or before.get(name) != fields.get(name) for name in changes)
        key = next(iter(changes.values())).key
        expire_at_ms = expiry_of(old) or None if old is not None else None
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
            self._put_key(at, old, make_record(key, packed, expire_at_ms, number, PACKED))

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
        self._txn.put(map_id.to_bytes(MAP_ID_BYTES, "big"), key, db=self._tables.maps)
        for name, change in puts.items():
            place, record = self._find_field(map_id, name)
            self._put_field(place, record, make_record(name, change.value or b"", change.expire_at_ms, 0, VALUE))
        can_expire = any(change.expire_at_ms is not None for change in puts.values())
        payload = LARGE_MAP.pack(map_id, len(puts), can_expire)
        self._put_key(at, old, make_record(key, payload, expire_at_ms, number, LARGE))

    def _change_large_map(self, at: bytes, old: bytes, changes: dict[bytes, Change], expire_at_ms: int | None) -> None:
        map_id, size, can_expire = LARGE_MAP.unpack(payload_of(old))
        changed_before = self.changed
        for name, change in changes.items():
            place, record = self._find_field(map_id, name)
            if change.op == Op.PUT:
                new = make_record(name, change.value or b"", change.expire_at_ms, 0, VALUE)
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
        new = make_record(name_of(old), payload, expire_at_ms or None, state_number_of(old), LARGE)
        if new != old:
            self._put_key(at, old, new)
        elif self.changed != changed_before:
            self._changed_keys.add(name_of(old))

    # Fields of large maps ------------------------------------------------------------------------------------------

    def _find_field(self, map_id: int, name: bytes) -> tuple[bytes, bytes | None]:
        return find(self._fields.get, field_place(map_id, name), name)

    def _put_field(self, at: bytes, old: bytes | None, new: bytes) -> None:
        self._fields.put(at, new)
        before, after = expiry_of(old) if old is not None else 0, expiry_of(new)
        if before != after:
            self._index_expiry(self._fields, b"f", at[: MAP_ID_BYTES + FIELD_POSITION_BYTES], before, after)

    def _delete_field(self, at: bytes, record: bytes) -> None:
        if expire_at_ms := expiry_of(record):
            self._index_expiry(self._fields, b"f", at[: MAP_ID_BYTES + FIELD_POSITION_BYTES], expire_at_ms, 0)
        self._fields.delete(at)

    def _fields_of(self, payload: bytes) -> Iterator[bytes]:
        """Iterate over the records of a large map's fields."""
        prefix = payload[:8][::-1]  # little endian in the record, big endian in a place
        with self._txn.cursor(db=self._tables.fields) as cursor:
            if cursor.set_range(prefix):
                for at, record in cursor.iternext():
                    if not at.startswith(prefix):
                        return
                    yield record

    def _drop_fields(self, payload: bytes) -> None:
        """Delete a large map's fields. Their lines in the expiry index stay until they come due and find nothing."""
        prefix = payload[:8][::-1]
        with self._txn.cursor(db=self._tables.fields) as cursor:
            found = cursor.set_range(prefix)
            while found and cursor.key().startswith(prefix):
                found = cursor.delete() and bool(cursor.key())
        self._txn.delete(prefix, db=self._tables.maps)

    # Whole states, expiry ----------------------------------------------------------------------------------------

    def remove_untouched(self, states: frozenset[str]) -> None:
        """Delete every key of the replaced states that this epoch did not name."""
        if not any(self._counts.get(number) for number in self._replaced_numbers):
            return
        gone: list[bytes] = []
        with self._txn.cursor(db=self._tables.keys) as cursor:
            for _, record in cursor.iternext():
                if state_number_of(record) in self._replaced_numbers and (name := name_of(record)) not in self._touched:
                    gone.append(name)
        for name in gone:
            at, found = find(self._keys.get, place_of(name), name)
            if found is not None:
                self._delete_key(at, found)
                self.changed += 1

    def remove_expired(self, keys_max: int) -> int:
        """Work off lines of the expiry index that are due, oldest first: remove what they stand for."""
        keys_before = sum(self._counts.values())
        done = 0
        with self._txn.cursor(db=self._tables.expiry) as cursor:
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
            if 0 < expiry_of(record) <= self._now_ms:
                if tag == b"k":
                    self._delete_key(at, record)
                else:
                    self._expire_field(position, name_of(record))
                removed += 1  # another record now stands here, if there was one behind
            else:
                ordinal += 1
                at = position + ordinal.to_bytes(2, "big")
        return removed

    def _expire_field(self, position: bytes, name: bytes) -> None:
        """Delete one field, its map's count going down with it."""
        key = self._txn.get(position[:MAP_ID_BYTES], db=self._tables.maps)
        if key is None:
            raise StoreError("a field of an unknown map stands in the store")
        at, record = find(self._keys.get, place_of(key), key)
        if record is None:
            raise StoreError("a field of a missing map stands in the store")
        self._change_large_map(at, record, {name: Change("", Op.DELETE, key, name)}, expiry_of(record))
