"""A small map as one value, laid out so that a server sends it as it lies.

    count     u16, little endian
    offsets   count x u32: where each field's text starts, counted from the body's first byte
    body      count x (field, value), each `$<length>\\r\\n<bytes>\\r\\n`: length-prefixed text as RESP has it

Reading one field is a search in the body; the offsets tell a field from a value that looks like one. Sending the
whole map is one slice. Made by the Spark sink a column at a time (`spark_hooks.publish.encoding`) and here one at a
time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from state_backend.model.errors import ChangeError

# The same sizes at which Redis leaves its compact form (hash-max-listpack-entries) and, for bytes, where rewriting
# the map for one field starts to cost more than a record per field (guess; two LMDB pages).
FIELDS_MAX = 128
BYTES_MAX = 8192

COUNT_MAX = 65_535

EMPTY = b"\0\0"


def bulk(text: bytes) -> bytes:
    """Return one length-prefixed text."""
    return b"$%d\r\n%b\r\n" % (len(text), text)


def pack(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Lay out a map; the fields must differ. Raises ChangeError for more than `COUNT_MAX` of them, or 4 GiB."""
    parts: list[bytes] = []
    offsets: list[int] = []
    offset = 0
    for field, value in pairs:
        pair = b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(field), field, len(value), value)
        offsets.append(offset)
        offset += len(pair)
        parts.append(pair)
    if len(offsets) > COUNT_MAX or offset >= 1 << 32:
        raise ChangeError(
            f"a packed map of {len(offsets)} fields and {offset} bytes cannot be; the limit is {COUNT_MAX} fields: "
            f"make the map by a CLEAR of its key and a PUT per field instead, in one epoch"
        )
    return struct.pack(f"<H{len(offsets)}I", len(offsets), *offsets) + b"".join(parts)


def count(packed: bytes) -> int:
    """Return the number of fields."""
    return packed[0] | packed[1] << 8


def body(packed: bytes) -> bytes:
    """Return the pairs as length-prefixed texts, one after another."""
    return packed[2 + 4 * count(packed) :]


def find(packed: bytes, field: bytes) -> bytes | None:
    """Return a field's value, or None."""
    n = packed[0] | packed[1] << 8
    start = 2 + 4 * n
    needle = b"$%d\r\n%b\r\n" % (len(field), field)
    at = packed.find(needle, start)
    if at < 0:
        return None
    offsets = struct.unpack_from(f"<{n}I", packed, 2)
    while at - start not in offsets:
        at = packed.find(needle, at + 1)
        if at < 0:
            return None
    return _text(packed, at + len(needle))[0]


def pairs(packed: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Iterate over (field, value) in the order they were packed in."""
    at = 2 + 4 * count(packed)
    end = len(packed)
    while at < end:
        field, at = _text(packed, at)
        value, at = _text(packed, at)
        yield field, value


def _text(packed: bytes, at: int) -> tuple[bytes, int]:
    """Return the text whose `$` stands at an offset, and the offset behind it."""
    line_end = packed.index(b"\r\n", at)
    start = line_end + 2
    end = start + int(packed[at + 1 : line_end])
    return packed[start:end], end + 2
