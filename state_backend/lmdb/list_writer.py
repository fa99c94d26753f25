"""Lists in a write transaction: a short one is one record, a long one has its elements in blocks (see `lmdb.lists`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from state_backend.codec import packed_list
from state_backend.lmdb.key_writer import KeyWriter, KindWriter, WrittenState
from state_backend.lmdb.lists import ListBlocks, LongList
from state_backend.lmdb.record_format import FORM_AT, LONG_LIST, LONG_LIST_PAYLOAD, SHORT_LIST, make_record, payload_of
from state_backend.model.records import Change, Op


class ListWriter(KindWriter):
    """Writes the keys of list states."""

    def __init__(self, keys: KeyWriter) -> None:
        super().__init__(keys)
        self._blocks = ListBlocks(keys.txn, keys.tables.blocks)

    def apply(
        self,
        at: bytes,
        old: bytes | None,
        rows: Iterable[tuple[Any, ...]],
        state: WrittenState,
        *,
        keeps_old: bool,
    ) -> None:
        """Apply the changes of one key: the last one that replaces the list, and the elements appended after it."""
        changes = list(map(Change._make, rows))
        appended: list[bytes] = []
        has_expired = False
        for change in changes:
            if has_expired:  # the list was expired from the change before on
                keeps_old, appended = False, []
            has_expired = change.expire_at_ms is not None and change.expire_at_ms <= self._keys.now_ms
            if change.op == Op.APPEND:
                appended.append(change.value or b"")
            else:
                keeps_old = False
                appended = packed_list.elements(change.value) if change.op == Op.PUT and change.value else []
        last = changes[-1]
        if keeps_old and old is not None and old[FORM_AT] == LONG_LIST:
            long_list = self._blocks.append(LongList(*LONG_LIST_PAYLOAD.unpack(payload_of(old))), appended)
            self._put_long(at, old, last, long_list, state)
            return
        elements = [*packed_list.elements(payload_of(old)), *appended] if keeps_old and old is not None else appended
        elements = elements[-state.length_max :] if state.length_max else elements
        if not elements:
            self._keys.change(at, old, None)
            return
        packed = packed_list.pack(elements)
        if len(elements) > packed_list.ELEMENTS_MAX or len(packed) > packed_list.BYTES_MAX:
            long_list = self._blocks.append(LongList(self._keys.meta.new_id(), 0, 0), elements)
            self._put_long(at, old, last, long_list, state)
            return
        new = make_record(last.key, packed, last.expire_at_ms, state.number, SHORT_LIST)
        self._keys.change(at, old, new)

    def _put_long(self, at: bytes, old: bytes | None, last: Change, long_list: LongList, state: WrittenState) -> None:
        if state.length_max is not None:
            long_list = self._blocks.trim(long_list, state.length_max)
        new = make_record(last.key, LONG_LIST_PAYLOAD.pack(*long_list), last.expire_at_ms, state.number, LONG_LIST)
        self._keys.put(at, old, new)
        self._keys.changed += 1
