"""The JSON of columns: that of Spark's `to_json`. `tests/spark/test_attach_files.py` compares them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from state_backend.codec.column_text import any_text
from state_backend.codec.json_text import OF_KEYS, JsonForm, json_texts


def test_fields_that_are_null_are_kept_or_left_out_and_no_row_is_lost():
    rows = pa.array([{"a": 1, "b": None}, {"a": None, "b": None}, None, {"a": 2, "b": 'q"\n'}])
    assert json_texts(rows).to_pylist() == ['{"a":1,"b":null}', '{"a":null,"b":null}', None, '{"a":2,"b":"q\\"\\n"}']
    assert json_texts(rows, JsonForm(keeps_nulls=False)).to_pylist() == ['{"a":1}', "{}", None, '{"a":2,"b":"q\\"\\n"}']


def test_times_that_differ_in_microseconds_differ_in_the_text_of_a_key():
    times = pa.array([1_000, 1_001, 123_456, None], pa.timestamp("us", "UTC"))
    rows = pa.StructArray.from_arrays([times], ["at"])
    of_keys = json_texts(rows, JsonForm(keeps_nulls=False, has_micros=True)).to_pylist()
    assert of_keys == [f'{{"at":"1970-01-01T00:00:00.{each}Z"}}' for each in ("001", "001001", "123456")] + ["{}"]
    assert json_texts(times).to_pylist() == [f'"1970-01-01T00:00:00.{each}Z"' for each in ("001", "001", "123")] + [
        None
    ]


def test_bytes_that_are_not_utf8_are_replaced_in_values_and_stay_in_keys():
    texts = any_text(pa.array([b"a", b'\xe9"\n', None], pa.binary()))
    rows = pa.StructArray.from_arrays([texts], ["k"])
    assert json_texts(rows).to_pylist() == ['{"k":"a"}', '{"k":"\ufffd\\"\\n"}', '{"k":null}']
    of_keys = json_texts(rows, OF_KEYS).cast(pa.binary()).to_pylist()
    assert of_keys == [b'{"k":"a"}', b'{"k":"\xe9\\"\\n"}', b"{}"]


def test_lists_and_maps_may_be_empty_and_sliced():
    lists = pa.array([[1], [], None, [2, None]], pa.list_(pa.int32()))
    assert json_texts(lists[1:]).to_pylist() == ["[]", None, "[2,null]"]
    maps = pa.array([[("a", 1.0)], [], None, [("b", None)]], pa.map_(pa.string(), pa.float64()))
    assert json_texts(maps[1:]).to_pylist() == ["{}", None, '{"b":null}']


def test_floats_are_written_as_java_does():
    numbers = pa.array([0.0, -0.0, 1.0, 1e7, 123456.5, 1e-3, 1e-4, 1e300, float("nan"), float("-inf")])
    texts = ["0.0", "-0.0", "1.0", "1.0E7", "123456.5", "0.001", "1.0E-4", "1.0E300", '"NaN"', '"-Infinity"']
    assert json_texts(numbers).to_pylist() == texts


def test_years_after_9999_have_a_sign() -> None:
    """The texts of Spark 4.3's to_json."""
    kind = pa.struct([("t", pa.timestamp("us", "UTC")), ("n", pa.timestamp("us")), ("d", pa.date32())])
    instants = np.array(["12345-01-02T03:04:05.678901", "45678-01-02"], "datetime64[us]").astype(np.int64)
    days = np.array(["45678-01-02"], "datetime64[D]").astype(np.int32)
    columns = [pa.array(instants[:1]), pa.array(instants[1:]), pa.array(days)]
    rows = pa.StructArray.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, kind, strict=True)], fields=list(kind)
    )
    others = '"n":"+45678-01-02T00:00:00.000","d":"+45678-01-02"}'
    assert json_texts(rows).to_pylist() == [f'{{"t":"+12345-01-02T03:04:05.678Z",{others}']
    assert json_texts(rows, OF_KEYS).to_pylist() == [f'{{"t":"+12345-01-02T03:04:05.678901Z",{others}']
