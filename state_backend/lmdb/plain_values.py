"""Many plain values in a write transaction, written together: the hot path of an epoch.

A change is plain if it puts, or folds in, a value that never expires, where no record is or one of the same state. All
other changes take the general path, `LmdbTransaction.apply`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

from state_backend.codec.checksums import CHECK_BYTES, checked, checksum
from state_backend.codec.reductions import folded
from state_backend.lmdb.key_writer import KeyWriter, WrittenState
from state_backend.lmdb.layout import HEADER, NAME_AT, PIECE_BYTES, VALUE, name_of
from state_backend.model.descriptor import Kind
from state_backend.model.records import Change, Op, positions_in
from state_backend.model.slots import places_of
from state_backend.native import packing_of
from state_backend.store.key_events import KeyEvent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from state_backend.native.lookup import Pages

PUT, FOLD = int(Op.PUT), int(Op.FOLD)
NEW_VALUE, CHANGED_VALUE = bytes((KeyEvent.NEW, KeyEvent.SET)), bytes((KeyEvent.SET,))
# So many records are made, then written, while they are in the processor's cache (measured: 1,000 to 4,000 are alike).
ITEMS_MAX = 2_000


class PlainValues:
    """Writes plain values, and returns the changes that are not plain. `states` may grow while it is used."""

    def __init__(self, keys: KeyWriter, states: Mapping[str, WrittenState]) -> None:
        self._keys = keys
        self._states = states
        self._last_position = -1  # of the changes that were packed

    def is_plain(self, run: pa.RecordBatch) -> bool:
        """Tell whether all changes of a run put values of one state that never expire, or all fold them in."""
        if not run.num_rows:
            return False
        names, ops = run.column("state").indices.to_numpy(), run.column("op").to_numpy()
        state = self._states.get(run.column("state")[0].as_py())
        return (
            state is not None
            and state.kind is Kind.VALUE
            and bool((names == names[0]).all())
            and (ops[0] == PUT or (ops[0] == FOLD and state.reduction is not None))
            and bool((ops == ops[0]).all())
            and run.column("expire_at_ms").null_count == run.num_rows
            and not run.column("value").null_count
        )

    def put_run(self, run: pa.RecordBatch) -> pa.RecordBatch:
        """Write the plain changes of a run for which `is_plain` is true; return the others.

        Of several changes at one position only the first may be plain: the others come after it, in their order. For
        values that are folded in, and where there is no compiled core (see `put_runs`).
        """
        keys, values = run.column("key").to_pylist(), run.column("value").to_pylist()
        state = self._states[run.column("state")[0].as_py()]
        number = state.number
        if run.column("op")[0].as_py() == FOLD:
            values = self._folded(keys, values, state)
        get = self._keys.records.get
        headers: dict[int, bytes] = {}  # of records, by the length of their keys
        remaining: list[int] = []
        items: list[tuple[bytes, bytes]] = []
        new_places: list[bytes] = []
        before = b""
        for row, (key, value, at) in enumerate(zip(keys, values, places_of(keys), strict=True)):
            length = len(key)
            header = headers.get(length) or headers.setdefault(length, HEADER.pack(length, 0, number, VALUE))
            start = header + key
            old = get(at)
            new = start + value
            new += checksum(new).to_bytes(CHECK_BYTES, "little")
            if (old is not None and not old.startswith(start)) or len(value) > PIECE_BYTES or at == before:
                remaining.append(row)
            elif old != new:
                items.append((at, new))
                if old is None:
                    new_places.append(at)
            before = at
        self._put(items, {number: new_places})
        import pyarrow as pa

        return run.take(pa.array(remaining, pa.int64()))

    def put_runs(self, runs: list[pa.RecordBatch], pages: Pages) -> list[pa.RecordBatch]:
        """Write the plain changes of some runs in the store's order, with the compiled core; return the others.

        pages: those that the transaction began with.
        """
        import numpy as np
        import pyarrow as pa

        # `pages` lack what this transaction has written.
        positions = [positions_in(run) for run in runs]
        is_untouched = min(int(each[0]) for each in positions) > self._last_position
        self._last_position = max(self._last_position, *(int(each[-1]) for each in positions))
        numbers = [self._state_numbers(run) for run in runs]
        if not any((each >= 0).any() for each in numbers):
            return runs
        order = np.concatenate(positions).argsort(kind="stable")
        pages_if_valid = pages if is_untouched else None
        keeps_each = self._keys.events is not None  # each change of a key is told
        get = self._keys.records.get
        packing = packing_of(runs, order, numbers, pages_if_valid, get, PIECE_BYTES, keeps_each)
        while (items := packing.take(ITEMS_MAX)) is not None:
            self._put(items, packing.new)
        remaining = [np.frombuffer(rows, np.bool_) for rows in packing.left]
        return [
            run if rows.all() else run.take(pa.array(np.flatnonzero(rows)))
            for run, rows in zip(runs, remaining, strict=True)
            if rows.any()
        ]

    def _state_numbers(self, run: pa.RecordBatch) -> npt.NDArray[np.int32]:
        """Return the numbers of the states that a run's changes may name; -1 for other kinds than values."""
        import numpy as np

        states = map(self._states.get, run.column("state").dictionary.to_pylist())
        numbers = [state.number if state is not None and state.kind is Kind.VALUE else -1 for state in states]
        return np.array(numbers, np.int32)

    def _put(self, items: list[tuple[bytes, bytes]], new_places: Mapping[int, list[bytes]]) -> None:
        """Write (place, record) of plain values; `new_places`: where no record was, by the number of the state."""
        keys = self._keys
        keys.records.put_many(items)
        keys.changed += len(items)
        for number, places in new_places.items():
            keys.counts.add_new(number, places)
        if not keys.changed_keys.is_full:
            keys.changed_keys.extend([name_of(record) for _, record in items])
        if keys.events is not None:
            were_free = set(chain.from_iterable(new_places.values()))
            for place, record in items:
                keys.events.add(name_of(record), NEW_VALUE if place in were_free else CHANGED_VALUE)

    def _folded(self, keys: list[bytes], values: list[bytes], state: WrittenState) -> list[bytes]:
        """Return the values that a plain run of folds puts; of several at one position only the first is right."""
        assert state.reduction is not None
        get, fold = self._keys.records.get, state.reduction.fold
        headers: dict[int, bytes] = {}
        made: list[bytes] = []
        for key, value, at in zip(keys, values, places_of(keys), strict=True):
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
            made.append(value)
        return made
