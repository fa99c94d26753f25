"""Writes maps in a write transaction: a small map is one record, a large one has a record for each field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from state_backend.codec import packed_map
from state_backend.codec.checksums import with_checksum
from state_backend.lmdb.key_writer import KeyWriter, KindWriter, WrittenState
from state_backend.lmdb.record_format import (
    FIELD_ENTRY,
    FIELD_EXPIRY_TIME_AT,
    FIELD_POSITION_BYTES,
    FORM_AT,
    ID_BYTES,
    LARGE_MAP,
    LONG_VALUE,
    MAP_ENTRY,
    SMALL_MAP,
    LargeMap,
    expiry_entry,
    expiry_of,
    field_expiry_name,
    field_store_key,
    find,
    id_of,
    make_record,
    name_of,
    payload_of,
    state_number_of,
)
from state_backend.lmdb.value_writer import ValueWriter
from state_backend.model.records import RUN_ROWS_MAX, Change, Op

PUT = int(Op.PUT)


class MapWriter(KindWriter):
    """Writes the keys of map states, and the fields of large maps.

    has_late_field: True once a field is put whose expiry is before the announced time; the caller resets it.
    """

    def __init__(self, keys: KeyWriter, values: ValueWriter) -> None:
        super().__init__(keys)
        self._values = values
        self.has_late_field = False

    def apply(
        self,
        at: bytes,
        old: bytes | None,
        rows: Iterable[tuple[Any, ...]],
        state: WrittenState,
        *,
        keeps_old: bool,
    ) -> None:
        """Apply the changes of one key: the last one that replaces or deletes the map, then the changes of fields."""
        changes = list(map(Change._make, rows))
        if not keeps_old and old is not None:
            at, old, changes = self._without_other_fields(at, old, changes)
        key = changes[0].key
        last_of_key = max((index for index, change in enumerate(changes) if change.field is None), default=-1)
        if last_of_key >= 0:
            change = changes[last_of_key]
            if change.op == Op.PUT and change.value is not None and packed_map.count(change.value):
                self._replace(at, old, change, state.number)
            elif old is not None:
                self._keys.delete(at, old)
                self._keys.changed += 1
            changes = changes[last_of_key + 1 :]
            if not changes:
                return
            at, old = self._keys.find_live(key)
        if old is not None and expiry_of(old) and any(change.op != PUT for change in changes):
            # One change after another, because a map that is empty in between loses its expiry.
            for change in changes:
                self._change_fields(*self._keys.find_live(key), {change.field or b"": change}, state.number)
        else:
            self._change_fields(at, old, {change.field or b"": change for change in changes}, state.number)

    def _without_other_fields(
        self, at: bytes, old: bytes, changes: list[Change]
    ) -> tuple[bytes, bytes | None, list[Change]]:
        """Delete all fields that no change names; return the map's store key, its record, and the changes to apply."""
        key = changes[0].key
        if any(change.field is None for change in changes):
            return at, old, changes
        if expiry_of(old) or _is_huge(old):
            self._keys.delete(at, old)
            return *self._keys.find(key), changes
        deleted = self._field_names(old).difference(change.field for change in changes)
        return at, old, [Change("", Op.DELETE, key, name) for name in deleted] + changes

    def _change_fields(self, at: bytes, old: bytes | None, changes: dict[bytes, Change], number: int) -> None:
        if old is not None and old[FORM_AT] == LARGE_MAP:
            self._change_large(at, old, changes, expiry_of(old))
        else:
            self._change_small(at, old, changes, number)

    def _replace(self, at: bytes, old: bytes | None, change: Change, number: int) -> None:
        """Replace the old map by the packed map that a change puts."""
        packed = change.value or b""
        if packed_map.count(packed) <= packed_map.FIELDS_MAX and len(packed) <= packed_map.BYTES_MAX:
            new = make_record(change.key, packed, change.expire_at_ms, number, SMALL_MAP)
            if new == old:
                return
            self._keys.put(at, old, new)
            self._keys.changed += 1
            return
        fields = dict(packed_map.pairs(packed))
        changes = {name: Change("", Op.PUT, change.key, name, value) for name, value in fields.items()}
        if old is not None and old[FORM_AT] == LARGE_MAP and not _is_huge(old):
            deleted = self._field_names(old) - fields.keys()
            changes |= {name: Change("", Op.DELETE, change.key, name) for name in deleted}
            self._change_large(at, old, changes, change.expire_at_ms)
        else:
            self._make_large(at, old, change.key, change.expire_at_ms, number, changes)
            self._keys.changed += 1

    def _field_names(self, record: bytes) -> set[bytes]:
        """Return the names of all fields."""
        if record[FORM_AT] == LARGE_MAP:
            return self._keys.item_names(id_of(record))
        return {name for name, _ in packed_map.pairs(payload_of(record))}

    def _change_small(self, at: bytes, old: bytes | None, changes: dict[bytes, Change], number: int) -> None:
        before = dict(packed_map.pairs(payload_of(old))) if old is not None else {}
        fields = dict(before)
        expiring = {
            name: change for name, change in changes.items() if change.op == Op.PUT and change.expire_at_ms is not None
        }
        for name, change in changes.items():
            if change.op == Op.PUT:
                fields[name] = change.value or b""
            else:
                fields.pop(name, None)
        self._keys.changed += sum(name in expiring or before.get(name) != fields.get(name) for name in changes)
        key = next(iter(changes.values())).key
        expire_at_ms = expiry_of(old) or None if old is not None else None
        if not fields:
            if old is not None:
                self._keys.delete(at, old)
        elif (
            expiring
            or len(fields) > packed_map.FIELDS_MAX
            or (len(packed := packed_map.pack(fields.items())) > packed_map.BYTES_MAX)
        ):
            puts = {name: Change("", Op.PUT, key, name, value) for name, value in fields.items()} | expiring
            self._make_large(at, old, key, expire_at_ms, number, puts)
        elif fields != before:
            self._keys.put(at, old, make_record(key, packed, expire_at_ms, number, SMALL_MAP))

    # -- large maps ----------------------------------------------------------------------------------------------------

    def _make_large(
        self,
        at: bytes,
        old: bytes | None,
        key: bytes,
        expire_at_ms: int | None,
        number: int,
        puts: dict[bytes, Change],
    ) -> None:
        """Write a record for each field of a new large map, and the key's record over `old`."""
        map_id = self._keys.meta.new_id()
        self._keys.txn.put(map_id.to_bytes(ID_BYTES, "big"), with_checksum(key), db=self._keys.tables.maps)
        large, _ = self._with_fields(LargeMap(map_id, 0, 0, 0), puts)
        self.put_large(at, old, key, expire_at_ms, number, large)

    def _change_large(self, at: bytes, old: bytes, changes: dict[bytes, Change], expire_at_ms: int | None) -> None:
        keys = self._keys
        large, changed = self._with_fields(LargeMap.of(payload_of(old)), changes)
        keys.changed += changed
        if not large.size:
            keys.delete(at, old)
        elif not self.put_large(at, old, name_of(old), expire_at_ms or None, state_number_of(old), large) and changed:
            keys.changed_keys.add(name_of(old))

    def put_large(
        self, at: bytes, old: bytes | None, key: bytes, expire_at_ms: int | None, number: int, large: LargeMap
    ) -> bool:
        """Write a large map's record; False if `old` is the same."""
        self.announce_next(large, self._keys.meta.announced_ms)
        new = make_record(key, large.pack(), expire_at_ms, number, LARGE_MAP)
        if new == old:
            return False
        self._keys.put(at, old, new)
        return True

    def announce_next(self, large: LargeMap, after_ms: int) -> None:
        """Add an entry for the next field that expires after a time, if the map's own entry was announced already."""
        keys = self._keys
        if large.next_expiry_ms and expiry_entry(large.next_expiry_ms, MAP_ENTRY, large.prefix) <= keys.meta.announced:
            name = field_expiry_name(large.prefix, after_ms + 1)
            if keys.field_expiry.set_range(name) and (name_found := keys.field_expiry.key()).startswith(large.prefix):
                at_ms = int.from_bytes(name_found[FIELD_EXPIRY_TIME_AT], "big")
                keys.txn.put(expiry_entry(at_ms, FIELD_ENTRY, large.prefix), b"", db=keys.tables.expiry)

    # -- fields of large maps ------------------------------------------------------------------------------------------

    def _with_fields(self, large: LargeMap, changes: dict[bytes, Change]) -> tuple[LargeMap, int]:
        """Change fields of a large map; return its new payload, and how many fields differ."""
        map_id, size, expiring, next_expiry_ms = large
        changed = 0
        for name, change in changes.items():
            at, record = find(self._keys.fields.get, field_store_key(map_id, name), name)
            if change.op == PUT:
                new = self._values.record(name, change.value or b"", change.expire_at_ms, 0, record)
                if new == record:
                    continue
                self._put_field(at, record, new)
                after = expiry_of(new)
                size += record is None
                expiring += after > 0
                if after and not 0 < next_expiry_ms <= after:
                    next_expiry_ms = after
            elif record is not None:
                self.delete_field(at, record)
                size -= 1
            else:
                continue
            expiring -= record is not None and expiry_of(record) > 0
            changed += 1
        return LargeMap(map_id, size, expiring, next_expiry_ms if expiring else 0), changed

    def _put_field(self, at: bytes, old: bytes | None, new: bytes) -> None:
        self._keys.fields.put(at, new)
        if old is not None and old[FORM_AT] == LONG_VALUE and id_of(old) != id_of(new):
            self._keys.drop(old)
        before, after = expiry_of(old) if old is not None else 0, expiry_of(new)
        if before != after:
            self._move_field_expiry(at, before, after)
            self.has_late_field |= 0 < after <= self._keys.meta.announced_ms

    def delete_field(self, at: bytes, record: bytes) -> None:
        """Delete a field's record and its row in `field_expiry`."""
        self._keys.drop(record)
        self._keys.fields.delete(at)
        if expire_at_ms := expiry_of(record):
            self._move_field_expiry(at, expire_at_ms, 0)

    def _move_field_expiry(self, at: bytes, before: int, after: int) -> None:
        """Move a field's row in `field_expiry`. The old row stays if another field of the position needs it."""
        position = at[: ID_BYTES + FIELD_POSITION_BYTES]
        prefix, position_in_map = position[:ID_BYTES], position[ID_BYTES:]
        if before and not self._keys.fields.expires_at(position, before):
            self._keys.txn.delete(field_expiry_name(prefix, before, position_in_map), db=self._keys.tables.field_expiry)
        if after:
            self._keys.txn.put(
                field_expiry_name(prefix, after, position_in_map), b"", db=self._keys.tables.field_expiry
            )


def _is_huge(record: bytes) -> bool:
    """Return whether a map has too many fields to read all their names into memory, which a replacement would need."""
    return record[FORM_AT] == LARGE_MAP and LargeMap.of(payload_of(record)).size > RUN_ROWS_MAX
