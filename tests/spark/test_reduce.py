"""A reducing state holds what all rows of the stream come to, each micro-batch folded in once."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkis
from sparkis import StateDescriptor
from tests.spark.micro_batches import Batches, failure_of, start

Make = Callable[[str], Batches]

FOLDING = ("sum", "count", "min", "max")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

pytestmark = pytest.mark.usefixtures("endpoint")

HITS = "page string, minute string, n bigint, price decimal(20,3), took double, name string, at timestamp, day date"
STATES = (
    StateDescriptor("hits", key="page", reduce="count"),
    StateDescriptor("named", key="page", value="name", reduce="count"),
    StateDescriptor("minutes", key="page", field="minute", value="n", reduce="sum"),
    StateDescriptor("revenue", key="page", value="price", reduce="sum"),
    StateDescriptor("took", key="page", value="took", reduce="sum"),
    StateDescriptor("fastest", key="page", value="took", reduce="min"),
    StateDescriptor("slowest", key="page", value="took", reduce="max"),
    StateDescriptor("first", key="page", value="name", reduce="min"),
    StateDescriptor("final", key="page", value="name", reduce="max"),
    StateDescriptor("cheapest", key="page", field="minute", value="price", reduce="min"),
    StateDescriptor("since", key="page", value="at", reduce="min"),
    StateDescriptor("until", key="page", value="at", reduce="max"),
    StateDescriptor("day", key="page", value="day", reduce="max"),
    StateDescriptor("newest", key="page", value="name", reduce="last", order_by=("at", "n")),
    StateDescriptor("seen", key="page", value="name", order_by=("at", "n"), where="name is not null"),
)


def some_rows(seed: int, count: int) -> list[dict[str, object]]:
    """Make rows with nulls everywhere but in keys, and with numbers whose sum is no bigint."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        row = {
            "page": chance.choice(("a", "b", "ü")),
            "minute": f"10:{chance.randrange(3)}",
            "n": chance.choice((None, chance.randrange(-9, 9), 2**63 - 1, 2**62)),
            "price": chance.choice((None, "-0.001", "99999999999999999.999", "7")),
            "took": chance.choice((None, 0.1, 1e-9, 2.5e22, float(number))),
            "name": chance.choice((None, "Zoë", "anna", "bo", "漢字", "")),
            "at": f"2024-05-0{chance.randrange(1, 9)}T10:00:00{chance.choice(('', '.5', '.25'))}Z",
            "day": chance.choice((None, "2024-05-01", "1999-12-31")),
        }
        made.append(row | {"at": chance.choice((None, row["at"])) if number % 5 == 0 else row["at"]})
    return made


def expected(table: DataFrame) -> dict[str, dict[str, object]]:
    """Let Spark itself aggregate all rows, by page."""
    found = table.groupBy("page").agg(
        F.count("*").alias("hits"),
        F.count("name").alias("named"),
        F.sum("price").alias("revenue"),
        F.sum("took").alias("took"),
        F.min("took").alias("fastest"),
        F.max("took").alias("slowest"),
        F.min("name").alias("first"),
        F.max("name").alias("final"),
        F.unix_micros(F.min("at")).alias("since"),
        F.unix_micros(F.max("at")).alias("until"),
        F.max("day").alias("day"),
    )
    return {row.page: row.asDict() for row in found.collect()}


@pytest.mark.parametrize(
    "is_mixed", [pytest.param(True, id="beside-other-states"), pytest.param(False, id="alone", marks=pytest.mark.slow)]
)
def test_every_reduction_of_every_type_equals_spark_over_all_rows(
    client: redis.Redis, batches: Make, tmp_path: Path, is_mixed: bool
):
    """Alone, rows are folded by Spark; beside states that are not folded, where they are encoded."""
    job = "mixed" if is_mixed else "folded"
    everything = StateDescriptor("all", key_format=f"{job}:everything", reduce="count")
    others = [state for state in STATES if is_mixed or state.reduce in FOLDING]
    hits = batches(HITS)
    for seed, count in enumerate((40, 1, 0, 25)):
        hits.add(*some_rows(seed, count))
    writer = sparkis.queryable(hits.df.repartition(3), everything, *others, mode="append", wait_for_visibility=True)
    query = start(writer, job, tmp_path / "checkpoint")
    query.stop()
    hits.add(*some_rows(9, 30))
    start(writer, job, tmp_path / "checkpoint")

    table = hits.as_table()
    assert client.get(f"{job}:everything") == str(table.count())
    for page, row in expected(table).items():
        read = {state.name: client.get(f"{job}:{state.name}:{page}") for state in others if state.field is None}
        assert read["hits"] == str(row["hits"])
        assert read["named"] == str(row["named"])
        assert read["revenue"] == str(row["revenue"])
        assert math.isclose(float(read["took"]), row["took"], rel_tol=1e-12)
        assert (float(read["fastest"]), float(read["slowest"])) == (row["fastest"], row["slowest"])
        assert (read["first"], read["final"]) == (row["first"], row["final"])
        assert read["day"] == str(row["day"])
        for mine, theirs in ((read["since"], row["since"]), (read["until"], row["until"])):
            assert datetime.fromisoformat(mine) == EPOCH + timedelta(microseconds=theirs)
        assert read.get("newest") == read.get("seen")
    totals: dict[tuple[str, str], int] = {}
    cheapest: dict[tuple[str, str], str] = {}
    for row in table.collect():
        place = (row.page, row.minute)
        if row.n is not None:
            totals[place] = totals.get(place, 0) + row.n
        if row.price is not None:
            cheapest[place] = min((cheapest.get(place, str(row.price)), str(row.price)), key=float)
    assert max(totals.values()) >= 2**63
    for state, by_place in (("minutes", totals), ("cheapest", cheapest)):
        for page in ("a", "b", "ü"):
            of_page = {minute: str(value) for (each, minute), value in by_place.items() if each == page}
            assert client.hgetall(f"{job}:{state}:{page}") == of_page


def test_time_to_live_counts_from_last_micro_batch_that_touched_key(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, n int")
    rows.add({"k": "a", "n": 1}, {"k": "b", "n": 1})
    writer = sparkis.queryable(
        rows.df,
        StateDescriptor("long", key="k", value="n", reduce="max", ttl=timedelta(hours=1)),
        StateDescriptor("short", key="k", value="n", reduce="sum", ttl=timedelta(milliseconds=1)),
        mode="append",
        wait_for_visibility=True,
    )
    query = start(writer, "mortal", tmp_path / "checkpoint")
    first = client.pexpiretime("mortal:long:a")
    assert client.pexpiretime("mortal:long:b") == first
    rows.add({"k": "a", "n": 0}, {"k": "b", "n": None})
    query.processAllAvailable()
    assert client.get("mortal:long:a") == "1"
    assert client.pexpiretime("mortal:long:a") > first == client.pexpiretime("mortal:long:b")
    assert client.get("mortal:short:a") is None


def test_checkpoint_that_was_set_back_folds_nothing_twice(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, n int")
    for number in range(1, 4):
        rows.add({"k": "a", "n": number})

    def run() -> None:
        writer = sparkis.queryable(
            rows.df, "total", key="k", value="n", reduce="sum", wait_for_visibility=True, on_rewind="truncate"
        )
        start(writer, "rewound", tmp_path / "checkpoint").stop()

    run()
    assert client.get("rewound:total:a") == "6"
    for folder in ("commits", "offsets"):
        (tmp_path / "checkpoint" / folder / "2").unlink()
        for crc in (tmp_path / "checkpoint" / folder).glob(".2.crc"):
            crc.unlink()
    run()  # the last batch again: its commit is there
    assert client.get("rewound:total:a") == "6"
    for folder in ("commits", "offsets"):
        for number in ("1", "2"):
            (tmp_path / "checkpoint" / folder / number).unlink()
            (tmp_path / "checkpoint" / folder / f".{number}.crc").unlink(missing_ok=True)
    rows.add({"k": "a", "n": 10})
    run()
    assert client.get("rewound:total:a") == "16"


@pytest.mark.parametrize(
    ("arguments", "mode", "reason"),
    [
        ({"reduce": "sum"}, "complete", r"state 's': reduce='sum'.*mode='complete'"),
        ({"reduce": "sum", "value": "name"}, "append", r"state 's'.*the column 'name', whose type is string.*cast"),
        ({"reduce": "max", "value": "tags"}, "append", r"state 's'.*'tags'.*array<string>"),
        ({"reduce": "last"}, "append", r"state 's'.*needs order_by="),
        ({"reduce": "sum", "duplicates": "any"}, "append", r"leave out order_by= and duplicates="),
    ],
)
def test_impossible_reduction_is_refused_at_start(batches: Make, arguments, mode, reason):
    df = batches("k string, n int, name string, tags array<string>").df
    df = df.groupBy("k").agg(F.sum("n").alias("n")) if mode == "complete" else df
    with pytest.raises(sparkis.SparkisError, match=reason):
        sparkis.queryable(df, "s", mode=mode, **({"key": "k", "value": "n"} | arguments))


TOTALS = r"state 's': reduce='{}' adds up the rows of all micro-batches.*Leave out reduce=.*mode='append'"


def test_totals_are_not_added_up(spark: SparkSession, batches: Make):
    """An aggregation in update mode brings a key's sum again with each change of it: the state would double."""
    rows = batches("k string, n int, at timestamp")
    totals = rows.df.groupBy("k").agg(F.sum("n").alias("n")).where("n > 0").select("n", "k")
    rows.df.createOrReplaceTempView("rows_to_add_up")
    in_sql = spark.sql("SELECT k, count(*) AS n FROM rows_to_add_up GROUP BY k")
    for df in (totals, in_sql, totals.join(spark.createDataFrame([("a",)], "k string"), "k")):
        for reduce in ("sum", "count"):
            with pytest.raises(sparkis.SparkisError, match=TOTALS.format(reduce)):
                sparkis.queryable(df, "s", mode="update", key="k", value="n", reduce=reduce)
        for reduce in ("min", "max"):  # of a total's values the least, or the greatest, so far
            sparkis.queryable(df, "s", mode="update", key="k", value="n", reduce=reduce)
    once = rows.df.withWatermark("at", "1 minute").groupBy("k", F.window("at", "1 minute")).agg(F.sum("n").alias("n"))
    sparkis.queryable(once, "s", mode="append", key="k", value="n", reduce="sum")
    limits = spark.createDataFrame([("a", 1), ("a", 2)], "k string, most int").groupBy("k").agg(F.max("most"))
    for df in (rows.df.join(limits, "k"), rows.df.dropDuplicates(["k", "n"])):
        sparkis.queryable(df, "s", mode="update", key="k", value="n", reduce="sum")


def test_totals_in_user_function_are_not_added_up(batches: Make, tmp_path: Path):
    rows = batches("k string, n int")
    rows.add({"k": "a", "n": 1})

    def write(batch: DataFrame, batch_id: int) -> None:
        sparkis.publish(batch, batch_id, "s", key="k", value="n", reduce="sum")

    totals = rows.df.groupBy("k").agg(F.sum("n").alias("n"))
    query = totals.writeStream.foreachBatch(write).outputMode("update").queryName("own")
    assert re.search(TOTALS.format("sum"), failure_of(query.option("checkpointLocation", str(tmp_path / "c")).start()))
