"""Reports the failure of a sink in one line, after everything that Spark prints about it.

Spark logs the error of a foreachBatch function with a hundred lines of Java and Python stack traces, and repeats half
of them in the exception of `awaitTermination`. The one line that tells the user what to do would be lost in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.sink")

# Spark logs the error before the query ends, some milliseconds after its foreachBatch function has failed. A script
# then prints its own traceback.
ENDING_S_MAX = 10.0
POLL_INTERVAL_S = 0.1
TRACEBACK_S = 0.5


class QueryFailedError(SparkisError, StreamingQueryException):
    """A query has failed because of its sink. The message is the sink's; Spark's traces are in `query.exception()`."""


class Failure:
    """The failure of a query's sink. error: None until the sink fails."""

    def __init__(self, query_of: Callable[[], StreamingQuery | None] = lambda: None) -> None:
        self._query_of = query_of
        self.error: SparkisError | None = None
        self._waiting = 0  # calls that raise the error

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Log a SparkisError in one line: after its query has ended, or at once if the query is not known."""
        try:
            yield
        except SparkisError as error:
            self.error = error
            query = self._query_of()
            if query is None:
                logger.error("%s", error)
            else:
                # Not a daemon, although py4j's thread, which calls this, is one: a script that ends because of this
                # error waits for the line.
                threading.Thread(target=self._log_after, args=(query,), name="sparkis-failure", daemon=False).start()
            raise

    def _log_after(self, query: StreamingQuery) -> None:
        deadline = time.monotonic() + ENDING_S_MAX
        with suppress(Exception):  # a stopped Spark raises many kinds of errors
            while query.isActive and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S)
            time.sleep(TRACEBACK_S)
        if not self._waiting:
            logger.error("%s", self.error)

    @contextmanager
    def raised_alone(self) -> Iterator[None]:
        """Raise QueryFailedError in place of Spark's exception about this failure; then the error is not logged."""
        self._waiting += 1
        try:
            yield
        except StreamingQueryException:
            if self.error is None:
                raise
            raise QueryFailedError(str(self.error)) from None
        self._waiting -= 1


class SinkQuery(StreamingQuery):
    """Spark's StreamingQuery, which raises the failure of its sink in one line."""

    def __init__(self, query: StreamingQuery, failure: Failure) -> None:
        super().__init__(query._jsq)
        self._failure = failure

    def awaitTermination(self, timeout: int | None = None) -> bool | None:
        """Wait for the end of the query, as Spark does; QueryFailedError if its sink has failed."""
        with self._failure.raised_alone():
            return super().awaitTermination(timeout)

    def processAllAvailable(self) -> None:
        """Wait until all input is processed, as Spark does; QueryFailedError if the sink has failed."""
        with self._failure.raised_alone():
            super().processAllAvailable()
