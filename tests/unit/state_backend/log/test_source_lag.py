"""The distance from an epoch's offsets to the newest offsets of a query's sources."""

from __future__ import annotations

import json
from typing import Any

import pytest

from state_backend.log.source_lag import PARTITIONS_MAX, SourceLag, lag_of

ORDERS = {"orders": {"0": 10, "1": 20}}


def sources(**newest: Any) -> dict[str, Any]:
    return {"at_ms": 7, "newest": {name.removeprefix("at_"): offset for name, offset in newest.items()}}


def test_lag_is_difference_of_each_partition() -> None:
    found = lag_of([json.dumps(ORDERS)], sources(at_0={"orders": {"0": 13, "1": 20}}))
    assert found == {"records": 3, "at_ms": 7, "partitions": {"orders/0": 3, "orders/1": 0}}


def test_added_partition_is_behind_from_its_start() -> None:
    found = lag_of([json.dumps(ORDERS)], sources(at_0={"orders": {"0": 10, "1": 20, "10": 4, "2": 0}}))
    assert found is not None and found["records"] == 4
    assert list(found["partitions"]) == ["orders/0", "orders/1", "orders/2", "orders/10"]


def test_epoch_ahead_of_known_offsets_has_no_lag() -> None:
    """The newest offsets are those before the micro-batch, and one partition's lead hides no other partition's lag."""
    found = lag_of([json.dumps(ORDERS)], sources(at_0={"orders": {"0": 4, "1": 21}}))
    assert found is not None and found["records"] == 1


def test_sources_are_found_by_name_or_place_and_topic_of_two_sources_counts_once() -> None:
    newest = {"orders": {"0": 15, "1": 20}}
    named = lag_of([f"second:{json.dumps(ORDERS)}", "first:7"], sources(first=99, second=newest))
    assert named is not None and named["records"] == 5
    twice = lag_of([json.dumps(ORDERS), json.dumps({"orders": {"0": 12, "1": 20}})], sources(at_0=newest, at_1=newest))
    assert twice is not None and twice["partitions"] == {"orders/0": 5, "orders/1": 0}


@pytest.mark.parametrize(
    ("offsets", "newest"),
    [
        ((), sources(at_0=ORDERS)),
        (('{"logOffset":3}', "17"), sources(at_0={"logOffset": 5}, at_1=None)),
        ((json.dumps(ORDERS),), sources()),
        ((json.dumps(ORDERS),), sources(at_0=None)),
        (("-",), sources(at_0=ORDERS)),
        ((json.dumps(ORDERS), "-"), sources(at_0=ORDERS, at_1=ORDERS)),
        ((json.dumps(ORDERS),), None),
        ((json.dumps(ORDERS),), {"newest": {"0": ORDERS}}),
        ((json.dumps(ORDERS),), {"at_ms": 7, "newest": 5}),
    ],
)
def test_unknown_offsets_have_no_lag(offsets: tuple[str, ...], newest: Any) -> None:
    assert lag_of(offsets, newest) is None


def test_many_partitions_are_counted_by_topic() -> None:
    ends = {topic: {str(number): 1 for number in range(PARTITIONS_MAX)} for topic in ("a", "b")}
    newest = {topic: {str(number): 3 for number in range(PARTITIONS_MAX)} for topic in ("a", "b")}
    found = lag_of([json.dumps(ends)], sources(at_0=newest))
    assert found is not None and found["records"] == 4 * PARTITIONS_MAX
    assert found["partitions"] == {"a": 2 * PARTITIONS_MAX, "b": 2 * PARTITIONS_MAX}


def test_lag_follows_heartbeat_and_epoch() -> None:
    lag = SourceLag([json.dumps(ORDERS)])
    heartbeat = {"sources": sources(at_0={"orders": {"0": 13, "1": 20}})}
    first = lag.of(heartbeat)
    assert first is not None and first["records"] == 3
    assert lag.of(dict(heartbeat)) is first
    lag.offsets = (json.dumps({"orders": {"0": 12, "1": 20}}),)
    later = lag.of(heartbeat)
    assert later is not None and later["records"] == 1
    assert lag.of({}) is None
