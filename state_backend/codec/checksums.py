"""The checksum of a stored value: its last four bytes, the CRC-32 of the bytes before, little endian.

The CRC-32 of a value together with its checksum is a constant, the residue. So a check is one call, and copies nothing
(measured: 0.1 us for 60 bytes, 4 GB/s for long values).
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from state_backend.model.errors import StoreDamagedError

CHECK_BYTES = 4
# The CRC-32 of every undamaged value with its checksum.
CRC_RESIDUE = 0x2144DF1C
# Another name for `crc32`, because tests replace that function in other modules to make positions collide.
checksum: Callable[[bytes], int] = crc32


def with_checksum(value: bytes) -> bytes:
    """Return a value with its checksum appended."""
    return value + checksum(value).to_bytes(CHECK_BYTES, "little")


def checked(stored: bytes) -> bytes:
    """Return a value without its checksum; StoreDamagedError if the checksum is wrong."""
    if checksum(stored) != CRC_RESIDUE:
        raise damaged()
    return stored[:-CHECK_BYTES]


def check(stored: bytes) -> None:
    """Raise StoreDamagedError for a value with a wrong checksum."""
    if checksum(stored) != CRC_RESIDUE:
        raise damaged()


def damaged() -> StoreDamagedError:
    """Return the error for a value with a wrong checksum."""
    return StoreDamagedError(
        "a checksum in the store does not match; the store is rebuilt from the log, retry in a moment"
    )
