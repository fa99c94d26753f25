"""`sparkis.attach` to each kind of state: after every batch, all that redis-py reads is what Spark's own reader shows.

Random inputs, one batch after the other; in between the query is started again each time, and the attachment is stopped
now and then while batches go on. SPARKIS_SEED gives other inputs, SPARKIS_KILL_ROUNDS more of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import pytest
import redis
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.streaming.state import GroupState

from compat.waiting import WAIT_S_MAX
from tests.spark.attaching import (
    SCHEMA,
    SEED,
    Attach,
    attached,
    epochs_of,
    generations_of,
    rocksdb,
    shown,
    some_rows,
    text,
    whole,
)
from tests.spark.micro_batches import Batches, Settings

__all__ = ["attached"]

Make = Callable[[str], Batches]
Read = Callable[..., list[Any]]

pytestmark = [pytest.mark.usefixtures("endpoint"), pytest.mark.kill]

# Comparisons of each kind of state.
ROUNDS = min(50, int(os.environ.get("SPARKIS_KILL_ROUNDS") or 2))
# Long enough for a batch to come before it, short enough that some pass within a test.
BRIEF_MS, LONG_MS = 4_000, 3_600_000

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Spark's workers cannot import this module


@dataclass(frozen=True)
class Expiring:
    """A value, a field's value or an element, and when its time is over."""

    value: Any
    at_ms: int


@dataclass(frozen=True)
class Operator:
    """A stateful query, and what its state is to Redis."""

    mode: str
    query: Callable[[DataFrame], DataFrame]
    expected: Callable[[Read], dict[str, Any]]
    stores: tuple[str, ...] = ("hdfs", "rocksdb")


def aggregated(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").agg(F.count("*").alias("n"), F.avg("v").alias("mean"), F.min("n").alias("least"))


def aggregates(read: Read) -> dict[str, Any]:
    """The buffers of count(*), avg(v), min(n): `count` is there twice, so that it has no name of its own."""
    names = ("_0", "sum", "_2", "min")
    return {f"aggregation:{row.key.k}": dict(zip(names, map(text, tuple(row.value)), strict=True)) for row in read()}


def windowed(rows: DataFrame) -> DataFrame:
    return rows.withWatermark("t", "1 minute").groupBy(F.window("t", "30 seconds"), "k").agg(F.max("v").alias("top"))


def seen_for_ever(rows: DataFrame) -> DataFrame:
    return rows.dropDuplicates(["k"])


def seen_for_a_time(rows: DataFrame) -> DataFrame:
    return rows.withWatermark("t", "1 minute").dropDuplicatesWithinWatermark(["k", "n"])


def sessions(rows: DataFrame) -> DataFrame:
    watermarked = rows.withWatermark("t", "1 minute")
    return watermarked.groupBy(F.session_window("t", "10 seconds"), "k").agg(F.max("v").alias("top"), F.count("*"))


def joined(rows: DataFrame) -> DataFrame:
    left = rows.select("k", "n", "t").withWatermark("t", "30 seconds")
    right = rows.select(F.col("k").alias("k2"), F.col("v").alias("w"), F.col("t").alias("t2"))
    within = "k = k2 AND t2 >= t AND t2 <= t + INTERVAL 20 SECONDS"
    return left.join(right.withWatermark("t2", "30 seconds"), F.expr(within))


def sides(read: Read) -> dict[str, Any]:
    """Return both sides of the join: a hash for each key, a field for each of its rows."""
    found: dict[str, Any] = {}
    for side in ("left", "right"):
        for row in read(storeName=f"{side}-keyWithIndexToValue"):
            value = row.value.asDict()
            for column, given in value.items():
                if isinstance(given, datetime):
                    value[column] = given.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            found.setdefault(f"{side}:{row.key.field0}", {})[str(row.key["index"])] = value
    return found


def groups(rows: DataFrame) -> DataFrame:
    def count(key: tuple[str], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        before = state.get if state.exists else (0, 0.0)
        lengths, sums = zip(*((len(frame), frame["v"].sum()) for frame in frames), strict=True)
        after = (before[0] + sum(lengths), before[1] + sum(sums))
        if after[0] > 2:
            state.remove()
        else:
            state.update(after)
        yield pd.DataFrame({"k": [key[0]]})

    return rows.groupBy("k").applyInPandasWithState(count, "k string", "n long, total double", "update", "NoTimeout")


def instant(micros: int) -> str:
    return text(datetime.fromtimestamp(micros / 1e6, UTC))


class Machine(StatefulProcessor):
    """Does to its state what the rows' `n` say; half of it has a time to live."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.last = handle.getValueState("last", "v double, n int", ttlDurationMs=BRIEF_MS)
        self.total = handle.getValueState("total", "sum double")
        self.kept = handle.getValueState("kept", "v double", ttlDurationMs=LONG_MS)
        self.recent = handle.getListState("recent", "v double")
        self.brief = handle.getListState("brief", "v double", ttlDurationMs=BRIEF_MS)
        self.days = handle.getMapState("days", "day int", "v double, n int")
        self.hours = handle.getMapState("hours", "hour int", "v double", ttlDurationMs=BRIEF_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.n == -5:
                for state in (self.last, self.total, self.kept, self.recent, self.brief, self.days, self.hours):
                    state.clear()
                continue
            self.last.update((row.v, row.n))
            self.kept.update((row.v,))
            self.total.update((row.v + (self.total.get()[0] if self.total.exists() else 0.0),))
            if row.n == 0:
                self.recent.put([(0.0,), (row.v,)])
                self.brief.put([(1.0,), (row.v,)])
            elif row.n > 0:
                self.recent.appendValue((row.v,))
                self.brief.appendValue((row.v,))
            else:
                self.recent.appendList([(row.v,), (row.v,)])
            self.days.updateValue((row.n,), (row.v, row.n))
            self.hours.updateValue((row.n,), (row.v,))
            if row.n == 3:
                self.days.removeKey((1,))
                self.hours.removeKey((1,))
        yield Row(k=key[0])

    def close(self) -> None:
        """Nothing is open."""


def transformed(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").transformWithState(Machine(), "k string", "update", "processingTime")


def variables(read: Read) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in read(stateVarName="last"):
        value = {"v": text(row.value.value.v), "n": text(row.value.value.n)}
        found[f"last:{row.key.k}"] = Expiring(value, row.value.ttlExpirationMs)
    for row in read(stateVarName="kept"):
        found[f"kept:{row.key.k}"] = Expiring(text(row.value.value.v), row.value.ttlExpirationMs)
    for row in read(stateVarName="total"):
        found[f"total:{row.key.k}"] = text(row.value["sum"])
    for row in read(stateVarName="recent"):
        found.setdefault(f"recent:{row.key.k}", []).append(text(row.list_element.v))
    for row in read(stateVarName="brief"):
        element = Expiring(text(row.list_element.value.v), row.list_element.ttlExpirationMs)
        found.setdefault(f"brief:{row.key.k}", []).append(element)
    for row in read(stateVarName="days"):
        found.setdefault(f"days:{row.key.k}", {})[text(row.user_map_key.day)] = row.user_map_value.asDict()
    for row in read(stateVarName="hours"):
        value = Expiring(text(row.user_map_value.value.v), row.user_map_value.ttlExpirationMs)
        found.setdefault(f"hours:{row.key.k}", {})[text(row.user_map_key.hour)] = value
    return found


OPERATORS = {
    "aggregation": Operator("update", aggregated, aggregates),
    "windows": Operator(
        "update",
        windowed,
        lambda read: {
            f"aggregation:{text(row.key.window.start)}:{row.key.k}": text(row.value["max"]) for row in read()
        },
    ),
    "session-windows": Operator(
        "append",
        sessions,
        lambda read: {
            f"sessions:{row.key.k}:{text(row.key.sessionStartTime)}": {
                "session_window_end": text(row.value.session_window.end),
                "max": text(row.value["max"]),
                "count": text(row.value["count"]),
            }
            for row in read()
        },
    ),
    "dropDuplicates": Operator("append", seen_for_ever, lambda read: {f"seen:{row.key.k}": "1" for row in read()}),
    "dropDuplicatesWithinWatermark": Operator(
        "append",
        seen_for_a_time,
        lambda read: {f"seen:{row.key.k}:{row.key.n}": instant(row.value.expiresAtMicros) for row in read()},
    ),
    "join": Operator("append", joined, sides),
    "applyInPandasWithState": Operator(
        "update",
        groups,
        lambda read: {
            f"groupState:{row.key.k}": {
                "n": text(row.value.groupState.n),
                "total": text(row.value.groupState.total),
            }
            for row in read()
        },
    ),
    "transformWithState": Operator("update", transformed, variables, stores=("rocksdb",)),
}


def alive(value: Any, now_ms: int) -> Any:
    """Return what of a value has not expired; None if nothing. A list expires with the last of its elements."""
    if isinstance(value, Expiring):
        return value.value if value.at_ms > now_ms else None
    if isinstance(value, dict):
        return {field: kept for field, each in value.items() if (kept := alive(each, now_ms)) is not None} or None
    if isinstance(value, list):
        return [getattr(each, "value", each) for each in value] if alive(value[-1], now_ms) is not None else None
    return value


def ends_of(value: Any) -> list[int]:
    """Return when a value, or what it holds, expires."""
    if isinstance(value, Expiring):
        return [value.at_ms]
    if isinstance(value, dict | list):
        return [end for each in (value.values() if isinstance(value, dict) else value) for end in ends_of(each)]
    return []


def read_all(client: redis.Redis, job: str) -> dict[str, Any]:
    """Return what clients see, without the job's name, and with JSON read."""
    return {key.removeprefix(f"{job}:"): _read_json(value) for key, value in shown(client, job).items()}


def _read_json(value: Any) -> Any:
    is_json = isinstance(value, dict) and all(text.startswith("{") for text in value.values())
    return {field: json.loads(text) for field, text in value.items()} if is_json else value


def check(client: redis.Redis, job: str, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Compare all keys with Spark's, and when they expire; return what was read."""
    ends = sorted({end for value in expected.values() for end in ends_of(value)})
    while True:  # until nothing expires while it is read; ends do not come without end
        before_ms = time.time_ns() // 1_000_000
        found = read_all(client, job)
        after_ms = time.time_ns() // 1_000_000
        if not any(before_ms <= end <= after_ms for end in ends):
            break
    alive_now = {key: alive(value, after_ms) for key, value in expected.items()}
    assert found == {key: value for key, value in alive_now.items() if value is not None}
    for key, value in expected.items():
        if isinstance(value, Expiring | list) and (of_key := ends_of(value)):
            assert client.pexpiretime(f"{job}:{key}") in (max(of_key), -2), "-2 where it has just expired"
        if isinstance(value, dict) and ends_of(value):
            of_fields = client.hpexpiretime(f"{job}:{key}", *value) or [-2] * len(value)
            for each, end in zip(value.values(), of_fields, strict=True):
                assert end in (each.at_ms, -2)
    return found


def run(writer: DataStreamWriter) -> None:
    """Start a query again, for the one batch that is there."""
    query = writer.trigger(once=True).start()
    assert query.awaitTermination(WAIT_S_MAX)


@pytest.mark.parametrize(
    ("of", "store"),
    [
        # The golden checkpoints have all of them. What processors declare is followed in the same way, and tested
        # beside them.
        pytest.param(name, store, marks=[] if not number and name in ("windows", "join") else [pytest.mark.slow])
        for name, each in OPERATORS.items()
        for number, store in enumerate(each.stores)
    ],
)
def test_after_every_batch_all_keys_are_as_in_sparks_state_over_restarts_of_both_sides(
    spark: SparkSession,
    client: redis.Redis,
    batches: Make,
    attached: Attach,
    tmp_path: Path,
    settings: Settings,
    of: str,
    store: str,
):
    operator = OPERATORS[of]
    random = Random(f"{SEED} {of} {store}")
    if store == "rocksdb":
        settings(rocksdb(random.choice("12")))
    rows = batches(SCHEMA)
    checkpoint = tmp_path / "checkpoint"
    job = f"{of}-{store}"
    made = operator.query(rows.df).writeStream.outputMode(operator.mode).format("noop").queryName(job)
    writer = made.option("checkpointLocation", str(checkpoint))
    rows.add(*some_rows(random, 0), {"k": "first", "n": 1, "v": 1.0, "t": "2026-01-01T00:00:00Z"})
    run(writer)
    attachment = attached(checkpoint=checkpoint, job=job)
    ever: set[str] = set()
    for minute in range(1, ROUNDS + 1):
        is_away = random.random() < 0.4
        if is_away:
            attachment.stop()
        for _ in range(random.choice((1, 1, 2))):
            rows.add(*some_rows(random, minute % 60))
            run(writer)
        if is_away:
            attachment = attached(checkpoint=checkpoint, job=job)
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        expected = operator.expected(partial(whole, spark, checkpoint, attachment.batch))
        ever |= check(client, job, expected).keys()
    assert ever
    assert generations_of(attachment) == 1, "no gap, so the state is read whole once"
    numbers = epochs_of(attachment)
    assert numbers == list(range(numbers[0], attachment.batch + 1)), "one epoch for each batch"
