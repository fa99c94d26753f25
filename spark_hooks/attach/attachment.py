"""Follows a query's checkpoint: the whole state once, then each committed batch's changes, one epoch a batch.

    sparkis.attach(query, ...)                 a query of this driver
    sparkis.attach(checkpoint=..., job=...)    any query, running or stopped

The log itself says how far an attachment came, so that it goes on after any end of it or of the query: the epoch's
number is the batch's, its clock reading the batch's timestamp. Where the changes do not lead on from there (they were
purged, or the checkpoint was set back), the state is read whole into a new generation of the log, and
readers keep the old one until that is there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal, Self

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.attach.rows import BoundState
from spark_hooks.attach.task import RESULT, BatchesTask
from spark_hooks.checkpoint import Checkpoint, CheckpointError
from spark_hooks.publish import progress as query_progress
from spark_hooks.publish import task
from spark_hooks.publish.catch_up import CatchUp
from spark_hooks.publish.encoding import RowError
from spark_hooks.publish.offsets import OffsetLog
from spark_hooks.publish.publisher import HEARTBEAT_INTERVAL_S
from spark_hooks.serving import endpoints, placement
from spark_hooks.sessions import describe_jobs, is_stopped, parallelism_of
from state_backend.log.change_log import ChangeLog
from state_backend.log.epochs import Epoch
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import (
    DescriptorError,
    EpochHoleError,
    FencedWriterError,
    LogCorruptError,
)

logger = logging.getLogger("sparkis.attach")

OnMismatch = Literal["refuse", "replace"]

# How often the next commit is looked for: one look at one file. On a disk of this machine that takes microseconds; on
# an object store it costs something, so that a query of this driver is asked instead, whose progress follows a commit.
POLL_INTERVAL_LOCAL_S = 0.02
POLL_INTERVAL_REMOTE_S = 1.0
PROGRESS_INTERVAL_S = 0.1
# Looks at the next commit, between two that list all of them to see whether the checkpoint was set back.
LOOKS_PER_LISTING = 50
LOOKS_PER_LISTING_REMOTE = 10
# More waiting batches than this are read in several Spark jobs (guess).
BATCHES_MAX = 16
# A turn costs much the same for one batch as for several (measured by the benchmark `attach`). Where batches follow
# each other so fast that turns would, there is a rest after each: a share of the time that it took.
REST_SHARE = 2.0
REST_S_MAX = 0.75
# What fails is tried again after a second, then after pauses that double up to the longest (guess).
PAUSE_S = 1.0
PAUSE_S_MAX = 10.0
STOP_TIMEOUT_S = 60.0
WAIT_TIMEOUT_S = 60.0

# Trying again would not help.
LASTING = (DescriptorError, RowError, FencedWriterError, LogCorruptError, EpochHoleError)


class FeedMissingError(DescriptorError):
    """The changes of the last batch cannot be read, because nothing wrote them down."""


class Attachment:
    """A thread that follows a query's checkpoint and publishes its state, as `attach` returns it.

    It is a context manager whose end is `stop`.

    Attributes:
        job: The name that keys begin with.
        log: The root of the change log.
        error: What ended the attachment, if anything did.
        failure: What the last try met, if it failed; the attachment tries again.
    """

    def __init__(
        self,
        session: SparkSession,
        checkpoint: Checkpoint,
        states: Sequence[BoundState],
        *,
        job: str,
        log: str,
        on_mismatch: OnMismatch,
        takeover: bool,
        catch_up_timeout_s: float | None,
        query: StreamingQuery | None,
        is_active: Callable[[], bool],
        progress: Callable[[], str] | None = None,
        facts: Callable[[], bytes | None] | None = None,
    ) -> None:
        self.job = job
        self.log = log
        self.error: Exception | None = None
        self.failure: Exception | None = None
        self._session = session
        self._checkpoint = checkpoint
        self._states = tuple(states)
        self._takeover = takeover
        self._catch_up_timeout_s = catch_up_timeout_s
        self._query = query
        self._offsets = OffsetLog(checkpoint.location, session)
        self._is_active = is_active
        self._progress = progress
        self._facts = facts
        self._partitions = parallelism_of(session)
        self._stopping = threading.Event()
        self._moved = threading.Condition()
        self._check_pinned(on_mismatch)
        self._writer = self._open()
        self._notice()
        self._follower = threading.Thread(target=self._follow, name=f"sparkis-attach-{job}", daemon=True)
        self._follower.start()
        threading.Thread(target=self._send_heartbeats, name=f"sparkis-attach-beat-{job}", daemon=True).start()

    def __repr__(self) -> str:
        return f"Attachment(job={self.job!r}, checkpoint={self._checkpoint.location!r}, batch={self.batch})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def states(self) -> tuple[StateDescriptor, ...]:
        """The states as the log describes them."""
        return self._writer.states

    @property
    def batch(self) -> int:
        """The number of the last micro-batch in the log; -1 before the first."""
        last = self._writer.last
        return -1 if last is None else last.epoch

    def wait(self, batch: int | None = None, timeout_s: float = WAIT_TIMEOUT_S) -> bool:
        """Wait until a micro-batch can be read, and return whether it can.

        A batch can be read once it is in the log and the servers that this driver started show it.

        Args:
            batch: The micro-batch's number. Default: the last one that the query has committed.
            timeout_s: How long to wait, in seconds.

        Raises:
            Exception: What ended the attachment, which is `error` as well.
        """
        deadline = time.monotonic() + timeout_s
        if batch is None:
            batch = self._checkpoint.newest()
        if batch is None:
            return True
        with self._moved:
            self._moved.wait_for(lambda: self.error or self.batch >= batch, max(0.0, deadline - time.monotonic()))
        if self.error is not None:
            raise self.error
        return self.batch >= batch and all(
            endpoint.wait(self.job, batch, max(0.0, deadline - time.monotonic()))
            for endpoint in endpoints.of_log(self.log)
        )

    def stop(self) -> None:
        """Stop following, after the read that is under way. What is in the log stays readable."""
        self._stopping.set()
        if threading.current_thread() is not self._follower:
            self._follower.join(STOP_TIMEOUT_S)

    # The log ---------------------------------------------------------------------------------------------------

    @property
    def _descriptors(self) -> list[StateDescriptor]:
        descriptors = [state.descriptor for state in self._states]
        return descriptors if self._facts is None else [*descriptors, query_progress.state_of(self.job)]

    @property
    def _source(self) -> dict[str, Any]:
        return {"states": {state.descriptor.name: state.pinned for state in self._states}}

    def _check_pinned(self, on_mismatch: OnMismatch) -> None:
        """Refuse to go on with a log whose states came from elsewhere, or from an operator that looked otherwise."""
        log = ChangeLog(self.log).job(self.job)
        current = log.current()
        if current is None:
            return
        described = log.description(current.generation)
        pinned = described.source
        if pinned is None:
            raise DescriptorError(
                f"job {self.job!r} in the log {self.log} is written by its query itself (sparkis.queryable or "
                f"sparkis.publish), and a log has one writer for a job: give the attachment another name with job="
            )
        if on_mismatch == "replace" or described.query_id != self._checkpoint.query_id():
            return
        for state in self._states:
            name, mine = state.descriptor.name, state.pinned
            theirs = pinned["states"].get(name, mine)
            for what in ("operator", "variable", "schema"):
                if theirs[what] != mine[what]:
                    raise DescriptorError(
                        f"job {self.job!r}, state {name!r}: operator {mine['operator_id']} of the query has {what} "
                        f"{mine[what]}, and the log was written from {what} {theirs[what]}: the query's plan has "
                        f"changed. Say which operator it is now with operator= (sparkis attach --list shows them), "
                        f"or pass on_mismatch='replace' to read the whole state anew"
                    )

    def _open(self, *, is_anew: bool = False) -> LogWriter:
        """Go on with the query's generation, or begin another one if the states are made in another way now.

        The generation of another query is held back until that has caught up; one of the same query begins with its
        whole state.
        """
        query_id = self._checkpoint.query_id()
        log = ChangeLog(self.log).job(self.job)
        shown = log.shown()
        is_others = shown is not None and log.description(shown.generation).query_id != query_id
        writer = LogWriter(
            self.log,
            self.job,
            self._descriptors,
            query_id,
            source=self._source,
            is_anew=is_anew or not self._fits(query_id),
            checkpoint=self._checkpoint.location,
            is_beating=True,
            takeover=self._takeover or is_anew,  # anew: in the place of a writer of its own
            holds_back=is_others and self._catch_up_timeout_s != 0,
        )
        self._catch_up = CatchUp(writer, self._catch_up_timeout_s, self._query, self._offsets)
        return writer

    def _fits(self, query_id: str) -> bool:
        term = ChangeLog(self.log).job(self.job).terms.last_of(query_id)
        if term is None or term.description is None:
            return True
        mine = tuple(state.for_job(self.job) for state in self._descriptors)
        return (term.description.states, term.description.source) == (mine, self._source)

    def _notice(self) -> None:
        for endpoint in endpoints.of_log(self.log):
            endpoint.notice(self.job, self.batch)

    def _send_heartbeats(self) -> None:
        """Show a sign of life once a second; that it is none while nothing can be read, or the query does not run."""
        is_running = True
        while is_running:
            is_running = not self._stopping.wait(HEARTBEAT_INTERVAL_S) and self.error is None
            writer = self._writer
            try:
                writer.beat(is_running=is_running and self.failure is None and self._is_active())
                if not self._catch_up.is_done:
                    self._catch_up.check(is_behind=self.batch != self._checkpoint.newest())
            except Exception as error:  # of the log, or of a Spark that has stopped; the follower meets it too
                logger.debug("no sign of life for job %s: %s", self.job, error)

    # The checkpoint --------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        pause_s = PAUSE_S
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                if self._step():
                    self.failure = None
                    self._stopping.wait(min(REST_S_MAX, REST_SHARE * (time.monotonic() - started_s)))
                else:
                    self.failure = None
                    self._wait_for_commit()
                pause_s = PAUSE_S
            except Exception as error:
                if is_stopped(self._session):  # Spark was stopped, and this ends with it
                    self._stopping.set()
                    return
                if isinstance(error, LASTING):
                    self._end(error)
                    return
                self.failure = error
                last = self.batch
                logger.warning("job %s: stays at batch %d; next try in %g s: %s", self.job, last, pause_s, _told(error))
                self._stopping.wait(pause_s)
                pause_s = min(PAUSE_S_MAX, 2 * pause_s)

    def _wait_for_commit(self) -> None:
        """Return when the next batch is committed, or when it is time to look at all of them."""
        last = self._writer.last
        batch = 0 if last is None else last.epoch + 1
        if self._checkpoint.is_local:
            interval_s, looks = POLL_INTERVAL_LOCAL_S, LOOKS_PER_LISTING
        else:
            interval_s, looks = POLL_INTERVAL_REMOTE_S, LOOKS_PER_LISTING_REMOTE
        for _ in range(looks):
            self._wait_for_progress(interval_s)
            if self._stopping.is_set() or self._checkpoint.is_committed(batch):
                return

    def _wait_for_progress(self, timeout_s: float) -> None:
        """Wait, but no longer than until the query has done something, if it is one of this driver."""
        if self._progress is None or timeout_s <= PROGRESS_INTERVAL_S:
            self._stopping.wait(timeout_s)
            return
        ends_s, before = time.monotonic() + timeout_s, self._progress()
        while time.monotonic() < ends_s and not self._stopping.wait(PROGRESS_INTERVAL_S):
            if self._progress() != before:
                return

    def _end(self, error: Exception) -> None:
        logger.error("job %s: the attachment has ended: %s", self.job, _told(error))
        with self._moved:
            self.error = error
            self._moved.notify_all()

    def _step(self) -> bool:
        """Take what was committed since the last step; True if there may be more."""
        last = self._writer.last
        newest = self._checkpoint.newest()
        if newest is None:
            if last is None:
                return False
            raise CheckpointError(f"{self._checkpoint.location} has no committed batch any more, or cannot be reached")
        if last is None:
            self._read_whole(newest)
        elif reason := self._break_after(last, newest):
            logger.warning("job %s: %s; the whole state is read anew", self.job, reason)
            self._writer.check_in_charge()
            self._writer = self._open(is_anew=True)
        elif newest > last.epoch:
            self._read_feed(last.epoch + 1, min(newest, last.epoch + BATCHES_MAX))
        else:
            return False
        return True

    def _break_after(self, last: Epoch, newest: int) -> str:
        """Return why the checkpoint's batches do not lead on from an epoch, or nothing if they do."""
        query_id = self._checkpoint.query_id()
        if self._writer.query_id != query_id:
            return f"the checkpoint is another query's now, {query_id}"
        began_at_ms = self._checkpoint.began_at_ms(last.epoch)
        if newest < last.epoch or began_at_ms not in (None, last.clock_ms):
            return f"the checkpoint was set back to before batch {last.epoch}"
        if began_at_ms is None or (newest > last.epoch and not self._checkpoint.is_committed(last.epoch + 1)):
            return f"batch {last.epoch + 1} is purged already (spark.sql.streaming.minBatchesToRetain keeps more)"
        return ""

    def _read_whole(self, batch: int) -> None:
        began = self._began(batch)
        parts = [
            (state, state.whole(self._session, self._checkpoint, batch, self._partitions)) for state in self._states
        ]
        results = self._run(parts, f"the whole state as of batch {batch}")
        self._commit(batch, began, results, replaces=tuple(state.descriptor.name for state in self._states))
        self._notice()

    def _read_feed(self, first: int, last: int) -> None:
        began = {batch: self._began(batch) for batch in range(first, last + 1)}
        try:
            parts = [
                (state, state.feed(self._session, self._checkpoint, first, last, self._partitions))
                for state in self._states
            ]
            results = self._run(parts, f"the changes of batches {first} to {last}")
        except (PySparkException, Py4JError):  # the latter where Spark's exception has no class in Python
            if not self._checkpoint.is_committed(first):
                return  # purged meanwhile: the next step sees it
            raise
        for batch, began_at_ms in began.items():
            self._commit(batch, began_at_ms, [each for each in results if each.batch == batch])
        self._notice()

    def _began(self, batch: int) -> int:
        began_at_ms = self._checkpoint.began_at_ms(batch)
        if began_at_ms is None:
            raise CheckpointError(f"batch {batch} of {self._checkpoint.location} was purged while it was looked at")
        return began_at_ms

    def _run(self, parts: Sequence[tuple[BoundState, DataFrame]], what: str) -> list[Any]:
        """Write the rows of all states; one Spark job."""
        describe_jobs(self._session, f"sparkis attach {self.job}: {what}")
        plan = placement.plan_of(self.log)
        written = [
            rows.mapInArrow(BatchesTask(self.log, self._writer.folder, state.layout.row_plans, plan), RESULT)
            for state, rows in parts
        ]
        try:
            results = reduce(DataFrame.union, written).collect()
        except (PySparkException, Py4JError) as error:
            task.check_workers(error)
            raise
        task.check(results, self.job)
        return results

    def _commit(self, batch: int, began_at_ms: int, results: Sequence[Any], *, replaces: tuple[str, ...] = ()) -> None:
        own = None if self._facts is None else self._facts()
        offsets = self._offsets.ends_of(batch)
        task.commit(self._writer, batch, began_at_ms, results, replaces, own, offsets)
        self._catch_up.on_commit(offsets)
        with self._moved:
            self._moved.notify_all()


def _told(error: Exception) -> str:
    """Return an error in one line, without what Java adds."""
    if isinstance(error, Py4JJavaError):
        return str(error.java_exception.getMessage()).partition("\n")[0]
    return str(error).partition("\n")[0]
