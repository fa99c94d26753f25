"""`Publisher` writes a running query's micro-batches as the epochs of a job.

The path of a row: `ShufflePlan.rows` selects and orders it in Spark. `Task` encodes it in a Python worker, and writes a
change file, or returns the bytes if they are few. `Publisher.write` commits the epoch on the driver.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.publish import progress, task
from spark_hooks.publish.offsets import OffsetLog, is_idle
from spark_hooks.publish.shuffle_plan import ShufflePlan
from spark_hooks.publish.sources import NewestOffsets
from spark_hooks.serving import endpoints, placement
from spark_hooks.sessions import current_session, execution_of, input_partitions_of, parallelism_of
from state_backend.log.catch_up import CATCH_UP_TIMEOUT_S, CatchUp
from state_backend.log.log_writer import LogWriter, OnRewind
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import DescriptorError, SparkisError

logger = logging.getLogger("sparkis.sink")

Mode = Literal["update", "append", "complete"]
PARTITIONS_SETTING = "spark.sparkis.partitions"
# The wait for the first epoch of a run: an applier starts half a second after a server finds its job, later on a loaded
# machine (guess).
FIRST_VISIBILITY_TIMEOUT_S = 5.0
HEARTBEAT_INTERVAL_S = 1.0
# A larger batch is shuffled. Without a shuffle the driver gets eight bytes per row: at most 32 MB (guess).
UNSHUFFLED_ROWS_MAX = 4_000_000
# If there are more tasks than this multiple of the shuffle's partitions, they cost more than the shuffle (guess).
UNSHUFFLED_TASKS_FACTOR = 4


class BatchInterruptedError(Exception):
    """The query was stopped while its micro-batch ran.

    Spark's StreamExecution searches the error of a Python function for the words in parentheses, to tell a stop from a
    failure. Its pattern overflows the JVM's stack on long texts: with the original error, stopping a query in the
    middle of a batch printed a thousand lines (seen with 4.3). So this text is short.
    """

    def __init__(self) -> None:
        super().__init__(
            "the query was stopped while this micro-batch ran; it runs again when the query starts again "
            "(py4j.protocol.Py4JJavaError: An error occurred while calling collect: java.lang.InterruptedException)"
        )


@dataclass(frozen=True)
class QueryRun:
    """One run of a query, from its start to its end."""

    query_id: str
    run_id: str
    name: str | None
    query: StreamingQuery | None = field(compare=False)
    checkpoint: str = field(default="", compare=False)

    @classmethod
    def of_query(cls, query: StreamingQuery) -> QueryRun:
        """Return the run of a query that was started."""
        return cls(query.id, query.runId, query.name, query, checkpoint_of(query))

    @classmethod
    def of_batch(cls, df: DataFrame) -> QueryRun:
        """Return the run of a micro-batch, from the local properties of the thread that runs foreachBatch."""
        read = df.sparkSession.sparkContext.getLocalProperty
        query_id = read("sql.streaming.queryId")
        if not query_id:
            raise DescriptorError(
                "sparkis.publish was called outside of a streaming query's foreachBatch function; "
                "to publish without Spark use sparkis.LogWriter"
            )
        query = _running_query(df.sparkSession, query_id)
        if query is not None:
            return cls.of_query(query)
        first_line = (read("spark.job.description") or "").partition("\n")[0]
        name = None if first_line.startswith("id = ") else first_line
        return cls(query_id, read("spark.jobGroup.id") or "", name or None, None)


def checkpoint_of(query: StreamingQuery) -> str:
    """Return the location of a query's checkpoint, as Spark resolves it; empty if Spark's classes do not have it."""
    try:
        return str(execution_of(query).resolvedCheckpointRoot())
    except (AttributeError, Py4JError, TypeError) as error:
        logger.debug("the checkpoint of the query %s was not found: %s", query.id, error)
        return ""


def _running_query(session: SparkSession, query_id: str) -> StreamingQuery | None:
    """Return a running query of any session of this driver, or None.

    A session lists only its own queries, and a batch's session has none. The list of all sessions' queries is a private
    API of Spark; None if it is missing.
    """
    try:
        active = session._jsparkSession.sharedState().activeStreamingQueries()
        found = active.get(session.sparkContext._jvm.java.util.UUID.fromString(query_id))  # type: ignore[union-attr]
    except (AttributeError, Py4JError, TypeError) as error:
        logger.debug("the query %s was not found: %s", query_id, error)
        return None
    return None if found is None else StreamingQuery(found)


def plan_text(query: StreamingQuery) -> str:
    """Return the plan of a query of this driver, as text."""
    return str(execution_of(query).analyzedPlan().toString())


@dataclass(frozen=True)
class SinkOptions:
    """The arguments of `queryable` or `publish`, validated."""

    states: tuple[StateDescriptor, ...]
    mode: Mode
    job: str | None
    log: str
    visibility_timeout_s: float
    on_rewind: OnRewind
    has_progress: bool = False
    catch_up_timeout_s: float | None = CATCH_UP_TIMEOUT_S
    takeover: bool = False
    skips_bad_rows: bool = False
    record_time: str | None = None


class Publisher:
    """Writes the epochs of one run of one query. Lives on the driver; Spark calls it once per micro-batch."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._opening = threading.Lock()
        self._writer: LogWriter | None = None
        self._shuffle_plan: ShufflePlan | None = None
        self._last_committed = -1
        self._previous_row_count = 0
        self._run: QueryRun | None = None
        self._progress_query: StreamingQuery | None = None
        self._offsets = OffsetLog(None)
        self._catch_up: CatchUp | None = None

    def open(self, run: QueryRun, siblings: Collection[str] = ()) -> LogWriter:
        """Return the run's log writer; the first call opens it, which fences the job's former writer.

        Called by the thread that starts the query and by the thread that runs its batches, in any order.

        Args:
            siblings: The ids of the writers of the run's other jobs.
        """
        with self._opening:
            if self._writer is None:
                job = self._options.job or run.name
                if job is None:
                    raise DescriptorError(NAME_MISSING)
                states = list(self._options.states)
                if self._options.has_progress and run.query is not None:
                    progress.check_key_conflict(job, states)
                    states.append(progress.state_of(job))
                    self._progress_query = run.query
                elif self._options.has_progress:
                    logger.warning(
                        "job %s: progress=True has no effect: the query's progress is not available here", job
                    )
                writer = LogWriter(
                    self._options.log,
                    job,
                    states,
                    run.query_id,
                    self._options.on_rewind,
                    siblings=siblings,
                    rewrites_states=self._options.mode == "complete",
                    checkpoint=run.checkpoint,
                    sends_heartbeats=False,
                    takeover=self._options.takeover,
                    holds_back=self._options.catch_up_timeout_s != 0,
                )
                self._offsets = OffsetLog(run.checkpoint or None, current_session() if run.query is not None else None)
                self._catch_up = CatchUp(
                    writer, self._options.catch_up_timeout_s, partial(is_idle, run.query, self._offsets)
                )
                arguments = (writer, run.query, self._catch_up)
                heartbeat = threading.Thread(
                    target=_send_heartbeats, args=arguments, name=f"sparkis-heartbeat-{job}", daemon=True
                )
                heartbeat.start()
                # The servers open the job while Spark prepares the first batch.
                endpoints.announce(self._options.log, job, -1, writer.current.term)
                self._writer, self._run = writer, run
            return self._writer

    def write(self, batch: DataFrame, batch_id: int) -> None:
        """Write and commit one micro-batch. The batch always runs to its end, even if it was committed before."""
        writer = self._writer or self.open(QueryRun.of_batch(batch))
        self.check_not_committed(writer.job, batch_id)
        writer.start(batch_id)
        clock_ms = writer.clock_ms()
        results = self._write_files(batch, batch_id, writer, clock_ms)
        replaces = tuple(state.name for state in self._options.states) if self._options.mode == "complete" else ()
        extra_inline = (
            None if self._progress_query is None else progress.inline_changes_of(writer.job, self._progress_query)
        )
        offsets = self._offsets.ends_of(batch_id)
        is_new = task.commit(writer, batch_id, clock_ms, results, replaces, extra_inline, offsets)
        assert self._catch_up is not None
        self._catch_up.on_commit(offsets)
        is_first, self._last_committed = self._last_committed < 0, batch_id
        if not is_new:
            logger.info("job %s: epoch %d was committed before a restart; its replay is skipped", writer.job, batch_id)
        self._announce_and_wait(writer.job, batch_id, is_first=is_first)

    @property
    def query(self) -> StreamingQuery | None:
        """The query of the open run; None before it is open, and where the query is not available."""
        return None if self._run is None else self._run.query

    @property
    def writer_id(self) -> str | None:
        """The id of the open writer in the log, or None."""
        return None if self._writer is None else self._writer.current.writer

    def check_not_committed(self, job: str, batch_id: int) -> None:
        """Raise DescriptorError for a second epoch of one micro-batch; the log would skip it as a replay."""
        if batch_id == self._last_committed:
            raise DescriptorError(
                f"job {job!r}: batch {batch_id} was published twice; a micro-batch is one epoch: pass "
                f"all its states to one call of sparkis.publish (a descriptor's where= chooses its rows)"
            )

    def _write_files(self, batch: DataFrame, batch_id: int, writer: LogWriter, clock_ms: int) -> list[Any]:
        """Run the batch: one shuffle for all states, one pass over the batch's own plan.

        The rows of a state without an order are first written without the shuffle. If a second row of a key is an
        error, the tasks return the hashes of all keys. If two hashes are equal, the batch runs again with the shuffle,
        which brings the rows of a key together, and so finds out whether the keys are equal.
        """
        shuffle_plan, skips = self._shuffle_plan_of(batch), self._options.skips_bad_rows
        row_plans = tuple(replace(each, skips_bad_rows=skips) for each in shuffle_plan.row_plans_at(clock_ms))
        server_plan = placement.plan_of(self._options.log)
        write_task = task.Task(
            self._options.log,
            writer.folder,
            batch_id,
            row_plans,
            server_plan,
            clock_ms=None if self._options.record_time is None else clock_ms,
        )
        partitions = partitions_of(batch.sparkSession)
        has_hashes = shuffle_plan.has_unique_keys
        can_skip = bool(shuffle_plan.unshuffled) and (not has_hashes or self._previous_row_count <= UNSHUFFLED_ROWS_MAX)
        tasks = input_partitions_of(batch) if can_skip else 0
        if partitions <= 2 * tasks and tasks <= UNSHUFFLED_TASKS_FACTOR * partitions:
            unshuffled = replace(write_task, hashes_max=UNSHUFFLED_ROWS_MAX // tasks if has_hashes else None)
            results = self._run_tasks(shuffle_plan.unshuffled_rows(batch), unshuffled, writer.job)
            if not has_hashes or task.has_unique_keys(results):
                return results
        results = self._run_tasks(shuffle_plan.rows(batch, partitions), write_task, writer.job)
        self._previous_row_count = sum(result.rows for result in results)
        return results

    def _run_tasks(self, rows: DataFrame, write_task: task.Task, job: str) -> list[Any]:
        try:
            results = rows.mapInArrow(write_task, task.RESULT).collect()
        except (PySparkException, Py4JError) as error:  # Py4JError: Spark's exception has no class in Python
            if not _is_active(self._run.query if self._run else None):
                raise BatchInterruptedError from None
            task.check_workers(error)
            raise
        task.check(results, job, write_task.epoch)
        return results

    def _shuffle_plan_of(self, batch: DataFrame) -> ShufflePlan:
        """Return the plan of the shuffle, made once per schema, because each call of Spark takes a millisecond."""
        if self._shuffle_plan is None or self._shuffle_plan.schema != batch.schema:
            assert self._writer is not None
            options = self._options
            self._shuffle_plan = ShufflePlan.of(batch, options.states, self._writer.job, options.record_time)
        return self._shuffle_plan

    def _announce_and_wait(self, job: str, epoch: int, *, is_first: bool) -> None:
        """Announce an epoch to the servers; wait until it is readable there, if the options require it.

        The first epoch of a run is always awaited, because servers may still be opening the job.
        """
        log = self._options.log
        assert self._writer is not None
        endpoints.announce(log, job, epoch, self._writer.current.term)
        if self._catch_up is not None and not self._catch_up.is_done:
            return
        has_servers = bool(endpoints.of_log(log))
        timeout_s = self._options.visibility_timeout_s or (
            FIRST_VISIBILITY_TIMEOUT_S if is_first and has_servers else 0.0
        )
        if not timeout_s:
            return
        if not has_servers:
            logger.warning(
                "job %s: wait_for_visibility has no effect, because this driver has started no server for the log %s; "
                "call sparkis.serve(spark) before the query starts",
                job,
                log,
            )
        if not endpoints.wait(log, job, epoch, timeout_s):
            logger.warning("job %s: epoch %d was not readable after %s s; the query goes on", job, epoch, timeout_s)


NAME_MISSING = (
    "the query has no name, and the keys of its states begin with that name: call .queryName('...') before start(), "
    "or pass job='...'"
)


def _is_active(query: StreamingQuery | None) -> bool:
    """Return whether a query runs. Without a handle of the query: True."""
    try:
        return query is None or query.isActive
    except Exception:  # a stopped Spark raises many kinds of errors
        return False


def _send_heartbeats(writer: LogWriter, query: StreamingQuery | None, catch_up: CatchUp) -> None:
    """Write a heartbeat into the log once a second while the query runs, and check its catch-up."""
    is_active, newest = True, NewestOffsets(query)
    while is_active:
        is_active = _is_active(query)
        try:
            if not writer.send_heartbeat(is_running=is_active, sources=newest.ask() if is_active else None):
                return  # fenced: the newer writer sends heartbeats
            catch_up.check()
        except SparkisError as error:  # the next commit will fail as well
            logger.debug("no heartbeat for job %s: %s", writer.job, error)
        time.sleep(HEARTBEAT_INTERVAL_S)


def partitions_of(session: SparkSession) -> int:
    """Return the number of partitions into which a batch is shuffled before it is written.

    The default is the application's number of cores, or the session's number of shuffle partitions if that is less:
    every partition is a Python task, and most micro-batches are small.
    """
    setting = session.conf.get(PARTITIONS_SETTING, None)
    if setting is not None:
        if not setting.isdecimal() or int(setting) == 0:
            raise DescriptorError(f"{PARTITIONS_SETTING} is a number of partitions, at least 1, not {setting!r}")
        return int(setting)
    shuffled = int(session.conf.get("spark.sql.shuffle.partitions", "200") or 200)
    return max(1, min(shuffled, parallelism_of(session)))
