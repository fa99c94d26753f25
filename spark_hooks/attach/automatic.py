"""Automatic attachments to queries whose processors declare states, from a query's start to its end.

Spark calls a listener of the session for each query before the query's `start` returns. The listener reads the
declarations from the query's plan:

    no declaration        nothing happens
    invalid declarations  a local property of the tasks has the error; the processors raise it
    states                a thread attaches as soon as a micro-batch is committed. When the query has ended and its last
                          batch is in the log, the thread stops the attachment
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.attach import declared
from spark_hooks.attach.declaration import REFUSAL_PROPERTY
from spark_hooks.attach.spark_reader import ChangesMissingError
from spark_hooks.attach.start import attach
from spark_hooks.serving.endpoints import LOG_SETTING
from spark_hooks.sessions import existing_session, is_connect
from state_backend.attach.attachment import PERMANENT_ERRORS, Attachment
from state_backend.model.descriptor import check_name
from state_backend.model.errors import CheckpointError, DescriptorError

logger = logging.getLogger("sparkis.attach")

# How often the thread checks for a log to write to, and for the end of the attachment or of Spark.
POLL_INTERVAL_S = 0.5
# A failed attachment is retried after pauses that double from the first to the longest (guess).
RETRY_PAUSE_S = 1.0
RETRY_PAUSE_S_MAX = 60.0
# The longest wait for the last batch to be in the log after the query has ended. The query's next run waits for this,
# too (guess).
LAST_BATCH_TIMEOUT_S = 60.0

_listening_sessions: set[str] = set()


def listen_for_queries(session: SparkSession | None = None) -> None:
    """Add the listener to a session, by default the current one, for which Spark pickles a processor with states."""
    session = session or existing_session()
    if session is None:
        return  # this process pickles the processor for itself
    if is_connect(session):
        logger.warning(
            "under Spark Connect, declared states are not attached to automatically, because the query's driver is "
            "another process; call sparkis.attach(checkpoint=..., job=..., states=[sparkis.AttachedState(...)])"
        )
        return
    name = str(session._jsparkSession.sessionUUID())
    if name not in _listening_sessions:
        _listening_sessions.add(name)
        listener = _Listener(session)
        session.streams.addListener(listener)
        atexit.register(_remove_listener, session, listener)


def _remove_listener(session: SparkSession, listener: _Listener) -> None:
    """Remove the listener before Python exits; otherwise Spark prints a long traceback for each query that it stops."""
    if _is_spark_running():
        with suppress(Py4JError, OSError):
            session.streams.removeListener(listener)


class _Listener(StreamingQueryListener):
    """Runs on the driver. Spark calls `onQueryStarted` in the query's own thread, before its first batch."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Start an automatic attachment, or make the query fail if its declarations are invalid."""
        try:
            query = self._session.streams.get(str(event.id))
            run = declared.run_of(query) if query is not None else None
            if query is not None and run is None:
                _on_start(self._session, query)
        except Exception:
            logger.exception("query %r: its declared states could not be read; try sparkis.attach(query)", event.name)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Do nothing: the attachment follows the checkpoint."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """End the run's attachment."""
        run = declared.runs.get(str(event.id))
        if isinstance(run, AutomaticRun) and run.run_id == str(event.runId):
            run.end()


def _on_start(session: SparkSession, query: StreamingQuery) -> None:
    # Spark calls this in the query's own thread, so the query's tasks get the property.
    session.sparkContext.setLocalProperty(REFUSAL_PROPERTY, "")  # clear a value from the thread that starts the query
    try:
        if not declared.states_of(query):
            return
        if query.name is None:
            raise DescriptorError(
                "a query with declared states has no name, and the keys begin with that name: call .queryName('...') "
                "before start()"
            )
        check_name("query", query.name)
    except DescriptorError as error:
        session.sparkContext.setLocalProperty(REFUSAL_PROPERTY, str(error))
        logger.error("%s", error)
        return
    previous = declared.runs.get(str(query.id))
    previous = previous if isinstance(previous, AutomaticRun) else None
    run = declared.runs[str(query.id)] = AutomaticRun(session, query, previous)
    run.start()  # after its registration: its thread calls `attach`, which looks up the run


def start_run(session: SparkSession, query: StreamingQuery, start: Callable[[], Attachment]) -> None:
    """Attach to a query of this driver that has just started, as `start` does, until the query ends."""
    previous = declared.runs.get(str(query.id))
    previous = previous if isinstance(previous, AutomaticRun) else None
    run = declared.runs[str(query.id)] = AutomaticRun(session, query, previous, start)
    run.start()
    if not query.isActive:  # the listener may have been called before the run was there
        run.end()


class AutomaticRun(declared.DeclaredRun):
    """The automatic attachment to one run of a query, in its own thread.

    Args:
        start: Attaches. Default: to the states that the query's processors declare, in the session's log.
    """

    def __init__(
        self,
        session: SparkSession,
        query: StreamingQuery,
        previous: AutomaticRun | None,
        start: Callable[[], Attachment] | None = None,
    ) -> None:
        self.run_id = str(query.runId)
        self.error: Exception | None = None
        self.session = session
        self._query = query
        self._query_id = str(query.id)
        self._previous = previous
        self._start = start
        self._attachment: Attachment | None = None
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sparkis-declared-{query.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def is_own_thread(self) -> bool:
        """Return whether the calling thread is this run's."""
        return threading.current_thread() is self._thread

    def attachment(self, timeout_s: float) -> Attachment:
        """Wait for the attachment and return it. Raises the error that prevents it, or CheckpointError (timeout)."""
        with self._changed:
            self._changed.wait_for(lambda: self.error or self._attachment, timeout_s)
        if self.error is not None:
            raise self.error
        if self._attachment is None:
            raise CheckpointError(
                f"query {self._query.name!r} has no committed micro-batch after {timeout_s:g} s; attach when it has "
                f"one, or pass a longer timeout_s="
            )
        return self._attachment

    def end(self) -> None:
        """Signal that the query's run has ended; returns at once."""
        self._ended.set()

    def _run(self) -> None:
        if self._previous is not None:
            self._previous.end()
            self._previous._thread.join(LAST_BATCH_TIMEOUT_S)
            self._previous = None
        pause_s = RETRY_PAUSE_S
        while (self._start is not None or self._wait_for_log()) and not self._attach_until_end():
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, RETRY_PAUSE_S_MAX)
        if self._attachment is not None:
            self._finish(self._attachment)
        if declared.runs.get(self._query_id) is self and self.error is None:
            del declared.runs[self._query_id]

    def _wait_for_log(self) -> bool:
        """Wait until the session has a log to write to; False if the run ends first."""
        is_logged = False
        while _is_spark_running():
            if self.session.conf.get(LOG_SETTING, None) is not None:
                return True
            if not is_logged:
                logger.warning(
                    "query %r declares states, and the session has no change log for them: call sparkis.serve(spark) "
                    "or set %s",
                    self._query.name,
                    LOG_SETTING,
                )
                is_logged = True
            if self._ended.wait(POLL_INTERVAL_S):
                return False
        return False

    def _attach_until_end(self) -> bool:
        """Attach, and wait for the end of the run; False if attaching failed and is to be retried."""
        try:
            attachment = attach(self._query, timeout_s=float("inf")) if self._start is None else self._start()
        except Exception as error:
            return self._handle_error(error)
        self._set_result(attachment, None)
        while not self._ended.wait(POLL_INTERVAL_S):
            if not _is_spark_running():
                return True
            if attachment.error is not None:
                return self._handle_error(attachment.error)
        return True

    def _handle_error(self, error: Exception) -> bool:
        """Log an error; record it and return True if a retry would not help."""
        if not _is_spark_running():
            return True
        # Spark's reader needs a changelog. The batches of an earlier run may lack it, and those of this run have one.
        is_permanent = isinstance(error, PERMANENT_ERRORS) and not isinstance(error, ChangesMissingError)
        if self._ended.is_set() or not self._query.isActive:
            logger.info("query %r has ended: %s", self._query.name, error)
        elif is_permanent:
            logger.error("query %r: its states cannot be read: %s", self._query.name, error)
        else:
            logger.warning("query %r: attaching failed and is retried: %s", self._query.name, error)
            self._set_result(None, None)
            return False
        self._set_result(None, error)
        return True

    def _set_result(self, attachment: Attachment | None, error: Exception | None) -> None:
        with self._changed:
            self._attachment, self.error = attachment, error
            self._changed.notify_all()

    def _finish(self, attachment: Attachment) -> None:
        if _is_spark_running():
            try:
                attachment.wait(timeout_s=LAST_BATCH_TIMEOUT_S)
            except Exception as error:
                logger.warning("query %r: its last batches may not be in the log: %s", self._query.name, error)
        attachment.stop()


def _is_spark_running() -> bool:
    context = SparkContext._active_spark_context
    return context is not None and context._jsc is not None
