"""Arrow columns as values of JSON, for people and scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pyarrow as pa

from state_backend.codec.column_text import readable_text
from state_backend.codec.json_text import plain_texts

# A whole float below this number has no exponent in its text, as in `column_text`.
INTEGERS_MAX = 1e21


def plain_values(array: pa.Array) -> list[Any]:
    """Return a column as values of JSON.

    A struct is an object; a name that it repeats gets its position: `sum`, `sum_2`. Decimals, times, intervals and
    numbers that JSON lacks are texts. Bytes are text, if they are UTF-8, or `0x` and their digits. Bytes of a text
    that are not UTF-8 are U+FFFD.
    """
    kind = array.type
    if pa.types.is_struct(kind):
        names = unique_names(field.name for field in kind)
        columns = [plain_values(array.field(index)) for index in range(kind.num_fields)]
        rows: list[Any] = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        rows = rows if columns else [{} for _ in range(len(array))]
    elif pa.types.is_list(kind):
        elements = plain_values(array.values)
        rows = [elements[start:end] for start, end in pairwise(array.offsets.to_pylist())]
    elif pa.types.is_map(kind):
        keys, items = plain_values(array.keys), plain_values(array.items)
        rows = [
            {plain_text(key): item for key, item in zip(keys[start:end], items[start:end], strict=True)}
            for start, end in pairwise(array.offsets.to_pylist())
        ]
    elif pa.types.is_interval(kind):
        return [None if each is None else f"{each[0]} months {each[1]} days {each[2]} ns" for each in array.to_pylist()]
    elif pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_decimal(kind):
        return list(plain_texts(array).to_pylist())
    else:
        return [_plain(value) for value in readable_text(array).to_pylist()]
    return [row if is_valid else None for row, is_valid in zip(rows, array.is_valid().to_pylist(), strict=True)]


def plain_text(value: Any) -> str:
    """Return a value of `plain_values` as the name of an object's field: a text as it is, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def unique_names(names: Iterable[str]) -> list[str]:
    """Return names, with the position appended to those that come again."""
    found: list[str] = []
    for index, name in enumerate(names):
        found.append(name if name not in found else f"{name}_{index}")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        is_whole = value.is_integer() and abs(value) < INTEGERS_MAX
        return int(value) if is_whole else value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return f"0x{value.hex()}"
    return str(value) if isinstance(value, timedelta) else value
