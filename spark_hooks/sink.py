"""The sink: every micro-batch of a query becomes one epoch of a job's change log.

    queryable(df, ...)              a DataStreamWriter with the foreachBatch writer set, for a query of its own
    publish(batch_df, batch_id, ...) the same inside a foreachBatch function of the user's

The way of a row: `StateColumns.rows` selects and orders it in Spark, `_write_task` encodes it in a Python worker
and writes a change file (or returns the bytes, if they are few), `Publisher.write` commits the epoch on the driver.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, Literal, Unpack, get_args

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_hooks import endpoints
from spark_hooks.columns import StateColumns, check_columns
from spark_hooks.encoding import RowError, RowPlan, encode
from state_backend.change_log import ChangeFileWriter, LogWriter, OnRewind, check_writable
from state_backend.clock import now_ms
from state_backend.descriptor import StateArguments, StateDescriptor, check_name, check_states
from state_backend.epochs import ChangeFile
from state_backend.errors import DescriptorError, LogError, SparkisError
from state_backend.filesystems import open_filesystem

logger = logging.getLogger("sparkis.sink")

Mode = Literal["update", "append", "complete"]
LOG_SETTING = "spark.sparkis.log"
PARTITIONS_SETTING = "spark.sparkis.partitions"
VISIBILITY_TIMEOUT_S = 10.0
BEAT_INTERVAL_S = 1.0
TASK_RESULT = "file string, inline binary, rows long, digest long, error string"
PARTITIONS_MAX = 2**31 - 1
DIGEST_MASK = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True)
class _Task:
    """What a task needs to write its part of an epoch; picklable."""

    log: str
    folder: str
    epoch: int
    plan: RowPlan

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write one partition's changes. Runs on an executor, perhaps several times for one partition.

        A user's mistake comes back as data: raised here, Spark would run the task again and print a Java traceback.
        """
        digest = [0]
        rows = 0

        def counted(runs: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            nonlocal rows
            for run in runs:
                rows += run.num_rows
                yield run

        file, inline, error = None, None, None
        try:
            writer = ChangeFileWriter(open_filesystem(self.log), self.folder, self.epoch)
            file, inline = writer.write(counted(encode(self.plan, batches, digest)))
        except (RowError, LogError) as failed:
            error = str(failed)
        listed = None if file is None else json.dumps(asdict(file))
        signed_digest = (digest[0] + 2**63) % 2**64 - 2**63
        yield pa.RecordBatch.from_pydict(
            {
                "file": pa.array([listed], pa.string()),
                "inline": pa.array([inline], pa.binary()),
                "rows": pa.array([rows], pa.int64()),
                "digest": pa.array([signed_digest], pa.int64()),
                "error": pa.array([error], pa.string()),
            }
        )


@dataclass(frozen=True)
class _Run:
    """Which query, and which run of it, a batch belongs to."""

    query_id: str
    run_id: str
    name: str | None

    @classmethod
    def of_batch(cls, df: DataFrame) -> _Run:
        """Read it where classic Spark keeps it: in the local properties of the thread that runs foreachBatch."""
        read = df.sparkSession.sparkContext.getLocalProperty
        query_id = read("sql.streaming.queryId")
        if not query_id:
            raise DescriptorError(
                "sparkis.publish was called outside of a streaming query's foreachBatch function; "
                "to publish without Spark use sparkis.LogWriter"
            )
        first_line = (read("spark.job.description") or "").partition("\n")[0]
        name = None if first_line.startswith("id = ") else first_line
        return cls(query_id, read("spark.jobGroup.id") or "", name or None)


class Publisher:
    """Writes the epochs of one job. Lives on the driver; Spark calls it once per micro-batch, again after a restart."""

    def __init__(
        self,
        states: Sequence[StateDescriptor],
        *,
        mode: Mode,
        job: str | None,
        log: str,
        wait_for_visibility: bool | float,
        on_rewind: OnRewind,
        session: SparkSession,
    ) -> None:
        self.mode = mode
        self.job = job
        self.log = log
        self._states = states
        self._visibility_timeout_s = VISIBILITY_TIMEOUT_S if wait_for_visibility is True else wait_for_visibility
        self._on_rewind = on_rewind
        self._session = session
        self._run: _Run | None = None
        self._writer: LogWriter | None = None
        self._committed_here = -1

    def write(self, batch: DataFrame, batch_id: int) -> None:
        """Write and commit one micro-batch. Always runs the batch to its end, also when it was committed before."""
        run = _Run.of_batch(batch)
        self.check_not_committed(run, batch_id)
        writer = self._writer_for(run)
        clock_ms = now_ms()
        results = self._write_files(batch, batch_id, writer, clock_ms)
        is_new = writer.commit(
            batch_id,
            clock_ms=clock_ms,
            files=[ChangeFile.from_json(json.loads(each.file)) for each in results if each.file is not None],
            inline=[bytes(each.inline) for each in results if each.inline is not None],
            rows=sum(each.rows for each in results),
            digest=sum(each.digest for each in results) & DIGEST_MASK,
            replaces=tuple(state.name for state in self._states) if self.mode == "complete" else (),
        )
        self._committed_here = batch_id
        if not is_new:
            logger.info("job %s: epoch %d was committed before a restart; its replay is left out", writer.job, batch_id)
        self._make_visible(writer.job, batch_id)

    def check_not_committed(self, run: _Run, batch_id: int) -> None:
        """Refuse a second epoch for one micro-batch; it would pass for a replay and be left out."""
        if run == self._run and batch_id == self._committed_here:
            raise DescriptorError(
                f"job {self.job or run.name!r}: batch {batch_id} was published twice; a micro-batch is one epoch: pass "
                f"all its states to one call of sparkis.publish (a descriptor's where= chooses its rows)"
            )

    def _writer_for(self, run: _Run) -> LogWriter:
        """Return the writer of this run of the query; opening it fences whoever wrote before."""
        if self._writer is not None and run == self._run:
            return self._writer
        job = self.job or run.name
        if job is None:
            raise DescriptorError(NAME_MISSING)
        self._writer = LogWriter(self.log, job, self._states, run.query_id, self._on_rewind)
        self._run = run
        self._committed_here = -1
        query = self._session.streams.get(run.query_id)
        threading.Thread(target=_beat, args=(self._writer, query), name=f"sparkis-beat-{job}", daemon=True).start()
        return self._writer

    def _write_files(self, batch: DataFrame, batch_id: int, writer: LogWriter, clock_ms: int) -> list[Any]:
        """Run the batch: one Spark job for all states, one pass over the batch's own plan."""
        partitions = _partitions(batch.sparkSession)
        # Coalescing to more partitions than there are changes nothing but the plan, which then promises no order: Spark
        # 4.3 fails to cache a plan whose order names a column that the plan leaves out ("key not found", seen).
        source = batch.coalesce(PARTITIONS_MAX).persist() if len(self._states) > 1 else batch
        try:
            parts = []
            for state in self._states:
                of_state = StateColumns(state, writer.job)
                task = _Task(self.log, writer.folder, batch_id, of_state.plan(batch, clock_ms))
                parts.append(of_state.rows(source, partitions).mapInArrow(task, TASK_RESULT))
            results = reduce(DataFrame.union, parts).collect()
        finally:
            if len(self._states) > 1:
                source.unpersist()
        for each in results:
            if each.error is not None:
                raise RowError(f"job {writer.job!r}, batch {batch_id}: {each.error}")
        return results

    def _make_visible(self, job: str, epoch: int) -> None:
        known = endpoints.of_log(self.log)
        for endpoint in known:
            endpoint.notice(job, epoch)
        if not self._visibility_timeout_s:
            return
        if not known:
            logger.warning(
                "job %s: wait_for_visibility was asked for, but no server of the log %s is known in this driver; "
                "call sparkis.serve(spark) before the query starts",
                job,
                self.log,
            )
        deadline = time.monotonic() + self._visibility_timeout_s
        for endpoint in known:
            if not endpoint.wait(job, epoch, max(0.0, deadline - time.monotonic())):
                logger.warning(
                    "job %s: epoch %d was not readable after %s s; the query goes on",
                    job,
                    epoch,
                    self._visibility_timeout_s,
                )


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


def _beat(writer: LogWriter, query: StreamingQuery | None) -> None:
    """Show a sign of life once a second while the query runs."""
    while _is_active(query):
        try:
            writer.beat()
        except SparkisError as error:  # the next commit fails with it too; readers see the silence
            logger.debug("no sign of life for job %s: %s", writer.job, error)
        time.sleep(BEAT_INTERVAL_S)
    try:
        writer.close()
    except SparkisError as error:
        logger.debug("no last sign of life for job %s: %s", writer.job, error)


def _partitions(session: SparkSession) -> int:
    """Return into how many partitions a batch is spread before it is written.

    As many as the cores of the application, but never more than the session shuffles into: every partition is a Python
    task, and most micro-batches are small.
    """
    given = session.conf.get(PARTITIONS_SETTING, None)
    if given is not None:
        return int(given)
    shuffled = int(session.conf.get("spark.sql.shuffle.partitions", "200") or 200)
    return max(1, min(shuffled, session.sparkContext.defaultParallelism))


class QueryableWriter(DataStreamWriter):
    """Spark's DataStreamWriter with the sink set. Refuses, before the query starts, what the sink cannot do."""

    def __init__(self, df: DataFrame, publisher: Publisher) -> None:
        super().__init__(df)
        self._publisher = publisher
        self._name: str | None = None
        super().outputMode(publisher.mode)
        self.foreachBatch(publisher.write)

    def outputMode(self, outputMode: str) -> DataStreamWriter:
        """Refuse another mode than the one `queryable` was told."""
        if outputMode != self._publisher.mode:
            raise DescriptorError(
                f"the mode is {self._publisher.mode!r}; pass mode={outputMode!r} to sparkis.queryable"
            )
        return self

    def queryName(self, queryName: str) -> DataStreamWriter:
        """Set the query's name, which is the job's name unless job= was given."""
        if self._publisher.job is None:
            check_name("query", queryName)
        self._name = queryName
        return super().queryName(queryName)

    def trigger(self, **trigger: Any) -> DataStreamWriter:
        """Set the trigger; those without micro-batches are refused."""
        for kind in ("continuous", "realTime"):
            if trigger.get(kind) is not None:
                raise DescriptorError(
                    f"trigger({kind}=...) has no micro-batches that end in a commit, so there is no epoch that readers "
                    f"could see as a whole; use processingTime= or availableNow=True"
                )
        return super().trigger(**trigger)

    def start(self, *args: Any, **options: Any) -> StreamingQuery:
        """Start the query."""
        name = options.get("queryName") or (args[4] if len(args) > 4 else None)
        if name is not None:
            self.queryName(name)
        if self._name is None and self._publisher.job is None:
            raise DescriptorError(NAME_MISSING)
        return super().start(*args, **options)


def _log_of(session: SparkSession, log: str | None) -> str:
    root = log or session.conf.get(LOG_SETTING, None)
    if root is None:
        raise DescriptorError(
            f"there is no change log to write to: call sparkis.serve(spark) first, pass log=, or set {LOG_SETTING}"
        )
    check_writable(root)
    return root


def _checked_mode(mode: Mode) -> Mode:
    if mode not in get_args(Mode):
        raise DescriptorError(f"mode= is one of {', '.join(map(repr, get_args(Mode)))}, not {mode!r}")
    return mode


def _checked_states(
    df: DataFrame, states: Sequence[str | StateDescriptor], job: str | None, given: StateArguments
) -> list[StateDescriptor]:
    """Return the descriptors of a call, checked against the DataFrame's columns."""
    described: list[StateDescriptor] = []
    for state in states:
        if isinstance(state, StateDescriptor):
            described.append(state)
        elif len(states) == 1:
            described.append(StateDescriptor(state, **given))
        else:
            raise DescriptorError(f"give several states as sparkis.StateDescriptor({state!r}, key=..., value=...)")
    if given and isinstance(states[0], StateDescriptor):
        raise DescriptorError(f"{', '.join(sorted(given))}: say this in the StateDescriptor")
    if job is not None:
        check_name("job", job)
    check_states(job or "job", described)
    return [check_columns(df, state, job or "job") for state in described]


def queryable(
    df: DataFrame,
    *states: str | StateDescriptor,
    mode: Mode = "update",
    job: str | None = None,
    log: str | None = None,
    wait_for_visibility: bool | float = False,
    on_rewind: OnRewind = "refuse",
    **columns: Unpack[StateArguments],
) -> QueryableWriter:
    """Make a streaming DataFrame's rows readable as state; returns a DataStreamWriter to name and start.

    Give a state's name and its columns (`key=`, `value=` ...: the arguments of `StateDescriptor`), or several
    StateDescriptors, which one query then publishes in one epoch. Everything that can be checked is checked here,
    before the query starts.

    mode                 Spark's output mode; `complete` replaces the states with every micro-batch
    job                  the name that keys begin with; the query's name unless given
    log                  the change log's root; the setting spark.sparkis.log unless given
    wait_for_visibility  True, or seconds: a micro-batch ends only when it can be read, or that time has passed
    on_rewind            `truncate` drops epochs of the log that a checkpoint which was set back is to write again
    """
    if not df.isStreaming:
        raise DescriptorError(
            "sparkis.queryable takes a streaming DataFrame, and this one is not (spark.readStream makes one)"
        )
    publisher = Publisher(
        _checked_states(df, states, job, columns),
        mode=_checked_mode(mode),
        job=job,
        log=_log_of(df.sparkSession, log),
        wait_for_visibility=wait_for_visibility,
        on_rewind=on_rewind,
        session=df.sparkSession,
    )
    return QueryableWriter(df, publisher)


# The publishers of `publish`, by log and job: one call per micro-batch, one writer per run.
_publishers: dict[tuple[str, str], tuple[object, Publisher]] = {}


def publish(
    batch_df: DataFrame,
    batch_id: int,
    *states: str | StateDescriptor,
    mode: Mode = "update",
    job: str | None = None,
    log: str | None = None,
    wait_for_visibility: bool | float = False,
    on_rewind: OnRewind = "refuse",
    **columns: Unpack[StateArguments],
) -> None:
    """Publish a micro-batch from inside a foreachBatch function of your own; arguments as for `queryable`.

    Call it once for every micro-batch, also for an empty one, and let it run to its end. `mode` says what the batch is:
    changed rows (`update`, `append`) or the whole result (`complete`).
    """
    run = _Run.of_batch(batch_df)
    root = _log_of(batch_df.sparkSession, log)
    name = job or run.name
    if name is None:
        raise DescriptorError(NAME_MISSING)
    asked = (states, sorted(columns.items()), mode, wait_for_visibility, on_rewind)
    known_asked, publisher = _publishers.get((root, name), (None, None))
    if publisher is not None:
        publisher.check_not_committed(run, batch_id)
    if publisher is None or known_asked != asked:
        publisher = Publisher(
            _checked_states(batch_df, states, name, columns),
            mode=_checked_mode(mode),
            job=name,
            log=root,
            wait_for_visibility=wait_for_visibility,
            on_rewind=on_rewind,
            session=SparkSession.builder.getOrCreate(),
        )
        _publishers[root, name] = (asked, publisher)
    publisher.write(batch_df, batch_id)
