"""Patterns against a copy of stringmatchlen of Redis in Python; and their limits of steps."""

from __future__ import annotations

import random
import re
import sys
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as some

from resp_server.protocol.errors import GenericError
from resp_server.protocol.glob import PATTERN_BYTES_MAX, LongPattern, literal_start, matcher, translate

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
    (b"*ab*ab", b"xyab", False),  # no byte is in two pieces
    (b"*a?*a?", b"xxaa", False),
    (b"*[ab]x*[ab]y*", b"-ax-by-", True),
    (b"X*", b"a", False),
]


@pytest.mark.parametrize(("pattern", "text", "is_match"), CASES)
def test_pattern_matches_as_in_redis(pattern: bytes, text: bytes, is_match: bool) -> None:
    assert bool(matcher(pattern)(text)) is is_match
    assert LongPattern(pattern).matches(text) is is_match or pattern == b"*"


@pytest.mark.parametrize(
    ("pattern", "ignore_case", "matched"),
    [
        (b"a", False, b"a"),
        (b"a", True, b"aA"),
        (b"?", False, bytes(range(256))),
        (b"[bX]", False, b"bX"),
        (b"[bX]", True, b"bBxX"),
        (b"[a-c]", False, b"abc"),
        (b"[a-c]", True, b"abcABC"),
        (b"[W-[]", True, b""),  # from w to [, which is before it
        (b"[\x80-\x90]", False, bytes(range(0x80, 0x91))),
        (b"[b-\xfe]", False, b"\xfe\xff" + bytes(range(0x62 + 1))),  # C's characters are signed: from -2 to 98
        (b"[\\]\\-]", False, b"]-"),
        (b"[\\a]", True, b"a"),  # as in Redis
        (b"[\n-\r]", False, b"\n\x0b\x0c\r"),
    ],
)
def test_pattern_of_one_byte_matches_only_these_bytes(pattern: bytes, ignore_case: bool, matched: bytes) -> None:
    every_byte = [bytes((code,)) for code in range(256)]
    for matches in (matcher(pattern, ignore_case), LongPattern(pattern, ignore_case).matches):
        assert sorted(byte for byte in every_byte if matches(byte)) == [bytes((code,)) for code in sorted(matched)]


def test_case_is_ignored_when_asked() -> None:
    for pattern, text in ((b"MAX[a-c]*", b"maxBcd"), (b"[A-Z]", b"q"), (b"[^a-z]", b"1"), (b"[A-z]", b"Y")):
        assert matcher(pattern, ignore_case=True)(text)
        assert LongPattern(pattern, ignore_case=True).matches(text)
    assert matcher(b"A" * 40, ignore_case=True)(b"a" * 40) and not matcher(b"A" * 40)(b"a" * 40)


@pytest.mark.parametrize(
    ("pattern", "start"),
    [(b"abc", b"abc"), (b"ab*c*", b"ab"), (b"a?", b"a"), (b"a[b]", b"a"), (b"a\\*", b"a"), (b"*", b""), (b"", b"")],
)
def test_pattern_starts_with_its_text_before_first_special_character(pattern: bytes, start: bytes) -> None:
    assert literal_start(pattern) == start


def test_pattern_full_of_stars_is_no_trap() -> None:
    assert not matcher(b"*a" * 200 + b"b")(b"a" * 20_000)


def test_pattern_may_not_be_longer_than_limit() -> None:
    with pytest.raises(GenericError, match="may have 1024 bytes; this one has 1025"):
        matcher(b"a" * (PATTERN_BYTES_MAX + 1))


def test_random_patterns_match_as_stringmatchlen_does() -> None:
    chance = random.Random(1)
    for _ in range(20_000):
        pattern = bytes(chance.choice(b"ab*?[]^-\\\xf0") for _ in range(chance.randrange(9)))
        text = bytes(chance.choice(b"ab[]^-\\\xf0\xf1") for _ in range(chance.randrange(6)))
        expected = pattern == b"*" or stringmatchlen(pattern, text)
        assert bool(matcher(pattern)(text)) is expected, (pattern, text)
        assert pattern == b"*" or LongPattern(pattern).matches(text) is expected, (pattern, text)


MARKS = some.lists(
    some.sampled_from([b"a", b"b", b"*", b"?", b"[ab]", b"[^a]", b"[z-a]", b"[", b"\\", b"-"]), max_size=40
)


@given(pattern=MARKS.map(b"".join), text=some.binary(max_size=60).map(lambda text: bytes(b"ab-["[b % 4] for b in text)))
def test_pattern_taken_apart_is_its_regular_expression(pattern: bytes, text: bytes) -> None:
    for ignore_case in (False, True):
        expected = re.compile(translate(pattern, ignore_case), re.DOTALL).fullmatch(text) is not None
        assert LongPattern(pattern, ignore_case).matches(text) is expected


@pytest.mark.parametrize(
    "pattern",
    [b"*" + b"a?" * 510 + b"b*", b"*?a" * 340 + b"*b*", b"*" + b"[ab]?" * 200 + b"b*", b"*" + b"a" * 1022 + b"b"],
    ids=["any", "stars", "classes", "plain"],
)
def test_hostile_pattern_takes_no_more_steps_for_longer_text(pattern: bytes) -> None:
    """A regular expression would go back and forth within one call."""
    assert isinstance(matcher(pattern).__self__, LongPattern)  # type: ignore[attr-defined]
    short, long = (calls_of_match(pattern, b"a" * size) for size in (2_000, 1_000_000))
    assert long < 2 * short < 20_000


def calls_of_match(pattern: bytes, text: bytes) -> int:
    """Return how many functions are called, each of which takes time in proportion to the text at most."""
    calls, matches = 0, matcher(pattern)

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        is_match = matches(text)
    finally:
        sys.setprofile(None)
    assert not is_match
    return calls


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
