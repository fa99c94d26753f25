"""A change of one key, and a run: an Arrow record batch of changes.

A run is sorted by position, which is the order of a store; so the changes of a range of slots are contiguous. The rows
of one key keep their order. Columns:

    position      uint64   `slots.hash_position(key)`
    state         string   the state's name (dictionary encoded)
    op            uint8    see `Op`
    key           binary   the full Redis key
    field         binary   a map's field, a set's member, or null
    value         binary   bytes as clients see them, or a packed value; null unless something is put
    expire_at_ms  int64    milliseconds since 1970 UTC, or null

    op      value state       map state, with a field    map state, without a field       list state
    PUT     sets the value    sets the field             replaces it by a packed one      replaces it by a packed one
    DELETE  deletes the key   deletes the field          deletes the key                  deletes the key
    CLEAR   deletes the key   -                          deletes the key                  deletes the key
    APPEND  -                 -                          -                                adds an element at the end
    FOLD    folds it in       folds it into the field    replaces it, if its order says   puts it in, by its order

    op      set or sorted set, with a field             without a field
    PUT     adds the member; a sorted set's value       replaces it by a packed one (`packed_list`, `packed_sorted`)
            is its score
    DELETE  removes the member                          deletes the key
    CLEAR   -                                           deletes the key

Sets and lists expire as a whole, at the `expire_at_ms` of the last change that put something into them.

FOLD folds its value into the stored value by the `reduce` of its state (see `reductions`), or keeps one of both by
their orders (see `keep_by_order`). Without a stored value, a FOLD is a PUT.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from state_backend.model.errors import ChangeError
from state_backend.model.slots import hash_position

# A process that only reads stores needs neither Arrow nor NumPy, and takes 17 MiB less without them (measured). So the
# modules of such a process import them only in functions that use them.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

# Limits of a key or field, and of a value. Longer ones are refused before they are published.
KEY_BYTES_MAX = 64 << 10
VALUE_BYTES_MAX = 64 << 20

# A run ends at these limits, because readers have a full run in memory. A value of 64 MiB can make a run larger.
RUN_ROWS_MAX = 65_536
RUN_BYTES_MAX = 16 << 20


class Op(IntEnum):
    """The operation of a change on its key or, if it names a field, on that field (table in docs/change-log.md)."""

    PUT = 1
    DELETE = 2
    CLEAR = 3
    APPEND = 4
    FOLD = 5


class Change(NamedTuple):
    """A change of one key, for `LogWriter.publish`.

    Attributes:
        state: The name of the state that the key belongs to.
        key: The full Redis key.
        field: A field of a hash or a member of a set; None for the key as a whole.
        value: The value's bytes as clients see them; None if nothing is put.
        expire_at_ms: When the key, or the field, expires, in milliseconds since 1970 UTC; None: never.

    Examples:
        >>> sparkis.Change("price", sparkis.Op.PUT, b"market:price:ACME", value=b"12.5").op.name
        'PUT'
    """

    state: str
    op: Op
    key: bytes
    field: bytes | None = None
    value: bytes | None = None
    expire_at_ms: int | None = None


# A row of a run: position, index of the state's name, op, key, field, value, expire_at_ms.
Row = tuple[int, int, int, bytes, bytes | None, bytes | None, int | None]


@cache
def schema() -> pa.Schema:
    """Return the columns of a run."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("position", pa.uint64(), nullable=False),
            pa.field("state", pa.dictionary(pa.int16(), pa.string()), nullable=False),
            pa.field("op", pa.uint8(), nullable=False),
            pa.field("key", pa.binary(), nullable=False),
            pa.field("field", pa.binary()),
            pa.field("value", pa.binary()),
            pa.field("expire_at_ms", pa.int64()),
        ]
    )


def runs_of(changes: Iterable[Change], states: Iterable[str]) -> Iterator[pa.RecordBatch]:
    """Turn changes into sorted runs of bounded size; changes of one key keep their order.

    ChangeError for a change that is too long, KeyError for one of another state.
    """
    names = list(states)
    index = {name: number for number, name in enumerate(names)}

    def rows() -> Iterator[Row]:
        for change in changes:
            state, op, key, field, value, expire_at_ms = change
            if (
                len(key) > KEY_BYTES_MAX
                or (field is not None and len(field) > KEY_BYTES_MAX)
                or (value is not None and len(value) > VALUE_BYTES_MAX)
            ):
                raise _too_long(change)
            yield hash_position(key), index[state], op, key, field, value, expire_at_ms

    return runs_of_rows(rows(), names)


def runs_of_rows(rows: Iterable[Row], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Turn rows into sorted runs of bounded size; rows of one position keep their order."""
    buffered: list[Row] = []
    size = 0
    for row in rows:
        buffered.append(row)
        _, _, _, key, field, value, _ = row
        size += len(key) + len(field or b"") + len(value or b"")
        if len(buffered) == RUN_ROWS_MAX or size >= RUN_BYTES_MAX:
            yield _run(buffered, names)
            buffered, size = [], 0
    if buffered:
        yield _run(buffered, names)


def _too_long(change: Change) -> ChangeError:
    part, text, bytes_max = next(
        (part, text, bytes_max)
        for part, text, bytes_max in (
            ("key", change.key, KEY_BYTES_MAX),
            ("field", change.field or b"", KEY_BYTES_MAX),
            ("value", change.value or b"", VALUE_BYTES_MAX),
        )
        if len(text) > bytes_max
    )
    return ChangeError(
        f"state {change.state!r}: a {part} of the key {change.key[:100]!r} has {len(text)} bytes; the limit is "
        f"{bytes_max}; store the rest elsewhere, or spread it over several keys or fields"
    )


def _run(rows: list[Row], names: Sequence[str]) -> pa.RecordBatch:
    import pyarrow as pa

    rows.sort(key=itemgetter(0))
    positions, states, ops, keys, fields, values, expiries = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(positions, pa.uint64()),
            pa.DictionaryArray.from_arrays(pa.array(states, pa.int16()), pa.array(names, pa.string())),
            pa.array(ops, pa.uint8()),
            pa.array(keys, pa.binary()),
            pa.array(fields, pa.binary()),
            pa.array(values, pa.binary()),
            pa.array(expiries, pa.int64()),
        ],
        schema=schema(),
    )


def rows_in(run: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Iterate over a run's rows as tuples, with the fields of `Change` in their order; op is an int."""
    states = run.column("state")
    names = states.dictionary.to_pylist()  # the column's own to_pylist takes twenty times as long
    columns = [run.column(name).to_pylist() for name in Change._fields[1:]]
    return zip(map(names.__getitem__, states.indices.to_pylist()), *columns, strict=True)


def positions_in(run: pa.RecordBatch) -> npt.NDArray[np.uint64]:
    """Return a run's positions without a copy. Arrow's `to_numpy` would import pandas, which takes 0.2 s."""
    import numpy as np

    column = run.column("position")
    return np.frombuffer(column.buffers()[1], np.uint64)[column.offset : column.offset + len(column)]


def changes_in(run: pa.RecordBatch) -> Iterator[Change]:
    """Iterate over a run's rows as changes."""
    return map(Change._make, rows_in(run))
