"""`sparkis.attach` and the settings of a query's state: those that are read, and those that are refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import sparkis
from compat.waiting import WAIT_S_MAX
from state_backend.model.errors import DescriptorError, SparkisError, UnsupportedStateError
from tests.spark.attaching import CHANGELOG, ROCKSDB, SCHEMA, STORE, Attach, attached, rocksdb, values_of_job
from tests.spark.micro_batches import Batches, Settings, start

__all__ = ["attached"]

Make = Callable[[str], Batches]

pytestmark = pytest.mark.usefixtures("endpoint")

JOIN_FORMAT = "spark.sql.streaming.join.stateFormatVersion"


def joined(rows: DataFrame) -> DataFrame:
    left = rows.select("k", "n", "t").withWatermark("t", "30 seconds")
    right = rows.select(F.col("k").alias("k2"), F.col("v"), F.col("t").alias("t2")).withWatermark("t2", "30 seconds")
    return left.join(right, F.expr("k = k2 AND t2 >= t AND t2 <= t + INTERVAL 20 SECONDS"))


@pytest.mark.parametrize("format_version", [pytest.param("1", marks=pytest.mark.slow), "2"])
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
    assert values_of_job(client, name) == {f"{name}:aggregation:a": "1", f"{name}:aggregation:b": "1"}
    rows.add({"k": "a"})
    rows.add({"k": "a"}, {"k": "c"})
    query.processAllAvailable()
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert values_of_job(client, name) == {
        f"{name}:aggregation:{key}": count for key, count in zip("abc", "311", strict=True)
    }


@pytest.mark.parametrize("reader", ["files", pytest.param("spark", marks=pytest.mark.slow)])
def test_rows_with_null_or_separator_in_key_are_left_out(
    client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path, reader: str
):
    rows = batches("a string, b string, v double")
    rows.add({"a": "x", "b": "y", "v": 1.0}, {"a": None, "b": "y", "v": 2.0}, {"a": "x:y", "b": "z", "v": 3.0})
    summed = rows.df.groupBy("a", "b").agg(F.max("v"), F.min("v"))
    name = f"skips_{reader}"
    query = start(summed.writeStream.outputMode("update").format("noop"), name, tmp_path / "checkpoint")
    attachment = attached(query, reader=reader, columns={"most": "max(v)"})
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    rows.add({"a": "x", "b": "y", "v": 4.0}, {"a": None, "b": "y", "v": 5.0})
    query.processAllAvailable()
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert attachment.error is None
    assert list(values_of_job(client, name)) == [f"{name}:aggregation:x:y"]
    (value,) = values_of_job(client, name).values()
    assert (value["most"], sorted(value.values())) == ("4", ["1", "4"])
    (facts,) = (each for each in client.execute_command("STATE JOBS") if named(each)["name"] == name)
    assert int(named(facts)["skipped_rows"]) == 3


def named(row: Any) -> dict[str, Any]:
    return row if isinstance(row, dict) else dict(zip(row[::2], row[1::2], strict=True))


@pytest.mark.slow
def test_rocksdb_without_change_log_is_refused_by_sparks_reader_only(
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
    assert values_of_job(client, "without") == {"without:aggregation:a": "2", "without:aggregation:b": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("format_version", ["1", "2"])
def test_query_that_stops_writing_change_logs_and_begins_again_is_followed(
    spark: SparkSession,
    batches: Make,
    attached: Attach,
    tmp_path: Path,
    settings: Settings,
    format_version: str,
):
    settings(rocksdb(format_version))
    rows, checkpoint = batches(SCHEMA), tmp_path / "checkpoint"
    counted = rows.df.groupBy("k").agg(F.count("*").alias("n")).writeStream.outputMode("update").format("noop")

    def run(*keys: str, changelog: bool) -> int:
        """Run one batch of the query, and return its number."""
        rows.add(*({"k": key} for key in keys))
        settings({CHANGELOG: str(changelog).lower()})
        start(counted, "q", checkpoint).stop()
        return max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))

    run("a", "b", changelog=True)
    by_files, by_spark = (
        attached(checkpoint=checkpoint, job="q", log=tmp_path / reader, reader=reader) for reader in ("files", "spark")
    )
    assert by_spark.wait(timeout_s=WAIT_S_MAX)
    expected = Counter("ab")
    for keys, changelog in (("bc", True), ("cd", False), ("ad", False), ("be", True)):
        batch = run(*keys, changelog=changelog)
        expected.update(keys)
        assert by_files.wait(batch, WAIT_S_MAX)
        table = sparkis.read_table(by_files.log, None, "aggregation").to_pylist()
        assert {row["k"]: row["count"] for row in table} == expected
    with pytest.raises(DescriptorError, match=f"start the query with {CHANGELOG}=true.*or use reader='files'"):
        by_spark.wait(timeout_s=WAIT_S_MAX)


class Greatest(StatefulProcessor):
    """Keeps the greatest number of each key, all numbers, and how often each was there."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.greatest = handle.getValueState("greatest", "n int")
        self.all = handle.getListState("all", "n int")
        self.counts = handle.getMapState("counts", "n int", "count int")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            (before,) = self.greatest.get() or (row.n,)
            self.greatest.update((max(before, row.n),))
            self.all.appendValue((row.n,))
            (count,) = self.counts.getValue((row.n,)) or (0,)
            self.counts.updateValue((row.n,), (count + 1,))
            yield Row(k=key[0])

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_state_in_avro_is_read_by_sparks_reader_only(
    client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path, settings: Settings
):
    settings(rocksdb() | {f"{STORE}encodingFormat": "avro"})
    rows = batches(SCHEMA)
    rows.add({"k": "a", "n": 1}, {"k": "b", "n": 2})
    kept = rows.df.groupBy("k").transformWithState(Greatest(), "k string", "update", "none")
    query = start(kept.writeStream.outputMode("update").format("noop"), "avro", tmp_path / "checkpoint")
    with pytest.raises(UnsupportedStateError, match=f"encoded as avro.*the default of {STORE}encodingFormat"):
        attached(query)
    attachment = attached(query, reader="spark")
    rows.add({"k": "a", "n": 3}, {"k": "a", "n": 1})
    query.processAllAvailable()
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert values_of_job(client, "avro") == {
        "avro:greatest:a": "3",
        "avro:greatest:b": "2",
        "avro:all:a": ["1", "3", "1"],
        "avro:all:b": ["2"],
        "avro:counts:a": {"1": "2", "3": "1"},
        "avro:counts:b": {"2": "1"},
    }


@pytest.mark.parametrize("version", [pytest.param("3", marks=pytest.mark.slow), "4"])
def test_only_sparks_reader_refuses_join_in_one_store(
    client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path, settings: Settings, version: str
):
    settings(rocksdb() | {JOIN_FORMAT: version})
    rows = batches(SCHEMA)
    rows.add({"k": "a", "n": 1, "v": 1.5, "t": "2026-01-01T00:00:00Z"})
    query = start(joined(rows.df).writeStream.format("noop"), f"join{version}", tmp_path / "checkpoint")
    with pytest.raises(DescriptorError, match=r"both sides in one store \(spark\.sql\.streaming\.join\.state.*3 or 4"):
        attached(query, reader="spark")
    assert attached(query).wait(timeout_s=WAIT_S_MAX)
    assert len(values_of_job(client, f"join{version}")) == 2


def test_spark_reads_checkpoint_behind_its_own_settings(
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
        assert values_of_job(client, "mounted") == {"mounted:aggregation:a": "2"}
        (line,) = (each.getMessage() for each in caplog.records if "Spark jobs read" in each.getMessage())
        assert (
            "job mounted: Spark jobs read the state, because sparkis cannot: cannot open the checkpoint viewfs" in line
        )
        attachment.stop()
        query.stop()
    finally:
        hadoop.unset(mount)
