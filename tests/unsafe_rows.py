"""Spark's UnsafeRow, written: the tests' opposite of `state_backend.checkpoint.unsafe_rows`."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa

from state_backend.checkpoint.unsafe_rows import plain_width

FORMATS = {"bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "float": "f", "double": "d"}


def unsafe_row(values: tuple[Any, ...], schema: pa.StructType) -> bytes:
    """Return a row of plain values: a struct is a tuple, a map a dict."""
    null_bytes = (schema.num_fields + 63) // 64 * 8
    return _slots(list(values), [field.type for field in schema], null_bytes, [8] * schema.num_fields)


def _array(values: list[Any], kind: pa.DataType) -> bytes:
    null_bytes = (len(values) + 63) // 64 * 8
    width = plain_width(kind) or 8
    slots = _slots(values, [kind] * len(values), null_bytes, [width] * len(values), before=8)
    return struct.pack("<q", len(values)) + slots


def _slots(values: list[Any], kinds: list[pa.DataType], null_bytes: int, widths: list[int], before: int = 0) -> bytes:
    nulls = bytearray(null_bytes)
    words, parts = b"", b""
    start = before + null_bytes + (sum(widths) + 7) // 8 * 8
    for index, (value, kind, width) in enumerate(zip(values, kinds, widths, strict=True)):
        if value is None:
            nulls[index // 8] |= 1 << index % 8
            words += bytes(width)
        elif plain_width(kind):
            words += struct.pack("<" + FORMATS[str(kind)], value).ljust(width, b"\0")
        elif pa.types.is_decimal(kind) and kind.precision <= 18:
            words += struct.pack("<q", int(value.scaleb(kind.scale)))
        else:
            part = _part(value, kind)
            words += struct.pack("<q", start + len(parts) << 32 | len(part))
            parts += part.ljust((len(part) + 7) // 8 * 8, b"\0")
    return bytes(nulls) + words.ljust((len(words) + 7) // 8 * 8, b"\0") + parts


def _part(value: Any, kind: pa.DataType) -> bytes:
    if pa.types.is_struct(kind):
        return unsafe_row(value, kind)
    if pa.types.is_list(kind):
        return _array(value, kind.value_type)
    if pa.types.is_map(kind):
        keys = _array(list(value), kind.key_type)
        return struct.pack("<q", len(keys)) + keys + _array(list(value.values()), kind.item_type)
    if pa.types.is_decimal(kind):
        return int(value.scaleb(kind.scale)).to_bytes(16, "big", signed=True)
    return value.encode() if isinstance(value, str) else bytes(value)
