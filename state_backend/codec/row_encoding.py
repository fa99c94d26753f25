"""The encoding of rows as changes, column by column, with pyarrow and numpy.

Runs in Spark's Python workers, on executors. Uses Arrow and descriptors, not Spark. Spark SQL has already converted the
types that it writes in sparkis' format (see `columns`). The others are converted here, because Java writes them in
another format, or takes longer: numbers and times (see `column_text`).

The columns of a state are k0, k1 ... (key parts), f (field or member), b0, b1 ... (the order of the row among those of
all micro-batches), v0, v1 ... (values, or the score), d (true: the row deletes), e (expiry in milliseconds since 1970),
r (true: the list is emptied before the row's element is appended), h (hash of the row, for the epoch's digest). In a
batch of several states they have other names, which are in `RowPlan.columns` (see `shuffle_plan`).
"""

from __future__ import annotations

import sys
import zlib
from binascii import crc_hqx
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.codec.column_text import any_text, as_bytes, bytes_of, validity_of
from state_backend.codec.json_text import OF_VALUES, JsonForm, json_texts, objects_of
from state_backend.codec.keep_by_order import ORDER_BYTES_MAX
from state_backend.codec.orders import orders_of, with_orders
from state_backend.model.descriptor import Kind, Reduce
from state_backend.model.errors import SparkisError
from state_backend.model.records import (
    KEY_BYTES_MAX,
    RUN_BYTES_MAX,
    RUN_ROWS_MAX,
    VALUE_BYTES_MAX,
    Op,
    positions_in,
    schema,
)
from state_backend.model.slots import HASH_BITS, hash_position
from state_backend.native import change_records

OnBadKey = Literal["skip", "fail"]

# Columns of a row beside those of its state (see `shuffle_plan`): the state's number and a hash of the key; a hash of
# the row, for the epoch's digest; the time of the record; a hash of the key and the field.
GROUP, ROW_HASH, RECORD_TIME, KEY_HASH = "g", "h", "t", "u"

# The upper bits of the column g: the state's number. The sign bit stays 0, so there are up to 32,768 states.
STATE_BITS = 16
# A run has at most 2^16 rows, and a position 46 bits: both fit into a word.
ROW_BITS = 16
# Longer keys are hashed one by one, because hashing a column loops over the bytes of its longest key.
COLUMN_HASH_BYTES_MAX = 256


Positions = npt.NDArray[np.uint64]
RowNumbers = npt.NDArray[np.uint16]
# For each row of a batch, whether something holds of it.
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


class RowError(SparkisError):
    """A row cannot be written; the message names the state and the column.

    Args:
        is_bad: For each row of the batch, whether it is such a row; None if it is no single row's fault.
    """

    def __init__(self, message: str, is_bad: Mask | None = None) -> None:
        super().__init__(message)
        self.is_bad = is_bad

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the rows out where the error goes to another process."""
        return type(self), (str(self),)


class DuplicateRowsError(RowError):
    """A micro-batch has several rows with the same key and field, and no order between them."""

    def __init__(self, message: str, field: bytes | None) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments of this error."""
        return type(self), (str(self), self.field)


@dataclass
class SkippedRows:
    """The rows that were left out because they cannot be written: their number, and the error of the first one."""

    count: int = 0
    example: str = ""

    def add(self, count: int, error: str) -> None:
        """Count some rows."""
        self.count += count
        self.example = self.example or error


@dataclass(frozen=True)
class RowPlan:
    """How a task encodes one state's rows as changes; picklable. A set's field is its member.

    literals       the texts around the key parts, as in `KeyFormat`
    key_names, field_name, value_names   the DataFrame's names of the columns, for errors
    key_forms, field_form, value_forms   the conversion of each column: text (none), float, integer, decimal, timestamp,
                   timestamp_ntz, interval, json
    object_names   the names in the JSON object that the values are together; else empty. A value whose form is text is
                   JSON already
    json_form      how values become JSON
    key_is_open    for each key part: its text may contain the separator that follows, and is checked
    map_fields     the fields of the map if each row replaces a map as a whole; else empty
    appends        each row appends its value to a list
    replaces_list  the value column is an array that replaces the list
    reduce         the rows of a key are reduced, by `add` for sums; is_folded: Spark has done so
    by_names       the columns of the order by which the state selects rows; keeps_first: the least row wins
    columns        (name, name in the batch) of each column, where they differ
    skips_bad_rows a row that cannot be written is left out and counted; otherwise it is an error
    """

    state: str
    literals: tuple[str, ...]
    key_names: tuple[str, ...]
    key_forms: tuple[str, ...]
    key_is_open: tuple[bool, ...]
    field_name: str | None
    field_form: str
    value_names: tuple[str, ...]
    value_forms: tuple[str, ...]
    map_fields: tuple[str, ...]
    expire_at_ms: int | None
    keeps_last: bool
    appends: bool = False
    replaces_list: bool = False
    reduce: Reduce | None = None
    add: Callable[[bytes, bytes], bytes] | None = None
    is_folded: bool = False
    kind: Kind = Kind.VALUE
    by_names: tuple[str, ...] = ()
    keeps_first: bool = False
    columns: tuple[tuple[str, str], ...] = ()
    skips_bad_rows: bool = False
    object_names: tuple[str, ...] = ()
    json_form: JsonForm = OF_VALUES


def encode(
    plans: Sequence[RowPlan], batches: Iterable[pa.RecordBatch], digest: list[int], skipped: SkippedRows | None = None
) -> Iterator[pa.RecordBatch]:
    """Encode sorted rows as sorted runs of changes, one change per key (and field); add row hashes to `digest[0]`.

    The rows of a state are adjacent (with several states, the upper bits of the column g are the state's number), and
    so are the rows of a key. The last row of a key wins; all rows of a list count. Rows that were not shuffled may have
    any order; then the last row of a key in each run wins. Raises RowError.
    """
    names = names_of(plans)
    for run in in_runs(_all_changes(plans, names, batches, digest, skipped or SkippedRows())):
        yield sorted_run(plans, run)


def names_of(plans: Sequence[RowPlan]) -> pa.Array:
    """Return the names of states, the dictionary of all runs of a file."""
    return pa.array([plan.state for plan in plans], pa.string())


def in_runs(changes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join and split batches of changes to the size of runs."""
    buffered: list[pa.RecordBatch] = []
    rows = size = 0
    for piece in chain.from_iterable(map(_pieces, changes)):
        if buffered and (rows + piece.num_rows > RUN_ROWS_MAX or size + piece.nbytes > RUN_BYTES_MAX):
            yield _joined(buffered)
            buffered, rows, size = [], 0, 0
        buffered.append(piece)
        rows += piece.num_rows
        size += piece.nbytes
    if buffered:
        yield _joined(buffered)


def _all_changes(
    plans: Sequence[RowPlan],
    names: pa.Array,
    batches: Iterable[pa.RecordBatch],
    digest: list[int],
    skipped: SkippedRows,
) -> Iterator[pa.RecordBatch]:
    """Encode the rows of all states, one state after another."""
    for number, parts in groupby(_by_state(plans, batches), key=itemgetter(0)):
        plan = plans[number]
        rows = _rows(plan, (part for _, part in parts), digest)
        changes = (changes_of(plan, number, names, batch, skipped) for batch in rows)
        yield from _deduplicated(plan, (change for change in changes if change.num_rows))


def _rows(plan: RowPlan, batches: Iterable[pa.RecordBatch], digest: list[int]) -> Iterator[pa.RecordBatch]:
    """Add row hashes to the digest, and leave out rows with null values if the state reduces."""
    for batch in batches:
        digest[0] += int(batch.column(ROW_HASH).to_numpy().view(np.uint64).sum(dtype=np.uint64))
        if plan.reduce is not None and batch.column("v0").null_count:
            batch = batch.filter(batch.column("v0").is_valid())
        if plan.by_names:
            batch = _with_values(plan, batch)
        if batch.num_rows:
            yield batch


def _with_values(plan: RowPlan, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Drop the rows whose values are all null: they select nothing."""
    values = [batch.column(f"v{i}") for i in range(len(plan.value_forms))]
    if not all(column.null_count for column in values):
        return batch
    return batch.filter(reduce(pc.or_, (column.is_valid() for column in values)))


def _by_state(plans: Sequence[RowPlan], batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cut batches where the state changes, and give each part the column names of its plan."""
    for batch in batches:
        if not batch.num_rows:
            continue
        if len(plans) == 1:
            yield 0, _renamed(plans[0], batch)
            continue
        for number, part in split_by(batch, batch.column(GROUP).to_numpy() >> (64 - STATE_BITS)):
            yield number, _renamed(plans[number], part)


def split_by(batch: pa.RecordBatch, numbers: npt.NDArray[Any]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Split a batch where the numbers of its rows change; iterate over (number, part). At least one row."""
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1)]
    for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
        yield int(numbers[start]), batch.slice(start, stop - start)


def _renamed(plan: RowPlan, batch: pa.RecordBatch) -> pa.RecordBatch:
    if not plan.columns:
        return batch
    return pa.RecordBatch.from_pydict({name: batch.column(stored) for name, stored in plan.columns})


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch until each piece fits into a run; a piece of one row may still be too large."""
    if batch.num_rows > 1 and (batch.num_rows > RUN_ROWS_MAX or batch.nbytes > RUN_BYTES_MAX):
        middle = batch.num_rows // 2
        yield from _pieces(batch.slice(0, middle))
        yield from _pieces(batch.slice(middle))
    elif batch.num_rows:
        yield batch


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return batches that have rows as one batch; pyarrow has `concat_batches` since version 19."""
    if len(batches) == 1:
        return batches[0]
    (joined,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


def sorted_by_position(run: pa.RecordBatch) -> pa.RecordBatch:
    """Return a run in the order of a store; rows of one position keep their order."""
    return _taken(run, *order_of(positions_in(run)))


def _taken(run: pa.RecordBatch, positions: Positions, rows: RowNumbers) -> pa.RecordBatch:
    """Return some rows of a run, whose positions these are."""
    order = pa.array(rows)
    columns = [
        column.slice(0, len(rows)) if column.null_count == len(run) else column.take(order)
        for column in run.columns[1:]
    ]
    return pa.RecordBatch.from_arrays([pa.array(positions), *columns], schema=run.schema)


def order_of(positions: Positions) -> tuple[Positions, RowNumbers]:
    """Return sorted positions, and the rows that they come from."""
    if change_records is None:
        return order_in_numpy(positions)
    ordered, rows = change_records.order_of(positions)
    return np.frombuffer(ordered, np.uint64), np.frombuffer(rows, np.uint16)


def order_in_numpy(positions: Positions) -> tuple[Positions, RowNumbers]:
    """Return the order without the compiled core.

    Positions with the row's number in the lower bits are sorted in half the time of Arrow's `sort_indices`.
    """
    words = positions << np.uint64(ROW_BITS) | np.arange(len(positions), dtype=np.uint64)
    words.sort()
    return words >> np.uint64(ROW_BITS), words.astype(np.uint16)


def sorted_run(plans: Sequence[RowPlan], run: pa.RecordBatch) -> pa.RecordBatch:
    """Return a run in the order of a store; with one plan that keeps the last row of a key, only that one."""
    positions, rows = order_of(positions_in(run))
    if len(plans) == 1 and plans[0].keeps_last:
        positions, rows = _last_of_each(plans[0], run, positions, rows)
    return _taken(run, positions, rows)


def _last_of_each(
    plan: RowPlan, run: pa.RecordBatch, positions: Positions, rows: RowNumbers
) -> tuple[Positions, RowNumbers]:
    """Leave the last of adjacent rows of each key and field; without a shuffle a key may have several rows.

    Args:
        positions, rows: Those of `order_of`.
    """
    if plan.appends or not (positions[1:] == positions[:-1]).any():
        return positions, rows
    order = pa.array(rows)
    is_last = np.append(~_is_same(plan, run.column("key").take(order), run.column("field").take(order))[1:], True)
    return positions[is_last], rows[is_last]


def changes_of(
    plan: RowPlan, number: int, names: pa.Array, batch: pa.RecordBatch, skipped: SkippedRows
) -> pa.RecordBatch:
    """Encode one batch of the state `names[number]`, in the order of its rows.

    A row that cannot be encoded is skipped and counted, if the plan skips bad rows; otherwise RowError.
    """
    while True:
        try:
            return _changes_of(plan, number, names, batch)
        except RowError as error:
            if not plan.skips_bad_rows or error.is_bad is None:
                raise
            skipped.add(int(error.is_bad.sum()), str(error))
            batch = batch.filter(pa.array(~error.is_bad))
            if not batch.num_rows:
                return pa.RecordBatch.from_pylist([], schema=schema())


def _changes_of(plan: RowPlan, number: int, names: pa.Array, batch: pa.RecordBatch) -> pa.RecordBatch:
    n = batch.num_rows
    keys = _keys(plan, batch)
    field = pa.nulls(n, pa.binary()) if plan.field_name is None else _field(plan, batch)
    columns = [batch.column(f"v{i}") for i in range(len(plan.value_forms))]
    if plan.add is not None:
        starts = np.flatnonzero(~_is_same(plan, keys, field))
        value = _sums(columns[0], plan.value_forms[0], starts, plan.add)
        n, keys, field, is_deleted = len(starts), keys.take(starts), field.take(starts), value.is_null()
    elif plan.replaces_list:
        value, is_deleted = pack_arrays(plan, columns[0])
    elif plan.kind is Kind.SET:
        value, is_deleted = pa.repeat(pa.scalar(b""), n), pa.repeat(False, n)
    else:
        if plan.kind is Kind.SORTED_SET:
            _check_scores(plan, keys, columns[0])
        values = _values(plan, columns)
        value, is_deleted = (
            pack_columns(plan.map_fields, values) if plan.map_fields else (values[0], values[0].is_null())
        )
    present = batch.schema.names
    if "d" in present:
        is_deleted = pc.or_(is_deleted, pc.fill_null(batch.column("d"), False))
    _check_size(plan, "value", plan.value_names, value, VALUE_BYTES_MAX, is_by_row=plan.add is None)
    if plan.by_names:
        value = with_orders(_orders(plan, keys, batch), value)
    is_folded = plan.reduce not in (None, Reduce.LAST) or bool(plan.by_names)
    code = Op.FOLD if is_folded else Op.APPEND if plan.appends else Op.PUT
    op = pa.array(np.full(n, code, np.uint8))
    if "r" in present:
        is_reset = pc.fill_null(batch.column("r"), False)
        op = pc.if_else(is_reset, pa.scalar(Op.PUT, pa.uint8()), op)
        value = pc.if_else(is_reset, _pack_lists(pc.fill_null(value, b""), np.ones(n, np.int64)), value)
    expire_at_ms = batch.column("e") if "e" in present else pa.repeat(pa.scalar(plan.expire_at_ms, pa.int64()), n)
    if pc.any(is_deleted).as_py():
        op = pc.if_else(is_deleted, pa.scalar(Op.DELETE, pa.uint8()), op)
        # No scalar: with one, pyarrow 14 to 16 damage slices of a batch.
        value = pc.if_else(is_deleted, pa.nulls(n, pa.binary()), value)
        expire_at_ms = pc.if_else(is_deleted, pa.scalar(None, pa.int64()), expire_at_ms)
    positions = pa.array(hash_positions_of(keys, plan.literals[0].encode()))
    states = pa.DictionaryArray.from_arrays(pa.array(np.full(n, number, np.int16)), names)
    return pa.RecordBatch.from_arrays([positions, states, op, keys, field, value, expire_at_ms], schema=schema())


def _values(plan: RowPlan, columns: Sequence[pa.Array]) -> list[pa.Array]:
    """Return the texts of the values; of one object, if they are one, which is null where all its values are."""
    texts = [_text(plan, column, form) for column, form in zip(columns, plan.value_forms, strict=True)]
    if not plan.object_names:
        return texts
    objects = objects_of(plan.object_names, [any_text(text) for text in texts], len(texts[0]))
    is_any = reduce(pc.or_, (text.is_valid() for text in texts))
    return [pc.if_else(is_any, objects.cast(pa.binary()), pa.scalar(None, pa.binary()))]


def _text(plan: RowPlan, column: pa.Array, form: str) -> pa.Array:
    return json_texts(column, plan.json_form).cast(pa.binary()) if form == "json" else as_bytes(column, form)


def _keys(plan: RowPlan, batch: pa.RecordBatch) -> pa.Array:
    parts: list[bytes | pa.Array] = [plan.literals[0].encode()]
    for i, (name, form) in enumerate(zip(plan.key_names, plan.key_forms, strict=True)):
        column = batch.column(f"k{i}")
        if column.null_count:
            raise RowError(
                f"state {plan.state!r}: the key column {name!r} is null in {column.null_count} row(s) of a batch; "
                f"filter them out, or give them a value that no other row has with coalesce() (sparkis attach: "
                f'--column {name}="coalesce({name}, ...)")',
                _mask(column.is_null()),
            )
        part = _without_negative_zero(as_bytes(column, form), form)
        literal = plan.literals[i + 1].encode()
        if plan.key_is_open[i]:
            _check_separable(plan, name, part, literal)
        parts += [part, literal]
    keys = joined_texts(parts, len(batch))
    _check_size(plan, "key", plan.key_names, keys, KEY_BYTES_MAX)
    return keys


def joined_texts(parts: list[bytes | pa.Array], rows: int) -> pa.Array:
    """Return each row's parts as one text.

    Args:
        parts: Arrays, or bytes that are the same in all rows.
    """
    if change_records is None or not rows:
        return joined_in_arrow(parts, rows)
    given = [part if isinstance(part, bytes) else _content(part) for part in parts]
    return bytes_of(*change_records.joined(given, rows))


def joined_in_arrow(parts: list[bytes | pa.Array], rows: int) -> pa.Array:
    """Return the texts without the compiled core."""
    given = [pa.repeat(pa.scalar(part), rows) if isinstance(part, bytes) else part for part in parts]
    return pc.binary_join_element_wise(*given, pa.scalar(b""))


def _check_separable(plan: RowPlan, name: str, part: pa.Array, literal: bytes) -> None:
    """Raise RowError if a key part contains the separator that follows it: two rows could make the same key."""
    joined = pc.binary_join_element_wise(part, pa.scalar(literal), pa.scalar(b""))
    is_clear = pc.equal(pc.find_substring(joined, literal), pc.binary_length(part))
    if not pc.all(is_clear).as_py():
        bad = part.filter(pc.invert(is_clear))[0].as_py()
        raise RowError(
            f"state {plan.state!r}: the key column {name!r} has the value {bad[:100]!r}, which contains the separator "
            f"{literal!r}, so that two rows could make the same key; choose another separator= or key_format="
            f" (sparkis attach: --separator or --key-format)",
            ~_mask(is_clear),
        )


def _mask(is_bad: pa.Array) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = is_bad.to_numpy(zero_copy_only=False).astype(bool)
    return found


def _field(plan: RowPlan, batch: pa.RecordBatch) -> pa.Array:
    column = batch.column("f")
    role = "member" if plan.kind in (Kind.SET, Kind.SORTED_SET) else "field"
    if column.null_count:
        raise RowError(
            f"state {plan.state!r}: the {role} column {plan.field_name!r} is null in {column.null_count} row(s) of a "
            f"batch; filter them out, or give them a value with coalesce()",
            _mask(column.is_null()),
        )
    field = _without_negative_zero(as_bytes(column, plan.field_form), plan.field_form)
    _check_size(plan, role, (plan.field_name or "",), field, KEY_BYTES_MAX)
    return field


def _orders(plan: RowPlan, keys: pa.Array, batch: pa.RecordBatch) -> pa.Array:
    """Return the orders of rows; RowError for a null, which has none."""
    columns = [batch.column(f"b{i}") for i in range(len(plan.by_names))]
    for name, column in zip(plan.by_names, columns, strict=True):
        if column.null_count:
            key = keys.filter(column.is_null())[0].as_py()
            raise RowError(
                f"state {plan.state!r}: the column {name!r}, which orders the rows, is null in {column.null_count} "
                f"row(s) of a batch, such as one of the key {key[:100]!r}; filter them out, or give them a value with "
                f"coalesce()",
                _mask(column.is_null()),
            )
    orders = orders_of(columns)
    _check_size(plan, "row's order", plan.by_names, orders, ORDER_BYTES_MAX)
    return orders


def _check_scores(plan: RowPlan, keys: pa.Array, scores: pa.Array) -> None:
    """Raise RowError for a score that is NaN, which cannot be ordered."""
    is_nan = pc.fill_null(pc.is_nan(scores), False)
    if pc.any(is_nan).as_py():
        key = keys.filter(is_nan)[0].as_py()
        raise RowError(
            f"state {plan.state!r}: the score column {plan.value_names[0]!r} is NaN in a row of the key {key[:100]!r}; "
            f"filter such rows out, or make it null with nanvl(), which removes the member",
            _mask(is_nan),
        )


def _without_negative_zero(part: pa.Array, form: str) -> pa.Array:
    """Write -0.0 as 0.0, so that both make the same key, as in Spark's grouping, joins and sorting."""
    return pc.if_else(pc.equal(part, b"-0"), b"0", part) if form == "float" else part


def _check_size(
    plan: RowPlan, role: str, columns: Sequence[str], texts: pa.Array, bytes_max: int, *, is_by_row: bool = True
) -> None:
    """Raise RowError for a text that is too long.

    Args:
        is_by_row: Each row of the batch has one text.
    """
    if not len(texts) or _content(texts)[0][-1] - _content(texts)[0][0] <= bytes_max:
        return  # not even all of them together are
    longest = pc.max(pc.binary_length(texts)).as_py() or 0
    if longest > bytes_max:
        named = f"column{'s' * (len(columns) > 1)} {', '.join(map(repr, columns))}"
        raise RowError(
            f"state {plan.state!r}: a {role} made of the {named} has {longest} bytes; the limit is {bytes_max}; "
            f"shorten it, or leave such rows out",
            _mask(pc.fill_null(pc.greater(pc.binary_length(texts), bytes_max), False)) if is_by_row else None,
        )


def _deduplicated(plan: RowPlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Reduce adjacent rows of a key and field to one: the last one, the minimum, the maximum or the sum.

    RowError if a key has several rows without an order. All rows that append to an ordered list remain. For a minimum
    or maximum, rows come sorted by their values.
    """
    if plan.is_folded or (plan.appends and (plan.keeps_last or plan.by_names)):
        yield from batches
        return
    buffered: pa.RecordBatch | None = None
    for each in batches:
        batch = each if buffered is None else _joined([buffered, each])
        keys = batch.column("key")
        is_same = _is_same(plan, keys, batch.column("field"))
        if is_same.any():
            if plan.add is not None:
                batch = _summed(batch, np.flatnonzero(~is_same), plan.add)
            elif plan.reduce is Reduce.MIN or plan.keeps_first:
                batch = batch.filter(pa.array(~is_same))
            elif plan.keeps_last or plan.by_names or plan.reduce is Reduce.MAX:
                batch = batch.filter(pa.array(np.append(~is_same[1:], True)))
            else:
                row = int(np.argmax(is_same))
                _refuse_duplicates(plan, keys[row].as_py(), batch.column("field")[row].as_py())
        yield batch.slice(0, batch.num_rows - 1)
        buffered = batch.slice(batch.num_rows - 1)
    if buffered is not None:
        yield buffered


def _is_same(plan: RowPlan, keys: pa.Array, fields: pa.Array) -> npt.NDArray[np.bool_]:
    """Return for each row whether its key and field are those of the row before."""
    is_same = np.zeros(len(keys), bool)
    if len(keys) > 1:
        same = pc.equal(keys[1:], keys[:-1])
        if plan.field_name is not None:
            same = pc.and_(same, pc.equal(fields[1:], fields[:-1]))
        is_same[1:] = same.to_numpy(zero_copy_only=False)
    return is_same


def _sums(column: pa.Array, form: str, starts: npt.NDArray[Any], add: Callable[[bytes, bytes], bytes]) -> pa.Array:
    """Return the sum of each group of rows as text: exact, except for floats."""
    if form == "float":
        with np.errstate(all="ignore"):
            return as_bytes(pa.array(np.add.reduceat(column.to_numpy(), starts)), form)
    if form == "integer":
        numbers = column.to_numpy()
        high, low = np.add.reduceat(numbers >> 32, starts), np.add.reduceat(numbers & 0xFFFF_FFFF, starts)
        if np.abs(high).max() < 1 << 30:
            return as_bytes(pa.array((high << 32) + low), form)
        totals = [b"%d" % ((one << 32) + other) for one, other in zip(high.tolist(), low.tolist(), strict=True)]
        return pa.array(totals, pa.binary())
    texts = as_bytes(column, form).to_pylist()
    ends = [*starts[1:].tolist(), len(texts)]
    totals = [reduce(add, texts[start:end]) for start, end in zip(starts.tolist(), ends, strict=True)]
    return pa.array(totals, pa.binary())


def _summed(batch: pa.RecordBatch, starts: npt.NDArray[Any], add: Callable[[bytes, bytes], bytes]) -> pa.RecordBatch:
    """Add up adjacent changes of a key and field."""
    totals = _sums(batch.column("value"), "text", starts, add)
    batch = batch.take(pa.array(starts))
    return batch.set_column(batch.schema.get_field_index("value"), schema().field("value"), totals)


def _refuse_duplicates(plan: RowPlan, key: bytes, field: bytes | None) -> None:
    raise DuplicateRowsError(
        f"state {plan.state!r}: a micro-batch has several rows for the key {key[:100]!r}, without an order between "
        f"them; pass order_by= with the column that orders them, or duplicates='any' if it does not matter",
        field,
    )


def pack_columns(names: tuple[str, ...], values: list[pa.Array]) -> tuple[pa.Array, pa.Array]:
    """Encode each row's columns as a packed map without nulls (see `state_backend.codec.packed_map`).

    Returns the maps, and for each row whether its map is empty.
    """
    if change_records is None or not len(values[0]):
        return pack_columns_in_arrow(names, values)
    fields = [name.encode() for name in names]
    heads = [b"$%d\r\n%b\r\n$" % (len(field), field) for field in fields]
    given = [(*_content(value), validity_of(value)) for value in values]
    ends, content, is_empty = change_records.packed_maps(heads, given, len(values[0]))
    return bytes_of(ends, content), pa.array(np.frombuffer(is_empty, np.bool_))


def _content(column: pa.Array) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return the offsets of a binary array that is not empty, and the content that they refer to."""
    _, offsets, content = column.buffers()
    found = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return found, np.frombuffer(content or b"\0", np.uint8)


def pack_columns_in_arrow(names: tuple[str, ...], values: list[pa.Array]) -> tuple[pa.Array, pa.Array]:
    """Encode maps without the compiled core."""
    n = len(values[0])
    count = np.zeros(n, np.uint16)
    offset = np.zeros(n, np.uint32)
    offsets: list[pa.Array] = []
    pairs: list[pa.Array] = []
    nothing = pa.scalar(b"")
    for name, value in zip(names, values, strict=True):
        field = name.encode()
        head = pa.scalar(b"$%d\r\n%b\r\n$" % (len(field), field))
        length = pc.binary_length(value).cast(pa.string()).cast(pa.binary())
        end = pa.scalar(b"\r\n")
        pair = pc.fill_null(pc.binary_join_element_wise(head, length, end, value, end, nothing), b"")
        is_valid = pc.is_valid(value)
        offsets.append(pc.if_else(is_valid, _little_endian(offset), nothing))
        pairs.append(pair)
        count += is_valid.to_numpy(zero_copy_only=False).astype(np.uint16)
        offset += pc.binary_length(pair).to_numpy().astype(np.uint32)
    packed = pc.binary_join_element_wise(_little_endian(count), *offsets, *pairs, nothing)
    return packed, pa.array(count == 0)


def pack_arrays(plan: RowPlan, column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Encode each row's array as a packed list (see `state_backend.codec.packed_list`); RowError for null elements.

    Returns the lists, and for each row whether its list is empty or null.
    """
    elements = column.flatten()
    if elements.null_count:
        raise RowError(
            f"state {plan.state!r}: {elements.null_count} element(s) of an array are null, and a list has no null; "
            f"remove them with array_compact()",
            _rows_with(column, elements.is_null()),
        )
    text = _text(plan, elements, plan.value_forms[0])
    try:
        _check_size(plan, "list element", plan.value_names, text, VALUE_BYTES_MAX)
    except RowError as error:
        raise RowError(str(error), _rows_with(column, pa.array(error.is_bad))) from None
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    return _pack_lists(text, counts), pa.array(counts == 0)


def _rows_with(column: pa.Array, is_bad: pa.Array) -> npt.NDArray[np.bool_]:
    """Return for each array of a column whether one of its elements is bad."""
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    found = np.zeros(len(counts), bool)
    found[np.repeat(np.arange(len(counts)), counts)[_mask(is_bad)]] = True
    return found


def _pack_lists(text: pa.Array, counts: npt.NDArray[np.int64]) -> pa.Array:
    """Encode elements as packed lists."""
    end = pa.scalar(b"\r\n")
    length = pc.binary_length(text).cast(pa.string()).cast(pa.binary())
    bulk = pc.binary_join_element_wise(pa.scalar(b"$"), length, end, text, end, pa.scalar(b""))
    offsets = np.concatenate(([0], np.cumsum(counts)))
    body = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), bulk), b"")
    return pc.binary_join_element_wise(_list_heads(counts, offsets, bulk), body, pa.scalar(b""))


def _list_heads(counts: npt.NDArray[Any], offsets: npt.NDArray[Any], bulk: pa.Array) -> pa.Array:
    """Return the headers of packed lists: the count, and the end offset of each element."""
    ends = np.concatenate(([0], np.cumsum(pc.binary_length(bulk).to_numpy().astype(np.int64))))
    at = offsets[:-1] + np.arange(len(counts))  # the index of each list's count; the ends of its elements follow
    numbers = np.empty(len(counts) + len(bulk), np.uint32)
    is_count = np.zeros(len(numbers), bool)
    is_count[at] = True
    numbers[is_count] = counts
    numbers[~is_count] = ends[1:] - np.repeat(ends[offsets[:-1]], counts)
    raw = numbers if sys.byteorder == "little" else numbers.byteswap()
    limits = np.concatenate((at, [len(numbers)])).astype(np.int32) * 4
    return pa.Array.from_buffers(pa.binary(), len(counts), [None, pa.py_buffer(limits), pa.py_buffer(raw.tobytes())])


def _little_endian(numbers: npt.NDArray[Any]) -> pa.Array:
    """Return unsigned numbers as fixed-width little-endian byte strings."""
    raw = numbers if sys.byteorder == "little" else numbers.byteswap()
    ends = np.arange(len(numbers) + 1, dtype=np.int32) * numbers.itemsize
    return pa.Array.from_buffers(pa.binary(), len(numbers), [None, pa.py_buffer(ends), pa.py_buffer(raw.tobytes())])


# -- positions ---------------------------------------------------------------------------------------------------------


def _crc16_table() -> npt.NDArray[np.uint16]:
    """The table of CRC16/XMODEM (polynomial 0x1021), of Redis Cluster's specification."""
    table = np.arange(256, dtype=np.uint32) << 8
    for _ in range(8):
        table = np.where(table & 0x8000, (table << 1) ^ 0x1021, table << 1) & 0xFFFF
    return table.astype(np.uint16)


def _crc32_table() -> npt.NDArray[np.uint32]:
    """The table of zlib's CRC32 (reflected polynomial 0xEDB88320)."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0xEDB88320), table >> 1)
    return table


def _crc16_step(crc: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Update the CRC with a byte that was XORed into its upper bits."""
    updated: npt.NDArray[Any] = (crc << 8) ^ CRC16[crc >> 8]
    return updated


def _crc32_step(crc: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Update the CRC with a byte that was XORed into its lower bits."""
    updated: npt.NDArray[Any] = (crc >> 8) ^ CRC32[crc & 0xFF]
    return updated


CRC16 = _crc16_table()
CRC32 = _crc32_table()
# Tables for two bytes at once: half the iterations.
CRC16_PAIRS = _crc16_step(_crc16_step(np.arange(1 << 16, dtype=np.uint16)))
CRC32_PAIRS = _crc32_step(_crc32_step(np.arange(1 << 16, dtype=np.uint32)))


def hash_positions_of(keys: pa.Array, prefix: bytes = b"") -> npt.NDArray[np.uint64]:
    """Return the positions (`slots.hash_position`) of a binary array of keys without nulls; all begin with `prefix`."""
    if change_records is None or not len(keys):
        return positions_in_numpy(keys, prefix)
    return np.frombuffer(change_records.positions(*_content(keys), len(prefix)), np.uint64)


def positions_in_numpy(keys: pa.Array, prefix: bytes = b"") -> npt.NDArray[np.uint64]:
    """Return positions without the compiled core."""
    n = len(keys)
    ends = np.frombuffer(keys.buffers()[1], np.int32)[keys.offset : keys.offset + n + 1].astype(np.int64)
    content = np.frombuffer(keys.buffers()[2] or b"\0", np.uint8)
    lengths = np.diff(ends) - len(prefix)
    order = np.argsort(-lengths, kind="stable")  # the longest first, so that keys with remaining bytes are in front
    starts = ends[:-1][order] + len(prefix)
    sorted_lengths = lengths[order]
    crc16 = np.full(n, crc_hqx(prefix, 0), np.uint16)
    crc32 = np.full(n, zlib.crc32(prefix) ^ 0xFFFFFFFF, np.uint32)
    for done in range(0, min(int(sorted_lengths[0]) if n else 0, COLUMN_HASH_BYTES_MAX), 2):
        # The keys before `pairs` have two bytes or more left, those before `ones` one byte.
        pairs, ones = np.searchsorted(-sorted_lengths, (-done - 2, -done - 1), side="right")
        at = starts[:pairs] + done
        first, second = content[at].astype(np.uint16), content[at + 1].astype(np.uint16)
        crc16[:pairs] = CRC16_PAIRS[crc16[:pairs] ^ (first << 8 | second)]
        crc32[:pairs] = (crc32[:pairs] >> 16) ^ CRC32_PAIRS[(crc32[:pairs] & 0xFFFF) ^ (second << 8 | first)]
        last = content[starts[pairs:ones] + done]
        crc16[pairs:ones] = _crc16_step(crc16[pairs:ones] ^ (last.astype(np.uint16) << 8))
        crc32[pairs:ones] = _crc32_step(crc32[pairs:ones] ^ last)
    positions = np.empty(n, np.uint64)
    slots = (crc16 & 16383).astype(np.uint64)
    positions[order] = slots << np.uint64(HASH_BITS) | (crc32 ^ np.uint32(0xFFFFFFFF)).astype(np.uint64)
    is_special = (np.diff(ends) > COLUMN_HASH_BYTES_MAX) | pc.match_substring(keys, b"{").to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(is_special):  # keys with hash tags, and very long keys
        positions[row] = hash_position(keys[int(row)].as_py())
    return positions
