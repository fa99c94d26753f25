"""`AttachedState`: a user's description of a state to attach, from which the state's descriptor is made.

Both readers use it: the one that reads Spark's files, and the one that runs Spark jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, TypedDict, get_args

from state_backend.codec.row_encoding import OnBadKey
from state_backend.model.descriptor import Encoding, JsonDecimals, Kind, StateDescriptor
from state_backend.model.errors import DescriptorError

# The columns of an attached state beside those of Spark's rows: the number of the micro-batch, the order of the changes
# of a key, whether a row deletes, its expiry in milliseconds since 1970, whether the row first empties a list.
BATCH, ORDER, DELETED = "$batch", "$order", "$deleted"
EXPIRE_AT, RESETS = "$expire_at", "$resets"
# Further columns of a key with one window. Each of them alone identifies the window, because all have one length.
PARTS_OF_WINDOW = ("start", "end")
# A further column of a map whose own key has several columns: they are one JSON object.
MAP_KEY = "map_key"


class AttachedArguments(TypedDict, total=False):
    """The arguments of `AttachedState` without the name, for functions that pass them on."""

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
    json_decimals: JsonDecimals | str
    length_max: int | None
    on_bad_key: OnBadKey


@dataclass(frozen=True)
class AttachedState:
    """One state that `attach` publishes: its source in the query, its key and its value.

    The defaults depend on the operator that keeps the state.

    Args:
        name: The state's name in keys. Default: the name of the operator or variable.
        operator: The operator's number, if the query has several; `sparkis attach --list` lists them.
        variable: A variable of `transformWithState`, or the side of a join: `left` or `right`.
        key: The columns that make the key, joined by `separator`.
        key_format: Instead of `key`: any text with `<column>` placeholders, as for a `StateDescriptor`.
        separator: The text between the columns of the key.
        field: The part of the operator's key that becomes the field of a hash.
        value: The column, or columns, of the value.
        kind: `value` makes one JSON object of several columns instead of a hash; `map` makes a hash of one column.
        columns: Further columns by SQL expressions, such as `{"mean": "_1 / _0"}`. They are the value unless `value`
            is given. A column with the name of a part of the key replaces that part.
        encoding: `text`, `json` or `binary`, as for a `StateDescriptor`.
        json_decimals: `number` or `text`, as for a `StateDescriptor`.
        length_max: For a list: the number of last elements to keep.
        on_bad_key: `skip` leaves out, counts and logs a row that cannot be written, such as one with a null in its key;
            `fail` ends the attachment.

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
    json_decimals: JsonDecimals | str = JsonDecimals.NUMBER
    length_max: int | None = None
    on_bad_key: OnBadKey = "skip"

    @property
    def is_for_all(self) -> bool:
        """Whether this chooses no state and no columns: it then describes each state of the query."""
        return self == AttachedState(on_bad_key=self.on_bad_key, json_decimals=self.json_decimals)

    def matches(self, operator: int, variable: str | None) -> bool:
        """Return whether `operator` and `variable` match a state of an operator."""
        return self.operator in (None, operator) and self.variable in (None, variable)


@dataclass(frozen=True)
class ColumnNames:
    """The columns of an operator's state by their role; see `descriptor_of`.

    Args:
        source: The state, for errors.
        kind: LIST, MAP for a map with its own key, else VALUE.
        key, field: The parts of the key, and of a map's own key.
        distinct: The columns that `key` or `field` of a state must have, because keys may differ in one of them alone.
        default_value: The fields of the value that can be written.
        named_value: Instead of it, where `columns` only names functions: these and the functions without a name.
        window: The column that PARTS_OF_WINDOW may replace.
    """

    source: str
    name: str
    kind: Kind
    key: tuple[str, ...]
    field: tuple[str, ...]
    value: tuple[str, ...]
    distinct: tuple[str, ...]
    default_value: tuple[str, ...]
    has_expiry: bool
    window: str | None = None
    named_value: tuple[str, ...] = ()

    def distinguishes(self, name: str | None, other: str) -> bool:
        """Return whether keys that differ in the column `other` also differ in the column `name`."""
        is_part_of = (name in PARTS_OF_WINDOW and other == self.window) or (name == MAP_KEY and other in self.field)
        return name == other or is_part_of

    @property
    def of_key(self) -> tuple[str, ...]:
        """The columns that have a value even in a row that deletes."""
        return (*self.key, *self.field)

    @property
    def all(self) -> tuple[str, ...]:
        """All columns."""
        return (*self.key, *self.field, *self.value)


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Parse the NAME=VALUE arguments of an option of a command."""
    parsed = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise DescriptorError(f"{option} takes NAME=VALUE, not {each!r}")
        parsed[name] = value
    return parsed


class ValueField(NamedTuple):
    """A field of an operator's value.

    Args:
        has_text: Whether it can be written, as a text or as JSON.
    """

    name: str
    is_window: bool
    has_text: bool


def default_value_columns(
    fields: Sequence[ValueField], by_name: Collection[str], of_key: Collection[str], *, is_session: bool
) -> list[list[str]]:
    """Return the default columns of each field of a value that can be written.

    Args:
        by_name: The fields that are columns by their name, because it is unique; others are columns by their position.
        is_session: The value repeats the key, and has the session's end, which the key lacks.
    """
    found: list[list[str]] = []
    for index, field in enumerate(fields):
        if is_session and field.name in of_key:
            found.append([])
        elif field.is_window and field.name in by_name:
            found.append([f"{field.name}_end"] if is_session else [field.name, f"{field.name}_end"])
        elif field.has_text:
            found.append([field.name if field.name in by_name else f"_{index}"])
        else:
            found.append([])
    return found


def single_window(windows: Sequence[str], used: Collection[str]) -> str | None:
    """Return the key's only window, if PARTS_OF_WINDOW can be further names of it;"""
    return windows[0] if len(windows) == 1 and not {*PARTS_OF_WINDOW} & {*used} else None


def without_window_ends(names: Sequence[str], windows: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that distinguish keys: the end of a window of one length follows from its start."""
    ends = {f"{name}_end" for name in windows}
    return tuple(name for name in names if name not in ends)


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return names with their position appended, where several columns share one."""
    return [name if names.count(name) == 1 else f"{name}_{index}" for index, name in enumerate(names)]


def descriptor_of(names: ColumnNames, requested: AttachedState) -> StateDescriptor:
    """Return the descriptor of a requested state; DescriptorError for columns that it cannot use."""
    if requested.on_bad_key not in get_args(OnBadKey):
        raise DescriptorError(f"{names.source}: on_bad_key= is 'skip' or 'fail', not {requested.on_bad_key!r}")
    expressions = list(requested.columns or {})
    field_name = requested.field
    if field_name is None and names.field:
        if len(names.field) > 1 and MAP_KEY not in names.key:
            raise DescriptorError(
                f"{names.source}: its map key has several columns ({', '.join(names.field)}); make one column of them "
                f"with columns= and field=, for example {{'field': \"concat_ws(':', ...)\"}}"
            )
        field_name = names.field[0] if len(names.field) == 1 else MAP_KEY
    given_key = (requested.key,) if isinstance(requested.key, str) else tuple(requested.key)
    key = given_key or (
        ()
        if requested.key_format
        else tuple(
            each for each in names.distinct if not names.distinguishes(field_name, each) and each not in names.field
        )
    )
    value = (requested.value,) if isinstance(requested.value, str) else tuple(requested.value)
    value = (
        value
        or names.named_value
        or tuple(name for name in expressions if name not in {*key, field_name, *names.of_key})
        or names.default_value
    )
    if not value:
        raise DescriptorError(f"{names.source}: its value has no field that can be written; make one with columns=")
    kind = _kind(names, field_name, requested)
    is_object = len(value) > 1 and kind is not None and (kind is not Kind.MAP or field_name is not None)
    descriptor = StateDescriptor(
        requested.name or names.name,
        key=key,
        value=value,
        key_format=requested.key_format,
        separator=requested.separator,
        field=field_name,
        kind=kind,
        encoding=requested.encoding or (Encoding.JSON if is_object else Encoding.TEXT),
        json_decimals=requested.json_decimals,
        expire_at=EXPIRE_AT if names.has_expiry else None,
        deletion=DELETED,
        resets=RESETS if names.kind is Kind.LIST else None,
        order_by=ORDER,
        length_max=requested.length_max,
    )
    _check_names(names, requested, descriptor)
    return descriptor


def key_columns_of(descriptor: StateDescriptor) -> set[str]:
    """Return the columns that key and field of a state are made of."""
    return {*descriptor.format_for("job").columns, *(() if descriptor.field is None else (descriptor.field,))}


def _kind(names: ColumnNames, field_name: str | None, requested: AttachedState) -> Kind | None:
    """Return the kind of the state; None if it follows from the number of the value's columns."""
    if field_name is None and names.kind is not Kind.LIST:
        if requested.kind not in (None, Kind.VALUE, Kind.MAP):
            raise DescriptorError(f"{names.source}: kind= is 'value' or 'map', not {requested.kind!r}")
        return None if requested.kind is None else Kind(requested.kind)
    kind = Kind.LIST if field_name is None else Kind.MAP
    if requested.kind not in (None, kind):
        raise DescriptorError(f"{names.source} is a {kind.value}; leave out kind={requested.kind!r}")
    return kind


def _check_names(names: ColumnNames, requested: AttachedState, descriptor: StateDescriptor) -> None:
    """Raise DescriptorError for a key that is not unique, or that uses columns outside of the operator's key."""
    subject = f"state {descriptor.name!r}, {names.source}"
    expressions = dict(requested.columns or {})
    used = key_columns_of(descriptor)
    available = {*names.all, *expressions}
    for name in [*used, *descriptor.value]:
        if name not in available:
            raise DescriptorError(f"{subject} has no column {name!r}; it has {', '.join(sorted(available))}")
    if unusable := sorted(used - set(names.of_key) - expressions.keys()):
        raise DescriptorError(
            f"{subject}: {unusable[0]!r} is a part of the value, and rows that delete have no value; the key and the "
            f"field may use {', '.join(sorted(names.of_key))}"
        )
    if names.kind is Kind.LIST and descriptor.field is not None:
        raise DescriptorError(f"{subject} is a list, and has no field=")
    if not expressions.keys() & used and (
        missing := [name for name in names.distinct if not any(names.distinguishes(each, name) for each in used)]
    ):
        raise DescriptorError(
            f"{subject}: keys that differ only in {missing[0]!r} would be the same key; add it to key=, or "
            f"make it the field of a hash with field="
        )


def index_of(found: Sequence[str], origins: Sequence[tuple[int, str | None]], requested: AttachedState) -> int:
    """Return the index of the operator's state that a user requests; DescriptorError if it is not exactly one."""
    indices = [index for index, origin in enumerate(origins) if requested.matches(*origin)]
    if len(indices) == 1:
        return indices[0]
    available = "; ".join(found)
    if not indices:
        raise DescriptorError(
            f"the query has no state with operator={requested.operator}, variable={requested.variable!r}; it has "
            f"{available}"
        )
    raise DescriptorError(
        f"the query has several states; choose one with operator= or variable= (sparkis attach: --operator, "
        f"--variable): {available}"
    )


def for_each(requested: Sequence[AttachedState]) -> AttachedState | None:
    """Return the description of each of the query's states, if no single state is requested."""
    if not requested:
        return AttachedState()
    return requested[0] if len(requested) == 1 and requested[0].is_for_all else None


def named_value_of(
    expressions: Collection[str],
    named: Mapping[str, Collection[int]],
    others: Mapping[str, Collection[int]],
    names: ColumnNames,
) -> tuple[str, ...]:
    """Return the value where `columns` only names aggregate functions: the named ones, and those without a name.

    Args:
        named, others: The buffers of each function with a name in `columns`, and of the other default columns of the
            value. Empty if another expression makes a part of the value.
    """
    own = [name for name in expressions if name not in names.of_key]
    if not own or set(own) - named.keys():
        return ()
    used = {buffer for each in named.values() for buffer in each}
    return (*own, *(name for name in names.default_value if name not in own and not used & {*others.get(name, ())}))
