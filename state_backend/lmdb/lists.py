"""The elements of long lists in an LMDB transaction: blocks under the index of their first element.

    blocks    list id (8), index of the block's first element (8)  ->  packed list (see `packed_list`) | checksum

Indices count from the first element that the list ever had, and are never reused. Appended elements get indices from
`end` on. Trimming moves `start`; elements before `start` in the first block are skipped. An element is in the last
block that begins at or before its index. So LMDB finds an element with one look-up, and reads a range block after
block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import lmdb

from state_backend.codec import packed_list
from state_backend.codec.checksums import checked, with_checksum
from state_backend.lmdb.record_format import ID_BYTES


class LongList(NamedTuple):
    """The indices of a list's elements: `start` to before `end`."""

    list_id: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.end - self.start


class ListBlocks:
    """The blocks of all lists, in one transaction. It has one cursor: iterate over one list at a time."""

    def __init__(self, txn: lmdb.Transaction[bytes], table: Any) -> None:
        self._cursor = txn.cursor(db=table)

    def blocks(self, long_list: LongList, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
        """Iterate over (packed list, start, stop) for a list's elements `start` to before `stop`.

        The yielded start and stop are the range's indexes within that packed list.
        """
        at, end = long_list.start + start, long_list.start + stop
        found = at < end and self._seek(long_list.list_id, at)
        while found and at < end:
            first, packed = self._index(), checked(self._cursor.value())
            last = min(end, first + packed_list.count(packed))
            yield packed, at - first, last - first
            at = last
            found = self._cursor.next()

    def _seek(self, list_id: int, index: int) -> bool:
        """Move the cursor to the block of an element; False if there is none."""
        name = _name(list_id, index)
        if self._cursor.set_range(name) and self._cursor.key() == name:
            return True
        found = self._cursor.prev() if self._cursor.key() else self._cursor.last()
        return bool(found) and self._cursor.key().startswith(name[:ID_BYTES])

    def _index(self) -> int:
        return int.from_bytes(self._cursor.key()[ID_BYTES:], "big")

    def append(self, long_list: LongList, elements: Sequence[bytes]) -> LongList:
        """Append elements; the last block is filled first."""
        list_id, start, end = long_list
        block: list[bytes] = []
        first = end
        if long_list.size and self._seek(list_id, end - 1):
            packed = checked(self._cursor.value())
            if packed_list.count(packed) < packed_list.ELEMENTS_MAX and len(packed) < packed_list.BYTES_MAX:
                first, block = self._index(), packed_list.elements(packed)
        size = sum(map(len, block))
        for element in elements:
            if len(block) >= packed_list.ELEMENTS_MAX or size >= packed_list.BYTES_MAX:
                self._cursor.put(_name(list_id, first), with_checksum(packed_list.pack(block)))
                first, block, size = first + len(block), [], 0
            block.append(element)
            size += len(element)
        self._cursor.put(_name(list_id, first), with_checksum(packed_list.pack(block)))
        return LongList(list_id, start, end + len(elements))

    def trim(self, long_list: LongList, length_max: int) -> LongList:
        """Retain the last `length_max` elements; delete blocks without any of them."""
        start = max(long_list.start, long_list.end - length_max)
        if start == long_list.start:
            return long_list
        prefix = _name(long_list.list_id, 0)[:ID_BYTES]
        found = self._cursor.set_range(prefix)
        while found and self._cursor.key().startswith(prefix):
            if self._index() + packed_list.count(checked(self._cursor.value())) > start:
                break
            found = self._cursor.delete() and bool(self._cursor.key())
        return long_list._replace(start=start)


def _name(list_id: int, index: int) -> bytes:
    return list_id.to_bytes(ID_BYTES, "big") + index.to_bytes(8, "big")
