"""docs/kafka.md, run as it is printed, with a real broker; and what its bullets say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import sparkis
from compat.conformance.servers import free_port
from compat.waiting import eventually
from spark_hooks.serving import endpoints
from tests.kafka.broker import Broker, Message
from tests.kafka.messages import wait_until_read
from tests.kafka.page import Page

PAGE = Page("kafka.md")
[TABLE] = re.findall(r"^  ```python\n(.*?)^  ```", PAGE.text, re.MULTILINE | re.DOTALL)
KEYS = 60


def test_page_has_shown_output(spark: SparkSession, kafka: Broker, tmp_path: Path) -> None:
    kafka.create("orders")
    port = free_port()
    job, waits, rest = PAGE.job(kafka, port, tmp_path).partition("query.awaitTermination()")
    assert waits and not rest.strip()
    names: dict[str, Any] = {}
    exec(compile(job, "docs/kafka.md", "exec"), names)
    try:
        PAGE.produce(kafka)
        wait_until_read(names["query"], kafka, "orders")
        PAGE.wait_for_reads(port, 4)
    finally:
        names["query"].stop()
        for endpoint in endpoints.of_log(str(tmp_path / "sparkis-log")):
            assert isinstance(endpoint, endpoints.ServedEndpoint)
            endpoint.stop()
        spark.conf.unset("spark.sparkis.log")
        kafka.delete("orders")


def test_table_has_newest_values_after_partitions_were_added(
    spark: SparkSession, kafka: Broker, url: str, tmp_path: Path
) -> None:
    """Many keys have newer values in another partition, at smaller offsets; a running query and a new one have them."""
    settings = {"cleanup_policy": "compact", "message_timestamp_type": "LogAppendTime"}
    kafka.create("prices", 3, **settings)
    random = Random(1)
    newest: dict[bytes, bytes | None] = {}

    def write(turn: int) -> None:
        keys = [b"k%d" % number for number in range(KEYS) for _ in range(random.randint(1, 9))]
        random.shuffle(keys)
        messages = [
            Message(None if random.random() < 0.2 else b"%d of %d" % (at, turn), key) for at, key in enumerate(keys)
        ]
        kafka.write("prices", messages)
        newest.update((each.key or b"", each.value) for each in messages)

    write(1)
    before = start_table(read(spark, kafka, "prices"), tmp_path / "before", "before")
    before.processAllAvailable()
    kafka.add_partitions("prices", 7)
    write(2)
    eventually(lambda: len(kafka.ends("prices")) == 7 and min(kafka.ends("prices").values()) > 0)
    after = start_table(read(spark, kafka, "prices"), tmp_path / "after", "after")
    with redis.Redis.from_url(url) as client:
        for name, query in (("before", before), ("after", after)):
            wait_until_read(query, kafka, "prices")
            wait_for_values(client, name, newest)


def wait_for_values(client: redis.Redis, job: str, expected: Mapping[bytes, bytes | None]) -> None:
    """Wait until the job's table has these values."""
    names = [b"%b:price:%b" % (job.encode(), key) for key in expected]
    found = eventually(
        lambda: client.mget(names), lambda found: found == list(expected.values()), awaited=f"the table of {job}"
    )
    assert len(found) == KEYS


def read(spark: SparkSession, kafka: Broker, topic: str) -> DataFrame:
    """Return the messages of a topic, from its start on."""
    source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", kafka.address)
    return (
        source.option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("kafka.metadata.max.age.ms", "200")
        .load()
    )


def start_table(messages: DataFrame, checkpoint: Path, job: str) -> StreamingQuery:
    """Start the page's table of the newest value by key."""
    lines = [line.removeprefix("  ") for line in TABLE.splitlines()]
    lines[-1] = "writer = " + lines[-1]
    names: dict[str, Any] = {"messages": messages, "F": F, "sparkis": sparkis}
    exec(compile("\n".join(lines), "docs/kafka.md", "exec"), names)
    query: StreamingQuery = names["writer"].queryName(job).option("checkpointLocation", str(checkpoint)).start()
    return query
