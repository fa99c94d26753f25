"""The rows of the table `fields`: fields of large maps, and members of large sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

from state_backend.codec.checksums import CRC_RESIDUE, checksum, damaged
from state_backend.lmdb.record_format import (
    FIELD_POSITION_BYTES,
    ID_BYTES,
    NAME_AT,
    expiry_of,
    field_store_key,
    field_store_keys,
    find,
    id_in,
    read_header,
)
from state_backend.lmdb.record_reader import VISITED_BYTES_MAX, VISITS_MAX, RecordReader
from state_backend.store.store import (
    FIELD_POSITIONS,
)

# For fewer items, setting up loops in C takes longer than they save (measured).
C_LOOPS_MIN = 4


class ItemReader(RecordReader):
    """Finds and scans the items of large maps and sets."""

    def _fields(self, map_id: int, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the records of some fields of a large map, or members of a large set, live or not; None: missing."""
        if len(names) < C_LOOPS_MIN:
            return [find(self._get_field, field_store_key(map_id, name), name)[1] for name in names]
        get, table = self._txn.get, self._tables.fields
        found = list(map(get, field_store_keys(map_id, names), repeat(None), repeat(table)))
        for index, (record, name) in enumerate(zip(found, names, strict=True)):
            if record is not None and checksum(record) != CRC_RESIDUE:
                raise damaged()
            if record is not None and not (record.startswith(name, NAME_AT) and read_header(record)[0] == len(name)):
                # Another name has the same position.
                found[index] = find(self._get_field, field_store_key(map_id, name), name)[1]
        return found

    def _get_field(self, at: bytes) -> bytes | None:
        record: bytes | None = self._txn.get(at, db=self._tables.fields)
        if record is not None and checksum(record) != CRC_RESIDUE:
            raise damaged()
        return record

    def _field_records(self, payload: bytes, cursor_at: int = 0) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over (store key, record) of a large map's fields, live or not, from a field position on."""
        prefix = id_in(payload)
        with self._txn.cursor(db=self._tables.fields) as cursor:
            if cursor.set_range(prefix + cursor_at.to_bytes(FIELD_POSITION_BYTES, "big")):
                for at, record in cursor.iternext():
                    if not at.startswith(prefix):
                        return
                    if checksum(record) != CRC_RESIDUE:
                        raise damaged()
                    yield at, record

    def _scan_fields(self, payload: bytes, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor and the records of live fields of a large map, or members of a large set."""
        found: list[bytes] = []
        last = b""
        if cursor >= FIELD_POSITIONS:
            return 0, found
        visited_bytes = 0
        for visits, (at, field) in enumerate(self._field_records(payload, cursor)):
            position = at[ID_BYTES : ID_BYTES + FIELD_POSITION_BYTES]
            is_enough = len(found) >= count or visits >= VISITS_MAX + count or visited_bytes >= VISITED_BYTES_MAX
            if is_enough and position != last:
                return int.from_bytes(position, "big"), found
            visited_bytes += len(field)
            last = position
            if not 0 < expiry_of(field) <= self._now_ms:
                found.append(field)
        return 0, found
