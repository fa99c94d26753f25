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
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Self, Unpack, get_args

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks import endpoints, executors, task
from spark_hooks import progress as query_progress
from spark_hooks.attach import declared
from spark_hooks.attach.checkpoint import Checkpoint, CheckpointError, checkpoint_at
from spark_hooks.attach.operators import Collection, collections
from spark_hooks.attach.rows import AttachedArguments, AttachedState, BoundState
from spark_hooks.attach.task import RESULT, BatchesTask
from spark_hooks.catching_up import CATCH_UP_TIMEOUT_S, CatchingUp, check_timeout
from spark_hooks.encoding import RowError
from spark_hooks.offsets import OffsetLog
from spark_hooks.processor import CHANGELOG_SETTING
from spark_hooks.publisher import BEAT_INTERVAL_S
from spark_hooks.sessions import describe_jobs, is_connect, is_stopped, parallelism_of, session_at_hand
from spark_hooks.sink import LOG_SETTING, log_of
from state_backend.log.change_log import ChangeLog
from state_backend.log.epochs import Epoch
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor, check_name, check_states
from state_backend.model.errors import (
    DescriptorError,
    EpochHoleError,
    FencedWriterError,
    LogCorruptError,
)

logger = logging.getLogger("sparkis.attach")

OnMismatch = Literal["refuse", "replace"]

FORMAT_SETTING = "spark.sql.streaming.stateStore.checkpointFormatVersion"
# How long a query may take to its first committed batch, unless told otherwise (guess).
FIRST_BATCH_TIMEOUT_S = 60.0
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
        threading.Thread(target=self._beat, name=f"sparkis-attach-beat-{job}", daemon=True).start()

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
        self._catching_up = CatchingUp(writer, self._catch_up_timeout_s, self._query, self._offsets)
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

    def _beat(self) -> None:
        """Show a sign of life once a second; that it is none while nothing can be read, or the query does not run."""
        is_running = True
        while is_running:
            is_running = not self._stopping.wait(BEAT_INTERVAL_S) and self.error is None
            writer = self._writer
            try:
                writer.beat(is_running=is_running and self.failure is None and self._is_active())
                if not self._catching_up.is_over:
                    self._catching_up.look(is_behind=self.batch != self._checkpoint.newest())
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
        plan = executors.plan_of(self.log)
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
        self._catching_up.committed(offsets)
        with self._moved:
            self._moved.notify_all()


def attach(
    query: StreamingQuery | None = None,
    *,
    checkpoint: str | Path | None = None,
    states: Sequence[AttachedState] = (),
    state: str | None = None,
    job: str | None = None,
    log: str | Path | None = None,
    on_mismatch: OnMismatch = "refuse",
    takeover: bool = False,
    progress: bool | None = None,
    catch_up_timeout: float | None = CATCH_UP_TIMEOUT_S,
    timeout_s: float = FIRST_BATCH_TIMEOUT_S,
    **given: Unpack[AttachedArguments],
) -> Attachment:
    """Make the state of a query readable without a change to the query, until `stop` is called on what is returned.

    The state is read from the query's checkpoint: the aggregations, joins, deduplications and `transformWithState`
    variables that Spark keeps there. All of it becomes readable, each operator's as one state. To choose, give the
    arguments of one `AttachedState` (with `state=` for its name), or several in `states=`.

    A query whose processors declare states (`queryable_processor`) is attached to already: the attachment of its
    declared states is returned, and it ends with the query.

    Args:
        query: A running query of this driver.
        checkpoint: In place of `query`: the checkpoint of any query, running or stopped, here or elsewhere.
        states: The states to publish. Default: all there are.
        state: For a single state: its name in keys.
        job: The name that keys begin with. Default: the query's name.
        log: The root of the change log. Default: the setting `spark.sparkis.log`, which `serve` makes.
        on_mismatch: What to do where the log was written from an operator of another name or schema: `refuse` raises
            an error, `replace` begins anew.
        takeover: True: take the job from another writer that is alive; that writer fails.
        progress: True: publish the facts of the query as the hash `job:_progress`. Default: the setting
            `spark.sparkis.progress`.
        catch_up_timeout: How long readers keep the state of another query or checkpoint, in seconds, while this one
            catches up. 0: readers see the new state at once. None: until it has caught up, however long that takes.
        timeout_s: How long to wait for the query's first committed micro-batch, in seconds.
        **given: For a single state: the arguments of `AttachedState`, such as `operator=` and `key=`.

    Returns:
        The attachment, which follows the query in a thread of its own.

    Raises:
        SparkisError: The query keeps no state that can be read, or none as it was asked for; the message lists what
            there is.

    Examples:
        >>> rows = spark.createDataFrame([("of",), ("the",), ("of",)], "word string")
        >>> rows.write.json(f"{path}/words")
        >>> words = spark.readStream.schema(rows.schema).json(f"{path}/words")
        >>> writer = words.groupBy("word").count().writeStream.outputMode("update").format("noop").queryName("words")
        >>> query = writer.option("checkpointLocation", f"{path}/checkpoint").start()
        >>> query.processAllAvailable()

        >>> with sparkis.attach(query, state="count", log=f"{path}/log") as attachment:
        ...     attachment.wait()
        True
        >>> query.stop()

        >>> with sparkis.read_snapshot(f"{path}/log", "words") as snapshot:
        ...     snapshot.value(b"words:count:of")
        b'2'
    """
    if on_mismatch not in get_args(OnMismatch):
        raise DescriptorError(f"on_mismatch= is 'refuse' or 'replace', not {on_mismatch!r}")
    check_timeout(catch_up_timeout)
    wanted = _wanted(states, state, given)
    spark = session_at_hand()
    run = None if query is None else declared.run_of(query)
    if query is not None and checkpoint is None and run is not None and _is_its_job(spark, query, job, log):
        if wanted:
            raise DescriptorError(
                f"job {query.name!r} is written already, with the states that processors of the query declare, and a "
                f"log has one writer for a job: give this attachment another name with job="
            )
        if run.error is None or on_mismatch == "refuse":
            return run.attachment(timeout_s)
    return attach_anew(
        spark,
        query,
        checkpoint,
        wanted,
        job=job,
        log=log,
        on_mismatch=on_mismatch,
        takeover=takeover,
        progress=progress,
        catch_up_timeout=catch_up_timeout,
        timeout_s=timeout_s,
    )


def attach_anew(
    spark: SparkSession,
    query: StreamingQuery | None,
    checkpoint: str | Path | None = None,
    wanted: Sequence[AttachedState] = (),
    *,
    job: str | None = None,
    log: str | Path | None = None,
    on_mismatch: OnMismatch = "refuse",
    takeover: bool = False,
    progress: bool | None = None,
    catch_up_timeout: float | None = CATCH_UP_TIMEOUT_S,
    timeout_s: float = FIRST_BATCH_TIMEOUT_S,
) -> Attachment:
    """Make an attachment, whoever else has one already; arguments as for `attach`."""
    session = reading_session(spark)
    place = checkpoint_at(session, _location(query, checkpoint))
    name = job or (query.name if query is not None else None)
    if name is None:
        raise DescriptorError("keys begin with the job's name, and the query has none: pass job=")
    check_name("job", name)
    root = log_of(spark, log)
    is_declared = query is not None and not wanted and bool(declared.states_of(query))
    batch = _first_batch(place, query, timeout_s)
    if query is not None and is_declared:
        wanted = declared.located_states(query, place, timeout_s)
    bound = bind(session, place, batch, name, wanted)
    _check_feed(place, batch, bound)
    has_facts = query is not None and query_progress.is_asked_for(spark, progress)
    if has_facts:
        query_progress.check_apart(name, [state.descriptor for state in bound])
    elif progress:
        raise DescriptorError(
            "progress=True shows what Spark tells of a query that runs in this driver, and a checkpoint does not hold "
            "that: give the query, or leave it out"
        )
    query_id = place.query_id()
    return Attachment(
        session,
        place,
        bound,
        job=name,
        log=root,
        on_mismatch=on_mismatch,
        takeover=takeover,
        catch_up_timeout_s=catch_up_timeout,
        query=query,
        is_active=(lambda: spark.streams.get(query_id) is not None) if query is not None else (lambda: True),
        progress=None if query is None else (lambda: _last_progress(query)),
        facts=(lambda: query_progress.stream_of(name, query)) if query is not None and has_facts else None,
    )


def _is_its_job(spark: SparkSession, query: StreamingQuery, job: str | None, log: str | Path | None) -> bool:
    """Tell whether an attachment would be a second writer of what is attached to the query for its declarations."""
    root = log_of(spark, log)
    own = spark.conf.get(LOG_SETTING, None)
    return job in (None, query.name) and own is not None and root == log_of(spark, own)


def reading_session(spark: SparkSession) -> SparkSession:
    """Return a session for the reads, which the user's settings do not change."""
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    session.conf.set("spark.sql.caseSensitive", "true")
    return session


def bind(
    session: SparkSession, checkpoint: Checkpoint, batch: int, job: str, wanted: Sequence[AttachedState]
) -> list[BoundState]:
    """Return the states that were asked for, each bound to what it is read from; all there are if none was."""
    session.conf.set(FORMAT_SETTING, checkpoint.format_version())
    found = collections(session, checkpoint, batch)
    chosen = (
        [(_one_of(found, each), each) for each in wanted]
        if wanted
        else [(collection, AttachedState()) for collection in found]
    )
    bound = [BoundState.of(collection, each, job, session, checkpoint, batch) for collection, each in chosen]
    check_states(job, [state.descriptor for state in bound])
    return bound


def _one_of(found: Sequence[Collection], wanted: AttachedState) -> Collection:
    fitting = [collection for collection in found if wanted.is_of(collection)]
    if len(fitting) == 1:
        return fitting[0]
    known = "; ".join(map(str, found))
    if not fitting:
        raise DescriptorError(
            f"the query has no state with operator={wanted.operator}, variable={wanted.variable!r}; it has {known}"
        )
    raise DescriptorError(f"the query keeps several states; say which one with operator= or variable=: {known}")


def _wanted(states: Sequence[AttachedState], state: str | None, given: Mapping[str, Any]) -> tuple[AttachedState, ...]:
    unknown = sorted(set(given) - set(AttachedArguments.__annotations__))
    if unknown:
        raise DescriptorError(
            f"{', '.join(unknown)}: not an argument of an attached state; those are "
            f"{', '.join(AttachedArguments.__annotations__)}"
        )
    if not given and state is None:
        return tuple(states)
    if states:
        raise DescriptorError("give the arguments of a state in AttachedState(...), or one state without states=")
    return (AttachedState(state, **given),)


def _location(query: StreamingQuery | None, checkpoint: str | Path | None) -> str:
    if (query is None) == (checkpoint is None):
        raise DescriptorError("sparkis.attach takes a query or checkpoint=, one of the two")
    if query is None:
        return str(checkpoint)
    if is_connect(query):
        raise DescriptorError(
            "Spark Connect does not tell where a query keeps its checkpoint: leave the query out, and pass checkpoint= "
            "and job="
        )
    running: Any = query
    return str(running._jsq.streamingQuery().resolvedCheckpointRoot())


def _told(error: Exception) -> str:
    """Return an error in one line, without what Java adds."""
    if isinstance(error, Py4JJavaError):
        return str(error.java_exception.getMessage()).partition("\n")[0]
    return str(error).partition("\n")[0]


def _last_progress(query: StreamingQuery) -> str:
    """Return what is another text after each batch of a running query; a few calls of Spark, and no look at a file."""
    running: Any = query
    progress = running._jsq.lastProgress()
    return "" if progress is None else str(progress.timestamp())


def _check_feed(checkpoint: Checkpoint, batch: int, states: Sequence[BoundState]) -> None:
    """Refuse state whose changes nobody writes down: they could only be had by comparing the whole of it."""
    if not checkpoint.uses_rocksdb(batch):
        return
    for collection in (state.collection for state in states):
        store = dict(collection.options).get("storeName", "")
        if not checkpoint.has_changelog(collection.operator_id, store, batch):
            raise FeedMissingError(
                f"{collection} keeps its state in RocksDB without a change log, so that the changes of a batch cannot "
                f"be read: start the query with {CHANGELOG_SETTING}=true, and attach when it has committed a batch"
            )


def _first_batch(checkpoint: Checkpoint, query: StreamingQuery | None, timeout_s: float) -> int:
    """Return the newest committed batch; wait for the first, which is when an operator's state can be seen."""
    deadline = time.monotonic() + timeout_s
    while (newest := checkpoint.newest()) is None:
        if query is not None and not query.isActive:
            raise CheckpointError(
                f"the query has ended without a committed micro-batch: {query.exception() or 'it was stopped'}"
            )
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"{checkpoint.location} has no committed micro-batch after {timeout_s:g} s; attach when it has one, or "
                f"pass a longer timeout_s="
            )
        time.sleep(POLL_INTERVAL_LOCAL_S)
    return newest
