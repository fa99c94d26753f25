"""Starts an attachment: finds the query's checkpoint and the states that were asked for, and checks both."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, get_args

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.attach import declared
from spark_hooks.attach.attachment import POLL_INTERVAL_LOCAL_S, Attachment, FeedMissingError, OnMismatch
from spark_hooks.attach.operators import Collection, collections
from spark_hooks.attach.processor import CHANGELOG_SETTING
from spark_hooks.attach.rows import AttachedArguments, AttachedState, BoundState
from spark_hooks.checkpoint import Checkpoint, CheckpointError, checkpoint_at
from spark_hooks.publish import progress as query_progress
from spark_hooks.publish.catch_up import CATCH_UP_TIMEOUT_S, check_timeout
from spark_hooks.publish.sink import log_of
from spark_hooks.serving.endpoints import LOG_SETTING
from spark_hooks.sessions import is_connect, session_at_hand
from state_backend.model.descriptor import check_name, check_states
from state_backend.model.errors import DescriptorError

FORMAT_SETTING = "spark.sql.streaming.stateStore.checkpointFormatVersion"
# How long a query may take to its first committed batch, unless told otherwise (guess).
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
    has_facts = query is not None and query_progress.is_enabled(spark, progress)
    if has_facts:
        query_progress.check_key_conflict(name, [state.descriptor for state in bound])
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
        facts=(lambda: query_progress.inline_changes_of(name, query)) if query is not None and has_facts else None,
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
