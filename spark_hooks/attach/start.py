"""`sparkis.attach`: finds the query's checkpoint and the requested states, validates both, and starts an attachment."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.attach import declared
from spark_hooks.attach.binding import bind, reading_session
from spark_hooks.attach.plans import functions_of, real_time_settings_of
from spark_hooks.attach.spark_reader import SparkReader, check_changes
from spark_hooks.checkpoint import checkpoint_at, qualified
from spark_hooks.publish import progress as query_progress
from spark_hooks.publish.offsets import OffsetLog, is_idle
from spark_hooks.publish.sink import log_of
from spark_hooks.publish.sources import NewestOffsets
from spark_hooks.serving import endpoints
from spark_hooks.serving.endpoints import LOG_SETTING
from spark_hooks.sessions import (
    current_session,
    execution_of,
    existing_session,
    is_connect,
    is_stopped,
    require_spark_4,
)
from state_backend.attach.attachment import Attachment, FollowedCheckpoint, OnMismatch, QueryHooks
from state_backend.attach.files_reader import FollowedFiles
from state_backend.attach.reader_process import ProcessReader
from state_backend.attach.start import attach_files, wait_for_batch
from state_backend.attach.state_encoder import StateEncoder
from state_backend.attach.states import AttachedArguments, AttachedState
from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.log.catch_up import CATCH_UP_TIMEOUT_S, check_timeout
from state_backend.model.descriptor import StateDescriptor, check_name
from state_backend.model.errors import CheckpointError, CheckpointUnavailableError, DescriptorError

logger = logging.getLogger("sparkis.attach")

Reader = Literal["files", "spark"]

# The default wait for a query's first committed batch (guess).
FIRST_BATCH_TIMEOUT_S = 60.0


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
    reader: Reader = "files",
    **given: Unpack[AttachedArguments],
) -> Attachment:
    """Make the state of a query readable without a change to the query, until the returned attachment is stopped.

    The state is read from the query's checkpoint: the aggregations, joins, deduplications and `transformWithState`
    variables that Spark keeps there. By default each operator's state becomes one state in the log. To choose, give
    the arguments of one `AttachedState` (with `state=` for its name), or several `AttachedState`s in `states=`.

    For a query whose processors declare states (`queryable_processor`), an attachment exists already: it is returned,
    and it ends with the query.

    Args:
        query: A running query of this driver.
        checkpoint: Instead of `query`: the checkpoint of any query, running or stopped, here or elsewhere.
        states: The states to publish. Default: all states of the query.
        state: For a single state: its name in keys.
        job: The name that keys begin with. Default: the query's name.
        log: The root of the change log. Default: the setting `spark.sparkis.log`, which `serve` sets.
        on_mismatch: If the log was written from an operator with another name or schema: `refuse` raises an error,
            `replace` starts a new generation of the state.
        takeover: True: take the job over from another running writer, which then fails.
        progress: True: publish the query's progress as the hash `job:_progress`. Default: the setting
            `spark.sparkis.progress`.
        catch_up_timeout: How long readers may keep seeing the state of another query or checkpoint while this one
            catches up, in seconds. 0: readers see the new state at once. None: no limit.
        timeout_s: The seconds to wait for the query's first committed micro-batch.
        reader: `files`: a child process of this driver reads the state's files, without Spark. `spark`: Spark jobs read
            the state, which takes cores and is slower, but knows all of Spark SQL in `columns=`. If only Spark's
            configuration gives access to the checkpoint of `query`, Spark jobs read it in any case.
        **given: For a single state: the arguments of `AttachedState`, such as `operator=` and `key=`.

    Returns:
        The attachment, which follows the query in a thread of its own, until `stop` or the end of Spark.

    Raises:
        SparkisError: The query has no state that can be read, or not the requested one; the message lists its states.

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
    for argument, value, choices in (("on_mismatch", on_mismatch, OnMismatch), ("reader", reader, Reader)):
        if value not in get_args(choices):
            raise DescriptorError(f"{argument}= is {' or '.join(map(repr, get_args(choices)))}, not {value!r}")
    check_timeout(catch_up_timeout)
    requested = _requested_states(states, state, given)
    if (query is None) == (checkpoint is None):
        raise DescriptorError("sparkis.attach takes a query or checkpoint=, one of the two")
    run = None if query is None else declared.run_of(query)
    spark: SparkSession | None
    if run is not None and run.is_own_thread():  # this call makes the run's attachment
        spark, run = run.session, None
    else:
        spark = existing_session() if query is None and reader == "files" else current_session()
    if query is not None and spark is not None and run is not None and _is_same_job(spark, query, job, log):
        if requested or (reader != "files" and run.error is None):
            raise DescriptorError(
                f"the attachment of the states that the query's processors declare writes job {query.name!r}, and a "
                f"job has one writer: give this attachment another name with job="
            )
        if run.error is None or (on_mismatch, reader) == ("refuse", "files"):
            return run.attachment(timeout_s)
    name = job or (query.name if query is not None else None)
    if name is None:
        raise DescriptorError("keys begin with the job's name, and the query has no name: pass job=")
    check_name("job", name)
    if progress and query is None:
        raise DescriptorError(
            "progress=True needs a query that runs in this driver, because a checkpoint does not have the progress: "
            "pass the query, or leave out progress="
        )
    start = _Start(
        spark,
        query,
        _location(spark, query, checkpoint),
        requested,
        name,
        log_of(spark, log),
        on_mismatch,
        takeover=takeover,
        has_progress=query is not None and spark is not None and query_progress.is_enabled(spark, progress),
        catch_up_timeout_s=catch_up_timeout,
        timeout_s=timeout_s,
    )
    return start.with_files() if reader == "files" and start.is_reachable() else start.with_spark()


@dataclass(frozen=True)
class _Start:
    """The checked arguments of a call of `attach`.

    Args:
        spark: None if this process has no Spark.
    """

    spark: SparkSession | None
    query: StreamingQuery | None
    location: str
    requested: tuple[AttachedState, ...]
    job: str
    log: str
    on_mismatch: OnMismatch
    takeover: bool
    has_progress: bool
    catch_up_timeout_s: float | None
    timeout_s: float

    def is_reachable(self) -> bool:
        """Return whether the checkpoint can be read without Spark; log why not, if Spark can read it for its query."""
        try:
            Checkpoint.at(self.location)
        except CheckpointUnavailableError as error:
            reason = str(error).partition("\n")[0]
            if self.query is None:
                raise CheckpointUnavailableError(f"{reason}; if Spark can read it, pass reader='spark'") from None
            logger.warning("job %s: Spark jobs read the state, because sparkis cannot: %s", self.job, reason)
            return False
        return True

    def with_files(self) -> Attachment:
        """Attach with the reader of files, in a child process."""
        checkpoint = Checkpoint.at(self.location)

        def reader(checkpoint: Checkpoint, bound: Sequence[StateEncoder]) -> ProcessReader:
            self._check_progress([state.descriptor for state in bound])
            return ProcessReader(checkpoint, bound, self._is_spark_stopped)

        return attach_files(
            self.location,
            self._states(FollowedFiles(checkpoint)),
            job=self.job,
            log=self.log,
            on_mismatch=self.on_mismatch,
            takeover=self.takeover,
            catch_up_timeout_s=self.catch_up_timeout_s,
            hooks=self._hooks(),
            reader=reader,
            functions=[] if self.query is None else functions_of(self.query),
            settings=None if self.query is None else real_time_settings_of(self.query),
            is_ended=self._is_query_ended,
            timeout_s=self.timeout_s,
        )

    def with_spark(self) -> Attachment:
        """Attach with Spark's state reader."""
        require_spark_4("reader='spark'")  # the data source `statestore`
        assert self.spark is not None
        session = reading_session(self.spark)
        checkpoint = checkpoint_at(session, self.location)
        batch = wait_for_batch(checkpoint, self._is_query_ended, self.timeout_s)
        assert batch is not None
        functions = [] if self.query is None else functions_of(self.query)
        bound = bind(session, checkpoint, batch, self.job, self._states(checkpoint), functions)
        check_changes(checkpoint, batch, bound)
        self._check_progress([state.descriptor for state in bound])
        hooks = replace(self._hooks(), ends_of=OffsetLog(checkpoint.location, session).ends_of)
        return Attachment(
            checkpoint,
            SparkReader(session, checkpoint, bound, self.job, self.log),
            job=self.job,
            log=self.log,
            on_mismatch=self.on_mismatch,
            takeover=self.takeover,
            catch_up_timeout_s=self.catch_up_timeout_s,
            hooks=hooks,
        )

    def _states(self, checkpoint: FollowedCheckpoint) -> tuple[AttachedState, ...]:
        """Return the requested states; those that the query's processors declare if none is requested."""
        if self.requested or self.query is None:
            return self.requested
        return tuple(declared.states_with_operators(self.query, checkpoint, self.timeout_s))

    def _check_progress(self, states: Sequence[StateDescriptor]) -> None:
        if self.has_progress:
            query_progress.check_key_conflict(self.job, states)

    def _is_query_ended(self) -> bool:
        """Return False; CheckpointError if the query of this driver has ended."""
        if self.query is not None and not self.query.isActive:
            raise CheckpointError(
                f"the query has ended without a committed micro-batch: {self.query.exception() or 'it was stopped'}"
            )
        return False

    def _is_spark_stopped(self) -> bool:
        return self.query is not None and self.spark is not None and is_stopped(self.spark)

    def _hooks(self) -> QueryHooks:
        hooks = QueryHooks(announce=partial(endpoints.announce, self.log), wait=partial(endpoints.wait, self.log))
        query, spark = self.query, self.spark
        if query is None or spark is None:
            return hooks
        hooks = replace(
            hooks,
            is_active=lambda: spark.streams.get(str(query.id)) is not None,
            is_idle=partial(is_idle, query, OffsetLog(self.location, spark)),
            progress=lambda: _last_progress(query),
            sources=NewestOffsets(query).ask,
        )
        if not self.has_progress:
            return hooks
        return replace(
            hooks,
            extra_states=(query_progress.state_of(self.job),),
            extra_changes=lambda: query_progress.inline_changes_of(self.job, query),
        )


def _is_same_job(spark: SparkSession, query: StreamingQuery, job: str | None, log: str | Path | None) -> bool:
    """Return whether an attachment would write the same job and log as that of the query's declared states."""
    root = log_of(spark, log)
    session_log = spark.conf.get(LOG_SETTING, None)
    return job in (None, query.name) and session_log is not None and root == log_of(spark, session_log)


def _requested_states(
    states: Sequence[AttachedState], state: str | None, given: Mapping[str, Any]
) -> tuple[AttachedState, ...]:
    unknown = sorted(set(given) - set(AttachedArguments.__annotations__))
    if unknown:
        raise DescriptorError(
            f"{', '.join(unknown)}: not an argument of an attached state; the arguments are "
            f"{', '.join(AttachedArguments.__annotations__)}"
        )
    if not given and state is None:
        return tuple(states)
    if states:
        raise DescriptorError("give the arguments of a state in AttachedState(...), or one state without states=")
    return (AttachedState(state, **given),)


def _location(spark: SparkSession | None, query: StreamingQuery | None, checkpoint: str | Path | None) -> str:
    if query is None:
        return qualified(spark, str(checkpoint))
    if is_connect(query):
        raise DescriptorError(
            "Spark Connect does not give access to a query's checkpoint location: leave the query out, and pass "
            "checkpoint= and job="
        )
    return str(execution_of(query).resolvedCheckpointRoot())


def _last_progress(query: StreamingQuery) -> str:
    """Return a text that changes after each batch of a running query. Takes a few calls of Spark, and reads no file."""
    running: Any = query
    progress = running._jsq.lastProgress()
    return "" if progress is None else str(progress.timestamp())
