"""`sparkis.attach`: finds the query's checkpoint and the requested states, validates both, and starts an attachment."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack, get_args

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.attach import declared
from spark_hooks.attach.declaration import CHANGELOG_SETTING
from spark_hooks.attach.operators import OperatorState, operator_states
from spark_hooks.attach.rows import BoundState
from spark_hooks.attach.spark_reader import ChangesMissingError, SparkReader
from spark_hooks.checkpoint import Checkpoint, checkpoint_at
from spark_hooks.publish import progress as query_progress
from spark_hooks.publish.offsets import OffsetLog, is_idle
from spark_hooks.publish.sink import log_of
from spark_hooks.serving import endpoints
from spark_hooks.serving.endpoints import LOG_SETTING
from spark_hooks.sessions import current_session, is_connect, require_spark_4
from state_backend.attach.attachment import POLL_INTERVAL_LOCAL_S, Attachment, OnMismatch, QueryHooks
from state_backend.attach.states import AttachedArguments, AttachedState, matching
from state_backend.log.catch_up import CATCH_UP_TIMEOUT_S, check_timeout
from state_backend.model.descriptor import check_name, check_states
from state_backend.model.errors import CheckpointError, DescriptorError

FORMAT_SETTING = "spark.sql.streaming.stateStore.checkpointFormatVersion"
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
        catch_up_timeout: The seconds for which readers keep the state of another query or checkpoint at most, while
            this one catches up. 0: readers see the new state at once. None: no limit.
        timeout_s: The seconds to wait for the query's first committed micro-batch.
        **given: For a single state: the arguments of `AttachedState`, such as `operator=` and `key=`.

    Returns:
        The attachment, which follows the query in a thread of its own.

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
    if on_mismatch not in get_args(OnMismatch):
        raise DescriptorError(f"on_mismatch= is 'refuse' or 'replace', not {on_mismatch!r}")
    require_spark_4("sparkis.attach")  # the data source `statestore`
    check_timeout(catch_up_timeout)
    requested = _requested_states(states, state, given)
    run = None if query is None else declared.run_of(query)
    if run is not None and run.is_own_thread():  # this call makes the run's attachment
        spark, run = run.session, None
    else:
        spark = current_session()
    if query is not None and checkpoint is None and run is not None and _is_same_job(spark, query, job, log):
        if requested:
            raise DescriptorError(
                f"the attachment of the states that the query's processors declare writes job {query.name!r}, and a "
                f"job has one writer: give this attachment another name with job="
            )
        if run.error is None or on_mismatch == "refuse":
            return run.attachment(timeout_s)
    session = reading_session(spark)
    source = checkpoint_at(session, _location(query, checkpoint))
    name = job or (query.name if query is not None else None)
    if name is None:
        raise DescriptorError("keys begin with the job's name, and the query has no name: pass job=")
    check_name("job", name)
    root = log_of(spark, log)
    is_declared = query is not None and not requested and bool(declared.states_of(query))
    batch = _first_batch(source, query, timeout_s)
    if query is not None and is_declared:
        requested = tuple(declared.states_with_operators(query, source, timeout_s))
    bound = bind(session, source, batch, name, requested)
    _check_changes(source, batch, bound)
    has_progress = query is not None and query_progress.is_enabled(spark, progress)
    if has_progress:
        query_progress.check_key_conflict(name, [state.descriptor for state in bound])
    elif progress:
        raise DescriptorError(
            "progress=True needs a query that runs in this driver, because a checkpoint does not have the progress: "
            "pass the query, or leave out progress="
        )
    query_id = source.query_id()
    offsets = OffsetLog(source.location, session)
    return Attachment(
        source,
        SparkReader(session, source, bound, name, root),
        job=name,
        log=root,
        on_mismatch=on_mismatch,
        takeover=takeover,
        catch_up_timeout_s=catch_up_timeout,
        hooks=QueryHooks(
            ends_of=offsets.ends_of,
            is_active=(lambda: spark.streams.get(query_id) is not None) if query is not None else (lambda: True),
            is_idle=partial(is_idle, query, offsets),
            progress=None if query is None else (lambda: _last_progress(query)),
            extra_states=(query_progress.state_of(name),) if has_progress else (),
            extra_changes=(lambda: query_progress.inline_changes_of(name, query))
            if query is not None and has_progress
            else None,
            announce=partial(endpoints.announce, root),
            wait=partial(endpoints.wait, root),
        ),
    )


def _is_same_job(spark: SparkSession, query: StreamingQuery, job: str | None, log: str | Path | None) -> bool:
    """Tell whether an attachment would write the same job and log as that of the query's declared states."""
    root = log_of(spark, log)
    session_log = spark.conf.get(LOG_SETTING, None)
    return job in (None, query.name) and session_log is not None and root == log_of(spark, session_log)


def reading_session(spark: SparkSession) -> SparkSession:
    """Return a session for reading state, which the user's settings do not affect."""
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    session.conf.set("spark.sql.caseSensitive", "true")
    return session


def bind(
    session: SparkSession, checkpoint: Checkpoint, batch: int, job: str, requested: Sequence[AttachedState]
) -> list[BoundState]:
    """Return the requested states, each bound to the operator state that it reads; all states if none is requested."""
    session.conf.set(FORMAT_SETTING, checkpoint.format_version())
    found = operator_states(session, checkpoint, batch)
    chosen = (
        [(_matching(found, each), each) for each in requested]
        if requested
        else [(source, AttachedState()) for source in found]
    )
    bound = [BoundState.of(source, each, job, session, checkpoint, batch) for source, each in chosen]
    check_states(job, [state.descriptor for state in bound])
    return bound


def _matching(found: Sequence[OperatorState], requested: AttachedState) -> OperatorState:
    places = [(source.operator_id, source.variable) for source in found]
    return found[matching(list(map(str, found)), places, requested)]


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


def _location(query: StreamingQuery | None, checkpoint: str | Path | None) -> str:
    if (query is None) == (checkpoint is None):
        raise DescriptorError("sparkis.attach takes a query or checkpoint=, one of the two")
    if query is None:
        return str(checkpoint)
    if is_connect(query):
        raise DescriptorError(
            "Spark Connect does not give access to a query's checkpoint location: leave the query out, and pass "
            "checkpoint= and job="
        )
    running: Any = query
    return str(running._jsq.streamingQuery().resolvedCheckpointRoot())


def _last_progress(query: StreamingQuery) -> str:
    """Return a text that changes after each batch of a running query. Takes a few calls of Spark, and reads no file."""
    running: Any = query
    progress = running._jsq.lastProgress()
    return "" if progress is None else str(progress.timestamp())


def _check_changes(checkpoint: Checkpoint, batch: int, states: Sequence[BoundState]) -> None:
    """Raise ChangesMissingError if RocksDB stores only snapshots: finding changes would take the full state."""
    if not checkpoint.uses_rocksdb(batch):
        return
    for source in (state.source for state in states):
        store = dict(source.options).get("storeName", "")
        if not checkpoint.has_changelog(source.operator_id, store, batch):
            raise ChangesMissingError(
                f"{source} keeps its state in RocksDB without a changelog, so the changes of a batch cannot be read: "
                f"start the query with {CHANGELOG_SETTING}=true, and attach after it has committed a batch"
            )


def _first_batch(checkpoint: Checkpoint, query: StreamingQuery | None, timeout_s: float) -> int:
    """Return the newest committed batch; wait for the first one, because operators have no readable state before."""
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
