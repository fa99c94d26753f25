"""The JSON of Arrow columns, as Spark's `to_json` writes it.

number            as it is; a float as Java writes it: 1.0, 1.0E10, "NaN"; a decimal with an exponent if it is small
text              with \\", \\\\, \\b, \\t, \\n, \\f, \\r; other control characters as \\u001F;
                  U+FFFD in place of bytes that are not UTF-8, but in keys they stay, as two keys would become one
timestamp         "2024-01-01T00:00:00.000Z", without the Z for timestamp_ntz; truncated to milliseconds, but in keys,
                  as two keys would become one
date, binary      "2024-01-01", "base64"
struct, list, map object, array, object; a map's key is the text of Spark's own form: a date in days, a time in
                  microseconds
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.codec.column_text import any_text, date_text, readable_text

NULL = "null"
ANY_BYTES = "surrogateescape"
ESCAPED = r'["\\\x00-\x1f]'
SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
# Java writes floats from 1e-3 up to 1e7 without an exponent.
PLAIN_MIN, PLAIN_MAX = 1e-3, 1e7
LARGE_YEARS_FROM_US = int(np.datetime64("10000-01-01", "us").astype(np.int64))
PLAIN_TYPES: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_date,
    pa.types.is_timestamp,
    pa.types.is_null,
)


def has_json(kind: pa.DataType) -> bool:
    """Tell whether `json_texts` writes a type: not intervals, and no maps with keys of nested or binary types."""
    if pa.types.is_struct(kind):
        return all(has_json(kind.field(index).type) for index in range(kind.num_fields))
    if pa.types.is_list(kind):
        return has_json(kind.value_type)
    if pa.types.is_map(kind):
        is_plain = any(is_kind(kind.key_type) for is_kind in PLAIN_TYPES) and not pa.types.is_binary(kind.key_type)
        return is_plain and has_json(kind.item_type)
    return any(is_kind(kind) for is_kind in PLAIN_TYPES)


class JsonForm(NamedTuple):
    """keeps_nulls: objects have their null fields, too. has_micros: times are not truncated to milliseconds.

    keeps_bytes: texts have bytes that are not UTF-8, so the result is no JSON.
    """

    keeps_nulls: bool = True
    has_micros: bool = False
    keeps_bytes: bool = False


OF_VALUES = JsonForm()
OF_KEYS = JsonForm(keeps_nulls=False, has_micros=True, keeps_bytes=True)


def json_texts(array: pa.Array, form: JsonForm = OF_VALUES) -> pa.Array:
    """Return the JSON of each value, null for a null."""
    kind = array.type
    if pa.types.is_struct(kind):
        texts = json_objects([field.name for field in kind], array.flatten(), len(array), form)
    elif pa.types.is_list(kind):
        texts = _lists(array, form)
    elif pa.types.is_map(kind):
        texts = _maps(array, form)
    else:
        return _plain(array, form)
    return pc.if_else(array.is_valid(), texts, pa.scalar(None, pa.string()))


def json_objects(names: list[str], columns: list[pa.Array], rows: int, form: JsonForm = OF_VALUES) -> pa.Array:
    """Return an object of each row of some columns."""
    if not columns:
        return pa.array(["{}"] * rows, pa.string())
    fields = []
    for name, column in zip(names, columns, strict=True):
        text = json_texts(column, form)
        head = pa.scalar(f"{_quoted(name)}:")
        fields.append(pc.binary_join_element_wise(head, pc.fill_null(text, NULL) if form.keeps_nulls else text, ""))
    joined = join_present(fields, ",")
    return pc.binary_join_element_wise("{", joined, "}", "")


def join_present(texts: Sequence[pa.Array], separator: str) -> pa.Array:
    """Return the texts of each row joined, without its nulls. Arrow's own join loses rows that have only nulls."""
    parts = [pc.fill_null(pc.binary_join_element_wise(separator, text, ""), "") for text in texts]
    joined = pc.binary_join_element_wise(*parts, "")
    # The first separator is at the beginning. A kernel for slices would refuse bytes that are not UTF-8.
    return pc.replace_substring(joined, separator, "", max_replacements=1) if separator else joined


def _plain(array: pa.Array, form: JsonForm) -> pa.Array:
    kind = array.type
    if pa.types.is_floating(kind):
        return _floats(array)
    if pa.types.is_decimal(kind):
        return _each(array, lambda number: str(Decimal(number)))
    if pa.types.is_string(kind):
        return pc.binary_join_element_wise('"', _escaped(array, form), '"', "")
    if pa.types.is_binary(kind):
        return _each(array, lambda content: f'"{base64.b64encode(content).decode()}"')
    if pa.types.is_timestamp(kind):
        return pc.binary_join_element_wise('"', _times(array, form), '"', "")
    if pa.types.is_date(kind):
        return pc.binary_join_element_wise('"', date_text(array), '"', "")
    return array.cast(pa.string())


def _lists(array: pa.ListArray, form: JsonForm) -> pa.Array:
    elements = pc.fill_null(json_texts(array.flatten(), form), NULL)
    return _joined(elements, pc.fill_null(pc.list_value_length(array), 0).to_numpy(), "[", "]")


def _maps(array: pa.MapArray, form: JsonForm) -> pa.Array:
    offsets = array.offsets.to_numpy()
    first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    keys, items = array.keys.slice(first, count), array.items.slice(first, count)
    values = pc.fill_null(json_texts(items, form), NULL)
    pairs = pc.binary_join_element_wise('"', _map_keys(keys, form), '":', values, "")
    return _joined(pairs, np.diff(offsets), "{", "}")


def _map_keys(keys: pa.Array, form: JsonForm) -> pa.Array:
    kind = keys.type
    if pa.types.is_string(kind):
        return _escaped(keys, form)
    if pa.types.is_date(kind):
        return keys.cast(pa.int32()).cast(pa.string())
    if pa.types.is_timestamp(kind):
        return keys.cast(pa.int64()).cast(pa.string())
    return pc.replace_substring(_plain(keys, OF_VALUES), '"', "")  # NaN is a text with quotes


def _joined(parts: pa.Array, counts: Any, opening: str, closing: str) -> pa.Array:
    """Return texts that join so many parts each, with commas."""
    offsets = np.concatenate(([0], np.cumsum(counts)))
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), parts)
    return pc.binary_join_element_wise(opening, pc.binary_join(lists, ","), closing, "")


def _floats(array: pa.Array) -> pa.Array:
    """Return floats as Java writes them: always with a point, and an exponent outside of PLAIN_MIN to PLAIN_MAX."""
    size = pc.abs(array)
    is_plain = pc.or_(
        pc.and_(pc.greater_equal(size, PLAIN_MIN), pc.less(size, PLAIN_MAX)),
        pc.equal(array, 0),
    )
    texts = array.cast(pa.string())
    has_point = pc.match_substring_regex(texts, r"[.eE]")
    plain = pc.if_else(has_point, texts, pc.binary_join_element_wise(texts, ".0", ""))
    is_other = pc.fill_null(pc.or_(pc.invert(is_plain), pc.match_substring_regex(texts, "[eE]")), False)
    if not pc.any(is_other).as_py():
        return plain
    scalar = np.float32 if pa.types.is_float32(array.type) else np.float64
    rewritten = [_java_text(scalar(value)) for value in array.filter(is_other).to_pylist()]
    return pc.replace_with_mask(plain, is_other, pa.array(rewritten, pa.string()))


def _java_text(number: np.floating[Any]) -> str:
    if np.isnan(number):
        return '"NaN"'
    if np.isinf(number):
        return '"Infinity"' if number > 0 else '"-Infinity"'
    if number == 0 or PLAIN_MIN <= abs(number) < PLAIN_MAX:
        return np.format_float_positional(number, unique=True, trim="0")
    text = np.format_float_scientific(number, unique=True, trim="0", exp_digits=1)
    return text.replace("e+", "E").replace("e", "E")


def _times(array: pa.Array, form: JsonForm) -> pa.Array:
    zone = "Z" if array.type.tz else ""
    times = array.cast(pa.timestamp("us"))
    floors = pc.floor_temporal(times, unit="millisecond")
    texts = floors.cast(pa.timestamp("ms")).cast(pa.string())
    if form.has_micros:
        texts = pc.if_else(pc.equal(times, floors), texts, times.cast(pa.string()))
    texts = pc.replace_substring(texts, " ", "T")
    has_large_year = pc.fill_null(pc.greater_equal(times.cast(pa.int64()), LARGE_YEARS_FROM_US), False)
    if pc.any(has_large_year).as_py():
        counts = times.filter(has_large_year).cast(pa.int64()).to_pylist()
        rewritten = [_large_year_text(micros, form) for micros in counts]
        texts = pc.replace_with_mask(texts, has_large_year, pa.array(rewritten, pa.string()))
    return pc.binary_join_element_wise(texts, zone, "")


def _large_year_text(micros: int, form: JsonForm) -> str:
    """Return the text of a time after 9999, which Java writes with a sign, and Arrow does not always write."""
    unit = "us" if form.has_micros and micros % 1000 else "ms"
    return f"+{np.datetime64(micros, 'us').astype(f'datetime64[{unit}]')}"


def _escaped(texts: pa.Array, form: JsonForm) -> pa.Array:
    if not form.keeps_bytes:
        texts = readable_text(texts)
    is_special = pc.fill_null(pc.match_substring_regex(texts, ESCAPED), False)
    if not pc.any(is_special).as_py():
        return texts
    contents = texts.filter(is_special).cast(pa.binary()).to_pylist()
    rewritten = [_escape(content.decode(errors=ANY_BYTES)).encode(errors=ANY_BYTES) for content in contents]
    return pc.replace_with_mask(texts, is_special, any_text(pa.array(rewritten, pa.binary())))


def _escape(text: str) -> str:
    return re.sub(ESCAPED, lambda found: SHORT_ESCAPES.get(found[0], f"\\u{ord(found[0]):04X}"), text)


def _quoted(name: str) -> str:
    return f'"{_escape(name)}"'


def _each(array: pa.Array, text_of: Callable[[Any], str]) -> pa.Array:
    return pa.array([None if value is None else text_of(value) for value in array.to_pylist()], pa.string())
