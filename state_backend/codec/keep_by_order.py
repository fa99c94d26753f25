"""Ordered states: a state keeps one row of each key or field, by an order of the rows of all micro-batches.

The order of a row is bytes that compare as the row's columns do (`state_backend.codec.orders` makes them). A change
with `Op.FOLD` has them in front of its value:

    order bytes u16, little endian | order | value

A store keeps the order beside the value; readers see only the value. A store that folds a change in compares the two
orders. So the result depends on all rows, and not on the epochs in which they come:

    last_by              the greatest order; of equal ones the later change
    max_by               the greatest order; of equal ones the earlier change
    first_by, min_by     the least order; of equal ones the earlier change

A list keeps its elements in their order, and at most `length_max` of them: the greatest, or the least. A key, or field,
that has expired is forgotten with its order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from state_backend.model.descriptor import By, Late, StateDescriptor
from state_backend.model.errors import ChangeError, StoreError
from state_backend.model.records import Change, Op

ORDER_BYTES_MAX = 1024
LENGTH_BYTES = 2


class RowOrder(NamedTuple):
    """How a state selects rows.

    Args:
        length_max, drops_late: Those of a list.
    """

    keeps_greatest: bool
    prefers_later: bool
    length_max: int
    drops_late: bool

    def replaces(self, new: bytes, old: bytes | None) -> bool:
        """Return whether a row replaces the kept one, given their orders; None: the kept value has none."""
        if old is None:
            return True
        return self.prefers_later if new == old else (new > old) is self.keeps_greatest


class OrderedList:
    """A list while rows are put into it.

    Args:
        orders: The orders of its elements, ascending.

    Attributes:
        elements: Indexes in the list as it was, and new values.
    """

    def __init__(self, row_order: RowOrder, orders: Iterable[bytes]) -> None:
        self.orders = list(orders)
        self.elements: list[int | bytes] = list(range(len(self.orders)))
        self._row_order = row_order
        # A row goes behind rows of equal order; in front of them if the list is cut at its front and they are to stay.
        self._place = bisect_left if row_order.keeps_greatest and not row_order.prefers_later else bisect_right

    def add(self, order: bytes, value: bytes) -> bool:
        """Put a row in, and cut the list to its maximum length; False if the row is late, or cut off itself."""
        row_order, orders = self._row_order, self.orders
        if row_order.drops_late and orders and order < orders[-1]:
            return False
        at = self._place(orders, order)
        if len(orders) >= row_order.length_max and at == (0 if row_order.keeps_greatest else len(orders)):
            return False
        orders.insert(at, order)
        self.elements.insert(at, value)
        # More than one element is cut off after `length_max` was lowered.
        excess = max(0, len(orders) - row_order.length_max)
        cut = slice(excess) if row_order.keeps_greatest else slice(len(orders) - excess, None)
        del orders[cut], self.elements[cut]
        return True


def row_order_of(state: StateDescriptor) -> RowOrder | None:
    """Return how a state selects rows by their order; None for a state that does not."""
    if state.by is None:
        return None
    return RowOrder(state.by in (By.LAST, By.MAX), state.by is By.LAST, state.length_max or 0, state.late is Late.DROP)


def pack(order: bytes, value: bytes) -> bytes:
    """Return the value of a FOLD."""
    return len(order).to_bytes(LENGTH_BYTES, "little") + order + value


def unpacked(packed: bytes) -> tuple[bytes, bytes]:
    """Return the order and the value of a FOLD; StoreError if it has no order."""
    start = LENGTH_BYTES + int.from_bytes(packed[:LENGTH_BYTES], "little")
    if not LENGTH_BYTES <= start <= len(packed):
        raise StoreError(f"the value {packed[:100]!r} of a change has no order, which its state needs; write it again")
    return packed[LENGTH_BYTES:start], packed[start:]


def unpack(change: Change) -> tuple[bytes, bytes]:
    """Return the order and the value of a FOLD; StoreError if it has no order."""
    return unpacked(change.value or b"")


def check_change(change: Change, state: StateDescriptor) -> None:
    """Raise ChangeError for a change that an ordered state cannot take: it takes FOLDs, DELETEs and CLEARs."""
    is_item = state.field is not None
    if change.op in (Op.PUT, Op.APPEND) or (change.op == Op.FOLD and (change.field is not None) != is_item):
        raise ChangeError(
            f"state {state.name!r}: {state.by}= takes FOLD changes of {'fields' if is_item else 'keys'}, with an order "
            f"in front of the value (docs/change-log.md), and DELETE and CLEAR; not {change.op.name} at the key "
            f"{change.key[:100]!r}"
        )
    if change.op == Op.FOLD:
        try:
            order, _ = unpack(change)
        except StoreError as error:
            raise ChangeError(str(error)) from None
        if len(order) > ORDER_BYTES_MAX:
            raise ChangeError(f"state {state.name!r}: an order has {len(order)} bytes; the limit is {ORDER_BYTES_MAX}")
