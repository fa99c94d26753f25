"""The JSON of Spark's variants, with the texts of `json_text`. A variant is a struct of two binary columns.

    metadata  header u8 (bits 6 and 7: width of sizes and offsets, less one) | names | offset of each name, and the end
              | texts
    value     header u8 (bits 0 and 1: 0 primitive, 1 short text, 2 object, 3 array; above them: its type or its widths)
              | content

Numbers are little endian. https://github.com/apache/parquet-format/blob/master/VariantEncoding.md has the types.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa

from state_backend.model.errors import UnsupportedStateError

PRIMITIVE, SHORT_TEXT, OBJECT, ARRAY = range(4)
LITERALS = {0: "null", 1: "true", 2: "false"}
# The types of numbers and times by their number: the form of their bytes, and the type of Arrow that has their text.
FIXED: dict[int, tuple[str, pa.DataType]] = {
    3: ("<b", pa.int8()),
    4: ("<h", pa.int16()),
    5: ("<i", pa.int32()),
    6: ("<q", pa.int64()),
    7: ("<d", pa.float64()),
    11: ("<i", pa.date32()),
    12: ("<q", pa.timestamp("us", "UTC")),
    13: ("<q", pa.timestamp("us")),
    14: ("<f", pa.float32()),
}
DECIMAL_BYTES = {8: 4, 9: 8, 10: 16}
BINARY, TEXT = 15, 16
# Spark's name of the type in the metadata of the field `metadata`.
MARK = (b"variant", b"true")
# The JSON of a value of an Arrow type.
WriteJson = Callable[[Any, pa.DataType], str]


def is_variant(kind: pa.DataType) -> bool:
    """Return whether a type is a variant: a struct that Spark marked as one."""
    if not pa.types.is_struct(kind) or kind.num_fields != 2:
        return False
    metadata = kind.field(1).metadata or {}
    return kind.field(0).name == "value" and kind.field(1).name == "metadata" and metadata.get(MARK[0]) == MARK[1]


def variant_json(value: bytes, metadata: bytes, write: WriteJson) -> str:
    """Return the JSON of a variant; UnsupportedStateError for bytes that are no variant of a known type."""
    try:
        return _Variant(value, _names(metadata), write).json(0)
    except (IndexError, ValueError, struct.error, RecursionError) as error:
        raise UnsupportedStateError(f"a variant has a form that sparkis does not know ({error})") from None


def _names(metadata: bytes) -> list[str]:
    width = (metadata[0] >> 6) + 1
    count = int.from_bytes(metadata[1 : 1 + width], "little")
    offsets = list(_numbers(metadata, 1 + width, width, count + 1))
    texts = 1 + width * (count + 2)
    return [metadata[texts + start : texts + end].decode() for start, end in pairwise(offsets)]


def _numbers(content: bytes, at: int, width: int, count: int) -> Iterator[int]:
    if at + width * count > len(content):
        raise ValueError("it is shorter than its parts")
    return (int.from_bytes(content[at + width * each : at + width * (each + 1)], "little") for each in range(count))


class _Variant:
    def __init__(self, content: bytes, names: list[str], write: WriteJson) -> None:
        self._content, self._names, self._write = content, names, write

    def json(self, at: int) -> str:
        form, header = self._content[at] & 3, self._content[at] >> 2
        if form == SHORT_TEXT:
            return self._text(at + 1, header)
        if form == OBJECT:
            return self._object(at + 1, (header & 3) + 1, (header >> 2 & 3) + 1, 4 if header >> 4 & 1 else 1)
        if form == ARRAY:
            return self._array(at + 1, (header & 3) + 1, 4 if header >> 2 & 1 else 1)
        return self._primitive(at + 1, header)

    def _primitive(self, at: int, kind: int) -> str:
        if kind in LITERALS:
            return LITERALS[kind]
        if kind in FIXED:
            form, arrow = FIXED[kind]
            return self._write(struct.unpack_from(form, self._content, at)[0], arrow)
        if kind in DECIMAL_BYTES:
            scale, content = self._content[at], self._bytes(at + 1, DECIMAL_BYTES[kind])
            number = Decimal(int.from_bytes(content, "little", signed=True)).scaleb(-scale)
            return self._write(number, pa.decimal128(38, scale))
        if kind in (BINARY, TEXT):
            size = int.from_bytes(self._bytes(at, 4), "little")
            return self._text(at + 4, size) if kind == TEXT else self._write(self._bytes(at + 4, size), pa.binary())
        raise ValueError(f"type {kind}")

    def _object(self, at: int, offset_width: int, name_width: int, count_width: int) -> str:
        count = int.from_bytes(self._bytes(at, count_width), "little")
        names = _numbers(self._content, at + count_width, name_width, count)
        first = at + count_width + name_width * count
        offsets = _numbers(self._content, first, offset_width, count + 1)
        values = first + offset_width * (count + 1)
        parts = (
            f"{self._write(self._names[name], pa.string())}:{self.json(values + offset)}"
            for name, offset in zip(names, offsets, strict=False)
        )
        return f"{{{','.join(parts)}}}"

    def _array(self, at: int, offset_width: int, count_width: int) -> str:
        count = int.from_bytes(self._bytes(at, count_width), "little")
        offsets = list(_numbers(self._content, at + count_width, offset_width, count + 1))
        values = at + count_width + offset_width * (count + 1)
        return f"[{','.join(self.json(values + offset) for offset in offsets[:count])}]"

    def _text(self, at: int, size: int) -> str:
        return self._write(self._bytes(at, size).decode(), pa.string())

    def _bytes(self, at: int, size: int) -> bytes:
        content = self._content[at : at + size]
        if len(content) < size:
            raise ValueError("it is shorter than its parts")
        return content
