"""Writes many values and small maps together: the hot path of an epoch.

A change takes this path if it puts or folds a value that never expires, and the key has no record or one of the same
state. With the compiled core, so does a change that puts a full small map, unless events of keys are recorded. All
other changes take the general path, `LmdbTransaction.apply`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from sys import maxsize
from typing import TYPE_CHECKING

from state_backend.codec import packed_map
from state_backend.codec.checksums import CHECK_BYTES, checked, checksum
from state_backend.codec.keep_by_order import unpacked
from state_backend.codec.reductions import folded
from state_backend.lmdb.key_writer import KeyWriter, WrittenState
from state_backend.lmdb.order_table import name_of_order
from state_backend.lmdb.record_format import HEADER, NAME_AT, PIECE_BYTES, SLOT_BYTES, SMALL_MAP, VALUE, name_of
from state_backend.model.descriptor import Kind
from state_backend.model.records import Change, Op, positions_in
from state_backend.model.slots import store_keys_of
from state_backend.native import packing_of
from state_backend.store.key_events import KeyEvent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from state_backend.native.lookup import Pages

PUT, FOLD = int(Op.PUT), int(Op.FOLD)
NEW_VALUE, CHANGED_VALUE = bytes((KeyEvent.NEW, KeyEvent.SET)), bytes((KeyEvent.SET,))
# The counts are updated after so many rows, whose keys are in memory until then.
ROWS_MAX = 65_536


class BulkWriter:
    """Writes the changes that take the hot path, and returns the others. `states` may grow between two calls."""

    def __init__(self, keys: KeyWriter, states: Mapping[str, WrittenState]) -> None:
        self._keys = keys
        self._states = states
        self._last_position = -1  # the last position of all runs that `put_runs` wrote

    def can_take(self, run: pa.RecordBatch) -> bool:
        """Return whether the changes of a run are all PUTs, or all FOLDs, of values of one state that never expire."""
        if not run.num_rows:
            return False
        names, ops = run.column("state").indices.to_numpy(), run.column("op").to_numpy()
        state = self._states.get(run.column("state")[0].as_py())
        return (
            state is not None
            and state.kind is Kind.VALUE
            and bool((names == names[0]).all())
            and ((ops[0] == FOLD and state.folds) or (ops[0] == PUT and state.row_order is None))
            and bool((ops == ops[0]).all())
            and run.column("expire_at_ms").null_count == run.num_rows
            and not run.column("value").null_count
        )

    def put_run(self, run: pa.RecordBatch) -> pa.RecordBatch:
        """Write the changes of a run that `takes` accepts; return the others.

        Of several changes at one position only the first is written: the general path applies the others, in their
        order. With events of keys it applies all of them: the events describe the difference that all make. Used for
        FOLDs, and for all changes without the compiled core (see `put_runs`).
        """
        keys, values = run.column("key").to_pylist(), run.column("value").to_pylist()
        state = self._states[run.column("state")[0].as_py()]
        number = state.number
        orders: list[tuple[bytes, bytes | None]] = []
        if state.row_order is not None:
            values, orders = self._selected(keys, values, state)
        elif run.column("op")[0].as_py() == FOLD:
            values = self._folded(keys, values, state)
        get, has_events = self._keys.records.get, self._keys.events is not None
        headers: dict[int, bytes] = {}  # of records, by the length of their keys
        remaining: list[int] = []
        items: list[tuple[bytes, bytes]] = []
        are_new: list[bool] = []
        before = b""
        store_keys = list(store_keys_of(keys))
        following = [*store_keys[1:], b""]
        for row, (key, value, at, after) in enumerate(zip(keys, values, store_keys, following, strict=True)):
            length = len(key)
            header = headers.get(length) or headers.setdefault(length, HEADER.pack(length, 0, number, VALUE))
            start = header + key
            old = get(at)
            new = start + value
            new += checksum(new).to_bytes(CHECK_BYTES, "little")
            is_repeated = at == before or (has_events and at == after)
            if (old is not None and not old.startswith(start)) or len(value) > PIECE_BYTES or is_repeated:
                remaining.append(row)
            elif old != new:
                items.append((at, new))
                are_new.append(old is None)
            before = at
        self._keys.records.put_many(items)
        if orders:
            others = set(remaining)
            written = (each for row, each in enumerate(orders) if row not in others)
            self._keys.orders.put_many((name, order) for name, order in written if order is not None)
        slots = (at[:SLOT_BYTES] for (at, _), is_new in zip(items, are_new, strict=True) if is_new)
        new = {(int.from_bytes(slot, "big"), number): count for slot, count in Counter(slots).items()}
        self._count(len(items), new, [name_of(record) for _, record in items], are_new)
        import pyarrow as pa

        return run.take(pa.array(remaining, pa.int64()))

    def put_runs(self, runs: list[pa.RecordBatch], pages: Pages) -> list[pa.RecordBatch]:
        """Write the changes of some runs in the store's order, with the compiled core; return the others.

        Args:
            pages: The pages of the version that the transaction began with.
        """
        import numpy as np
        import pyarrow as pa

        # `pages` do not have what this transaction has written.
        positions = [positions_in(run) for run in runs]
        is_untouched = min(int(position[0]) for position in positions) > self._last_position
        self._last_position = max(self._last_position, *(int(position[-1]) for position in positions))
        tags = [self._tags(run) for run in runs]
        if not any((tag >= 0).any() for tag in tags):
            return runs
        keys = self._keys
        packing = packing_of(
            runs,
            np.concatenate(positions).argsort(kind="stable"),
            tags,
            pages if is_untouched else None,
            keys.records.get,
            PIECE_BYTES,
            packed_map.BYTES_MAX,
            packed_map.FIELDS_MAX,
            keys.events is not None,  # the events of a key describe the difference that all its changes make
        )
        while packing.begin(ROWS_MAX, maxsize if keys.events is not None else keys.changed_keys.keys_max):
            keys.records.put_many(packing)
            self._count(packing.changed, packing.new, packing.keys, packing.are_new)
        remaining = [np.frombuffer(rows, np.bool_) for rows in packing.skipped]
        return [
            run if rows.all() else run.take(pa.array(np.flatnonzero(rows)))
            for run, rows in zip(runs, remaining, strict=True)
            if rows.any()
        ]

    def _tags(self, run: pa.RecordBatch) -> npt.NDArray[np.int32]:
        """Return number | form << 16 for each state of a run; -1 for a state whose changes take the general path."""
        import numpy as np

        forms = {Kind.VALUE: VALUE} | ({Kind.MAP: SMALL_MAP} if self._keys.events is None else {})
        states = map(self._states.get, run.column("state").dictionary.to_pylist())
        tags = [
            state.number | forms[state.kind] << 16 if state and state.kind in forms and state.row_order is None else -1
            for state in states
        ]
        return np.array(tags, np.int32)

    def _count(
        self, changed: int, new: Mapping[tuple[int, int], int], names: Sequence[bytes], are_new: Iterable[bool]
    ) -> None:
        """Count written records, and record changed keys and events.

        Args:
            new: How many keys are new, by (slot, state number).
            names: Keys of written records.
        """
        keys = self._keys
        keys.changed += changed
        keys.counts.add_new(new)
        if not keys.changed_keys.is_full:
            keys.changed_keys.extend(names)
        if keys.events is not None:
            for name, is_new in zip(names, are_new, strict=True):
                keys.events.add(name, NEW_VALUE if is_new else CHANGED_VALUE)

    def _folded(self, keys: list[bytes], values: list[bytes], state: WrittenState) -> list[bytes]:
        """Return the results of a run of FOLDs. Of several rows at a position only the first result is valid."""
        assert state.reduction is not None
        get, fold = self._keys.records.get, state.reduction.fold
        headers: dict[int, bytes] = {}
        results: list[bytes] = []
        for key, value, at in zip(keys, values, store_keys_of(keys), strict=True):
            length = len(key)
            header = headers.get(length) or headers.setdefault(length, HEADER.pack(length, 0, state.number, VALUE))
            old = get(at)
            if old is not None and old.startswith(header + key):
                old = checked(old)[NAME_AT + length :]
                try:
                    value = fold(old, value)
                except (ValueError, ArithmeticError):
                    name = self._keys.meta.names()[state.number]
                    folded(state.reduction, Change(name, Op.FOLD, key, None, value), old)  # raises
            results.append(value)
        return results

    def _selected(
        self, keys: list[bytes], values: list[bytes], state: WrittenState
    ) -> tuple[list[bytes], list[tuple[bytes, bytes | None]]]:
        """Return the contents of keys after a run of FOLDs by an order, and (name, order) of each row.

        The order is None for a row that is not kept: its key holds the value that it had.
        """
        assert state.row_order is not None
        get, replaces = self._keys.records.get, state.row_order.replaces
        store_keys = list(store_keys_of(keys))
        names = [name_of_order(key, None, at) for key, at in zip(keys, store_keys, strict=True)]
        headers: dict[int, bytes] = {}
        results: list[bytes] = []
        orders: list[tuple[bytes, bytes | None]] = []
        for key, packed, at, name, old_order in zip(
            keys, values, store_keys, names, self._keys.orders.values(names), strict=True
        ):
            order, value = unpacked(packed)
            length = len(key)
            header = headers.get(length) or headers.setdefault(length, HEADER.pack(length, 0, state.number, VALUE))
            old = get(at)
            if old is not None and old.startswith(header + key) and not replaces(order, old_order):
                results.append(checked(old)[NAME_AT + length :])
                orders.append((name, None))
            else:
                results.append(value)
                orders.append((name, order))
        return results, orders
