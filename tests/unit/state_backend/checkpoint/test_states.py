"""Operators of Spark 3.5, which names none in its checkpoints."""

from __future__ import annotations

import pyarrow as pa
import pytest

from state_backend.checkpoint.schemas import StoreSchema
from state_backend.checkpoint.states import infer_operator


@pytest.mark.parametrize(
    ("key", "operator"),
    [(pa.null(), "globalLimit"), (pa.string(), "stateStoreSave")],
    ids=["a limit", "an aggregation with the same names"],
)
def test_a_limit_is_told_from_an_aggregation_by_its_key(key: pa.DataType, operator: str) -> None:
    schema = StoreSchema(None, pa.struct([("key", key)]), pa.struct([("value", pa.int64())]))
    assert infer_operator({"default": [schema]}) == (operator, 0)
