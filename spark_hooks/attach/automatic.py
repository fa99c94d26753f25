"""Attaching to queries because of what their processors declare: from a query's start to its end, with no call.

A listener of the session hears of each query before its `start` returns, and reads from its plan what is declared:

    nothing                       it is left alone
    what cannot be                the processors are told, in a property of the tasks, and refuse to compute anything
    states                        a thread attaches as soon as a micro-batch is committed; when the query has ended
                                  and its last batch is in the log, it ends the attachment
"""

from __future__ import annotations

import atexit
import logging
import threading
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
from spark_hooks.attach.attachment import LASTING, Attachment, FeedMissingError
from spark_hooks.attach.processor import REFUSAL_PROPERTY
from spark_hooks.attach.start import attach_anew
from spark_hooks.checkpoint import CheckpointError
from spark_hooks.serving.endpoints import LOG_SETTING
from spark_hooks.sessions import is_connect, session_at_hand
from state_backend.model.descriptor import check_name
from state_backend.model.errors import DescriptorError

logger = logging.getLogger("sparkis.attach")

# How often is looked whether there is a log now, and whether the attachment or Spark has ended.
LOOK_INTERVAL_S = 0.5
# An attachment that fails is made again after pauses that double from the first to the longest (guess).
PAUSE_S = 1.0
PAUSE_S_MAX = 60.0
# How long a query's end waits for its last batch to be in the log, and its next start for that end (guess).
LAST_BATCH_TIMEOUT_S = 60.0

_listened_to: set[str] = set()


def watch_declared() -> None:
    """Notice the queries that are started in the session at hand; called when Spark pickles a declared processor."""
    if SparkSession.getActiveSession() is None and SparkContext._active_spark_context is None:
        return  # pickled by somebody else: there is no Spark
    session = session_at_hand()
    if is_connect(session):
        logger.warning(
            "under Spark Connect what a processor declares is not attached to by itself, because the query's driver is "
            "elsewhere; call sparkis.attach(checkpoint=..., job=..., states=[sparkis.AttachedState(...)])"
        )
        return
    name = str(session._jsparkSession.sessionUUID())
    if name not in _listened_to:
        _listened_to.add(name)
        listener = _Listener(session)
        session.streams.addListener(listener)
        atexit.register(_end_listening, session, listener)


def _end_listening(session: SparkSession, listener: _Listener) -> None:
    """Take the listener away before Python is gone: Spark would print a long trace for each query that it ends then."""
    if _is_spark_running():
        with suppress(Py4JError, OSError):
            session.streams.removeListener(listener)


class _Listener(StreamingQueryListener):
    """Runs on the driver; a start is told by the thread that is to run the query, before its first batch."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Attach to a query that declares states, or have it refused."""
        try:
            query = self._session.streams.get(str(event.id))
            known = declared.run_of(query) if query is not None else None
            if query is not None and known is None:
                _begin(self._session, query)
        except Exception:
            logger.exception("query %r: what it declares is not known; sparkis.attach(query) may tell why", event.name)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Nothing: the attachment follows the checkpoint."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Let the run end."""
        run = declared.runs.get(str(event.id))
        if isinstance(run, AutomaticRun) and run.run_id == str(event.runId):
            run.end()


def _begin(session: SparkSession, query: StreamingQuery) -> None:
    # Python's part of a callback is one with the thread that calls: the query's own, whose tasks get this property.
    session.sparkContext.setLocalProperty(REFUSAL_PROPERTY, "")  # not what the starting thread may hand on
    try:
        if not declared.states_of(query):
            return
        if query.name is None:
            raise DescriptorError(
                "a query declares states and has no name, which their keys begin with: call .queryName('...') before "
                "start()"
            )
        check_name("query", query.name)
    except DescriptorError as error:
        session.sparkContext.setLocalProperty(REFUSAL_PROPERTY, str(error))
        logger.error("%s", error)
        return
    previous = declared.runs.get(str(query.id))
    previous = previous if isinstance(previous, AutomaticRun) else None
    declared.runs[str(query.id)] = AutomaticRun(session, query, previous)


class AutomaticRun(declared.DeclaredRun):
    """Attaches to one run of a query, in a thread of its own."""

    def __init__(self, session: SparkSession, query: StreamingQuery, previous: AutomaticRun | None) -> None:
        self.run_id = str(query.runId)
        self.error: Exception | None = None
        self._session = session
        self._query = query
        self._query_id = str(query.id)
        self._previous = previous
        self._attachment: Attachment | None = None
        self._told = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sparkis-declared-{query.name}", daemon=True)
        self._thread.start()

    def attachment(self, timeout_s: float) -> Attachment:
        """Return the attachment once it is made; raises what keeps it from being made, or that it takes longer."""
        with self._told:
            self._told.wait_for(lambda: self.error or self._attachment, timeout_s)
        if self.error is not None:
            raise self.error
        if self._attachment is None:
            raise CheckpointError(
                f"query {self._query.name!r} has no committed micro-batch after {timeout_s:g} s; attach when it has "
                f"one, or pass a longer timeout_s="
            )
        return self._attachment

    def end(self) -> None:
        """Tell that the query's run is over; returns at once."""
        self._ended.set()

    def _run(self) -> None:
        if self._previous is not None:
            self._previous.end()
            self._previous._thread.join(LAST_BATCH_TIMEOUT_S)
            self._previous = None
        pause_s = PAUSE_S
        while self._has_log() and not self._is_done():
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        if self._attachment is not None:
            self._finish(self._attachment)
        if declared.runs.get(self._query_id) is self and self.error is None:
            del declared.runs[self._query_id]

    def _has_log(self) -> bool:
        """Wait for a log to write to; False if the run ends before."""
        is_said = False
        while _is_spark_running():
            if self._session.conf.get(LOG_SETTING, None) is not None:
                return True
            if not is_said:
                logger.warning(
                    "query %r declares states, and there is no change log to write them to: call sparkis.serve(spark) "
                    "or set %s",
                    self._query.name,
                    LOG_SETTING,
                )
                is_said = True
            if self._ended.wait(LOOK_INTERVAL_S):
                return False
        return False

    def _is_done(self) -> bool:
        """Attach and follow; True when the run is over, or trying again would not help."""
        try:
            attachment = attach_anew(self._session, self._query, timeout_s=float("inf"))
        except Exception as error:
            return self._is_over_by(error)
        self._tell(attachment, None)
        while not self._ended.wait(LOOK_INTERVAL_S):
            if not _is_spark_running():
                return True
            if attachment.error is not None:
                return self._is_over_by(attachment.error)
        return True

    def _is_over_by(self, error: Exception) -> bool:
        """Say what went wrong; True if trying again would not help."""
        if not _is_spark_running():
            return True
        # What the last run wrote may lack a change log; in this one the processor's tasks have made sure of it.
        is_lasting = isinstance(error, LASTING) and not isinstance(error, FeedMissingError)
        if self._ended.is_set() or not self._query.isActive:
            logger.info("query %r has ended: %s", self._query.name, error)
        elif is_lasting:
            logger.error("query %r: what it declares cannot be read: %s", self._query.name, error)
        else:
            logger.warning("query %r: attaching again in a while: %s", self._query.name, error)
            self._tell(None, None)
            return False
        self._tell(None, error)
        return True

    def _tell(self, attachment: Attachment | None, error: Exception | None) -> None:
        with self._told:
            self._attachment, self.error = attachment, error
            self._told.notify_all()

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
