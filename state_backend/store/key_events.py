"""Events of keys: how epochs changed them. A store records events while clients subscribe to keyspace notifications.

    batch    epoch i64 | term i64 | count u32 | ends of keys count x u32 | events of each key count x u8 | keys | events
             the events of one key are a byte each (see `KeyEvent`), in their order

A batch is written in the transaction of the changes, so no reader sees an event before its change. The size of a
batch is bounded, and so is the size of all batches together: the oldest are deleted first, read or not.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import NamedTuple

# About a thousand events: a reader sends them in one go.
EVENT_BATCH_BYTES = 32 << 10
# Three million changes or so of keys of 24 bytes (guess).
EVENTS_BYTES_MAX = 128 << 20

HEADER = struct.Struct("<qqI")


class KeyEvent(IntEnum):
    """A change of a key. NEW comes before the event of the change that made the key."""

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


class StoredEventBatches(NamedTuple):
    """The stored batches: serial numbers `first` to before `next`. Each start of the recording has another id."""

    id: bytes
    first: int = 0
    next: int = 0
    bytes: int = 0


class EventBatch(NamedTuple):
    """Some events, as (key, its events), of one epoch and of keys that expired after it."""

    epoch: int
    term: int
    events: Sequence[tuple[bytes, bytes]]


def pack(epoch: int, term: int, keys: Sequence[bytes], events: Sequence[bytes]) -> bytes:
    """Encode a batch."""
    ends = struct.pack(f"<{len(keys)}I", *accumulate(map(len, keys)))
    return HEADER.pack(epoch, term, len(keys)) + ends + bytes(map(len, events)) + b"".join(keys) + b"".join(events)


def unpack(packed: bytes) -> EventBatch:
    """Decode a batch."""
    epoch, term, count = HEADER.unpack_from(packed)
    at = HEADER.size + 4 * count
    ends = struct.unpack_from(f"<{count}I", packed, HEADER.size)
    body = packed[at + count :]
    keys = [body[start:end] for start, end in zip((0, *ends), ends, strict=False)]
    stops = list(accumulate(packed[at : at + count], initial=ends[-1] if count else 0))
    events = [body[start:stop] for start, stop in pairwise(stops)]
    return EventBatch(epoch, term, list(zip(keys, events, strict=True)))
