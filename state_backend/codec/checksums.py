"""The checksum of what lies in a store: a value's last four bytes, the CRC-32 of those before, little endian.

Then the CRC-32 of the whole is the same number for every sound value: to check one takes one call and no copy
(measured: 0.1 us for 60 bytes, 4 GB/s for long ones).
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from state_backend.model.errors import StoreDamagedError

CHECK_BYTES = 4
# What `checksum` makes of a sound value.
SOUND = 0x2144DF1C
# Under a name of its own: positions come from CRC-32, too, and tests have these collide.
checksum: Callable[[bytes], int] = crc32


def sealed(value: bytes) -> bytes:
    """Return a value with its checksum behind it."""
    return value + checksum(value).to_bytes(CHECK_BYTES, "little")


def opened(stored: bytes) -> bytes:
    """Return a value without its checksum; StoreDamagedError if it does not fit."""
    if checksum(stored) != SOUND:
        raise damaged()
    return stored[:-CHECK_BYTES]


def check(stored: bytes) -> None:
    """Raise StoreDamagedError for a value whose checksum does not fit."""
    if checksum(stored) != SOUND:
        raise damaged()


def damaged() -> StoreDamagedError:
    """Return what is raised for a value whose checksum does not fit."""
    return StoreDamagedError(
        "a checksum in the store does not fit; it is built anew from the log, ask again in a moment"
    )
