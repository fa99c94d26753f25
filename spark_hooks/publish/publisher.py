"""Writes a query's micro-batches as the epochs of a job: what the sink does once a query runs.

The way of a row: `Layout.rows` selects and orders it in Spark, `Task` encodes it in a Python worker and writes a change
file (or returns the bytes, if they are few), `Publisher.write` commits the epoch on the driver.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.publish import progress, task
from spark_hooks.publish.catching_up import CATCH_UP_TIMEOUT_S, CatchingUp
from spark_hooks.publish.layout import Layout
from spark_hooks.publish.offsets import OffsetLog
from spark_hooks.serving import endpoints, placement
from spark_hooks.sessions import execution_of, input_partitions_of, parallelism_of, session_at_hand
from state_backend.log.log_writer import LogWriter, OnRewind
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import DescriptorError, SparkisError

logger = logging.getLogger("sparkis.sink")

Mode = Literal["update", "append", "complete"]
PARTITIONS_SETTING = "spark.sparkis.partitions"
# An applier is there half a second after its job is found; a loaded machine takes its time (guess).
FIRST_VISIBILITY_TIMEOUT_S = 5.0
BEAT_INTERVAL_S = 1.0
# A batch of more rows is shuffled: the driver is sent eight bytes of each row of a smaller one, 32 MB (guess).
UNSHUFFLED_ROWS_MAX = 4_000_000
# Beyond so many times the partitions that rows are shuffled into, more tasks cost more than the shuffle (guess).
UNSHUFFLED_TASKS_FACTOR = 4


class BatchInterruptedError(Exception):
    """The query was stopped while its micro-batch ran.

    The words in brackets are what Spark looks for in a Python function's error to tell a stop from a failure (its class
    StreamExecution). It does so with a pattern that overflows the stack of the JVM on a text as long as the error's
    own, so that whoever stopped a query in the middle of a batch got a thousand lines of that (seen with 4.3).
    """

    def __init__(self) -> None:
        super().__init__(
            "the query was stopped while this micro-batch ran; it runs again when the query starts again "
            "(py4j.protocol.Py4JJavaError: An error occurred while calling collect: java.lang.InterruptedException)"
        )


@dataclass(frozen=True)
class Run:
    """Which query, and which run of it, a batch belongs to."""

    query_id: str
    run_id: str
    name: str | None
    query: StreamingQuery | None = field(compare=False)
    checkpoint: str = field(default="", compare=False)

    @classmethod
    def of_query(cls, query: StreamingQuery) -> Run:
        """Return the run of a query that was started."""
        return cls(query.id, query.runId, query.name, query, checkpoint_of(query))

    @classmethod
    def of_batch(cls, df: DataFrame) -> Run:
        """Look at the local properties of the thread that runs foreachBatch: there classic Spark keeps its id."""
        read = df.sparkSession.sparkContext.getLocalProperty
        query_id = read("sql.streaming.queryId")
        if not query_id:
            raise DescriptorError(
                "sparkis.publish was called outside of a streaming query's foreachBatch function; "
                "to publish without Spark use sparkis.LogWriter"
            )
        query = _active_query(df.sparkSession, query_id)
        if query is not None:
            return cls.of_query(query)
        first_line = (read("spark.job.description") or "").partition("\n")[0]
        name = None if first_line.startswith("id = ") else first_line
        return cls(query_id, read("spark.jobGroup.id") or "", name or None, None)


def checkpoint_of(query: StreamingQuery) -> str:
    """Return where a query keeps its checkpoint, as Spark writes it; empty where Spark does not tell."""
    try:
        return str(execution_of(query).resolvedCheckpointRoot())
    except (AttributeError, Py4JError, TypeError) as error:
        logger.debug("the checkpoint of the query %s was not found: %s", query.id, error)
        return ""


def _active_query(session: SparkSession, query_id: str) -> StreamingQuery | None:
    """Return a running query of any session of this driver, or None.

    Spark shows a session the queries that were started in it; a batch's session is one that nobody started any in.
    What all sessions share has no public way in, so that None is also the answer where it is not there.
    """
    try:
        active = session._jsparkSession.sharedState().activeStreamingQueries()
        found = active.get(session.sparkContext._jvm.java.util.UUID.fromString(query_id))  # type: ignore[union-attr]
    except (AttributeError, Py4JError, TypeError) as error:
        logger.debug("the query %s was not found: %s", query_id, error)
        return None
    return None if found is None else StreamingQuery(found)


def planned(query: StreamingQuery) -> str:
    """Return the plan of a query of this driver, as text."""
    return str(execution_of(query).analyzedPlan().toString())


@dataclass(frozen=True)
class Publication:
    """What a sink was told: the arguments of `queryable` and `publish`, checked."""

    states: tuple[StateDescriptor, ...]
    mode: Mode
    job: str | None
    log: str
    visibility_timeout_s: float
    on_rewind: OnRewind
    has_progress: bool = False
    catch_up_timeout_s: float | None = CATCH_UP_TIMEOUT_S
    takeover: bool = False


class Publisher:
    """Writes the epochs of one run of one query. Lives on the driver; Spark calls it once per micro-batch."""

    def __init__(self, told: Publication) -> None:
        self._told = told
        self._opening = threading.Lock()
        self._writer: LogWriter | None = None
        self._layout: Layout | None = None
        self._committed_here = -1
        self._rows_before = 0
        self._run: Run | None = None
        self._query: StreamingQuery | None = None
        self._offsets = OffsetLog(None)
        self._catching_up: CatchingUp | None = None

    def open(self, run: Run, siblings: Collection[str] = ()) -> LogWriter:
        """Return the writer of the run, opened at the first call; opening it fences whoever wrote before.

        siblings are the writers of the run's other jobs.

        Called by the thread that starts the query and by the one that runs its batches, whichever comes first.
        """
        with self._opening:
            if self._writer is None:
                job = self._told.job or run.name
                if job is None:
                    raise DescriptorError(NAME_MISSING)
                states = list(self._told.states)
                if self._told.has_progress and run.query is not None:
                    progress.check_apart(job, states)
                    states.append(progress.state_of(job))
                    self._query = run.query
                elif self._told.has_progress:
                    logger.warning("job %s: Spark does not show the query's progress here; there will be none", job)
                writer = LogWriter(
                    self._told.log,
                    job,
                    states,
                    run.query_id,
                    self._told.on_rewind,
                    siblings=siblings,
                    is_whole=self._told.mode == "complete",
                    checkpoint=run.checkpoint,
                    is_beating=True,
                    takeover=self._told.takeover,
                    holds_back=self._told.catch_up_timeout_s != 0,
                )
                self._offsets = OffsetLog(run.checkpoint or None, session_at_hand() if run.query is not None else None)
                self._catching_up = CatchingUp(writer, self._told.catch_up_timeout_s, run.query, self._offsets)
                given = (writer, run.query, self._catching_up)
                beat = threading.Thread(target=_beat, args=given, name=f"sparkis-beat-{job}", daemon=True)
                beat.start()
                for endpoint in endpoints.of_log(self._told.log):
                    endpoint.notice(job, -1)  # its servers open the job while Spark prepares the first batch
                self._writer, self._run = writer, run
            return self._writer

    def write(self, batch: DataFrame, batch_id: int) -> None:
        """Write and commit one micro-batch. Always runs the batch to its end, also when it was committed before."""
        writer = self._writer or self.open(Run.of_batch(batch))
        self.check_not_committed(writer.job, batch_id)
        writer.start(batch_id)
        clock_ms = writer.clock_ms()
        results = self._write_files(batch, batch_id, writer, clock_ms)
        replaces = tuple(state.name for state in self._told.states) if self._told.mode == "complete" else ()
        own = None if self._query is None else progress.stream_of(writer.job, self._query)
        offsets = self._offsets.ends_of(batch_id)
        is_new = task.commit(writer, batch_id, clock_ms, results, replaces, own, offsets)
        assert self._catching_up is not None
        self._catching_up.committed(offsets)
        is_first, self._committed_here = self._committed_here < 0, batch_id
        if not is_new:
            logger.info("job %s: epoch %d was committed before a restart; its replay is left out", writer.job, batch_id)
        self._make_visible(writer.job, batch_id, is_first=is_first)

    @property
    def writer_id(self) -> str | None:
        """The id of the writer that was opened last, in its claims."""
        return None if self._writer is None else self._writer.current.writer

    def check_not_committed(self, job: str, batch_id: int) -> None:
        """Refuse a second epoch for one micro-batch; it would pass for a replay and be left out."""
        if batch_id == self._committed_here:
            raise DescriptorError(
                f"job {job!r}: batch {batch_id} was published twice; a micro-batch is one epoch: pass "
                f"all its states to one call of sparkis.publish (a descriptor's where= chooses its rows)"
            )

    def _write_files(self, batch: DataFrame, batch_id: int, writer: LogWriter, clock_ms: int) -> list[Any]:
        """Run the batch: one shuffle for all states, one pass over the batch's own plan.

        The rows of a state without an order are written where they are, without the shuffle. Where a second row of a
        key is an error, the hashes of all keys tell that there is none; if two are the same, the shuffle brings their
        rows together, which shows whether the keys are.
        """
        layout = self._layout_of(batch)
        plan = placement.plan_of(self._told.log)
        of_batch = task.Task(self._told.log, writer.folder, batch_id, layout.plans(clock_ms), plan)
        partitions = partitions_of(batch.sparkSession)
        has_hashes = layout.has_unique_keys
        may_stay = bool(layout.unshuffled) and (not has_hashes or self._rows_before <= UNSHUFFLED_ROWS_MAX)
        tasks = input_partitions_of(batch) if may_stay else 0
        if partitions <= 2 * tasks and tasks <= UNSHUFFLED_TASKS_FACTOR * partitions:
            unshuffled = replace(of_batch, hashes_max=UNSHUFFLED_ROWS_MAX // tasks if has_hashes else None)
            results = self._run_tasks(layout.unshuffled_rows(batch), unshuffled, writer.job)
            if not has_hashes or task.has_each_key_once(results):
                return results
        results = self._run_tasks(layout.rows(batch, partitions), of_batch, writer.job)
        self._rows_before = sum(each.rows for each in results)
        return results

    def _run_tasks(self, rows: DataFrame, of_batch: task.Task, job: str) -> list[Any]:
        try:
            results = rows.mapInArrow(of_batch, task.RESULT).collect()
        except (PySparkException, Py4JError) as error:  # the latter where Spark's exception has no class in Python
            if not _is_active(self._run.query if self._run else None):
                raise BatchInterruptedError from None
            task.check_workers(error)
            raise
        task.check(results, job, of_batch.epoch)
        return results

    def _layout_of(self, batch: DataFrame) -> Layout:
        """Return how the rows travel; made once for a schema, because every call of Spark's costs a millisecond."""
        if self._layout is None or self._layout.schema != batch.schema:
            assert self._writer is not None
            self._layout = Layout.of(batch, self._told.states, self._writer.job)
        return self._layout

    def _make_visible(self, job: str, epoch: int, *, is_first: bool) -> None:
        """Tell the servers of an epoch. A run's first one is always waited for: servers may be opening the job yet."""
        known = endpoints.of_log(self._told.log)
        for endpoint in known:
            endpoint.notice(job, epoch)
        if self._catching_up is not None and not self._catching_up.is_over:
            return
        timeout_s = self._told.visibility_timeout_s or (FIRST_VISIBILITY_TIMEOUT_S if is_first and known else 0.0)
        if not timeout_s:
            return
        if not known:
            logger.warning(
                "job %s: wait_for_visibility was asked for, but no server of the log %s is known in this driver; "
                "call sparkis.serve(spark) before the query starts",
                job,
                self._told.log,
            )
        deadline = time.monotonic() + timeout_s
        for endpoint in known:
            if not endpoint.wait(job, epoch, max(0.0, deadline - time.monotonic())):
                logger.warning("job %s: epoch %d was not readable after %s s; the query goes on", job, epoch, timeout_s)


NAME_MISSING = (
    "the query has no name, and its state's keys begin with one: call .queryName('...') before start(), "
    "or pass job='...'"
)


def _is_active(query: StreamingQuery | None) -> bool:
    """Tell whether a query runs. Without a handle on it: as long as this process lives."""
    try:
        return query is None or query.isActive
    except Exception:  # Spark itself has stopped, and says so in many ways
        return False


def _beat(writer: LogWriter, query: StreamingQuery | None, catching_up: CatchingUp) -> None:
    """Show a sign of life once a second while the query runs, and look whether it has caught up."""
    is_active = True
    while is_active:
        is_active = _is_active(query)
        try:
            if not writer.beat(is_running=is_active):
                return  # others watch the newer writer's sign of life
            catching_up.look()
        except SparkisError as error:  # the next commit fails with it too; readers see the silence
            logger.debug("no sign of life for job %s: %s", writer.job, error)
        time.sleep(BEAT_INTERVAL_S)


def partitions_of(session: SparkSession) -> int:
    """Return into how many partitions a batch is spread before it is written.

    As many as the cores of the application, but never more than the session shuffles into: every partition is a Python
    task, and most micro-batches are small.
    """
    given = session.conf.get(PARTITIONS_SETTING, None)
    if given is not None:
        if not given.isdecimal() or int(given) == 0:
            raise DescriptorError(f"{PARTITIONS_SETTING} is a number of partitions, at least 1, not {given!r}")
        return int(given)
    shuffled = int(session.conf.get("spark.sql.shuffle.partitions", "200") or 200)
    return max(1, min(shuffled, parallelism_of(session)))
