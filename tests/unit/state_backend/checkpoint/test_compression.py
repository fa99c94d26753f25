"""Compressed state files: what Spark's codecs write is read, and anything else is an error."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pyarrow as pa
import pytest

from state_backend.checkpoint.compression import LZ4_SEED, decompressed
from state_backend.checkpoint.hashes import crc32c, crc32c_in_python, xxhash32, xxhash32_in_python
from state_backend.model.errors import CheckpointFormatError, UnsupportedStateError

CONTENT = bytes(range(256)) * 300


def lz4(content: bytes, block_bytes: int = 32768, *, stored: bool = False) -> bytes:
    """Return what Java's LZ4BlockOutputStream writes."""
    codec = pa.Codec("lz4_raw")
    blocks = [content[at : at + block_bytes] for at in range(0, len(content), block_bytes)]
    written = b""
    for block in [*blocks, b""]:
        data = block if stored or not block else codec.compress(block, asbytes=True)
        token = 0x10 if stored or not block else 0x25
        checksum = xxhash32(block, LZ4_SEED) & 0x0FFFFFFF if block else 0
        written += b"LZ4Block" + struct.pack("<BiiI", token, len(data), len(block), checksum) + data
    return written


def snappy(content: bytes) -> bytes:
    """Return what snappy-java's SnappyOutputStream writes."""
    data = pa.Codec("snappy").compress(content, asbytes=True)
    return b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, len(data)) + data


def zstd(content: bytes) -> bytes:
    half = len(content) // 2
    return b"".join(pa.Codec("zstd").compress(part, asbytes=True) for part in (content[:half], content[half:]))


CODECS = {"lz4": lz4, "snappy": snappy, "zstd": zstd}


def read(written: bytes) -> bytes:
    return b"".join(decompressed(pa.py_buffer(written), "5.delta"))


@pytest.mark.parametrize("codec", CODECS)
def test_content_is_read_back(codec: str) -> None:
    assert read(CODECS[codec](CONTENT)) == CONTENT


def test_stored_blocks_and_several_streams_are_read() -> None:
    assert read(lz4(CONTENT, stored=True) + lz4(b"more")) == CONTENT + b"more"


TEXT = b"sparkis " * 20
# What is read of a file that ends after so many bytes. Only LZ4's last block is known as the last one.
READ_OF_TRUNCATED = {"lz4": {}, "snappy": dict.fromkeys(range(8, 17), b""), "zstd": {len(zstd(TEXT)) // 2: TEXT[:80]}}


@pytest.mark.parametrize("codec", CODECS)
def test_file_truncated_within_block_is_error(codec: str) -> None:
    written, found = CODECS[codec](TEXT), {}
    for size in range(len(written)):
        try:
            found[size] = read(written[:size])
        except CheckpointFormatError as error:
            assert str(error).startswith("5.delta cannot be read: ")
    assert found == READ_OF_TRUNCATED[codec]


def test_every_flipped_bit_of_lz4_file_is_noticed() -> None:
    written = lz4(TEXT)
    for bit in range(8 * len(written)):
        flipped = bytearray(written)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            # The level in the token, and the checksum of the last block, which is empty, mean nothing.
            assert read(bytes(flipped)) == TEXT, bit
        except (CheckpointFormatError, UnsupportedStateError):
            pass


def test_other_files_are_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="LZF"):
        read(b"ZV\x01\x00\x05hello")
    with pytest.raises(CheckpointFormatError, match="no codec of Spark"):
        read(b"PAR1....")


@pytest.mark.parametrize("xxhash", [xxhash32, xxhash32_in_python])
@pytest.mark.parametrize("crc", [crc32c, crc32c_in_python])
def test_hashes_are_those_of_their_specifications(xxhash: Callable[..., int], crc: Callable[..., int]) -> None:
    assert xxhash(b"", 0) == 0x02CC5D05
    assert xxhash(b"Nobody inspects the spammish repetition", 0) == 0xE2293B2F
    assert crc(b"123456789") == 0xE3069283
    assert crc(b"6789", crc(b"12345")) == crc(b"123456789")
