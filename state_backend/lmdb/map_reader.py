"""Reads the keys of map states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from state_backend.codec import packed_map
from state_backend.codec.checksums import CHECK_BYTES, CRC_RESIDUE, checksum, damaged
from state_backend.lmdb.item_reader import ItemReader
from state_backend.lmdb.record_format import (
    FIELD_EXPIRY_POSITION_AT,
    FIELD_EXPIRY_TIME_AT,
    FORM_AT,
    ID_BYTES,
    NAME_AT,
    SMALL_MAP,
    VALUE,
    LargeMap,
    expiry_of,
    id_of,
    name_of,
    payload_of,
    read_header,
)
from state_backend.lmdb.record_reader import VISITS_MAX
from state_backend.model.descriptor import Kind
from state_backend.store.store import (
    Value,
)


class MapReader(ItemReader):
    """Reads the keys of map states."""

    def _map(self, key: bytes) -> bytes | None:
        """Return the record of a live map, or None."""
        return self._of_kind(key, Kind.MAP)

    def lazy_fields(self, key: bytes, names: Sequence[bytes]) -> list[Value | None]:
        record = self._map(key)
        if record is None:
            return [None] * len(names)
        payload = payload_of(record)
        if record[FORM_AT] == SMALL_MAP:
            return [packed_map.find(payload, name) for name in names]
        found = self._fields(int.from_bytes(payload[:ID_BYTES], "little"), names)
        now_ms = self._now_ms
        return [
            None if record is None or 0 < expiry_of(record) <= now_ms else self._lazy_field(record) for record in found
        ]

    def _lazy_field(self, record: bytes) -> Value:
        payload = payload_of(record)
        return payload if record[FORM_AT] == VALUE else self._long_value(payload)

    def _live_field_records(self, record: bytes) -> Iterator[bytes]:
        """Iterate over the records of a large map's live fields."""
        for _, each in self._field_records(payload_of(record)):
            if not 0 < expiry_of(each) <= self._now_ms:
                yield each

    def field_expiries(self, key: bytes, names: Sequence[bytes]) -> list[int | None]:
        record = self._map(key)
        if record is None:
            return [None] * len(names)
        payload = payload_of(record)
        if record[FORM_AT] == SMALL_MAP:
            return [None if packed_map.find(payload, name) is None else 0 for name in names]
        found = self._fields(int.from_bytes(payload[:ID_BYTES], "little"), names)
        return [None if each is None or not self._is_live(each) else expiry_of(each) for each in found]

    def map_sizes(self, key: bytes) -> Iterator[int]:
        record = self._map(key)
        if record is None:
            return
        payload = payload_of(record)
        if record[FORM_AT] == SMALL_MAP:
            yield packed_map.count(payload)
            return
        large = LargeMap.of(payload)
        yield large.size
        if large.may_have_expired(self._now_ms):
            expired = self._expired_fields(large)
            while count := sum(1 for _ in islice(expired, VISITS_MAX)):
                yield -count

    def _expired_fields(self, large: LargeMap) -> Iterator[bytes]:
        """Iterate over the records of a large map's fields that have expired, but are not removed yet."""
        with self._txn.cursor(db=self._tables.field_expiry) as field_expiry:
            found = field_expiry.set_range(large.prefix)
            while found and (name := field_expiry.key()).startswith(large.prefix):
                next_expiry_ms = int.from_bytes(name[FIELD_EXPIRY_TIME_AT], "big")
                if next_expiry_ms > self._now_ms:
                    return
                position = large.prefix + name[FIELD_EXPIRY_POSITION_AT]
                ordinal, at = 0, position
                while (record := self._get_field(at)) is not None:
                    if expiry_of(record) == next_expiry_ms:
                        yield record
                    ordinal += 1
                    at = position + ordinal.to_bytes(2, "big")
                found = field_expiry.next()

    def lazy_map_pairs(self, key: bytes) -> Iterator[tuple[bytes, Value]]:
        record = self._map(key)
        if record is None:
            return iter(())
        if record[FORM_AT] == SMALL_MAP:
            return packed_map.pairs(payload_of(record))
        return self._large_map_pairs(id_of(record))

    def _large_map_pairs(self, prefix: bytes) -> Iterator[tuple[bytes, Value]]:
        # The hot path of HGETALL: the record's header is read once.
        now_ms = self._now_ms
        with self._txn.cursor(db=self._tables.fields) as cursor:
            if cursor.set_range(prefix):
                for at, record in cursor.iternext():
                    if not at.startswith(prefix):
                        return
                    if checksum(record) != CRC_RESIDUE:
                        raise damaged()
                    length, expire_at_ms, _, form = read_header(record)
                    if not 0 < expire_at_ms <= now_ms:
                        value_at = NAME_AT + length
                        value = record[value_at:-CHECK_BYTES]
                        yield record[NAME_AT:value_at], value if form == VALUE else self._long_value(value)

    def packed_map(self, key: bytes) -> bytes | None:
        record = self._map(key)
        return payload_of(record) if record is not None and record[FORM_AT] == SMALL_MAP else None

    def scan_map(self, key: bytes, cursor: int, count: int) -> tuple[int, list[tuple[bytes, Value]]]:
        record = self._map(key)
        if record is None:
            return 0, []
        if record[FORM_AT] == SMALL_MAP:
            return 0, list(packed_map.pairs(payload_of(record)))
        next_cursor, fields = self._scan_fields(payload_of(record), cursor, count)
        return next_cursor, [(name_of(field), self._lazy_field(field)) for field in fields]
