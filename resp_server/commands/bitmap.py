"""Bitmap commands on value states. Bit 0 is the highest bit of the first byte."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

from resp_server.command.handler import command, integer
from resp_server.commands.sliced_reply import BYTES_AT_ONCE_MAX, CHUNK_ITEMS_MAX, size_of, sliced_reply
from resp_server.pipeline.context import ReadContext
from resp_server.protocol.errors import GenericError, ReplyError, syntax_error
from resp_server.protocol.replies import FirstOf, Reply
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import Value

# A Redis string has at most 512 MiB; no bit offset may lie beyond that.
OFFSET_MAX = (512 << 23) - 1

BITFIELD_TYPE = re.compile(rb"([iu])(0|[1-9][0-9]?)")


def chunks_of(text: Value, start: int, stop: int) -> Iterator[bytes]:
    """Iterate over the bytes `start` up to `stop` (exclusive) of a value; both are within it."""
    return iter((text[start:stop],)) if isinstance(text, bytes) else text.chunks(start, stop)


def bit_offset(argument: bytes, bits: int = 0) -> int:
    """Parse a bit offset. With `bits`, `#n` is the offset of the n-th integer of that width."""
    is_nth = bits > 0 and argument[:1] == b"#"
    try:
        number = integer(argument[is_nth:])
    except ReplyError:
        number = -1
    if is_nth:
        number = (number * bits + 2**63) % 2**64 - 2**63  # a signed 64-bit product overflows like this in C
    if not 0 <= number <= OFFSET_MAX:
        raise GenericError("bit offset is not an integer or out of range")
    return number


@command("getbit")
def getbit(context: ReadContext, key: bytes, position: Annotated[int, bit_offset]) -> int:
    """Returns a bit value by offset."""
    text = context.counted(context.at(key).lazy_value(key))
    if text is None or position >> 3 >= size_of(text):
        return 0
    byte = b"".join(chunks_of(text, position >> 3, (position >> 3) + 1))[0]
    return byte >> (7 - (position & 7)) & 1


class BitRange(NamedTuple):
    """The range of BITCOUNT and BITPOS: positions `start` to `stop`, both inclusive; negative ones count from the end.

    Args:
        stop: None for the end of the string.
        counts_bits: Positions are bits, else bytes.
    """

    start: int = 0
    stop: int | None = None
    counts_bits: bool = False

    def to_bits(self, size: int) -> tuple[int, int]:
        """Return the range in bits, first to end (exclusive), for a string of `size` bytes; (0, 0) if it is empty."""
        total = 8 * size if self.counts_bits else size
        stop = total - 1 if self.stop is None else self.stop
        first = max(0, self.start + total) if self.start < 0 else self.start
        last = min(max(0, stop + total) if stop < 0 else stop, total - 1)
        if first > last:
            return 0, 0
        return (first, last + 1) if self.counts_bits else (8 * first, 8 * last + 8)


def _is_bit_unit(arguments: Sequence[bytes]) -> bool:
    """Parse `[BYTE|BIT]`; True for BIT."""
    if not arguments:
        return False
    if arguments[0].upper() not in (b"BIT", b"BYTE"):
        raise syntax_error()
    return arguments[0].upper() == b"BIT"


def _masked_chunks(text: Value, first: int, end: int, fill: int) -> Iterator[bytes]:
    """Iterate over the bytes that contain bits `first` to `end`; other bits of the first and last byte are `fill`."""
    remaining = -(-end // 8) - first // 8
    is_first = True
    for chunk in chunks_of(text, first // 8, -(-end // 8)):
        remaining -= len(chunk)
        if is_first and first % 8:
            chunk = bytes([_with_fill(chunk[0], 0xFF >> first % 8, fill)]) + chunk[1:]
        if not remaining and end % 8:
            chunk = chunk[:-1] + bytes([_with_fill(chunk[-1], 0xFF00 >> end % 8 & 0xFF, fill)])
        is_first = False
        yield chunk


def _with_fill(byte: int, mask: int, fill: int) -> int:
    return byte & mask | (~mask & 0xFF if fill else 0)


@command("bitcount")
def bitcount(context: ReadContext, key: bytes, *arguments: bytes) -> Reply:
    """Counts the number of set bits (population counting) in a string."""
    bits = BitRange()
    if arguments:
        if not 2 <= len(arguments) <= 3:
            raise syntax_error()
        bits = BitRange(integer(arguments[0]), integer(arguments[1]), _is_bit_unit(arguments[2:]))
    text = context.counted(context.at(key).lazy_value(key))
    if bits.stop is not None and bits.start < 0 and bits.stop < 0 and bits.start > bits.stop:
        return 0  # as in Redis, before the length of the string is known
    return _result_of_chunks(context, text, key, lambda text: _bit_counts(text, bits), int)


def _bit_counts(text: Value | None, bits: BitRange) -> Iterator[Sequence[Reply]]:
    if text is not None:
        for chunk in _masked_chunks(text, *bits.to_bits(size_of(text)), fill=0):
            yield [int.from_bytes(chunk).bit_count()]


def _result_of_chunks(
    context: ReadContext,
    text: Value | None,
    key: bytes,
    results_of: Callable[[Value | None], Iterator[Sequence[Reply]]],
    shape: type,
) -> Reply:
    """Return the sum (shape int) or the first (FirstOf) of a value's results; a very long value is read in steps."""
    if size_of(text) > BYTES_AT_ONCE_MAX:
        return sliced_reply(context, lambda view: results_of(view.at(key).lazy_value(key)), shape)
    found = [each for part in results_of(text) for each in part]
    return sum(found) if shape is int else found[0]


@command("bitpos")
def bitpos(context: ReadContext, key: bytes, bit: int, *arguments: bytes) -> Reply:
    """Finds the first set (1) or clear (0) bit in a string."""
    if bit not in (0, 1):
        raise GenericError("The bit argument must be 1 or 0.")
    bits = BitRange()
    if arguments:
        if len(arguments) > 3:
            raise syntax_error()
        start, counts_bits = integer(arguments[0]), _is_bit_unit(arguments[2:])
        bits = BitRange(start, integer(arguments[1]) if len(arguments) > 1 else None, counts_bits)
    text = context.counted(context.at(key).lazy_value(key))
    return _result_of_chunks(context, text, key, lambda text: _first_bit(text, bit, bits), FirstOf)


def _first_bit(text: Value | None, bit: int, bits: BitRange) -> Iterator[Sequence[Reply]]:
    """Find the first `bit`. Without an end position, the string counts as followed by zeros."""
    if text is None:
        yield [-1 if bit else 0]
        return
    first, end = bits.to_bits(size_of(text))
    position = first // 8
    for chunk in _masked_chunks(text, first, end, fill=1 - bit):
        remainder = chunk.lstrip(b"\0" if bit else b"\xff")
        position += len(chunk) - len(remainder)
        if remainder:
            byte = remainder[0] if bit else ~remainder[0] & 0xFF
            yield [8 * position + 8 - byte.bit_length()]
            return
        yield []
    yield [end if not bit and bits.stop is None and first < end else -1]


class BitField(NamedTuple):
    """One GET of BITFIELD: an integer of `bits` bits at a bit position."""

    position: int
    bits: int
    is_signed: bool

    def read(self, text: Value | None) -> int:
        """Return the integer in a string; bits beyond its end are 0."""
        size = size_of(text)
        start, stop = self.position // 8, (self.position + self.bits + 7) // 8
        stored = b"" if text is None or start >= size else b"".join(chunks_of(text, start, min(stop, size)))
        window = int.from_bytes(stored.ljust(stop - start, b"\0"))
        number = window >> (8 * stop - self.position - self.bits) & ((1 << self.bits) - 1)
        return number - (1 << self.bits) if self.is_signed and number >> (self.bits - 1) else number


def _field_type(argument: bytes) -> tuple[bool, int]:
    found = BITFIELD_TYPE.fullmatch(argument.partition(b"\0")[0])
    if found is None or not 1 <= int(found[2]) <= (64 if found[1] == b"i" else 63):
        raise GenericError(
            "Invalid bitfield type. Use something like i16 u8. Note that u64 is not supported but i64 is."
        )
    return found[1] == b"i", int(found[2])


def _bit_fields(arguments: Sequence[bytes]) -> Iterator[list[BitField]]:
    """Parse the operations, in batches. A write among them is an error once all have been parsed, as in Redis."""
    fields: list[BitField] = []
    is_read_only = True
    position = 0
    while position < len(arguments):
        name, remaining = arguments[position].upper(), len(arguments) - position - 1
        if name == b"OVERFLOW" and remaining >= 1:
            if arguments[position + 1].upper() not in (b"WRAP", b"SAT", b"FAIL"):
                raise GenericError("Invalid OVERFLOW type specified")
            position += 2
            continue
        arguments_taken = {b"GET": 2, b"SET": 3, b"INCRBY": 3}.get(name)
        if arguments_taken is None or remaining < arguments_taken:
            raise syntax_error()
        is_signed, bits = _field_type(arguments[position + 1])
        fields.append(BitField(bit_offset(arguments[position + 2], bits), bits, is_signed))
        if name != b"GET":
            is_read_only = False
            integer(arguments[position + 3])
        position += arguments_taken + 1
        if len(fields) == CHUNK_ITEMS_MAX:
            yield fields
            fields = []
    if not is_read_only:
        raise GenericError("BITFIELD_RO only supports the GET subcommand")
    yield fields


@command("bitfield_ro")
def bitfield_ro(context: ReadContext, key: bytes, *arguments: bytes) -> Reply:
    """Performs arbitrary read-only bitfield integer operations on strings."""
    if len(arguments) > 3 * CHUNK_ITEMS_MAX:
        return sliced_reply(context, lambda view: _field_values(view, key, arguments))
    fields = [each for part in _bit_fields(arguments) for each in part]
    text = context.counted(context.at(key).lazy_value(key))
    return [field.read(text) for field in fields]


def _field_values(view: KeyspaceView, key: bytes, arguments: Sequence[bytes]) -> Iterator[Sequence[Reply]]:
    for _ in _bit_fields(arguments):
        yield []  # a wrong operation is reported before a wrong type
    text = view.at(key).lazy_value(key)
    for fields in _bit_fields(arguments):
        yield [field.read(text) for field in fields]
