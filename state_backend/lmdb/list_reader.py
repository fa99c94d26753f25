"""Reading lists."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from state_backend.codec import packed_list
from state_backend.lmdb.layout import (
    FORM_AT,
    LONG_LIST,
    SHORT,
    payload_of,
)
from state_backend.lmdb.lists import ListBlocks, LongList
from state_backend.lmdb.record_reader import RecordReader
from state_backend.model.descriptor import Kind


class ListReader(RecordReader):
    """Reads the keys of list states."""

    def list_size(self, key: bytes) -> int:
        record = self._of_kind(key, Kind.LIST)
        if record is None:
            return 0
        payload = payload_of(record)
        return packed_list.count(payload) if record[FORM_AT] == SHORT else LongList(*LONG_LIST.unpack(payload)).size

    def list_parts(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        return (packed_list.part(*each) for each in self._list_blocks(key, start, stop))

    def list_elements(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        return chain.from_iterable(packed_list.elements(*each) for each in self._list_blocks(key, start, stop))

    def _list_blocks(self, key: bytes, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
        """Iterate over (packed list, first, last + 1 in it) for a range of a list."""
        record = self._of_kind(key, Kind.LIST)
        if record is None:
            return iter(())
        payload = payload_of(record)
        if record[FORM_AT] == SHORT:
            return iter([(payload, start, stop)])
        long_list = LongList(*LONG_LIST.unpack(payload))
        return ListBlocks(self._txn, self._tables.blocks).parts(long_list, start, stop)
