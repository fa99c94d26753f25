"""A log belongs to its query's checkpoint: what lacks keys, or will be begun anew, is said aloud."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkis
from compat.waiting import eventually
from state_backend.model.errors import DescriptorError
from tests.spark.micro_batches import Batches, start
from tests.spark.processes import status

Make = Callable[[str], Batches]


def rows_of(client: redis.Redis, job: str) -> list[dict[str, Any]]:
    """Return what STATE JOBS, STATE LAG and INFO say of a job."""
    (of_jobs,) = (row for row in client.execute_command("STATE", "JOBS") if row["name"] == job)
    (of_lag,) = (row for row in client.execute_command("STATE", "LAG") if row["job"] == job)
    return [of_jobs, of_lag, client.info("sparkis")[f"job_{job}"]]


def warnings_in(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [each for each in said if text in each]


def test_old_checkpoint_on_empty_log_is_incomplete(
    endpoint: sparkis.ServedEndpoint,
    client: redis.Redis,
    batches: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    """The server runs before the query comes: it has opened the job when there is no epoch yet."""
    events = batches("k string, v int")
    events.add({"k": "a", "v": 1}, {"k": "b", "v": 2})
    sums = events.df.groupBy("k").agg(F.sum("v").alias("sum"))
    elsewhere = sparkis.queryable(sums, "sum", key="k", value="sum", log=tmp_path / "another-log")
    start(elsewhere, "moved", tmp_path / "checkpoint").stop()
    assert not warnings_in(caplog, "moved")

    events.add({"k": "b", "v": 5})
    here = sparkis.queryable(sums, "sum", key="k", value="sum", wait_for_visibility=True)
    query = start(here, "moved", tmp_path / "checkpoint")
    assert client.mget("moved:sum:a", "moved:sum:b") == [None, "7"], "a nil where Spark has a value"
    assert [row["incomplete"] for row in rows_of(client, "moved")] == [1, 1, 1]
    assert "incomplete" in status("--url", endpoint.url).stdout
    (said,) = warnings_in(caplog, "job moved: the log")
    assert f"{endpoint.log} begins at epoch 1 of its query" in said
    query.stop()

    caplog.clear()
    events.add({"k": "c", "v": 1})
    whole = sparkis.queryable(sums, "sum", key="k", value="sum", mode="complete", wait_for_visibility=True)
    start(whole, "moved", tmp_path / "checkpoint")
    assert client.mget("moved:sum:a", "moved:sum:b", "moved:sum:c") == ["1", "7", "1"]
    assert [row["incomplete"] for row in rows_of(client, "moved")] == [0, 0, 0]


def test_age_and_lag_of_job_are_readable(client: redis.Redis, batches: Make, tmp_path: Path):
    events = batches("k string, v int")
    events.add({"k": "a", "v": 1})
    writer = sparkis.queryable(events.df, "s", key="k", value="v", mode="append", wait_for_visibility=True)
    start(writer, "aged", tmp_path / "checkpoint").stop()
    before = rows_of(client, "aged")
    after = eventually(lambda: rows_of(client, "aged"), lambda rows: rows[0]["age_ms"] > before[0]["age_ms"])
    for row in after:
        assert (row["lag_epochs"], row["lag_ms"]) == (0, 0)
        assert row["age_ms"] >= before[0]["age_ms"]
        assert row["committed_at"] == before[0]["committed_at"] != ""


def test_query_without_checkpoint_of_its_own_is_warned_of(
    spark: SparkSession,
    endpoint: sparkis.ServedEndpoint,
    batches: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    events = batches("k string, v int")

    def begin(job: str, **options: str) -> list[str]:
        writer = sparkis.queryable(events.df, "s", key="k", value="v", mode="append")
        writer.queryName(job).start(**options).stop()
        return warnings_in(caplog, f"job {job}: the query has no checkpointLocation")

    (said,) = begin("without")
    assert "next run will read all input again" in said
    assert not begin("given", checkpointLocation=str(tmp_path / "checkpoint"))
    spark.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "checkpoints"))
    try:
        assert not begin("settled")
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")


def test_serving_needs_log_that_is_named(spark: SparkSession, endpoint: sparkis.ServedEndpoint):
    spark.conf.unset("spark.sparkis.log")
    try:
        with pytest.raises(DescriptorError, match=r"needs a change log: pass log=.*or set spark\.sparkis\.log"):
            sparkis.serve(spark)
    finally:
        spark.conf.set("spark.sparkis.log", endpoint.log)
