"""What a state keeps by the order of its rows does not depend on the micro-batches in which they come."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

import sparkis
from sparkis import StateDescriptor
from tests.spark.micro_batches import Batches, failure_of, start

Make = Callable[[str], Batches]

pytestmark = pytest.mark.usefixtures("endpoint")

READINGS = "sensor string, hour string, at timestamp, number bigint, temp double, unit string"
STATES = (
    StateDescriptor("latest", key="sensor", value="temp", last_by="at"),
    StateDescriptor("first", key="sensor", value="temp", first_by="at"),
    StateDescriptor("hottest", key="sensor", value="at", max_by="temp"),
    StateDescriptor("coldest", key="sensor", value="at", min_by=["temp", "unit"]),
    StateDescriptor("reading", key="sensor", value=["temp", "unit", "at"], last_by="at"),
    StateDescriptor("byHour", key="sensor", field="hour", value="number", last_by="at"),
    StateDescriptor("recent", key="sensor", value="number", kind="list", last_by="at", length_max=5),
    StateDescriptor("early", key="sensor", value="number", kind="list", first_by="at", length_max=3),
    StateDescriptor("total", key="sensor", value="number", reduce="count"),
)


def some_readings(seed: int, count: int) -> list[dict[str, object]]:
    """Make readings with different times and temperatures, in a random order."""
    chance = random.Random(seed)
    made = [
        {
            "sensor": chance.choice("ab"),
            "hour": f"{number // 60 % 3}",
            "at": f"2024-05-01T{number // 60 % 3:02}:{number % 60:02}:00.{number:03}Z",
            "number": number,
            "temp": chance.choice((-1, 1)) * (number + 0.5),
            "unit": chance.choice((None, "C", "F")),
        }
        for number in range(count)
    ]
    chance.shuffle(made)
    return made


def values_by_key(client: redis.Redis, job: str) -> dict[str, object]:
    """Read all keys of a job by the rest of their names."""
    read = {"string": client.get, "hash": client.hgetall, "list": lambda key: client.lrange(key, 0, -1)}
    return {key.removeprefix(f"{job}:"): read[client.type(key)](key) for key in client.keys(f"{job}:*")}


def expected(rows: list[dict[str, object]]) -> dict[str, object]:
    """Work out in Python what the states are to hold."""
    found: dict[str, object] = {}

    def text(value: object) -> str:
        return str(value).removesuffix(".0") if isinstance(value, float) else str(value)

    for sensor in "ab":
        mine = sorted((row for row in rows if row["sensor"] == sensor), key=lambda row: row["at"])
        by_temp = sorted(mine, key=lambda row: row["temp"])
        at = {id(row): f"{row['at'][:-1].rstrip('0').rstrip('.')}Z" for row in mine}
        found |= {
            f"latest:{sensor}": text(mine[-1]["temp"]),
            f"first:{sensor}": text(mine[0]["temp"]),
            f"hottest:{sensor}": at[id(by_temp[-1])],
            f"reading:{sensor}": {
                name: text(value)
                for name, value in (mine[-1] | {"at": at[id(mine[-1])]}).items()
                if name in ("temp", "unit", "at") and value is not None
            },
            f"byHour:{sensor}": {row["hour"]: text(row["number"]) for row in mine},
            f"recent:{sensor}": [text(row["number"]) for row in mine[-5:]],
            f"early:{sensor}": [text(row["number"]) for row in mine[:3]],
            f"total:{sensor}": str(len(mine)),
        }
        found[f"coldest:{sensor}"] = at[id(next(row for row in by_temp if row["unit"] is not None))]
    return found


def test_late_rows_lead_to_same_state_as_rows_at_once(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = some_readings(7, 150)
    at_once, late = batches(READINGS), batches(READINGS)
    at_once.add(*rows)
    for start_at in range(0, len(rows), 30):
        late.add(*rows[start_at : start_at + 30])
    states = [state for state in STATES if state.name != "coldest"]
    coldest = StateDescriptor("coldest", key="sensor", value="at", min_by=["temp", "unit"], where="unit IS NOT NULL")
    for job, stream in (("once", at_once), ("late", late)):
        writer = sparkis.queryable(stream.df, *states, coldest, mode="append", wait_for_visibility=True)
        query = start(writer, job, tmp_path / job)
        query.stop()
        assert values_by_key(client, job) == expected(rows)


@pytest.mark.slow
def test_restart_and_replayed_batch_change_nothing(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, at timestamp, n int")
    rows.add({"k": "a", "at": "2024-05-01T10:05:00Z", "n": 5})
    rows.add({"k": "a", "at": "2024-05-01T10:01:00Z", "n": 1}, {"k": "a", "at": "2024-05-01T10:09:00Z", "n": 9})
    states = (
        StateDescriptor("latest", key="k", value="n", last_by="at"),
        StateDescriptor("list", key="k", value="n", kind="list", last_by="at", length_max=10),
    )

    def run() -> None:
        writer = sparkis.queryable(rows.df, *states, mode="append", wait_for_visibility=True)
        start(writer, "replayed", tmp_path / "checkpoint").stop()
        assert client.get("replayed:latest:a") == "9"

    run()
    (tmp_path / "checkpoint" / "commits" / "1").unlink()
    (tmp_path / "checkpoint" / "commits" / ".1.crc").unlink(missing_ok=True)
    run()
    assert client.lrange("replayed:list:a", 0, -1) == ["1", "5", "9"]
    rows.add({"k": "a", "at": "2024-05-01T10:03:00Z", "n": 3})
    run()
    assert client.lrange("replayed:list:a", 0, -1) == ["1", "3", "5", "9"]


@pytest.mark.slow
def test_ties_and_late_rows_follow_their_policies(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, t int, v string")
    for value, time in (("one", 2), ("two", 2), ("late", 1), ("three", 3)):
        rows.add({"k": "a", "t": time, "v": value})
    writer = sparkis.queryable(
        rows.df,
        *(StateDescriptor(by, key="k", value="v", **{by: "t"}) for by in ("last_by", "first_by", "max_by", "min_by")),
        StateDescriptor("kept", key="k", value="v", kind="list", last_by="t", length_max=9),
        StateDescriptor("dropped", key="k", value="v", kind="list", last_by="t", length_max=9, late="drop"),
        StateDescriptor("second", key="k", value="v", last_by="t", where="t = 2"),
        StateDescriptor("greatest", key="k", value="v", max_by="t", where="t = 2"),
        mode="append",
        wait_for_visibility=True,
    )
    start(writer, "ties", tmp_path / "checkpoint")
    assert [client.get(f"ties:{by}:a") for by in ("last_by", "first_by", "max_by", "min_by")] == [
        "three", "late", "three", "late"
    ]  # fmt: skip
    assert client.lrange("ties:kept:a", 0, -1) == ["late", "one", "two", "three"]
    assert client.lrange("ties:dropped:a", 0, -1) == ["one", "two", "three"]
    assert (client.get("ties:second:a"), client.get("ties:greatest:a")) == ("two", "one")


def test_row_without_value_selects_nothing_and_without_order_fails(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, at timestamp, n int")
    rows.add({"k": "a", "at": "2024-05-01T10:00:00Z", "n": 1}, {"k": "a", "at": "2024-05-01T11:00:00Z", "n": None})
    writer = sparkis.queryable(rows.df, "s", mode="append", key="k", value="n", last_by="at", wait_for_visibility=True)
    query = start(writer, "nulls", tmp_path / "checkpoint")
    assert client.get("nulls:s:a") == "1"
    rows.add({"k": "a", "at": None, "n": 2})
    assert "the column 'at', which orders the rows, is null in 1 row(s) of a batch, such as" in failure_of(query)
    with pytest.raises(sparkis.SparkisError, match=r"^job 'nulls', batch 1: state 's': the column 'at'[^\n]*$"):
        query.awaitTermination()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"last_by": "nope"}, r"state 's': last_by= names the column 'nope'"),
        (
            {"last_by": "tags"},
            r"the last_by column 'tags' has the type array<string>, whose order sparkis cannot store",
        ),
        (
            {"last_by": "t", "mode": "complete"},
            r"last_by= keeps one row of all micro-batches, and with mode='complete'",
        ),
        ({"value": "tags", "kind": "list", "last_by": "t", "length_max": 3}, r"an array always replaces the list"),
    ],
)
def test_column_without_order_is_refused_at_start(batches: Make, arguments, reason):
    df = batches("k string, t int, v string, tags array<string>").df
    with pytest.raises(sparkis.DescriptorError, match=reason):
        sparkis.queryable(df, "s", **({"key": "k", "value": "v", "mode": "append"} | arguments))
