"""The keys that an epoch changed, or that expired together. Readers evict them from their caches.

    count   u32, little endian
    ends    count x u32: where each key ends, counted from the first key's first byte
    keys    one after another

An empty value (UNKNOWN) means that too many keys changed to be stored.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

# The keys of so many last epochs are stored. A reader is renewed once per epoch; one that missed more epochs than this
# may as well clear its cache.
CHANGED_EPOCHS_MAX = 8
# The keys of so many last expiry batches are stored. When much expires at once, there are several between two renewals.
EXPIRY_BATCHES_MAX = 16
# The size of the keys between two renewals, with an overhead for each key. Evicting so many (4,700 of 24 bytes) from a
# cache of 300,000 takes a reader up to 7 ms (measured: 1.5 us a key, mostly waiting for memory). For more keys,
# clearing the cache costs less.
KEYS_BYTES_MAX = 256 << 10
KEY_OVERHEAD_BYTES = 32

UNKNOWN = b""


class ChangedKeys:
    """The keys that a transaction changes, unless there are too many to be stored."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._remaining_bytes = KEYS_BYTES_MAX

    def __bool__(self) -> bool:
        return bool(self._keys) or self.is_full

    @property
    def is_full(self) -> bool:
        """Return whether there are too many keys already; then more keys make no difference."""
        return self._remaining_bytes < 0

    @property
    def keys_max(self) -> int:
        """The largest number of keys that may still make a difference: with so many more, it is full."""
        return 0 if self.is_full else self._remaining_bytes // KEY_OVERHEAD_BYTES + 1

    def add(self, key: bytes) -> None:
        """Add a key; the same key may be added again."""
        self._remaining_bytes -= len(key) + KEY_OVERHEAD_BYTES
        if self._remaining_bytes >= 0:
            self._keys.append(key)

    def extend(self, keys: Sequence[bytes]) -> None:
        """Add several keys."""
        self._remaining_bytes -= sum(map(len, keys)) + len(keys) * KEY_OVERHEAD_BYTES
        if not self.is_full:
            self._keys += keys

    def pack(self) -> bytes:
        """Encode the keys, each once; UNKNOWN if there are too many."""
        if self.is_full:
            return UNKNOWN
        keys = list(dict.fromkeys(self._keys))
        return struct.pack(f"<I{len(keys)}I", len(keys), *accumulate(map(len, keys))) + b"".join(keys)


def unpack(packed: bytes) -> list[bytes]:
    """Decode the keys of one epoch."""
    (count,) = struct.unpack_from("<I", packed)
    ends = struct.unpack_from(f"<{count}I", packed, 4)
    keys = packed[4 + 4 * count :]
    return [keys[start:end] for start, end in zip((0, *ends), ends, strict=False)]


def unpack_all(epochs: Iterable[bytes | None]) -> Sequence[bytes] | None:
    """Decode the keys of several epochs; None if those of one are missing or UNKNOWN, or if there are too many keys."""
    remaining_bytes = KEYS_BYTES_MAX
    found = []
    for packed in epochs:
        remaining_bytes -= len(packed or UNKNOWN)
        if not packed or remaining_bytes < 0:
            return None
        found.append(unpack(packed))
    return list(chain.from_iterable(found))
