"""Casts of expressions, with Spark's results: `cast(.. AS string | smallint | int | bigint | float | double |
decimal(p, s) | boolean | date | timestamp)`.

A value that does not fit the type is an error, as in Spark's ANSI mode. Texts are not cast, because Spark has many
rules for them. Times are in UTC.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Context, Decimal

import pyarrow as pa
import pyarrow.compute as pc

TIMESTAMP = pa.timestamp("us", "UTC")
# By the type's name, without the numbers of a decimal.
TYPES = {
    "string": pa.string(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "timestamp": TIMESTAMP,
}
DECIMAL = "decimal"
# The precision and scale of Spark's `decimal` without numbers, and the largest precision.
DECIMAL_DEFAULT = (10, 0)
DECIMAL_DIGITS_MAX = 38
# Any double in digits: the largest has 309 before the point, the smallest 1074 after it.
ALL_DIGITS = Context(prec=1400, rounding=ROUND_HALF_UP)
MICROS = 1_000_000


def cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return values as another type; TypeError if sparkis lacks the cast, ArrowInvalid if one does not fit."""
    if pa.types.is_null(values.type):
        return values.cast(kind)
    for is_kind, make in CASTS:
        if is_kind(kind):
            return make(values, kind)
    raise TypeError(f"{values.type} cannot be cast to {kind}")


def text(values: pa.Array) -> pa.Array:
    """Return values as Spark's texts; TypeError for types whose texts sparkis writes in another form."""
    kind = values.type
    if not (
        pa.types.is_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date(kind)
        or pa.types.is_null(kind)
    ):
        raise TypeError(f"{kind} is not made text in an expression")
    return values.cast(pa.string())


def _integers(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if not (_is_number(values.type) or pa.types.is_boolean(values.type)):
        raise _refusal(values, kind)
    if pa.types.is_floating(values.type) or pa.types.is_decimal(values.type):
        values = pc.trunc(values)
    return values.cast(kind)


def _floats(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_decimal(values.type):
        return values.cast(pa.string()).cast(kind)  # rounds once, from all digits
    if not (_is_number(values.type) or pa.types.is_boolean(values.type)):
        raise _refusal(values, kind)
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    return values.cast(kind, safe=False)  # rounds to the nearest float


def _decimals(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_floating(values.type):
        return pa.array([_rounded(each, kind.scale) for each in values.cast(pa.float64()).to_pylist()], kind)
    if not _is_number(values.type):
        raise _refusal(values, kind)
    scale = values.type.scale if pa.types.is_decimal(values.type) else 0
    exact = values.cast(pa.decimal256(76 - DECIMAL_DIGITS_MAX + scale, scale))
    if scale > kind.scale:
        exact = pc.round(exact, kind.scale, "half_towards_infinity")
    return exact.cast(pa.decimal256(76, kind.scale)).cast(kind)


def _rounded(value: float | None, scale: int) -> Decimal | None:
    """Return a double as Spark rounds it: from its shortest text."""
    if value is None or not math.isfinite(value):
        return None
    return Decimal(repr(value)).quantize(Decimal(1).scaleb(-scale), context=ALL_DIGITS)


def _booleans(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_boolean(values.type):
        return values
    if not _is_number(values.type):
        raise _refusal(values, kind)
    zero = Decimal(0) if pa.types.is_decimal(values.type) else 0
    return pc.not_equal(values, pa.scalar(zero, values.type))


def _dates(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_date(values.type):
        return values
    if not pa.types.is_timestamp(values.type):
        raise TypeError(f"a date is made of a timestamp, not of {values.type}")
    return values.cast(pa.timestamp("us")).cast(kind, safe=False)


def _timestamps(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return timestamps: of dates at midnight, of times without a zone in UTC, of numbers as seconds since 1970."""
    if pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
        return values.cast(pa.timestamp("us")).cast(pa.int64()).cast(kind)
    if pa.types.is_integer(values.type):
        return pc.multiply_checked(values.cast(pa.int64()), MICROS).cast(kind)
    if pa.types.is_floating(values.type):
        return pc.trunc(pc.multiply(values.cast(pa.float64()), float(MICROS))).cast(pa.int64()).cast(kind)
    raise _refusal(values, kind)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _refusal(values: pa.Array, kind: pa.DataType) -> TypeError:
    return TypeError(f"{values.type} cannot be cast to {kind}")


Make = Callable[[pa.Array, pa.DataType], pa.Array]
CASTS: tuple[tuple[Callable[[pa.DataType], bool], Make], ...] = (
    (pa.types.is_string, lambda values, kind: text(values)),
    (pa.types.is_integer, _integers),
    (pa.types.is_floating, _floats),
    (pa.types.is_decimal, _decimals),
    (pa.types.is_boolean, _booleans),
    (pa.types.is_date, _dates),
    (pa.types.is_timestamp, _timestamps),
)
