"""The comparison of a query's source offsets with those of an earlier checkpoint.

Offsets of two checkpoints are comparable only if they are positions in the source itself, as for Kafka (and sources
with the same format) and Delta. No others are compared: offsets of file streams count the query's own batches, those of
rate streams count its own seconds, and those of Iceberg streams are snapshots without an order.

An offset is the line of its source in the checkpoint: JSON, or `-`. A named source (Spark 4.2) has its name and a colon
before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

DELTA = ("reservoirId", "reservoirVersion", "index")
NAMED = re.compile(r"(\w+):(.*)", re.ASCII | re.DOTALL)


def have_passed(current: Sequence[str], previous: Sequence[str]) -> bool:
    """Return whether every source is at or past its offset of the earlier checkpoint; False if that is unknown.

    Named sources are compared by their names, others by their places. A named source may be new.
    """
    now, before = by_source(current), by_source(previous)
    are_named = all(isinstance(source, str) for source in now)
    if not before or not (before.keys() <= now.keys() if are_named else before.keys() == now.keys()):
        return False
    return all(_has_passed(now[source], offset) for source, offset in before.items())


def may_be_compared(offsets: Sequence[str]) -> bool:
    """Return whether later offsets of the same sources can be compared with these."""
    return have_passed(offsets, offsets)


def by_source(offsets: Sequence[str]) -> Mapping[str | int, Any]:
    """Return the offset of each source, by its name, or by its place. None: it has none, or none in JSON."""
    found: dict[str | int, Any] = {}
    for place, offset in enumerate(offsets):
        named = NAMED.fullmatch(offset)
        found[place if named is None else named[1]] = _parsed(offset if named is None else named[2])
    return found


def _parsed(offset: str) -> Any:
    try:
        return json.loads(offset)
    except ValueError:  # `-`: the source had no data yet
        return None


def _has_passed(current: Any, previous: Any) -> bool:
    if not (isinstance(current, dict) and isinstance(previous, dict) and previous):
        return False
    if all(name in each for name in DELTA for each in (current, previous)):
        table, *at = (current[name] for name in DELTA)
        previous_table, *before = (previous[name] for name in DELTA)
        return table == previous_table and _are_counts(*at, *before) and at >= before
    if not (is_of_topics(current) and is_of_topics(previous)):
        return False
    return all(
        current.get(topic, {}).get(partition, -1) >= offset
        for topic, partitions in previous.items()
        for partition, offset in partitions.items()
    )


def is_of_topics(offset: Any) -> bool:
    """Return whether an offset has Kafka's form: a mapping of topics to their partitions' offsets, not empty."""
    return isinstance(offset, dict) and bool(offset) and all(map(_is_topic, offset.values()))


def _is_topic(partitions: Any) -> bool:
    """Return whether this is a topic's mapping of partition numbers to offsets."""
    return isinstance(partitions, dict) and all(map(str.isdecimal, partitions)) and _are_counts(*partitions.values())


def _are_counts(*numbers: Any) -> bool:
    return all(type(number) is int for number in numbers)
