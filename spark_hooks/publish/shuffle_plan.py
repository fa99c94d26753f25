"""How rows pass from Spark to its Python workers: the rows of all states of a query, in one shuffle.

Each state has its own columns with their own types. States share the columns of the plan, if their types are the same.
A row of the query becomes one row of the plan for each state that it belongs to:

    g             the state's number and a hash of the key. Rows are partitioned and first sorted by it: Spark compares
                  one long much faster than texts, and compares other columns only for equal longs
    k0, k1 ...    the parts of the key
    f0 ...        the field of a map, the member of a set
    o0, o1 ...    the columns that order the rows of a key; not sent to the workers
    b0, b1 ...    the columns that order the rows of a key over all micro-batches; of equal rows the value decides
    v0, v1 ...    values
    d0            true: the row deletes
    e0            the row's expiry
    r0            true: the list is emptied before the row's element is appended
    h             a hash of the row, for the epoch's digest
    t             the time of the record in milliseconds since 1970, if the sink has `record_time=`; of rows
                  that are reduced to one, the earliest
    u             a hash of the key and the field; only if rows are not shuffled, and a second row of a key is an error
    s0, l0, x0 ...   the sum, the minimum, the maximum; in place of values, if all states reduce (see `reductions`).
                  Then Spark reduces the rows of a key and field to one, after the shuffle

Runs on the driver. A plan is made once per schema, because its columns are not bound to a DataFrame. So a micro-batch
needs few calls of Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_hooks.publish.columns import CALENDARS, SUMS, VARIANTS, StateColumns, folded
from state_backend.codec.row_encoding import GROUP, KEY_HASH, RECORD_TIME, ROW_HASH, STATE_BITS, RowPlan
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import DescriptorError

ROLES = ("k", "f", "o", "b", "v", "d", "e", "r", "s", "l", "x")
FOLDED_ROLES = ("s", "l", "x")
INCOMPARABLE: tuple[type[T.DataType], ...] = (T.MapType, *CALENDARS, *VARIANTS)


@dataclass(frozen=True)
class ShufflePlan:
    """The plan for the rows of some states, for DataFrames of one schema."""

    schema: T.StructType
    states: tuple[StateDescriptor, ...]
    row_plans: tuple[RowPlan, ...]
    selected: tuple[Column, ...]
    order: tuple[Column, ...]
    output: tuple[Column, ...]
    unshuffled: tuple[Column, ...] = ()
    has_unique_keys: bool = False  # a second row of a key and field is an error
    groups: tuple[str, ...] = ()
    aggregates: tuple[Column, ...] = ()

    @classmethod
    def of(cls, df: DataFrame, states: Sequence[StateDescriptor], job: str, record_time: str | None = None) -> Self:
        """Make the plan for some states. Takes a few hundred calls of Spark.

        Args:
            record_time: The timestamp column whose values the column t has.
        """
        of_states = [StateColumns(state, job) for state in states]
        is_folded = all(each.can_be_folded(df) for each in of_states)
        columns = [each.selected(df, is_folded) for each in of_states]
        types = iter(df.select(*(column for each in columns for _, column in each)).schema.fields)
        shared = _SharedColumns()
        names_of_states = [shared.assign((role, next(types).dataType) for role, _ in each) for each in columns]
        rows = [
            {shared_name: column for shared_name, (_, column) in zip(names, each, strict=True)}
            for names, each in zip(names_of_states, columns, strict=True)
        ]
        is_ordered = any(map(_is_ordered, states)) and not is_folded
        order = ["o", "b", *(["v"] if shared.types["b"] else [])]
        comparable = shared.comparable()
        groups = shared.names("k", "f") if is_folded else []
        folds = [
            folded(role, f"{role}{index}", type_)
            for role in FOLDED_ROLES
            for index, type_ in enumerate(shared.types[role])
        ]
        time = () if record_time is None else (F.unix_millis(F.col(f"`{record_time}`")).alias(RECORD_TIME),)
        times = [F.col(RECORD_TIME)] * len(time)
        data = [GROUP, *shared.names("k", "f", "b", "v", "d", "e", "r")]
        row_hash = F.xxhash64(*map(comparable, data)).alias(ROW_HASH)
        names = shared.names("k", "f")
        state = states[0]
        can_skip_shuffle = (
            len(states) == 1 and bool(names) and state.reduce is None and state.by is None and not state.order_by
        )
        has_unique_keys = can_skip_shuffle and state.duplicates == "error"
        key_hash = (F.xxhash64(*map(F.col, names)).alias(KEY_HASH),) if has_unique_keys else ()
        return cls(
            schema=df.schema,
            states=tuple(states),
            row_plans=tuple(
                each.plan(df, _renamed(names), is_folded)
                for each, names in zip(of_states, names_of_states, strict=True)
            ),
            selected=(_expanded(states, rows, shared, time),) if _is_expanded(states) else (*_row(0, rows[0]), *time),
            order=tuple(map(comparable, [GROUP, *shared.names("k", "f", *order)])) if is_ordered else (F.col(GROUP),),
            output=(*map(F.col, data), *(outcome for _, outcome in folds), F.col(ROW_HASH), *times)
            if is_folded
            else (*map(F.col, data), row_hash, *times),
            unshuffled=(*map(F.col, data[1:]), row_hash, *key_hash, *times) if can_skip_shuffle else (),
            has_unique_keys=has_unique_keys,
            groups=(GROUP, *groups) if is_folded else (),
            aggregates=(
                *(part for parts, _ in folds for part in parts),
                # The lower half of each hash: a sum of full hashes overflows a bigint.
                F.sum(F.xxhash64(*map(F.col, shared.names(*ROLES))).bitwiseAND(F.lit(0xFFFF_FFFF))).alias(ROW_HASH),
                *(F.min(each).alias(RECORD_TIME) for each in times),
            ),
        )

    def rows(self, df: DataFrame, partitions: int) -> DataFrame:
        """Return the states' rows: each key in one partition, sorted so that the last row of a key wins.

        Always a full pass over the batch: without one, a stateful query loses its checkpoint.
        """
        rows = self._selected_rows(df).repartition(partitions, GROUP)
        if self.groups:
            rows = rows.groupBy(*self.groups).agg(*self.aggregates)
        return rows.sortWithinPartitions(*self.order).select(*self.output)

    def unshuffled_rows(self, df: DataFrame) -> DataFrame:
        """Return the single state's rows without a shuffle: a key may be in several partitions. Also a full pass."""
        return self._selected_rows(df).select(*self.unshuffled)

    def _selected_rows(self, df: DataFrame) -> DataFrame:
        rows = df.select(*self.selected)
        return rows.where(f"{GROUP} IS NOT NULL") if _is_expanded(self.states) else rows

    def rows_in_place(self, df: DataFrame, *first: str) -> DataFrame:
        """Return the single state's rows, sorted, without a shuffle; each key must be in one partition already.

        Args:
            first: Columns by which the rows are sorted first; they are included in the rows.
        """
        (state,) = self.states
        assert state.where is None
        before = [F.col(f"`{name}`") for name in first]
        rows = df.select(*before, *self.selected).sortWithinPartitions(*before, *self.order)
        return rows.select(*before, *self.output)

    def row_plans_at(self, clock_ms: int) -> tuple[RowPlan, ...]:
        """Return the plans by which a task encodes the rows of a micro-batch."""
        return tuple(
            plan if state.ttl_ms is None else replace(plan, expire_at_ms=clock_ms + state.ttl_ms)
            for state, plan in zip(self.states, self.row_plans, strict=True)
        )


def check_shuffle_plan(df: DataFrame, states: Sequence[StateDescriptor], job: str) -> None:
    """Have Spark analyze the plan of a batch, so that its errors are raised before the query starts."""
    for each in [[state] for state in states] + [states] * (len(states) > 1):
        try:
            ShufflePlan.of(df, each, job).rows(df, 1).schema  # noqa: B018  # analysis happens here
        except PySparkException as error:
            names = ", ".join(repr(state.name) for state in each)
            raise DescriptorError(f"state {names}: Spark cannot read its columns: {error}") from None


def _is_ordered(state: StateDescriptor) -> bool:
    """Return whether the rows of a key must be ordered or adjacent.

    Rows of two keys with the same hash are mixed. Sums need no order: they can be added up in several changes.
    """
    if state.reduce in SUMS and state.field is None:
        return False
    return state.duplicates != "any" or bool(state.order_by)


@dataclass
class _SharedColumns:
    """The types of the shared columns of each role."""

    types: dict[str, list[T.DataType]] = field(default_factory=lambda: {role: [] for role in ROLES})

    def assign(self, columns: Iterable[tuple[str, T.DataType]]) -> list[str]:
        """Return a shared column for each column of a state; a new one if there is none of the type.

        Columns of a role keep their order, because rows are sorted in the order of shared columns.
        """
        next_index = dict.fromkeys(ROLES, 0)
        names = []
        for role, type_ in columns:
            types = self.types[role]
            index = next((index for index in range(next_index[role], len(types)) if types[index] == type_), len(types))
            if index == len(types):
                types.append(type_)
            next_index[role] = index + 1
            names.append(f"{role}{index}")
        return names

    def names(self, *roles: str) -> list[str]:
        """Return the names of the shared columns of some roles, in the order of a row."""
        return [f"{role}{index}" for role in roles for index in range(len(self.types[role]))]

    def comparable(self) -> Callable[[str], Column]:
        """Return a function from a shared column's name to what Spark can hash and order: of others, their JSON."""
        types = {f"{role}{index}": type_ for role in ROLES for index, type_ in enumerate(self.types[role])}
        return lambda name: F.to_json(F.struct(F.col(name))) if _is_incomparable(types.get(name)) else F.col(name)

    def empty(self) -> dict[str, Column]:
        """Return a row of nulls."""
        return {
            f"{role}{index}": F.lit(None).cast(type_) for role in ROLES for index, type_ in enumerate(self.types[role])
        }


def _is_incomparable(kind: T.DataType | None) -> bool:
    """Return whether Spark cannot hash, or not order, a type."""
    if isinstance(kind, T.UserDefinedType):
        return _is_incomparable(kind.sqlType())
    if isinstance(kind, T.StructType):
        return any(_is_incomparable(each.dataType) for each in kind)
    if isinstance(kind, T.ArrayType):
        return _is_incomparable(kind.elementType)
    return isinstance(kind, INCOMPARABLE)


def _renamed(shared: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return (name in `RowPlan`, name of the shared column) of each column that a worker reads."""
    counts = dict.fromkeys(ROLES, 0)
    renamed = []
    for shared_name in shared:
        role = shared_name[0]
        if role != "o":
            renamed.append(
                (f"{role}{counts[role]}" if role in "kvb" else "v0" if role in FOLDED_ROLES else role, shared_name)
            )
        counts[role] += 1
    return (*renamed, (ROW_HASH, ROW_HASH))


def _row(number: int, row: dict[str, Column]) -> tuple[Column, ...]:
    """Return the columns of a state's row."""
    parts = [column for shared_name, column in row.items() if shared_name[0] == "k"]
    key_hash = F.xxhash64(*parts) if parts else F.lit(0).cast("long")
    group = F.shiftrightunsigned(key_hash, STATE_BITS).bitwiseOR(F.lit(number << (64 - STATE_BITS)).cast("long"))
    return (group.alias(GROUP), *(column.alias(shared_name) for shared_name, column in row.items()))


def _is_expanded(states: Sequence[StateDescriptor]) -> bool:
    """Return whether rows go through the generator: with several states, or with a condition.

    A single state with a condition could use a filter instead. But if Spark's optimizer finds that the condition is
    never true, it skips the whole batch, and a stateful query loses its checkpoint (observed). The optimizer does not
    inspect a generator.
    """
    return len(states) > 1 or states[0].where is not None


def _expanded(
    states: Sequence[StateDescriptor],
    rows: Sequence[dict[str, Column]],
    shared: _SharedColumns,
    time: tuple[Column, ...],
) -> Column:
    """Return the generator of one row of the plan per state; all null if a row does not belong to the state."""
    empty = shared.empty()
    generated = []
    for number, (state, row) in enumerate(zip(states, rows, strict=True)):
        full_row = F.struct(*_row(number, empty | row), *time)
        generated.append(full_row if state.where is None else F.when(F.expr(state.where), full_row))
    return F.inline(F.array(*generated))
