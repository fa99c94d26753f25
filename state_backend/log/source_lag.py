"""How far a job's readable state is behind its sources: the distance from an epoch's offsets to the sources' newest.

The driver knows the newest offsets, and writes them into its heartbeats as `sources`:

    at_ms       the driver asked the sources at this time or later, in milliseconds since 1970 UTC
    newest      the newest offset of each source, as Spark writes it, by the source's name or place (see
                `source_offsets`); null: the source does not say

A lag is JSON as well, because it goes through reports from the applier to the server's processes:

    records     offsets between the readable epoch and the newest: the number of records, or more in a compacted topic
    at_ms       as above
    partitions  the same of each partition, by "<topic>/<partition>"; of many partitions, of each topic, by its name

Only offsets of Kafka's form are positions that can be subtracted. Sources of other kinds are left out; a job that has
no other sources has no lag, which is not a lag of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from state_backend.log.source_offsets import by_source, is_of_topics

Lag = Mapping[str, Any]

# The bound of `partitions`: so many rows of a metric, and fields of a reply (guess).
PARTITIONS_MAX = 100


class SourceLag:
    """The lag of one job, computed again only if its inputs have changed."""

    def __init__(self, offsets: Sequence[str] = ()) -> None:
        self.offsets = tuple(offsets)  # of the readable epoch
        self._computed: tuple[tuple[str, ...], Any] = (), None
        self._lag: Lag | None = None

    def of(self, heartbeat: Mapping[str, Any]) -> Lag | None:
        """Return the lag by a writer's last heartbeat; None if it is unknown."""
        inputs = self.offsets, heartbeat.get("sources")
        if inputs != self._computed:
            self._computed, self._lag = inputs, lag_of(*inputs)
        return self._lag


def lag_of(offsets: Sequence[str], sources: Any) -> Lag | None:
    """Return the lag of an epoch's offsets; None if it is unknown, or if no source has offsets of Kafka's form.

    Args:
        offsets: The end offsets of the epoch.
        sources: The field of a heartbeat; anything else than described above is as no field.
    """
    newest = sources.get("newest") if isinstance(sources, dict) else None
    if not isinstance(newest, dict) or type(sources.get("at_ms")) is not int:
        return None
    lags: dict[tuple[str, int], int] = {}
    for source, end in by_source(offsets).items():
        last = newest.get(str(source))
        if is_of_topics(end) and is_of_topics(last):
            for at, records in _lags(end, last).items():
                lags[at] = max(records, lags.get(at, 0))  # two sources may read one topic
        elif is_of_topics(end) or is_of_topics(last):
            return None  # the source has no data yet, or does not say how much it has
    if not lags:
        return None
    return {"records": sum(lags.values()), "at_ms": sources["at_ms"], "partitions": _bounded(lags)}


def _lags(end: Any, newest: Any) -> dict[tuple[str, int], int]:
    """Return the lag of each partition. A partition without an end offset is new: a query reads it from its start."""
    return {
        (topic, int(partition)): max(0, offset - end.get(topic, {}).get(partition, 0))
        for topic, partitions in newest.items()
        for partition, offset in partitions.items()
    }


def _bounded(lags: Mapping[tuple[str, int], int]) -> dict[str, int]:
    if len(lags) <= PARTITIONS_MAX:
        return {f"{topic}/{partition}": records for (topic, partition), records in sorted(lags.items())}
    topics: dict[str, int] = {}
    for (topic, _), records in sorted(lags.items()):
        topics[topic] = topics.get(topic, 0) + records
    return dict(list(topics.items())[:PARTITIONS_MAX])
