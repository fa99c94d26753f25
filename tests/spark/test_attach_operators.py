"""`sparkis.attach` to each kind of operator: after every batch, clients see what Spark's own reader shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pandas as pd
import pytest
import redis
from attaching import SCHEMA, SEED, Attach, attached, shown, some_rows, text, whole
from micro_batches import Batches, start
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState

__all__ = ["attached"]

Make = Callable[[str], Batches]
Read = Callable[..., list[Any]]

pytestmark = pytest.mark.usefixtures("endpoint")


class Operator(NamedTuple):
    """A stateful query, and what its state is to Redis."""

    mode: str
    query: Callable[[DataFrame], DataFrame]
    expected: Callable[[Read], dict[str, Any]]


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


def side(name: str, read: Read) -> dict[str, Any]:
    """Return one side of the join: a hash for each key, a field for each of its rows."""
    found: dict[str, Any] = {}
    for row in read(storeName=f"{name}-keyWithIndexToValue"):
        value = row.value.asDict()
        for column, given in value.items():
            if isinstance(given, datetime):
                value[column] = given.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        found.setdefault(f"{name}:{row.key.field0}", {})[str(row.key["index"])] = value
    return found


OPERATORS = {
    "dropDuplicates": Operator("append", seen_for_ever, lambda read: {f"seen:{row.key.k}": "1" for row in read()}),
    "dropDuplicatesWithinWatermark": Operator(
        "append",
        seen_for_a_time,
        lambda read: {f"seen:{row.key.k}:{row.key.n}": instant(row.value.expiresAtMicros) for row in read()},
    ),
    "session windows": Operator(
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
    "join": Operator("append", joined, lambda read: side("left", read) | side("right", read)),
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
}


@pytest.mark.parametrize("of", OPERATORS)
def test_every_operators_state_is_read_as_spark_has_it(
    spark: SparkSession, client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path, of: str
):
    operator = OPERATORS[of]
    random = Random(SEED)
    rows = batches(SCHEMA)
    checkpoint = tmp_path / "checkpoint"
    name = "job-" + of.replace(" ", "-")
    rows.add(*some_rows(random, 0), {"k": "first", "n": 1, "v": 1.0, "t": "2026-01-01T00:00:00Z"})
    writer = operator.query(rows.df).writeStream.outputMode(operator.mode).format("noop")
    query = start(writer, name, checkpoint)
    attachment = attached(query)
    ever: set[str] = set()
    for minute in range(1, 6):
        assert attachment.wait()
        found = shown(client, name)
        if of == "join":
            found = {key: {field: json.loads(row) for field, row in rows.items()} for key, rows in found.items()}
        expected = operator.expected(lambda **options: whole(spark, checkpoint, attachment.batch, **options))
        assert found == {f"{name}:{key}": value for key, value in expected.items()}
        ever |= found.keys()
        rows.add(*some_rows(random, minute))
        query.processAllAvailable()
    assert len(ever) > 5
    assert (ever == found.keys()) == (of == "dropDuplicates"), "all but that one forget"
