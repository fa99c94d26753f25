"""A query changes between two runs on one checkpoint: compatible changes continue, others are refused at the start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import sparkis
from compat.waiting import WAIT_S_MAX
from spark_hooks import cli
from sparkis import StateDescriptor
from state_backend.model.errors import DescriptorError
from tests.spark.micro_batches import Batches, failure_of, start

Make = Callable[[str], Batches]

pytestmark = pytest.mark.usefixtures("endpoint")


def counted(rows: Batches) -> DataFrame:
    return rows.df.groupBy("k").agg(F.count("*").alias("n"), F.max("v").alias("v"))


def test_partitions_of_query_with_sink_change(spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    numbers = {f"k{number}": number for number in range(30)}
    for run, settings in enumerate(((2, 1), (7, 3), (3, 8))):
        rows.add(*({"k": key, "v": number + run} for key, number in numbers.items()))
        names = ("spark.sql.shuffle.partitions", "spark.sparkis.partitions")
        before = [spark.conf.get(name, None) for name in names]
        for name, value in zip(names, settings, strict=True):
            spark.conf.set(name, value)
        try:
            writer = sparkis.queryable(counted(rows), "s", key="k", value=["n", "v"], wait_for_visibility=True)
            start(writer, "spread", tmp_path / "checkpoint").stop()
        finally:
            for name, value in zip(names, before, strict=True):
                spark.conf.unset(name) if value is None else spark.conf.set(name, value)
        for key, number in numbers.items():
            assert client.hgetall(f"spread:s:{key}") == {"n": f"{run + 1}", "v": f"{number + run}"}


@pytest.mark.slow
def test_partitions_of_attached_query_change(spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    numbers = {f"k{number}": number for number in range(30)}
    for run, partitions in enumerate((2, 5)):
        rows.add(*({"k": key, "v": number + run} for key, number in numbers.items()))
        spark.conf.set("spark.sql.shuffle.partitions", partitions)
        try:
            writer = counted(rows).writeStream.format("noop").outputMode("update")
            start(writer, "plain", tmp_path / "checkpoint").stop()
            with sparkis.attach(checkpoint=tmp_path / "checkpoint", job="attachedTo", state="s") as attachment:
                assert attachment.wait(timeout_s=WAIT_S_MAX)
        finally:
            spark.conf.set("spark.sql.shuffle.partitions", 2)
        for key, number in numbers.items():
            assert client.hgetall(f"attachedTo:s:{key}") == {"count": f"{run + 1}", "max": f"{number + run}"}


def test_changed_key_has_changed_columns_and_types(
    client: redis.Redis, batches: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = batches("k string, v int, w int")
    rows.add({"k": "a", "v": 1, "w": 2}, {"k": "b", "v": 1, "w": 2})

    def run(df: DataFrame, value: list[str]) -> None:
        writer = sparkis.queryable(df, "s", key="k", value=value, kind="map", mode="append", wait_for_visibility=True)
        start(writer, "columns", tmp_path / "checkpoint").stop()

    run(rows.df, ["v", "w"])
    rows.add({"k": "a", "v": 3, "w": 4})
    run(rows.df.withColumn("x", F.lit("new")), ["v", "w", "x"])
    assert client.hgetall("columns:s:a") == {"v": "3", "w": "4", "x": "new"}
    assert client.hgetall("columns:s:b") == {"v": "1", "w": "2"}
    assert (
        "its value was 'v', 'w' and is now 'v', 'w', 'x'; a key has the new value from its next change on"
        in caplog.text
    )
    rows.add({"k": "a", "v": 5, "w": 6})
    with pytest.raises(DescriptorError, match="its kind was 'map' in this log and is now 'value'"):
        sparkis.queryable(rows.df, "s", key="k", value="v").queryName("columns").start(
            checkpointLocation=str(tmp_path / "checkpoint")
        )
    run(rows.df.withColumn("v", F.col("v") / 2), ["v"])
    assert client.hgetall("columns:s:a") == {"v": "2.5"}
    assert "the column 'v' was int and is now double" in caplog.text


def test_renamed_query_is_refused_and_continues_after_command(
    spark: SparkSession,
    endpoint: sparkis.ServedEndpoint,
    client: redis.Redis,
    batches: Make,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1}, {"k": "b", "v": 1})

    def run(name: str) -> None:
        writer = sparkis.queryable(counted(rows), "s", key="k", value="n", wait_for_visibility=True)
        start(writer, name, tmp_path / "checkpoint").stop()

    run("before")
    with pytest.raises(DescriptorError, match=f"run: sparkis rename --log {endpoint.log} before after"):
        run("after")
    assert not [query for query in spark.streams.active if query.name == "after"]
    assert cli.main(["rename", "--log", endpoint.log, "before", "after"]) == 0
    assert "job before is now after" in capsys.readouterr().out
    rows.add({"k": "a", "v": 1})
    run("after")
    assert client.mget("after:s:a", "after:s:b", "before:s:a") == ["2", "1", None]
    with pytest.raises(DescriptorError, match=r"sparkis rename --log .* after before"):
        run("before")


def test_user_function_may_publish_two_jobs_and_rename_none(
    client: redis.Redis, batches: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    jobs = ["one", "two"]

    def function(batch: DataFrame, batch_id: int) -> None:
        for job in jobs:
            sparkis.publish(
                batch, batch_id, StateDescriptor("s", key="k", value="v"), job=job, wait_for_visibility=True
            )

    def begin() -> StreamingQuery:
        writer = rows.df.writeStream.queryName("many").foreachBatch(function)
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    query = begin()
    query.processAllAvailable()
    jobs.append("three")  # beside the others, in the middle of the query: what changes from then on
    rows.add({"k": "b", "v": 2})
    with caplog.at_level(logging.WARNING):
        query.processAllAvailable()
    assert client.mget("one:s:a", "two:s:b", "three:s:a", "three:s:b") == ["1", "2", None, "2"]
    query.stop()
    jobs[:] = ["other", "two"]
    rows.add({"k": "c", "v": 3})
    assert "run: sparkis rename --log" in failure_of(begin())
