"""The JSON of columns: the texts of their values. `tests/spark/test_types.py` compares both."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from state_backend.codec.column_text import YEAR_MONTH
from state_backend.codec.json_text import OF_KEYS, JsonForm, json_texts, plain_texts
from state_backend.codec.variant_text import MARK
from state_backend.model.errors import UnsupportedStateError


def test_null_fields_are_kept_or_left_out_and_no_row_is_lost():
    rows = pa.array([{"a": 1, "b": None}, {"a": None, "b": None}, None, {"a": 2, "b": 'q"\n'}])
    assert json_texts(rows).to_pylist() == ['{"a":1,"b":null}', '{"a":null,"b":null}', None, '{"a":2,"b":"q\\"\\n"}']
    assert json_texts(rows, JsonForm(keeps_nulls=False)).to_pylist() == ['{"a":1}', "{}", None, '{"a":2,"b":"q\\"\\n"}']


def test_times_are_their_texts() -> None:
    times = pa.array([1_000, 1_001, 123_456, 0, None], pa.timestamp("us", "UTC"))
    texts = ["1970-01-01T00:00:00.001Z", "1970-01-01T00:00:00.001001Z", "1970-01-01T00:00:00.123456Z"]
    quoted = [f'"{each}"' for each in [*texts, "1970-01-01T00:00:00Z"]]
    assert json_texts(times).to_pylist() == [*quoted, None]
    of_keys = json_texts(pa.StructArray.from_arrays([times], ["at"]), OF_KEYS).to_pylist()
    assert of_keys == [*(f'{{"at":{each}}}' for each in quoted), "{}"]
    maps = pa.array([[(each, 1)] for each in times[:4]], pa.map_(times.type, pa.int64()))
    assert json_texts(maps).to_pylist() == [f"{{{each}:1}}" for each in quoted]


def test_lists_and_maps_may_be_empty_and_sliced():
    lists = pa.array([[1], [], None, [2, None]], pa.list_(pa.int32()))
    assert json_texts(lists[1:]).to_pylist() == ["[]", None, "[2,null]"]
    maps = pa.array([[("a", 1.0)], [], None, [("b", None)]], pa.map_(pa.string(), pa.float64()))
    assert json_texts(maps[1:]).to_pylist() == ["{}", None, '{"b":null}']
    assert json_texts(maps).to_pylist()[0] == '{"a":1}'


def test_numbers_outside_json_are_quoted() -> None:
    numbers = pa.array([0.0, -0.0, 7.0, 1e10, 1e21, 1e-3, 1e-8, float("nan"), float("-inf"), None])
    texts = ["0", "-0", "7", "10000000000", "1e+21", "0.001", "1e-8", '"nan"', '"-inf"', None]
    assert json_texts(numbers).to_pylist() == texts
    decimals = pa.array([Decimal("0E-18"), Decimal("12345678901234567890.5"), None], pa.decimal128(38, 18))
    digits = ["0." + "0" * 18, "12345678901234567890.5" + "0" * 17]
    assert json_texts(decimals).to_pylist() == [*digits, None]
    assert json_texts(decimals, JsonForm(has_text_decimals=True)).to_pylist() == [
        *(f'"{each}"' for each in digits),
        None,
    ]


def test_years_after_9999_have_sign() -> None:
    """The signs are those of Spark 4.3."""
    kind = pa.struct([("t", pa.timestamp("us", "UTC")), ("n", pa.timestamp("us")), ("d", pa.date32())])
    instants = np.array(["12345-01-02T03:04:05.678901", "45678-01-02"], "datetime64[us]").astype(np.int64)
    days = np.array(["45678-01-02"], "datetime64[D]").astype(np.int32)
    columns = [pa.array(instants[:1]), pa.array(instants[1:]), pa.array(days)]
    rows = pa.StructArray.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, kind, strict=True)], fields=list(kind)
    )
    others = '"n":"+45678-01-02T00:00:00","d":"+45678-01-02"}'
    assert json_texts(rows).to_pylist() == [f'{{"t":"+12345-01-02T03:04:05.678901Z",{others}']


def micros(*times: str) -> pa.Array:
    return pa.array([int(np.datetime64(each, "us").astype(np.int64)) for each in times], pa.timestamp("us", "UTC"))


VARIANT = pa.struct([("value", pa.binary()), pa.field("metadata", pa.binary(), metadata=dict([MARK]))])
NAMES = b"\x01\x01\x00\x01a"  # one name, `a`
OBJECT = b"\x02\x01\x00\x00\x02\x0c\x07"  # of one field, whose value is the byte 7


def test_variant_is_written_as_json() -> None:
    decimal = b"\x20\x02" + (1250).to_bytes(4, "little")
    values = [
        (OBJECT, '{"a":7}'),
        (b"\x03\x02\x00\x02\x08" + OBJECT[-2:] + decimal, "[7,12.50]"),
        (b'\x05"', '"\\""'),
        (b"\x00", "null"),
        (b"\x1c" + np.float64(1e-7).tobytes(), "0.0000001"),
        (b"\x2c" + np.int32(15890).tobytes(), '"2013-07-04"'),
        (b"\x3c\x01\x00\x00\x00\xff", '"/w=="'),
    ]
    array = pa.array([*({"value": each, "metadata": NAMES} for each, _ in values), None], VARIANT)
    assert json_texts(array).to_pylist() == [*(text for _, text in values), None]
    in_texts = json_texts(array[1:2], JsonForm(has_text_decimals=True))
    assert in_texts.to_pylist() == ['[7,"12.50"]']
    same_names = pa.array([{"value": b"\xff", "metadata": b""}])
    assert json_texts(same_names).to_pylist() == ['{"value":"/w==","metadata":""}'], (
        "a struct of Spark's, not a variant"
    )


@pytest.mark.parametrize("end", range(len(OBJECT)))
def test_truncated_variant_is_error(end: int) -> None:
    array = pa.array([{"value": OBJECT[:end], "metadata": NAMES}], VARIANT)
    with pytest.raises(UnsupportedStateError, match="a variant has a form that sparkis does not know"):
        json_texts(array)


def test_keys_of_maps_that_are_nested_or_bytes_are_texts() -> None:
    nested = pa.array(
        [[({"a": "é", "b": None}, 1)], None], pa.map_(pa.struct({"a": pa.string(), "b": pa.int8()}), pa.int8())
    )
    assert json_texts(nested).to_pylist() == ['{"{\\"a\\":\\"é\\",\\"b\\":null}":1}', None]
    assert json_texts(pa.array([[(b"\xff", 1)]], pa.map_(pa.binary(), pa.int8()))).to_pylist() == ['{"/w==":1}']


# The type's name in the documentation, and some values.
EXAMPLES: list[tuple[str, pa.Array]] = [
    ("string", pa.array(["Oslo"])),
    ("integers", pa.array([7, -1])),
    ("float, double", pa.array([7.0, 0.1, 1e10, 1e21, float("nan"), float("-inf")])),
    ("decimal(20,2)", pa.array([Decimal("12.50")], pa.decimal128(20, 2))),
    ("boolean", pa.array([True])),
    ("timestamp", micros("2013-07-04T10:00:00", "2013-07-04T10:00:00.25", "10000-01-01")),
    ("timestamp_ntz", micros("2013-07-04T10:00:00.000001").cast(pa.timestamp("us"))),
    ("date", pa.array([15890, 2932897], pa.int32()).cast(pa.date32())),
    ("time", pa.array([36_000_250_000_000, 0], pa.time64("ns"))),
    ("struct", pa.array([{"a": 7.0, "b": None}])),
    ("array", pa.array([[7.0, None]])),
    ("map", pa.array([[(0, 7.0)]], pa.map_(pa.date32(), pa.float64()))),
    ("map with nested keys", pa.array([[({"a": 7}, 1)]], pa.map_(pa.struct({"a": pa.int8()}), pa.int8()))),
    ("map with binary keys", pa.array([[(b"\xff", 7)]], pa.map_(pa.binary(), pa.int8()))),
    (
        "interval day to second",
        pa.array([timedelta(days=1, hours=2, seconds=3.5), -timedelta(minutes=90), timedelta()], pa.duration("us")),
    ),
    ("interval year to month", pa.array([14, -14], pa.int32()).cast(YEAR_MONTH)),
    ("interval", pa.array([(14, -3, 4_000_000_000)], pa.month_day_nano_interval())),
    ("variant", pa.array([{"value": OBJECT, "metadata": NAMES}], VARIANT)),
]


def printed(texts: pa.Array) -> str:
    return ", ".join(f"`{each}`" for each in texts.to_pylist())


def test_documentation_shows_text_of_each_type() -> None:
    page = (Path(__file__).parents[4] / "docs" / "states.md").read_text()
    for name, values in EXAMPLES:
        in_json = json_texts(values)
        text = in_json if pa.types.is_nested(values.type) else plain_texts(values)
        assert f"| {name} | {printed(text)} | {printed(in_json)} |\n" in page
