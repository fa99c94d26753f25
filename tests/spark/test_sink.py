"""A query's rows become readable state, in every output mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import sparkis
from compat.waiting import eventually
from spark_hooks.publish import publisher
from sparkis import StateDescriptor
from state_backend.log.change_log import ChangeLog
from state_backend.log.epochs import Epoch
from state_backend.store.store import Snapshot
from tests.spark.micro_batches import Batches, failure_of, start

TEMPS = "sensor string, temp double"
Make = Callable[[str], Batches]

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("endpoint")]


def lag(client: redis.Redis, job: str) -> dict[str, Any]:
    """Return what STATE LAG says of a job."""
    rows = client.execute_command("STATE", "LAG")
    found = {row["job"]: row for row in (each if isinstance(each, dict) else dict(each) for each in rows)}
    return found.get(job, {})


def keys(client: redis.Redis, pattern: str) -> set[str]:
    return set(client.scan_iter(pattern))


def test_quick_start_serves_results_of_spark(spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path):
    temps = batches(TEMPS)
    temps.add({"sensor": "sensor_1", "temp": 20.5}, {"sensor": "sensor_2", "temp": -3.0})
    temps.add({"sensor": "sensor_1", "temp": 19.0}, {"sensor": "sensor_2", "temp": 21.25})
    temps.add({"sensor": "sensor_3", "temp": 1e10})
    by_sensor = temps.df.groupBy("sensor").agg(F.max("temp").alias("temp"))
    writer = sparkis.queryable(
        by_sensor, "maxTemperature", key="sensor", value="temp", mode="update", wait_for_visibility=True
    )
    query = writer.queryName("sensors").option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    query.processAllAvailable()

    expected = temps.as_table().groupBy("sensor").agg(F.max("temp").alias("temp")).collect()
    for row in expected:
        assert float(client.get(f"sensors:maxTemperature:{row.sensor}")) == row.temp
    assert client.get("sensors:maxTemperature:sensor_1") == "20.5"
    assert client.get("sensors:maxTemperature:sensor_3") == "10000000000"
    assert len(keys(client, "sensors:*")) == len(expected) == 3
    assert lag(client, "sensors")["committed"] == query.lastProgress["batchId"]


def test_append_takes_last_row_of_key_by_order_by(client: redis.Redis, batches: Make, tmp_path: Path):
    prices = batches("symbol string, at int, price decimal(10,2)")
    prices.add(*({"symbol": "A", "at": at, "price": at} for at in (1, 9, 5)), {"symbol": "B", "at": 1, "price": 1.5})
    prices.add({"symbol": "A", "at": 2, "price": 2})
    writer = sparkis.queryable(
        prices.df.repartition(2),
        "price",
        key="symbol",
        value="price",
        order_by="at",
        mode="append",
        wait_for_visibility=True,
    )
    query = start(writer, "append", tmp_path / "checkpoint")
    assert client.mget("append:price:A", "append:price:B") == ["2.00", "1.50"]
    prices.add(*({"symbol": "A", "at": at, "price": at} for at in range(50)))
    query.processAllAvailable()
    assert client.get("append:price:A") == "49.00"


@pytest.mark.slow
def test_rows_of_one_key_fail_batch_unless_any_may_win(client: redis.Redis, batches: Make, tmp_path: Path):
    events = batches("k string, v int")
    events.add({"k": "a", "v": 1})
    events.add({"k": "a", "v": 2}, {"k": "a", "v": 3})
    strict = sparkis.queryable(events.df, "s", key="k", value="v", mode="append", wait_for_visibility=True)
    query = strict.queryName("strict").option("checkpointLocation", str(tmp_path / "strict")).start()
    message = failure_of(query)
    assert "state 's': a micro-batch has several rows for the key b'strict:s:a'" in message
    assert "order_by=" in message
    assert client.get("strict:s:a") == "1"
    with pytest.raises(StreamingQueryException, match=r"^job 'strict', batch 1: state 's'[^\n]*$") as raised:
        query.awaitTermination()
    assert isinstance(raised.value, sparkis.SparkisError)

    loose = sparkis.queryable(
        events.df, "s", key="k", value="v", mode="append", duplicates="any", wait_for_visibility=True
    )
    start(loose, "loose", tmp_path / "loose")
    assert client.get("loose:s:a") in ("2", "3")


def test_rows_of_one_key_in_two_partitions_fail_their_micro_batch(batches: Make, tmp_path: Path):
    events = batches("k string, f string, v int")
    events.add({"k": "a", "f": "x", "v": 1}, {"k": "a", "f": "y", "v": 2})
    events.add({"k": "b", "f": "x", "v": 3}, {"k": "b", "f": "x", "v": 4})
    rows = events.df.repartition(2)  # one each
    writer = sparkis.queryable(rows, "s", key="k", field="f", value="v", mode="append", log=tmp_path / "log")
    query = writer.queryName("apart").option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    assert "a micro-batch has several rows for the key b'apart:s:b'" in failure_of(query)
    with shown_by(tmp_path / "log", "apart") as shown:
        assert shown.applied.epoch == 0
        assert shown.field(b"apart:s:a", b"y") == b"2"


def test_epoch_is_same_with_and_without_shuffle(batches: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    events = batches("k int, v double, kept boolean")
    events.add(*({"k": k, "v": k / 4, "kept": k % 5 > 0} for k in range(100)))

    def published(name: str, rows_max: int) -> Epoch:
        monkeypatch.setattr(publisher, "UNSHUFFLED_ROWS_MAX", rows_max)
        writer = sparkis.queryable(
            events.df, "s", key="k", value="v", where="kept", mode="append", job="same", log=tmp_path / name
        )
        start(writer, name, tmp_path / f"{name} checkpoint").stop()
        log = ChangeLog(tmp_path / name).job("same")
        return log.epoch(log.current(), 0)

    unshuffled, shuffled, too_many = published("few", 100), published("none", -1), published("many", 79)
    assert len(unshuffled.inline) == 1  # the file is one partition
    assert len(shuffled.inline) == len(too_many.inline) == 2
    assert unshuffled.rows == shuffled.rows == too_many.rows == 80
    assert unshuffled.digest == shuffled.digest == too_many.digest
    for name in ("few", "none", "many"):
        with shown_by(tmp_path / name, "same") as shown:
            assert shown.applied.key_count == 80
            assert shown.value(b"same:s:99") == b"24.75"


def test_scattered_rows_of_key_are_not_shuffled_if_any_may_win(batches: Make, tmp_path: Path):
    events = batches("k int, v int, w int")
    events.add(*({"k": n % 50, "v": n, "w": -n} for n in range(400)))
    spread = events.df.repartition(4)
    writer = sparkis.queryable(
        spread, "s", key="k", value=("v", "w"), duplicates="any", mode="append", log=tmp_path / "log"
    )
    start(writer, "any", tmp_path / "checkpoint").stop()
    log = ChangeLog(tmp_path / "log").job("any")
    epoch = log.epoch(log.current(), 0)
    assert len(epoch.inline) == 4  # one of each partition that the query has; a shuffle would have made two
    assert 50 < epoch.rows <= 200  # several partitions have rows of one key, and each writes one of them
    with shown_by(tmp_path / "log", "any") as shown:
        assert shown.applied.key_count == 50
        for key in range(50):
            v, w = int(shown.field(b"any:s:%d" % key, b"v")), int(shown.field(b"any:s:%d" % key, b"w"))
            assert (v % 50, w) == (key, -v)


def test_complete_mode_replaces_state(client: redis.Redis, batches: Make, tmp_path: Path):
    events = batches("k string, v int")
    events.add({"k": "a", "v": 1}, {"k": "b", "v": 2})
    sums = events.df.groupBy("k").agg(F.sum("v").alias("sum")).where("sum > 0").orderBy("k")
    writer = sparkis.queryable(sums, "sum", key="k", value="sum", mode="complete", wait_for_visibility=True)
    query = start(writer, "complete", tmp_path / "checkpoint")
    assert keys(client, "complete:*") == {"complete:sum:a", "complete:sum:b"}
    events.add({"k": "b", "v": -2}, {"k": "c", "v": 7})
    query.processAllAvailable()
    assert keys(client, "complete:*") == {"complete:sum:a", "complete:sum:c"}
    assert client.mget("complete:sum:a", "complete:sum:b", "complete:sum:c") == ["1", None, "7"]


def shown_by(root: Path, job: str) -> Snapshot:
    """Return the newest epoch of a job, read from its log."""
    log = ChangeLog(root).job(job)
    newest = log.newest(log.current())
    return sparkis.read_snapshot(root, job, newest.epoch)


def ranking(shown: Snapshot, key: bytes) -> list[tuple[bytes, float]]:
    return list(shown.sorted_members(key, 0, shown.sorted_size(key)))


@pytest.mark.slow
def test_members_make_set_and_with_scores_sorted_one(batches: Make, tmp_path: Path):
    games = batches("day string, player string, points double, left boolean, at int")
    games.add(
        {"day": "mon", "player": "ann", "points": 7, "at": 1},
        {"day": "mon", "player": "bob", "points": 7.5, "at": 1},
        {"day": "mon", "player": "ann", "points": 9, "at": 2},
        {"day": "tue", "player": "cid", "points": -1, "at": 1},
    )
    writer = sparkis.queryable(
        games.df,
        StateDescriptor("top", key="day", member="player", score="points", order_by="at", ttl=3600),
        StateDescriptor("seen", key="day", member="player", deletion="left", duplicates="any"),
        mode="append",
        log=tmp_path / "log",
    )
    query = start(writer, "games", tmp_path / "checkpoint")
    with shown_by(tmp_path / "log", "games") as shown:
        assert ranking(shown, b"games:top:mon") == [(b"bob", 7.5), (b"ann", 9.0)]
        assert ranking(shown, b"games:top:tue") == [(b"cid", -1.0)]
        assert sorted(shown.members(b"games:seen:mon")) == [b"ann", b"bob"]
        assert shown.key_info(b"games:top:mon").expire_at_ms == shown.applied.clock_ms + 3_600_000
    games.add(
        {"day": "mon", "player": "bob", "points": None, "at": 3, "left": True},
        {"day": "tue", "player": "cid", "points": None, "at": 3},
    )
    query.processAllAvailable()
    with shown_by(tmp_path / "log", "games") as shown:
        assert ranking(shown, b"games:top:mon") == [(b"ann", 9.0)]
        assert shown.key_info(b"games:top:tue") is None
        assert list(shown.members(b"games:seen:mon")) == [b"ann"]
        assert list(shown.members(b"games:seen:tue")) == [b"cid"]


@pytest.mark.slow
def test_complete_mode_replaces_leaderboard_and_score_that_is_no_number_fails_it(batches: Make, tmp_path: Path):
    games = batches("day string, player string, points double")
    games.add({"day": "mon", "player": "ann", "points": 1}, {"day": "mon", "player": "bob", "points": 2})
    sums = games.df.groupBy("day", "player").agg(F.sum("points").alias("points")).where("points > 0 OR isnan(points)")
    writer = sparkis.queryable(
        sums, "top", key="day", member="player", score="points", mode="complete", log=tmp_path / "log"
    )
    query = start(writer, "board", tmp_path / "checkpoint")
    games.add({"day": "mon", "player": "ann", "points": -1}, {"day": "mon", "player": "bob", "points": 3})
    query.processAllAvailable()
    with shown_by(tmp_path / "log", "board") as shown:
        assert ranking(shown, b"board:top:mon") == [(b"bob", 5.0)]
    games.add({"day": "mon", "player": "bob", "points": "NaN"})
    assert "the score column 'points' is NaN in a row of the key b'board:top:mon'" in failure_of(query)


@pytest.mark.slow
def test_complete_mode_of_several_sorted_states_runs_plan_once(client: redis.Redis, batches: Make, tmp_path: Path):
    events = batches("k string, v int")
    events.add({"k": "a", "v": 1}, {"k": "b", "v": 2})
    sums = events.df.groupBy("k").agg(F.sum("v").alias("sum"), F.count("*").alias("n")).orderBy(F.desc("sum"))
    writer = sparkis.queryable(
        sums,
        StateDescriptor("sum", key="k", value="sum"),
        StateDescriptor("n", key="k", value="n"),
        mode="complete",
        wait_for_visibility=True,
    )
    query = start(writer, "sorted", tmp_path / "checkpoint")
    events.add({"k": "b", "v": 3})
    query.processAllAvailable()
    assert client.mget("sorted:sum:a", "sorted:sum:b", "sorted:n:b") == ["1", "5", "2"]


def test_several_states_of_one_query_are_one_epoch(client: redis.Redis, batches: Make, tmp_path: Path):
    flights = batches("carrier string, origin string, dest string, tail string, delay int, isCarrier boolean")
    row = {"carrier": "UA", "origin": "JFK", "dest": "LAX", "tail": "N1", "delay": 3, "isCarrier": True}
    flights.add(row, row | {"carrier": "AA", "isCarrier": False, "dest": "BOS", "tail": "N2", "delay": 5})
    writer = sparkis.queryable(
        flights.df,
        StateDescriptor("golden", key="carrier", value=["delay", "tail"], where="isCarrier"),
        StateDescriptor("route", key=["origin", "dest"], separator="-", field="tail", value="delay"),
        StateDescriptor("plane", key_format="plane/<tail>", value=["origin", "dest"], kind="value", encoding="json"),
        mode="append",
        wait_for_visibility=True,
    )
    query = start(writer, "several", tmp_path / "checkpoint")
    assert keys(client, "*several*") == {"several:golden:UA", "several:route:JFK-LAX", "several:route:JFK-BOS"}
    assert client.hgetall("several:golden:UA") == {"delay": "3", "tail": "N1"}
    assert client.hget("several:route:JFK-BOS", "N2") == "5"
    assert client.get("plane/N2") == '{"origin":"JFK","dest":"BOS"}'
    assert lag(client, "several")["committed"] == query.lastProgress["batchId"] == 0


def test_rows_that_cannot_be_written_are_left_out_and_counted_if_sink_skips_them(
    client: redis.Redis, batches: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = batches("k string, f string, v int")
    rows.add({"k": "a", "f": "x", "v": 1}, {"k": None, "f": "x", "v": 2}, {"k": "a:b", "f": "c", "v": 3})
    rows.add({"k": "a", "f": None, "v": 4}, {"k": None, "f": None, "v": 5}, {"k": "b", "f": "y", "v": 6})
    writer = sparkis.queryable(
        rows.df, "s", key=["k", "f"], value="v", mode="append", wait_for_visibility=True, on_bad_key="skip"
    )
    start(writer, "skips", tmp_path / "checkpoint")
    assert keys(client, "skips:s:*") == {"skips:s:a:x", "skips:s:b:y"}
    (row,) = (each for each in client.execute_command("STATE JOBS") if job_name(each) == "skips")
    assert fields_of(row)["skipped_rows"] == 4
    assert any("left out" in message and "is null" in message for message in caplog.messages)


def job_name(row: object) -> str:
    return str(fields_of(row)["name"])


def fields_of(row: Any) -> dict[str, Any]:
    return row if isinstance(row, dict) else dict(zip(row[::2], row[1::2], strict=True))


def test_null_and_deletion_column_delete(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, f string, v int, gone boolean")
    first = [{"k": k, "f": f, "v": 1, "gone": False} for k in "abc" for f in "xy"]
    rows.add(*first)
    rows.add(
        {"k": "a", "f": "x", "v": None, "gone": False},
        {"k": "b", "f": "x", "v": 2, "gone": True},
        {"k": "b", "f": "y", "v": 2, "gone": True},
        {"k": "c", "f": "x", "v": 2, "gone": None},
    )
    writer = sparkis.queryable(
        rows.df,
        StateDescriptor("m", key="k", field="f", value="v", deletion="gone"),
        StateDescriptor("v", key=["k", "f"], value="v", deletion="gone"),
        mode="append",
        wait_for_visibility=True,
    )
    start(writer, "deletions", tmp_path / "checkpoint")
    assert [client.hgetall(f"deletions:m:{k}") for k in "abc"] == [{"y": "1"}, {}, {"x": "2", "y": "1"}]
    assert keys(client, "deletions:v:*") == {f"deletions:v:{key}" for key in ("a:y", "c:x", "c:y")}
    assert client.exists("deletions:m:b") == 0


@pytest.mark.slow
def test_lists_grow_by_rows_or_are_replaced_by_arrays(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, at int, v double, all array<double>, bytes array<string>")
    rows.add(*({"k": "a", "at": at, "v": at / 2, "all": [1e21, at], "bytes": ["x", ""]} for at in (3, 1, 2)))
    rows.add({"k": "a", "at": 4, "v": 0.5, "all": [], "bytes": ["y"]}, {"k": "b", "at": 1, "v": 7, "bytes": ["z"]})
    writer = sparkis.queryable(
        rows.df.repartition(2),
        StateDescriptor("log", key="k", value="v", kind="list", order_by="at"),
        StateDescriptor("last", key="k", value=["at", "v"], kind="list", order_by="at", length_max=2, encoding="json"),
        StateDescriptor("all", key="k", value="all", kind="list", order_by="at"),
        StateDescriptor("raw", key="k", value="bytes", kind="list", order_by="at", encoding="json"),
        mode="append",
        wait_for_visibility=True,
    )
    query = writer.queryName("lists").option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    query.processAllAvailable()
    assert client.lrange("lists:log:a", 0, -1) == ["0.5", "1", "1.5", "0.5"]
    assert client.lrange("lists:last:a", 0, -1) == ['{"at":3,"v":1.5}', '{"at":4,"v":0.5}']
    assert client.exists("lists:all:a", "lists:all:b") == 0  # an empty array and a null delete
    assert client.lrange("lists:raw:a", 0, -1) == ['"y"']
    assert client.llen("lists:log:b") == 1
    rows.add({"k": "a", "at": 1, "all": [1.0, 1e21, -0.0]})
    query.processAllAvailable()
    assert client.lrange("lists:all:a", 0, -1) == ["1", "1e+21", "-0"]
    assert client.llen("lists:log:a") == 0  # a null value deletes the list
    rows.add({"k": "a", "at": 1, "v": 1, "all": [None]})
    assert "state 'all': 1 element(s) of an array are null" in failure_of(query)


def test_time_to_live_is_per_key_or_per_field(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, f string, v int")
    rows.add({"k": "a", "f": "x", "v": 1})
    writer = sparkis.queryable(
        rows.df,
        StateDescriptor("key", key="k", value="v", ttl=100),
        StateDescriptor("map", key="k", value=["f", "v"], ttl=200),
        StateDescriptor("field", key="k", field="f", value="v", ttl=300),
        StateDescriptor("shortField", key="k", field="f", value="v", ttl=0.001),
        StateDescriptor("short", key="k", value="v", ttl=0.001),
        mode="append",
        wait_for_visibility=True,
    )
    query = start(writer, "ttl", tmp_path / "checkpoint")
    assert 0 < client.ttl("ttl:key:a") <= 100 < client.ttl("ttl:map:a") <= 200
    assert 200 < client.httl("ttl:field:a", "x")[0] <= 300
    assert client.ttl("ttl:field:a") == -1  # the field has a time to live, not the key
    assert client.hgetall("ttl:shortField:a") == {}
    assert client.get("ttl:short:a") is None
    before = client.pexpiretime("ttl:key:a")
    rows.add({"k": "a", "f": "x", "v": 1})
    query.processAllAvailable()
    assert client.pexpiretime("ttl:key:a") > before


def test_micro_batch_without_rows_is_epoch(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    rows.add()
    rows.add({"k": "b", "v": 2})
    writer = sparkis.queryable(
        rows.df,
        StateDescriptor("all", key="k", value="v"),
        StateDescriptor("none", key="k", value="v", where="v > 100"),
        mode="append",
        wait_for_visibility=True,
    )
    query = start(writer, "empty", tmp_path / "checkpoint")
    assert lag(client, "empty")["applied"] == query.lastProgress["batchId"] == 2
    assert keys(client, "empty:*") == {"empty:all:a", "empty:all:b"}


@pytest.mark.parametrize("names", [pytest.param(["s"], marks=pytest.mark.slow), ["s", "t"]], ids=len)
def test_false_condition_leaves_checkpoint_whole(client: redis.Redis, batches: Make, tmp_path: Path, names: list[str]):
    rows = batches("k string, v int")
    counts = rows.df.groupBy("k").agg(F.count("*").alias("n"))
    states = [StateDescriptor(name, key="k", value="n", where="1 = 2") for name in names]
    job = f"never{len(names)}"
    for batch in range(2):
        rows.add({"k": "a", "v": 1})
        query = start(sparkis.queryable(counts, *states, wait_for_visibility=True), job, tmp_path / "checkpoint")
        assert lag(client, job)["applied"] == batch
        query.stop()
    assert keys(client, f"{job}:*") == set()


@pytest.mark.slow
def test_available_now_ends_and_state_stays(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    for run in range(2):
        rows.add({"k": "a", "v": run})
        writer = sparkis.queryable(rows.df, "s", key="k", value="v", mode="append", wait_for_visibility=True)
        query = (
            writer.queryName("now")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert client.get("now:s:a") == str(run)
    assert eventually(lambda: lag(client, "now")["stale"], bool)
    assert client.get("now:s:a") == "1"


@pytest.mark.slow
def test_query_restarted_on_its_checkpoint_continues(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    sums = rows.df.groupBy("k").agg(F.sum("v").alias("sum"))

    def run() -> StreamingQuery:
        writer = sparkis.queryable(sums, "sum", key="k", value="sum", wait_for_visibility=True)
        return start(writer, "again", tmp_path / "checkpoint")

    rows.add({"k": "a", "v": 1}, {"k": "b", "v": 1})
    run().stop()
    generation = client.execute_command("STATE", "JOBS")
    rows.add({"k": "a", "v": 10})
    query = run()
    assert client.mget("again:sum:a", "again:sum:b") == ["11", "1"]
    assert query.lastProgress["batchId"] == lag(client, "again")["committed"] == 1
    assert [each["generation"] for each in generation if each["name"] == "again"] == [f"{query.id}.1"]


@pytest.mark.slow
def test_job_is_live_while_its_query_runs_then_stale(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    writer = sparkis.queryable(rows.df, "s", key="k", value="v", mode="append", wait_for_visibility=True)
    query = start(writer, "alive", tmp_path / "checkpoint")
    eventually(lambda: lag(client, "alive")["stale"], lambda stale: stale == 0)
    query.stop()
    eventually(lambda: lag(client, "alive")["stale"], lambda stale: stale == 1)
    assert client.get("alive:s:a") == "1"
    start(writer, "alive", tmp_path / "checkpoint")  # there is nothing new to read: live without a micro-batch
    eventually(lambda: lag(client, "alive")["stale"], lambda stale: stale == 0)


@pytest.mark.slow
def test_one_writer_may_be_started_twice_under_two_names(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    writer = sparkis.queryable(rows.df, "s", key="k", value="v", mode="append", wait_for_visibility=True)
    queries = [start(writer, name, tmp_path / name) for name in ("left", "right")]
    for value in range(3):
        rows.add({"k": "a", "v": value})
        for query in queries:
            query.processAllAvailable()
        assert client.mget("left:s:a", "right:s:a") == [str(value)] * 2


def test_many_partitions_and_large_batches_go_through_change_files(
    spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path
):
    rows = batches("n int")
    rows.add({"n": 5000}, {"n": 5001})
    wide = rows.df.selectExpr("explode(sequence(n * 10000, n * 10000 + 9999)) AS k").selectExpr(
        "k", "sha2(string(k), 512) AS v"
    )
    writer = sparkis.queryable(wide.repartition(2), "s", key="k", value="v", mode="append", wait_for_visibility=True)
    query = start(writer, "large", tmp_path / "checkpoint")
    log = Path(spark.conf.get("spark.sparkis.log")) / "large" / f"{query.id}.1"
    assert len(list((log / "changes").iterdir())) == 2
    expected = {
        row.k: row.v
        for row in spark.range(50_000_000, 50_020_000).selectExpr("id AS k", "sha2(string(id), 512) AS v").collect()
    }
    found = client.mget([f"large:s:{key}" for key in expected])
    assert found == list(expected.values())


def test_wait_for_visibility_warns_where_no_server_is_known(
    spark: SparkSession, batches: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    writer = sparkis.queryable(
        rows.df, "s", key="k", value="v", mode="append", log=tmp_path / "log", wait_for_visibility=1
    )
    start(writer, "unseen", tmp_path / "checkpoint")
    assert [record for record in caplog.records if "started no server for the log" in record.getMessage()]
    with sparkis.read_snapshot(tmp_path / "log", "unseen") as snapshot:
        assert snapshot.value(b"unseen:s:a") == b"1"


def test_relative_log_is_one_folder_for_driver_and_tasks(
    batches: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    rows = batches("k string, v string")
    rows.add({"k": "a", "v": "x" * 100_000})
    writer = sparkis.queryable(rows.df, "s", key="k", value="v", mode="append", log="relative")
    start(writer, "relative", tmp_path / "checkpoint")
    with sparkis.read_snapshot(tmp_path / "relative", "relative") as snapshot:
        assert snapshot.value(b"relative:s:a") == b"x" * 100_000
