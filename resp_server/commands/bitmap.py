"""Strings as bitmaps. Bits are counted from the first byte's highest one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

from resp_server.command_table.declaration import command, integer
from resp_server.commands.generic import BYTES_AT_ONCE_MAX, SLICE_ENTRIES, size_of, sliced
from resp_server.execution.context import CommandContext
from resp_server.protocol.errors import PlainError, ReplyError, syntax_error
from resp_server.protocol.replies import FirstOf, Reply
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import Text

# A string of Redis has at most 512 MiB, and no offset may be behind that.
OFFSET_MAX = (512 << 23) - 1

BITFIELD_TYPE = re.compile(rb"([iu])(0|[1-9][0-9]?)")


def pieces(text: Text, start: int, stop: int) -> Iterator[bytes]:
    """Iterate over the bytes `start` to before `stop` of a value, both within it."""
    return iter((text[start:stop],)) if isinstance(text, bytes) else text.parts(start, stop)


def offset(word: bytes, bits: int = 0) -> int:
    """Read a bit offset; with `bits`, `#n` is the n-th number of so many."""
    is_nth = bits > 0 and word[:1] == b"#"
    try:
        number = integer(word[is_nth:])
    except ReplyError:
        number = -1
    if is_nth:
        number = (number * bits + 2**63) % 2**64 - 2**63  # as C counts
    if not 0 <= number <= OFFSET_MAX:
        raise PlainError("bit offset is not an integer or out of range")
    return number


@command("getbit")
def getbit(context: CommandContext, key: bytes, at: Annotated[int, offset]) -> int:
    """Returns a bit value by offset."""
    text = context.counted(context.at(key).text(key))
    if text is None or at >> 3 >= size_of(text):
        return 0
    byte = b"".join(pieces(text, at >> 3, (at >> 3) + 1))[0]
    return byte >> (7 - (at & 7)) & 1


class Span(NamedTuple):
    """What BITCOUNT and BITPOS are asked to look at: from one position to another, that one included.

    stop: None for the end of the string, from which negative positions count. is_bits: they are of bits, not of bytes.
    """

    start: int = 0
    stop: int | None = None
    is_bits: bool = False

    def within(self, size: int) -> tuple[int, int]:
        """Return the first bit of a string of so many bytes, and the one behind the last; the same if there is none."""
        total = 8 * size if self.is_bits else size
        stop = total - 1 if self.stop is None else self.stop
        first = max(0, self.start + total) if self.start < 0 else self.start
        last = min(max(0, stop + total) if stop < 0 else stop, total - 1)
        if first > last:
            return 0, 0
        return (first, last + 1) if self.is_bits else (8 * first, 8 * last + 8)


def _unit(words: Sequence[bytes]) -> bool:
    """Read `[BYTE|BIT]`."""
    if not words:
        return False
    if words[0].upper() not in (b"BIT", b"BYTE"):
        raise syntax_error()
    return words[0].upper() == b"BIT"


def _masked(text: Text, first: int, end: int, fill: int) -> Iterator[bytes]:
    """Iterate over the bytes that hold some bits; what else is in the first and the last one reads as `fill`."""
    left = -(-end // 8) - first // 8
    is_first = True
    for piece in pieces(text, first // 8, -(-end // 8)):
        left -= len(piece)
        if is_first and first % 8:
            piece = bytes([_filled(piece[0], 0xFF >> first % 8, fill)]) + piece[1:]
        if not left and end % 8:
            piece = piece[:-1] + bytes([_filled(piece[-1], 0xFF00 >> end % 8 & 0xFF, fill)])
        is_first = False
        yield piece


def _filled(byte: int, kept: int, fill: int) -> int:
    return byte & kept | (~kept & 0xFF if fill else 0)


@command("bitcount")
def bitcount(context: CommandContext, key: bytes, *words: bytes) -> Reply:
    """Counts the number of set bits (population counting) in a string."""
    span = Span()
    if words:
        if not 2 <= len(words) <= 3:
            raise syntax_error()
        span = Span(integer(words[0]), integer(words[1]), _unit(words[2:]))
    text = context.counted(context.at(key).text(key))
    if span.stop is not None and span.start < 0 and span.stop < 0 and span.start > span.stop:
        return 0  # as Redis, before it looks how long the string is
    return _of_pieces(context, text, key, lambda text: _counts(text, span), int)


def _counts(text: Text | None, span: Span) -> Iterator[Sequence[Reply]]:
    if text is not None:
        for piece in _masked(text, *span.within(size_of(text)), fill=0):
            yield [int.from_bytes(piece).bit_count()]


def _of_pieces(
    context: CommandContext,
    text: Text | None,
    key: bytes,
    made_of: Callable[[Text | None], Iterator[Sequence[Reply]]],
    shape: type,
) -> Reply:
    """Answer by what is found in a value's pieces: of a very long one in steps."""
    if size_of(text) > BYTES_AT_ONCE_MAX:
        return sliced(context, lambda view: made_of(view.at(key).text(key)), shape)
    found = [each for part in made_of(text) for each in part]
    return sum(found) if shape is int else found[0]


@command("bitpos")
def bitpos(context: CommandContext, key: bytes, bit: int, *words: bytes) -> Reply:
    """Finds the first set (1) or clear (0) bit in a string."""
    if bit not in (0, 1):
        raise PlainError("The bit argument must be 1 or 0.")
    span = Span()
    if words:
        if len(words) > 3:
            raise syntax_error()
        start, is_bits = integer(words[0]), _unit(words[2:])
        span = Span(start, integer(words[1]) if len(words) > 1 else None, is_bits)
    text = context.counted(context.at(key).text(key))
    return _of_pieces(context, text, key, lambda text: _position(text, bit, span), FirstOf)


def _position(text: Text | None, bit: int, span: Span) -> Iterator[Sequence[Reply]]:
    """Find a bit. A string goes on with zeros for ever, so far as no end is given."""
    if text is None:
        yield [-1 if bit else 0]
        return
    first, end = span.within(size_of(text))
    at = first // 8
    for piece in _masked(text, first, end, fill=1 - bit):
        rest = piece.lstrip(b"\0" if bit else b"\xff")
        at += len(piece) - len(rest)
        if rest:
            byte = rest[0] if bit else ~rest[0] & 0xFF
            yield [8 * at + 8 - byte.bit_length()]
            return
        yield []
    yield [end if not bit and span.stop is None and first < end else -1]


class Number(NamedTuple):
    """What one GET of BITFIELD asks for."""

    at: int
    bits: int
    is_signed: bool

    def of(self, text: Text | None) -> int:
        """Read it from a string, behind whose end are zeros."""
        size = size_of(text)
        start, stop = self.at // 8, (self.at + self.bits + 7) // 8
        held = b"" if text is None or start >= size else b"".join(pieces(text, start, min(stop, size)))
        whole = int.from_bytes(held.ljust(stop - start, b"\0"))
        number = whole >> (8 * stop - self.at - self.bits) & ((1 << self.bits) - 1)
        return number - (1 << self.bits) if self.is_signed and number >> (self.bits - 1) else number


def _type(word: bytes) -> tuple[bool, int]:
    found = BITFIELD_TYPE.fullmatch(word.partition(b"\0")[0])
    if found is None or not 1 <= int(found[2]) <= (64 if found[1] == b"i" else 63):
        raise PlainError("Invalid bitfield type. Use something like i16 u8. Note that u64 is not supported but i64 is.")
    return found[1] == b"i", int(found[2])


def _numbers(words: Sequence[bytes]) -> Iterator[list[Number]]:
    """Read the operations, a slice at a time; that one of them writes is said after all are read."""
    asked: list[Number] = []
    is_read = True
    at = 0
    while at < len(words):
        name, left = words[at].upper(), len(words) - at - 1
        if name == b"OVERFLOW" and left >= 1:
            if words[at + 1].upper() not in (b"WRAP", b"SAT", b"FAIL"):
                raise PlainError("Invalid OVERFLOW type specified")
            at += 2
            continue
        width = {b"GET": 2, b"SET": 3, b"INCRBY": 3}.get(name)
        if width is None or left < width:
            raise syntax_error()
        is_signed, bits = _type(words[at + 1])
        asked.append(Number(offset(words[at + 2], bits), bits, is_signed))
        if name != b"GET":
            is_read = False
            integer(words[at + 3])
        at += width + 1
        if len(asked) == SLICE_ENTRIES:
            yield asked
            asked = []
    if not is_read:
        raise PlainError("BITFIELD_RO only supports the GET subcommand")
    yield asked


@command("bitfield_ro")
def bitfield_ro(context: CommandContext, key: bytes, *words: bytes) -> Reply:
    """Performs arbitrary read-only bitfield integer operations on strings."""
    if len(words) > 3 * SLICE_ENTRIES:
        return sliced(context, lambda view: _fields(view, key, words))
    asked = [each for part in _numbers(words) for each in part]
    text = context.counted(context.at(key).text(key))
    return [each.of(text) for each in asked]


def _fields(view: KeyspaceView, key: bytes, words: Sequence[bytes]) -> Iterator[Sequence[Reply]]:
    for _ in _numbers(words):
        yield []  # a wrong operation is said before a wrong kind
    text = view.at(key).text(key)
    for asked in _numbers(words):
        yield [each.of(text) for each in asked]
