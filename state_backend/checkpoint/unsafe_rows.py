"""Spark's UnsafeRow, decoded into Arrow arrays a column at a time.

    row     null bits, 8 bytes for each 64 fields | one word of 8 bytes for each field | variable parts
    array   count i64 | null bits, as in a row | elements of 1, 2, 4 or 8 bytes | variable parts
    map     bytes of the key array i64 | key array | value array

Little endian. A value of fixed size is in its word. Otherwise the word is `offset << 32 | size`, and the offset counts
from the first byte of the row or array. Every offset is checked before it is followed: damaged or hostile bytes raise
CheckpointFormatError, and the memory used is proportional to the content. A string has its bytes, UTF-8 or not:
Spark does not check them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_backend.checkpoint.compression import unreadable
from state_backend.checkpoint.spark_types import VARIANT
from state_backend.codec.column_text import YEAR_MONTH
from state_backend.codec.variant_text import is_variant
from state_backend.native import state_files

WORD = 8
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
# The types that are in a word as they are in Arrow, by the width of an element of an array.
PLAIN_WIDTHS: tuple[tuple[Callable[[pa.DataType], bool], int], ...] = (
    (pa.types.is_boolean, 1),
    (pa.types.is_int8, 1),
    (pa.types.is_int16, 2),
    (pa.types.is_int32, 4),
    (pa.types.is_int64, 8),
    (pa.types.is_float32, 4),
    (pa.types.is_float64, 8),
    (pa.types.is_date32, 4),
    (pa.types.is_timestamp, 8),
    (pa.types.is_duration, 8),
    (YEAR_MONTH.equals, 4),
)
DECIMAL_DIGITS_MAX = 18  # of a decimal that is in its word
MICROSECOND_NS = 1000


def decode_rows(content: bytes, rows: Numbers, sizes: Numbers, schema: pa.StructType, name: str) -> pa.StructArray:
    """Return rows that begin at some positions of a buffer.

    Args:
        name: The name of the file, for errors.
    """
    try:
        return _Decoder(np.frombuffer(content, np.uint8)).rows(rows, sizes, schema)
    except (_Damage, pa.ArrowInvalid) as error:
        raise unreadable(name, f"a row does not fit its schema: {error}") from None


class _Damage(Exception):
    """The reason why bytes are no row."""


@dataclass(frozen=True)
class _Slots:
    """Where values are: each in the word, or element, at `at`. Offsets count from `base`, and stay before `end`."""

    at: Numbers
    base: Numbers
    end: Numbers
    is_null: Mask

    def __len__(self) -> int:
        return len(self.at)

    def select(self, which: npt.NDArray[Any]) -> _Slots:
        return _Slots(self.at[which], self.base[which], self.end[which], self.is_null[which])


class _Decoder:
    """Decodes the values of one buffer."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self._content = content

    def rows(self, rows: Numbers, sizes: Numbers, schema: pa.StructType) -> pa.StructArray:
        count = schema.num_fields
        null_bytes = (count + 63) // 64 * WORD
        ends = rows + sizes
        if len(rows) and (
            (sizes < null_bytes + WORD * count).any() or (rows < 0).any() or (ends > len(self._content)).any()
        ):
            raise _Damage("it is shorter than its fields")
        arrays = []
        for index in range(count):
            is_null = self._bytes(rows + index // 8) >> (index % 8) & 1 != 0
            slots = _Slots(rows + null_bytes + WORD * index, rows, ends, is_null)
            arrays.append(self._values(slots, schema.field(index).type))
        if not arrays:
            return pa.array([{}] * len(rows), schema)
        return pa.StructArray.from_arrays(arrays, fields=list(schema))

    def _values(self, slots: _Slots, kind: pa.DataType) -> pa.Array:
        """Return the values of slots; null values are left out of the decoding."""
        if pa.types.is_null(kind):
            return pa.nulls(len(slots))
        width = plain_width(kind)
        if width:
            return self._plain(slots, kind, width)
        if not slots.is_null.any():
            return self._present(slots, kind)
        present = self._present(slots.select(~slots.is_null), kind)
        indices = np.cumsum(~slots.is_null) - 1
        return present.take(pa.array(indices, pa.int64(), mask=slots.is_null))

    def _plain(self, slots: _Slots, kind: pa.DataType, width: int) -> pa.Array:
        raw = self._words(slots.at, width)
        if pa.types.is_boolean(kind):
            return pa.array(raw[:, 0] != 0, kind, mask=slots.is_null)
        buffers = [_validity(slots.is_null), pa.py_buffer(np.ascontiguousarray(raw))]
        return pa.Array.from_buffers(kind, len(slots), buffers)

    def _present(self, slots: _Slots, kind: pa.DataType) -> pa.Array:
        if pa.types.is_decimal(kind) and kind.precision <= DECIMAL_DIGITS_MAX:
            return self._small_decimals(slots, kind)
        starts, sizes = self._parts(slots)
        if is_variant(kind):
            return self._variants(starts, sizes)
        if pa.types.is_struct(kind):
            return self.rows(starts, sizes, cast(pa.StructType, kind))
        if pa.types.is_list(kind):
            return self._lists(starts, sizes, kind)
        if pa.types.is_map(kind):
            return self._maps(starts, sizes, kind)
        if pa.types.is_decimal(kind):
            return self._large_decimals(starts, sizes, kind)
        if pa.types.is_interval(kind):
            return self._intervals(starts, sizes)
        return self._texts(starts, sizes, kind)

    def _parts(self, slots: _Slots) -> tuple[Numbers, Numbers]:
        """Return where the variable parts of slots begin, and their sizes."""
        words = self._integers(slots.at)
        starts, sizes = slots.base + (words >> 32), words & 0xFFFFFFFF
        if len(starts) and ((starts < slots.base).any() or (starts + sizes > slots.end).any()):
            raise _Damage("an offset points outside of it")
        # The parts of one column never overlap in a buffer of Spark. Without this check, a small file could name
        # the same bytes many times.
        if int(sizes.sum()) > len(self._content):
            raise _Damage("its parts overlap")
        return starts, sizes

    def _texts(self, starts: Numbers, sizes: Numbers, kind: pa.DataType) -> pa.Array:
        content, offsets = self._gathered(starts, sizes)
        return pa.Array.from_buffers(
            kind, len(starts), [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(content)]
        )

    def _small_decimals(self, slots: _Slots, kind: pa.DataType) -> pa.Array:
        low = self._integers(slots.at)
        words = np.stack((low, low >> 63), axis=1)
        return _decimals(kind, len(slots), np.ascontiguousarray(words))

    def _large_decimals(self, starts: Numbers, sizes: Numbers, kind: pa.DataType) -> pa.Array:
        if len(sizes) and (sizes > 16).any():
            raise _Damage("a decimal is longer than 16 bytes")
        raw = self._content.tobytes() if len(starts) else b""
        values = [
            int.from_bytes(raw[start : start + size], "big", signed=True)
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]
        words = b"".join(value.to_bytes(16, "little", signed=True) for value in values)
        return _decimals(kind, len(values), words)

    def _intervals(self, starts: Numbers, sizes: Numbers) -> pa.Array:
        """Return calendar intervals: months i32 | days i32 | microseconds i64."""
        if len(sizes) and (sizes != 16).any():
            raise _Damage("an interval does not have 16 bytes")
        raw = self._words(starts, 16).copy()
        times = raw.view("<i8")[:, 1]
        if len(times) and (np.abs(times.astype(np.float64)) > 9.2e15).any():
            raise _Damage("an interval is longer than 292 years of microseconds")
        times *= MICROSECOND_NS
        return pa.Array.from_buffers(pa.month_day_nano_interval(), len(starts), [None, pa.py_buffer(raw)])

    def _variants(self, starts: Numbers, sizes: Numbers) -> pa.Array:
        """Return variants: size of the value i32 | value | metadata."""
        if len(sizes) and (sizes < 4).any():
            raise _Damage("a variant is shorter than its size")
        value_sizes = self._words(starts, 4).view("<i4")[:, 0].astype(np.int64)
        if len(sizes) and ((value_sizes < 0).any() or (value_sizes > sizes - 4).any()):
            raise _Damage("a variant is longer than its bytes")
        values = self._texts(starts + 4, value_sizes, pa.binary())
        metadata = self._texts(starts + 4 + value_sizes, sizes - 4 - value_sizes, pa.binary())
        return pa.StructArray.from_arrays([values, metadata], fields=list(VARIANT))

    def _lists(self, starts: Numbers, sizes: Numbers, kind: pa.DataType) -> pa.Array:
        elements, offsets = self._elements(starts, sizes, kind.value_type)
        buffers = [None, pa.py_buffer(offsets.astype(np.int32))]
        return pa.Array.from_buffers(kind, len(starts), buffers, children=[elements])

    def _maps(self, starts: Numbers, sizes: Numbers, kind: pa.DataType) -> pa.Array:
        if len(sizes) and (sizes < WORD).any():
            raise _Damage("a map is shorter than its size")
        key_sizes = self._integers(starts)
        if len(sizes) and ((key_sizes < 0).any() or (key_sizes > sizes - WORD).any()):
            raise _Damage("the keys of a map are longer than the map")
        keys, offsets = self._elements(starts + WORD, key_sizes, kind.key_type)
        items, item_offsets = self._elements(starts + WORD + key_sizes, sizes - WORD - key_sizes, kind.item_type)
        if not np.array_equal(offsets, item_offsets) or keys.null_count:
            raise _Damage("a map has other numbers of keys and values, or a null key")
        entries = pa.StructArray.from_arrays([keys, items], fields=[kind.key_field, kind.item_field])
        buffers = [None, pa.py_buffer(offsets.astype(np.int32))]
        return pa.Array.from_buffers(kind, len(starts), buffers, children=[entries])

    def _elements(self, starts: Numbers, sizes: Numbers, kind: pa.DataType) -> tuple[pa.Array, Numbers]:
        """Return the elements of all arrays, and the offsets of each array's elements."""
        if len(sizes) and (sizes < WORD).any():
            raise _Damage("an array is shorter than its size")
        counts = self._integers(starts)
        width = plain_width(kind) or WORD
        room = (sizes - WORD) * 8 // (8 * width + 1)  # each element takes its width and a null bit
        if pa.types.is_null(kind):
            room = (sizes - WORD) * 8
        if len(counts) and ((counts < 0).any() or (counts > room).any()):
            raise _Damage("an array has more elements than bytes")
        offsets = np.concatenate(([0], np.cumsum(counts)))
        owner = np.repeat(np.arange(len(starts)), counts)
        index = np.arange(int(offsets[-1])) - offsets[owner]
        base = starts[owner]
        null_bytes = (counts + 63) // 64 * WORD
        is_null = self._bytes(base + WORD + index // 8) >> (index % 8).astype(np.uint8) & 1 != 0
        at = base + WORD + null_bytes[owner] + width * index
        ends = (starts + sizes)[owner]
        if not pa.types.is_null(kind) and len(at) and (at + width > ends).any():
            raise _Damage("an array has more elements than bytes")
        return self._values(_Slots(at, base, ends, is_null), kind), offsets

    def _gathered(self, starts: Numbers, sizes: Numbers) -> tuple[npt.NDArray[np.uint8], Numbers]:
        """Return pieces of the buffer one after the other, and the offsets of the pieces."""
        if state_files is not None:
            pieces, ends = state_files.gathered(self._content, starts, sizes)
            return np.frombuffer(pieces, np.uint8), np.frombuffer(ends, np.int64)
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        indices = np.arange(int(offsets[-1])) + np.repeat(starts - offsets[:-1], sizes)
        return self._content[indices], offsets

    def _bytes(self, at: Numbers) -> npt.NDArray[np.uint8]:
        return self._content[at]

    def _integers(self, at: Numbers) -> Numbers:
        return self._words(at, WORD).view("<i8")[:, 0]

    def _words(self, at: Numbers, width: int) -> npt.NDArray[np.uint8]:
        """Return `width` bytes at each position, as rows of an array."""
        if not len(at):
            return np.empty((0, width), np.uint8)
        if state_files is not None:
            return np.frombuffer(state_files.words(self._content, at, width), np.uint8).reshape(-1, width)
        windows = np.lib.stride_tricks.sliding_window_view(self._content, width)
        return windows[at]


def plain_width(kind: pa.DataType) -> int:
    """Return the width of the elements of an array whose type is the same in Arrow; 0 for other types."""
    return next((width for is_kind, width in PLAIN_WIDTHS if is_kind(kind)), 0)


def _decimals(kind: pa.DataType, count: int, words: Any) -> pa.Array:
    """Return decimals; ArrowInvalid if one has too many digits."""
    found = pa.Array.from_buffers(kind, count, [None, pa.py_buffer(words)])
    found.validate(full=True)
    return found


def _validity(is_null: Mask) -> pa.Buffer | None:
    if not is_null.any():
        return None
    return pa.py_buffer(np.packbits(~is_null, bitorder="little"))
