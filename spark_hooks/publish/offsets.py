"""How far a query's sources are, as its checkpoint tells, and whether that is as far as another checkpoint's were.

Offsets of one source can be compared over two checkpoints only if they count what the source itself counts. Those of
Kafka (and what writes them likewise) and Delta do. A file stream's count its own batches, a rate stream's its own
seconds, an Iceberg stream's name snapshots in no order: of these, and of all unknown ones, nothing is concluded.
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
    """The offsets in a query's checkpoint. Used on the driver, once a micro-batch; `location` None: nothing is known.

    A file of this machine is read as it is, in some 30 us; others through Hadoop's filesystems, as Spark reads them.
    """

    def __init__(self, location: str | None, session: SparkSession | None = None) -> None:
        self._location = location
        self._session = session

    def ends_of(self, batch: int) -> tuple[str, ...]:
        """Return where each source ends in a batch, as Spark wrote it down before the batch ran; () if unknown."""
        stored = self._read(f"offsets/{batch}")
        lines = stored.splitlines() if stored else []
        return tuple(lines[2:]) if lines[:1] == [VERSION] else ()  # between them the batch's own facts

    def ends_at(self, batch: int) -> bool:
        """Tell whether a batch is the last that was planned."""
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


def have_passed(now: Sequence[str], before: Sequence[str]) -> bool:
    """Tell whether sources are for sure as far as the same ones were with another checkpoint."""
    if not before or len(now) != len(before):
        return False
    return all(_has_passed(_parsed(mine), _parsed(theirs)) for mine, theirs in zip(now, before, strict=True))


def _parsed(offset: str) -> Any:
    try:
        return json.loads(offset)
    except ValueError:  # `-`: the source had nothing yet
        return None


def _has_passed(mine: Any, theirs: Any) -> bool:
    if not (isinstance(mine, dict) and isinstance(theirs, dict) and theirs):
        return False
    if all(name in each for name in DELTA for each in (mine, theirs)):
        table, *at = (mine[name] for name in DELTA)
        same_table, *before = (theirs[name] for name in DELTA)
        return table == same_table and _are_counts(*at, *before) and at >= before
    if not all(_is_topic(partitions) for each in (mine, theirs) for partitions in each.values()):
        return False
    return all(
        mine.get(topic, {}).get(partition, -1) >= offset
        for topic, partitions in theirs.items()
        for partition, offset in partitions.items()
    )


def _is_topic(partitions: Any) -> bool:
    """Tell whether these are the offsets of a topic's partitions, by their numbers."""
    return isinstance(partitions, dict) and all(map(str.isdecimal, partitions)) and _are_counts(*partitions.values())


def _are_counts(*numbers: Any) -> bool:
    return all(type(number) is int for number in numbers)
