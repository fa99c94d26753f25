"""The sink and the server under Spark Connect: foreachBatch functions run in a Python worker of the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from micro_batches import Batches, eventually, failure_of, start
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkis
from sparkis import StateDescriptor
from state_backend.change_log import ChangeLog
from state_backend.errors import DescriptorError

Make = Callable[[str], Batches]

STATE = StateDescriptor("s", key="k", value="v")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A session of Spark Connect, and its server in a JVM of this process, on a free port."""
    set_before = {name: os.environ.get(name) for name in ("PYSPARK_PYTHON", "PYTHONPATH", "SPARK_TESTING")}
    # The server's Python workers are to find what this process runs.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [set_before["PYTHONPATH"]])])
    os.environ["SPARK_TESTING"] = "1"  # a free port instead of 15002
    session = (
        SparkSession.builder.remote("local[2]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    yield session
    session.stop()
    for name, value in set_before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def lag(client: redis.Redis, job: str) -> dict[str, Any]:
    (found,) = (each for each in client.execute_command("STATE", "LAG") if each["job"] == job)
    return dict(found)


def test_a_query_of_a_connect_session_publishes_its_state(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v double, t timestamp")
    rows.add({"k": "a", "v": 1.5, "t": "2020-01-01T00:00:00Z"}, {"k": "b", "v": 2, "t": "2020-01-01T00:00:00Z"})
    rows.add({"k": "a", "v": 3.5, "t": "2020-01-01T00:01:00Z"})
    grouped = rows.df.groupBy("k").agg(F.max("v").alias("v"), F.max("t").alias("t"))
    writer = sparkis.queryable(
        grouped,
        StateDescriptor("max", key="k", value="v"),
        StateDescriptor("last", key="k", value=["v", "t"], where="v > 2"),
        mode="update",
        wait_for_visibility=True,
    )
    query = start(writer, "connected", tmp_path / "checkpoint")
    assert client.mget("connected:max:a", "connected:max:b") == ["3.5", "2"]
    assert client.hgetall("connected:last:a") == {"v": "3.5", "t": "2020-01-01T00:01:00Z"}
    assert client.exists("connected:last:b") == 0
    assert eventually(lambda: lag(client, "connected"), lambda told: not told["stale"])["applied"] == 1
    query.stop()
    eventually(lambda: lag(client, "connected"), lambda told: bool(told["stale"]))
