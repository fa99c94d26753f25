"""A query whose checkpoint is in HDFS, which only Spark's client reads here: there is no libhdfs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkis
from compat.waiting import WAIT_S_MAX
from tests.hadoop.daemons import hdfs
from tests.spark.micro_batches import Batches, local_session


@pytest.fixture
def spark() -> Iterator[SparkSession]:
    session = local_session("local[2]")
    yield session
    session.stop()


def test_checkpoint_in_hdfs_is_attached_to_by_spark(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hdfs(tmp_path) as filesystem:
        endpoint = sparkis.serve(spark, log=tmp_path / "log")
        rows = Batches(spark, tmp_path / "input", "k string")
        rows.add({"k": "a"})
        counted = rows.df.groupBy("k").agg(F.count("*").alias("n"))
        writer = counted.writeStream.outputMode("update").format("noop").queryName("counts")
        query = writer.option("checkpointLocation", f"{filesystem}/checkpoints/counts").start()
        query.processAllAvailable()
        attachment = sparkis.attach(query)
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        (line,) = (each.getMessage() for each in caplog.records if "Spark jobs read" in each.getMessage())
        assert "cannot open the checkpoint hdfs://" in line
        rows.add({"k": "a"}, {"k": "b"})
        query.processAllAvailable()
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        with redis.Redis.from_url(endpoint.url) as client:
            assert client.mget("counts:aggregation:a", "counts:aggregation:b") == [b"2", b"1"]
        attachment.stop()
        query.stop()
        endpoint.stop()
