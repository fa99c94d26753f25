"""`sparkis.attach` and how a query's state is laid out: what is read, and what is refused by the setting's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from compat.waiting import WAIT_S_MAX
from state_backend.model.errors import DescriptorError, SparkisError
from tests.spark.attaching import CHANGELOG, ROCKSDB, SCHEMA, Attach, attached, rocksdb, shown
from tests.spark.micro_batches import Batches, Settings, start

__all__ = ["attached"]

Make = Callable[[str], Batches]

pytestmark = pytest.mark.usefixtures("endpoint")

JOIN_FORMAT = "spark.sql.streaming.join.stateFormatVersion"


def joined(rows: DataFrame) -> DataFrame:
    left = rows.select("k", "n", "t").withWatermark("t", "30 seconds")
    right = rows.select(F.col("k").alias("k2"), F.col("v"), F.col("t").alias("t2")).withWatermark("t2", "30 seconds")
    return left.join(right, F.expr("k = k2 AND t2 >= t AND t2 <= t + INTERVAL 20 SECONDS"))


@pytest.mark.parametrize("format_version", ["1", "2"])
def test_state_in_rocksdb_is_followed_by_its_change_log(
    client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path, settings: Settings, format_version: str
):
    settings(rocksdb(format_version))
    rows = batches(SCHEMA)
    rows.add({"k": "a"}, {"k": "b"})
    counted = rows.df.groupBy("k").agg(F.count("*").alias("n"))
    name = f"rocks{format_version}"
    query = start(counted.writeStream.outputMode("update").format("noop"), name, tmp_path / "checkpoint")
    attachment = attached(query)
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert shown(client, name) == {f"{name}:aggregation:a": "1", f"{name}:aggregation:b": "1"}
    rows.add({"k": "a"})
    rows.add({"k": "a"}, {"k": "c"})
    query.processAllAvailable()
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert shown(client, name) == {f"{name}:aggregation:{key}": count for key, count in zip("abc", "311", strict=True)}


def test_rocksdb_without_a_change_log_is_refused_by_sparks_reader_only(
    client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path, settings: Settings
):
    settings(ROCKSDB)
    rows = batches(SCHEMA)
    rows.add({"k": "a"})
    counted = rows.df.groupBy("k").agg(F.count("*").alias("n"))
    query = start(counted.writeStream.outputMode("update").format("noop"), "without", tmp_path / "checkpoint")
    with pytest.raises(DescriptorError, match=f"start the query with {CHANGELOG}=true.*or use reader='files'"):
        attached(query, reader="spark")
    attachment = attached(query)
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    rows.add({"k": "a"}, {"k": "b"})
    query.processAllAvailable()
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert shown(client, "without") == {"without:aggregation:a": "2", "without:aggregation:b": "1"}


@pytest.mark.parametrize("version", ["3", "4"])
def test_a_join_with_both_sides_in_one_store_is_refused_by_sparks_reader_only(
    client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path, settings: Settings, version: str
):
    settings(rocksdb() | {JOIN_FORMAT: version})
    rows = batches(SCHEMA)
    rows.add({"k": "a", "n": 1, "v": 1.5, "t": "2026-01-01T00:00:00Z"})
    query = start(joined(rows.df).writeStream.format("noop"), f"join{version}", tmp_path / "checkpoint")
    with pytest.raises(DescriptorError, match=r"both sides in one store \(spark\.sql\.streaming\.join\.state.*3 or 4"):
        attached(query, reader="spark")
    assert attached(query).wait(timeout_s=WAIT_S_MAX)
    assert len(shown(client, f"join{version}")) == 2


def test_a_checkpoint_that_only_sparks_settings_give_access_to_is_read_by_spark(
    spark: SparkSession,
    client: redis.Redis,
    batches: Make,
    attached: Attach,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    mount = "fs.viewfs.mounttable.mounts.link./checkpoints"
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()  # type: ignore[union-attr]
    hadoop.set(mount, tmp_path.as_uri())
    try:
        rows = batches(SCHEMA)
        rows.add({"k": "a"})
        counted = rows.df.groupBy("k").agg(F.count("*").alias("n"))
        writer = counted.writeStream.outputMode("update").format("noop").queryName("mounted")
        query = writer.option("checkpointLocation", "viewfs://mounts/checkpoints/mounted").start()
        query.processAllAvailable()
        with pytest.raises(SparkisError, match=r"cannot open the checkpoint viewfs://.*pass reader='spark'"):
            attached(checkpoint="viewfs://mounts/checkpoints/mounted", job="mounted")
        attachment = attached(query)
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        rows.add({"k": "a"})
        query.processAllAvailable()
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        assert shown(client, "mounted") == {"mounted:aggregation:a": "2"}
        (line,) = (each.getMessage() for each in caplog.records if "Spark jobs read" in each.getMessage())
        assert (
            "job mounted: Spark jobs read the state, because sparkis cannot: cannot open the checkpoint viewfs" in line
        )
        attachment.stop()
        query.stop()
    finally:
        hadoop.unset(mount)
