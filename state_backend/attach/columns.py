"""The columns of an operator's state: the parts of its key, of a map's own key, and the fields of its value.

    names      the parts of the key (a window's start has the window's name, its end is `<name>_end`; a single window
               that the function `window` made also has `start` and `end`); the results of aggregate functions; the
               fields of the value by name, if the name is unique; and all fields of the value by position: `_0`, `_1`

A column is found by a path in the Arrow batches of `checkpoint.decoding`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Self, cast

import pyarrow as pa
import pyarrow.compute as pc

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
from state_backend.attach.expressions import Expression, parse
from state_backend.attach.states import (
    MAP_KEY,
    PARTS_OF_WINDOW,
    ColumnNames,
    ValueField,
    default_value_columns,
    distinct_names,
    named_value_of,
    single_window,
    without_window_ends,
)
from state_backend.checkpoint.keys import WITHOUT_COLUMNS, is_window, key_type
from state_backend.checkpoint.spark_types import SPARKS_EXPIRE_AT, is_time_window
from state_backend.checkpoint.states import JOIN, TRANSFORMS, State, StateForm
from state_backend.codec.column_text import is_interval
from state_backend.codec.json_text import JsonForm, json_texts
from state_backend.model.descriptor import Kind
from state_backend.model.errors import DescriptorError

KEY, VALUE = "key", "value"


@dataclass(frozen=True)
class Column:
    """A column.

    Args:
        root, path: `key` or `value`, and positions of fields in it.
        constant: Its text in every row.
    """

    name: str
    kind: pa.DataType
    root: str = KEY
    path: tuple[int, ...] = ()
    is_json: bool = False
    is_micros: bool = False  # a time that Spark stores as a number
    constant: str | None = None

    def read(self, key: pa.StructArray, value: pa.StructArray) -> pa.Array:
        """Return the column of some rows; a null part of a path makes a null."""
        if self.constant is not None:
            return pa.repeat(pa.scalar(self.constant), len(key))
        root = key if self.root == KEY else value
        found = reduce(lambda array, index: pc.struct_field(array, [index]), self.path, root)
        if self.is_json:
            return json_texts(found, JsonForm(keeps_nulls=False, keeps_bytes=self.root == KEY))
        return found.cast(self.kind) if self.is_micros else found


@dataclass(frozen=True)
class ResultColumn:
    """A column with the results of an aggregate function, made of its buffers."""

    name: str
    kind: pa.DataType
    aggregate: Aggregate
    columns: tuple[Column, ...]
    is_json: bool = False

    @classmethod
    def of(cls, name: str, aggregate: Aggregate, fields: Sequence[Column]) -> Self:
        """Return the column of a function."""
        columns = tuple(fields[aggregate.first : aggregate.end])
        kind = aggregate.evaluate([pa.nulls(0, column.kind) for column in columns]).type
        return cls(name, kind, aggregate, columns)

    @property
    def text(self) -> str:
        """The function, as the query has it."""
        return self.aggregate.text

    @property
    def uses(self) -> frozenset[str]:
        """The names of the columns that it is made of."""
        return frozenset(column.name for column in self.columns)

    def read(self, key: pa.StructArray, value: pa.StructArray) -> pa.Array:
        """Return the column of some rows; null where a row deletes."""
        return self.aggregate.evaluate_present([column.read(key, value) for column in self.columns], value.is_valid())


@dataclass(frozen=True)
class ComputedColumn:
    """A column that an expression makes of others."""

    name: str
    kind: pa.DataType
    expression: Expression
    columns: tuple[Column | ResultColumn, ...]
    is_json: bool = False

    @property
    def text(self) -> str:
        """The expression."""
        return self.expression.text

    @property
    def uses(self) -> frozenset[str]:
        """The names of the columns that it is made of."""
        return self.expression.names

    def read(self, key: pa.StructArray, value: pa.StructArray) -> pa.Array:
        """Return the column of some rows."""
        given = {column.name: column.read(key, value) for column in self.columns}
        return self.expression.values(given, len(key)).cast(self.kind)


@dataclass(frozen=True)
class Columns:
    """The columns of a state by role.

    Args:
        distinct: As in `ColumnNames`.
        window: The one with `start` and `end`.
    """

    state: State
    name: str
    key: tuple[Column, ...]
    field: tuple[Column, ...]
    value: tuple[Column, ...]
    distinct: tuple[str, ...]
    default_value: tuple[str, ...]
    expire_at: Column | None
    buffers: tuple[pa.Field, ...] = ()
    results: tuple[ResultColumn, ...] = ()
    computed: tuple[ComputedColumn | ResultColumn, ...] = ()
    is_planned: bool = False
    window: str | None = None

    @property
    def names(self) -> ColumnNames:
        """The names of the columns, for `states.descriptor_of`."""
        names = ColumnNames(
            source_of(self.state),
            self.name,
            kind_of(self.state),
            _names(self.key),
            _names(self.field),
            tuple(dict.fromkeys((*_names(self.value), *(result.name for result in self.results)))),
            self.distinct,
            self.default_value,
            self.expire_at is not None,
            self.window,
        )
        calls = {each.name: each.aggregate for each in self.computed if isinstance(each, ResultColumn)}
        found = {result.name: result.aggregate for result in self.results}
        named = named_value_of([each.name for each in self.computed], *of_buffers(calls, found, self.buffers), names)
        return replace(names, named_value=named)

    @property
    def all(self) -> tuple[AnyColumn, ...]:
        """All columns; a computed one precedes the column that it replaces."""
        return (*self.computed, *self.key, *self.field, *self.results, *self.value)

    def column(self, name: str) -> AnyColumn:
        """Return a column by its name."""
        return next(each for each in self.all if each.name == name)

    def with_computed(self, expressions: Mapping[str, str]) -> Columns:
        """Return these columns and those that expressions make of them; DescriptorError for an unknown name.

        A call of an aggregate function is computed from the function's buffers. Other expressions may use its result.
        """
        calls = {name: call for name, text in expressions.items() if (call := parse_aggregate(text)) is not None}
        found = match_buffers(
            {expressions[name]: call for name, call in calls.items()}, self.buffers, source_of(self.state)
        )
        declared = {name: ResultColumn.of(name, found[expressions[name]], self.value) for name in calls}
        given: dict[str, Column | ResultColumn] = {each.name: each for each in (*self.key, *self.field, *self.value)}
        given |= {name: each for name, each in declared.items() if name not in given}
        given |= {result.name: result for result in self.results if result.name not in given}
        computed: list[ComputedColumn | ResultColumn] = []
        for name, text in expressions.items():
            if name in declared:
                computed.append(declared[name])
                continue
            expression = parse(text)
            if unknown := sorted(expression.names - given.keys()):
                raise DescriptorError(
                    f"{source_of(self.state)}: columns= makes {name!r} of {unknown[0]!r}, and there is no such column; "
                    f"the columns are {', '.join(given)}"
                )
            used = tuple(given[each] for each in sorted(expression.names))
            kind = expression.kind({each.name: each.kind for each in used})
            computed.append(ComputedColumn(name, kind, expression, used))
        return replace(self, computed=tuple(computed))

    def texts(self, value: Sequence[str]) -> dict[str, str]:
        """Return the expressions and functions that a value is made of, by the names of their columns."""
        used = {*value, *(name for each in self.computed for name in each.uses)}
        made = {result.name: result.text for result in self.results if result.name in used}
        return made | {each.name: each.text for each in self.computed}

    @property
    def hint(self) -> str | None:
        """How to name the functions of buffers; None if they are named, or evident."""
        is_named = self.is_planned or any(isinstance(each, ResultColumn) for each in self.computed)
        return None if is_named else hint_of(self.buffers, (result.aggregate for result in self.results))


AnyColumn = Column | ComputedColumn | ResultColumn


def variable_of(state: State) -> str | None:
    """Return the variable of transformWithState, or the side of a join; None for other operators."""
    return state.name if state.operator_name in (JOIN, *TRANSFORMS) else None


def is_aggregation(state: State) -> bool:
    """Return whether a state has the buffers of aggregate functions."""
    return state.form in (StateForm.PLAIN, StateForm.SESSION)


def buffers_of(state: State) -> list[pa.Field]:
    """Return the buffers of an aggregation by position; the other fields of the value get an empty name."""
    if not is_aggregation(state):
        return []
    # A session's value begins with the window and the grouping columns, which are as many as the columns of its key.
    others = state.key.num_fields if state.form is StateForm.SESSION else 0
    return [field.with_name("") if index < others else field for index, field in enumerate(state.value)]


def source_of(state: State) -> str:
    """Return a state's name for errors."""
    variable = variable_of(state)
    return f"operator {state.operator} ({state.operator_name}{'' if variable is None else f', {variable!r}'})"


def kind_of(state: State) -> Kind:
    """Return the kind of a state whose keys have no field: a map, a list or a value."""
    if state.is_list:
        return Kind.LIST
    return Kind.MAP if state.form in (StateForm.MAP, StateForm.JOIN) else Kind.VALUE


def columns_of(state: State, name: str, planned: Sequence[PlannedFunction] | None = None) -> Columns:
    """Return the columns of a state.

    Args:
        name: Its default name in keys.
        planned: The aggregate functions of its query.
    """
    key = list(_without_windows(_key_columns(state)))
    fields: list[Column] = []
    if state.form is StateForm.JOIN and not state.is_list:
        key, fields = key[:-1], key[-1:]  # the last column is the row's index
    elif state.form is StateForm.MAP:
        fields = list(_without_windows(_fields(state.key.field(1).type, KEY, (1,))))
    if not key:
        key = [Column(WITHOUT_COLUMNS, pa.string(), constant=WITHOUT_COLUMNS)]
    key = _with_text_forms(key)
    used = {column.name for column in key}
    renamed = [replace(each, name=f"map_{each.name}") if each.name in used else each for each in fields]
    fields = _with_text_forms(renamed)
    raw, expire_at = _value_columns(state)
    used = {column.name for column in (*key, *fields)}
    names = [column.name for column in raw]
    buffers = buffers_of(state)
    found = results_of(buffers, planned, used)
    by_position = [replace(column, name=f"_{index}") for index, column in enumerate(raw)]
    by_name = [each for each in _without_windows(raw) if names.count(each.name) <= 1 and each.name not in used]
    windows = [column for column, of in zip(_key_columns(state), key_type(state), strict=False) if is_time_window(of)]
    window = single_window(_names(windows), used)
    parts = _parts_of(windows[0]) if window is not None else []
    if len(fields) > 1 and MAP_KEY not in used:
        parts.append(Column(MAP_KEY, pa.string(), KEY, (1,), is_json=True))
    default = default_value_columns(
        [ValueField(each.name, is_window(each.kind), is_scalar(each.kind) or is_nested(each.kind)) for each in raw],
        _names(by_name),
        used,
        is_session=state.form is StateForm.SESSION,
    )
    is_buffer = [bool(buffer.name) for buffer in buffers]
    return Columns(
        state,
        name,
        (*key, *parts),
        tuple(fields),
        (*by_position, *by_name),
        without_window_ends(_names((*key, *fields)), _names(windows)),
        default_columns(default, found, is_buffer, is_planned=planned is not None),
        expire_at,
        tuple(buffers),
        tuple(ResultColumn.of(name, aggregate, by_position) for name, aggregate in found.items()),
        is_planned=planned is not None,
        window=window,
    )


def columns_of_rows(schema: pa.StructType, key: Collection[str]) -> dict[str, Column]:
    """Return the columns of a query's rows, with the names that the columns of its state have.

    Args:
        key: The names of the columns that make keys and fields.
    """
    columns = list(_fields(schema, VALUE, ()))
    windows = [column for column in columns if is_window(column.kind)]
    parts = _parts_of(windows[0]) if single_window(_names(windows), {column.name for column in columns}) else []
    found = {column.name: column for column in (*parts, *_without_windows(columns))}
    if WITHOUT_COLUMNS in key:
        found.setdefault(WITHOUT_COLUMNS, Column(WITHOUT_COLUMNS, pa.string(), constant=WITHOUT_COLUMNS))
    for name in found.keys() & key:
        (found[name],) = _with_text_forms([replace(found[name], root=KEY)])
    return found


def _names(columns: Iterable[Column]) -> tuple[str, ...]:
    return tuple(column.name for column in columns)


def _key_columns(state: State) -> list[Column]:
    if state.form is StateForm.MAP:
        return list(_fields(state.key.field(0).type, KEY, (0,)))
    return list(_fields(state.key, KEY, ()))


def _value_columns(state: State) -> tuple[list[Column], Column | None]:
    """Return the fields of the value, and the column of its expiry or None."""
    columns = list(_fields(state.value, VALUE, ()))
    if state.form is StateForm.DEDUPLICATION:
        return [_seen(columns[0])], None
    if state.form is StateForm.GROUP:
        return [each for column in columns for each in _unwrapped(column, "groupState")], None
    if not state.has_ttl:
        return columns, None
    expire_at = next(column for column in columns if column.name == SPARKS_EXPIRE_AT)
    unwrapped = [each for column in columns for each in _unwrapped(column, "value")]
    return [each for each in unwrapped if each.name != SPARKS_EXPIRE_AT], expire_at


def _unwrapped(column: Column, name: str) -> Iterator[Column]:
    """Yield the fields of a column that is a struct with that name; yield any other column unchanged."""
    if column.name == name and pa.types.is_struct(column.kind):
        yield from _fields(cast(pa.StructType, column.kind), column.root, column.path)
    else:
        yield column


def _seen(column: Column) -> Column:
    """Return the value of a deduplication: an expiry for dropDuplicatesWithinWatermark, "1" for dropDuplicates."""
    if pa.types.is_int64(column.kind):
        return replace(column, name="expires_at", kind=pa.timestamp("us", "UTC"), is_micros=True)
    return Column("seen", pa.string(), constant="1")


def _fields(kind: pa.StructType, root: str, path: tuple[int, ...]) -> Iterator[Column]:
    for index, field in enumerate(kind):
        yield Column(field.name, field.type, root, (*path, index))


def _without_windows(columns: Iterable[Column]) -> Iterator[Column]:
    """Yield two columns for each window: the start with the window's name, and the end."""
    for column in columns:
        if is_window(column.kind):
            start, end = _fields(cast(pa.StructType, column.kind), column.root, column.path)
            yield replace(column, kind=start.kind, path=start.path)
            yield replace(end, name=f"{column.name}_end")
        else:
            yield column


def _parts_of(window: Column) -> list[Column]:
    """Return the columns `start` and `end` of a window."""
    parts = _fields(cast(pa.StructType, window.kind), window.root, window.path)
    return [replace(part, name=name) for part, name in zip(parts, PARTS_OF_WINDOW, strict=True)]


def _with_text_forms(columns: Sequence[Column]) -> list[Column]:
    """Append the position to names that several key parts share; convert parts that have no text form to JSON."""
    result = []
    for column, name in zip(columns, distinct_names(_names(columns)), strict=True):
        if is_scalar(column.kind):
            result.append(replace(column, name=name))
            continue
        result.append(replace(column, name=name, kind=pa.string(), is_json=True))
    return result


def is_scalar(kind: pa.DataType) -> bool:
    """Return whether values of a type have a text form."""
    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_binary,
            pa.types.is_integer,
            pa.types.is_boolean,
            pa.types.is_date,
            pa.types.is_floating,
            pa.types.is_decimal,
            pa.types.is_timestamp,
            is_interval,
        )
    )


def is_nested(kind: pa.DataType) -> bool:
    """Return whether values of a type are written as JSON."""
    return bool(pa.types.is_struct(kind) or pa.types.is_list(kind) or pa.types.is_map(kind))
