"""Rows of a checkpoint as change records: keys that have parts of any type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from state_backend.attach.columns import columns_of
from state_backend.attach.state_encoder import StateEncoder
from state_backend.attach.states import AttachedState
from state_backend.checkpoint.records import RecordType
from state_backend.checkpoint.schemas import KeyEncoding
from state_backend.checkpoint.states import State, StateForm
from state_backend.codec.row_encoding import RowError, names_of

KEY = pa.struct({"place": pa.struct({"city": pa.string(), "floors": pa.list_(pa.int32())}), "side": pa.string()})
VALUE = pa.struct({"count": pa.int64()})


def keys_of(*keys: dict[str, Any], **options: Any) -> list[bytes]:
    """Return the Redis keys of rows with some keys."""
    state = State(
        0, "stateStoreSave", "aggregation", StateForm.PLAIN, "default", None, KEY, VALUE, encoding=KeyEncoding()
    )
    encoder = StateEncoder.of(columns_of(state, "aggregation"), AttachedState(**options), "j")
    ops = pa.array(np.full(len(keys), RecordType.PUT, np.uint8))
    values = pa.array([{"count": 1}] * len(keys), VALUE)
    rows = pa.RecordBatch.from_arrays([ops, pa.array(keys, KEY), values], ["op", "key", "value"])
    found: list[bytes] = encoder.encoded(rows, 0, names_of([encoder.plan])).column("key").to_pylist()
    return found


def test_a_struct_may_precede_other_parts_of_a_key() -> None:
    place = {"city": "a:b", "floors": [1, None]}
    assert keys_of({"place": place, "side": "c:d"}) == [b'j:aggregation:{"city":"a:b","floors":[1,null]}:c:d']


def test_a_null_in_a_key_is_an_error_that_says_how_to_replace_it() -> None:
    with pytest.raises(RowError, match=r"'side' is null in 1 row.*--column side=\"coalesce\(side, \.\.\.\)\""):
        keys_of({"place": {}, "side": None})
    column = {"side": "coalesce(side, 'none')"}
    assert keys_of({"place": {}, "side": None}, columns=column, value="count") == [b"j:aggregation:{}:none"]
