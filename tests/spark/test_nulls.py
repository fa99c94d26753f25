"""A row has the same columns in every shape of a state, whichever of its columns are null."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import redis
from pyspark.sql import functions as F

import sparkis
from sparkis import StateDescriptor
from tests.spark.micro_batches import Batches, start

Make = Callable[[str], Batches]

SEED = 20
KINDS = {"a": "int", "b": "string", "c": "decimal(30,10)", "d": "timestamp"}
VALUES = {"a": 7, "b": 'q"', "c": "12345678901234567890.5", "d": "2024-01-01T00:00:00.000001Z"}
TEXTS = {**VALUES, "c": "12345678901234567890.5000000000"}
ROWS = [f"k{n}" for n in range(40)]


def rows(random: Random) -> dict[str, dict[str, object]]:
    """Return rows with random columns; the others are null. Some rows have none."""
    return {key: {name: VALUES[name] for name in KINDS if random.random() < 0.5} for key in ROWS}


def object_of(row: dict[str, object]) -> dict[str, object] | None:
    return {name: TEXTS[name] if name in row else None for name in KINDS} if row else None


@pytest.fixture
def given(batches: Make) -> tuple[Batches, dict[str, dict[str, object]]]:
    found = rows(Random(SEED))
    source = batches(f"k string, {', '.join(f'{name} {kind}' for name, kind in KINDS.items())}")
    source.add(*({"k": key, **row} for key, row in found.items()))
    return source, found


@pytest.mark.usefixtures("endpoint")
def test_a_sink_and_a_table_keep_a_row_unless_all_its_columns_are_null(
    client: redis.Redis, spark, given: tuple[Batches, dict[str, dict[str, object]]], tmp_path: Path
):
    source, found = given
    names = list(KINDS)
    writer = sparkis.queryable(
        source.df,
        StateDescriptor("value", key="k", value=names, kind="value", json_decimals="text"),
        StateDescriptor("field", key_format="nulls-field", field="k", value=names, json_decimals="text"),
        StateDescriptor("list", key="k", value=names, kind="list", order_by="k", json_decimals="text"),
        StateDescriptor("hash", key="k", value=names),
        mode="append",
        wait_for_visibility=True,
    )
    start(writer, "nulls", tmp_path / "checkpoint")
    log = spark.conf.get("spark.sparkis.log")
    by_key = {each["k"]: each for each in sparkis.read_table(log, "nulls", "value", raw=True).to_pylist()}
    by_name = client.hgetall("nulls-field")
    for key, row in found.items():
        expected = object_of(row)
        stored = [client.get(f"nulls:value:{key}"), by_name.get(key), *client.lrange(f"nulls:list:{key}", 0, -1)]
        assert [None if each is None else json.loads(each) for each in stored] == [expected] * (3 if row else 2)
        assert client.hgetall(f"nulls:hash:{key}") == {name: str(TEXTS[name]) for name in row}
    assert set(by_key) == {key.encode() for key, row in found.items() if row}


@pytest.mark.parametrize("reader", ["files", "spark"])
def test_an_attachment_keeps_a_row_unless_all_its_columns_are_null(
    client: redis.Redis, endpoint, given: tuple[Batches, dict[str, dict[str, object]]], tmp_path: Path, reader: str
):
    source, found = given
    first = source.df.groupBy("k").agg(*(F.max(name).alias(name) for name in KINDS))
    query = start(first.writeStream.outputMode("update").format("noop"), f"nulls-{reader}", tmp_path / "checkpoint")
    attachment = sparkis.attach(query, state="s", kind="value", reader=reader)
    assert attachment.wait()
    for key, row in found.items():
        stored = client.get(f"nulls-{reader}:s:{key}")
        loaded = None if stored is None else json.loads(stored, parse_float=str)
        assert loaded == object_of(row)
    attachment.stop()
