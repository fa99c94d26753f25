"""The orders of ordered states' values (see `codec.keep_by_order`), in a table of their own: readers do not read it.

    orders    position (6), hash of the key (8)                          -> the order of the key's value; of a list, the
                                                                            orders of its elements as a packed list
              position (6), hash of the key (8), hash of the field (16)  -> the order of the field's value

The hashes are BLAKE2b. An order counts only while its key, or field, is live. The order of an expired key or field has
no effect, and the next order replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import lmdb

from state_backend.codec import packed_list, packed_map
from state_backend.codec.checksums import checked, with_checksum
from state_backend.codec.keep_by_order import pack
from state_backend.model.descriptor import Kind
from state_backend.model.records import Op
from state_backend.model.slots import POSITION_BYTES, store_key_of

KEY_HASH_BYTES, FIELD_HASH_BYTES = 8, 16
PAST_ALL_POSITIONS = b"\xff" * (POSITION_BYTES + 1)  # sorts after each position


def name_of_order(key: bytes, field: bytes | None = None, position: bytes | None = None) -> bytes:
    """Return the name of a row of `orders`.

    Args:
        position: The key's, if it is known.
    """
    name = (position or store_key_of(key)) + blake2b(key, digest_size=KEY_HASH_BYTES).digest()
    return name if field is None else name + blake2b(field, digest_size=FIELD_HASH_BYTES).digest()


class OrderTable:
    """Reads and writes the table `orders` in a transaction. Most transactions never use it."""

    def __init__(self, txn: lmdb.Transaction[bytes], table: Any) -> None:
        self._txn = txn
        self._table = table

    @cached_property
    def _cursor(self) -> lmdb.Cursor[bytes]:
        return self._txn.cursor(db=self._table)

    @cached_property
    def is_empty(self) -> bool:
        """Whether the table has no rows."""
        return not self._txn.stat(self._table)["entries"]

    def get(self, key: bytes, field: bytes | None = None) -> bytes | None:
        """Return the order of a key's value, or of a field's; None if it has none."""
        stored = None if self.is_empty else self._cursor.get(name_of_order(key, field))
        return None if stored is None else checked(stored)

    def put(self, key: bytes, field: bytes | None, order: bytes) -> None:
        self._cursor.put(name_of_order(key, field), with_checksum(order))
        self.is_empty = False

    def values(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the orders of several names."""
        if self.is_empty:
            return [None] * len(names)
        return [None if stored is None else checked(stored) for stored in map(self._cursor.get, names)]

    def put_many(self, orders: Iterable[tuple[bytes, bytes]]) -> None:
        """Write (name, order) pairs in the order of their names."""
        self._cursor.putmulti([(name, with_checksum(order)) for name, order in orders])
        self.is_empty = False

    def delete(self, key: bytes, field: bytes) -> None:
        """Delete the order of a field."""
        if not self.is_empty and self._cursor.set_key(name_of_order(key, field)):
            self._cursor.delete()

    def delete_all(self, key: bytes) -> None:
        """Delete the orders of a key and of all its fields: some microseconds a field."""
        prefix = b"" if self.is_empty else name_of_order(key)
        found = bool(prefix) and self._cursor.set_range(prefix)
        while found and self._cursor.key().startswith(prefix):
            found = self._cursor.delete() and bool(self._cursor.key())

    def has_fields(self, key: bytes) -> bool:
        """Return whether a field of a key has an order; not for a key that has one itself."""
        name = name_of_order(key)
        return self._cursor.set_range(name) and self._cursor.key().startswith(name)


class OrderPositions:
    """Tells which positions have orders, for a walk over the keys. No look-up of an order moves its cursor."""

    def __init__(self, txn: lmdb.Transaction[bytes], table: Any) -> None:
        self._cursor = txn.cursor(db=table)
        self._next = b""  # the first position with an order, from the last one asked for on

    def has(self, position: bytes) -> bool:
        """Return whether a key at a position has an order. Positions must not descend from call to call.

        Most calls only compare.
        """
        if self._next < position:
            self._next = self._cursor.key()[:POSITION_BYTES] if self._cursor.set_range(position) else PAST_ALL_POSITIONS
        return self._next == position


def with_orders(
    orders: OrderTable, key: bytes, changes: Iterable[tuple[Any, ...]], kind: Kind
) -> Iterator[tuple[Any, ...]]:
    """Turn the changes that build a key of an ordered state into FOLDs with their orders; return others unchanged.

    Args:
        changes: (op, key, field, value, expire_at_ms), in the order of a list's elements.
    """
    order = orders.get(key)
    if kind is Kind.LIST and order is not None:
        of_elements = iter(packed_list.elements(order))
        for op, _, _, value, expire_at_ms in changes:
            for element in packed_list.elements(value) if op == Op.PUT else (value,):
                yield Op.FOLD, key, None, pack(next(of_elements), element), expire_at_ms
    elif kind is Kind.MAP and order is not None:
        fields: dict[bytes, bytes] = {}
        expire_at_ms = None
        for _, _, field, value, at_ms in changes:
            fields.update(packed_map.pairs(value) if field is None else [(field, value)])
            expire_at_ms = at_ms if field is None else expire_at_ms
        yield Op.FOLD, key, None, pack(order, packed_map.pack(fields.items())), expire_at_ms
    elif order is not None:
        for _, _, _, value, expire_at_ms in changes:
            yield Op.FOLD, key, None, pack(order, value), expire_at_ms
    elif kind is Kind.MAP and orders.has_fields(key):
        for op, _, field, value, expire_at_ms in changes:
            for name, each in packed_map.pairs(value) if field is None else [(field, value)]:
                of_field = orders.get(key, name)
                if of_field is None:
                    yield op, key, name, each, expire_at_ms
                else:
                    yield Op.FOLD, key, name, pack(of_field, each), expire_at_ms
    else:
        yield from changes
