"""Writes values of keys and fields in a write transaction. A long value is stored in pieces outside of its record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from state_backend.codec.checksums import with_checksum
from state_backend.lmdb.key_writer import KindWriter, WrittenState
from state_backend.lmdb.record_format import (
    FORM_AT,
    ID_BYTES,
    LONG_VALUE,
    LONG_VALUE_PAYLOAD,
    PIECE_BYTES,
    VALUE,
    id_in,
    make_record,
    payload_of,
    piece_name,
    read_piece,
)
from state_backend.model.records import Op

PUT = int(Op.PUT)


class ValueWriter(KindWriter):
    """Writes the keys of value states."""

    def apply(
        self,
        at: bytes,
        old: bytes | None,
        rows: Iterable[tuple[Any, ...]],
        state: WrittenState,
        *,
        keeps_old: bool,
    ) -> None:
        """Apply the last change of a key: no other makes a difference."""
        *_, (_, op, key, _, value, expire_at_ms) = rows
        new = self.record(key, value or b"", expire_at_ms, state.number, old) if op == PUT else None
        self._keys.change(at, old, new)

    def record(self, name: bytes, value: bytes, expire_at_ms: int | None, number: int, old: bytes | None) -> bytes:
        """Make the record of a key or field, and write the pieces of a long value, unless `old` has them."""
        if len(value) <= PIECE_BYTES:
            return make_record(name, value, expire_at_ms, number, VALUE)
        payload = payload_of(old) if old is not None and old[FORM_AT] == LONG_VALUE else b""
        if not payload or not self._is_stored(payload, value):
            value_id = self._keys.meta.new_id()
            payload = LONG_VALUE_PAYLOAD.pack(value_id, len(value))
            prefix = value_id.to_bytes(ID_BYTES, "big")
            for piece, start in enumerate(range(0, len(value), PIECE_BYTES)):
                stored = with_checksum(value[start : start + PIECE_BYTES])
                self._keys.txn.put(piece_name(prefix, piece), stored, db=self._keys.tables.blocks)
        return make_record(name, payload, expire_at_ms, number, LONG_VALUE)

    def _is_stored(self, payload: bytes, value: bytes) -> bool:
        """Return whether the stored pieces of a long value are those of this value."""
        length = LONG_VALUE_PAYLOAD.unpack(payload)[1]
        return length == len(value) and all(
            value.startswith(self._piece(payload, number), start)
            for number, start in enumerate(range(0, length, PIECE_BYTES))
        )

    def _piece(self, payload: bytes, number: int) -> bytes:
        return read_piece(self._keys.txn, self._keys.tables, id_in(payload), number)

    def value_in(self, record: bytes) -> bytes:
        """Return the full value in the record of a key or of a field."""
        payload = payload_of(record)
        if record[FORM_AT] == VALUE:
            return payload
        pieces = -(-LONG_VALUE_PAYLOAD.unpack(payload)[1] // PIECE_BYTES)
        return b"".join(self._piece(payload, number) for number in range(pieces))
