"""The source offsets in a query's checkpoint, and their comparison with those of an earlier checkpoint.

Offsets of two checkpoints are comparable only if they are positions in the source itself, as for Kafka (and sources
with the same format) and Delta. No others are compared: offsets of file streams count the query's own batches, those of
rate streams count its own seconds, and those of Iceberg streams are snapshots without an order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from pyspark.sql import SparkSession

from spark_hooks.checkpoint import Checkpoint
from state_backend.model.errors import SparkisError

VERSION = "v1"
DELTA = ("reservoirId", "reservoirVersion", "index")


class OffsetLog:
    """The offsets in a query's checkpoint; all unknown if `location` is None. Used on the driver, once a micro-batch.

    A local file is read directly, in about 30 us; other files are read through Hadoop's filesystems, as Spark does.
    """

    def __init__(self, location: str | None, session: SparkSession | None = None) -> None:
        self._location = location
        self._session = session

    def ends_of(self, batch: int) -> tuple[str, ...]:
        """Return the end offset of each source in a batch, which Spark wrote before the batch ran; () if unknown."""
        stored = self._read(f"offsets/{batch}")
        lines = stored.splitlines() if stored else []
        return tuple(lines[2:]) if lines[:1] == [VERSION] else ()  # line 1 is the batch's metadata

    def ends_at(self, batch: int) -> bool:
        """Tell whether a batch is the last one that Spark has planned."""
        return self._read(f"offsets/{batch}") is not None and self._read(f"offsets/{batch + 1}") is None

    def _read(self, name: str) -> str | None:
        if self._location is None:
            return None
        at = urlsplit(self._location)
        if at.scheme in ("", "file"):
            path = at.path if at.scheme == "" else unquote(at.path)
            try:
                with open(f"{path}/{name}", encoding="utf-8") as file:
                    return file.read()
            except (OSError, ValueError):
                return None
        if self._session is None:
            return None

        try:
            return Checkpoint(self._session, self._location).text(name)
        except SparkisError:
            return None


def have_passed(current: Sequence[str], previous: Sequence[str]) -> bool:
    """Tell whether every source is at or past its offset of the earlier checkpoint; False if that is unknown."""
    if not previous or len(current) != len(previous):
        return False
    return all(_has_passed(_parsed(now), _parsed(before)) for now, before in zip(current, previous, strict=True))


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
    if not all(_is_topic(partitions) for each in (current, previous) for partitions in each.values()):
        return False
    return all(
        current.get(topic, {}).get(partition, -1) >= offset
        for topic, partitions in previous.items()
        for partition, offset in partitions.items()
    )


def _is_topic(partitions: Any) -> bool:
    """Tell whether this is a topic's mapping of partition numbers to offsets."""
    return isinstance(partitions, dict) and all(map(str.isdecimal, partitions)) and _are_counts(*partitions.values())


def _are_counts(*numbers: Any) -> bool:
    return all(type(number) is int for number in numbers)
