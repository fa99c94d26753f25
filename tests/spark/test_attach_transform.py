"""`sparkis.attach` to transformWithState and to RocksDB: values, maps, lists, times to live, what has to be set."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from attaching import SCHEMA, Attach, attached, shown, text, whole
from micro_batches import Batches, eventually, start
from pyspark import cloudpickle
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.query import StreamingQuery

from state_backend.errors import DescriptorError

__all__ = ["attached"]

Make = Callable[[str], Batches]

pytestmark = pytest.mark.usefixtures("endpoint")

STORE = "spark.sql.streaming.stateStore."
PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
CHANGELOG = STORE + "rocksdb.changelogCheckpointing.enabled"
HOUR_MS = 3_600_000


@pytest.fixture
def settings(spark: SparkSession) -> Iterator[Callable[..., None]]:
    """Let queries that start in this test keep their state in RocksDB, with some settings more."""
    made = {STORE + "providerClass": PROVIDER}

    def set_all(**more: str) -> None:
        made.update(more)
        for name, value in made.items():
            spark.conf.set(name, value)

    yield set_all
    for name in made:
        spark.conf.unset(name)


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Spark's workers cannot import this module


class Machine(StatefulProcessor):
    """Does to its state what the rows' `n` say."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.last = handle.getValueState("last", "v double, n int", ttlDurationMs=HOUR_MS)
        self.total = handle.getValueState("total", "sum double")
        self.recent = handle.getListState("recent", "v double")
        self.brief = handle.getListState("brief", "v double", ttlDurationMs=HOUR_MS)
        self.days = handle.getMapState("days", "day int", "v double, n int")
        self.hours = handle.getMapState("hours", "hour int", "v double", ttlDurationMs=HOUR_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.n == -1:
                for state in (self.last, self.total, self.recent, self.brief):
                    state.clear()
                self.days.clear()
                continue
            self.last.update((row.v, row.n))
            self.total.update((row.v + (self.total.get()[0] if self.total.exists() else 0.0),))
            if row.n == 0:
                self.recent.put([(0.0,), (row.v,)])
            else:
                self.recent.appendValue((row.v,))
                self.brief.appendValue((row.v,))
            self.days.updateValue((row.n,), (row.v, row.n))
            self.hours.updateValue((row.n,), (row.v,))
            if row.n == 3:
                self.days.removeKey((1,))
        yield Row(k=key[0])

    def close(self) -> None:
        """Nothing is open."""


def expected(read: Callable[..., list[Any]]) -> dict[str, Any]:
    """Return what clients should see, by Spark's reader."""
    found: dict[str, Any] = {}
    for row in read(stateVarName="last"):
        found[f"tws:last:{row.key.k}"] = {"v": text(row.value.value.v), "n": text(row.value.value.n)}
    for row in read(stateVarName="total"):
        found[f"tws:total:{row.key.k}"] = text(row.value["sum"])
    for row in read(stateVarName="recent"):
        found.setdefault(f"tws:recent:{row.key.k}", []).append(text(row.list_element.v))
    for row in read(stateVarName="brief"):
        found.setdefault(f"tws:brief:{row.key.k}", []).append(text(row.list_element.value.v))
    for row in read(stateVarName="days"):
        found.setdefault(f"tws:days:{row.key.k}", {})[text(row.user_map_key.day)] = row.user_map_value.asDict()
    for row in read(stateVarName="hours"):
        hours = found.setdefault(f"tws:hours:{row.key.k}", {})
        hours[text(row.user_map_key.hour)] = text(row.user_map_value.value.v)
    return found


def test_every_kind_of_variable_is_read_as_spark_has_it_with_its_time_to_live(
    spark: SparkSession,
    client: redis.Redis,
    batches: Make,
    attached: Attach,
    tmp_path: Path,
    settings: Callable[..., None],
):
    settings(**{CHANGELOG: "true"})
    rows = batches(SCHEMA)
    checkpoint = tmp_path / "checkpoint"
    made = rows.df.groupBy("k").transformWithState(Machine(), "k string", "update", "processingTime")
    rows.add({"k": "a", "n": 1, "v": 1.5}, {"k": "b", "n": 2, "v": 2.5}, {"k": "c", "n": 2, "v": 2.5})
    writer = made.writeStream.outputMode("update").format("noop").queryName("tws")
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(processingTime="1 second").start()
    attachment = attached(query)
    unread = 3
    for more in (
        [("a", 2, 3.5), ("a", 3, 4.5), ("a", 3, 5.5)],
        [("a", 0, 6.5), ("a", 4, 7.5), ("b", -1, 0)],
        [("b", 1, 8.5), ("b", 0, 9.5), ("b", 0, 10.5), ("c", -1, 0)],
    ):
        rows.add(*({"k": k, "n": n, "v": v} for k, n, v in more))
        unread += len(more)
        stop_after(query, unread)
        unread = 0
        assert attachment.wait()
        found = shown(client, "tws")
        for key in found:
            if key.startswith("tws:days:"):
                found[key] = {field: json.loads(value) for field, value in found[key].items()}
        assert found == expected(lambda **options: whole(spark, checkpoint, attachment.batch, **options))
        query = writer.start()
    (last,) = (
        row.value.ttlExpirationMs
        for row in whole(spark, checkpoint, attachment.batch, stateVarName="last")
        if row.key.k == "a"
    )
    assert client.pexpiretime("tws:last:a") == last
    assert client.pexpiretime("tws:total:a") == -1
    assert client.pexpiretime("tws:brief:a") > 0
    assert [expiry > 0 for expiry in client.hpexpiretime("tws:hours:a", "1", "2")] == [True, True]


def stop_after(query: StreamingQuery, count: int) -> None:
    """Stop a query that has read so many rows. One with processing time has batches without end."""
    eventually(lambda: sum(each.numInputRows for each in query.recentProgress), lambda found: found >= count)
    query.stop()


@pytest.mark.parametrize("format_version", ["1", "2"])
def test_state_in_rocksdb_is_followed_by_its_change_log(
    client: redis.Redis,
    batches: Make,
    attached: Attach,
    tmp_path: Path,
    settings: Callable[..., None],
    format_version: str,
):
    settings(**{CHANGELOG: "true", STORE + "checkpointFormatVersion": format_version})
    rows = batches(SCHEMA)
    rows.add({"k": "a"}, {"k": "b"})
    counted = rows.df.groupBy("k").agg(F.count("*").alias("n"))
    name = f"rocks{format_version}"
    query = start(counted.writeStream.outputMode("update").format("noop"), name, tmp_path / "checkpoint")
    attachment = attached(query)
    assert attachment.wait()
    assert shown(client, name) == {f"{name}:aggregation:a": "1", f"{name}:aggregation:b": "1"}
    rows.add({"k": "a"})
    rows.add({"k": "a"}, {"k": "c"})
    query.processAllAvailable()
    assert attachment.wait()
    assert shown(client, name) == {f"{name}:aggregation:{key}": count for key, count in zip("abc", "311", strict=True)}


def test_rocksdb_without_a_change_log_is_refused_by_the_name_of_the_setting(
    batches: Make, attached: Attach, tmp_path: Path, settings: Callable[..., None]
):
    settings()
    rows = batches(SCHEMA)
    rows.add({"k": "a"})
    counted = rows.df.groupBy("k").agg(F.count("*").alias("n"))
    query = start(counted.writeStream.outputMode("update").format("noop"), "without", tmp_path / "checkpoint")
    with pytest.raises(DescriptorError, match=f"start the query with {CHANGELOG}=true"):
        attached(query)
