"""Reading values."""

from __future__ import annotations

from collections.abc import Sequence

from state_backend.codec.checksums import CHECK_BYTES, CRC_RESIDUE, checksum
from state_backend.lmdb.layout import FORM_AT, NAME_AT, VALUE, payload_of, read_header
from state_backend.lmdb.record_reader import RecordReader
from state_backend.model.descriptor import Kind
from state_backend.model.slots import places_of
from state_backend.store.store import READ_TOGETHER_BYTES_MAX, Text


class ValueReader(RecordReader):
    """Reads the keys of value states."""

    def text(self, key: bytes) -> Text | None:
        record = self._of_kind(key, Kind.VALUE)
        if record is None:
            return None
        payload = payload_of(record)
        return payload if record[FORM_AT] == VALUE else self._long_text(payload)

    def texts(self, keys: Sequence[bytes]) -> list[Text | None]:
        # The hot path of GET. Only short, live and undamaged values that are the first at their position are read here;
        # `text` reads all others.
        texts: list[Text | None] = []
        now_ms = self._now_ms
        for key, record in zip(keys, map(self._txn.get, places_of(keys)), strict=True):
            if record is None:
                texts.append(None)
                continue
            if checksum(record) != CRC_RESIDUE or len(record) > READ_TOGETHER_BYTES_MAX:
                return texts or [self.text(key)]
            length, expire_at_ms, _, form = read_header(record)
            end = NAME_AT + length
            if form != VALUE or 0 < expire_at_ms <= now_ms or record[NAME_AT:end] != key:
                return texts or [self.text(key)]
            texts.append(record[end:-CHECK_BYTES])
        return texts
