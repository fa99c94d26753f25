"""`sparkis.attach` to an aggregation: how its state may be read; each kind of state is in `test_attach_operators`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from compat.waiting import WAIT_S_MAX, eventually
from sparkis import AttachedState
from tests.golden_checkpoints import NEWEST, unpack
from tests.spark.attaching import SCHEMA, Attach, attached, rocksdb, values_of_job
from tests.spark.micro_batches import Batches, Settings, start
from tests.unit.state_backend.attach.following import JOB, values_in_log

__all__ = ["attached"]

Make = Callable[[str], Batches]
MIN_BATCH_DURATION = "spark.sql.streaming.realTimeMode.minBatchDuration"
A, B = "real:aggregation:a", "real:aggregation:b"

pytestmark = pytest.mark.usefixtures("endpoint")


def aggregated(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").agg(F.count("*").alias("n"), F.avg("v").alias("mean"), F.min("n").alias("least"))


def windowed(rows: DataFrame) -> DataFrame:
    return rows.withWatermark("t", "1 minute").groupBy(F.window("t", "30 seconds"), "k").agg(F.max("v").alias("top"))


def test_stopped_querys_checkpoint_is_enough(
    spark: SparkSession, client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path
):
    rows = batches(SCHEMA)
    rows.add({"k": "a", "v": 1.5}, {"k": "b", "v": 2}, {"k": "a", "v": 2.5})
    writer = aggregated(rows.df).writeStream.outputMode("update").format("noop")
    start(writer, "stopped", tmp_path / "checkpoint").stop()
    attachment = attached(
        checkpoint=tmp_path / "checkpoint", job="elsewhere", state="mean", columns={"mean": "sum / _2"}
    )
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert values_of_job(client, "elsewhere") == {"elsewhere:mean:a": "2", "elsewhere:mean:b": "2"}
    rows.add({"k": "b", "v": 3})
    start(writer, "stopped", tmp_path / "checkpoint").stop()
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert client.get("elsewhere:mean:b") == "2.5"


@pytest.mark.slow
def test_window_may_be_field_of_hash_and_key_may_have_form_of_its_own(
    client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path
):
    rows = batches(SCHEMA)
    rows.add(
        {"k": "a", "v": 1.5, "t": "2026-01-01T00:00:01Z"},
        {"k": "a", "v": 2.5, "t": "2026-01-01T00:00:31Z"},
        {"k": None, "v": 3.5, "t": "2026-01-01T00:00:31Z"},
    )
    query = start(windowed(rows.df).writeStream.outputMode("update").format("noop"), "fields", tmp_path / "checkpoint")
    columns = {"k": "coalesce(k, 'none')"}
    attachment = attached(query, key_format="top/<k>", field="window", columns=columns)
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert client.hgetall("top/a") == {"2026-01-01T00:00:00Z": "1.5", "2026-01-01T00:00:30Z": "2.5"}
    assert client.hgetall("top/none") == {"2026-01-01T00:00:30Z": "3.5"}
    rows.add({"k": "a", "v": 4, "t": "2026-01-01T00:01:45Z"})
    query.processAllAvailable()
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert client.hgetall("top/a") == {"2026-01-01T00:00:30Z": "2.5", "2026-01-01T00:01:30Z": "4"}


@pytest.mark.slow
def test_query_in_real_time_mode_is_read_at_end_of_its_batches(
    spark: SparkSession, client: redis.Redis, settings: Settings, attached: Attach, tmp_path: Path
):
    # A task reads, another one aggregates: both run at the same time, on the session's two cores.
    settings({**rocksdb("2"), "spark.sql.shuffle.partitions": "1", MIN_BATCH_DURATION: "1s"})
    jvm: Any = spark._jvm
    source = jvm.org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream
    stream = source.singlePartition(spark._jsparkSession, jvm.org.apache.spark.sql.Encoders.STRING())
    texts = DataFrame(stream.toDF(), spark)
    writer = aggregated(texts.select(F.from_json("value", SCHEMA).alias("row")).select("row.*")).writeStream
    writer = writer.outputMode("update").format("console").queryName("real").option("numRows", "0")
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))

    def add(*rows: dict[str, Any]) -> None:
        stream.addData(jvm.PythonUtils.toSeq([json.dumps(row) for row in rows]))

    query = writer.trigger(realTime="2 seconds").start()
    try:
        add({"k": "a", "v": 1.5, "n": 3}, {"k": "b", "v": 2}, {"k": "a", "v": 2.5, "n": 2})
        attachment = attached(query, timeout_s=WAIT_S_MAX)
        a = {"n": "2", "mean": "2", "least": "2"}
        eventually(lambda: values_of_job(client, "real"), {A: a, B: {"n": "1", "mean": "2"}}.__eq__)
        add({"k": "b", "v": 4})
        eventually(lambda: values_of_job(client, "real"), {A: a, B: {"n": "2", "mean": "3"}}.__eq__)
    finally:
        query.stop()
    query = writer.trigger(processingTime="0 seconds").start()
    add({"k": "b", "v": 6})
    query.processAllAvailable()
    eventually(lambda: values_of_job(client, "real"), {A: a, B: {"n": "3", "mean": "4"}}.__eq__)
    assert attachment.error is None


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["aggregation", "window", "dedupe"])
def test_readers_show_same_state_of_real_time_mode(
    client: redis.Redis, attached: Attach, operation: str, tmp_path: Path
):
    checkpoint = unpack(NEWEST, f"real-time-{operation}", tmp_path)
    name = "side" if operation == "window" else "word"
    found = []
    for reader in ("files", "spark"):
        job = f"{operation}-{reader}"
        state = AttachedState(columns={name: f"coalesce({name}, 'none')"})
        assert attached(checkpoint=checkpoint, job=job, reader=reader, states=[state]).wait(timeout_s=WAIT_S_MAX)
        found.append({key.removeprefix(job): value for key, value in values_of_job(client, job).items()})
    assert found[0] == found[1] and len(found[0]) > 3


@pytest.mark.slow
def test_both_readers_keep_bytes_of_texts_that_are_not_utf8(attached: Attach, tmp_path: Path):
    checkpoint = unpack(NEWEST, "hdfs-not-utf8", tmp_path / "checkpoint")
    state = AttachedState(columns={"place": "concat('at-', text)"}, value=("max", "_1", "_3"))
    found = []
    for reader in ("files", "spark"):
        log = tmp_path / reader
        attachment = attached(checkpoint=checkpoint, job=JOB, log=log, reader=reader, states=[state])
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        found.append(values_in_log(log))
    assert found[0] == found[1]
    assert found[0][b"j:aggregation:\xe90:at-\xe90"][b"max"] == b"\xe90"


@pytest.mark.slow
def test_aggregate_of_whole_stream_is_one_key(client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path):
    rows = batches(SCHEMA)
    rows.add({"k": "a"}, {"k": "b"})
    counted = rows.df.agg(F.count("*").alias("n"))
    query = start(counted.writeStream.outputMode("update").format("noop"), "one", tmp_path / "checkpoint")
    assert attached(query, state="rows").wait(timeout_s=WAIT_S_MAX)
    assert values_of_job(client, "one") == {"one:rows:all": "2"}


@pytest.mark.slow
def test_buffer_named_as_key_is_found_by_position(client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path):
    rows = batches(SCHEMA)
    rows.add({"n": 7}, {"n": 7}, {"n": 8})
    counted = rows.df.groupBy(F.col("n").alias("count")).agg(F.count("*"))
    query = start(counted.writeStream.outputMode("update").format("noop"), "same", tmp_path / "checkpoint")
    assert attached(query).wait(timeout_s=WAIT_S_MAX)
    assert values_of_job(client, "same") == {"same:aggregation:7": "2", "same:aggregation:8": "1"}
