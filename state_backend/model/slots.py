"""The slot (key group) of a key, its hash position, and its store key.

    slot           CRC16(hash tag or full key) mod 16384, as in the Redis Cluster specification
    hash position  slot (14 bits) and CRC32 of the full key (32 bits), as one number below 2**46
    store key      the hash position as six big-endian bytes: the order of store keys is the order of slots

    store key      the hash position as six big-endian bytes, so that store keys are in the order of slots
keys may have the same hash position; stores have the full key, too.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterable, Sequence
from struct import Struct
from zlib import crc32

SLOTS = 16384
HASH_BITS = 32
POSITION_BYTES = 6
POSITIONS = SLOTS << HASH_BITS
STORE_KEY = Struct(">HI")
_pack_store_key = STORE_KEY.pack


def slot_of(key: bytes) -> int:
    """Return the slot (0..16383) of a key by the Redis hash-tag rule.

    If the text between the first `{` and the first `}` after it is not empty, only that text counts.
    """
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return crc_hqx(key, 0) & 16383


def hash_position(key: bytes) -> int:
    """Return a key's hash position: its slot, then a hash that spreads the keys of a slot."""
    return slot_of(key) << HASH_BITS | crc32(key)


def store_key_of(key: bytes) -> bytes:
    """Return a key's store key: its hash position as six bytes."""
    slot = slot_of(key) if b"{" in key else crc_hqx(key, 0) & 16383
    return STORE_KEY.pack(slot, crc32(key))


def store_keys_of(keys: Sequence[bytes]) -> Iterable[bytes]:
    """Return the store keys of several keys. If no key has a hash tag, there is no Python call for each key."""
    if len(keys) < 4 or b"{" in b"".join(keys):
        return map(store_key_of, keys)
    return [_pack_store_key(crc_hqx(key, 0) & 16383, crc32(key)) for key in keys]


def slot_at(position: int) -> int:
    """Return the slot of a position."""
    return position >> HASH_BITS


def field_hash_position(field: bytes) -> int:
    """Return the hash position of a field in a large map: 48 bits, so that it can be a cursor."""
    return crc32(field) << 16 | crc_hqx(field, 0)
