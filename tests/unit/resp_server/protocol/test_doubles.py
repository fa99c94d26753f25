"""Numbers as C reads them and as Redis writes them."""

from __future__ import annotations

from math import inf

import pytest

from resp_server.protocol.doubles import Double, double_text, read_double, strict_double

TEXTS = [
    (0.0, b"0"),
    (-0.0, b"-0"),
    (3.0, b"3"),
    (-1.5, b"-1.5"),
    (1e8, b"100000000"),
    (2.0**53, b"9007199254740992"),
    (2.0**62, b"4611686018427387904"),
    (9.22e18, b"9.22e+18"),
    (1.2345678901234567e19, b"12345678901234567000"),
    (1e20, b"1e+20"),
    (4.25e25, b"4.25e+25"),
    (0.001, b"0.001"),
    (0.00007, b"0.00007"),
    (3e-8, b"3e-8"),
    (1.25e-100, b"1.25e-100"),
    (-1.25e-100, b"-1.25e-100"),
    (-0.00007, b"-0.00007"),
    (-4.25e25, b"-4.25e+25"),
    (0.00012345678, b"1.2345678e-4"),
    (12345.1234567, b"1.23451234567e+4"),
    (99999.5, b"99999.5"),
    (inf, b"inf"),
    (-inf, b"-inf"),
]


@pytest.mark.parametrize(("number", "text"), TEXTS)
def test_double_is_written_as_redis_7_4_writes_it(number: float, text: bytes) -> None:
    """The texts are those of a Redis 8.0.2, whose ZSCORE writes them as that of 7.4."""
    assert double_text(number) == text
    assert float(text) == number


READ = [
    (b"1.5", Double(1.5, False)),
    (b" \t+1e3", Double(1000.0, False)),
    (b"", Double(0.0, False)),
    (b"7\x00junk", Double(7.0, False)),
    (b"0x1F", Double(31.0, False)),
    (b"-0x.8p1", Double(-1.0, False)),
    (b"-Infinity", Double(-inf, False)),
    (b"1e999", Double(inf, True)),
    (b"-0x1p99999", Double(-inf, True)),
    (b"0x1p99999", Double(inf, True)),
    (b"0x1p-99999", Double(0.0, True)),
    (b"1e-999", Double(0.0, True)),
    (b"0e-999", Double(0.0, False)),
    (b".", None),
    (b"1e", None),
    (b"0x", None),
    (b"1 ", None),
    (b"1_0", None),
    (b" ", None),
    (b"nan", None),
    (b"\xd9\xa3", None),
]


@pytest.mark.parametrize(("word", "read"), READ)
def test_double_is_read_as_c_reads_it(word: bytes, read: Double | None) -> None:
    assert read_double(word) == read


@pytest.mark.parametrize("word", [b"", b" 1", b"1\x00", b"1e999", b"1e-999", b"x"])
def test_strict_number_refuses_other_text(word: bytes) -> None:
    assert strict_double(word) is None


def test_strict_number_accepts_subnormal() -> None:
    assert strict_double(b"1e-310") == 1e-310
