"""Reads the keys of value states."""

from __future__ import annotations

from collections.abc import Sequence

from state_backend.codec.checksums import CHECK_BYTES, CRC_RESIDUE, checksum
from state_backend.lmdb.record_format import FORM_AT, NAME_AT, VALUE, payload_of, read_header
from state_backend.lmdb.record_reader import RecordReader
from state_backend.model.descriptor import Kind
from state_backend.model.slots import store_keys_of
from state_backend.store.store import READ_TOGETHER_BYTES_MAX, Value


class ValueReader(RecordReader):
    """Reads the keys of value states."""

    def lazy_value(self, key: bytes) -> Value | None:
        record = self._of_kind(key, Kind.VALUE)
        if record is None:
            return None
        payload = payload_of(record)
        return payload if record[FORM_AT] == VALUE else self._long_value(payload)

    def lazy_values(self, keys: Sequence[bytes]) -> list[Value | None]:
        # The hot path of GET. It reads short, live and undamaged values that are the first at their position;
        # `lazy_value` reads all others.
        values: list[Value | None] = []
        now_ms = self._now_ms
        for key, record in zip(keys, map(self._txn.get, store_keys_of(keys)), strict=True):
            if record is None:
                values.append(None)
                continue
            if checksum(record) != CRC_RESIDUE or len(record) > READ_TOGETHER_BYTES_MAX:
                return values or [self.lazy_value(key)]
            length, expire_at_ms, _, form = read_header(record)
            end = NAME_AT + length
            if form != VALUE or 0 < expire_at_ms <= now_ms or record[NAME_AT:end] != key:
                return values or [self.lazy_value(key)]
            values.append(record[end:-CHECK_BYTES])
        return values
