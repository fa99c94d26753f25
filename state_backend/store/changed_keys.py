"""Which keys an epoch changed, or a removal of what has expired, as a store keeps it for readers with older answers.

    count   u32, little endian
    ends    count x u32: where each key ends, counted from the first key's first byte
    keys    one after another

Nothing at all stands for one that changed more keys than are kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

# A reader moves once per epoch, so that one that was away longer has little to gain from a difference.
EPOCHS_KEPT = 8
# There may be several between two looks, where much expires at once.
REMOVALS_KEPT = 16
# What the keys of the epochs between two looks may take, each with what it costs beside its bytes. To drop so many
# (4,700 of 24 bytes) out of a cache of 300,000 takes a reader up to 7 ms (measured: 1.5 us a key, mostly waiting for
# memory); from about there on it costs less to drop everything.
ROOM_BYTES = 256 << 10
KEY_OVERHEAD_BYTES = 32

UNKNOWN = b""


class ChangedKeys:
    """The keys that a transaction changes, while they are few enough to be kept."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._room_bytes = ROOM_BYTES

    def __bool__(self) -> bool:
        return bool(self._keys) or self.is_full

    @property
    def is_full(self) -> bool:
        """Tell whether they are too many already: to add more makes no difference."""
        return self._room_bytes < 0

    def add(self, key: bytes) -> None:
        """Note a key; it may be noted before."""
        self._room_bytes -= len(key) + KEY_OVERHEAD_BYTES
        if self._room_bytes >= 0:
            self._keys.append(key)

    def extend(self, keys: Sequence[bytes]) -> None:
        """Note several keys."""
        self._room_bytes -= sum(map(len, keys)) + len(keys) * KEY_OVERHEAD_BYTES
        if not self.is_full:
            self._keys += keys

    def pack(self) -> bytes:
        """Lay out the keys, each once; UNKNOWN if there are too many."""
        if self.is_full:
            return UNKNOWN
        keys = list(dict.fromkeys(self._keys))
        return struct.pack(f"<I{len(keys)}I", len(keys), *accumulate(map(len, keys))) + b"".join(keys)


def unpack(packed: bytes) -> list[bytes]:
    """Read the keys of one epoch back."""
    (count,) = struct.unpack_from("<I", packed)
    ends = struct.unpack_from(f"<{count}I", packed, 4)
    texts = packed[4 + 4 * count :]
    return [texts[start:end] for start, end in zip((0, *ends), ends, strict=False)]


def unpack_all(epochs: Iterable[bytes | None]) -> Sequence[bytes] | None:
    """Read the keys of several epochs back; None if one of them is missing or unknown, or if they are too many."""
    room_bytes = ROOM_BYTES
    found = []
    for packed in epochs:
        room_bytes -= len(packed or UNKNOWN)
        if not packed or room_bytes < 0:
            return None
        found.append(unpack(packed))
    return list(chain.from_iterable(found))
