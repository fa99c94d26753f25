"""A query with a new checkpoint is shown once it has caught up: no client reads half a replay."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

import sparkis
from compat.waiting import READ_PAUSE_S, eventually
from state_backend.log.promotion import promote
from tests.spark.micro_batches import Batches, start
from tests.spark.processes import status

Make = Callable[[str], Batches]

# A query with this trigger runs one micro-batch, and waits with more input at hand.
ONE_BATCH = "1 hour"
ROUNDS = 4


def lag(client: redis.Redis, job: str) -> dict[str, Any]:
    (found,) = (row for row in client.execute_command("STATE", "LAG") if row["job"] == job)
    return dict(found)


def messages_about(caplog: pytest.LogCaptureFixture, job: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"job {job}: ")]


@pytest.fixture
def numbers(batches: Make) -> DataFrame:
    """Sums by key over some files, each a micro-batch: `a` comes to 10, and `b` is in the first file alone."""
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1}, {"k": "b", "v": 7})
    for number in range(2, ROUNDS + 1):
        rows.add({"k": "a", "v": number})
    return rows.df.groupBy("k").agg(F.sum("v").alias("sum"))


@pytest.fixture
def old_state(client: redis.Redis, numbers: DataFrame, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The name of a job that has seen all files, with a checkpoint that is gone."""
    job = f"job-{abs(hash(request.node.name))}"
    start(sum_of(numbers, wait_for_visibility=True), job, tmp_path / "old").stop()
    assert client.mget(f"{job}:sum:a", f"{job}:sum:b") == ["10", "7"]
    return job


def sum_of(df: DataFrame, **options: Any) -> DataStreamWriter:
    return sparkis.queryable(df, "sum", key="k", value="sum", **options)


def begin_anew(writer: DataStreamWriter, job: str, tmp_path: Path) -> StreamingQuery:
    return writer.queryName(job).option("checkpointLocation", str(tmp_path / "new")).start()


def test_no_client_reads_half_a_replay(
    endpoint: sparkis.ServedEndpoint,
    client: redis.Redis,
    numbers: DataFrame,
    old_state: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO, "sparkis")
    seen: set[tuple[str | None, ...]] = set()
    is_over = threading.Event()

    def read() -> None:
        with redis.Redis.from_url(endpoint.url, decode_responses=True) as reader:
            while not is_over.wait(READ_PAUSE_S):
                seen.add(tuple(reader.mget(f"{old_state}:sum:a", f"{old_state}:sum:b")))

    reading = threading.Thread(target=read)
    reading.start()
    generation = generation_of(client, old_state)
    query = begin_anew(sum_of(numbers), old_state, tmp_path)
    query.processAllAvailable()
    eventually(lambda: generation_of(client, old_state), lambda found: found != generation)
    is_over.set()
    reading.join()
    assert seen == {("10", "7")}
    assert lag(client, old_state)["held_back_epoch"] is None
    held, shown = messages_about(caplog, old_state)
    assert "readers keep the state of epoch 3" in held
    assert f"sparkis promote --log {endpoint.log} {old_state}" in held
    assert shown.endswith("the new state is visible from now on: no input is waiting")


def generation_of(client: redis.Redis, job: str) -> str:
    (found,) = (row for row in client.execute_command("STATE", "JOBS") if row["name"] == job)
    return str(found["generation"])


def test_held_back_generation_is_reported_and_can_be_shown_by_command(
    endpoint: sparkis.ServedEndpoint,
    client: redis.Redis,
    numbers: DataFrame,
    old_state: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO, "sparkis")
    writer = sum_of(numbers, wait_for_visibility=True).trigger(processingTime=ONE_BATCH)
    query = begin_anew(writer, old_state, tmp_path)
    held = eventually(lambda: lag(client, old_state), lambda row: row["held_back_epoch"] == 0)
    assert (held["applied"], held["lag_epochs"]) == (ROUNDS - 1, 0)
    assert held["held_back_since"].startswith("20")
    assert client.info("sparkis")[f"job_{old_state}"]["held_back_epoch"] == 0
    assert "epoch 0 of a new generation is held back" in status("--url", endpoint.url).stdout
    assert client.mget(f"{old_state}:sum:a", f"{old_state}:sum:b") == ["10", "7"]
    query.stop()
    assert client.get(f"{old_state}:sum:a") == "10", "without its driver it stays as it is"

    promote(endpoint.log, old_state)
    eventually(lambda: client.get(f"{old_state}:sum:a"), lambda value: value == "1")
    assert lag(client, old_state)["held_back_epoch"] is None


@pytest.mark.slow
def test_new_generation_is_shown_after_timeout(
    client: redis.Redis,
    numbers: DataFrame,
    old_state: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO, "sparkis")
    begin_anew(sum_of(numbers, catch_up_timeout=0.5).trigger(processingTime=ONE_BATCH), old_state, tmp_path)
    eventually(lambda: client.get(f"{old_state}:sum:a"), lambda value: value == "1")
    eventually(
        lambda: messages_about(caplog, old_state)[-1], lambda line: line.endswith("from now on: 0.5 s have passed")
    )


@pytest.mark.slow
def test_new_generation_is_shown_at_once_by_option(
    client: redis.Redis, numbers: DataFrame, old_state: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    begin_anew(sum_of(numbers, catch_up_timeout=0).trigger(processingTime=ONE_BATCH), old_state, tmp_path)
    eventually(lambda: client.get(f"{old_state}:sum:a"), lambda value: value == "1")
    assert not messages_about(caplog, old_state)


def test_query_ending_by_itself_has_caught_up(client: redis.Redis, numbers: DataFrame, old_state: str, tmp_path: Path):
    generation = generation_of(client, old_state)
    query = begin_anew(sum_of(numbers, catch_up_timeout=None).trigger(availableNow=True), old_state, tmp_path)
    query.awaitTermination()
    eventually(lambda: generation_of(client, old_state), lambda found: found != generation)
    assert client.mget(f"{old_state}:sum:a", f"{old_state}:sum:b") == ["10", "7"]


def never_resting_source() -> type[DataSource]:
    """Return a source with the offsets of a topic of Kafka's: a row and an offset a micro-batch, and always more.

    Made in a function, so that Spark's workers get all of it.
    """

    class Partition(DataSource):
        @classmethod
        def name(cls) -> str:
            return "partition"

        def schema(self) -> str:
            return "k string, v int"

        def simpleStreamReader(self, schema: Any) -> SimpleDataSourceStreamReader:
            return PartitionReader()

    class PartitionReader(SimpleDataSourceStreamReader):
        def initialOffset(self) -> dict[str, Any]:
            return {"topic": {"0": 0}}

        def read(self, start: dict[str, Any]) -> tuple[Iterator[tuple[str, int]], dict[str, Any]]:
            return iter([("a", 1)]), {"topic": {"0": start["topic"]["0"] + 1}}

        def readBetweenOffsets(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[tuple[str, int]]:
            return iter([("a", 1)] * (end["topic"]["0"] - start["topic"]["0"]))

    return Partition


@pytest.mark.slow
def test_new_generation_is_shown_when_its_sources_have_caught_up(
    spark: SparkSession, client: redis.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The source never rests: nothing else tells that what was there is read."""
    caplog.set_level(logging.INFO, "sparkis")
    spark.dataSource.register(never_resting_source())
    counted = spark.readStream.format("partition").load().groupBy("k").agg(F.sum("v").alias("sum"))

    def number() -> int:
        with suppress(redis.BusyLoadingError):  # the server is just opening the job
            return int(client.get("passing:sum:a") or 0)
        return 0

    query = start_passing(counted, tmp_path / "old")
    eventually(number, lambda seen: seen >= 3)
    query.stop()
    query.awaitTermination()
    before = eventually(number, lambda seen: seen == lag(client, "passing")["applied"] + 1)
    query = start_passing(counted, tmp_path / "passed")
    numbers = [before]
    while numbers[-1] <= before:
        numbers.append(number())
    query.stop()
    assert numbers == sorted(numbers), "no sum goes back"
    assert messages_about(caplog, "passing")[-1].endswith("its sources have passed the offsets of the old state")


def start_passing(df: DataFrame, checkpoint: Path) -> StreamingQuery:
    writer = sum_of(df, catch_up_timeout=None)
    return writer.queryName("passing").option("checkpointLocation", str(checkpoint)).start()
