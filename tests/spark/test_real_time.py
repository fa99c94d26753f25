"""A query in Real-Time Mode whose rows are readable before their commit, at a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkis
from compat.waiting import eventually
from tests.spark.micro_batches import Settings
from tests.spark.real_time import SETTINGS, MemoryRows


def test_values_are_readable_before_their_commit_and_unchanged_after_it(
    spark: SparkSession, endpoint: sparkis.ServedEndpoint, client: redis.Redis, settings: Settings, tmp_path: Path
) -> None:
    settings(SETTINGS)
    rows = MemoryRows(spark, "word string, n int, v double")
    counts = rows.df.groupBy(F.upper("word").alias("k")).agg(
        F.count("*").alias("n"), F.avg("v").alias("mean"), F.max("n").alias("top")
    )
    counts = counts.withColumn("half", F.col("mean") / 2)
    writer = sparkis.queryable(
        counts, "facts", key="k", value=["n", "mean", "half"], columns={"half": "mean / 2"}, freshness="record"
    )
    writer = writer.queryName("real").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(realTime="5 seconds").start()
    committed = redis.Redis.from_url(endpoint.url, decode_responses=True, single_connection_client=True)
    assert committed.execute_command("STATE", "FRESHNESS", "COMMITTED") == "OK"
    sent = 0
    seen_before: list[dict[str, str]] = []

    def one_more() -> bool:
        """Add a row; return whether a value was readable before its commit."""
        nonlocal sent
        sent += 1
        rows.add({"word": "a", "n": sent, "v": 0.1 * sent})
        expected = str(sent)
        found = eventually(lambda: client.hgetall("real:facts:A"), lambda each: each.get("n") == expected)
        if committed.hget("real:facts:A", "n") == expected:
            return False
        seen_before.append(found)
        return True

    try:
        eventually(one_more, bool)
        (fresh,) = seen_before
        assert eventually(lambda: committed.hgetall("real:facts:A"), lambda each: each.get("n") == fresh["n"]) == fresh
        assert float(fresh["half"]) == pytest.approx(float(fresh["mean"]) / 2)
        assert client.hgetall("real:facts:A") == fresh
    finally:
        committed.close()
        query.stop()
    attachment = sparkis.attach(query)
    assert attachment.error is None
