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
from state_backend.codec.row_encoding import RowError, names_of

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
    return encoder.encoded(rows, 0, names_of([encoder.plan]))


def keys_of(of: dict[str, Any], **options: Any) -> list[bytes]:
    found: list[bytes] = encoded(AGGREGATION, of, **options).column("key").to_pylist()
    return found


def test_a_struct_may_precede_other_parts_of_a_key() -> None:
    place = {"city": "a:b", "floors": [1, None]}
    assert keys_of({"place": place, "side": "c:d"}) == [b'j:aggregation:{"city":"a:b","floors":[1,null]}:c:d']


def test_a_null_in_a_key_is_an_error_that_says_how_to_replace_it() -> None:
    with pytest.raises(RowError, match=r"'side' is null in 1 row.*--column side=\"coalesce\(side, \.\.\.\)\""):
        keys_of({"place": {}, "side": None})
    column = {"side": "coalesce(side, 'none')"}
    assert keys_of({"place": {}, "side": None}, columns=column, value="count") == [b"j:aggregation:{}:none"]


def test_several_columns_of_a_maps_own_key_are_a_json_object_or_parts_of_both() -> None:
    pair = {"key": {"user": "ann"}, "userKey": {"day": date(2026, 1, 2), "n": 3}}
    row = encoded(MAP, pair)
    assert (row["key"].to_pylist(), row["field"].to_pylist()) == ([b"j:m:ann"], [b'{"day":"2026-01-02","n":3}'])
    row = encoded(MAP, pair, key=("user", "day"), field="n")
    assert (row["key"].to_pylist(), row["field"].to_pylist()) == ([b"j:m:ann:2026-01-02"], [b"3"])
