"""The newest offsets that the sources of a running query know, for `state_backend.log.source_lag`. On the driver."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.sessions import execution_of
from state_backend.model.clock import MS_PER_S, Clock, now_ms

logger = logging.getLogger("sparkis.sink")

# While a query waits for input, it asks its sources all the time. A newer time is reported by each server, so it
# changes only so often (guess).
IDLE_STEP_MS = 10_000


class NewestOffsets:
    """Asks the sources of one query for the offsets that they found last.

    A source looks for newer offsets when Spark plans a micro-batch, and keeps what it found, also what is beyond the
    micro-batch's limit (`maxOffsetsPerTrigger`). Nothing is asked of Kafka here. The progress of a query has the same
    offsets, but only after the micro-batch has ended, and not while the query waits for more input.

    Args:
        query: A query of this driver; None: nothing is known.
    """

    def __init__(self, query: StreamingQuery | None, clock: Clock = now_ms) -> None:
        self._query = query
        self._clock = clock
        self._asked_ms = 0
        self._last: dict[str, Any] | None = None
        self._silent: set[str] = set()  # classes of sources that cannot be asked

    def ask(self) -> dict[str, Any] | None:
        """Return the field `sources` of a heartbeat; None if nothing is known. Takes a few calls of Spark."""
        if self._query is None:
            return None
        try:
            return self._ask(self._query)
        except (PySparkException, Py4JError, OSError, TypeError, ValueError) as error:  # Spark has stopped, or differs
            logger.debug("the sources of the query %s were not asked: %s", self._query.id, error)
            return self._last

    def _ask(self, query: StreamingQuery) -> dict[str, Any] | None:
        before_ms, self._asked_ms = self._asked_ms, self._clock()
        at_ms = self._looked_ms(query)
        newest = {name: self._newest_of(source) for name, source in _sources_of(execution_of(query)).items()}
        if not any(newest.values()):
            return self._last
        if self._last is not None:
            # The new offset came after the last look, so its time is not before that.
            at_ms = max(at_ms, self._last["at_ms"], before_ms if newest != self._last["newest"] else 0)
        self._last = {"at_ms": at_ms, "newest": newest}
        return self._last

    def _newest_of(self, source: Any) -> Any:
        """Return the newest offset that a source knows, as JSON; None if it knows none."""
        kind = str(source.getClass().getName())
        if kind in self._silent:
            return None
        try:
            offset = source.reportLatestOffset()
        except Py4JJavaError:  # Kafka's, before it has looked for the first time
            return None
        except Py4JError:  # no such method: the source cannot limit a micro-batch, as that of rates
            self._silent.add(kind)
            return None
        return None if offset is None else json.loads(str(offset.json()))

    def _looked_ms(self, query: StreamingQuery) -> int:
        """Return a lower bound of the time at which the sources last looked for newer offsets."""
        running: Any = query
        progress = running._jsq.lastProgress()
        begun_ms = 0 if progress is None else _ms_of(str(progress.timestamp()))
        trigger = execution_of(query).trigger()
        if trigger.getClass().getSimpleName() != "ProcessingTimeTrigger" or not _is_waiting(query):
            return begun_ms
        return max(begun_ms, (self._clock() - int(trigger.intervalMs())) // IDLE_STEP_MS * IDLE_STEP_MS)


def _is_waiting(query: StreamingQuery) -> bool:
    """Return whether a query waits for input or for its next trigger, at which it asks its sources."""
    return query.isActive and str(query.status["message"]).startswith("Waiting for")


def _ms_of(iso: str) -> int:
    return int(datetime.fromisoformat(iso).timestamp() * MS_PER_S)


def _sources_of(execution: Any) -> dict[str, Any]:
    """Return the sources of a running query, by their names or places, as the lines of its offsets are."""
    found = execution.sources()
    sources = [found.apply(place) for place in range(found.size())]
    try:
        names = execution.sourceToIdMap()
    except Py4JError:  # before Spark 4.2 no source has a name
        return dict(zip(map(str, range(len(sources))), sources, strict=True))
    return {str(names.apply(source)): source for source in sources}
