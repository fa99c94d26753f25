"""The Spark columns that a state reads, their validation, and their conversion in Spark SQL.

Runs on the driver: when a sink is made, to validate the columns, and for the plan of a query's first micro-batch.
Spark SQL converts the types that it writes in sparkis' format: booleans and dates to text. `row_encoding` converts all
others in the Python workers, and makes all JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_hooks.publish.column_names import column_of, explain_missing, has_column, is_ambiguous, type_of
from state_backend.codec.json_text import JsonForm
from state_backend.codec.reductions import reduction_of
from state_backend.codec.row_encoding import RowPlan
from state_backend.model.descriptor import By, Encoding, JsonDecimals, Kind, Reduce, StateDescriptor
from state_backend.model.errors import DescriptorError

JSON_OPTIONS = {"ignoreNullFields": "false", "timeZone": "UTC"}
# The options of Spark's JSON for a `time_format`.
TIME_OPTIONS = ("timestampFormat", "timestampNTZFormat")
TIME_TYPES: tuple[type[T.DataType], ...] = (T.DateType, T.TimestampType, T.TimestampNTZType)

# Those of years and months become calendar intervals: Arrow for Python has no other type with months.
YEAR_MONTHS: tuple[type[T.DataType], ...] = (T.YearMonthIntervalType,)
CALENDARS: tuple[type[T.DataType], ...] = YEAR_MONTHS
if hasattr(T, "CalendarIntervalType"):  # not in Spark 3.5
    CALENDARS = (T.CalendarIntervalType, *YEAR_MONTHS)
INTERVALS: tuple[type[T.DataType], ...] = (T.DayTimeIntervalType, *CALENDARS)
TIMES_OF_DAY: tuple[type[T.DataType], ...] = (T.TimeType,) if hasattr(T, "TimeType") else ()  # since Spark 4.1
TEXT_TYPES = (T.StringType, T.CharType, T.VarcharType, T.BinaryType)
CAST_TYPES = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.BooleanType, T.DateType)
FIXED_TYPES: tuple[type[T.DataType], ...] = (T.BooleanType, *TIME_TYPES, *TIMES_OF_DAY)
SUMS = (Reduce.SUM, Reduce.COUNT)
# Spark's sum of a decimal has ten digits more than the decimal, and at most 38.
SUMMED_DIGITS_MAX = 28
VARIANTS: tuple[type[T.DataType], ...] = (T.VariantType,) if hasattr(T, "VariantType") else ()  # since Spark 4.0
NESTED_TYPES = (T.StructType, T.ArrayType, T.MapType, *VARIANTS)
PLAIN_TYPES = TEXT_TYPES + CAST_TYPES + TIME_TYPES + TIMES_OF_DAY + INTERVALS + (T.FractionalType,)
# The types that `json_text` writes, beside nested ones.
JSON_TYPES: tuple[type[T.DataType], ...] = (*PLAIN_TYPES, *VARIANTS, T.NullType)


@dataclass(frozen=True)
class StateColumns:
    """The columns of one state of a job."""

    state: StateDescriptor
    job: str

    def selected(self, df: DataFrame, is_folded: bool = False) -> list[tuple[str, Column]]:
        """Return (role, column) of each column of the state's rows; `shuffle_plan` has the roles.

        Args:
            is_folded: Spark reduces all rows of a key and field to one row.
        """
        state = self.state
        if is_folded:
            return [
                *(("k", self._text(df, name)[0]) for name in state.format_for(self.job).columns),
                *(("f", self._text(df, name)[0]) for name in (state.field,) if name is not None),
                self._aggregated(df),
            ]
        return [
            *(("k", self._text(df, name)[0]) for name in state.format_for(self.job).columns),
            *(("f", self._text(df, name)[0]) for name in (state.field, state.member) if name is not None),
            *(("o", column) for column in self._ordering(df)),
            *(
                ("b", self._text(df, name)[0] if _is_text(df, name) else column_of(df, name))
                for name in state.by_columns
            ),
            *(("v", column) for column, _ in self._values(df)),
            *(("d", column_of(df, name)) for name in (state.deletion,) if name is not None),
            *(("e", _milliseconds(df, name)) for name in (state.expire_at,) if name is not None),
            *(("r", column_of(df, name)) for name in (state.resets,) if name is not None),
        ]

    def can_be_folded(self, df: DataFrame) -> bool:
        """Return whether Spark can reduce the rows of a key exactly: sums of long decimals overflow.

        It cannot group by calendar intervals.
        """
        if self.state.reduce in (None, Reduce.LAST):
            return False
        grouping = [*self.state.format_for(self.job).columns, *([] if self.state.field is None else [self.state.field])]
        if any(isinstance(type_of(df, name), CALENDARS) for name in grouping):
            return False
        kind = type_of(df, self.state.value[0]) if self.state.reduce is Reduce.SUM else None
        return not isinstance(kind, T.DecimalType) or kind.precision <= SUMMED_DIGITS_MAX

    def _aggregated(self, df: DataFrame) -> tuple[str, Column]:
        """Return (role, column) of the column that Spark reduces to its sum, minimum or maximum."""
        if self.state.reduce in SUMS:
            ((column, form),) = self._values(df)
            return "s", column_of(df, *self.state.value) if form == "decimal" else column
        (column,) = self._ordering(df)
        return ("l" if self.state.reduce is Reduce.MIN else "x"), column

    def plan(self, df: DataFrame, columns: tuple[tuple[str, str], ...], is_folded: bool = False) -> RowPlan:
        """Return the plan by which a task encodes these rows.

        Args:
            columns: See `RowPlan`.
        """
        state, form = self.state, self.state.format_for(self.job)
        is_packed_map = state.kind is Kind.MAP and state.field is None
        field = state.field or state.member
        reduction = reduction_of(state)
        return RowPlan(
            state=state.name,
            literals=form.literals,
            key_names=form.columns,
            key_forms=tuple(self._text(df, name)[1] for name in form.columns),
            key_is_open=tuple(
                index < len(form.columns) - 1 and _may_contain(type_of(df, name), form.literals[index + 1], state)
                for index, name in enumerate(form.columns)
            ),
            field_name=field,
            field_form="text" if field is None else self._text(df, field)[1],
            value_names=state.value if state.score is None else (state.score,),
            value_forms=tuple(
                "text" if is_folded and form == "integer" and state.reduce in SUMS else form
                for _, form in self._values(df)
            ),
            map_fields=state.value if is_packed_map else (),
            expire_at_ms=None,
            keeps_last=bool(state.order_by) or state.duplicates == "any",
            appends=state.kind is Kind.LIST and not self._is_array(df),
            replaces_list=state.kind is Kind.LIST and self._is_array(df),
            reduce=state.reduce,
            add=reduction.fold if reduction is not None and state.reduce in SUMS and not is_folded else None,
            is_folded=is_folded,
            kind=state.kind,
            by_names=state.by_columns,
            keeps_first=state.by in (By.FIRST, By.MIN),
            columns=columns,
            object_names=state.object_names,
            json_form=JsonForm(has_text_decimals=state.json_decimals is JsonDecimals.TEXT),
        )

    def _ordering(self, df: DataFrame) -> list[Column]:
        """Return the columns that order the rows of a key; for a minimum or maximum, the value itself."""
        if self.state.reduce in (Reduce.MIN, Reduce.MAX):
            (name,) = self.state.value
            # Texts are compared as bytes, without a collation.
            return [self._text(df, name)[0] if _is_text(df, name) else column_of(df, name)]
        return [column_of(df, name) for name in self.state.order_by]

    def _is_array(self, df: DataFrame) -> bool:
        return len(self.state.value) == 1 and isinstance(type_of(df, self.state.value[0]), T.ArrayType)

    def _values(self, df: DataFrame) -> list[tuple[Column, str]]:
        state = self.state
        if state.member is not None:
            return [] if state.score is None else [(column_of(df, state.score).cast("double"), "float")]
        if state.reduce is Reduce.COUNT:
            return [_count_summand(*(column_of(df, name) for name in state.value))]
        if state.reduce is Reduce.SUM:
            return [_number(df, *state.value)]
        if state.kind is Kind.LIST and self._is_array(df):
            return [self._elements(df, state.value[0])]
        if state.encoding is Encoding.BINARY:
            return [(column_of(df, name), "text") for name in state.value]
        convert = self._json if state.encoding is Encoding.JSON else self._text_of
        return [convert(column_of(df, name), type_of(df, name)) for name in state.value]

    def _elements(self, df: DataFrame, name: str) -> tuple[Column, str]:
        """Return an array column as Spark converts its elements, and the form of the remaining conversion."""
        array, kind = column_of(df, name), type_of(df, name)
        assert isinstance(kind, T.ArrayType)
        convert = self._json if self.state.encoding is Encoding.JSON else self._text_of
        _, form = convert(array, kind.elementType)
        return F.transform(array, lambda element: convert(element, kind.elementType)[0]), form

    def _text(self, df: DataFrame, name: str) -> tuple[Column, str]:
        """Return a column as Spark converts it, and the form of the remaining conversion (`row_encoding`)."""
        return self._text_of(column_of(df, name), type_of(df, name))

    def _text_of(self, column: Column, kind: T.DataType) -> tuple[Column, str]:
        if self.state.time_format is not None and isinstance(kind, TIME_TYPES):
            return _formatted(column, kind, self.state), "text"
        return self._json(column, kind) if _is_nested(kind) else _text_of(column, kind)

    def _json(self, column: Column, kind: T.DataType) -> tuple[Column, str]:
        """Return a column from which `row_encoding` makes JSON, and its form."""
        needs_rewriting = any(isinstance(each, _rewritten_types(self.state)) for each, _ in _leaves(kind))
        return (_rewritten(column, kind, self.state) if needs_rewriting else column), "json"


def check_columns(df: DataFrame, state: StateDescriptor, job: str) -> StateDescriptor:
    """Return the descriptor with the types of its columns; DescriptorError for a missing column or a wrong type."""
    form = state.format_for(job)
    roles = [
        *(("key", name) for name in form.columns),
        *(("value", name) for name in state.value),
        *(("field", name) for name in (state.field,) if name is not None),
        *(("member", name) for name in (state.member,) if name is not None),
        *(("score", name) for name in (state.score,) if name is not None),
        *(("deletion", name) for name in (state.deletion,) if name is not None),
        *(("expire_at", name) for name in (state.expire_at,) if name is not None),
        *(("resets", name) for name in (state.resets,) if name is not None),
        *(("order_by", name) for name in state.order_by),
        *((str(state.by), name) for name in state.by_columns),
    ]
    for role, name in roles:
        if not has_column(df, name):
            raise DescriptorError(
                f"state {state.name!r}: {role}= names the column {name!r}, which the DataFrame does not have; "
                f"{explain_missing(df, name)}"
            )
        if is_ambiguous(df, name):
            raise DescriptorError(f"state {state.name!r}: the DataFrame has several columns {name!r}; rename them")
        _check_type(state, role, name, type_of(df, name))
    written = [name for role, name in roles if role in ("key", "value", "field", "member")]
    _check_time_format(df, state, [type_of(df, name) for name in written])
    _check_where(df, state)
    checked = replace(state, columns={name: type_of(df, name).simpleString() for _, name in roles})
    reduction_of(checked)  # raises DescriptorError for a type that cannot be folded
    return checked


def _check_type(state: StateDescriptor, role: str, name: str, kind: T.DataType) -> None:
    plain = isinstance(kind, PLAIN_TYPES)
    column = f"state {state.name!r}: the {role} column {name!r} has the type {kind.simpleString()}"
    if role in ("key", "field", "member") and not plain:
        raise DescriptorError(f"{column}, which has no text form; convert it to a string, for example with to_json()")
    if role == "score" and not isinstance(kind, T.NumericType):
        raise DescriptorError(f"{column}, and a score is a number; cast it to a double")
    if role == "value" and state.reduce is Reduce.COUNT:
        return
    if role == "value" and not plain and not _is_nested(kind):
        raise DescriptorError(f"{column}, which sparkis cannot write; cast it to a string or a number")
    if role == "value" and (unwritten := _unwritten(kind, state)):
        raise DescriptorError(f"{column}, and sparkis cannot write {unwritten} in it; make it a string or a number")
    is_compared = role == "value" and state.reduce in (Reduce.MIN, Reduce.MAX)
    if is_compared and state.time_format is not None and isinstance(kind, TIME_TYPES):
        raise DescriptorError(f"{column}, and texts of time_format= do not compare as times do; leave it out")
    if role == "value" and state.by is not None and state.kind is Kind.LIST and isinstance(kind, T.ArrayType):
        raise DescriptorError(f"{column}, and an array always replaces the list; leave out {state.by}=")
    if role == "value" and state.resets is not None and isinstance(kind, T.ArrayType):
        raise DescriptorError(f"{column}, and an array always replaces the list; leave out resets=")
    if role == "value" and state.kind is Kind.LIST and isinstance(kind, T.ArrayType):
        _check_type(replace(state, kind=Kind.VALUE, length_max=None), role, f"{name}[]", kind.elementType)
        return
    if role == "value" and state.encoding is Encoding.BINARY and not isinstance(kind, T.BinaryType):
        raise DescriptorError(f"{column}, but encoding='binary' takes binary columns; use encoding='text', or cast it")
    if role == "deletion" and not isinstance(kind, T.BooleanType):
        raise DescriptorError(f"{column}; it must be boolean: true in the rows that delete")
    if role == "resets" and not isinstance(kind, T.BooleanType):
        raise DescriptorError(f"{column}; it must be boolean: true in the rows that empty the list first")
    if role == "expire_at" and not isinstance(kind, (T.TimestampType, T.LongType)):
        raise DescriptorError(f"{column}; it must be a timestamp, or milliseconds since 1970 as a bigint")
    if role in tuple(By) and (not plain or isinstance(kind, INTERVALS + TIMES_OF_DAY)):
        raise DescriptorError(f"{column}, whose order sparkis cannot store; choose a time, a number or a text")
    if role == "order_by" and isinstance(kind, (T.MapType, *VARIANTS, *CALENDARS, T.NullType)):
        raise DescriptorError(f"{column}, which cannot be ordered; choose another column")


def _check_time_format(df: DataFrame, state: StateDescriptor, kinds: Iterable[T.DataType]) -> None:
    """Check the pattern by having Spark format a time of each type: Spark parses it only then. Runs no job."""
    if state.time_format is None:
        return
    kinds = list(kinds)
    times = {kind.simpleString(): kind for kind in kinds if isinstance(kind, TIME_TYPES)}
    if not times and not any("timestamp" in kind.simpleString() for kind in kinds):  # in a struct, say
        raise DescriptorError(
            f"state {state.name!r}: time_format= is for dates and timestamps in key=, field=, member= or value=, and "
            f"none of these columns has such a type; leave it out"
        )
    for name, kind in times.items():
        text = _formatted(F.lit("2000-01-01").cast(kind), kind, state)
        try:
            df.sparkSession.sql("SELECT 1").select(text).collect()
        except PySparkException as error:
            raise DescriptorError(
                f"state {state.name!r}: time_format={state.time_format!r} is not a pattern by which Spark writes a "
                f"{name} (https://spark.apache.org/docs/latest/sql-ref-datetime-pattern.html): "
                f"{str(error).partition(chr(10))[0]}"
            ) from None


def _check_where(df: DataFrame, state: StateDescriptor) -> None:
    if state.where is None:
        return
    try:
        # Not `df.where`, whose schema Spark Connect knows without an analysis.
        df.select(F.when(F.expr(state.where), True)).schema  # noqa: B018  # analysis happens here
    except PySparkException as error:
        raise DescriptorError(f"state {state.name!r}: where={state.where!r} is not a condition: {error}") from None


def _is_text(df: DataFrame, name: str) -> bool:
    return isinstance(type_of(df, name), T.StringType)


def _may_contain(kind: T.DataType, separator: str, state: StateDescriptor) -> bool:
    """Return whether the text of a key part may contain the separator that follows it.

    Dates, timestamps and booleans have a fixed form, which contains a separator only if that has a digit or a dot.
    Times in a `time_format` may contain any separator.
    """
    if state.time_format is not None and isinstance(kind, TIME_TYPES):
        return True
    return not isinstance(kind, FIXED_TYPES) or any(character in ".0123456789" for character in separator)


def _milliseconds(df: DataFrame, name: str) -> Column:
    column = column_of(df, name)
    return F.unix_millis(column) if isinstance(type_of(df, name), T.TimestampType) else column


def _formatted(time: Column, kind: T.DataType, state: StateDescriptor) -> Column:
    """Return a date or time as text in the state's format.

    Spark's `date_format` writes in the session's time zone. Its JSON functions write in UTC, as sparkis always does.
    """
    time = time.cast("timestamp_ntz") if isinstance(kind, T.DateType) else time
    return F.get_json_object(F.to_json(F.struct(time.alias("v")), _json_options(state)), "$.v")


def _json_options(state: StateDescriptor) -> dict[str, str]:
    """Return the options of Spark's JSON, with the format of the state's times."""
    return JSON_OPTIONS if state.time_format is None else JSON_OPTIONS | dict.fromkeys(TIME_OPTIONS, state.time_format)


def _text_of(column: Column, kind: T.DataType) -> tuple[Column, str]:
    if isinstance(kind, (T.FloatType, T.DoubleType)):
        return column, "float"
    if isinstance(kind, T.IntegralType):
        return column, "integer"
    if isinstance(kind, T.DecimalType):
        return column.cast("string"), "decimal"
    if isinstance(kind, T.TimestampNTZType):
        return column, "timestamp_ntz"
    if isinstance(kind, T.TimestampType):
        return column, "timestamp"
    if isinstance(kind, INTERVALS):
        return (_as_calendar(column) if isinstance(kind, YEAR_MONTHS) else column), "interval"
    if isinstance(kind, T.BinaryType):
        return column, "text"
    if (
        isinstance(kind, T.StringType) and getattr(kind, "collation", "UTF8_BINARY") != "UTF8_BINARY"
    ):  # not in Spark 3.5
        return F.collate(column, "UTF8_BINARY"), "text"  # keys are compared as bytes
    return column.cast("string"), "text"


def _number(df: DataFrame, name: str) -> tuple[Column, str]:
    """Return a column as a summand (a bigint, a double, or a decimal's text), and the form of the sum."""
    column, kind = column_of(df, name), type_of(df, name)
    if isinstance(kind, T.DecimalType):
        return _text_of(column, kind)
    if isinstance(kind, T.FractionalType):
        return column.cast("double"), "float"
    return column.cast("bigint"), "integer"


def folded(role: str, name: str, kind: T.DataType) -> tuple[list[Column], Column]:
    """Return the aggregates by which Spark reduces a shared column, and the column of their result (see `_text_of`).

    A sum of bigints may overflow a bigint, so the upper and lower halves of the numbers are added up separately.
    """
    column = F.col(name)
    if role != "s":
        extreme = (F.min if role == "l" else F.max)(column).alias(name)
        return [extreme], _text_of(F.col(name), kind)[0].alias(name)
    if not isinstance(kind, T.LongType):
        return [F.sum(column).alias(name)], (
            F.col(name).cast("string") if isinstance(kind, T.DecimalType) else F.col(name)
        ).alias(name)
    high, low = F.col(f"{name}_high"), F.col(f"{name}_low")
    parts = [
        F.sum(F.shiftright(column, 32)).alias(f"{name}_high"),
        F.sum(column.bitwiseAND(F.lit(0xFFFF_FFFF))).alias(f"{name}_low"),
    ]
    fits = F.abs(high) < F.lit(1 << 30)
    short = (F.shiftleft(high, 32) + low).cast("string")
    long = high.cast("decimal(28,0)") * F.lit(1 << 32).cast("decimal(10,0)") + low.cast("decimal(20,0)")
    return parts, F.when(fits, short).otherwise(long.cast("string")).alias(name)


def _count_summand(*counted: Column) -> tuple[Column, str]:
    """Return the number that a row adds to a count (one, or null if the counted column is null), and its form."""
    one = F.lit(1).cast("bigint")
    return (F.when(counted[0].isNotNull(), one) if counted else one), "integer"


def _is_nested(kind: T.DataType) -> bool:
    """Return whether a type is written as JSON: also a user-defined type that Spark stores as such a type."""
    return isinstance(kind.sqlType() if isinstance(kind, T.UserDefinedType) else kind, NESTED_TYPES)


def _unwritten(kind: T.DataType, state: StateDescriptor) -> str:
    """Return the types in a type of which no JSON is made, such as places; empty if there are none.

    Spark cannot rewrite a part of a user-defined type.
    """
    return ", ".join(
        each.simpleString()
        for each, is_user_defined in _leaves(kind)
        if not isinstance(each, JSON_TYPES) or (is_user_defined and isinstance(each, _rewritten_types(state)))
    )


def _leaves(kind: T.DataType, is_user_defined: bool = False) -> Iterator[tuple[T.DataType, bool]]:
    """Yield the types in a type that are not nested, and whether they are parts of a user-defined type."""
    if isinstance(kind, T.UserDefinedType):
        yield from _leaves(kind.sqlType(), True)
    elif isinstance(kind, T.StructType):
        for each in kind:
            yield from _leaves(each.dataType, is_user_defined)
    elif isinstance(kind, T.ArrayType):
        yield from _leaves(kind.elementType, is_user_defined)
    elif isinstance(kind, T.MapType):
        yield from _leaves(kind.keyType, is_user_defined)
        yield from _leaves(kind.valueType, is_user_defined)
    else:
        yield kind, is_user_defined


def _rewritten_types(state: StateDescriptor) -> tuple[type[T.DataType], ...]:
    """Return the types that Spark rewrites inside of others (see `_rewritten`)."""
    return YEAR_MONTHS if state.time_format is None else YEAR_MONTHS + TIME_TYPES


def _as_calendar(interval: Column) -> Column:
    """Return an interval of years and months as a calendar interval."""
    months = interval.cast(T.YearMonthIntervalType(T.YearMonthIntervalType.MONTH)).cast("int")
    return F.make_interval(months=months)


def _rewritten(column: Column, kind: T.DataType, state: StateDescriptor) -> Column:
    """Return a column with the text of each date and time in it, in the state's format, and calendar intervals."""
    if isinstance(kind, YEAR_MONTHS):
        return _as_calendar(column)
    if isinstance(kind, TIME_TYPES):
        return column if state.time_format is None else _formatted(column, kind, state)
    if isinstance(kind, T.StructType):
        fields = [_rewritten(column[each.name], each.dataType, state).alias(each.name) for each in kind]
        return F.when(column.isNotNull(), F.struct(*fields))
    if isinstance(kind, T.ArrayType):
        return F.transform(column, lambda each: _rewritten(each, kind.elementType, state))
    if isinstance(kind, T.MapType):
        keys = F.transform_keys(column, lambda key, _: _rewritten(key, kind.keyType, state))
        return F.transform_values(keys, lambda _, value: _rewritten(value, kind.valueType, state))
    return column
