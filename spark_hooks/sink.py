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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_hooks import endpoints
from spark_hooks.columns import StateColumns, check_columns
from spark_hooks.encoding import RowError, RowPlan, encode
from state_backend.change_log import ChangeFileWriter, LogWriter, OnRewind, check_writable
from state_backend.clock import now_ms
from state_backend.descriptor import StateArguments, StateDescriptor, check_name, check_states
from state_backend.epochs import ChangeFile
from state_backend.errors import DescriptorError, LogError, LogUnavailableError, SparkisError
from state_backend.filesystems import open_filesystem

logger = logging.getLogger("sparkis.sink")

Mode = Literal["update", "append", "complete"]
LOG_SETTING = "spark.sparkis.log"
PARTITIONS_SETTING = "spark.sparkis.partitions"
VISIBILITY_TIMEOUT_S = 10.0
# An applier is there half a second after its job is found; a loaded machine takes its time (guess).
FIRST_VISIBILITY_TIMEOUT_S = 5.0
BEAT_INTERVAL_S = 1.0
TASK_RESULT = "file string, inline binary, rows long, digest long, error string, is_log_error boolean"
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

        file, inline, error, is_log_error = None, None, None, False
        try:
            writer = ChangeFileWriter(open_filesystem(self.log), self.folder, self.epoch)
            file, inline = writer.write(counted(encode(self.plan, batches, digest)))
        except (RowError, LogError) as failed:
            error, is_log_error = str(failed), isinstance(failed, LogError)
        listed = None if file is None else json.dumps(asdict(file))
        signed_digest = (digest[0] + 2**63) % 2**64 - 2**63
        yield pa.RecordBatch.from_pydict(
            {
                "file": pa.array([listed], pa.string()),
                "inline": pa.array([inline], pa.binary()),
                "rows": pa.array([rows], pa.int64()),
                "digest": pa.array([signed_digest], pa.int64()),
                "error": pa.array([error], pa.string()),
                "is_log_error": pa.array([is_log_error], pa.bool_()),
            }
        )


@dataclass(frozen=True)
class _Run:
    """Which query, and which run of it, a batch belongs to."""

    query_id: str
    run_id: str
    name: str | None
    query: StreamingQuery | None = field(compare=False)

    @classmethod
    def of_query(cls, query: StreamingQuery) -> _Run:
        """Return the run of a query that was started."""
        return cls(query.id, query.runId, query.name, query)

    @classmethod
    def of_batch(cls, df: DataFrame, session: SparkSession) -> _Run:
        """Look at the local properties of the thread that runs foreachBatch, where classic Spark keeps the query's id.

        `session` is where the query was started; a query of another one is known by those properties alone.
        """
        read = df.sparkSession.sparkContext.getLocalProperty
        query_id = read("sql.streaming.queryId")
        if not query_id:
            raise DescriptorError(
                "sparkis.publish was called outside of a streaming query's foreachBatch function; "
                "to publish without Spark use sparkis.LogWriter"
            )
        query = session.streams.get(query_id)
        if query is not None:
            return cls.of_query(query)
        first_line = (read("spark.job.description") or "").partition("\n")[0]
        name = None if first_line.startswith("id = ") else first_line
        return cls(query_id, read("spark.jobGroup.id") or "", name or None, None)


@dataclass(frozen=True)
class Publication:
    """What a sink was told: the arguments of `queryable` and `publish`, checked."""

    states: tuple[StateDescriptor, ...]
    mode: Mode
    job: str | None
    log: str
    visibility_timeout_s: float
    on_rewind: OnRewind
    session: SparkSession


class Publisher:
    """Writes the epochs of one run of one query. Lives on the driver; Spark calls it once per micro-batch."""

    def __init__(self, told: Publication) -> None:
        self._told = told
        self._opening = threading.Lock()
        self._writer: LogWriter | None = None
        self._committed_here = -1

    def open(self, run: _Run) -> LogWriter:
        """Return the writer of the run, opened at the first call; opening it fences whoever wrote before.

        Called by the thread that starts the query and by the one that runs its batches, whichever comes first.
        """
        with self._opening:
            if self._writer is None:
                job = self._told.job or run.name
                if job is None:
                    raise DescriptorError(NAME_MISSING)
                writer = LogWriter(self._told.log, job, self._told.states, run.query_id, self._told.on_rewind)
                beat = threading.Thread(target=_beat, args=(writer, run.query), name=f"sparkis-beat-{job}", daemon=True)
                beat.start()
                for endpoint in endpoints.of_log(self._told.log):
                    endpoint.notice(job, -1)  # its servers open the job while Spark prepares the first batch
                self._writer = writer
            return self._writer

    def write(self, batch: DataFrame, batch_id: int) -> None:
        """Write and commit one micro-batch. Always runs the batch to its end, also when it was committed before."""
        writer = self._writer or self.open(_Run.of_batch(batch, self._told.session))
        self.check_not_committed(writer.job, batch_id)
        clock_ms = now_ms()
        results = self._write_files(batch, batch_id, writer, clock_ms)
        is_new = writer.commit(
            batch_id,
            clock_ms=clock_ms,
            files=[ChangeFile.from_json(json.loads(each.file)) for each in results if each.file is not None],
            inline=[bytes(each.inline) for each in results if each.inline is not None],
            rows=sum(each.rows for each in results),
            digest=sum(each.digest for each in results) & DIGEST_MASK,
            replaces=tuple(state.name for state in self._told.states) if self._told.mode == "complete" else (),
        )
        is_first, self._committed_here = self._committed_here < 0, batch_id
        if not is_new:
            logger.info("job %s: epoch %d was committed before a restart; its replay is left out", writer.job, batch_id)
        self._make_visible(writer.job, batch_id, is_first=is_first)

    def check_not_committed(self, job: str, batch_id: int) -> None:
        """Refuse a second epoch for one micro-batch; it would pass for a replay and be left out."""
        if batch_id == self._committed_here:
            raise DescriptorError(
                f"job {job!r}: batch {batch_id} was published twice; a micro-batch is one epoch: pass "
                f"all its states to one call of sparkis.publish (a descriptor's where= chooses its rows)"
            )

    def _write_files(self, batch: DataFrame, batch_id: int, writer: LogWriter, clock_ms: int) -> list[Any]:
        """Run the batch: one Spark job for all states, one pass over the batch's own plan."""
        partitions = _partitions(batch.sparkSession)
        # Coalescing to more partitions than there are changes nothing but the plan, which then promises no order: Spark
        # 4.3 fails to cache a plan whose order names a column that the plan leaves out ("key not found", seen).
        states = self._told.states
        source = batch.coalesce(PARTITIONS_MAX).persist() if len(states) > 1 else batch
        try:
            parts = []
            for state in states:
                of_state = StateColumns(state, writer.job)
                task = _Task(self._told.log, writer.folder, batch_id, of_state.plan(batch, clock_ms))
                parts.append(of_state.rows(source, partitions).mapInArrow(task, TASK_RESULT))
            results = reduce(DataFrame.union, parts).collect()
        finally:
            if len(states) > 1:
                source.unpersist()
        for each in results:
            if each.error is not None:
                kind = LogUnavailableError if each.is_log_error else RowError
                raise kind(f"job {writer.job!r}, batch {batch_id}: {each.error}")
        return results

    def _make_visible(self, job: str, epoch: int, *, is_first: bool) -> None:
        """Tell the servers of an epoch. A run's first one is always waited for: servers may be opening the job yet."""
        known = endpoints.of_log(self._told.log)
        for endpoint in known:
            endpoint.notice(job, epoch)
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


SINK_TAKEN = (
    "sparkis.queryable is the sink of this query; for several sinks use a foreachBatch function of your own "
    "and call sparkis.publish in it"
)


@contextmanager
def _logged() -> Iterator[None]:
    """Say in one line why a batch failed: Spark reports it inside a Java traceback."""
    try:
        yield
    except SparkisError as error:
        logger.error("%s", error)
        raise


def _is_active(query: StreamingQuery | None) -> bool:
    """Tell whether a query runs. Without a handle on it: as long as this process lives."""
    try:
        return query is None or query.isActive
    except Exception:  # Spark itself has stopped, and says so in many ways
        return False


def _beat(writer: LogWriter, query: StreamingQuery | None) -> None:
    """Show a sign of life once a second while the query runs."""
    is_active = True
    while is_active:
        is_active = _is_active(query)
        try:
            current = writer.log.current()
            if current is not None:  # else the log was taken away, perhaps for a while
                if current.writer != writer.current.writer:
                    return  # fenced: the sign of life belongs to another writer now
                writer.beat(is_running=is_active)
        except SparkisError as error:  # the next commit fails with it too; readers see the silence
            logger.debug("no sign of life for job %s: %s", writer.job, error)
        time.sleep(BEAT_INTERVAL_S)


def _partitions(session: SparkSession) -> int:
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
    return max(1, min(shuffled, session.sparkContext.defaultParallelism))


class QueryableWriter(DataStreamWriter):
    """Spark's DataStreamWriter with the sink set. Refuses, before the query starts, what the sink cannot do."""

    def __init__(self, df: DataFrame, told: Publication) -> None:
        super().__init__(df)
        self._told = told
        self._name: str | None = None
        super().outputMode(told.mode)

    def outputMode(self, outputMode: str) -> DataStreamWriter:
        """Refuse another mode than the one `queryable` was told."""
        if outputMode != self._told.mode:
            raise DescriptorError(f"the mode is {self._told.mode!r}; pass mode={outputMode!r} to sparkis.queryable")
        return self

    def foreachBatch(self, func: Callable[[DataFrame, int], None]) -> DataStreamWriter:
        """Refuse a second sink."""
        raise DescriptorError(f"foreachBatch: {SINK_TAKEN}")

    def foreach(self, f: Any) -> DataStreamWriter:
        """Refuse a second sink."""
        raise DescriptorError(f"foreach: {SINK_TAKEN}")

    def format(self, source: str) -> DataStreamWriter:
        """Refuse a second sink."""
        raise DescriptorError(f"format({source!r}): {SINK_TAKEN}")

    def toTable(self, *args: Any, **options: Any) -> StreamingQuery:
        """Refuse a second sink."""
        raise DescriptorError(f"toTable: {SINK_TAKEN}")

    def queryName(self, queryName: str) -> DataStreamWriter:
        """Set the query's name, which is the job's name unless job= was given."""
        if self._told.job is None:
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
        """Start the query and take the job's log over; SparkisError if the log refuses, and the query ends again."""
        name = options.get("queryName") or (args[4] if len(args) > 4 else None)
        if name is not None:
            self.queryName(name)
        if self._name is None and self._told.job is None:
            raise DescriptorError(NAME_MISSING)
        publisher = Publisher(self._told)  # one per start: the same writer may be started again

        def write(batch: DataFrame, batch_id: int) -> None:
            with _logged():
                publisher.write(batch, batch_id)

        super().foreachBatch(write)
        query = super().start(*args, **options)
        try:
            publisher.open(_Run.of_query(query))
        except SparkisError:
            query.stop()
            raise
        return query


def _log_of(session: SparkSession, log: str | Path | None) -> str:
    root = log or session.conf.get(LOG_SETTING, None)
    if root is None:
        raise DescriptorError(
            f"there is no change log to write to: call sparkis.serve(spark) first, pass log=, or set {LOG_SETTING}"
        )
    whole = open_filesystem(root).root  # executors have working folders of their own
    check_writable(whole)
    return whole


def _check_choice(argument: str, given: object, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise DescriptorError(f"{argument}= is one of {', '.join(map(repr, choices))}, not {given!r}")


def _publication(
    df: DataFrame,
    states: Sequence[str | StateDescriptor],
    given: StateArguments,
    *,
    mode: Mode,
    job: str | None,
    log: str | Path | None,
    wait_for_visibility: bool | float,
    on_rewind: OnRewind,
    session: SparkSession,
) -> Publication:
    """Return the arguments of a call, checked."""
    _check_choice("mode", mode, get_args(Mode))
    _check_choice("on_rewind", on_rewind, get_args(OnRewind))
    timeout_s = VISIBILITY_TIMEOUT_S if wait_for_visibility is True else wait_for_visibility
    if not isinstance(timeout_s, (int, float)) or timeout_s < 0:
        raise DescriptorError(f"wait_for_visibility= is True, False or seconds, not {wait_for_visibility!r}")
    described = _checked_states(df, states, job, given)
    _partitions(session)
    root = _log_of(df.sparkSession, log)
    return Publication(tuple(described), mode, job, root, float(timeout_s), on_rewind, session)


def _checked_states(
    df: DataFrame, states: Sequence[str | StateDescriptor], job: str | None, given: StateArguments
) -> list[StateDescriptor]:
    """Return the descriptors of a call, checked against the DataFrame's columns."""
    unknown = sorted(set(given) - set(StateArguments.__annotations__))
    if unknown:
        raise DescriptorError(
            f"{', '.join(unknown)}: not an argument of a state; those are {', '.join(StateArguments.__annotations__)}"
        )
    described: list[StateDescriptor] = []
    for state in states:
        if isinstance(state, StateDescriptor):
            described.append(state)
        elif len(states) == 1:
            described.append(StateDescriptor(state, **given))
        else:
            raise DescriptorError(f"give several states as sparkis.StateDescriptor({state!r}, key=..., value=...)")
    if given and not any(isinstance(state, str) for state in states):
        if not states:
            raise DescriptorError("the state has no name; it comes first: sparkis.queryable(df, 'name', key=...)")
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
    log: str | Path | None = None,
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
    if not isinstance(df, ClassicDataFrame):
        raise DescriptorError(
            f"sparkis.queryable takes a DataFrame of a classic Spark session, not {type(df).__module__}."
            f"{type(df).__name__}; Spark Connect is not supported"
        )
    if not df.isStreaming:
        raise DescriptorError(
            "sparkis.queryable takes a streaming DataFrame, and this one is not (spark.readStream makes one)"
        )
    told = _publication(
        df,
        states,
        columns,
        mode=mode,
        job=job,
        log=log,
        wait_for_visibility=wait_for_visibility,
        on_rewind=on_rewind,
        session=df.sparkSession,
    )
    return QueryableWriter(df, told)


@dataclass(frozen=True)
class _Published:
    """What `publish` remembers of a query from one micro-batch to the next."""

    run: _Run
    asked: object
    publisher: Publisher


# By log, job and query: one call per micro-batch, one writer per run. Two queries that share a job fence each other.
_published: dict[tuple[str, str, str], _Published] = {}


def publish(
    batch_df: DataFrame,
    batch_id: int,
    *states: str | StateDescriptor,
    mode: Mode = "update",
    job: str | None = None,
    log: str | Path | None = None,
    wait_for_visibility: bool | float = False,
    on_rewind: OnRewind = "refuse",
    **columns: Unpack[StateArguments],
) -> None:
    """Publish a micro-batch from inside a foreachBatch function of your own; arguments as for `queryable`.

    Call it once for every micro-batch, also for an empty one, and let it run to its end. `mode` says what the batch is:
    changed rows (`update`, `append`) or the whole result (`complete`).
    """
    with _logged():
        session = SparkSession.builder.getOrCreate()
        run = _Run.of_batch(batch_df, session)
        name = job or run.name
        if name is None:
            raise DescriptorError(NAME_MISSING)
        check_name("job", name)
        place = (_log_of(batch_df.sparkSession, log), name, run.query_id)
        asked = (states, columns, mode, wait_for_visibility, on_rewind)
        known = _published.get(place)
        if known is not None and known.run == run:
            known.publisher.check_not_committed(name, batch_id)
        if known is None or known.run != run or known.asked != asked:
            told = _publication(
                batch_df,
                states,
                columns,
                mode=mode,
                job=name,
                log=log,
                wait_for_visibility=wait_for_visibility,
                on_rewind=on_rewind,
                session=session,
            )
            known = _published[place] = _Published(run, asked, Publisher(told))
            known.publisher.open(run)
        known.publisher.write(batch_df, batch_id)
