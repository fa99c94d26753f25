"""How far a state is behind its topic, as `STATE LAG` says, is what the offsets of an independent consumer say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import sparkis
from compat.waiting import eventually
from tests.kafka.broker import Broker, Message
from tests.kafka.messages import ends_read, wait_until_read

EVOLUTION = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
# Spark reads the first micro-batch at once. Then it looks for messages all the time, and leaves fewer than these alone.
HELD_BACK = 1000


def messages(spark: SparkSession, kafka: Broker, topic: str, name: str | None = None) -> DataFrame:
    """Return the messages of a topic; `name`: that of the source."""
    read = spark.readStream if name is None else spark.readStream.name(name)
    source = read.format("kafka").option("kafka.bootstrap.servers", kafka.address).option("subscribe", topic)
    source = source.option("startingOffsets", "earliest").option("kafka.metadata.max.age.ms", "200")
    return source.option("minOffsetsPerTrigger", HELD_BACK).option("maxTriggerDelay", "1h").load().select("key")


def start_sink(rows: DataFrame, checkpoint: Path, job: str) -> StreamingQuery:
    writer = sparkis.queryable(rows, "count", key="key", reduce="count", mode="append")
    return writer.queryName(job).option("checkpointLocation", str(checkpoint / job)).start()


def start_attached(rows: DataFrame, checkpoint: Path, job: str) -> StreamingQuery:
    counts = rows.groupBy(F.col("key").cast("string").alias("key")).count()
    writer = counts.writeStream.format("noop").outputMode("update").queryName(job)
    query = writer.option("checkpointLocation", str(checkpoint / job)).start()
    sparkis.attach(query)
    return query


def lags(client: redis.Redis) -> Mapping[str, dict[str, Any]]:
    """Return the rows of STATE LAG, by job."""
    return {row["job"]: row for row in client.execute_command("STATE LAG")}


def lag_and_offsets(client: redis.Redis, job: str) -> tuple[int | None, dict[str, int]]:
    """Return a job's lag, and that of each partition."""
    row = lags(client)[job]
    partitions = dict(zip(row["source_partitions"], row["source_partition_lags"], strict=True))
    return row["source_lag_records"], partitions


def behind(kafka: Broker, topic: str, query: StreamingQuery) -> tuple[int, dict[str, int]]:
    """Return the same, from the ends of the topic and the offsets that the query has read."""
    read = ends_read(query, topic)
    each = {f"{topic}/{number}": end - read.get(number, 0) for number, end in kafka.ends(topic).items()}
    return sum(each.values()), each


@pytest.mark.parametrize(("kind", "is_named"), [("sink", False), ("sink", True), ("attached", False)])
def test_lag_equals_that_of_consumer_also_after_partitions_were_added(
    kind: str, is_named: bool, spark: SparkSession, kafka: Broker, url: str, tmp_path: Path
) -> None:
    topic = f"lag-{kind}-{is_named}".lower()
    kafka.create(topic, 2)
    kafka.write(topic, [Message(b"v", b"%d" % number) for number in range(40)])
    spark.conf.set(EVOLUTION, str(is_named).lower())
    try:
        rows = messages(spark, kafka, topic, "orders" if is_named else None)
        query = (start_sink if kind == "sink" else start_attached)(rows, tmp_path, topic)
    finally:
        spark.conf.unset(EVOLUTION)
    with redis.Redis.from_url(url, decode_responses=True, protocol=3) as client:
        wait_until_read(query, kafka, topic)
        eventually(lambda: topic in lags(client), awaited="the job")
        eventually(
            lambda: lag_and_offsets(client, topic), lambda found: found == (0, {f"{topic}/0": 0, f"{topic}/1": 0})
        )
        kafka.write(topic, [Message(b"v", b"%d" % number) for number in range(20)])
        kafka.add_partitions(topic, 4)
        kafka.write(topic, [Message(b"v", b"%d" % number, number % 4) for number in range(40)])
        expected = behind(kafka, topic, query)
        assert expected[0] == 60 and len(expected[1]) == 4 and min(expected[1].values()) > 0
        eventually(lambda: lag_and_offsets(client, topic), lambda found: found == expected)
        kafka.write(topic, [Message(b"v", b"%d" % number) for number in range(HELD_BACK)])
        wait_until_read(query, kafka, topic)
        eventually(lambda: lag_and_offsets(client, topic), lambda found: found == (0, dict.fromkeys(expected[1], 0)))


def test_lag_in_time_grows_while_query_waits_for_messages(
    spark: SparkSession, kafka: Broker, url: str, tmp_path: Path
) -> None:
    kafka.create("lag-waiting")
    kafka.write("lag-waiting", [Message(b"v", b"k")])
    query = start_sink(messages(spark, kafka, "lag-waiting"), tmp_path, "lag-waiting")
    wait_until_read(query, kafka, "lag-waiting")
    with redis.Redis.from_url(url, decode_responses=True, protocol=3) as client:
        eventually(lambda: lags(client).get("lag-waiting", {}).get("source_lag_records"), lambda found: found == 0)
        before = lags(client)["lag-waiting"]
        later = eventually(
            lambda: lags(client)["lag-waiting"], lambda found: found["source_lag_at"] > before["source_lag_at"]
        )
    assert later["applied"] == before["applied"] and later["source_lag_records"] == 0


def test_other_sources_have_no_lag_and_hide_none(spark: SparkSession, kafka: Broker, url: str, tmp_path: Path) -> None:
    kafka.create("lag-mixed")
    kafka.write("lag-mixed", [Message(b"v", b"k") for _ in range(5)])
    rates = spark.readStream.format("rate").load().select(F.col("value").cast("string").cast("binary").alias("key"))
    start_sink(messages(spark, kafka, "lag-mixed").union(rates), tmp_path, "lag-mixed")
    start_sink(rates, tmp_path, "lag-rates")
    with redis.Redis.from_url(url, decode_responses=True, protocol=3) as client:
        eventually(lambda: len(lags(client)) == 2, awaited="both jobs")
        eventually(lambda: lag_and_offsets(client, "lag-mixed"), lambda found: found == (0, {"lag-mixed/0": 0}))
        eventually(lambda: lags(client)["lag-rates"]["applied"], lambda epoch: epoch > 0)
        assert lag_and_offsets(client, "lag-rates") == (None, {})
