"""Patterns of KEYS, SCAN MATCH, PSUBSCRIBE and CONFIG GET, exactly as in Redis' stringmatchlen.

    h?llo*w[oa-c]rld\\*      ?  any byte; *  any bytes; [..]  a byte of the set, [^..] a byte not in it; \\  literal

The part between two stars is a *piece*: a sequence of byte sets. Each piece is matched at its first position after the
piece before it, without backtracking: pieces have fixed lengths, so no match is lost. A piece of plain bytes is found
by `bytes.find`. Any other piece is searched at all positions at once: an integer has one bit for each position. So
even a hostile pattern takes time proportional to the text's length. A short pattern becomes a regular expression
instead, which is faster, and too short to take long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from resp_server.protocol.errors import GenericError

# Redis has no limit. Here a match must not block the event loop.
PATTERN_BYTES_MAX = 1024

# Patterns up to this length become regular expressions. In the worst case these read each byte of a text this many
# times (guess: 50 ns per read).
SHORT_BYTES_MAX = 32

Matches = Callable[[bytes], object]

# The special characters of a pattern.
MARK = re.compile(rb"[*?\[\\]")

# A token of a pattern is the set of the bytes allowed at a position, or STAR.
ANY = frozenset(range(256))
STAR = None

Piece = tuple[frozenset[int], ...]


def matcher(pattern: bytes, ignore_case: bool = False) -> Matches:
    """Return a function that tells whether a text matches; GenericError for a pattern beyond the limit."""
    if pattern == b"*":
        return lambda text: True
    check_pattern(pattern)
    if len(pattern) <= SHORT_BYTES_MAX:
        return re.compile(translate(pattern, ignore_case), re.DOTALL).fullmatch
    return LongPattern(pattern, ignore_case).matches


def literal_start(pattern: bytes) -> bytes:
    """Return a pattern's text before its first special character: what follows may match any text."""
    return MARK.split(pattern, maxsplit=1)[0]


def check_pattern(pattern: bytes) -> None:
    """Raise GenericError for a pattern beyond the limit."""
    if len(pattern) > PATTERN_BYTES_MAX:
        raise GenericError(f"a pattern may have {PATTERN_BYTES_MAX} bytes; this one has {len(pattern)}")


class LongPattern:
    """A pattern of any length, compiled at the first match."""

    def __init__(self, pattern: bytes, ignore_case: bool = False) -> None:
        self._pattern = pattern
        self._ignore_case = ignore_case
        self._parts: _SplitPattern | None = None

    def matches(self, text: bytes) -> bool:
        """Return whether a text matches."""
        parts = self._parts
        if parts is None:
            parts = self._parts = _SplitPattern.of(self._pattern, self._ignore_case)
        size = len(text)
        if size < parts.bytes_min:
            return False
        if not parts.is_open:
            return size == parts.bytes_min and parts.first.is_at(text, 0)
        if not parts.first.is_at(text, 0) or not parts.last.is_at(text, size - parts.last.size):
            return False
        at, end = parts.first.size, size - parts.last.size
        positions = _BytePositions(text)
        for piece in parts.inner:
            at = piece.find(positions, at, end)
            if at < 0:
                return False
            at += piece.size
        return True


class _CompiledPiece(NamedTuple):
    """A piece and its search.

    Args:
        plain: Its bytes, if each set has a single byte; else None.
    """

    piece: Piece
    size: int
    plain: bytes | None

    @classmethod
    def of(cls, piece: Sequence[frozenset[int]]) -> _CompiledPiece:
        is_literal = all(len(each) == 1 for each in piece)
        return cls(tuple(piece), len(piece), bytes(next(iter(each)) for each in piece) if is_literal else None)

    def is_at(self, text: bytes, at: int) -> bool:
        """Return whether the piece matches at a position of a text that is long enough."""
        if self.plain is not None:
            return text.startswith(self.plain, at)
        return all(byte in each for byte, each in zip(text[at : at + self.size], self.piece, strict=True))

    def find(self, positions: _BytePositions, at: int, end: int) -> int:
        """Return the first position of a match between `at` and `end`, or -1."""
        if self.plain is not None:
            return positions.text.find(self.plain, at, end)
        last = end - self.size
        if last < at:
            return -1
        size = len(positions.text)
        found = (1 << (size - at)) - (1 << (size - 1 - last))
        for offset, each in enumerate(self.piece):
            if each is not ANY:
                found &= positions.of(each) << offset
                if not found:
                    return -1
        return size - found.bit_length()


class _BytePositions:
    """The positions of bytes in a text, as integers with a bit per position; the highest bit is the first position."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._cache: dict[frozenset[int], int] = {}

    def of(self, some: frozenset[int]) -> int:
        """Return the positions of the bytes of a set."""
        found = self._cache.get(some)
        if found is None:
            digits = bytes(0x31 if byte in some else 0x30 for byte in range(256))
            found = self._cache[some] = int(self.text.translate(digits), 2)
        return found


class _SplitPattern(NamedTuple):
    """A pattern's pieces: `first` before the first star, `last` after the last one.

    Args:
        is_open: The pattern has a star.
    """

    first: _CompiledPiece
    inner: Sequence[_CompiledPiece]
    last: _CompiledPiece
    is_open: bool
    bytes_min: int

    @classmethod
    def of(cls, pattern: bytes, ignore_case: bool) -> _SplitPattern:
        pieces = _pieces(pattern, ignore_case)
        found = [_CompiledPiece.of(piece) for piece in pieces]
        # Stars at the end match an empty rest as well, but `**` does not match an empty text.
        bytes_min = sum(each.size for each in found) or int(_is_only_stars(pattern))
        nothing = _CompiledPiece.of(())
        if len(found) == 1:
            return cls(found[0], (), nothing, False, bytes_min)
        return cls(found[0], [each for each in found[1:-1] if each.size], found[-1], True, bytes_min)


def _pieces(pattern: bytes, ignore_case: bool) -> list[list[frozenset[int]]]:
    pieces: list[list[frozenset[int]]] = [[]]
    for token in _tokens(pattern, ignore_case):
        if token is STAR:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


def translate(pattern: bytes, ignore_case: bool = False) -> bytes:
    """Return the regular expression (DOTALL, for fullmatch) of a glob.

    The part between two stars is an atomic group. So the time is proportional to pattern length times text length;
    with backtracking it would be exponential in the number of stars.
    """
    first, *others = [b"".join(map(_any_of, piece)) for piece in _pieces(pattern, ignore_case)]
    if not others:
        return first
    inner = [b"(?>.*?%b)" % piece for piece in others[:-1] if piece]
    return first + b"".join(inner) + b".*" + others[-1] if not _is_only_stars(pattern) else b".+"


def _is_only_stars(pattern: bytes) -> bool:
    """Return whether a pattern is two stars or more, which in stringmatchlen does not match the empty text."""
    return bool(pattern) and not pattern.strip(b"*")


def _tokens(pattern: bytes, ignore_case: bool) -> Iterator[frozenset[int] | None]:
    """Split a pattern into stars, and sets of the bytes allowed at a position."""
    at = 0
    while at < len(pattern):
        byte = pattern[at]
        at += 1
        if byte == 0x2A:  # *
            yield STAR
        elif byte == 0x3F:  # ?
            yield ANY
        elif byte == 0x5B:  # [
            token, at = _class(pattern, at, ignore_case)
            yield token
        else:
            if byte == 0x5C and at < len(pattern):  # backslash
                byte = pattern[at]
                at += 1
            yield _BOTH_CASES[byte] if ignore_case else _ONE[byte]


def _class(pattern: bytes, at: int, ignore_case: bool) -> tuple[frozenset[int], int]:
    """Return the bytes of a bracket, and the offset after it. An unclosed bracket ends with the pattern."""
    is_negated = pattern[at : at + 1] == b"^"
    at += is_negated
    members: set[int] = set()
    while at < len(pattern) and pattern[at] != 0x5D:  # ]
        if pattern[at] == 0x5C and at + 1 < len(pattern):  # backslash
            members.add(pattern[at + 1])  # case-sensitive even with `ignore_case`, as in Redis
            at += 2
        elif pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern):
            members |= _range(pattern[at], pattern[at + 2], ignore_case)
            at += 3
        else:
            members |= _BOTH_CASES[pattern[at]] if ignore_case else _ONE[pattern[at]]
            at += 1
    return ANY - members if is_negated else frozenset(members), at + 1


def _range(start: int, end: int, ignore_case: bool) -> frozenset[int]:
    """Return the bytes of `a-z`, in either order. C compares them as signed characters.

    With ignore_case, the ends are sorted before they are made lower case, so the range may be empty.
    """
    low, high = sorted((_signed(start), _signed(end)))
    if not ignore_case:
        return frozenset(code & 0xFF for code in range(low, high + 1))
    low, high = _lowered(low), _lowered(high)
    return frozenset(code for code in range(256) if low <= _signed(_lowered(code)) <= high)


def _lowered(code: int) -> int:
    return code + 32 if 0x41 <= code <= 0x5A else code


def _signed(code: int) -> int:
    return code - 256 if code > 127 else code


_ONE = [frozenset((code,)) for code in range(256)]
_BOTH_CASES = [frozenset(each.lower() + each.upper()) for each in (bytes((code,)) for code in range(256))]


def _any_of(members: frozenset[int]) -> bytes:
    if members is ANY or len(members) == 256:
        return b"."
    if len(members) == 1:
        return re.escape(bytes(members))
    if not members:
        return b"(?!)"
    return b"[%b]" % b"".join(b"\\x%02x" % code for code in sorted(members))
