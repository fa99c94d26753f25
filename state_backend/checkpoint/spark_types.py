"""Spark's types as Arrow's, from the JSON of a Spark schema.

string, char, varchar              string                  date              date32
boolean, byte, short, integer,     bool, int8 .. int64     timestamp         timestamp[us, UTC]
long                                                       timestamp_ntz     timestamp[us]
float, double                      float32, float64        day-time interval duration[us]
decimal(p, s)                      decimal128(p, s)        year-month interval   YEAR_MONTH: months, in 32 bits
binary                             binary                  interval          month_day_nano_interval
struct, array, map                 struct, list, map       void              null
variant                            struct<value, metadata> a user-defined type   the type in which it is stored
"""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa

from state_backend.checkpoint.compression import unreadable
from state_backend.codec.column_text import YEAR_MONTH
from state_backend.codec.variant_text import MARK, is_variant
from state_backend.model.errors import DescriptorError, UnsupportedStateError

SIMPLE = {
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "interval": pa.month_day_nano_interval(),
    "void": pa.null(),
    "variant": pa.struct([("value", pa.binary()), pa.field("metadata", pa.binary(), metadata=dict([MARK]))]),
}
# Spark's names, as in its `simpleString`.
NAMES = {
    pa.string(): "string",
    pa.binary(): "binary",
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.date32(): "date",
    pa.timestamp("us", "UTC"): "timestamp",
    pa.timestamp("us"): "timestamp_ntz",
    pa.duration("us"): "interval day to second",
    YEAR_MONTH: "interval year to month",
    pa.month_day_nano_interval(): "interval",
    pa.null(): "void",
}
# Arrow types by their names in Spark SQL.
BY_NAME = {name: kind for kind, name in NAMES.items()} | {"variant": SIMPLE["variant"]}
PATTERNS = (
    (re.compile(r"(string collate|char\(|varchar\().*"), pa.string()),
    (re.compile(r"interval (day|hour|minute|second)( to (hour|minute|second))?"), pa.duration("us")),
    (re.compile(r"interval (year|month)( to month)?"), YEAR_MONTH),
)
DECIMAL = re.compile(r"decimal\((\d{1,2}), *(-?\d{1,2})\)")
# Marks a column that the function `window` made, in the metadata of its field.
TIME_WINDOW = "spark.timeWindow"
# The field with the expiry of a value that has a time to live.
SPARKS_EXPIRE_AT = "ttlExpirationMs"
# Schemas nest no deeper than this; deeper ones are damage.
DEPTH_MAX = 64
VARIANT = SIMPLE["variant"]


def parse_schema(text: str | bytes, name: str) -> pa.DataType:
    """Return the Arrow type of a Spark schema, written as JSON.

    Args:
        name: The name of the file, for errors.
    """
    try:
        return arrow_type(json.loads(text), name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise unreadable(name, "it contains no schema of Spark") from None


def parse_struct(text: str | bytes, name: str) -> pa.StructType:
    """Return the Arrow type of a Spark schema that is a struct."""
    found = parse_schema(text, name)
    if not pa.types.is_struct(found):
        raise unreadable(name, f"its schema is {found}, not a struct")
    return found


def arrow_type(given: Any, name: str, depth: int = 0) -> pa.DataType:
    """Return the Arrow type of a Spark type, as its JSON is parsed."""
    if depth > DEPTH_MAX:
        raise ValueError("too deep")
    if isinstance(given, str):
        return _simple(given, name)
    kind = given["type"]
    if kind == "struct":
        return pa.struct([_field(each, name, depth) for each in given["fields"]])
    if kind == "array":
        return pa.list_(arrow_type(given["elementType"], name, depth + 1))
    if kind == "map":
        key = arrow_type(given["keyType"], name, depth + 1)
        return pa.map_(key, arrow_type(given["valueType"], name, depth + 1))
    if kind == "udt":
        return arrow_type(given["sqlType"], name, depth + 1)
    raise UnsupportedStateError(f"{name} has a column of the type {kind!r}, which sparkis does not read")


def _field(given: Any, name: str, depth: int) -> pa.Field:
    is_time_window = given.get("metadata", {}).get(TIME_WINDOW) is True
    metadata = {TIME_WINDOW: "true"} if is_time_window else None
    return pa.field(given["name"], arrow_type(given["type"], name, depth + 1), metadata=metadata)


def is_time_window(field: pa.Field) -> bool:
    """Return whether the function `window` made a column: all of its windows have one length."""
    return TIME_WINDOW.encode() in (field.metadata or {})


def _simple(given: str, name: str) -> pa.DataType:
    if given in SIMPLE:
        return SIMPLE[given]
    decimal = DECIMAL.fullmatch(given)
    if decimal is not None and 0 < int(decimal[1]) <= 38:
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    for pattern, found in PATTERNS:
        if pattern.fullmatch(given):
            return found
    raise UnsupportedStateError(f"{name} has a column of the type {given!r}, which sparkis does not read")


def parse_type_name(text: str) -> pa.DataType:
    """Return the Arrow type of one of Spark's names of types: the inverse of `type_name`.

    DescriptorError: the text names no type. Names of fields have no `:`, `,`, `<` or `>`.
    """
    kind, rest = _named(text, text)
    if rest:
        raise _no_type(text)
    return kind


def _named(text: str, whole: str) -> tuple[pa.DataType, str]:
    """Return the type with which a text begins, and the rest of the text."""
    head = re.match(r"\s*(struct|array|map)\s*<", text, re.IGNORECASE)
    if head is None:
        plain = re.match(r"\s*([a-z_][a-z_ ]*(\(\s*\d+\s*(,\s*-?\d+\s*)?\))?)", text, re.IGNORECASE)
        name = "" if plain is None else plain[1].strip().lower()
        try:
            return BY_NAME.get(name) or _simple(name, "a declared type"), text[0 if plain is None else plain.end() :]
        except UnsupportedStateError:
            raise _no_type(whole) from None
    rest = text[head.end() :]
    kinds = []
    while True:
        name = ""
        if head[1].lower() == "struct":
            name, _, rest = rest.partition(":")
        kind, rest = _named(rest, whole)
        kinds.append((name.strip(), kind))
        rest = rest.lstrip()
        if not rest.startswith(","):
            break
        rest = rest[1:]
    expected = {"array": 1, "map": 2}.get(head[1].lower(), len(kinds))
    if not rest.startswith(">") or len(kinds) != expected:
        raise _no_type(whole)
    if head[1].lower() == "struct":
        return pa.struct(kinds), rest[1:]
    inner = [kind for _, kind in kinds]
    return (pa.list_(*inner) if len(inner) == 1 else pa.map_(*inner)), rest[1:]


def _no_type(text: str) -> DescriptorError:
    return DescriptorError(
        f"{text!r} is no type of Spark; write one such as string, bigint, decimal(10,2), array<double>"
    )


def type_name(kind: pa.DataType) -> str:
    """Return Spark's name of an Arrow type, as in its `simpleString`."""
    if is_variant(kind):
        return "variant"
    if pa.types.is_struct(kind):
        return f"struct<{','.join(f'{field.name}:{type_name(field.type)}' for field in kind)}>"
    if pa.types.is_map(kind):
        return f"map<{type_name(kind.key_type)},{type_name(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"array<{type_name(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return NAMES[kind]
