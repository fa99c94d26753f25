"""A row has the same columns in every shape of a state, whichever of its columns are null.

Each run draws other rows. The seed is printed with a failure; SPARKIS_NULLS_SEED=N draws its rows again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random, randrange
from typing import Any

import pytest
import redis
from pyspark import cloudpickle
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import sparkis
from compat.waiting import WAIT_S_MAX
from spark_hooks.cli import main
from sparkis import AttachedState, StateDescriptor
from tests.spark.micro_batches import Batches, Settings, start

Make = Callable[[str], Batches]

PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"
SEED = int(os.environ.get("SPARKIS_NULLS_SEED") or randrange(1 << 32))
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
    print(f"SPARKIS_NULLS_SEED={SEED}")
    found = rows(Random(SEED))
    source = batches(f"k string, {', '.join(f'{name} {kind}' for name, kind in KINDS.items())}")
    source.add(*({"k": key, **row} for key, row in found.items()))
    return source, found


@pytest.mark.usefixtures("endpoint")
def test_sink_and_table_keep_row_unless_all_its_columns_are_null(
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
    for state in ("value", "hash"):
        table = {each["k"]: each for each in sparkis.read_table(log, "nulls", state).to_pylist()}
        for key, row in found.items():
            assert (table.get(key) is None) == (not row), (state, key)
            shown = {name: table[key][name] is not None for name in KINDS} if row else {}
            assert [name for name, is_there in shown.items() if is_there] == list(row), (state, key)
    assert set(by_key) == {key.encode() for key, row in found.items() if row}


@pytest.mark.parametrize("reader", ["files", pytest.param("spark", marks=pytest.mark.slow)])
def test_attachment_keeps_row_unless_all_its_columns_are_null(
    client: redis.Redis,
    endpoint,
    given: tuple[Batches, dict[str, dict[str, object]]],
    tmp_path: Path,
    reader: str,
    capsys: pytest.CaptureFixture[str],
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
        shown = got(tmp_path / "checkpoint", key, capsys)["aggregation"]  # all buffers have one name
        assert list(shown.values()) == list((object_of(row) or dict.fromkeys(KINDS)).values())
    attachment.stop()


class Keeper(StatefulProcessor):
    """Keeps a key's row as a value, as the elements of a list and as the items of a map."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        schema = ", ".join(f"{name} {kind}" for name, kind in KINDS.items())
        self.value, self.items = handle.getValueState("value", schema), handle.getListState("items", schema)
        self.fields = handle.getMapState("fields", "name string", schema)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            kept = tuple(row[name] for name in KINDS)
            self.value.update(kept)
            self.items.put([kept])
            self.fields.updateValue((key[0],), kept)
        yield Row(k=key[0])


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Spark's workers cannot import this module


def got(checkpoint: Path, key: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what `sparkis get` prints of a key, with decimals as texts."""
    assert main(["get", str(checkpoint), key, "--json-decimals", "text"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("endpoint")
def test_processor_and_get_keep_row_unless_all_its_columns_are_null(
    client: redis.Redis,
    spark: SparkSession,
    settings: Settings,
    given: tuple[Batches, dict[str, dict[str, object]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    settings({"spark.sql.streaming.stateStore.providerClass": PROVIDER, CHANGELOG: "true"})
    source, found = given
    text = {"json_decimals": "text"}
    states = {
        "object": AttachedState(variable="value", kind="value", **text),
        "hash": AttachedState(variable="value", **text),
        "list": AttachedState(variable="items", **text),
        "map": AttachedState(variable="fields", **text),
    }
    declared = sparkis.queryable_processor(Keeper(), states=states)
    rows_of = source.df.groupBy("k").transformWithState(declared, "k string", "append", "none")
    query = start(rows_of.writeStream.format("noop").outputMode("append"), "kept", tmp_path / "checkpoint")
    attachment = sparkis.attach(query)
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    empty = dict.fromkeys(KINDS)
    for key, row in found.items():
        expected = object_of(row)
        stored = [client.get(f"kept:object:{key}"), client.hget(f"kept:map:{key}", key)]
        assert [None if each is None else json.loads(each) for each in stored] == [expected] * 2, key
        elements = client.lrange(f"kept:list:{key}", 0, -1)
        assert [json.loads(each) for each in elements] == ([expected] if row else []), key
        assert client.hgetall(f"kept:hash:{key}") == {name: str(TEXTS[name]) for name in row}, key
        assert got(tmp_path / "checkpoint", key, capsys) == {
            "fields": {key: expected or empty},
            "items": [expected or empty],
            "value": expected or empty,
        }
