"""Turns the rows of Spark's state reader into rows with plain columns, from which an attachment publishes a state.

    names      the parts of the key (a window's start has the window's name, its end is `<name>_end`); the fields of the
               value by name, if the name is unique; and all fields of the value by position: `_0`, `_1` ...
    $batch     the number of the micro-batch that made the change
    $order     orders the changes of a key
    $deleted   true: the key, or the field, is deleted
    $expire_at the expiry in milliseconds since 1970; only if the state has a time to live
    $resets    true: the list is emptied before the row's element is appended

Runs on the driver when an attachment is made; `StateQuery` then makes one DataFrame for each read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_hooks.attach.operators import OperatorState
from spark_hooks.attach.results import field_of, renamed, with_results
from spark_hooks.checkpoint import SparkCheckpoint
from spark_hooks.publish.columns import CAST_TYPES, INTERVALS, NESTED_TYPES, TEXT_TYPES, VARIANTS, check_columns
from spark_hooks.publish.shuffle_plan import ShufflePlan, check_shuffle_plan
from spark_hooks.sessions import current_session
from state_backend.attach.aggregates import (
    Aggregate,
    PlannedFunction,
    default_columns,
    hint_of,
    match_buffers,
    of_buffers,
    parse_aggregate,
    results_of,
)
from state_backend.attach.states import (
    BATCH,
    DELETED,
    EXPIRE_AT,
    MAP_KEY,
    ORDER,
    PARTS_OF_WINDOW,
    RESETS,
    AttachedState,
    ColumnNames,
    ValueField,
    default_value_columns,
    descriptor_of,
    distinct_names,
    key_columns_of,
    named_value_of,
    single_window,
    without_window_ends,
)
from state_backend.checkpoint.spark_types import SPARKS_EXPIRE_AT, TIME_WINDOW
from state_backend.checkpoint.states import StateForm, stable_name
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.errors import DescriptorError

PLAIN_TYPES = TEXT_TYPES + CAST_TYPES + (T.FractionalType, T.TimestampType, T.TimestampNTZType) + INTERVALS
WRITABLE_TYPES = PLAIN_TYPES + NESTED_TYPES
INSTANTS = (T.TimestampType, T.TimestampNTZType)
# The value column of Spark's state reader; for other forms it is `value`.
VALUE_COLUMNS = {StateForm.MAP: "user_map_value", StateForm.LIST: "list_element"}


class _StructField(NamedTuple):
    """A field of one of the reader's struct columns."""

    name: str
    column: Column
    kind: T.DataType


@dataclass(frozen=True)
class _ColumnRoles:
    """The columns of an operator state by their role.

    Args:
        distinct: As in `ColumnNames`.
    """

    key: tuple[_StructField, ...]
    field: tuple[_StructField, ...]
    value: tuple[_StructField, ...]
    distinct: tuple[str, ...]
    default_value: tuple[str, ...]
    expire_at: Column | None
    buffers: tuple[pa.Field, ...]
    results: Mapping[str, Aggregate]
    window: str | None

    @classmethod
    def of(cls, source: OperatorState, planned: Sequence[PlannedFunction] | None) -> Self:
        key = list(_without_windows(_members("key", source)))
        field_columns: list[_StructField] = []
        if source.form is StateForm.JOIN:
            key, field_columns = key[:-1], key[-1:]  # the last column is `index`
        elif source.form is StateForm.MAP:
            field_columns = list(_without_windows(_members("user_map_key", source)))
        if not key:
            key = [_StructField("all", F.lit("all"), T.StringType())]
        key = _with_text_forms(key)
        field_columns = _with_text_forms(_with_distinct_names(field_columns, {member.name for member in key}))
        raw, expire_at = _value_members(source)
        used_names = {member.name for member in (*key, *field_columns)}
        value = [_StructField(f"_{index}", member.column, member.kind) for index, member in enumerate(raw)]
        names = [member.name for member in raw]
        by_name = [
            each for each in _without_windows(raw) if names.count(each.name) <= 1 and each.name not in used_names
        ]
        default = default_value_columns(
            [ValueField(each.name, _is_window(each.kind), isinstance(each.kind, WRITABLE_TYPES)) for each in raw],
            {each.name for each in by_name},
            used_names,
            is_session=source.form is StateForm.SESSION,
        )
        buffers = buffers_of(source)
        results = results_of(buffers, planned, used_names)
        is_buffer = [bool(buffer.name) for buffer in buffers]
        members = zip(_members("key", source), source.type_of("key"), strict=True)
        windows = [member for member, field in members if field.metadata.get(TIME_WINDOW)]
        window = single_window([each.name for each in windows], used_names)
        parts = _parts_of(windows[0]) if window is not None else []
        if len(field_columns) > 1 and MAP_KEY not in used_names:
            parts.append(_StructField(MAP_KEY, F.to_json(F.col("user_map_key")), T.StringType()))
        return cls(
            (*key, *parts),
            tuple(field_columns),
            (*value, *by_name),
            without_window_ends([each.name for each in (*key, *field_columns)], [each.name for each in windows]),
            default_columns(default, results, is_buffer, is_planned=planned is not None),
            expire_at,
            tuple(buffers),
            results,
            window,
        )

    def names(self, source: OperatorState) -> ColumnNames:
        """Return the names of the columns by their role."""
        return ColumnNames(
            str(source),
            source.name,
            source.kind,
            tuple(each.name for each in self.key),
            tuple(each.name for each in self.field),
            tuple(dict.fromkeys((*(each.name for each in self.value), *self.results))),
            self.distinct,
            self.default_value,
            self.expire_at is not None,
            self.window,
        )


def buffers_of(source: OperatorState) -> list[pa.Field]:
    """Return the buffers of an aggregation by position; the other fields of the value get an empty name."""
    if source.form not in (StateForm.PLAIN, StateForm.SESSION):
        return []
    # A session's value begins with the window and the grouping columns, which are as many as the columns of its key.
    others = len(source.type_of("key").fields) if source.form is StateForm.SESSION else 0
    fields = source.type_of("value").fields
    return [field_of("" if index < others else each.name, each.dataType) for index, each in enumerate(fields)]


def _value_members(source: OperatorState) -> tuple[list[_StructField], Column | None]:
    """Return the fields of the value, and the column of its expiry or None."""
    if source.form is StateForm.DEDUPLICATION:
        return [_seen(source)], None
    members = list(_members(VALUE_COLUMNS.get(source.form, "value"), source))
    if source.form is StateForm.GROUP:
        return [each for member in members for each in _unwrapped(member, "groupState")], None
    if not source.has_ttl:
        return members, None
    expire_at = next(member.column for member in members if member.name == SPARKS_EXPIRE_AT)
    members = [each for member in members for each in _unwrapped(member, "value") if each.name != SPARKS_EXPIRE_AT]
    return members, expire_at


def _unwrapped(member: _StructField, name: str) -> Iterator[_StructField]:
    """Yield the fields of a member that is a struct with that name; yield any other member unchanged."""
    if member.name == name and isinstance(member.kind, T.StructType):
        yield from _fields(member.column, member.kind)
    else:
        yield member


def _seen(source: OperatorState) -> _StructField:
    """Return the value of a deduplication: an expiry for dropDuplicatesWithinWatermark, "1" for dropDuplicates."""
    (member,) = _members("value", source)
    if isinstance(member.kind, T.LongType):
        return _StructField("expires_at", F.timestamp_micros(member.column), T.TimestampType())
    return _StructField("seen", F.lit("1"), T.StringType())


def _members(column: str, source: OperatorState) -> Iterator[_StructField]:
    return _fields(F.col(column), source.type_of(column))


def _fields(column: Column, kind: T.StructType) -> Iterator[_StructField]:
    """Yield a struct's fields by position, because all buffers of an aggregation may have the same name."""
    renamed = T.StructType([T.StructField(f"_{index}", each.dataType) for index, each in enumerate(kind)])
    by_position = column.cast(renamed)
    for index, each in enumerate(kind):
        yield _StructField(each.name, by_position.getField(f"_{index}"), each.dataType)


def _is_window(kind: T.DataType) -> bool:
    return (
        isinstance(kind, T.StructType)
        and kind.names == ["start", "end"]
        and all(isinstance(each.dataType, INSTANTS) for each in kind)
    )


def _without_windows(members: Iterator[_StructField] | Sequence[_StructField]) -> Iterator[_StructField]:
    """Yield two columns for each window: the start with the window's name, and the end."""
    for member in members:
        if isinstance(member.kind, T.StructType) and _is_window(member.kind):
            start, end = _fields(member.column, member.kind)
            yield member._replace(column=start.column, kind=start.kind)
            yield _StructField(f"{member.name}_end", end.column, end.kind)
        else:
            yield member


def _parts_of(window: _StructField) -> list[_StructField]:
    """Return the columns `start` and `end` of a window."""
    assert isinstance(window.kind, T.StructType)
    parts = _fields(window.column, window.kind)
    return [part._replace(name=name) for part, name in zip(parts, PARTS_OF_WINDOW, strict=True)]


def _with_distinct_names(members: Sequence[_StructField], used_names: set[str]) -> list[_StructField]:
    """Rename parts of a map's key that are named like a part of the key: in Scala both may be called `value`."""
    return [each._replace(name=f"map_{each.name}") if each.name in used_names else each for each in members]


def _with_text_forms(members: Sequence[_StructField]) -> list[_StructField]:
    """Append the position to names that several key parts share; convert parts that have no text form to JSON."""
    result = []
    for member, name in zip(members, distinct_names([member.name for member in members]), strict=True):
        if isinstance(member.kind, PLAIN_TYPES):
            result.append(member._replace(name=name))
        elif _has_other_json(member.kind):
            raise DescriptorError(
                f"the part {name!r} of the key has the type {member.kind.simpleString()}, of which Spark's JSON cuts "
                f"times to milliseconds and writes numbers in another form; use reader='files'"
            )
        else:
            result.append(_StructField(name, F.to_json(member.column), T.StringType()))
    return result


def _has_other_json(kind: T.DataType) -> bool:
    """Return whether Spark's JSON has another text for a type than `json_text`."""
    if isinstance(kind, T.StructType):
        return any(_has_other_json(each.dataType) for each in kind)
    if isinstance(kind, T.MapType):
        is_plain = isinstance(kind.keyType, (T.StringType, T.IntegralType, T.BooleanType, T.DecimalType))
        return not is_plain or _has_other_json(kind.valueType)
    if isinstance(kind, T.ArrayType):
        return _has_other_json(kind.elementType)
    return isinstance(kind, (*INSTANTS, T.FractionalType, *INTERVALS, *VARIANTS))


@dataclass(frozen=True)
class StateQuery:
    """One state of the log, and the operator state that it is read from."""

    source: OperatorState
    descriptor: StateDescriptor
    shuffle_plan: ShufflePlan
    expressions: Mapping[str, str]
    results: Mapping[str, Aggregate]
    _roles: _ColumnRoles = field(repr=False)

    @classmethod
    def of(
        cls,
        source: OperatorState,
        requested: AttachedState,
        job: str,
        spark: SparkSession,
        checkpoint: SparkCheckpoint,
        batch: int,
        planned: Sequence[PlannedFunction] | None = None,
    ) -> Self:
        """Fill in the defaults of the operator state, and validate the state against its columns."""
        roles = _ColumnRoles.of(source, planned)
        expressions = dict(requested.columns or {})
        calls = {name: call for name, text in expressions.items() if (call := parse_aggregate(text)) is not None}
        declared = match_buffers({expressions[name]: call for name, call in calls.items()}, roles.buffers, str(source))
        names, calls_of = roles.names(source), {name: declared[expressions[name]] for name in calls}
        named = named_value_of(list(expressions), *of_buffers(calls_of, roles.results, roles.buffers), names)
        descriptor = descriptor_of(replace(names, named_value=named), requested)
        _check_key_expressions(source, roles, descriptor, expressions)
        results = {name: each for name, each in roles.results.items() if name not in calls}
        results |= {name: declared[expressions[name]] for name in calls}
        result = cls(source, descriptor, None, expressions, results, roles)  # type: ignore[arg-type]  # the plan is set below
        rows = result._named_rows(source.snapshot(spark, checkpoint, batch), batch)
        descriptor = check_columns(rows, descriptor, job)
        check_shuffle_plan(rows, [descriptor], job)
        plan = ShufflePlan.of(rows, [descriptor], job)
        skips = requested.on_bad_key == "skip"
        plan = replace(plan, row_plans=tuple(replace(each, skips_bad_rows=skips) for each in plan.row_plans))
        return replace(result, descriptor=descriptor, shuffle_plan=plan)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns that key, field, value and expressions may use."""
        names = self._roles.names(self.source).all
        return (*names, *(name for name in self.expressions if name not in names))

    @property
    def hint(self) -> str | None:
        """How to name the functions of the aggregation; None if they are named, or evident."""
        is_default = self.descriptor.value == self._roles.default_value
        return hint_of(self._roles.buffers, self._roles.results.values()) if is_default else None

    def snapshot(self, spark: SparkSession, checkpoint: SparkCheckpoint, batch: int, partitions: int) -> DataFrame:
        """Return the full state as of a batch, in the columns of a task."""
        rows = self.source.snapshot(spark, checkpoint, batch).coalesce(partitions)
        return self.shuffle_plan.rows_in_place(self._named_rows(rows, batch), BATCH)

    def changes(
        self, spark: SparkSession, checkpoint: SparkCheckpoint, first: int, last: int, partitions: int
    ) -> DataFrame:
        """Return the changes of some batches in the columns of a task, sorted by batch and key."""
        rows = self.source.changes(spark, checkpoint, first, last).coalesce(partitions)
        return self.shuffle_plan.rows_in_place(self._named_rows(rows, None), BATCH)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The source of the state, as plain JSON. If the source changes, the log needs a new generation."""
        return {
            "operator_id": self.source.operator_id,
            "operator": stable_name(self.source.operator),
            "variable": self.source.variable,
            "schema": self.source.schema.simpleString(),
            "columns": {name: each.text for name, each in self.results.items() if name in self.descriptor.value}
            | dict(self.expressions),
        }

    def _named_rows(self, df: DataFrame, batch: int | None) -> DataFrame:
        """Return the reader's rows with plain columns.

        Args:
            batch: The batch of a snapshot; None for changes.
        """
        is_feed = batch is None
        rows = df.select(
            F.col("batch_id").alias(BATCH) if is_feed else F.lit(batch).cast("long").alias(BATCH),
            F.monotonically_increasing_id().alias(ORDER),
            (F.col("change_type") == "delete" if is_feed else F.lit(False)).alias(DELETED),
            *(member.column.alias(member.name) for member in (*self._roles.key, *self._roles.field)),
            *(self._value(member, is_feed=is_feed).alias(member.name) for member in self._roles.value),
            *(column.alias(EXPIRE_AT) for column in (self._roles.expire_at,) if column is not None),
            *(column.alias(RESETS) for column in self._resets(is_feed=is_feed)),
        )
        rows = with_results(rows, self.results, list(self._roles.buffers))
        for name, text in self.expressions.items():
            if name in self.results:
                continue
            try:
                rows = rows.withColumn(name, F.expr(text))
            except PySparkException as error:
                raise DescriptorError(f"{self.source}: columns= cannot make {name!r} of {text!r}: {error}") from None
        return renamed(rows)

    def _value(self, member: _StructField, *, is_feed: bool) -> Column:
        """Return a field of the value. A null element of a list raises an error, because null means "no list"."""
        if self.source.kind is not Kind.LIST or self.descriptor.value != (member.name,):
            return member.column
        refusal = F.raise_error(
            F.lit(
                f"state {self.descriptor.name!r}: an element of the list is null, and lists of Redis have no nulls; "
                f"replace it: columns={{'element': \"coalesce({member.name}, ...)\"}}"
            )
        ).cast(member.kind)
        is_null = member.column.isNull()
        return F.when(is_null & (F.col("change_type") != "delete") if is_feed else is_null, refusal).otherwise(
            member.column
        )

    def _resets(self, *, is_feed: bool) -> list[Column]:
        """Return the column `$resets`: Spark marks the first element of a replaced list as an update."""
        if self.source.kind is not Kind.LIST:
            return []
        return [F.col("change_type") == "update" if is_feed else F.lit(False)]


def _check_key_expressions(
    source: OperatorState, roles: _ColumnRoles, descriptor: StateDescriptor, expressions: Mapping[str, str]
) -> None:
    """Raise DescriptorError for a key or field expression that reads the value: rows that delete have no value."""
    kinds = T.StructType([T.StructField(each.name, each.kind) for each in (*roles.key, *roles.field)])
    without_value = current_session().createDataFrame([], kinds)
    for name in sorted(key_columns_of(descriptor) & expressions.keys()):
        try:
            without_value.select(F.expr(expressions[name])).schema  # noqa: B018  # analysis happens here
        except PySparkException as error:
            raise DescriptorError(
                f"state {descriptor.name!r}, {source}: columns= makes {name!r}, a part of the key, by "
                f"{expressions[name]!r}; it may use only {', '.join(kinds.names)}, because rows that delete have no "
                f"value ({error})"
            ) from None
