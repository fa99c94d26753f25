"""The facts of a query's last finished micro-batch are a hash of its job, like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkis
from compat.waiting import WAIT_S_MAX
from sparkis import StateDescriptor
from state_backend.apply.replay import read_snapshot
from tests.spark.micro_batches import Batches, Settings, start

Make = Callable[[str], Batches]

pytestmark = [pytest.mark.usefixtures("endpoint"), pytest.mark.slow]

ROWS = "k string, n int, at timestamp"


def test_facts_are_those_that_spark_reports_of_micro_batch_before(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches(ROWS)
    for minute, count in enumerate((3, 5, 2)):
        rows.add(*({"k": f"k{n}", "n": n, "at": f"2024-05-01T10:0{minute}:00Z"} for n in range(count)))
    observed = rows.df.observe("quality", F.count("*").alias("rows"), F.max("n").alias("greatest"))
    counts = observed.withWatermark("at", "10 seconds").groupBy("k").count()
    writer = sparkis.queryable(
        counts, "count", key="k", value="count", mode="update", wait_for_visibility=True, progress=True
    )
    query = start(writer, "watched", tmp_path / "checkpoint")

    facts = client.hgetall("watched:_progress")
    before = query.recentProgress[-2]
    assert query.lastProgress.batchId == before.batchId + 1
    assert facts["batch"] == str(before.batchId)
    assert facts["run_id"] == str(query.runId)
    assert facts["timestamp"] == before.timestamp
    assert facts["batch_duration_ms"] == str(before.batchDuration)
    assert facts["input_rows"] == str(before.numInputRows)
    assert float(facts["processed_rows_per_second"]) == pytest.approx(before.processedRowsPerSecond)
    assert facts["watermark"] == before.eventTime["watermark"]
    assert facts["state_rows"] == str(before.stateOperators[0].numRowsTotal)
    metrics = before.observedMetrics["quality"]
    assert (facts["observed.quality.rows"], facts["observed.quality.greatest"]) == (
        str(metrics["rows"]),
        str(metrics["greatest"]),
    )

    assert client.type("watched:_progress") == "hash"
    assert "watched:_progress" in set(client.scan_iter("watched:*"))
    assert dict(client.hscan_iter("watched:_progress")) == facts


def test_replay_is_recognised_without_its_facts(
    spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = batches(ROWS)
    rows.add({"k": "a", "n": 1})
    rows.add({"k": "a", "n": 2})
    writer = sparkis.queryable(
        rows.df, StateDescriptor("sum", "k", "n", reduce="sum"), wait_for_visibility=True, progress=True
    )
    start(writer, "replayed", tmp_path / "checkpoint").stop()
    facts = client.hgetall("replayed:_progress")
    assert facts["batch"] == "0"
    for name in ("1", ".1.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    start(writer, "replayed", tmp_path / "checkpoint").stop()  # in a new run there are no facts yet
    assert client.get("replayed:sum:a") == "3"
    assert client.hgetall("replayed:_progress") == facts
    assert "made other changes" not in caplog.text


def test_job_without_progress_has_no_progress_key(
    spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path
):
    rows = batches(ROWS)
    rows.add({"k": "a", "n": 1})
    rows.add({"k": "a", "n": 2})
    start(sparkis.queryable(rows.df, "n", key="k", value="n", wait_for_visibility=True), "quiet", tmp_path / "c")
    assert set(client.scan_iter("quiet:*")) == {"quiet:n:a"}
    with pytest.raises(sparkis.SparkisError, match="'_mine' begins with _"):
        sparkis.queryable(rows.df, "_mine", key="k", value="n")
    with pytest.raises(sparkis.SparkisError, match=r"could make the key 'own:_progress'.*leave out progress="):
        sparkis.queryable(rows.df, "n", key_format="own:<k>", value="n", job="own", progress=True)


def test_session_may_ask_for_facts_of_all_its_queries_and_complete_mode_keeps_them(
    spark: SparkSession, client: redis.Redis, batches: Make, settings: Settings, tmp_path: Path
):
    rows = batches(ROWS)
    settings({"spark.sparkis.progress": "true"})
    counts = rows.df.groupBy("k").count()
    writer = sparkis.queryable(counts, "count", key="k", value="count", mode="complete", wait_for_visibility=True)
    rows.add({"k": "a"})
    rows.add({"k": "b"}, {"k": "a"})
    start(writer, "total", tmp_path / "checkpoint")
    assert client.hgetall("total:_progress")["input_rows"] == "1"
    assert client.mget("total:count:a", "total:count:b") == ["2", "1"]
    with read_snapshot(spark.conf.get("spark.sparkis.log"), "total", epoch=0) as shown:
        assert shown.applied.keys == {"count": 1}
    (job,) = (row for row in client.execute_command("STATE", "JOBS") if row["name"] == "total")
    assert job["incomplete"] == 0


def test_attached_states_show_facts_of_query(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches(ROWS)
    rows.add({"k": "a", "n": 1}, {"k": "b", "n": 2})
    counts = rows.df.groupBy("k").count().writeStream.outputMode("update").format("noop")
    query = start(counts, "followed", tmp_path / "checkpoint")
    with sparkis.attach(query, state="count", progress=True) as attachment:
        rows.add({"k": "a", "n": 3})
        query.processAllAvailable()
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        assert client.get("followed:count:a") == "2"
        facts = client.hgetall("followed:_progress")
        (told,) = [each for each in query.recentProgress if str(each.batchId) == facts["batch"]][-1:]
        assert (facts["input_rows"], facts["run_id"]) == (str(told.numInputRows), str(query.runId))
    with pytest.raises(sparkis.SparkisError, match="give the query, or leave it out"):
        sparkis.attach(checkpoint=tmp_path / "checkpoint", job="elsewhere", progress=True)
