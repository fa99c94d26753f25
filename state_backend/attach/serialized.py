"""The results of aggregate functions whose buffer is bytes: collected values, and percentiles.

    collect_list, collect_set   an UnsafeRow with one column, the array of the values
    percentile, median          for each value: size i32 | an UnsafeRow of the value and its count; at the end -1
    percentile_approx           threshold i32 | error f64 | count i64 | size i32 | samples: value f64, g i64, delta i64

The numbers outside of UnsafeRows are big endian. The bytes do not tell the type of the values, so a call declares it:
`collect_set(tag::string)`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa

from state_backend.attach.evaluation import Buffers, FunctionCall
from state_backend.checkpoint.compression import unreadable
from state_backend.checkpoint.spark_types import type_name
from state_backend.checkpoint.unsafe_rows import decode_rows

BUFFER = "the buffer of an aggregate function"
END = -1
SIZE, SUMMARY = struct.Struct(">i"), struct.Struct(">idqi")
SAMPLE = np.dtype([("value", ">f8"), ("g", ">i8"), ("delta", ">i8")])
NUMBER = re.compile(r"([0-9.]+(?:E-?[0-9]+)?)(?:D|BD|F|L)?", re.IGNORECASE)
LIST = re.compile(r"array\((.*)\)", re.IGNORECASE)
ROUNDINGS: dict[pa.DataType, Callable[[float], float]] = {
    pa.float64(): float,
    pa.float32(): float,
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32(), pa.int64()), math.trunc),
}


def collected(buffers: Buffers, call: FunctionCall) -> pa.Array:
    """Return the arrays of collect_list or collect_set."""
    element = _kind(call)
    # collect_set stores binary values as arrays of numbers, because the JVM compares byte arrays by identity.
    is_bytes = call.name == "collect_set" and pa.types.is_binary(element)
    stored = pa.list_(pa.int8()) if is_bytes else element
    rows = _rows(buffers[0], pa.struct([("values", pa.list_(stored))]))
    lists = rows.field(0)
    return _with_bytes(lists) if is_bytes else lists


def percentile(buffers: Buffers, call: FunctionCall) -> pa.Array:
    """Return exact percentiles: floats, or arrays of floats."""
    kind = _kind(call)
    wanted, is_list = _fractions("0.5" if call.name == "median" else _argument(call))
    row = pa.struct([("value", kind), ("count", pa.int64())])
    found: list[Any] = []
    for counts in _counts(buffers[0], row):
        results = [_interpolated(*counts, each) for each in wanted] if len(counts[0]) else None
        found.append(results if is_list or results is None else results[0])
    return pa.array(found, pa.list_(pa.float64()) if is_list else pa.float64())


def approximate_percentile(buffers: Buffers, call: FunctionCall) -> pa.Array:
    """Return approximate percentiles, of the type of the values."""
    kind = _kind(call)
    if kind not in ROUNDINGS:
        raise TypeError(f"{call.name} of {type_name(kind)}, which sparkis does not compute")
    wanted, is_list = _fractions(_argument(call))
    found: list[Any] = []
    for content in _binary(buffers[0]).to_pylist():
        results = None if content is None else [_quantile(content, each) for each in wanted]
        if results is None or results[0] is None:
            found.append(None)
            continue
        rounded = [ROUNDINGS[kind](result) for result in results if result is not None]
        found.append(rounded if is_list else rounded[0])
    return pa.array(found, pa.list_(kind) if is_list else kind)


def _kind(call: FunctionCall) -> pa.DataType:
    if call.kind is None:
        raise TypeError(f"{call.name} needs the type of its argument, as in {call.name}(tag::string)")
    return call.kind


def _argument(call: FunctionCall) -> str:
    if not call.arguments:
        raise TypeError(f"{call.name} needs its percentage, as in {call.name}(price::double, 0.9)")
    return call.arguments[0]


def _fractions(text: str) -> tuple[list[float], bool]:
    """Return the percentages in an argument, and whether it is a list of them."""
    listed = LIST.fullmatch(text)
    parts = [text] if listed is None else listed[1].split(",")
    matches = [NUMBER.fullmatch(part.strip()) for part in parts]
    numbers = [float(match[1]) for match in matches if match is not None]
    if len(numbers) < len(parts) or not all(0.0 <= number <= 1.0 for number in numbers):
        raise TypeError(f"{text!r} is no percentage from 0.0 to 1.0, and no array(...) of them")
    return numbers, listed is not None


def _binary(buffer: pa.Array) -> pa.Array:
    if not pa.types.is_binary(buffer.type):
        raise TypeError(f"a buffer of {buffer.type}")
    return buffer


def _rows(buffer: pa.Array, schema: pa.StructType) -> pa.StructArray:
    """Return the UnsafeRow in each value of a binary column; null where the value is null."""
    is_valid = _binary(buffer).is_valid()
    present = buffer.filter(is_valid)
    rows = _decoded(present.to_pylist(), schema)
    indices = np.cumsum(is_valid.to_numpy(zero_copy_only=False)) - 1
    return rows.take(pa.array(indices, pa.int64(), mask=~is_valid.to_numpy(zero_copy_only=False)))


def _decoded(contents: Sequence[bytes], schema: pa.StructType) -> pa.StructArray:
    sizes = np.array([len(content) for content in contents], np.int64)
    return decode_rows(b"".join(contents), np.cumsum(sizes) - sizes, sizes, schema, BUFFER)


def _with_bytes(lists: pa.ListArray) -> pa.ListArray:
    inner = lists.values
    content = inner.values.to_numpy().astype(np.int8).tobytes()
    elements = pa.Array.from_buffers(pa.binary(), len(inner), [None, inner.buffers()[1], pa.py_buffer(content)])
    return cast(pa.ListArray, pa.ListArray.from_arrays(lists.offsets, elements, mask=lists.is_null()))


def _counts(buffer: pa.Array, schema: pa.StructType) -> Iterator[tuple[Any, Any]]:
    """Yield the sorted values of each buffer, and for each value the number of values up to it."""
    pieces: list[bytes] = []
    counts = []
    for content in _binary(buffer).to_pylist():
        found = list(_pieces(content or SIZE.pack(END)))
        pieces += found
        counts.append(len(found))
    rows = _decoded(pieces, schema)
    values = rows.field(0).cast(pa.float64()).to_numpy(zero_copy_only=False)
    numbers = rows.field(1).to_numpy(zero_copy_only=False)
    at = 0
    for count in counts:
        order = np.argsort(values[at : at + count], kind="stable")
        yield values[at : at + count][order], np.cumsum(numbers[at : at + count][order])
        at += count


def _pieces(content: bytes) -> Iterator[bytes]:
    at = 0
    while True:
        if at + SIZE.size > len(content):
            raise unreadable(BUFFER, "it has no end")
        (size,) = SIZE.unpack_from(content, at)
        at += SIZE.size
        if size == END:
            return
        if size < 0 or at + size > len(content):
            raise unreadable(BUFFER, "it is shorter than its rows")
        yield content[at : at + size]
        at += size


def _interpolated(values: Any, counts: Any, fraction: float) -> float:
    """Return a percentile of sorted values.

    Args:
        counts: For each value, the number of values up to it.
    """
    position = float(counts[-1] - 1) * fraction
    lower, higher = math.floor(position), math.ceil(position)
    low = float(values[np.searchsorted(counts, lower + 1)])
    high = float(values[np.searchsorted(counts, higher + 1)])
    if lower == higher or low == high:
        return low
    return (higher - position) * low + (position - lower) * high


def _quantile(content: bytes, fraction: float) -> float | None:
    """Return the quantile of a Greenwald-Khanna summary; None if it has no samples."""
    if len(content) < SUMMARY.size:
        raise unreadable(BUFFER, "it is shorter than a summary")
    _, error, count, length = SUMMARY.unpack_from(content)
    if len(content) != SUMMARY.size + length * SAMPLE.itemsize:
        raise unreadable(BUFFER, f"it has not the size of {length} samples")
    samples = np.frombuffer(content, SAMPLE, offset=SUMMARY.size)
    if not length or not count:
        return None
    if fraction <= error or length == 1:
        return float(samples["value"][0])
    if fraction >= 1 - error:
        return float(samples["value"][-1])
    rank = math.ceil(fraction * count)
    g, delta = samples["g"].astype(np.int64), samples["delta"].astype(np.int64)
    allowed = int((g + delta).max()) // 2
    ranks = np.cumsum(g)[:-1]
    fits = (ranks + delta[:-1] - allowed <= rank) & (rank <= ranks + allowed)
    return float(samples["value"][int(fits.argmax()) if fits.any() else -1])
