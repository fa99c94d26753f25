"""The sink: every micro-batch of a query becomes one epoch of a job's change log.

    sink_writer(df, ...)             returns a DataStreamWriter whose foreachBatch function is set, for `queryable`
    publish(batch_df, batch_id, ...) publishes one micro-batch from the user's own foreachBatch function

Both validate their arguments before a row is read; `publisher` does the rest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_hooks.publish.columns import check_columns
from spark_hooks.publish.failures import Failure, SinkQuery
from spark_hooks.publish.progress import check_key_conflict, is_enabled
from spark_hooks.publish.publisher import NAME_MISSING, Mode, Publisher, QueryRun, SinkOptions, partitions_of, plan_text
from spark_hooks.publish.shuffle_plan import check_shuffle_plan
from spark_hooks.publish.sink_checks import SinkChecks
from spark_hooks.serving import endpoints
from spark_hooks.serving.endpoints import LOG_SETTING
from spark_hooks.sessions import analyzed_plan, is_connect
from state_backend.codec.row_encoding import OnBadKey
from state_backend.log.catch_up import CATCH_UP_TIMEOUT_S, check_timeout
from state_backend.log.change_log import check_writable
from state_backend.log.filesystems import open_filesystem
from state_backend.log.log_writer import OnRewind
from state_backend.model.descriptor import (
    Reduce,
    StateArguments,
    StateDescriptor,
    check_name,
    check_states,
    check_user_name,
)
from state_backend.model.errors import DescriptorError, SparkisError

logger = logging.getLogger("sparkis.sink")

VISIBILITY_TIMEOUT_S = 10.0
# A streaming aggregation in the text of a Spark plan: Spark marks streaming operators with `~`.
STREAMING_AGGREGATION = re.compile(r"^[ :|+-]*~(Aggregate|Distinct)\b", re.MULTILINE)


class QueryableWriter(SinkChecks, DataStreamWriter):
    """Spark's DataStreamWriter with the sink set."""

    def start(self, *args: Any, **options: Any) -> StreamingQuery:
        """Start the query and open the job's log; if that fails, stop the query and raise SparkisError."""
        self._check_start(args, options)
        if self._checkpoint_location(self._session) is None:
            logger.warning(
                "job %s: the query has no checkpointLocation, so Spark uses a temporary one. The query's next run will "
                "read all input again and replace all state of this run. Give the query "
                ".option('checkpointLocation', '/a/permanent/folder')",
                self._sink_options.job or self._name,
            )
        publisher = Publisher(self._sink_options)  # one for each start: a DataStreamWriter may be started several times

        failure = Failure(lambda: publisher.query)

        def write(batch: DataFrame, batch_id: int) -> None:
            try:
                with failure.reported():
                    publisher.write(batch, batch_id)
            except SparkisError as error:
                # Spark prints the traceback three times. The message says all; sparkis' own frames only hide it.
                raise error.with_traceback(None) from None

        DataStreamWriter.foreachBatch(self, write)
        query = super().start(*args, **options)
        try:
            publisher.open(QueryRun.of_query(query))
        except SparkisError:
            query.stop()
            raise
        return SinkQuery(query, failure)


def log_of(session: SparkSession | None, log: str | Path | None) -> str:
    """Return the root of the log to write to; DescriptorError if none is given, LogError if it cannot be written."""
    root = _root_of(session, log)
    check_writable(root)
    endpoints.announce_as_set(session, root)
    return root


def _root_of(session: SparkSession | None, log: str | Path | None) -> str:
    root = log or (None if session is None else session.conf.get(LOG_SETTING, None))
    if root is None:
        raise DescriptorError(
            f"there is no change log to write to: call sparkis.serve(spark) first, pass log=, or set {LOG_SETTING}"
        )
    return open_filesystem(root).root  # absolute: executors have other working folders


def _check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise DescriptorError(f"{argument}= is one of {', '.join(map(repr, choices))}, not {value!r}")


class SinkArguments(TypedDict):
    """The arguments that `queryable`, which has their docs, and `publish` have in common, without those of states."""

    mode: Mode
    job: str | None
    log: str | Path | None
    wait_for_visibility: bool | float
    on_rewind: OnRewind
    progress: bool | None
    takeover: bool
    catch_up_timeout: float | None
    on_bad_key: OnBadKey
    record_time: str | None


def sink_options_of(
    df: DataFrame,
    states: Sequence[str | StateDescriptor],
    state_arguments: StateArguments,
    query: StreamingQuery | None = None,
    **arguments: Unpack[SinkArguments],
) -> SinkOptions:
    """Validate the arguments of a call.

    Args:
        query: The running query, if `df` is one of its micro-batches.
    """
    mode, job, progress = arguments["mode"], arguments["job"], arguments["progress"]
    _check_choice("mode", mode, get_args(Mode))
    _check_choice("on_rewind", arguments["on_rewind"], get_args(OnRewind))
    timeout_s = _visibility_timeout_s(arguments["wait_for_visibility"])
    _check_choice("on_bad_key", arguments["on_bad_key"], get_args(OnBadKey))
    check_timeout(arguments["catch_up_timeout"])
    described = _checked_states(df, states, job, state_arguments)
    _check_folded(described, mode, df, query)
    _check_record_time(df, arguments["record_time"])
    partitions_of(df.sparkSession)
    # Under Spark Connect the server writes the log, and this process may not reach its storage.
    root = (_root_of if is_connect(df) else log_of)(df.sparkSession, arguments["log"])
    has_progress = is_enabled(df.sparkSession, progress)
    if has_progress:
        check_key_conflict(job or "job", described)
    if progress and is_connect(df):
        raise DescriptorError(
            "progress=True: under Spark Connect the sink's process has no access to the query's progress; leave it out"
        )
    return SinkOptions(
        tuple(described),
        mode,
        job,
        root,
        timeout_s,
        arguments["on_rewind"],
        has_progress,
        arguments["catch_up_timeout"],
        arguments["takeover"],
        skips_bad_rows=arguments["on_bad_key"] == "skip",
        record_time=arguments["record_time"],
    )


def _visibility_timeout_s(wait_for_visibility: bool | float) -> float:
    timeout_s = VISIBILITY_TIMEOUT_S if wait_for_visibility is True else wait_for_visibility
    if not isinstance(timeout_s, (int, float)) or timeout_s < 0:
        raise DescriptorError(f"wait_for_visibility= is True, False or seconds, not {wait_for_visibility!r}")
    return float(timeout_s)


def _check_record_time(df: DataFrame, record_time: str | None) -> None:
    if record_time is None:
        return
    types = dict(df.dtypes)
    if types.get(record_time) != "timestamp":
        found = f"has the type {types[record_time]}" if record_time in types else "is not a column of the DataFrame"
        named = [name for name, type_ in df.dtypes if type_ == "timestamp"]
        raise DescriptorError(
            f"record_time= is a column of the type timestamp, and {record_time!r} {found}; such columns: "
            f"{', '.join(named) or 'none'}"
        )


def _check_folded(states: Sequence[StateDescriptor], mode: Mode, df: DataFrame, query: StreamingQuery | None) -> None:
    """Refuse to reduce rows that are already totals."""
    for state in states:
        if mode == "complete" and state.reduce is not None:
            raise DescriptorError(
                f"state {state.name!r}: reduce={state.reduce.value!r} folds the new rows of each micro-batch, and with "
                f"mode='complete' each micro-batch has all rows again; leave out reduce=, or publish the rows "
                f"themselves with mode='append'"
            )
        if mode == "complete" and state.by is not None:
            raise DescriptorError(
                f"state {state.name!r}: {state.by}= keeps one row of all micro-batches, and with mode='complete' each "
                f"micro-batch replaces all rows; leave it out, or use another mode"
            )
    adding = [state for state in states if state.reduce in (Reduce.SUM, Reduce.COUNT)]
    if mode != "update" or not adding:
        return
    plan = analyzed_plan(df) if query is None else plan_text(query)
    if found := STREAMING_AGGREGATION.search(plan):
        reduce = adding[0].reduce
        assert reduce is not None
        raise DescriptorError(
            f"state {adding[0].name!r}: reduce={reduce.value!r} adds up the rows of all micro-batches, and in update "
            f"mode an aggregation ({found[1]} in the query's plan) emits a key's full result again whenever it "
            f"changes. Leave out reduce= to publish that result, or publish the rows without the aggregation, with "
            f"mode='append'; if each key is emitted only once (a window with a watermark), pass mode='append'"
        )


def _checked_states(
    df: DataFrame, states: Sequence[str | StateDescriptor], job: str | None, arguments: StateArguments
) -> list[StateDescriptor]:
    """Return the descriptors of a call, validated against the DataFrame's columns."""
    unknown = sorted(set(arguments) - set(StateArguments.__annotations__))
    if unknown:
        names = list(StateArguments.__annotations__)
        nearest = get_close_matches(unknown[0], names, 1)
        hint = f"did you mean {nearest[0]}=? The" if nearest else "the"
        raise DescriptorError(
            f"{', '.join(unknown)}: not an argument of a state; {hint} arguments are {', '.join(names)}"
        )
    described: list[StateDescriptor] = []
    for state in states:
        if isinstance(state, StateDescriptor):
            described.append(state)
        elif len(states) == 1:
            described.append(StateDescriptor(state, **arguments))
        else:
            raise DescriptorError(f"give several states as sparkis.StateDescriptor({state!r}, key=..., value=...)")
    if arguments and not any(isinstance(state, str) for state in states):
        if not states:
            raise DescriptorError(
                "the state has no name; pass it as the first argument: sparkis.queryable(df, 'name', key=...)"
            )
        raise DescriptorError(f"{', '.join(sorted(arguments))}: pass this to the StateDescriptor")
    for each in described:
        check_user_name(each.name)
    if job is not None:
        check_name("job", job)
    check_states(job or "job", described)
    checked = [check_columns(df, state, job or "job") for state in described]
    check_shuffle_plan(df, checked, job or "job")
    return checked


def sink_writer(df: DataFrame, sink_options: SinkOptions) -> DataStreamWriter:
    """Return a DataStreamWriter of a streaming DataFrame whose sink writes epochs."""
    if is_connect(df):
        # Imported here: it needs packages that only clients of Spark Connect have.
        from spark_hooks.publish.connect import ConnectQueryableWriter

        return ConnectQueryableWriter(df, sink_options)
    return QueryableWriter(df, sink_options)


@dataclass(frozen=True)
class _ActiveSink:
    """The state of a query that `publish` keeps between its micro-batches."""

    run: QueryRun
    arguments: object
    publisher: Publisher


def _run_of(batch: DataFrame, checkpoint: str | Path | None, job: str | None) -> QueryRun:
    if is_connect(batch):
        from spark_hooks.publish.connect import run_of_batch

        return run_of_batch(batch.sparkSession, checkpoint, job)
    return QueryRun.of_batch(batch)


# By log, job and query id. A run of a query has one writer for each job. Two queries with the same job fence each
# other.
_published: dict[tuple[str, str, str], _ActiveSink] = {}


def publish(
    batch_df: DataFrame,
    batch_id: int,
    *states: str | StateDescriptor,
    mode: Mode = "update",
    job: str | None = None,
    log: str | Path | None = None,
    wait_for_visibility: bool | float = False,
    on_rewind: OnRewind = "refuse",
    progress: bool | None = None,
    takeover: bool = False,
    catch_up_timeout: float | None = CATCH_UP_TIMEOUT_S,
    on_bad_key: OnBadKey = "fail",
    record_time: str | None = None,
    checkpoint: str | Path | None = None,
    **columns: Unpack[StateArguments],
) -> None:
    """Publish a micro-batch from inside a foreachBatch function.

    Use it instead of `queryable` in a query that has its own foreachBatch function. Call it once for every micro-batch,
    also for an empty one. When it returns, the epoch is committed.

    Args:
        batch_df: The DataFrame that Spark gave to the function.
        batch_id: The number that Spark gave to the function; it is the number of the epoch.
        *states: A state's name, or one or several `StateDescriptor`s, as for `queryable`.
        mode: The rows of the batch: the changed ones (`update`, `append`), or the full result (`complete`).
        job: The name that keys begin with. Default: the query's name.
        log: As for `queryable`.
        wait_for_visibility: As for `queryable`.
        on_rewind: As for `queryable`.
        progress: As for `queryable`.
        takeover: As for `queryable`.
        catch_up_timeout: As for `queryable`.
        on_bad_key: As for `queryable`.
        record_time: As for `queryable`.
        checkpoint: The query's checkpoint. Spark Connect needs it, and `job` as well; classic Spark ignores it.
        **columns: For a single state: the arguments of `StateDescriptor`.

    Raises:
        DescriptorError: As for `queryable`.
        RowError: A row cannot be written, such as one whose key is null.
        JobInUseError: Another running query writes the job.
        FencedWriterError: Another query has taken the job over.

    Examples:
        >>> rows = spark.createDataFrame([("UA", 7), ("DL", 3)], "carrier string, delay int")
        >>> rows.write.json(f"{path}/delays")
        >>> delays = spark.readStream.schema(rows.schema).json(f"{path}/delays")

        >>> def write(batch, batch_id):
        ...     worst = batch.groupBy("carrier").max("delay").withColumnRenamed("max(delay)", "delay")
        ...     sparkis.publish(worst, batch_id, "worst", key="carrier", value="delay", reduce="max", log=f"{path}/log")

        >>> writer = delays.writeStream.foreachBatch(write).queryName("flights")
        >>> query = writer.option("checkpointLocation", f"{path}/checkpoint").start()
        >>> query.processAllAvailable()
        >>> query.stop()

        >>> with sparkis.read_snapshot(f"{path}/log", "flights") as snapshot:
        ...     snapshot.value(b"flights:worst:UA")
        b'7'
    """
    run: QueryRun | None = None
    with Failure(lambda: None if run is None else run.query).reported():
        run = _run_of(batch_df, checkpoint, job)
        name = job or run.name
        if name is None:
            raise DescriptorError(NAME_MISSING)
        check_name("job", name)
        key = (_root_of(batch_df.sparkSession, log), name, run.query_id)
        arguments = SinkArguments(
            mode=mode,
            job=name,
            log=log,
            wait_for_visibility=wait_for_visibility,
            on_rewind=on_rewind,
            progress=progress,
            takeover=takeover,
            catch_up_timeout=catch_up_timeout,
            on_bad_key=on_bad_key,
            record_time=record_time,
        )
        active = _published.get(key)
        if active is not None and active.run == run:
            active.publisher.check_not_committed(name, batch_id)
        if active is None or active.run != run or active.arguments != (states, columns, arguments):
            sink_options = sink_options_of(batch_df, states, columns, run.query, **arguments)
            if is_connect(batch_df):
                from spark_hooks.publish.connect import register_servers

                register_servers(batch_df.sparkSession, sink_options.log)
            active = _published[key] = _ActiveSink(run, (states, columns, arguments), Publisher(sink_options))
            others = (each.publisher.writer_id for each in _published.values() if each.run == run)
            active.publisher.open(run, [writer for writer in others if writer is not None])
        active.publisher.write(batch_df, batch_id)
