"""`sparkis.queryable_processor`: what it declares is readable with no further call, and nothing else changes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import redis
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.query import StreamingQuery

import sparkis
from compat.waiting import WAIT_S_MAX, eventually
from sparkis import AttachedState
from state_backend.model.errors import DescriptorError
from tests.spark.attaching import SCHEMA, text, values_of_job, whole
from tests.spark.micro_batches import Batches, Settings, failure_of, start

Make = Callable[[str], Batches]

pytestmark = pytest.mark.usefixtures("endpoint")

STORE = "spark.sql.streaming.stateStore."
PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
CHANGELOG = STORE + "rocksdb.changelogCheckpointing.enabled"
HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def rocksdb(settings: Settings) -> None:
    """Let queries keep their state where transformWithState can."""
    settings({STORE + "providerClass": PROVIDER, CHANGELOG: "true"})


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Spark's workers cannot import this module


class Sensor(StatefulProcessor):
    """Keeps a value, a list and a map of a sensor's rows; a timer forgets a sensor that falls silent."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.last = handle.getValueState("lastTemp", "v double, n int")
        self.count = handle.getValueState("count", "rows long", ttlDurationMs=HOUR_MS)
        self.recent = handle.getListState("recent", "v double")
        self.days = handle.getMapState("days", "day int", "v double, n int", ttlDurationMs=HOUR_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        count = self.count.get()[0] if self.count.exists() else 0
        for row in rows:
            count += 1
            self.last.update((row.v, row.n))
            self.recent.appendValue((row.v,))
            self.days.updateValue((row.n,), (row.v, row.n))
            if row.n == 0:
                self.recent.clear()
                self.days.clear()
        self.count.update((count,))
        yield Row(k=key[0], rows=count)


STATES: dict[str, str | AttachedState] = {
    "lastTemperature": "lastTemp",
    "lastReading": AttachedState(variable="lastTemp", kind="value"),
    "rows": AttachedState(variable="count", key_format="rows-of/<k>"),
    "recent": AttachedState(variable="recent", length_max=2),
    "days": AttachedState(variable="days", value="v"),
    "dayObjects": "days",
}


def of_sensors(df: DataFrame, processor: StatefulProcessor) -> DataFrame:
    """Return the query that the tests of `Sensor` run."""
    return df.groupBy("k").transformWithState(processor, "k string, rows long", "append", "processingTime")


def expected(read: Callable[..., list[Any]], job: str) -> dict[str, Any]:
    """Return what clients should see of STATES, by Spark's own reader."""
    found: dict[str, Any] = {}
    for row in read(stateVarName="lastTemp"):
        value = row.value
        found[f"{job}:lastTemperature:{row.key.k}"] = {"v": text(value.v), "n": text(value.n)}
        found[f"{job}:lastReading:{row.key.k}"] = {"v": value.v, "n": value.n}
    for row in read(stateVarName="count"):
        found[f"rows-of/{row.key.k}"] = text(row.value.value.rows)
    for row in read(stateVarName="recent"):
        found.setdefault(f"{job}:recent:{row.key.k}", []).append(text(row.list_element.v))
    for row in read(stateVarName="days"):
        day, value = text(row.user_map_key.day), row.user_map_value.value
        found.setdefault(f"{job}:days:{row.key.k}", {})[day] = text(value.v)
        found.setdefault(f"{job}:dayObjects:{row.key.k}", {})[day] = {"v": value.v, "n": value.n}
    return {key: value[-2:] if isinstance(value, list) else value for key, value in found.items()}


def seen(client: redis.Redis, job: str) -> dict[str, Any]:
    """Return what clients see of STATES; JSON is read."""
    found = values_of_job(client, job)
    for key, value in found.items():
        if key.startswith(f"{job}:lastReading:"):
            found[key] = json.loads(value)
        elif key.startswith(f"{job}:dayObjects:"):
            found[key] = {field: json.loads(each) for field, each in value.items()}
    return found | {key: client.get(key) for key in client.scan_iter(match="rows-of/*")}


# What clients should see of STATES after FIRST_ROWS, written out: Spark's own reader takes seconds.
FIRST_ROWS = [("a", 1, 1.5), ("b", 2, 2.5), ("a", 2, 3.5)]
FIRST_SEEN = {
    "tws:lastTemperature:a": {"v": "3.5", "n": "2"},
    "tws:lastReading:a": {"v": 3.5, "n": 2},
    "rows-of/a": "2",
    "tws:recent:a": ["1.5", "3.5"],
    "tws:days:a": {"1": "1.5", "2": "3.5"},
    "tws:dayObjects:a": {"1": {"v": 1.5, "n": 1}, "2": {"v": 3.5, "n": 2}},
    "tws:lastTemperature:b": {"v": "2.5", "n": "2"},
    "tws:lastReading:b": {"v": 2.5, "n": 2},
    "rows-of/b": "1",
    "tws:recent:b": ["2.5"],
    "tws:days:b": {"2": "2.5"},
    "tws:dayObjects:b": {"2": {"v": 2.5, "n": 2}},
}
MORE_ROWS = [("a", 1, 4.5), ("a", 3, 5.5), ("b", 0, 0.0), ("c", 1, 6.5)]


def taken(query: StreamingQuery, count: int) -> None:
    """Wait until a run of a query has read so many rows. One with processing time has batches without end."""
    eventually(lambda: sum(each.numInputRows for each in query.recentProgress), lambda found: found >= count)


def test_declared_states_of_processor_are_readable_over_restarts(
    spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path
):
    rows = batches(SCHEMA)
    checkpoint = tmp_path / "checkpoint"
    made = of_sensors(rows.df, sparkis.queryable_processor(Sensor(), states=STATES))
    writer = made.writeStream.format("noop").outputMode("append").queryName("tws")
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(processingTime="1 second")
    for added in (FIRST_ROWS, MORE_ROWS):
        rows.add(*({"k": k, "n": n, "v": v} for k, n, v in added))
        query = writer.start()
        taken(query, len(added))
        attachment = sparkis.attach(query)
        query.stop()
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        if added is FIRST_ROWS:
            assert seen(client, "tws") == FIRST_SEEN
    assert seen(client, "tws") == expected(partial(whole, spark, checkpoint, attachment.batch), "tws")
    assert client.ttl("rows-of/a") > 0
    assert client.ttl("tws:lastTemperature:a") == -1
    assert client.httl("tws:days:a", "1")[0] > 0


@pytest.mark.slow
def test_declaration_leaves_results_unchanged_and_may_come_and_go_with_restarts(
    spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path
):
    rows = batches(SCHEMA)
    results: dict[str, list[tuple[str, int]]] = {"declared": [], "plain": []}

    def run(name: str, processor: StatefulProcessor) -> StreamingQuery:
        def keep(batch: DataFrame, _: int) -> None:
            results[name] += [tuple(row) for row in batch.collect()]

        writer = of_sensors(rows.df, processor).writeStream.foreachBatch(keep).outputMode("append").queryName(name)
        query = writer.option("checkpointLocation", str(tmp_path / name)).trigger(processingTime="1 second").start()
        taken(query, 2)
        return query

    declared = sparkis.queryable_processor(Sensor(), states={"lastTemperature": "lastTemp"})
    for round_, processor in enumerate([Sensor(), declared, Sensor(), declared]):
        rows.add({"k": "a", "n": round_, "v": round_}, {"k": f"b{round_}", "n": 1, "v": 0.5})
        query = run("declared", processor)
        if processor is declared:
            assert sparkis.attach(query).wait()
            assert client.hget("declared:lastTemperature:a", "n") == str(round_)
            assert len(list(client.scan_iter(match="declared:*"))) == round_ + 2
        query.stop()
        run("plain", Sensor()).stop()
    assert sorted(results["declared"]) == sorted(results["plain"]) != []
    for variable in ("lastTemp", "recent"):  # without a time to live, which depends on the clock
        mine, theirs = (
            {str(row) for row in whole(spark, tmp_path / name, newest(tmp_path / name), stateVarName=variable)}
            for name in ("declared", "plain")
        )
        assert mine == theirs != set()


def newest(checkpoint: Path) -> int:
    """Return a stopped query's last committed batch."""
    return max(int(file.name) for file in (checkpoint / "commits").glob("[0-9]*"))


class Session(StatefulProcessor):
    """Counts the rows of a key in pandas, and forgets it by a timer a minute after its last row, in event time."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.rows = handle.getValueState("rows", "rows long")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        count = self.rows.get()[0] if self.rows.exists() else 0
        for part in rows:
            count += len(part)
            for timer in list(self.handle.listTimers()):
                self.handle.deleteTimer(timer)
            self.handle.registerTimer(int(part["t"].max().timestamp() * 1000) + 60_000)
        self.rows.update((count,))
        yield pd.DataFrame({"k": [key[0]], "rows": [count]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        self.rows.clear()
        yield pd.DataFrame({"k": [key[0]], "rows": [-1]})


@pytest.mark.slow
def test_state_cleared_by_timer_is_gone_for_readers(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches(SCHEMA)
    grouped = rows.df.withWatermark("t", "10 seconds").groupBy("k")
    processor = sparkis.queryable_processor(Session(), states={"rows": "rows"})
    made = grouped.transformWithStateInPandas(processor, "k string, rows long", "append", "eventTime")
    rows.add({"k": "a", "t": "2026-01-01T00:00:00Z"}, {"k": "b", "t": "2026-01-01T00:00:30Z"})
    writer = made.writeStream.format("noop").outputMode("append")
    query = start(writer, "timed", tmp_path / "checkpoint")
    attachment = sparkis.attach(query)
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert values_of_job(client, "timed") == {"timed:rows:a": "1", "timed:rows:b": "1"}
    rows.add({"k": "b", "t": "2026-01-01T00:01:20Z"})
    query.processAllAvailable()
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert values_of_job(client, "timed") == {"timed:rows:b": "2"}


class Mayfly(StatefulProcessor):
    """Forgets a key a moment after its last row, by the clock, and notes that it did."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.alive = handle.getValueState("alive", "n int")
        self.gone = handle.getMapState("gone", "n int", "since long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.alive.update((row.n,))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1)
        yield Row(k=key[0])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self.gone.updateValue(self.alive.get(), (expiredTimerInfo.getExpiryTimeInMs(),))
        self.alive.clear()
        return iter(())


@pytest.mark.slow
def test_changes_by_timer_are_visible_at_their_commit(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches(SCHEMA)
    rows.add({"k": "a", "n": 7}, {"k": "b", "n": 8})
    processor = sparkis.queryable_processor(Mayfly(), states={"alive": "alive", "gone": "gone"})
    made = rows.df.groupBy("k").transformWithState(processor, "k string", "append", "processingTime")
    query = start_query(made, "mayflies", tmp_path / "checkpoint")
    sparkis.attach(query)
    found = eventually(
        lambda: values_of_job(client, "mayflies"), lambda found: len(found) == 2 and "mayflies:gone:a" in found
    )
    assert {key: list(fields) for key, fields in found.items()} == {
        "mayflies:gone:a": ["7"],
        "mayflies:gone:b": ["8"],
    }


class Counter(StatefulProcessor):
    """Counts the rows of a key, in steps of its own, in a variable that every counter calls `count`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        count = self.step * sum(1 for _ in rows) + (self.count.get()[0] if self.count.exists() else 0)
        self.count.update((count,))
        yield Row(k=key[0])


def counted(df: DataFrame, step: int, **states: str) -> DataFrame:
    """Return a DataFrame of one more counter; it declares what states are given."""
    processor: StatefulProcessor = Counter(step)
    if states:
        processor = sparkis.queryable_processor(processor, states=states)
    return df.groupBy("k").transformWithState(processor, "k string", "append", "none")


def start_query(df: DataFrame, name: str, checkpoint: Path) -> StreamingQuery:
    """Start a query whose rows nobody takes."""
    writer = df.writeStream.format("noop").outputMode("append").queryName(name)
    return writer.option("checkpointLocation", str(checkpoint)).start()


@pytest.mark.slow
def test_each_of_several_processors_in_one_query_has_its_own_state(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches(SCHEMA)
    chained = counted(counted(counted(rows.df, 1, ones="count"), 10), 100, hundreds="count")
    writer = chained.writeStream.format("noop").outputMode("append")
    for round_ in (1, 2):
        rows.add({"k": "a"}, {"k": "a"}, {"k": "b"})
        query = start(writer, "chained", tmp_path / "checkpoint")
        assert sparkis.attach(query).wait()
        assert values_of_job(client, "chained") == {
            "chained:ones:a": str(2 * round_),
            "chained:ones:b": str(round_),
            "chained:hundreds:a": str(100 * round_),
            "chained:hundreds:b": str(100 * round_),
        }
        query.stop()


@pytest.mark.slow
def test_queries_of_one_driver_are_attached_by_their_declarations(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches(SCHEMA)
    rows.add({"k": "a"})
    queries = [
        start(
            counted(rows.df, step, **states).writeStream.format("noop").outputMode("append"),
            f"query{step}",
            tmp_path / str(step),
        )
        for step, states in [(1, {"one": "count"}), (2, {"two": "count"}), (3, {})]
    ]
    for query in queries[:2]:
        assert sparkis.attach(query).wait()
    assert values_of_job(client, "query1") == {"query1:one:a": "1"}
    assert values_of_job(client, "query2") == {"query2:two:a": "2"}
    assert values_of_job(client, "query3") == {}


@pytest.mark.slow
def test_other_state_of_query_is_attached_as_another_job(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches(SCHEMA)
    rows.add({"k": "a"}, {"k": "b"})
    made = counted(counted(rows.df, 1, ones="count"), 10)
    query = start(made.writeStream.format("noop").outputMode("append"), "first", tmp_path / "checkpoint")
    with pytest.raises(DescriptorError, match=r"writes job 'first'.*give this attachment another name"):
        sparkis.attach(query, operator=0, state="tens")
    with sparkis.attach(query, operator=0, state="tens", job="second") as other, sparkis.attach(query) as own:
        assert other.wait()
        assert own.wait()
        assert own is sparkis.attach(query, log=own.log)
        assert values_of_job(client, "second") == {"second:tens:a": "10", "second:tens:b": "10"}
        assert values_of_job(client, "first") == {"first:ones:a": "1", "first:ones:b": "1"}


@pytest.mark.slow
def test_log_may_be_set_after_start_of_query(
    spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = batches(SCHEMA)
    rows.add({"k": "a"})
    log = spark.conf.get("spark.sparkis.log")
    spark.conf.unset("spark.sparkis.log")
    try:
        made = counted(rows.df, 1, count="count")
        query = start(made.writeStream.format("noop").outputMode("append"), "late", tmp_path / "checkpoint")
        with pytest.raises(DescriptorError, match="there is no change log to write to"):
            sparkis.attach(query)
        eventually(
            lambda: caplog.text,
            lambda found: "query 'late' declares states, and the session has no change log" in found,
        )
    finally:
        spark.conf.set("spark.sparkis.log", log)
    assert sparkis.attach(query).wait()
    assert client.get("late:count:a") == "1"


@pytest.mark.slow
def test_attach_finds_declaration_of_unknown_query(spark: SparkSession, client: redis.Redis, tmp_path: Path):
    other = spark.newSession()
    for name, value in {STORE + "providerClass": PROVIDER, CHANGELOG: "true"}.items():
        other.conf.set(name, value)
    rows = Batches(other, tmp_path / "input", SCHEMA)
    rows.add({"k": "a"}, {"k": "a"})
    processor = sparkis.queryable_processor(Counter(1), states={"ones": "count"})
    made = rows.df.groupBy("k").transformWithState(processor, "k string", "append", "none")
    checkpoint = tmp_path / "checkpoint"
    query = start_query(made, "elsewhere", checkpoint)
    query.processAllAvailable()
    assert not list(client.scan_iter(match="elsewhere:*"))
    with sparkis.attach(query) as attachment:
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        assert values_of_job(client, "elsewhere") == {"elsewhere:ones:a": "2"}
    query.stop()
    with sparkis.attach(checkpoint=checkpoint, job="stopped", states=processor.states) as attachment:
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        assert values_of_job(client, "stopped") == {"stopped:ones:a": "2"}


def test_unknown_variable_is_refused_with_known_ones(batches: Make, tmp_path: Path):
    rows = batches(SCHEMA)
    rows.add({"k": "a"})
    for variable in ("last_temp", "$procTimers_keyToTimestamp"):
        made = of_sensors(rows.df, sparkis.queryable_processor(Sensor(), states={"last": variable}))
        message = failure_of(start_query(made, "wrong", tmp_path / "checkpoint"))
        assert f"state 'last': the processor Sensor has no variable '{variable}' that can be read" in message
        assert (
            "it has 'lastTemp' (ValueState), 'count' (ValueState), 'recent' (ListState), 'days' (MapState). "
            "Timers cannot be read" in message
        )


@pytest.mark.slow
def test_state_without_change_files_is_read(
    spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = batches(SCHEMA)
    rows.add({"k": "a"})
    spark.conf.unset(CHANGELOG)
    query = start_query(counted(rows.df, 1, first="count"), "nolog", tmp_path / "checkpoint")
    query.processAllAvailable()
    attachment = sparkis.attach(query)
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert f"Start the query with {CHANGELOG}=true" in caplog.text
    rows.add({"k": "a"})
    query.processAllAvailable()
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert client.get("nolog:first:a") == "2"


@pytest.mark.slow
def test_expressions_of_declaration_that_need_spark_are_read_by_spark(
    client: redis.Redis, batches: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = batches(SCHEMA)
    rows.add({"k": "a"}, {"k": "a"}, {"k": "a"})
    squares = {"squares": AttachedState(variable="count", columns={"square": "power(n, 2)"})}
    processor = sparkis.queryable_processor(Counter(1), states=squares)
    made = rows.df.groupBy("k").transformWithState(processor, "k string", "append", "none")
    query = start_query(made, "squares", tmp_path / "checkpoint")
    query.processAllAvailable()
    with pytest.raises(DescriptorError, match=r"'power\(n, 2\)'.*use Spark's reader: reader='spark'"):
        sparkis.attach(query)
    assert "its declared states cannot be read" in caplog.text
    with sparkis.attach(query, reader="spark") as attachment:
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        assert values_of_job(client, "squares") == {"squares:squares:a": "9"}


@pytest.mark.slow
def test_two_states_of_one_name_are_refused_and_so_is_query_without_name(batches: Make, tmp_path: Path):
    rows = batches(SCHEMA)
    rows.add({"k": "a"})
    checkpoint = tmp_path / "checkpoint"
    made = counted(counted(rows.df, 1, count="count", other="count"), 10, count="count")
    query = start_query(made, "twice", checkpoint)
    message = "its processors declare the state 'count' more than once (they declare count, count, other)"
    assert message in failure_of(query)
    with pytest.raises(DescriptorError, match="declare the state 'count' more than once"):
        sparkis.attach(query)
    assert not list((checkpoint / "commits").glob("[0-9]*"))
    again = counted(counted(rows.df, 1, count="count", other="count"), 10, tens="count")
    unnamed = again.writeStream.format("noop").outputMode("append").option("checkpointLocation", str(checkpoint))
    assert "call .queryName('...') before start()" in failure_of(unnamed.start())
    query = start_query(again, "once", checkpoint)
    query.processAllAvailable()
    assert sparkis.attach(query).wait()


@pytest.mark.slow
def test_attach_reports_wrong_description_and_continues(
    batches: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = batches(SCHEMA)
    rows.add({"k": "a", "n": 1, "v": 1.5})
    processor = sparkis.queryable_processor(Counter(1), states={"c": AttachedState(variable="count", value="m")})
    made = rows.df.groupBy("k").transformWithState(processor, "k string", "append", "none")
    query = start(made.writeStream.format("noop").outputMode("append"), "misfit", tmp_path / "checkpoint")
    with pytest.raises(DescriptorError, match=r"has no column 'm'; it has _0, k, n"):
        sparkis.attach(query)
    assert "its declared states cannot be read" in caplog.text
    assert query.isActive


@pytest.mark.slow
def test_query_that_declares_nothing_is_left_alone(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches(SCHEMA)
    rows.add({"k": "a"})
    made = rows.df.groupBy("k").agg(F.count("*").alias("n"))
    query = start(made.writeStream.format("noop").outputMode("update"), "plain", tmp_path / "checkpoint")
    with sparkis.attach(query, state="n") as attachment:
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        assert values_of_job(client, "plain") == {"plain:n:a": "1"}
