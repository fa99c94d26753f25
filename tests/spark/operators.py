"""Stateful queries of each operator of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.streaming.state import GroupState

from compat.waiting import WAIT_S_MAX
from tests.spark.attaching import (
    text,
)

Read = Callable[..., list[Any]]
# Long enough for a batch to come before it, short enough that some pass within a test.
BRIEF_MS, LONG_MS = 4_000, 3_600_000


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


def run(writer: DataStreamWriter) -> None:
    """Start a query again, for the one batch that is there."""
    query = writer.trigger(once=True).start()
    assert query.awaitTermination(WAIT_S_MAX)
