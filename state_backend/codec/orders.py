"""Encodes the order columns of a row as bytes that sort as these columns do (see `state_backend.codec.keep_by_order`).

    integer, date, time   int64, big endian, with the sign bit flipped; a date in days, a time in microseconds
    float                 IEEE 754, big endian; positive: the sign bit flipped; negative: all bits flipped. -0.0 is
                          encoded as 0.0, and every NaN as the same value above all numbers
    decimal               int128 of its digits, big endian, with the sign bit flipped
    text, bytes           unchanged as the last column; before another column 00 becomes 00 FF, and 00 00 is appended

Runs in Spark's Python workers. The rules are a format: stores compare orders that different versions have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SIGN = np.uint64(1 << 63)


def orders_of(columns: Sequence[pa.Array]) -> pa.Array:
    """Return the orders of rows as a binary array; the columns have no nulls."""
    parts = [_bytes_of(column, is_last=column is columns[-1]) for column in columns]
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, pa.scalar(b""))


def _bytes_of(column: pa.Array, *, is_last: bool) -> pa.Array:
    kind = column.type
    if pa.types.is_decimal128(kind):
        return _of_decimals(column)
    if pa.types.is_floating(kind):
        return _of_words(_words_of_floats(column.cast(pa.float64()).to_numpy(zero_copy_only=False)))
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    elif pa.types.is_date(kind):
        column = column.cast(pa.int32())
    elif pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif not pa.types.is_integer(kind):
        texts = column.cast(pa.binary())
        return texts if is_last else _terminated(texts)
    numbers = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return _of_words(numbers.view(np.uint64) ^ SIGN)


def _words_of_floats(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.uint64]:
    plain = np.where(np.isnan(numbers), np.float64("nan"), numbers + 0.0)  # -0.0 + 0.0 is 0.0
    bits = np.ascontiguousarray(plain).view(np.uint64)
    return np.where(np.isnan(plain), ~np.uint64(0), np.where(bits & SIGN, ~bits, bits | SIGN))


def _of_words(words: npt.NDArray[np.uint64]) -> pa.Array:
    """Return numbers as big-endian bytes."""
    return _of_fixed_width(words.astype(">u8"))


def _of_decimals(column: pa.Array) -> pa.Array:
    words = np.frombuffer(column.buffers()[1], "<u8")[2 * column.offset : 2 * (column.offset + len(column))]
    pairs = words.reshape(-1, 2)[:, ::-1].astype(">u8")  # the high half first
    pairs[:, 0] ^= SIGN
    return _of_fixed_width(pairs)


def _of_fixed_width(rows: npt.NDArray[Any]) -> pa.Array:
    width = rows.dtype.itemsize * (rows.shape[1] if rows.ndim > 1 else 1)
    ends = np.arange(len(rows) + 1, dtype=np.int32) * width
    return pa.Array.from_buffers(pa.binary(), len(rows), [None, pa.py_buffer(ends), pa.py_buffer(rows.tobytes())])


def _terminated(texts: pa.Array) -> pa.Array:
    """Escape texts, and append an end that sorts below any longer text."""
    escaped = [text.replace(b"\0", b"\0\xff") + b"\0\0" for text in texts.to_pylist()]
    return pa.array(escaped, pa.binary())


def with_orders(orders: pa.Array, values: pa.Array) -> pa.Array:
    """Return values with their orders in front: the values of FOLDs of ordered states."""
    lengths = _of_fixed_width(pc.binary_length(orders).to_numpy(zero_copy_only=False).astype("<u2"))
    return pc.binary_join_element_wise(lengths, orders, values, pa.scalar(b""))
