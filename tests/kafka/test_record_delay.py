"""The time from a message of Kafka until clients can read what it changes."""

from __future__ import annotations

import urllib.request
from collections import Counter
from pathlib import Path

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import SparkSession

import sparkis
from compat.conformance.servers import free_port, sparkis_server
from compat.waiting import eventually
from state_backend.model.clock import now_ms
from tests.kafka.broker import Broker, Message
from tests.kafka.messages import wait_until_read

METRIC = "sparkis_record_delay_seconds"
HOUR_MS = 3_600_000


def histogram(port: int) -> Counter[str]:
    """Return the samples of the histogram: buckets by their bounds, the count and the sum; empty if there is none."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    samples = [each for family in families if family.name == METRIC for each in family.samples]
    return Counter({each.labels.get("le", each.name): each.value for each in samples})


@pytest.mark.parametrize("time_type", ["CreateTime", "LogAppendTime"])
def test_delay_counts_each_message_once_from_its_timestamp_on(
    time_type: str, spark: SparkSession, kafka: Broker, tmp_path: Path
) -> None:
    topic, metrics_port = f"delay-{time_type}".lower(), free_port()
    kafka.create(topic, 2, message_timestamp_type=time_type)
    source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", kafka.address)
    rows = source.option("subscribe", topic).option("startingOffsets", "earliest").load()
    log = tmp_path / "log"
    log.mkdir()
    writer = sparkis.queryable(
        rows, "last", key="key", value="value", order_by="offset", mode="append", record_time="timestamp", log=log
    )
    kafka.write(topic, [Message(b"v", b"first")])
    query = writer.queryName(topic).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    wait_until_read(query, kafka, topic)
    # The server starts after the first epoch, which then does not count.
    with sparkis_server(tmp_path / "store", log, "--metrics", str(metrics_port)) as server:
        client = redis.Redis(port=server.port, decode_responses=True)
        eventually(lambda: client.exists(f"{topic}:last:first"), awaited="the first epoch")
        before = histogram(metrics_port)
        # A message of an hour ago, one of the future, and one without a time of its own, which has the producer's.
        times = (now_ms() - HOUR_MS, now_ms() + HOUR_MS, 0)
        kafka.write(topic, [Message(b"v", b"k%d" % at, timestamp_ms=time) for at, time in enumerate(times)])
        wait_until_read(query, kafka, topic)
        after = eventually(
            lambda: histogram(metrics_port), lambda found: found[f"{METRIC}_count"] - before[f"{METRIC}_count"] >= 3
        )
        query.stop()
        after.subtract(before)
        is_of_producers = time_type == "CreateTime"
        assert after[f"{METRIC}_count"] == after["+Inf"] == 3
        assert after["3600.0"] == (2 if is_of_producers else 3)
        assert (after[f"{METRIC}_sum"] >= HOUR_MS / 1000) == is_of_producers
        [row] = [dict(each) for each in client.execute_command("STATE", "LAG")]
        assert 0 < row["record_delay_p50_ms"] <= row["record_delay_p99_ms"]
        client.close()
