"""A small map as one value. A server sends all of it without a conversion.

    count     u16, little endian
    offsets   count x u32: the start of each field, relative to the body
    body      count x (field, value), each `$<length>\\r\\n<bytes>\\r\\n`: RESP bulk strings

A field is found by a search in the body; the offsets distinguish a field from an equal value. The body is sent in one
slice. `pack` packs one map; the Spark sink packs a column of maps at a time (`state_backend.codec.row_encoding`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from state_backend.model.errors import ChangeError

# Larger maps are stored with a record per field. FIELDS_MAX is Redis' limit of a compact hash
# (hash-max-listpack-entries). Above BYTES_MAX, rewriting the map for one field costs more than a record per field
# (guess; two LMDB pages).
FIELDS_MAX = 128
BYTES_MAX = 8192

# The largest count of the format.
COUNT_MAX = 65_535

EMPTY = b"\0\0"


def pack(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Pack a map; the fields must differ. ChangeError for more than `COUNT_MAX` fields, or 4 GiB."""
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
            f"a map of {len(offsets)} fields and {offset} bytes cannot be packed; the limit is {COUNT_MAX} fields: "
            f"write the map as a CLEAR of its key and a PUT per field instead, in one epoch"
        )
    return struct.pack(f"<H{len(offsets)}I", len(offsets), *offsets) + b"".join(parts)


def count(packed: bytes) -> int:
    """Return the number of fields."""
    return packed[0] | packed[1] << 8


def body(packed: bytes) -> bytes:
    """Return the fields and values in turn, as RESP bulk strings."""
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
    return _bulk_at(packed, at + len(needle))[0]


def pairs(packed: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Iterate over (field, value) in the order they were packed in."""
    at = 2 + 4 * count(packed)
    end = len(packed)
    while at < end:
        field, at = _bulk_at(packed, at)
        value, at = _bulk_at(packed, at)
        yield field, value


def _bulk_at(packed: bytes, at: int) -> tuple[bytes, int]:
    """Return the content of the bulk string at an offset, and the offset behind it."""
    line_end = packed.index(b"\r\n", at)
    start = line_end + 2
    end = start + int(packed[at + 1 : line_end])
    return packed[start:end], end + 2
