"""Patterns match what they match at a real server: random ones, and odd ones, of all lengths."""

from __future__ import annotations

import random

from compat.conformance.servers import Running
from resp_server.protocol.glob import PATTERN_BYTES_MAX, LongPattern, matcher

# What patterns and texts are made of: few letters, so that much matches.
LETTERS = b"ab[]^-\\*?\xf0\xf1"
MARKS = [b"a", b"b", b"*", b"?", b"[ab]", b"[^a]", b"[b-a]", b"[\xf1-a]", b"[]", b"[^]", b"[", b"[^", b"\\", b"]", b"-"]
UNUSUAL_PATTERNS = [
    b"[z-a]",
    b"[^",
    b"[]",
    b"[",
    b"a\\",
    b"\\",
    b"[\\",
    b"[\\]]",
    b"[a",
    b"[a-",
    b"[^]",
    b"**",
    b"[--b]",
    b"[^^]",
]
PATTERNS, LONG_PATTERNS = 1_500, 150


def texts(chance: random.Random) -> list[bytes]:
    short = [bytes(chance.choices(LETTERS, k=chance.randrange(1, 8))) for _ in range(300)]
    return list(
        dict.fromkeys([*short, *(bytes(chance.choices(b"ab", k=chance.randrange(40, 90))) for _ in range(100))])
    )


def patterns(chance: random.Random) -> list[bytes]:
    short = [b"".join(chance.choices(MARKS, k=chance.randrange(1, 9))) for _ in range(PATTERNS)]
    long = [b"".join(chance.choices(MARKS[:6], k=chance.randrange(20, 60))) for _ in range(LONG_PATTERNS)]
    return [*UNUSUAL_PATTERNS, *short, *long, b"*" + b"?" * (PATTERN_BYTES_MAX - 1)]


def test_patterns_of_keys_equal_redis(redis_primary: Running) -> None:
    chance = random.Random(16)
    ask, all_texts = redis_primary.connect().call, texts(chance)
    assert ask(b"SELECT", b"7").plain == b"OK"
    assert ask(b"MSET", *(word for text in all_texts for word in (text, b""))).plain == b"OK"
    matched = 0
    for pattern in patterns(chance):
        expected = set(ask(b"KEYS", pattern).plain)
        matches = matcher(pattern)
        assert {text for text in all_texts if matches(text)} == expected, pattern
        if pattern != b"*":
            taken_apart = LongPattern(pattern)
            assert {text for text in all_texts if taken_apart.matches(text)} == expected, pattern
        matched += bool(expected)
    ask(b"FLUSHDB")
    assert matched > PATTERNS // 4


def test_settings_are_found_by_patterns_in_any_case(redis_primary: Running) -> None:
    chance = random.Random(17)
    ask = redis_primary.connect().call
    names = ask(b"CONFIG", b"GET", b"*").plain[::2]
    tokens = [b"*", b"?", b"[A-M]", b"[n-Z]", b"[^A-C]", b"[Z-b]", b"[\\A\\e]", b"\\E", b"A", b"e", b"-", b"MAX"]
    for _ in range(150):
        pattern = b"*" + b"".join(chance.choices(tokens, k=chance.randrange(1, 5))) + b"*"
        expected = set(ask(b"CONFIG", b"GET", pattern).plain[::2])
        assert {name for name in names if matcher(pattern, ignore_case=True)(name)} == expected, pattern
        assert {name for name in names if LongPattern(pattern, ignore_case=True).matches(name)} == expected, pattern
