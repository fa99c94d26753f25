"""The compression of state files. A file is one stream of a Spark CompressionCodec; its first bytes identify the codec.

LZ4     blocks of Java's LZ4BlockOutputStream (not LZ4's frame format), little endian:
        "LZ4Block" | method u8: 0x10 stored, 0x20 compressed; low bits: level | compressed i32 | original i32
        | XXH32 of the original, 28 bits, u32 | data
        A block of 0 original bytes ends a stream; another stream may follow.
zstd    frames; several may follow one another
snappy  82 "SNAPPY" 00 | version i32 | oldest compatible version i32, then blocks: size i32 | data; big endian
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa

from state_backend.checkpoint.hashes import xxhash32
from state_backend.model.errors import CheckpointDamagedError, CheckpointFormatError, UnsupportedStateError

LZ4, ZSTD, SNAPPY = b"LZ4Block", b"\x28\xb5\x2f\xfd", b"\x82SNAPPY\x00"
LZF = b"ZV"
LZ4_HEADER = struct.Struct("<8sBiiI")
LZ4_STORED, LZ4_COMPRESSED = 0x10, 0x20
LZ4_SEED = 0x9747B28C
SNAPPY_HEADER_BYTES = 16
# The largest block of LZ4BlockOutputStream. Spark's default for LZ4 and snappy is 32 KiB.
BLOCK_BYTES_MAX = 1 << 25
READ_BYTES = 1 << 20


def decompressed(content: pa.Buffer, name: str) -> Iterator[bytes]:
    """Yield the content of a compressed file in parts of bounded size."""
    first = bytes(memoryview(content)[:8])
    try:
        if first == LZ4:
            yield from _lz4(memoryview(content).cast("B"), name)
        elif first.startswith(ZSTD):
            yield from _zstd(content, name)
        elif first == SNAPPY:
            yield from _snappy(memoryview(content).cast("B"), name)
        elif first.startswith(LZF):
            raise UnsupportedStateError(
                f"{name} is compressed with LZF, which sparkis does not read; it reads lz4, zstd and snappy"
            )
        else:
            raise unreadable(name, f"it begins with {first!r}, which is no codec of Spark")
    except (pa.ArrowException, OSError) as error:
        raise unreadable(name, f"it cannot be decompressed: {error}") from None


def unreadable(name: str, reason: str) -> CheckpointFormatError:
    """Return the error for a file in an unknown format."""
    return CheckpointFormatError(f"{name} cannot be read: {reason}")


def damaged(name: str, reason: str) -> CheckpointDamagedError:
    """Return the error for a file with a checksum that does not match."""
    return CheckpointDamagedError(f"{name} is damaged: {reason}")


def _lz4(content: memoryview, name: str) -> Iterator[bytes]:
    codec = pa.Codec("lz4_raw")
    at, has_ended = 0, True
    while at < len(content):
        if len(content) - at < LZ4_HEADER.size:
            raise unreadable(name, "it ends within the header of an LZ4 block")
        magic, token, compressed, original, checksum = LZ4_HEADER.unpack_from(content, at)
        at += LZ4_HEADER.size
        method = token & 0xF0
        if magic != LZ4 or method not in (LZ4_STORED, LZ4_COMPRESSED):
            raise unreadable(name, f"there is no LZ4 block at byte {at - LZ4_HEADER.size}")
        if not (0 <= original <= BLOCK_BYTES_MAX and 0 <= compressed <= len(content) - at):
            raise unreadable(name, "the size of an LZ4 block is impossible")
        if method == LZ4_STORED and compressed != original:
            raise unreadable(name, "a stored LZ4 block has two sizes")
        has_ended = original == 0
        if has_ended:
            at += compressed
            continue
        data = content[at : at + compressed]
        at += compressed
        block = bytes(data) if method == LZ4_STORED else codec.decompress(data, original, asbytes=True)
        if len(block) != original or xxhash32(block, LZ4_SEED) & 0x0FFFFFFF != checksum:
            raise damaged(name, "the checksum of an LZ4 block does not match")
        yield block
    if not has_ended:
        raise unreadable(name, "it ends before the last LZ4 block")


def _zstd(content: pa.Buffer, name: str) -> Iterator[bytes]:
    with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
        while part := stream.read(READ_BYTES):
            yield part


def _snappy(content: memoryview, name: str) -> Iterator[bytes]:
    codec = pa.Codec("snappy")
    at = SNAPPY_HEADER_BYTES
    while at < len(content):
        if len(content) - at < 4:
            raise unreadable(name, "it ends within the size of a snappy block")
        size = int.from_bytes(content[at : at + 4], "big", signed=True)
        at += 4
        if not 0 < size <= len(content) - at:
            raise unreadable(name, "the size of a snappy block is impossible")
        data = content[at : at + size]
        at += size
        original = _snappy_size(data)
        if original > BLOCK_BYTES_MAX:
            raise unreadable(name, "the size of a snappy block is impossible")
        yield codec.decompress(data, original, asbytes=True)


def _snappy_size(data: memoryview) -> int:
    """Return the original size of a raw snappy block: its first bytes, as a varint."""
    size = 0
    for index, byte in enumerate(data[:5]):
        size |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            break
    return size
