"""Patterns of KEYS, SCAN MATCH and CONFIG GET, exactly as Redis' stringmatchlen takes them.

A pattern becomes a regular expression over bytes. What stands between two stars is found at its first place and never
looked for again (an atomic group): for patterns without alternatives that loses no match, and it keeps the time
proportional to pattern times key, where backtracking would take it to the power of the stars.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from resp_server.errors import PlainError

# Bounds the time to compile one (guess: some 10 ms); Redis has no limit.
PATTERN_BYTES_MAX = 4096

Matches = Callable[[bytes], object]


def matcher(pattern: bytes, ignore_case: bool = False) -> Matches:
    """Return a function that tells whether a text matches; PlainError for a pattern beyond the limit."""
    if pattern == b"*":
        return lambda text: True
    if len(pattern) > PATTERN_BYTES_MAX:
        raise PlainError(f"the pattern is longer than {PATTERN_BYTES_MAX} bytes")
    return re.compile(translate(pattern), re.DOTALL | (re.IGNORECASE if ignore_case else 0)).fullmatch


def translate(pattern: bytes) -> bytes:
    """Return the regular expression (DOTALL, for fullmatch) of a glob."""
    pieces: list[list[bytes]] = [[]]
    for token in _tokens(pattern):
        if token == b"*":
            pieces.append([])
        else:
            pieces[-1].append(token)
    first, *others = [b"".join(piece) for piece in pieces]
    if not others:
        return first
    inner = [b"(?>.*?%b)" % piece for piece in others[:-1] if piece]
    # Stars at the end match the empty rest too, but a lone `*` never meets an empty text: see `_is_only_stars`.
    ending = b".*" + others[-1]
    return first + b"".join(inner) + ending if not _is_only_stars(pattern) else b".+"


def _is_only_stars(pattern: bytes) -> bool:
    """Tell whether a pattern is `**` or longer; stringmatchlen says that it does not match the empty text."""
    return not pattern.strip(b"*")


def _tokens(pattern: bytes) -> Iterator[bytes]:
    """Split a pattern into regular expressions for one byte each, and `*`."""
    at = 0
    while at < len(pattern):
        mark = pattern[at : at + 1]
        at += 1
        if mark == b"*":
            yield b"*"
        elif mark == b"?":
            yield b"."
        elif mark == b"[":
            token, at = _class(pattern, at)
            yield token
        else:
            if mark == b"\\" and at < len(pattern):
                mark = pattern[at : at + 1]
                at += 1
            yield re.escape(mark)


def _class(pattern: bytes, at: int) -> tuple[bytes, int]:
    """Return a bracket's regular expression and the offset behind it. A bracket never closed goes to the end."""
    is_negated = pattern[at : at + 1] == b"^"
    at += is_negated
    members: set[int] = set()
    while at < len(pattern) and pattern[at] != 0x5D:  # ]
        if pattern[at] == 0x5C and at + 1 < len(pattern):  # backslash
            members.add(pattern[at + 1])
            at += 2
        elif pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern):
            members.update(_range(pattern[at], pattern[at + 2]))
            at += 3
        else:
            members.add(pattern[at])
            at += 1
    return _any_of(members, is_negated), at + 1


def _range(start: int, end: int) -> Iterator[int]:
    """Return the bytes of `a-z`, in either order. C compares them as signed characters."""
    low, high = sorted((_signed(start), _signed(end)))
    return (code & 0xFF for code in range(low, high + 1))


def _signed(code: int) -> int:
    return code - 256 if code > 127 else code


def _any_of(members: set[int], is_negated: bool) -> bytes:
    if not members:
        return b"." if is_negated else b"(?!)"
    return (b"[^%b]" if is_negated else b"[%b]") % b"".join(b"\\x%02x" % code for code in sorted(members))
