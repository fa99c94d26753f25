"""Changes of ordered states in a write transaction: each FOLD becomes a change of the stored value, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from state_backend.codec import packed_list
from state_backend.codec.keep_by_order import OrderedList, unpack
from state_backend.lmdb.folds import Folds
from state_backend.lmdb.key_writer import KeyWriter, WrittenState
from state_backend.lmdb.lists import ListBlocks, LongList
from state_backend.lmdb.record_format import FORM_AT, LONG_LIST, LONG_LIST_PAYLOAD, payload_of
from state_backend.model.descriptor import Kind
from state_backend.model.records import Change, Op


class OrderedChanges:
    """Turns the FOLDs of ordered states into PUTs and APPENDs of the rows that the states keep; writes the orders."""

    def __init__(self, keys: KeyWriter, folds: Folds) -> None:
        self._orders = keys.orders
        self._folds = folds
        self._keys = keys
        self._now_ms = keys.now_ms
        self._unwritten: dict[bytes | None, bytes] = {}  # the orders of the key, by field

    def selected(
        self, key: bytes, record: bytes | None, rows: Iterable[tuple[Any, ...]], state: WrittenState
    ) -> list[tuple[Any, ...]]:
        """Return the changes of one key that take effect.

        Call `write_orders` after they are applied: the writers may delete the key, with its orders, first.

        Args:
            record: The key's live record.
        """
        changes = list(map(Change._make, rows))
        if state.kind is Kind.LIST:
            return self._of_list(key, record, changes, state)
        assert state.row_order is not None
        kept: list[tuple[Any, ...]] = []
        orders: dict[bytes | None, bytes | None] = {}  # as of the changes so far
        for change in changes:
            if change.op != Op.FOLD:
                kept.append(change)
                if change.field is None:
                    record, orders = None, {}
                    self._unwritten.clear()
                else:
                    orders[change.field] = None
                    self._unwritten.pop(change.field, None)
                    self._orders.delete(key, change.field)
                continue
            order, value = unpack(change)
            old = orders[change.field] if change.field in orders else self._order(key, record, change.field)
            if state.row_order.replaces(order, old):
                self._unwritten[change.field] = order
                kept.append(change._replace(op=Op.PUT, value=value))
                has_expired = change.expire_at_ms is not None and change.expire_at_ms <= self._now_ms
                orders[change.field] = None if has_expired else order
        return kept

    def write_orders(self, key: bytes, *, has_value: bool) -> None:
        """Write the orders of the changes that were selected last, those of a key.

        Args:
            has_value: The key exists now. A map without fields does not, nor does a value that has expired. Another
                state may have the key next, and its value would have the order.
        """
        if not has_value:
            self._unwritten.clear()
        for field, order in self._unwritten.items():
            self._orders.put(key, field, order)
        self._unwritten.clear()

    def _order(self, key: bytes, record: bytes | None, field: bytes | None) -> bytes | None:
        """Return the order of a live value."""
        if record is None or (order := self._orders.get(key, field)) is None:
            return None
        return order if field is None or self._folds.is_live(record, field) else None

    def _of_list(
        self, key: bytes, record: bytes | None, changes: Sequence[Change], state: WrittenState
    ) -> list[tuple[Any, ...]]:
        """Return the changes of a list: elements to append, or its new content."""
        assert state.row_order is not None
        deletions: list[tuple[Any, ...]] = []
        before = packed_list.elements(self._orders.get(key) or packed_list.EMPTY) if record is not None else []
        current = OrderedList(state.row_order, before)
        last: Change | None = None
        for change in changes:
            if last is not None and last.expire_at_ms is not None and last.expire_at_ms <= self._now_ms:
                deletions = [last._replace(op=Op.DELETE, value=None, expire_at_ms=None)]
                record, last, current = None, None, OrderedList(state.row_order, ())
            if change.op != Op.FOLD:
                deletions = [change]
                record, last, current = None, None, OrderedList(state.row_order, ())
            elif current.add(*unpack(change)):
                last = change
        if last is None:
            return deletions
        self._unwritten[None] = packed_list.pack(current.orders)
        elements = current.elements
        appended = [element for element in elements if isinstance(element, bytes)]
        size = len(before) if record is not None else 0
        first = next((element for element in elements if isinstance(element, int)), size)
        if elements == [*range(first, size), *appended]:  # nothing is inserted; the writer cuts the first ones off
            return [*deletions, *(last._replace(op=Op.APPEND, value=value) for value in appended)]
        old = [] if record is None else self._elements(record)
        content = packed_list.pack(element if isinstance(element, bytes) else old[element] for element in elements)
        return [last._replace(op=Op.PUT, value=content)]

    def _elements(self, record: bytes) -> list[bytes]:
        if record[FORM_AT] != LONG_LIST:
            return packed_list.elements(payload_of(record))
        blocks = ListBlocks(self._keys.txn, self._keys.tables.blocks)
        long_list = LongList(*LONG_LIST_PAYLOAD.unpack(payload_of(record)))
        return [
            element
            for packed, start, stop in blocks.blocks(long_list, 0, long_list.size)
            for element in packed_list.elements(packed, start, stop)
        ]
