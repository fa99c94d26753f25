"""Windows and other structs: their fields are columns of a state, and their times have a format of one's choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import sparkis
from sparkis import StateDescriptor
from tests.spark.micro_batches import Batches, start

Make = Callable[[str], Batches]

pytestmark = pytest.mark.usefixtures("endpoint")

TRADES = "symbol string, at timestamp, price double"


def candles(trades: DataFrame) -> DataFrame:
    """Aggregate trades by symbol and minute, into a struct."""
    return trades.groupBy("symbol", F.window("at", "1 minute")).agg(
        F.struct(F.min("price").alias("low"), F.max("price").alias("high")).alias("stats"),
    )


def test_fields_of_structs_are_columns_of_state(client: redis.Redis, batches: Make, tmp_path: Path):
    trades = batches(TRADES)
    trades.add(
        {"symbol": "ACME", "at": "2024-05-01T10:00:10Z", "price": 3.5},
        {"symbol": "ACME", "at": "2024-05-01T10:00:50Z", "price": 2},
        {"symbol": "ACME", "at": "2024-05-01T10:01:00Z", "price": 9},
    )
    writer = sparkis.queryable(
        candles(trades.df),
        StateDescriptor("low", key=["symbol", "window.start"], value="stats.low"),
        StateDescriptor("lows", key="symbol", field="window.start", value="stats.low"),
        StateDescriptor("ranges", key="symbol", field="window.end", value=["stats.low", "stats.high"]),
        StateDescriptor("candle", key_format="candle/<symbol>/<window.start>", value=["stats.low", "stats.high"]),
        StateDescriptor("at", key="symbol", field="window.start", value="stats.low", time_format="HH:mm"),
        StateDescriptor(
            "day", key_format="day/<window.start>", member="symbol", duplicates="any", time_format="yyyyMMdd"
        ),
        wait_for_visibility=True,
    )
    start(writer, "candles", tmp_path / "checkpoint")
    assert client.get("candles:low:ACME:2024-05-01T10:00:00Z") == "2"
    assert client.hgetall("candles:lows:ACME") == {"2024-05-01T10:00:00Z": "2", "2024-05-01T10:01:00Z": "9"}
    assert json.loads(client.hget("candles:ranges:ACME", "2024-05-01T10:01:00Z")) == {
        "stats.low": 2.0,
        "stats.high": 3.5,
    }
    assert client.hgetall("candle/ACME/2024-05-01T10:00:00Z") == {"stats.low": "2", "stats.high": "3.5"}
    assert client.hgetall("candles:at:ACME") == {"10:00": "2", "10:01": "9"}
    assert client.smembers("day/20240501") == {"ACME"}


def test_times_are_written_in_utc_in_any_format(client: redis.Redis, batches: Make, settings, tmp_path: Path):
    settings({"spark.sql.session.timeZone": "America/New_York"})
    rows = batches("k string, at timestamp, local timestamp_ntz, day date, nested struct<at timestamp>")
    at = "2024-11-03T05:30:00Z"  # in New York, that hour comes twice
    rows.add({"k": "a", "at": at, "local": "2024-11-03T01:30:00", "day": "2024-11-03", "nested": {"at": at}})
    writer = sparkis.queryable(
        rows.df,
        "s",
        mode="append",
        key="k",
        value=["at", "local", "day", "nested"],
        time_format="dd.MM.yyyy 'at' H:mm",
        wait_for_visibility=True,
    )
    start(writer, "formats", tmp_path / "checkpoint")
    assert client.hgetall("formats:s:a") == {
        "at": "03.11.2024 at 5:30",
        "local": "03.11.2024 at 1:30",
        "day": "03.11.2024 at 0:00",
        "nested": '{"at":"03.11.2024 at 5:30"}',
    }


def test_rows_whose_times_have_same_text_are_rows_of_one_key(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("at timestamp, n int")
    rows.add(*({"at": f"2024-05-01T10:{minute:02}:00Z", "n": minute} for minute in range(60)))
    writer = sparkis.queryable(
        rows.df,
        "byHour",
        mode="append",
        key="at",
        value="n",
        order_by="at",
        time_format="yyyy-MM-dd'T'HH",
        wait_for_visibility=True,
    )
    start(writer, "hours", tmp_path / "checkpoint")
    assert client.keys("hours:*") == ["hours:byHour:2024-05-01T10"]
    assert client.get("hours:byHour:2024-05-01T10") == "59"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"key": "window.stat"},
            r"key= names the column 'window.stat'.*did you mean 'window.start'.*\n  symbol: string",
        ),
        ({"key": "start"}, r"did you mean 'window.start'.*\? Its columns:"),
        ({"key": "Symbol"}, r"did you mean 'symbol'\?"),
        ({"value": "stats.mean"}, r"\n  stats: struct\n    low: double\n    high: double$"),
        ({"key": "window"}, r"the key column 'window' has the type struct"),
        (
            {"value": "window.start", "reduce": "max", "time_format": "HH:mm", "mode": "append"},
            r"texts of time_format= do not compare as times do",
        ),
        ({"time_format": "HH:mm"}, r"time_format= is for dates and timestamps.*leave it out"),
        ({"field": "window.start", "time_format": "bbb"}, r"time_format='bbb' is not a pattern"),
    ],
)
def test_wrong_column_or_format_is_explained_at_start(batches: Make, arguments, reason):
    trades = batches(TRADES)
    with pytest.raises(sparkis.DescriptorError, match=f"(?s){reason}"):
        sparkis.queryable(candles(trades.df), "s", **({"key": "symbol", "value": "stats.low"} | arguments))


def test_column_whose_own_name_has_dot_comes_first(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, a struct<b:int>")
    rows.add({"k": "x", "a": {"b": 1}})
    df = rows.df.withColumn("a.b", F.lit("the column's"))
    writer = sparkis.queryable(df, "s", mode="append", key="k", value="a.b", wait_for_visibility=True)
    start(writer, "dotted", tmp_path / "checkpoint")
    assert client.get("dotted:s:x") == "the column's"
