"""The offsets of named sources are in the log, and decide when the state of a new checkpoint becomes visible."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession

import sparkis
from compat.waiting import eventually
from state_backend.log.change_log import ChangeLog
from tests.kafka.broker import Broker, Message
from tests.kafka.messages import wait_until_read

EVOLUTION = "spark.sql.streaming.queryEvolution.enableSourceEvolution"


def test_new_checkpoint_is_held_back_until_its_named_sources_have_passed_old_offsets(
    spark: SparkSession, kafka: Broker, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kafka.create("visits", 2)
    kafka.write("visits", [Message(b"%d" % number, b"page") for number in range(40)])
    spark.conf.set(EVOLUTION, "true")
    caplog.set_level(logging.INFO, "sparkis.sink")
    try:
        for turn in ("old", "new"):
            if turn == "new":  # more messages than were read, and several batches
                kafka.write("visits", [Message(b"%d" % number, b"page") for number in range(20)])
            source = spark.readStream.name("visits").format("kafka").option("kafka.bootstrap.servers", kafka.address)
            messages = source.option("subscribe", "visits").option("startingOffsets", "earliest")
            writer = sparkis.queryable(
                messages.option("maxOffsetsPerTrigger", 10).load(),
                sparkis.StateDescriptor("count", key="key", reduce="count"),
                mode="append",
                catch_up_timeout=None,
            ).queryName("visits")
            query = writer.option("checkpointLocation", str(tmp_path / turn)).start()
            wait_until_read(query, kafka, "visits")
            query.stop()
    finally:
        spark.conf.unset(EVOLUTION)
    log = ChangeLog(tmp_path / "log").job("visits")
    current = log.current()
    assert current is not None
    last = log.newest(current)
    assert last is not None
    assert [offsets.partition(":")[0] for offsets in last.offsets] == ["visits"]
    assert any("its sources have passed the offsets of the old state" in each for each in caplog.messages)
    with redis.Redis.from_url(url) as client:
        eventually(lambda: client.get("visits:count:page"), lambda found: found == b"60", awaited="all messages")
