"""How the rows of all of a query's states travel through Spark to the workers: together, in one shuffle.

Each state has its own columns of its own types; a row of the layout has a slot for each of them, and states share the
slots of one type. A row of the query becomes a row of the layout for each state that it belongs to:

    g             the state's number and a hash of the key: rows are spread by it, and ordered by it first, because
                  Spark compares one long much faster than texts, and other columns only where two are the same
    k0, k1 ...    the key's parts
    f0 ...        a map's field, a set's member
    o0, o1 ...    what orders the rows of one key; not sent to the workers
    v0, v1 ...    values
    d0            whether the row deletes
    e0            when the row expires
    r0            whether a list is emptied before the row's element is appended
    h             a hash of the row, for the epoch's digest
    u             a hash of the key and the field, where rows stay in the partitions that they are in, and a second row
                  of a key is an error
    s0, l0, x0 ...   instead of values, where Spark makes one row of all rows of a key and field: it does if all of the
                  states fold (see `reductions`), after the shuffle. What is a sum, the least, the greatest

Runs on the driver. A layout is made once for a schema: its columns are not bound to a DataFrame, so that a micro-batch
costs few calls of Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_hooks.publish.columns import SUMS, StateColumns, folded
from spark_hooks.publish.encoding import STATE_BITS, RowPlan
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import DescriptorError

ROLES = ("k", "f", "o", "v", "d", "e", "r", "s", "l", "x")
FOLDED_ROLES = ("s", "l", "x")


@dataclass(frozen=True)
class Layout:
    """The way of the rows of some states, for DataFrames of one schema."""

    schema: T.StructType
    states: tuple[StateDescriptor, ...]
    row_plans: tuple[RowPlan, ...]
    selected: tuple[Column, ...]
    order: tuple[Column, ...]
    sent: tuple[Column, ...]
    unshuffled: tuple[Column, ...] = ()
    has_unique_keys: bool = False  # a second row of a key and field is an error
    groups: tuple[str, ...] = ()
    aggregates: tuple[Column, ...] = ()

    @classmethod
    def of(cls, df: DataFrame, states: Sequence[StateDescriptor], job: str) -> Self:
        """Lay out the columns of some states; costs a few hundred calls of Spark."""
        of_states = [StateColumns(state, job) for state in states]
        is_folded = all(each.can_be_folded(df) for each in of_states)
        columns = [each.selected(df, is_folded) for each in of_states]
        kinds = iter(df.select(*(column for each in columns for _, column in each)).schema.fields)
        slots = _Slots()
        placed = [slots.place((role, next(kinds).dataType) for role, _ in each) for each in columns]
        rows = [
            {slot: column for slot, (_, column) in zip(names, each, strict=True)}
            for names, each in zip(placed, columns, strict=True)
        ]
        is_ordered = any(map(_is_ordered, states)) and not is_folded
        groups = slots.names("k", "f") if is_folded else []
        folds = [
            folded(role, f"{role}{index}", kind)
            for role in FOLDED_ROLES
            for index, kind in enumerate(slots.kinds[role])
        ]
        data = ["g", *slots.names("k", "f", "v", "d", "e", "r")]
        row_hash = F.xxhash64(*map(F.col, data)).alias("h")
        names = slots.names("k", "f")
        can_stay = len(states) == 1 and bool(names) and states[0].reduce is None and not states[0].order_by
        has_unique_keys = can_stay and states[0].duplicates == "error"
        key_hash = (F.xxhash64(*map(F.col, names)).alias("u"),) if has_unique_keys else ()
        return cls(
            schema=df.schema,
            states=tuple(states),
            row_plans=tuple(
                each.plan(df, _renamed(names), is_folded) for each, names in zip(of_states, placed, strict=True)
            ),
            selected=(_expanded(states, rows, slots),) if _is_expanded(states) else _row(0, rows[0]),
            order=tuple(map(F.col, ["g", *slots.names("k", "f", "o")])) if is_ordered else (F.col("g"),),
            sent=(*map(F.col, data), *(outcome for _, outcome in folds), F.col("h"))
            if is_folded
            else (*map(F.col, data), row_hash),
            unshuffled=(*map(F.col, data[1:]), row_hash, *key_hash) if can_stay else (),
            has_unique_keys=has_unique_keys,
            groups=("g", *groups) if is_folded else (),
            aggregates=(
                *(part for parts, _ in folds for part in parts),
                # Of half of each hash: the sum of whole ones is no bigint.
                F.sum(F.xxhash64(*map(F.col, slots.names(*ROLES))).bitwiseAND(F.lit(0xFFFF_FFFF))).alias("h"),
            ),
        )

    def rows(self, df: DataFrame, partitions: int) -> DataFrame:
        """Return the states' rows, each key in one partition, in an order where the last row of a key wins.

        Always a whole pass over the batch: Spark would lose the checkpoint of a stateful query otherwise.
        """
        rows = self._selected_rows(df).repartition(partitions, "g")
        if self.groups:
            rows = rows.groupBy(*self.groups).agg(*self.aggregates)
        return rows.sortWithinPartitions(*self.order).select(*self.sent)

    def unshuffled_rows(self, df: DataFrame) -> DataFrame:
        """Return the only state's rows where they are: two of one key may lie anywhere. Also a whole pass."""
        return self._selected_rows(df).select(*self.unshuffled)

    def _selected_rows(self, df: DataFrame) -> DataFrame:
        rows = df.select(*self.selected)
        return rows.where("g IS NOT NULL") if _is_expanded(self.states) else rows

    def rows_in_place(self, df: DataFrame, *first: str) -> DataFrame:
        """Return the rows of the only state, in such an order, where all rows of a key lie in one partition already.

        `first` names columns that order the rows before all else, and that are sent on.
        """
        (state,) = self.states
        assert state.where is None
        before = [F.col(f"`{name}`") for name in first]
        rows = df.select(*before, *self.selected).sortWithinPartitions(*before, *self.order)
        return rows.select(*before, *self.sent)

    def plans(self, clock_ms: int) -> tuple[RowPlan, ...]:
        """Return what a task needs to know to encode the rows of a micro-batch."""
        return tuple(
            plan if state.ttl_ms is None else replace(plan, expire_at_ms=clock_ms + state.ttl_ms)
            for state, plan in zip(self.states, self.row_plans, strict=True)
        )


def check_layout(df: DataFrame, states: Sequence[StateDescriptor], job: str) -> None:
    """Let Spark analyse what a batch will run, so that it refuses now what it would refuse then."""
    for each in [[state] for state in states] + [states] * (len(states) > 1):
        try:
            Layout.of(df, each, job).rows(df, 1).schema  # noqa: B018  # analysis happens here
        except PySparkException as error:
            names = ", ".join(repr(state.name) for state in each)
            raise DescriptorError(f"state {names}: Spark cannot read its columns: {error}") from None


def _is_ordered(state: StateDescriptor) -> bool:
    """Tell whether the rows of a key have an order, or have to lie together for sure.

    What is added up may as well be folded in several parts, should two keys have one hash.
    """
    if state.reduce in SUMS and state.field is None:
        return False
    return state.duplicates != "any" or bool(state.order_by)


@dataclass
class _Slots:
    """The types of the slots of each role."""

    kinds: dict[str, list[T.DataType]] = field(default_factory=lambda: {role: [] for role in ROLES})

    def place(self, columns: Iterable[tuple[str, T.DataType]]) -> list[str]:
        """Return a slot for each column of a state, new ones where no other state has one to share.

        Columns of one role keep their order, because rows are ordered by the slots' order.
        """
        at = dict.fromkeys(ROLES, 0)
        names = []
        for role, kind in columns:
            kinds = self.kinds[role]
            index = next((index for index in range(at[role], len(kinds)) if kinds[index] == kind), len(kinds))
            if index == len(kinds):
                kinds.append(kind)
            at[role] = index + 1
            names.append(f"{role}{index}")
        return names

    def names(self, *roles: str) -> list[str]:
        """Return the slots of some roles, in the order of a row."""
        return [f"{role}{index}" for role in roles for index in range(len(self.kinds[role]))]

    def empty(self) -> dict[str, Column]:
        """Return a row of nulls."""
        return {
            f"{role}{index}": F.lit(None).cast(kind) for role in ROLES for index, kind in enumerate(self.kinds[role])
        }


def _renamed(slots: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return (the name that `RowPlan` uses, slot) of each column that a worker reads."""
    counts = dict.fromkeys(ROLES, 0)
    renamed = []
    for slot in slots:
        role = slot[0]
        if role != "o":
            renamed.append((f"{role}{counts[role]}" if role in "kv" else "v0" if role in FOLDED_ROLES else role, slot))
        counts[role] += 1
    return (*renamed, ("h", "h"))


def _row(number: int, row: dict[str, Column]) -> tuple[Column, ...]:
    """Return the columns of a state's row."""
    parts = [column for slot, column in row.items() if slot[0] == "k"]
    key_hash = F.xxhash64(*parts) if parts else F.lit(0).cast("long")
    group = F.shiftrightunsigned(key_hash, STATE_BITS).bitwiseOR(F.lit(number << (64 - STATE_BITS)).cast("long"))
    return (group.alias("g"), *(column.alias(slot) for slot, column in row.items()))


def _is_expanded(states: Sequence[StateDescriptor]) -> bool:
    """Tell whether rows go through the generator: all do but those of an only state that has no condition.

    A condition alone would need none. But where Spark sees that it is never true it leaves out the whole batch, and a
    stateful query's checkpoint is lost (seen); it does not see through the generator.
    """
    return len(states) > 1 or states[0].where is not None


def _expanded(states: Sequence[StateDescriptor], rows: Sequence[dict[str, Column]], slots: _Slots) -> Column:
    """Return the generator that makes a row of the layout for each state; all null where a row is not the state's."""
    empty = slots.empty()
    made = []
    for number, (state, row) in enumerate(zip(states, rows, strict=True)):
        whole = F.struct(*_row(number, empty | row))
        made.append(whole if state.where is None else F.when(F.expr(state.where), whole))
    return F.inline(F.array(*made))
