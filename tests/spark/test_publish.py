"""`sparkis.publish` inside a foreachBatch function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import sparkis
from compat.waiting import eventually
from sparkis import StateDescriptor
from tests.spark.micro_batches import Batches, failure_of, start

Make = Callable[[str], Batches]

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("endpoint")]

STATE = StateDescriptor("s", key="k", value="v")


def run(
    batches: Batches, name: str, folder: Path, function: Callable[[DataFrame, int], None], mode: str = "append"
) -> StreamingQuery:
    writer = batches.df.writeStream.outputMode(mode).foreachBatch(function)
    return start(writer, name, folder / f"checkpoint-{name}")


def test_batch_is_published_beside_other_work_of_function(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1}, {"k": "b", "v": 2})
    rows.add()
    rows.add({"k": "a", "v": 3})
    seen: list[int] = []

    def function(batch: DataFrame, batch_id: int) -> None:
        seen.append(batch.count())
        sparkis.publish(batch.where("k = 'a'"), batch_id, "s", key="k", value="v", wait_for_visibility=True)

    query = run(rows, "own", tmp_path, function)
    assert seen == [2, 0, 1]
    assert client.mget("own:s:a", "own:s:b") == ["3", None]
    (job,) = (job for job in client.execute_command("STATE", "LAG") if job["job"] == "own")
    assert job["applied"] == query.lastProgress["batchId"] == 2


def test_query_of_another_session_is_live_while_it_runs_and_stale_when_it_has_ended(
    spark: SparkSession, client: redis.Redis, tmp_path: Path
):
    other = spark.newSession()
    other.conf.set("spark.sparkis.log", spark.conf.get("spark.sparkis.log"))
    rows = Batches(other, tmp_path / "input", "k string, v int")
    rows.add({"k": "a", "v": 1})

    def function(batch: DataFrame, batch_id: int) -> None:
        sparkis.publish(batch, batch_id, STATE, wait_for_visibility=True)

    def is_stale() -> int:
        (job,) = (job for job in client.execute_command("STATE", "LAG") if job["job"] == "elsewhere")
        return int(job["stale"])

    query = run(rows, "elsewhere", tmp_path, function)
    assert client.get("elsewhere:s:a") == "1"
    eventually(is_stale, lambda stale: stale == 0)
    query.stop()
    eventually(is_stale, lambda stale: stale == 1)


def test_second_call_in_one_batch_is_refused(
    client: redis.Redis, batches: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})

    def twice(batch: DataFrame, batch_id: int) -> None:
        for name in ("first", "second"):
            sparkis.publish(batch, batch_id, name, key="k", value="v", wait_for_visibility=True)

    message = failure_of(rows.df.writeStream.queryName("twice").foreachBatch(twice).start())
    assert "job 'twice': batch 0 was published twice" in message
    assert "pass all its states to one call" in message
    eventually(lambda: [message for message in caplog.messages if message.startswith("job 'twice': batch 0 was")])

    def union(batch: DataFrame, batch_id: int) -> None:
        grown = batch.withColumn("w", F.col("v") + 1).withColumn("isFirst", F.lit(True))
        both = grown.unionByName(grown.withColumn("isFirst", F.lit(False)))
        sparkis.publish(
            both,
            batch_id,
            StateDescriptor("first", key="k", value="v", where="isFirst"),
            StateDescriptor("second", key="k", value="w", where="NOT isFirst"),
            wait_for_visibility=True,
        )

    run(rows, "union", tmp_path, union)
    assert client.mget("union:first:a", "union:second:a") == ["1", "2"]


@pytest.mark.slow
def test_complete_mode_replaces_whole_state(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    rows.add({"k": "b", "v": 2})

    def whole(batch: DataFrame, batch_id: int) -> None:
        sparkis.publish(batch, batch_id, STATE, mode="complete", wait_for_visibility=True)

    run(rows, "whole", tmp_path, whole)
    assert client.mget("whole:s:a", "whole:s:b") == [None, "2"]


def test_given_job_name_wins_over_spark_job_group(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    for value in range(2):
        rows.add({"k": "a", "v": value})

    def function(batch: DataFrame, batch_id: int) -> None:
        batch.sparkSession.sparkContext.setJobGroup(f"group {batch_id}", "my own words")
        sparkis.publish(batch, batch_id, STATE, wait_for_visibility=True)

    run(rows, "grouped", tmp_path, function)
    assert client.get("grouped:s:a") == "1"

    def named(batch: DataFrame, batch_id: int) -> None:
        sparkis.publish(batch, batch_id, STATE, job="given", wait_for_visibility=True)

    run(rows, "a name with spaces", tmp_path, named)
    assert client.get("given:s:a") == "1"


def test_restarted_query_continues_and_its_states_may_grow(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    states = [STATE]

    def function(batch: DataFrame, batch_id: int) -> None:
        sparkis.publish(batch, batch_id, *states, wait_for_visibility=True)

    run(rows, "grows", tmp_path, function).stop()
    states.append(StateDescriptor("t", key="k", value="v"))
    rows.add({"k": "b", "v": 2})
    query = run(rows, "grows", tmp_path, function)
    assert client.mget("grows:s:a", "grows:s:b", "grows:t:b") == ["1", "2", "2"]
    states.append(StateDescriptor("u", key="k", value="v"))  # between two batches of one run
    rows.add({"k": "c", "v": 3})
    query.processAllAvailable()
    assert client.mget("grows:s:c", "grows:t:c", "grows:u:c") == ["3", "3", "3"]


def test_second_query_of_one_job_is_refused_unless_it_takes_over(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})

    def function(batch: DataFrame, batch_id: int, *, takeover: bool = False) -> None:
        sparkis.publish(batch, batch_id, STATE, job="shared", wait_for_visibility=True, takeover=takeover)

    older = run(rows, "older", tmp_path, function)
    refused = rows.df.writeStream.queryName("refused").foreachBatch(function).start()
    assert f"is being written by query {older.id}" in (message := failure_of(refused))
    assert "takeover=True" in message
    assert older.isActive
    newer = run(rows, "newer", tmp_path, partial(function, takeover=True))
    rows.add({"k": "a", "v": 2})
    assert "job 'shared' in the log" in (message := failure_of(older))
    assert "Two queries with one name" in message
    newer.processAllAvailable()
    # Held back until it has caught up, which is looked up once a second.
    eventually(lambda: client.get("shared:s:a"), lambda value: value == "2")


@pytest.mark.parametrize(
    ("arguments", "options", "complaint"),
    [
        ((), {"key": "k", "value": "nope"}, "value= names the column 'nope'"),
        (("s", "t"), {}, "give several states as sparkis.StateDescriptor"),
        (("s",), {"key": "k", "value": "v", "mode": "replace"}, "mode= is one of 'update', 'append', 'complete'"),
        (("s",), {"key": "k", "value": "v", "job": "a:b"}, "the job name 'a:b'"),
    ],
)
def test_wrong_call_fails_batch(batches: Make, arguments: tuple[str, ...], options: dict[str, str], complaint: str):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})

    def function(batch: DataFrame, batch_id: int) -> None:
        sparkis.publish(batch, batch_id, *(arguments or ("s",)), **options)

    assert complaint in failure_of(rows.df.writeStream.queryName("wrong").foreachBatch(function).start())


def test_query_without_name_needs_one(batches: Make):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    query = rows.df.writeStream.foreachBatch(lambda batch, batch_id: sparkis.publish(batch, batch_id, STATE)).start()
    assert "the query has no name" in failure_of(query)


def test_publish_outside_of_micro_batch_names_alternative(spark):
    with pytest.raises(sparkis.SparkisError, match=r"outside of a streaming query's foreachBatch.*LogWriter"):
        sparkis.publish(spark.range(1), 0, "s", key="id", value="id")
