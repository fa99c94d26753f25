"""The parts of a serialised value. tests/differential lets a real server restore whole ones."""

from __future__ import annotations

import pytest

from resp_server.protocol import rdb_encoder as rdb


def test_checksum_is_redis_own() -> None:
    """The number is that of Redis' own test of its crc64.c."""
    assert rdb.crc64(b"123456789") == 0xE9C6D914C4B8D9CA
    assert rdb.crc64(b"6789", rdb.crc64(b"12345")) == rdb.crc64(b"123456789")


@pytest.mark.parametrize(
    ("number", "written"),
    [
        (0, b"\x00"),
        (63, b"\x3f"),
        (64, b"\x40\x40"),
        (16383, b"\x7f\xff"),
        (16384, b"\x80\x00\x00\x40\x00"),
        (2**32 - 1, b"\x80\xff\xff\xff\xff"),
        (2**32, b"\x81\x00\x00\x00\x01\x00\x00\x00\x00"),
    ],
)
def test_length_takes_fewest_bytes(number: int, written: bytes) -> None:
    assert rdb.length(number) == written


def test_value_ends_with_version_and_checksum_of_all_before() -> None:
    parts = list(rdb.with_footer([b"\x00", rdb.text(b"hi")], rdb.VERSION))
    whole = b"".join(parts)
    assert whole[:-8] == b"\x00\x02hi\x0a\x00"
    assert rdb.crc64(whole[:-8]).to_bytes(8, "little") == whole[-8:]
    assert len(parts[-1]) == rdb.FOOTER_BYTES
