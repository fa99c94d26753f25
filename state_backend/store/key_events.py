"""What epochs did to keys, as a store keeps it while somebody wants to be notified of it.

    portion  epoch i64 | term i64 | count u32 | ends of keys count x u32 | events of each key count x u8 | keys | events
             what happened to one key is a byte for each event (see `What`), in their order

A portion is written in the transaction that made the changes, so nobody can read of a change before the change. It is
of bounded size, and so are all together: the oldest go first, whether they were read or not.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import NamedTuple

# About a thousand events: what a reader looks at in one go.
PORTION_BYTES = 32 << 10
# Three million changes or so of keys of 24 bytes (guess).
KEPT_BYTES_MAX = 128 << 20

HEADER = struct.Struct("<qqI")


class What(IntEnum):
    """What happened to a key. NEW stands before what made it."""

    NEW = 1
    SET = 2
    DELETED = 3
    EXPIRED = 4
    EXPIRY_SET = 5
    EXPIRY_REMOVED = 6
    FIELDS_SET = 7
    FIELDS_DELETED = 8
    FIELDS_EXPIRED = 9
    FIELD_EXPIRY_SET = 10
    APPENDED = 11
    TRIMMED = 12
    MEMBERS_ADDED = 13
    MEMBERS_REMOVED = 14
    SCORES_SET = 15
    SCORES_REMOVED = 16


class Kept(NamedTuple):
    """Which portions a store keeps: `first` to before `next`. Another id each time that keeping them begins."""

    id: bytes
    first: int = 0
    next: int = 0
    bytes: int = 0


class Portion(NamedTuple):
    """Events of one epoch, or of what expired after it: (key, what happened to it)."""

    epoch: int
    term: int
    events: Sequence[tuple[bytes, bytes]]


def pack(epoch: int, term: int, keys: Sequence[bytes], whats: Sequence[bytes]) -> bytes:
    """Lay out a portion."""
    ends = struct.pack(f"<{len(keys)}I", *accumulate(map(len, keys)))
    return HEADER.pack(epoch, term, len(keys)) + ends + bytes(map(len, whats)) + b"".join(keys) + b"".join(whats)


def unpack(packed: bytes) -> Portion:
    """Read a portion back."""
    epoch, term, count = HEADER.unpack_from(packed)
    at = HEADER.size + 4 * count
    ends = struct.unpack_from(f"<{count}I", packed, HEADER.size)
    texts = packed[at + count :]
    keys = [texts[start:end] for start, end in zip((0, *ends), ends, strict=False)]
    stops = list(accumulate(packed[at : at + count], initial=ends[-1] if count else 0))
    whats = [texts[start:stop] for start, stop in pairwise(stops)]
    return Portion(epoch, term, list(zip(keys, whats, strict=True)))
