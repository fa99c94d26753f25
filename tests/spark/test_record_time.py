"""`record_time=`: servers measure the time from a record, by a column of the DataFrame, until clients can read it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame

import sparkis
from compat.waiting import eventually
from sparkis import StateDescriptor
from state_backend.log.change_log import ChangeLog
from state_backend.log.epochs import Epoch
from state_backend.log.record_ages import bound_ms
from tests.spark.micro_batches import Batches, start

Make = Callable[[str], Batches]

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("spark")]

ROWS = "k string, v int, at timestamp"
HOUR, DAYS = timedelta(hours=1), timedelta(days=100)
PLAIN = StateDescriptor("plain", key="k", value="v")
ORDERED = StateDescriptor("ordered", key="k", value="v", order_by="v")
COUNT = StateDescriptor("count", key="k", reduce="count")
FILTERED = StateDescriptor("some", key="k", value="v", where="k <> 'b'")


def row(key: str, age: timedelta | None) -> dict[str, Any]:
    """Return a row of this age."""
    return {"k": key, "v": 1, "at": None if age is None else (datetime.now(UTC) - age).isoformat()}


def last_epoch(endpoint: sparkis.ServedEndpoint, job: str) -> Epoch:
    """Return the last epoch in the log."""
    log = ChangeLog(endpoint.log).job(job)
    current = log.current()
    assert current is not None
    epoch = log.end(current)
    assert epoch is not None
    return epoch


def ages_in(epoch: Epoch) -> list[int]:
    """Return how many records are no hour, a few hours, and many days old."""
    found = [0, 0, 0]
    for bucket, count in epoch.record_ages.items():
        age = timedelta(milliseconds=bound_ms(bucket))
        found[(age >= HOUR) + (age >= DAYS)] += count
    return found


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param((PLAIN,), [1, 1, 1], id="not shuffled"),
        pytest.param((ORDERED,), [1, 1, 1], id="shuffled"),
        pytest.param((PLAIN, ORDERED, FILTERED), [3, 2, 3], id="several states"),
    ],
)
def test_each_row_of_state_counts_by_its_age(
    states: tuple[StateDescriptor, ...],
    expected: list[int],
    endpoint: sparkis.ServedEndpoint,
    client: redis.Redis,
    batches: Make,
    tmp_path: Path,
) -> None:
    rows, job = batches(ROWS), f"ages{len(states)}{states[0].name}"
    rows.add(row("of the future", -DAYS), row("b", HOUR), row("c", DAYS), row("unknown", None))
    writer = sparkis.queryable(rows.df, *states, mode="append", record_time="at", job=job)
    query = start(writer, job, tmp_path / "checkpoint")
    first = last_epoch(endpoint, job)
    assert ages_in(first) == expected and client.get(f"{job}:{states[0].name}:unknown") == "1"
    rows.add(row("d", HOUR))
    query.processAllAvailable()
    assert ages_in(last_epoch(endpoint, job)) == [0, len(states), 0]
    query.stop()


def test_earliest_of_reduced_rows_counts(
    endpoint: sparkis.ServedEndpoint, client: redis.Redis, batches: Make, tmp_path: Path
) -> None:
    rows = batches(ROWS)
    rows.add(row("a", HOUR), row("a", DAYS), row("a", None), row("b", HOUR), row("b", -HOUR), row("c", None))
    query = start(sparkis.queryable(rows.df, COUNT, mode="append", record_time="at"), "reduced", tmp_path / "c")
    assert ages_in(last_epoch(endpoint, "reduced")) == [0, 1, 1] and client.get("reduced:count:a") == "3"
    query.stop()


def test_delay_is_shown_from_second_epoch_by_argument(client: redis.Redis, batches: Make, tmp_path: Path) -> None:
    rows = batches(ROWS)

    def publish(batch: DataFrame, batch_id: int) -> None:
        sparkis.publish(batch, batch_id, COUNT, mode="append", job="timed", record_time="at")
        sparkis.publish(batch, batch_id, COUNT, mode="append", job="untimed")

    def job_delays(job: str) -> Any:
        rows = client.execute_command("STATE", "LAG")
        found = {each["job"]: each for each in map(dict, rows)}
        return found.get(job, {}).get("record_delay_p50_ms")

    rows.add(row("a", HOUR))
    query = start(rows.df.writeStream.foreachBatch(publish), "both", tmp_path / "checkpoint")
    eventually(lambda: client.get("timed:count:a"), lambda found: found == "1")
    rows.add(row("a", HOUR))
    query.processAllAvailable()
    delay_ms = eventually(lambda: job_delays("timed"), lambda found: found is not None)
    assert HOUR / timedelta(milliseconds=1) <= delay_ms < DAYS / timedelta(milliseconds=1)
    assert client.get("untimed:count:a") == "2" and job_delays("untimed") is None
    query.stop()


@pytest.mark.parametrize(("name", "found"), [("v", "has the type int"), ("w", "is not a column of the DataFrame")])
def test_another_column_is_refused_before_query_starts(name: str, found: str, batches: Make, tmp_path: Path) -> None:
    with pytest.raises(
        sparkis.DescriptorError,
        match=rf"^record_time= is a column of the type timestamp, and '{name}' {found}; .*: at$",
    ):
        sparkis.queryable(batches(ROWS).df, PLAIN, record_time=name, log=tmp_path / "log")
