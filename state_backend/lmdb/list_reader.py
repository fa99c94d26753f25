"""Reads the keys of list states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from state_backend.codec import packed_list
from state_backend.lmdb.lists import ListBlocks, LongList
from state_backend.lmdb.record_format import (
    FORM_AT,
    LONG_LIST_PAYLOAD,
    SHORT_LIST,
    payload_of,
)
from state_backend.lmdb.record_reader import RecordReader
from state_backend.model.descriptor import Kind


class ListReader(RecordReader):
    """Reads the keys of list states."""

    def list_size(self, key: bytes) -> int:
        record = self._of_kind(key, Kind.LIST)
        if record is None:
            return 0
        payload = payload_of(record)
        return (
            packed_list.count(payload)
            if record[FORM_AT] == SHORT_LIST
            else LongList(*LONG_LIST_PAYLOAD.unpack(payload)).size
        )

    def list_bulk_strings(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        return (packed_list.bulk_strings(*each) for each in self._list_blocks(key, start, stop))

    def list_elements(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        return chain.from_iterable(packed_list.elements(*each) for each in self._list_blocks(key, start, stop))

    def _list_blocks(self, key: bytes, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
        """Iterate over (packed list, start, stop) for a range of a list, as `ListBlocks.blocks` does."""
        record = self._of_kind(key, Kind.LIST)
        if record is None:
            return iter(())
        payload = payload_of(record)
        if record[FORM_AT] == SHORT_LIST:
            return iter([(payload, start, stop)])
        long_list = LongList(*LONG_LIST_PAYLOAD.unpack(payload))
        return ListBlocks(self._txn, self._tables.blocks).blocks(long_list, start, stop)
