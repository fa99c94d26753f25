"""Patterns, held against stringmatchlen written out as in C."""

from __future__ import annotations

import random

import pytest

from resp_server.errors import PlainError
from resp_server.glob import PATTERN_BYTES_MAX, matcher

CASES = [
    (b"*", b"", True),
    (b"**", b"", False),
    (b"**", b"a", True),
    (b"", b"", True),
    (b"", b"a", False),
    (b"a*", b"a", True),
    (b"a**", b"a", True),
    (b"*a", b"bca", True),
    (b"a?c", b"abc", True),
    (b"a?c", b"a\nc", True),
    (b"*\xff", b"a\xff", True),
    (b"[abc]", b"b", True),
    (b"[^abc]", b"b", False),
    (b"[^abc]", b"d", True),
    (b"[a-c]x", b"bx", True),
    (b"[c-a]x", b"bx", True),
    (b"[]", b"]", False),
    (b"[^]", b"x", True),
    (b"[", b"[", False),
    (b"[^", b"[", True),
    (b"[a", b"a", True),
    (b"[\\]]", b"]", True),
    (b"[\\", b"\\", True),
    (b"[a-", b"-", True),
    (b"\\*", b"*", True),
    (b"\\*", b"a", False),
    (b"\\", b"\\", True),
    (b"a\\", b"a\\", True),
    (b"a.c", b"abc", False),
    (b"*a*b*c", b"xaxbxbc", True),
    (b"*a*b*c", b"xaxcxb", False),
]


@pytest.mark.parametrize(("pattern", "text", "is_match"), CASES)
def test_a_pattern_matches_as_in_redis(pattern: bytes, text: bytes, is_match: bool) -> None:
    assert bool(matcher(pattern)(text)) is is_match


def test_case_is_ignored_when_asked() -> None:
    assert matcher(b"MAX[a-c]*", ignore_case=True)(b"maxBcd")


def test_a_pattern_full_of_stars_is_no_trap() -> None:
    assert not matcher(b"*a" * 200 + b"b")(b"a" * 20_000)


def test_a_pattern_may_not_be_longer_than_the_limit() -> None:
    with pytest.raises(PlainError, match="longer than"):
        matcher(b"a" * (PATTERN_BYTES_MAX + 1))


def test_random_patterns_match_as_stringmatchlen_does() -> None:
    chance = random.Random(1)
    for _ in range(20_000):
        pattern = bytes(chance.choice(b"ab*?[]^-\\\xf0") for _ in range(chance.randrange(9)))
        text = bytes(chance.choice(b"ab[]^-\\\xf0\xf1") for _ in range(chance.randrange(6)))
        expected = pattern == b"*" or stringmatchlen(pattern, text)
        assert bool(matcher(pattern)(text)) is expected, (pattern, text)


def stringmatchlen(pattern: bytes, text: bytes) -> bool:
    """Follow the C function branch by branch (util.c, Redis 7); bytes behind the pattern's end read as NUL."""
    pattern += b"\0"
    at, left, pos = 0, len(pattern) - 1, 0
    while left and pos < len(text):
        mark = pattern[at]
        if mark == ord("*"):
            while left and pattern[at + 1] == ord("*"):
                at, left = at + 1, left - 1
            if left == 1:
                return True
            rest = pattern[at + 1 : at + left]
            return any(stringmatchlen(rest, text[start:]) for start in range(pos, len(text)))
        if mark == ord("["):
            at, left, matched = _bracket(pattern, at + 1, left - 1, text[pos])
            if not matched:
                return False
        elif mark != ord("?"):
            if mark == ord("\\") and left >= 2:
                at, left = at + 1, left - 1
            if pattern[at] != text[pos]:
                return False
        pos += 1
        at, left = at + 1, left - 1
        if pos == len(text):
            while left and pattern[at] == ord("*"):
                at, left = at + 1, left - 1
            break
    return left == 0 and pos == len(text)


def _bracket(pattern: bytes, at: int, left: int, char: int) -> tuple[int, int, bool]:
    negated = pattern[at] == ord("^")
    if negated:
        at, left = at + 1, left - 1
    matched = False
    while True:
        if left >= 2 and pattern[at] == ord("\\"):
            at, left = at + 1, left - 1
            matched |= pattern[at] == char
        elif left and pattern[at] == ord("]"):
            break
        elif left <= 0:
            at, left = at - 1, left + 1
            break
        elif left >= 3 and pattern[at + 1] == ord("-"):
            low, high = sorted((_signed(pattern[at]), _signed(pattern[at + 2])))
            at, left = at + 2, left - 2
            matched |= low <= _signed(char) <= high
        else:
            matched |= pattern[at] == char
        at, left = at + 1, left - 1
    return at, left, matched != negated


def _signed(code: int) -> int:
    return code - 256 if code > 127 else code
