"""Reading values."""

from __future__ import annotations

from binascii import crc_hqx
from zlib import crc32

from state_backend.codec.checksums import CHECK_BYTES, SOUND, checksum, damaged
from state_backend.lmdb.layout import (
    KINDS,
    NAME_AT,
    TEXT,
    VALUE,
    find,
    payload_of,
    read_header,
)
from state_backend.lmdb.record_reader import RecordReader
from state_backend.model.errors import WrongKindError
from state_backend.model.slots import PLACE, place_of, slot_of
from state_backend.store.store import (
    Text,
)


class ValueReader(RecordReader):
    """Reads the keys of value states."""

    def text(self, key: bytes) -> Text | None:
        # The hot path of GET: `place_of` in line, and the record's header read once.
        slot = slot_of(key) if b"{" in key else crc_hqx(key, 0) & 16383
        record = self._txn.get(PLACE.pack(slot, crc32(key)))
        if record is None:
            return None
        if checksum(record) != SOUND:
            raise damaged()
        length, expire_at_ms, _, form = read_header(record)
        if length != len(key) or not record.startswith(key, NAME_AT):  # another key of the same position
            _, record = find(self._txn.get, place_of(key), key)
            if record is None:
                return None
            length, expire_at_ms, _, form = read_header(record)
        if 0 < expire_at_ms <= self._now_ms:
            return None
        if form != VALUE:
            if form == TEXT:
                return self._long_text(payload_of(record))
            if not self._is_live(record):
                return None
            raise WrongKindError(f"{key[:100]!r} holds a {KINDS[form]}, not a value")
        value: bytes = record[NAME_AT + length : -CHECK_BYTES]
        return value
