"""The source offsets in a query's checkpoint, and whether the query has read all of its input."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.checkpoint import SparkCheckpoint
from spark_hooks.sessions import execution_of
from state_backend.checkpoint.metadata import end_offsets
from state_backend.model.errors import SparkisError

# The simple names of triggers that end a query by itself. Scala adds the `$` to the names of objects.
ENDING_TRIGGERS = ("AvailableNowTrigger$", "OneTimeTrigger$")


class OffsetLog:
    """The offsets in a query's checkpoint; all unknown if `location` is None. Used on the driver, once a micro-batch.

    A local file is read directly, in about 30 us; other files are read through Hadoop's filesystems, as Spark does.
    """

    def __init__(self, location: str | None, session: SparkSession | None = None) -> None:
        self._location = location
        self._session = session

    def ends_of(self, batch: int) -> tuple[str, ...]:
        """Return the end offsets of a batch's sources, which Spark wrote before the batch ran; () if unknown."""
        stored = self._read(f"offsets/{batch}")
        return () if stored is None else end_offsets(stored)

    def ends_at(self, batch: int) -> bool:
        """Return whether a batch is the last one that Spark has planned."""
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
            return SparkCheckpoint(self._session, self._location).text(name)
        except SparkisError:
            return None


def is_idle(query: StreamingQuery | None, offsets: OffsetLog, batch: int) -> bool:
    """Return whether a query looked for input after a batch, and found none; False without a query."""
    if query is None:
        return False
    try:
        if query.isActive:
            status = query.status
            return bool(status["message"].startswith("Waiting for") and not status["isDataAvailable"])
        execution = execution_of(query)
        ends_by_itself = execution.trigger().getClass().getSimpleName() in ENDING_TRIGGERS
        # A stopped query may leave the offsets of a batch that did not run.
        return ends_by_itself and query.exception() is None and offsets.ends_at(batch)
    except (PySparkException, Py4JError, OSError):  # Spark itself has stopped
        return False
