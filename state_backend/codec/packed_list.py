"""A list as one value. A server sends any range of its elements without a conversion.

    count     u32, little endian
    ends      count x u32: the end of each element, relative to the body
    body      count x `$<length>\\r\\n<bytes>\\r\\n`: RESP bulk strings

A short list is one packed list; a long list is several (see `lmdb.lists`). A small set is a packed list in byte order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import accumulate

# Longer lists are stored in blocks (see `packed_map.FIELDS_MAX`).
ELEMENTS_MAX = 128
BYTES_MAX = 8192

EMPTY = bytes(4)


def pack(elements: Iterable[bytes]) -> bytes:
    """Pack elements; struct.error for a body of 4 GiB or more."""
    bulks = [b"$%d\r\n%b\r\n" % (len(element), element) for element in elements]
    return struct.pack(f"<I{len(bulks)}I", len(bulks), *accumulate(map(len, bulks))) + b"".join(bulks)


def count(packed: bytes) -> int:
    """Return the number of elements."""
    return int.from_bytes(packed[:4], "little")


def bulk_strings(packed: bytes, start: int, stop: int) -> bytes:
    """Return the elements `start` to before `stop`, both within the list, as RESP bulk strings."""
    if start >= stop:
        return b""
    body = 4 + 4 * count(packed)
    return packed[body + _end(packed, start - 1) : body + _end(packed, stop - 1)]


def _end(packed: bytes, index: int) -> int:
    """Return the end of an element, relative to the body; 0 for index -1."""
    return int.from_bytes(packed[4 + 4 * index : 8 + 4 * index], "little") if index >= 0 else 0


def elements(packed: bytes, start: int = 0, stop: int | None = None) -> list[bytes]:
    """Return the elements, or those from `start` to before `stop`."""
    n = count(packed)
    body = 4 + 4 * n
    ends = (0, *struct.unpack_from(f"<{n}I", packed, 4))
    stop = n if stop is None else stop
    return [
        packed[packed.index(b"\r\n", body + ends[index]) + 2 : body + ends[index + 1] - 2]
        for index in range(start, stop)
    ]


def has(packed: bytes, element: bytes) -> bool:
    """Return whether a list has an element."""
    n = count(packed)
    body = 4 + 4 * n
    needle = b"$%d\r\n%b\r\n" % (len(element), element)
    at = packed.find(needle, body)
    if at < 0:
        return False
    starts = (0, *struct.unpack_from(f"<{n}I", packed, 4))
    while at >= 0 and at - body not in starts:
        at = packed.find(needle, at + 1)
    return at >= 0
