"""The results of aggregate functions, computed from their buffers as Spark computes them.

Each function takes the buffers of some rows, in Spark's order, and the call as the query has it. It raises TypeError if
the buffers are not those of the call. A result is null where Spark's result is null.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_DOWN, ROUND_HALF_UP, Context, Decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.attach.distinct_counts import distinct_counts

# Spark rounds a quotient of decimals to this many digits after the point, and then to the scale of the result.
QUOTIENT_SCALE = 39
# The digits of a division: enough to tell an exact tie from a quotient close to one.
WIDE = Context(prec=160)
DECIMAL_DIGITS_MAX = 38
LONG_DIGITS_MAX = 18
Floats = npt.NDArray[np.float64]
Buffers = Sequence[pa.Array]


@dataclass(frozen=True)
class FunctionCall:
    """A call of an aggregate function.

    Args:
        kind: The type declared for its first argument.
        arguments: The others.
    """

    name: str
    kind: pa.DataType | None = None
    arguments: tuple[str, ...] = ()


Evaluate = Callable[[Buffers, FunctionCall], pa.Array]


def value(buffers: Buffers, _: FunctionCall) -> pa.Array:
    """Return the buffer that is itself the result: of count, min, max, first, last, max_by, bit_and and the like."""
    return buffers[0]


def total(buffers: Buffers, call: FunctionCall) -> pa.Array:
    """Return a sum. Spark sums decimals of few digits as integers, and marks sums of nothing in a second buffer."""
    found = buffers[0]
    if pa.types.is_int64(found.type) and call.kind is not None and pa.types.is_decimal(call.kind):
        found = _unscaled(found, _bounded(call.kind.precision + 10, call.kind.scale))
    elif not _is_number(found.type):
        raise TypeError(f"a sum of {found.type}")
    return found if len(buffers) == 1 else pc.if_else(buffers[1], pa.scalar(None, found.type), found)


def mean(buffers: Buffers, call: FunctionCall) -> pa.Array:
    """Return an average: a float, or a decimal with four more digits after the point."""
    sums, counts = buffers
    if pa.types.is_decimal(sums.type):
        precision = sums.type.precision - 6 if sums.type.precision < DECIMAL_DIGITS_MAX else DECIMAL_DIGITS_MAX
        kind = _bounded(precision, sums.type.scale + 4)
        return pa.array([_quotient(*row, kind) for row in _rows(sums, counts)], kind)
    if not pa.types.is_float64(sums.type):
        raise TypeError(f"an average of {sums.type}")
    found = _divided(_floats(sums), _floats(counts))
    if call.kind is None or not pa.types.is_decimal(call.kind):
        return found
    kind = _bounded(call.kind.precision + 4, call.kind.scale + 4)
    scaled = pc.divide(found, float(10**call.kind.scale))
    return pa.array(
        [None if each is None else _rounded(Decimal(repr(each)), kind) for each in scaled.to_pylist()], kind
    )


def variance_pop(buffers: Buffers, _: FunctionCall) -> pa.Array:
    """Return var_pop."""
    n, _mean, m2 = map(_floats, buffers)
    return _divided(m2, n)


def variance(buffers: Buffers, _: FunctionCall) -> pa.Array:
    """Return var_samp; null for a single value."""
    n, _mean, m2 = map(_floats, buffers)
    return _divided(m2, np.maximum(n - 1.0, 0.0))


def deviation_pop(buffers: Buffers, call: FunctionCall) -> pa.Array:
    """Return stddev_pop."""
    return pc.sqrt(variance_pop(buffers, call))


def deviation(buffers: Buffers, call: FunctionCall) -> pa.Array:
    """Return stddev_samp; null for a single value."""
    return pc.sqrt(variance(buffers, call))


def skewness(buffers: Buffers, _: FunctionCall) -> pa.Array:
    """Return the skewness; null where all values are the same."""
    n, _mean, m2, m3 = map(_floats, buffers)
    with np.errstate(all="ignore"):
        return _divided(np.sqrt(n) * m3, np.sqrt(m2 * m2 * m2))


def kurtosis(buffers: Buffers, _: FunctionCall) -> pa.Array:
    """Return the kurtosis; null where all values are the same."""
    n, _mean, m2, _m3, m4 = map(_floats, buffers)
    with np.errstate(all="ignore"):
        return pc.subtract(_divided(n * m4, m2 * m2), 3.0)


def covariance_pop(buffers: Buffers, _: FunctionCall) -> pa.Array:
    """Return covar_pop."""
    n, _x, _y, ck = map(_floats, buffers)
    return _divided(ck, n)


def covariance(buffers: Buffers, _: FunctionCall) -> pa.Array:
    """Return covar_samp; null for a single pair."""
    n, _x, _y, ck = map(_floats, buffers)
    return _divided(ck, np.maximum(n - 1.0, 0.0))


def correlation(buffers: Buffers, _: FunctionCall) -> pa.Array:
    """Return Pearson's correlation; null for a single pair, and where all values of one side are the same."""
    n, _x, _y, ck, x_mk, y_mk = map(_floats, buffers)
    with np.errstate(all="ignore"):
        return _divided(ck, np.where(n > 1.0, np.sqrt(x_mk * y_mk), 0.0))


def approximate_count(buffers: Buffers, _: FunctionCall) -> pa.Array:
    """Return approx_count_distinct."""
    words = np.stack([buffer.to_numpy() for buffer in buffers], axis=1)
    return pa.array(distinct_counts(words), pa.int64())


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_int64(kind) or pa.types.is_float64(kind) or pa.types.is_decimal(kind))


def _floats(array: pa.Array) -> Floats:
    """Return a buffer of numbers as floats; nulls as NaN."""
    if not (pa.types.is_float64(array.type) or pa.types.is_int64(array.type)):
        raise TypeError(f"a buffer of {array.type}")
    found: Floats = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return found


def _divided(numerator: Floats, divisor: Floats) -> pa.Array:
    """Return quotients, null where the divisor is 0."""
    with np.errstate(all="ignore"):
        return pa.array((numerator + 0.0) / divisor, pa.float64(), mask=divisor == 0.0)


def _bounded(precision: int, scale: int) -> pa.DataType:
    return pa.decimal128(min(precision, DECIMAL_DIGITS_MAX), min(scale, DECIMAL_DIGITS_MAX))


def _unscaled(integers: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return decimals whose unscaled values are the integers."""
    if kind.precision > LONG_DIGITS_MAX:
        raise TypeError(f"a sum of {integers.type}, which {kind} is not kept in")
    low = integers.fill_null(0).to_numpy(zero_copy_only=False)
    words = np.ascontiguousarray(np.stack((low, low >> 63), axis=1))
    found = pa.Array.from_buffers(kind, len(low), [None, pa.py_buffer(words)])
    return pc.if_else(integers.is_valid(), found, pa.scalar(None, kind))


def _rows(sums: pa.Array, counts: pa.Array) -> list[tuple[Decimal | None, int]]:
    return list(zip(sums.to_pylist(), counts.to_pylist(), strict=True))


def _quotient(numerator: Decimal | None, count: int, kind: pa.DataType) -> Decimal | None:
    """Return an average as Spark rounds it: first to 39 digits, half down, then to the scale, half up."""
    if numerator is None or not count:
        return None
    exact = WIDE.divide(numerator, Decimal(count))
    first = exact.quantize(Decimal(1).scaleb(-QUOTIENT_SCALE), ROUND_HALF_DOWN, WIDE)
    return _rounded(first, kind)


def _rounded(number: Decimal, kind: pa.DataType) -> Decimal | None:
    """Return a number with the scale of a type; null if it has too many digits."""
    if not number.is_finite():
        return None
    found = number.quantize(Decimal(1).scaleb(-kind.scale), ROUND_HALF_UP, WIDE)
    digits = len(found.as_tuple().digits)
    return None if digits > kind.precision else found
