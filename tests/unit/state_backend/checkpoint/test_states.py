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
def test_limit_is_distinguished_from_aggregation_by_its_key(key: pa.DataType, operator: str) -> None:
    schema = StoreSchema(None, pa.struct([("key", key)]), pa.struct([("value", pa.int64())]))
    assert infer_operator({"default": [schema]}) == (operator, 0)


@pytest.mark.parametrize(
    ("key", "value", "aggregations_have_keys", "operator"),
    [
        (["id"], ["id", "name"], False, "dedupe"),
        (["id"], ["name", "id"], False, "dedupe"),
        (["id"], ["id", "count"], True, "stateStoreSave"),
        (["id", "day"], ["id", "count"], False, "stateStoreSave"),
        (["count"], ["count"], False, "stateStoreSave"),
        ([], ["count"], False, "stateStoreSave"),
    ],
)
def test_deduplication_of_spark_before_3_3_1_is_known_by_key_columns_in_its_value(
    key: list[str], value: list[str], aggregations_have_keys: bool, operator: str
) -> None:
    columns = [pa.struct([(name, pa.int64()) for name in names]) for names in (key, value)]
    found = infer_operator({"default": [StoreSchema(None, *columns)]}, aggregations_have_keys=aggregations_have_keys)
    assert found == (operator, 0)
