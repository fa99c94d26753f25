"""The size of a key in an LMDB store: its rows, their names, and LMDB's overhead per row.

Not counted: free space in pages, LMDB's branch pages, entries of the expiry index, and dropped rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lmdb

from state_backend.codec.checksums import CHECK_BYTES
from state_backend.lmdb.record_format import (
    FORM_AT,
    LARGE_SET,
    LARGE_SORTED_SET,
    LONG_LIST,
    LONG_LIST_PAYLOAD,
    LONG_VALUE,
    LONG_VALUE_PAYLOAD,
    PIECE_BYTES,
    LargeMap,
    LargeSet,
    Tables,
    id_of,
    payload_of,
)

# LMDB's overhead per row in a page: a header, and an entry in the page's index.
ROW_BYTES = 10
# The same for a piece of a long value, and its name.
PIECE_ROW_BYTES = 16 + ROW_BYTES
# A number is yielded after so many rows or bytes, which takes well below a millisecond (guess).
STEP_ROWS = 512
STEP_BYTES = 1 << 20

# Returns how many items a row has.
Count = Callable[[bytes], int]


def sizes(txn: lmdb.Transaction[bytes], tables: Tables, at: bytes, record: bytes, items_max: int) -> Iterator[int]:
    """Iterate over numbers that add up to the size of a key, given its record. Each number takes a bounded time.

    Args:
        items_max: About so many items of a large map, list or set are read; the size of the others is extrapolated.
    """
    form, payload = record[FORM_AT], payload_of(record)
    yield len(at) + len(record) + ROW_BYTES
    if form == LONG_VALUE:
        yield pieces_bytes(payload)
        return
    prefix = id_of(record)
    if not prefix:
        return
    if form == LONG_LIST:
        _, start, end = LONG_LIST_PAYLOAD.unpack(payload)
        yield from _rows(txn, tables.blocks, prefix, _packed_count, end - start, items_max)
        return
    large = LargeSet.of(payload) if form in (LARGE_SET, LARGE_SORTED_SET) else LargeMap.of(payload)
    yield from _rows(txn, tables.fields, prefix, _one, large.size, items_max)
    if form == LARGE_SORTED_SET:
        yield from _rows(txn, tables.blocks, prefix, _leaf_count, large.size, items_max)
    if isinstance(large, LargeMap):
        yield from _rows(txn, tables.maps, prefix, _one, 1, items_max)
        yield from _rows(txn, tables.field_expiry, prefix, _one, large.expiring, items_max)


def pieces_bytes(payload: bytes) -> int:
    """Return the size of a long value's pieces, given the payload of its record."""
    length = int(LONG_VALUE_PAYLOAD.unpack(payload)[1])
    return length + -(-length // PIECE_BYTES) * PIECE_ROW_BYTES


def _one(row: bytes) -> int:
    return 1


def _packed_count(block: bytes) -> int:
    return int.from_bytes(block[:4], "little")


def _leaf_count(node: bytes) -> int:
    return 0 if node[-1 - CHECK_BYTES] else _packed_count(node)


def _rows(
    txn: lmdb.Transaction[bytes], table: Any, prefix: bytes, items_of: Count, total: int, items_max: int
) -> Iterator[int]:
    """Iterate over the sizes of the rows with a prefix, which have `total` items."""
    items = size = reported = rows = 0
    with txn.cursor(db=table) as cursor:
        if cursor.set_range(prefix):
            for name, value in cursor.iternext():
                if not name.startswith(prefix):
                    break
                if items >= items_max:
                    yield size * (total - items) // items
                    break
                items += items_of(value)
                size += len(name) + len(value) + ROW_BYTES
                if items_of is _one and len(value) > FORM_AT and value[FORM_AT] == LONG_VALUE:  # a field's record
                    size += pieces_bytes(payload_of(value))
                rows += 1
                if rows % STEP_ROWS == 0 or size - reported >= STEP_BYTES:
                    yield size - reported
                    reported = size
    yield size - reported
