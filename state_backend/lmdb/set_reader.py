"""Reads the keys of set states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from state_backend.codec import packed_list
from state_backend.lmdb.item_reader import ItemReader
from state_backend.lmdb.record_format import (
    FORM_AT,
    SMALL_SET,
    SMALL_SORTED_SET,
    LargeSet,
    name_of,
    payload_of,
)
from state_backend.model.descriptor import Kind


class SetReader(ItemReader):
    """Reads the keys of set states. Members do not expire one by one, so the record of a large set has its size."""

    def _set(self, key: bytes, kind: Kind) -> tuple[bytes, LargeSet | None]:
        """Return (packed set, None) of a small set, (empty, payload) of a large one, (empty, None) if it is missing."""
        record = self._of_kind(key, kind)
        if record is None:
            return b"", None
        payload = payload_of(record)
        return (payload, None) if record[FORM_AT] in (SMALL_SET, SMALL_SORTED_SET) else (b"", LargeSet.of(payload))

    def set_size(self, key: bytes) -> int:
        packed, large = self._set(key, Kind.SET)
        return large.size if large is not None else packed_list.count(packed)

    def members(self, key: bytes) -> Iterator[bytes]:
        packed, large = self._set(key, Kind.SET)
        if large is None:
            return iter(packed_list.elements(packed) if packed else ())
        return (name_of(each) for _, each in self._field_records(large.pack()))

    def are_members(self, key: bytes, members: Sequence[bytes]) -> list[bool]:
        packed, large = self._set(key, Kind.SET)
        if large is None:
            return [bool(packed) and packed_list.has(packed, member) for member in members]
        return [record is not None for record in self._fields(large.set_id, members)]

    def packed_set(self, key: bytes) -> bytes | None:
        return self._set(key, Kind.SET)[0] or None

    def scan_set(self, key: bytes, cursor: int, count: int) -> tuple[int, list[bytes]]:
        packed, large = self._set(key, Kind.SET)
        if large is None:
            return 0, packed_list.elements(packed) if packed else []
        next_cursor, found = self._scan_fields(large.pack(), cursor, count)
        return next_cursor, list(map(name_of, found))
