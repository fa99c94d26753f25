"""The JSON of Arrow columns: the texts of `column_text`, in objects and arrays.

number, boolean   its text, as it is; "nan", "inf", "-inf"; a decimal in quotes, if the form says so
text              with \\", \\\\, \\b, \\t, \\n, \\f, \\r; other control characters as \\u001F;
                  U+FFFD in place of bytes that are not UTF-8, but in keys they stay, as two keys would become one
date, timestamp,  its text in quotes
time, interval
binary            "base64"
struct, list, map object, array, object; a map's key is its text, its base64 or, if it is nested, its JSON as a text
variant           the JSON of what it is
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.codec.column_text import (
    NUMBERS,
    any_text,
    as_bytes,
    date_text,
    interval_text,
    is_interval,
    readable_text,
    time_text,
)
from state_backend.codec.variant_text import is_variant, variant_json

NULL = "null"
ANY_BYTES = "surrogateescape"
ESCAPED = r'["\\\x00-\x1f]'
SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


class JsonForm(NamedTuple):
    """keeps_nulls: objects have their null fields, too. has_text_decimals: decimals are texts, not numbers.

    keeps_bytes: texts have bytes that are not UTF-8, so the result is no JSON.
    """

    keeps_nulls: bool = True
    has_text_decimals: bool = False
    keeps_bytes: bool = False


OF_VALUES = JsonForm()
OF_KEYS = JsonForm(keeps_nulls=False, keeps_bytes=True)


def json_texts(array: pa.Array, form: JsonForm = OF_VALUES) -> pa.Array:
    """Return the JSON of each value, null for a null."""
    kind = array.type
    if is_variant(kind):
        return _variants(array, form)
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
    return objects_of(names, [json_texts(column, form) for column in columns], rows, form)


def objects_of(names: Sequence[str], texts: Sequence[pa.Array], rows: int, form: JsonForm = OF_VALUES) -> pa.Array:
    """Return an object of each row of the JSON of some columns."""
    if not texts:
        return pa.array(["{}"] * rows, pa.string())
    fields = []
    for name, text in zip(names, texts, strict=True):
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


def plain_texts(array: pa.Array) -> pa.Array:
    """Return the text of each value of a type that is not nested, as clients read it outside of JSON."""
    kind = array.type
    if pa.types.is_date(kind):
        return date_text(array)
    if pa.types.is_timestamp(kind):
        return any_text(as_bytes(array, "timestamp" if kind.tz else "timestamp_ntz"))
    if is_interval(kind):
        return interval_text(array)
    if pa.types.is_time64(kind):
        return time_text(array)
    form = next((form for is_kind, form in NUMBERS if is_kind(kind)), None)
    return array.cast(pa.string()) if form is None else any_text(as_bytes(array, form))


def _plain(array: pa.Array, form: JsonForm) -> pa.Array:
    array = _with_usual_offsets(array)
    kind = array.type
    if pa.types.is_string(kind):
        return _in_quotes(_escaped(array, form))
    if pa.types.is_binary(kind):
        return _in_quotes(_base64(array))
    texts = plain_texts(array)
    if pa.types.is_floating(kind):
        is_number = pc.is_finite(array)
        return texts if pc.all(is_number).as_py() is not False else pc.if_else(is_number, texts, _in_quotes(texts))
    is_quoted = pa.types.is_temporal(kind) or (pa.types.is_decimal(kind) and form.has_text_decimals)
    return _in_quotes(texts) if is_quoted else texts


def _in_quotes(texts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise('"', texts, '"', "")


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


def _with_usual_offsets(array: pa.Array) -> pa.Array:
    """Return texts and bytes with the offsets that all others have; Spark may send larger ones."""
    if pa.types.is_large_string(array.type):
        return any_text(array.cast(pa.binary()))
    return array.cast(pa.binary()) if pa.types.is_large_binary(array.type) else array


def _map_keys(keys: pa.Array, form: JsonForm) -> pa.Array:
    keys = _with_usual_offsets(keys)
    if pa.types.is_nested(keys.type):
        return _escaped(json_texts(keys, form), form)
    if pa.types.is_binary(keys.type):
        return _base64(keys)
    return _escaped(keys, form) if pa.types.is_string(keys.type) else plain_texts(keys)


def _variants(array: pa.StructArray, form: JsonForm) -> pa.Array:
    def write(value: object, kind: pa.DataType) -> str:
        (text,) = _plain(pa.array([value], kind), form).to_pylist()
        return str(text)

    values, metadata = (array.field(index).to_pylist() for index in range(2))
    rows = zip(values, metadata, array.is_valid().to_pylist(), strict=True)
    return pa.array(
        [variant_json(value, names, write) if is_valid else None for value, names, is_valid in rows], pa.string()
    )


def _joined(parts: pa.Array, counts: Any, opening: str, closing: str) -> pa.Array:
    """Return texts that join so many parts each, with commas."""
    offsets = np.concatenate(([0], np.cumsum(counts)))
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), parts)
    return pc.binary_join_element_wise(opening, pc.binary_join(lists, ","), closing, "")


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


def _base64(array: pa.Array) -> pa.Array:
    return pa.array(
        [None if each is None else base64.b64encode(each).decode() for each in array.to_pylist()], pa.string()
    )
