"""What Spark's state reader gives, as rows with plain columns: what a state of the log is made of.

    names      the parts of the key (a window is its start, its end is `<name>_end`), the fields of the value by name
               where one name stands for one field, and all of them by position: `_0`, `_1` ...
    $batch     the micro-batch that made the change
    $order     which change of one key came first
    $deleted   whether the key, or the field, is gone
    $expire_at when it expires, in milliseconds since 1970, where the state has a time to live
    $resets    whether a list is emptied before the row's element is appended

Runs on the driver, when an attachment is made; `BoundState` then makes one DataFrame for each read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, TypedDict

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_hooks.attach.operators import Collection, Form
from spark_hooks.checkpoint import Checkpoint
from spark_hooks.publish.columns import CAST_TYPES, NESTED_TYPES, TEXT_TYPES, check_columns
from spark_hooks.publish.layout import Layout, check_layout
from state_backend.model.descriptor import Encoding, Kind, StateDescriptor
from state_backend.model.errors import DescriptorError

BATCH, ORDER, DELETED = "$batch", "$order", "$deleted"
EXPIRE_AT, RESETS = "$expire_at", "$resets"
SPARKS_EXPIRE_AT = "ttlExpirationMs"
PLAIN_TYPES = TEXT_TYPES + CAST_TYPES + (T.FractionalType, T.TimestampType, T.TimestampNTZType)
INSTANTS = (T.TimestampType, T.TimestampNTZType)


class AttachedArguments(TypedDict, total=False):
    """What `AttachedState` takes beside the name, for functions that pass it on."""

    operator: int | None
    variable: str | None
    key: str | Sequence[str]
    key_format: str | None
    separator: str
    field: str | None
    value: str | Sequence[str]
    kind: Kind | str | None
    columns: Mapping[str, str] | None
    encoding: Encoding | str | None
    length_max: int | None


@dataclass(frozen=True)
class AttachedState:
    """Which state of a query `attach` publishes, and how.

    What is left out follows from the operator that keeps the state.

    Args:
        name: The state's name in keys. Default: the operator's or variable's.
        operator: The operator's number, where the query has several; `sparkis attach --list` shows them.
        variable: A variable of `transformWithState`, or the side of a join: `left` or `right`.
        key: The columns that make the key, joined by `separator`.
        key_format: In place of `key`: any text with `<column>` placeholders, as for a `StateDescriptor`.
        separator: The text between the columns of the key.
        field: The part of the operator's key that becomes the field of a hash.
        value: The column, or columns, of the value.
        kind: `value` makes several columns one JSON object where they would be a hash; `map` makes one column a hash.
        columns: More columns by SQL expressions, such as `{"mean": "_1 / _0"}`. They are the value unless `value` is
            given. A column with the name of a part of the key takes that part's place.
        encoding: `text`, `json` or `binary`, as for a `StateDescriptor`.
        length_max: For a list: how many of its last elements to keep.

    Examples:
        >>> sparkis.AttachedState("count", operator=0, key_format="words/<word>").name
        'count'
    """

    name: str | None = None
    _: KW_ONLY
    operator: int | None = None
    variable: str | None = None
    key: str | Sequence[str] = ()
    key_format: str | None = None
    separator: str = ":"
    field: str | None = None
    value: str | Sequence[str] = ()
    kind: Kind | str | None = None
    columns: Mapping[str, str] | None = None
    encoding: Encoding | str | None = None
    length_max: int | None = None

    def is_of(self, collection: Collection) -> bool:
        """Tell whether this state may be read from a collection."""
        return self.operator in (None, collection.operator_id) and self.variable in (None, collection.variable)


class _Member(NamedTuple):
    """A field of one of the structs that the reader gives."""

    name: str
    column: Column
    kind: T.DataType


@dataclass(frozen=True)
class _Parts:
    """A collection's columns by what they are good for. `distinct`: what of the key tells two keys apart."""

    key: tuple[_Member, ...]
    field: tuple[_Member, ...]
    value: tuple[_Member, ...]
    distinct: tuple[str, ...]
    default_value: tuple[str, ...]
    expire_at: Column | None

    @classmethod
    def of(cls, collection: Collection) -> Self:
        key = list(_flat(_members("key", collection)))
        of_field: list[_Member] = []
        if collection.form is Form.JOIN:
            key, of_field = key[:-1], key[-1:]  # the last one is `index`
        elif collection.form is Form.VARIABLE and collection.kind is Kind.MAP:
            of_field = list(_flat(_members("user_map_key", collection)))
        if not key:
            key = [_Member("all", F.lit("all"), T.StringType())]
        key = _named(key)
        of_field = _named(_told_apart(of_field, {member.name for member in key}))
        raw, expire_at = _value_members(collection)
        taken = {member.name for member in (*key, *of_field)}
        value = [_Member(f"_{index}", member.column, member.kind) for index, member in enumerate(raw)]
        names = [member.name for member in raw]
        by_name = [each for each in _flat(raw) if names.count(each.name) <= 1 and each.name not in taken]
        default = _default_value(collection, raw, {each.name for each in by_name}, taken)
        ends = {f"{each}_end" for each in taken}
        return cls(
            tuple(key),
            tuple(of_field),
            (*value, *by_name),
            tuple(each.name for each in (*key, *of_field) if each.name not in ends),
            default,
            expire_at,
        )

    def names(self) -> tuple[str, ...]:
        """Return the names of all columns."""
        return tuple(each.name for each in (*self.key, *self.field, *self.value))


def _default_value(
    collection: Collection, raw: Sequence[_Member], by_name: set[str], taken: set[str]
) -> tuple[str, ...]:
    """Return what makes the value unless told: every field that can be written, by name if it has one of its own."""
    is_session = (
        collection.form is Form.SESSION
    )  # its value repeats its key, of which the end of the session is no part
    found = []
    for index, member in enumerate(raw):
        if is_session and member.name in taken:
            continue
        if _is_window(member.kind) and member.name in by_name:
            found += [f"{member.name}_end"] if is_session else [member.name, f"{member.name}_end"]
        elif isinstance(member.kind, PLAIN_TYPES + NESTED_TYPES):
            found.append(member.name if member.name in by_name else f"_{index}")
    return tuple(found)


def _value_members(collection: Collection) -> tuple[list[_Member], Column | None]:
    """Return the fields of the value, and when it expires."""
    if collection.form is Form.SEEN:
        return [_seen(collection)], None
    column = "value"
    if collection.form is Form.VARIABLE:
        column = {Kind.VALUE: "value", Kind.MAP: "user_map_value", Kind.LIST: "list_element"}[collection.kind]
    members = list(_members(column, collection))
    if collection.form is Form.GROUP:
        return [each for member in members for each in _opened(member, "groupState")], None
    if not collection.has_ttl:
        return members, None
    expire_at = next(member.column for member in members if member.name == SPARKS_EXPIRE_AT)
    members = [each for member in members for each in _opened(member, "value") if each.name != SPARKS_EXPIRE_AT]
    return members, expire_at


def _opened(member: _Member, name: str) -> Iterator[_Member]:
    """Return the fields of a struct of that name; another member as it is."""
    if member.name == name and isinstance(member.kind, T.StructType):
        yield from _fields(member.column, member.kind)
    else:
        yield member


def _seen(collection: Collection) -> _Member:
    """Return when a key of dropDuplicatesWithinWatermark is forgotten; that of dropDuplicates has no value at all."""
    (member,) = _members("value", collection)
    if isinstance(member.kind, T.LongType):
        return _Member("expires_at", F.timestamp_micros(member.column), T.TimestampType())
    return _Member("seen", F.lit("1"), T.StringType())


def _members(column: str, collection: Collection) -> Iterator[_Member]:
    return _fields(F.col(column), collection.type_of(column))


def _fields(column: Column, kind: T.StructType) -> Iterator[_Member]:
    """Return a struct's fields, found by position: an aggregation's buffers may all have one name."""
    renamed = T.StructType([T.StructField(f"_{index}", each.dataType) for index, each in enumerate(kind)])
    by_position = column.cast(renamed)
    for index, each in enumerate(kind):
        yield _Member(each.name, by_position.getField(f"_{index}"), each.dataType)


def _is_window(kind: T.DataType) -> bool:
    return (
        isinstance(kind, T.StructType)
        and kind.names == ["start", "end"]
        and all(isinstance(each.dataType, INSTANTS) for each in kind)
    )


def _flat(members: Iterator[_Member] | Sequence[_Member]) -> Iterator[_Member]:
    """Make two columns of each window: its start has its name."""
    for member in members:
        if isinstance(member.kind, T.StructType) and _is_window(member.kind):
            start, end = _fields(member.column, member.kind)
            yield member._replace(column=start.column, kind=start.kind)
            yield _Member(f"{member.name}_end", end.column, end.kind)
        else:
            yield member


def _told_apart(members: Sequence[_Member], taken: set[str]) -> list[_Member]:
    """Rename parts of a map's key that are called as a part of the key: in Scala both may be `value`."""
    return [each._replace(name=f"map_{each.name}") if each.name in taken else each for each in members]


def _named(members: Sequence[_Member]) -> list[_Member]:
    """Give parts of a key that share a name their position as well, and those without a text form their JSON."""
    names = [member.name for member in members]
    made = []
    for index, member in enumerate(members):
        name = member.name if names.count(member.name) == 1 else f"{member.name}_{index}"
        if isinstance(member.kind, PLAIN_TYPES):
            made.append(member._replace(name=name))
        else:
            made.append(_Member(name, F.to_json(member.column), T.StringType()))
    return made


@dataclass(frozen=True)
class BoundState:
    """One state of the log, and the collection that it is read from."""

    collection: Collection
    descriptor: StateDescriptor
    layout: Layout
    expressions: Mapping[str, str]
    _parts: _Parts = field(repr=False)

    @classmethod
    def of(
        cls,
        collection: Collection,
        wanted: AttachedState,
        job: str,
        spark: SparkSession,
        checkpoint: Checkpoint,
        batch: int,
    ) -> Self:
        """Fill in what was left out, and check the rest against what the collection holds."""
        parts = _Parts.of(collection)
        expressions = dict(wanted.columns or {})
        descriptor = _descriptor(collection, parts, wanted)
        made = cls(collection, descriptor, None, expressions, parts)  # type: ignore[arg-type]  # two lines below
        rows = made._named_rows(collection.whole(spark, checkpoint, batch), batch)
        descriptor = check_columns(rows, descriptor, job)
        check_layout(rows, [descriptor], job)
        return replace(made, descriptor=descriptor, layout=Layout.of(rows, [descriptor], job))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the columns that key, field, value and expressions may use."""
        return (*self._parts.names(), *(name for name in self.expressions if name not in self._parts.names()))

    def whole(self, spark: SparkSession, checkpoint: Checkpoint, batch: int, partitions: int) -> DataFrame:
        """Return the whole state as of a batch, laid out for a task."""
        rows = self.collection.whole(spark, checkpoint, batch).coalesce(partitions)
        return self.layout.rows_in_place(self._named_rows(rows, batch), BATCH)

    def feed(self, spark: SparkSession, checkpoint: Checkpoint, first: int, last: int, partitions: int) -> DataFrame:
        """Return the changes of some batches, laid out for a task: batch by batch, and in it key by key."""
        rows = self.collection.feed(spark, checkpoint, first, last).coalesce(partitions)
        return self.layout.rows_in_place(self._named_rows(rows, None), BATCH)

    @cached_property
    def pinned(self) -> dict[str, Any]:
        """Return what must stay as it is for the log to go on, as plain JSON."""
        return {
            "operator_id": self.collection.operator_id,
            "operator": self.collection.operator,
            "variable": self.collection.variable,
            "schema": self.collection.schema.simpleString(),
            "columns": dict(self.expressions),
        }

    def _named_rows(self, df: DataFrame, batch: int | None) -> DataFrame:
        """Return the reader's rows with plain columns. `batch`: which one it is, where the reader was asked for one."""
        is_feed = batch is None
        rows = df.select(
            F.col("batch_id").alias(BATCH) if is_feed else F.lit(batch).cast("long").alias(BATCH),
            F.monotonically_increasing_id().alias(ORDER),
            (F.col("change_type") == "delete" if is_feed else F.lit(False)).alias(DELETED),
            *(member.column.alias(member.name) for member in (*self._parts.key, *self._parts.field)),
            *(self._value(member, is_feed=is_feed).alias(member.name) for member in self._parts.value),
            *(column.alias(EXPIRE_AT) for column in (self._parts.expire_at,) if column is not None),
            *(column.alias(RESETS) for column in self._resets(is_feed=is_feed)),
        )
        for name, text in self.expressions.items():
            try:
                rows = rows.withColumn(name, F.expr(text))
            except PySparkException as error:
                raise DescriptorError(
                    f"{self.collection}: columns= cannot make {name!r} of {text!r}: {error}"
                ) from None
        return rows

    def _value(self, member: _Member, *, is_feed: bool) -> Column:
        """Return a field of the value; in a list it is never null, because a null would stand for no list at all."""
        if self.collection.kind is not Kind.LIST or self.descriptor.value != (member.name,):
            return member.column
        refusal = F.raise_error(
            F.lit(
                f"state {self.descriptor.name!r}: an element of the list is null, and a list of Redis has no null; "
                f"give it a value: columns={{'element': \"coalesce({member.name}, ...)\"}}"
            )
        ).cast(member.kind)
        is_null = member.column.isNull()
        return F.when(is_null & (F.col("change_type") != "delete") if is_feed else is_null, refusal).otherwise(
            member.column
        )

    def _resets(self, *, is_feed: bool) -> list[Column]:
        """Return whether a list begins anew with a row: Spark calls the first element of a whole list an update."""
        if self.collection.kind is not Kind.LIST:
            return []
        return [F.col("change_type") == "update" if is_feed else F.lit(False)]


def _descriptor(collection: Collection, parts: _Parts, wanted: AttachedState) -> StateDescriptor:
    expressions = list(wanted.columns or {})
    key_names = {member.name for member in (*parts.key, *parts.field)}
    of_field = wanted.field
    if of_field is None and parts.field:
        if len(parts.field) > 1:
            raise DescriptorError(
                f"{collection}: its map key has several columns ({', '.join(each.name for each in parts.field)}); name "
                f"one of your own with columns= and field=, for example {{'field': \"concat_ws(':', ...)\"}}"
            )
        of_field = parts.field[0].name
    given_key = (wanted.key,) if isinstance(wanted.key, str) else tuple(wanted.key)
    key = given_key or (
        ()
        if wanted.key_format
        else tuple(each for each in parts.distinct if each not in (of_field, *_names(parts.field)))
    )
    value = (wanted.value,) if isinstance(wanted.value, str) else tuple(wanted.value)
    value = (
        value or tuple(name for name in expressions if name not in {*key, of_field, *key_names}) or parts.default_value
    )
    if not value:
        raise DescriptorError(f"{collection}: its value has no field that can be written; name some with columns=")
    kind = _kind(collection, of_field, wanted)
    is_object = len(value) > 1 and kind is not None and (kind is not Kind.MAP or of_field is not None)
    descriptor = StateDescriptor(
        wanted.name or collection.name,
        key=key,
        value=value,
        key_format=wanted.key_format,
        separator=wanted.separator,
        field=of_field,
        kind=kind,
        encoding=wanted.encoding or (Encoding.JSON if is_object else Encoding.TEXT),
        expire_at=EXPIRE_AT if parts.expire_at is not None else None,
        deletion=DELETED,
        resets=RESETS if collection.kind is Kind.LIST else None,
        order_by=ORDER,
        length_max=wanted.length_max,
    )
    _check_names(collection, parts, wanted, descriptor)
    return descriptor


def _kind(collection: Collection, of_field: str | None, wanted: AttachedState) -> Kind | None:
    """Return what the state is to be; nothing where that follows from how many columns its value has."""
    if of_field is None and collection.kind is not Kind.LIST:
        if wanted.kind not in (None, Kind.VALUE, Kind.MAP):
            raise DescriptorError(f"{collection}: kind= is 'value' or 'map', not {wanted.kind!r}")
        return None if wanted.kind is None else Kind(wanted.kind)
    kind = Kind.LIST if of_field is None else Kind.MAP
    if wanted.kind not in (None, kind):
        raise DescriptorError(f"{collection} is a {kind.value}; leave out kind={wanted.kind!r}")
    return kind


def _names(members: Sequence[_Member]) -> tuple[str, ...]:
    return tuple(each.name for each in members)


def _check_names(collection: Collection, parts: _Parts, wanted: AttachedState, descriptor: StateDescriptor) -> None:
    """Refuse a key that does not follow from the operator's key, or that two of its keys could share."""
    at = f"state {descriptor.name!r}, {collection}"
    expressions = dict(wanted.columns or {})
    used = {*descriptor.format_for("job").columns, *(() if descriptor.field is None else (descriptor.field,))}
    of_key = {each.name for each in (*parts.key, *parts.field)}
    known = {*parts.names(), *expressions}
    for name in [*used, *descriptor.value]:
        if name not in known:
            raise DescriptorError(f"{at} has no column {name!r}; it has {', '.join(sorted(known))}")
    if odd := sorted(used - of_key - expressions.keys()):
        raise DescriptorError(
            f"{at}: {odd[0]!r} is a part of the value, and a row that deletes has none; the key and the field are made "
            f"of {', '.join(sorted(of_key))}"
        )
    if (collection.kind is Kind.LIST) and descriptor.field is not None:
        raise DescriptorError(f"{at} is a list, and has no field=")
    _check_key_expressions(at, parts, {name: expressions[name] for name in used if name in expressions})
    if not expressions.keys() & used and (missing := [name for name in parts.distinct if name not in used]):
        raise DescriptorError(
            f"{at}: two of its keys may differ in {missing[0]!r} alone, and would be one key; add it to key= (or "
            f"make it the field of a hash with field=)"
        )


def _check_key_expressions(at: str, parts: _Parts, expressions: Mapping[str, str]) -> None:
    """Refuse an expression for the key or the field that reads more than the key: rows that delete have no more."""
    session = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
    kinds = T.StructType([T.StructField(each.name, each.kind) for each in (*parts.key, *parts.field)])
    alone = session.createDataFrame([], kinds)
    for name, text in expressions.items():
        try:
            alone.select(F.expr(text)).schema  # noqa: B018  # analysis happens here
        except PySparkException as error:
            raise DescriptorError(
                f"{at}: columns= makes {name!r}, which is used in the key, by {text!r}; it may use "
                f"{', '.join(kinds.names)} only, because a row that deletes has nothing else ({error})"
            ) from None
