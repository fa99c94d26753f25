"""One change of one key, and a run of changes as an Arrow table.

A run is a record batch sorted by position, so that the changes of a slot range lie together and a store is written in
its own order. The rows of one key keep the order in which they happened. Columns:

    position      uint64   `slots.position_of(key)`
    state         string   the state's name (dictionary encoded)
    op            uint8    see `Op`
    key           binary   the whole Redis key
    field         binary   a map's field, a set's member, or null
    value         binary   bytes as the client will see them, or what is packed; null unless something is put
    expire_at_ms  int64    milliseconds since 1970 UTC, or null

    op      value state       map state, with a field    map state, without a field       list state
    PUT     sets the value    sets the field             replaces it by a packed one      replaces it by a packed one
    DELETE  deletes the key   deletes the field          deletes the key                  deletes the key
    CLEAR   deletes the key   -                          deletes the key                  deletes the key
    APPEND  -                 -                          -                                adds an element at the end
    FOLD    folds it in       folds it into the field    -                                -

    op      set or sorted set, with a field             without a field
    PUT     adds the member; a sorted set's value       replaces it by a packed one (`packed_list`, `packed_sorted`)
            is its score
    DELETE  removes the member                          deletes the key
    CLEAR   -                                           deletes the key

A set expires as a whole, and so does a list: when the last change says that put something into it.

What FOLD does to what is there is said by its state's `reduce` (see `reductions`); where nothing is, it is a PUT.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from state_backend.model.errors import ChangeError
from state_backend.model.slots import position_of

# A process that only reads stores never uses Arrow or NumPy, and takes 17 MiB less without them (measured): the modules
# that it imports import them where they are used.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

# A key or a field, and a value, may be so long; longer ones are refused where changes are made.
KEY_BYTES_MAX = 64 << 10
VALUE_BYTES_MAX = 64 << 20

# Bounds a reader's memory: a run is read whole. One value of 64 MiB may make a run larger.
RUN_ROWS_MAX = 65_536
RUN_BYTES_MAX = 16 << 20


class Op(IntEnum):
    """What a change does to its key or, if it names a field, to that field (docs/change-log.md has a table)."""

    PUT = 1
    DELETE = 2
    CLEAR = 3
    APPEND = 4
    FOLD = 5


class Change(NamedTuple):
    """One change of one key, as `LogWriter.publish` takes it.

    Attributes:
        state: The name of the state that the key belongs to.
        op: What is done.
        key: The whole Redis key.
        field: A field of a hash or a member of a set; None for the whole key.
        value: The value's bytes as clients see them; None where nothing is put.
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

    Raises ChangeError for one that is too long, KeyError for one of another state.
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
            yield position_of(key), index[state], op, key, field, value, expire_at_ms

    return runs_of_rows(rows(), names)


def runs_of_rows(rows: Iterable[Row], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Turn rows into sorted runs of bounded size; those of one position keep their order."""
    held: list[Row] = []
    size = 0
    for row in rows:
        held.append(row)
        _, _, _, key, field, value, _ = row
        size += len(key) + len(field or b"") + len(value or b"")
        if len(held) == RUN_ROWS_MAX or size >= RUN_BYTES_MAX:
            yield _run(held, names)
            held, size = [], 0
    if held:
        yield _run(held, names)


def _too_long(change: Change) -> ChangeError:
    what, text, bytes_max = next(
        (what, text, bytes_max)
        for what, text, bytes_max in (
            ("key", change.key, KEY_BYTES_MAX),
            ("field", change.field or b"", KEY_BYTES_MAX),
            ("value", change.value or b"", VALUE_BYTES_MAX),
        )
        if len(text) > bytes_max
    )
    return ChangeError(
        f"state {change.state!r}: a {what} of the key {change.key[:100]!r} has {len(text)} bytes; the limit is "
        f"{bytes_max}; keep the rest elsewhere, or spread it over several keys or fields"
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
    """Read a run back as plain rows in the order of `Change`'s fields; op is a plain number."""
    states = run.column("state")
    names = states.dictionary.to_pylist()  # the column's own to_pylist takes twenty times as long
    columns = [run.column(name).to_pylist() for name in Change._fields[1:]]
    return zip(map(names.__getitem__, states.indices.to_pylist()), *columns, strict=True)


def positions_in(run: pa.RecordBatch) -> npt.NDArray[np.uint64]:
    """Return a run's positions, without a copy; Arrow's own `to_numpy` imports pandas first, which takes 0.2 s."""
    import numpy as np

    column = run.column("position")
    return np.frombuffer(column.buffers()[1], np.uint64)[column.offset : column.offset + len(column)]


def changes_in(run: pa.RecordBatch) -> Iterator[Change]:
    """Read a run back as changes, in its order."""
    return map(Change._make, rows_in(run))
