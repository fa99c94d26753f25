"""Rows of a checkpoint as change records: keys that have parts of any type."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from state_backend.attach.columns import columns_of
from state_backend.attach.state_encoder import StateEncoder
from state_backend.attach.states import AttachedState
from state_backend.checkpoint.records import RecordType
from state_backend.checkpoint.schemas import KeyEncoding
from state_backend.checkpoint.states import TRANSFORMS, State, StateForm
from state_backend.codec.row_encoding import RowError, SkippedRows, names_of
from state_backend.model.records import Op

KEY = pa.struct({"place": pa.struct({"city": pa.string(), "floors": pa.list_(pa.int32())}), "side": pa.string()})
VALUE = pa.struct({"count": pa.int64()})


AGGREGATION = State(
    0, "stateStoreSave", "aggregation", StateForm.PLAIN, "default", None, KEY, VALUE, encoding=KeyEncoding()
)
MAP = replace(
    AGGREGATION,
    operator_name=TRANSFORMS[0],
    name="m",
    form=StateForm.MAP,
    key=pa.struct(
        {"key": pa.struct({"user": pa.string()}), "userKey": pa.struct({"day": pa.date32(), "n": pa.int32()})}
    ),
)


def encoded(state: State, of: dict[str, Any], **options: Any) -> pa.RecordBatch:
    """Return the change record of a row with some key."""
    encoder = StateEncoder.of(columns_of(state, state.name), AttachedState(**options), "j")
    ops = pa.array(np.full(1, RecordType.PUT, np.uint8))
    columns = [ops, pa.array([of], state.key), pa.array([{"count": 1}], VALUE)]
    rows = pa.RecordBatch.from_arrays(columns, ["op", "key", "value"])
    return encoder.encoded(rows, 0, names_of([encoder.plan]), SkippedRows())


def keys_of(of: dict[str, Any], **options: Any) -> list[bytes]:
    found: list[bytes] = encoded(AGGREGATION, of, **options).column("key").to_pylist()
    return found


def test_struct_may_precede_other_parts_of_key() -> None:
    place = {"city": "a:b", "floors": [1, None]}
    assert keys_of({"place": place, "side": "c:d"}) == [b'j:aggregation:{"city":"a:b","floors":[1,null]}:c:d']


def test_error_of_null_in_key_names_coalesce() -> None:
    with pytest.raises(RowError, match=r"'side' is null in 1 row.*--column side=\"coalesce\(side, \.\.\.\)\""):
        keys_of({"place": {}, "side": None}, on_bad_key="fail")


def rows_of(state: State, given: list[tuple[RecordType, dict[str, Any], Any]]) -> pa.RecordBatch:
    ops = pa.array(np.array([op for op, _, _ in given], np.uint8))
    kind = pa.list_(state.value) if state.is_list else state.value
    columns = [ops, pa.array([key for _, key, _ in given], state.key), pa.array([each for _, _, each in given], kind)]
    return pa.RecordBatch.from_arrays(columns, ["op", "key", "value"])


def test_row_with_null_or_separator_in_its_key_is_left_out_and_counted() -> None:
    state = replace(AGGREGATION, key=pa.struct({"a": pa.string(), "b": pa.string()}))
    encoder = StateEncoder.of(columns_of(state, state.name), AttachedState(), "j")
    keys = [("x", "y"), (None, "y"), ("x:y", "z"), ("x", "y:z"), ("u", None)]
    given = [(RecordType.PUT, {"a": a, "b": b}, {"count": number}) for number, (a, b) in enumerate(keys)]
    skipped = SkippedRows()
    found = encoder.encoded(rows_of(state, given), 0, names_of([encoder.plan]), skipped)
    assert found.column("key").to_pylist() == [b"j:aggregation:x:y", b"j:aggregation:x:y:z"]
    assert found.column("value").to_pylist() == [b"0", b"3"]
    assert (skipped.count, "'a' is null in 1 row" in skipped.example) == (3, True)
    skipped = SkippedRows()
    assert encoder.encoded(rows_of(state, given[1:3]), 0, names_of([encoder.plan]), skipped).num_rows == 0
    assert skipped.count == 2


@pytest.mark.parametrize("separator", ["|", "::"])
def test_another_separator_makes_key_readable(separator: str) -> None:
    state = replace(AGGREGATION, key=pa.struct({"a": pa.string(), "b": pa.string()}))
    found = encoded(state, {"a": "x:y", "b": "z"}, separator=separator)
    assert found.column("key").to_pylist() == [b"j:aggregation:x:y" + separator.encode() + b"z"]


def test_null_elements_are_left_out_of_list_that_is_replaced_or_grows() -> None:
    kind = pa.struct({"v": pa.string()})
    state = replace(MAP, name="l", form=StateForm.LIST, is_list=True, key=pa.struct({"k": pa.string()}), value=kind)
    elements = {"a": ["1", None, "2"], "b": [None, "3"], "c": [None, None], "d": [None]}
    ops = {"a": RecordType.PUT, "b": RecordType.PUT, "c": RecordType.PUT, "d": RecordType.MERGE}
    given = [(ops[key], {"k": key}, [{"v": each} for each in of]) for key, of in elements.items()]
    encoder = StateEncoder.of(columns_of(state, state.name), AttachedState(), "j")
    skipped = SkippedRows()
    found = encoder.encoded(rows_of(state, given), 0, names_of([encoder.plan]), skipped)
    ops_of = list(zip(found.column("key").to_pylist(), found.column("op").to_pylist(), strict=True))
    assert ops_of == [(b"j:l:a", Op.PUT), (b"j:l:a", Op.APPEND), (b"j:l:b", Op.PUT), (b"j:l:c", Op.DELETE)]
    assert skipped.count == 5
    failing = StateEncoder.of(columns_of(state, state.name), AttachedState(on_bad_key="fail"), "j")
    with pytest.raises(RowError, match="an element of the list is null"):
        failing.encoded(rows_of(state, given), 0, names_of([failing.plan]), SkippedRows())
    column = {"side": "coalesce(side, 'none')"}
    assert keys_of({"place": {}, "side": None}, columns=column, value="count") == [b"j:aggregation:{}:none"]


def test_key_of_map_with_several_columns_is_json_or_split() -> None:
    pair = {"key": {"user": "ann"}, "userKey": {"day": date(2026, 1, 2), "n": 3}}
    row = encoded(MAP, pair)
    assert (row["key"].to_pylist(), row["field"].to_pylist()) == ([b"j:m:ann"], [b'{"day":"2026-01-02","n":3}'])
    row = encoded(MAP, pair, key=("user", "day"), field="n")
    assert (row["key"].to_pylist(), row["field"].to_pylist()) == ([b"j:m:ann:2026-01-02"], [b"3"])
