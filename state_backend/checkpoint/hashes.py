"""The checksums of state files: XXH32 of LZ4 blocks, and CRC-32C of rows. The compiled core has the same functions."""

from __future__ import annotations

import struct

from state_backend.native import state_files

P1, P2, P3, P4, P5 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1
M = 0xFFFFFFFF


def xxhash32_in_python(data: bytes, seed: int) -> int:
    """Return XXH32 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md)."""
    size = len(data)
    whole = size & ~15
    if whole:
        a, b, c, d = (seed + P1 + P2) & M, (seed + P2) & M, seed, (seed - P1) & M
        for w, x, y, z in struct.iter_unpack("<4I", memoryview(data)[:whole]):
            a = (a + w * P2) & M
            a = ((a << 13 | a >> 19) * P1) & M
            b = (b + x * P2) & M
            b = ((b << 13 | b >> 19) * P1) & M
            c = (c + y * P2) & M
            c = ((c << 13 | c >> 19) * P1) & M
            d = (d + z * P2) & M
            d = ((d << 13 | d >> 19) * P1) & M
        total = _rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18)
    else:
        total = seed + P5
    total = (total + size) & M
    at = whole
    while at + 4 <= size:
        word = int.from_bytes(data[at : at + 4], "little")
        total = _rotated((total + word * P3) & M, 17) * P4 & M
        at += 4
    for byte in data[at:]:
        total = _rotated((total + byte * P5) & M, 11) * P1 & M
    total = (total ^ total >> 15) * P2 & M
    total = (total ^ total >> 13) * P3 & M
    return total ^ total >> 16


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (32 - bits)) & M


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


CRC_TABLE = _table()


def crc32c_in_python(data: bytes, crc: int = 0) -> int:
    """Return CRC-32C (Castagnoli) of bytes;

    Args:
        crc: The CRC of the bytes before.
    """
    table, crc = CRC_TABLE, crc ^ M
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ M


xxhash32 = xxhash32_in_python if state_files is None else state_files.xxhash32
crc32c = crc32c_in_python if state_files is None else state_files.crc32c
