"""The sink on executors that are processes of their own, as on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from micro_batches import Batches, local_session, start
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkis
from resp_server import children


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A cluster of two executors with a core each; they find this code as this process does."""
    session = local_session(
        "local-cluster[2,1,1024]",
        **{
            "spark.executor.memory": "512m",
            "spark.executorEnv.PYTHONPATH": children.environment()["PYTHONPATH"],
        },
    )
    yield session
    session.stop()


def test_executors_write_what_the_driver_commits(spark: SparkSession, tmp_path: Path):
    endpoint = sparkis.serve(spark, log=tmp_path / "log")
    rows = Batches(spark, tmp_path / "input", "k string, v long, pad string")
    for batch in range(2):
        rows.add(*({"k": f"k{i % 300}", "v": i * batch, "pad": "x" * 600} for i in range(900)))
    sums = rows.df.groupBy("k").agg(F.sum("v").alias("sum"), F.max("pad").alias("pad"), F.count("*").alias("n"))
    writer = sparkis.queryable(
        sums,
        sparkis.StateDescriptor("sum", key="k", value="sum"),
        sparkis.StateDescriptor("pad", key="k", value=["pad", "n"]),
        wait_for_visibility=True,
    )
    query = start(writer, "job", tmp_path / "checkpoint")

    files = list((tmp_path / "log" / "job" / query.id / "changes").iterdir())
    assert len(files) == 2 * 2  # two micro-batches, two executors: the maps do not fit into the epoch
    table = rows.as_table().groupBy("k").agg(F.sum("v").alias("sum"), F.count("*").alias("n")).collect()
    with redis.Redis.from_url(endpoint.url, decode_responses=True) as client:
        assert client.dbsize() == 2 * len(table) == 600
        assert {row.k: client.get(f"job:sum:{row.k}") for row in table} == {row.k: str(row.sum) for row in table}
        assert client.hgetall("job:pad:k7") == {"pad": "x" * 600, "n": "6"}
    query.stop()
    endpoint.stop()
