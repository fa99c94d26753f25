"""The sink: every micro-batch of a query becomes one epoch of a job's change log.

    queryable(df, ...)              a DataStreamWriter with the foreachBatch writer set, for a query of its own
    publish(batch_df, batch_id, ...) the same inside a foreachBatch function of the user's

Both check all that can be checked before a row is read; `publisher` does the rest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, get_args

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_hooks.publish.catching_up import CATCH_UP_TIMEOUT_S, check_timeout
from spark_hooks.publish.columns import check_columns
from spark_hooks.publish.layout import check_layout
from spark_hooks.publish.progress import check_apart, is_asked_for
from spark_hooks.publish.publisher import NAME_MISSING, Mode, Publication, Publisher, Run, partitions_of, planned
from spark_hooks.publish.sink_checks import SinkChecks, logged
from spark_hooks.serving.endpoints import LOG_SETTING
from spark_hooks.sessions import analyzed_plan, is_connect
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
# As Spark writes a plan; `~` stands before what is streaming.
STREAMING_AGGREGATION = re.compile(r"^[ :|+-]*~(Aggregate|Distinct)\b", re.MULTILINE)


class QueryableWriter(SinkChecks, DataStreamWriter):
    """Spark's DataStreamWriter with the sink set."""

    def start(self, *args: Any, **options: Any) -> StreamingQuery:
        """Start the query and take the job's log over; SparkisError if the log refuses, and the query ends again."""
        self._check_start(args, options)
        if self._checkpoint_location(self._session) is None:
            logger.warning(
                "job %s: the query has no checkpointLocation, so Spark uses a temporary one and its next run reads all "
                "input anew: all state of this run is then replaced. Give the query "
                ".option('checkpointLocation', '/a/folder/that/stays')",
                self._told.job or self._name,
            )
        publisher = Publisher(self._told)  # one per start: the same writer may be started again

        def write(batch: DataFrame, batch_id: int) -> None:
            with logged():
                publisher.write(batch, batch_id)

        DataStreamWriter.foreachBatch(self, write)
        query = super().start(*args, **options)
        try:
            publisher.open(Run.of_query(query))
        except SparkisError:
            query.stop()
            raise
        return query


def log_of(session: SparkSession, log: str | Path | None) -> str:
    """Return the root of the log to write to; raises what is wrong with it."""
    root = _root_of(session, log)
    check_writable(root)
    return root


def _root_of(session: SparkSession, log: str | Path | None) -> str:
    root = log or session.conf.get(LOG_SETTING, None)
    if root is None:
        raise DescriptorError(
            f"there is no change log to write to: call sparkis.serve(spark) first, pass log=, or set {LOG_SETTING}"
        )
    return open_filesystem(root).root  # whole: executors have working folders of their own


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
    progress: bool | None,
    takeover: bool,
    catch_up_timeout: float | None,
    query: StreamingQuery | None = None,
) -> Publication:
    """Return the arguments of a call, checked; with the query that runs, if `df` is a micro-batch of one."""
    _check_choice("mode", mode, get_args(Mode))
    _check_choice("on_rewind", on_rewind, get_args(OnRewind))
    timeout_s = VISIBILITY_TIMEOUT_S if wait_for_visibility is True else wait_for_visibility
    if not isinstance(timeout_s, (int, float)) or timeout_s < 0:
        raise DescriptorError(f"wait_for_visibility= is True, False or seconds, not {wait_for_visibility!r}")
    check_timeout(catch_up_timeout)
    described = _checked_states(df, states, job, given)
    _check_folded(described, mode, df, query)
    partitions_of(df.sparkSession)
    # Under Spark Connect the log is written by the server, and may be out of this process's reach.
    root = _root_of(df.sparkSession, log) if is_connect(df) else log_of(df.sparkSession, log)
    has_progress = is_asked_for(df.sparkSession, progress)
    if has_progress:
        check_apart(job or "job", described)
    if progress and is_connect(df):
        raise DescriptorError(
            "progress=True: under Spark Connect the sink runs where Spark does not show the query's progress; "
            "leave it out"
        )
    return Publication(
        tuple(described), mode, job, root, float(timeout_s), on_rewind, has_progress, catch_up_timeout, takeover
    )


def _check_folded(states: Sequence[StateDescriptor], mode: Mode, df: DataFrame, query: StreamingQuery | None) -> None:
    """Refuse to add up rows that are totals already."""
    for state in states:
        if mode == "complete" and state.reduce is not None:
            raise DescriptorError(
                f"state {state.name!r}: reduce={state.reduce.value!r} folds what each micro-batch adds, and with "
                f"mode='complete' it brings everything again; leave out reduce=, or publish the rows themselves with "
                f"mode='append'"
            )
    adding = [state for state in states if state.reduce in (Reduce.SUM, Reduce.COUNT)]
    if mode != "update" or not adding:
        return
    plan = analyzed_plan(df) if query is None else planned(query)
    if found := STREAMING_AGGREGATION.search(plan):
        reduce = adding[0].reduce
        assert reduce is not None
        raise DescriptorError(
            f"state {adding[0].name!r}: reduce={reduce.value!r} adds up what each micro-batch brings, and in update "
            f"mode an aggregation ({found[1]} in the query's plan) brings a key's whole result again whenever it "
            f"changes. Leave out reduce= to publish that result, or publish the rows without the aggregation, with "
            f"mode='append'; if each key comes only once (a window with a watermark), pass mode='append'"
        )


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
    for each in described:
        check_user_name(each.name)
    if job is not None:
        check_name("job", job)
    check_states(job or "job", described)
    checked = [check_columns(df, state, job or "job") for state in described]
    check_layout(df, checked, job or "job")
    return checked


def queryable(
    df: DataFrame,
    *states: str | StateDescriptor,
    mode: Mode = "update",
    job: str | None = None,
    log: str | Path | None = None,
    wait_for_visibility: bool | float = False,
    on_rewind: OnRewind = "refuse",
    progress: bool | None = None,
    takeover: bool = False,
    catch_up_timeout: float | None = CATCH_UP_TIMEOUT_S,
    **columns: Unpack[StateArguments],
) -> DataStreamWriter:
    """Return a writer whose query publishes the rows of a streaming DataFrame as state for Redis clients.

    Every micro-batch becomes one epoch of the change log: readers see all of it or nothing of it. A single state is
    given by its name and its columns, which are the arguments of `StateDescriptor`; several are given as
    `StateDescriptor`s, and one epoch then holds the changes of all. Whatever can be checked is checked here, before
    the query starts.

    Args:
        df: The streaming DataFrame.
        *states: A state's name, or one or several `StateDescriptor`s.
        mode: Spark's output mode: `update`, `append`, or `complete`, which replaces the states with every micro-batch.
        job: The name that keys begin with. Default: the query's name.
        log: The root of the change log. Default: the setting `spark.sparkis.log`, which `serve` makes.
        wait_for_visibility: True, or a number of seconds: a micro-batch ends only when every server that this driver
            started shows it, or that time (True: 10 seconds) has passed.
        on_rewind: What to do with a checkpoint that was set back to before the log's last epoch: `refuse` fails the
            query, `truncate` drops the epochs that the query writes again.
        progress: True: publish the facts of the query (watermark, rates, observed metrics) as the hash
            `job:_progress`. Default: the setting `spark.sparkis.progress`.
        takeover: True: take the job from another query that writes it and is alive; that query fails.
        catch_up_timeout: How long readers keep the old state, in seconds, while a query with a new checkpoint catches
            up. 0: readers see the new state at once. None: until the query has caught up, however long that takes.
        **columns: For a single state: the arguments of `StateDescriptor`, such as `key=` and `value=`.

    Returns:
        Spark's `DataStreamWriter`, to be given a name and a checkpoint and to be started. Its sink is taken.

    Raises:
        DescriptorError: The DataFrame is not streaming, a column is missing or has a type that cannot be written, two
            states could make the same key, or an argument makes no sense.
        LogUnavailableError: The log's storage does not answer, or refuses.

    Examples:
        >>> rows = spark.createDataFrame([("boiler", 81.5), ("cellar", 12.0)], "sensor string, temp double")
        >>> rows.write.json(f"{path}/temps")
        >>> temps = spark.readStream.schema(rows.schema).json(f"{path}/temps")

        >>> writer = sparkis.queryable(temps, "temperature", key="sensor", value="temp", log=f"{path}/log")
        >>> query = writer.queryName("sensors").option("checkpointLocation", f"{path}/checkpoint").start()
        >>> query.processAllAvailable()
        >>> query.stop()

        >>> with sparkis.read_snapshot(f"{path}/log", "sensors") as snapshot:
        ...     snapshot.value(b"sensors:temperature:boiler")
        b'81.5'
    """
    if not isinstance(df, DataFrame):
        raise DescriptorError(f"sparkis.queryable takes a DataFrame, not {type(df).__module__}.{type(df).__qualname__}")
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
        progress=progress,
        takeover=takeover,
        catch_up_timeout=catch_up_timeout,
    )
    if is_connect(df):
        from spark_hooks.publish.connect import (
            ConnectQueryableWriter,  # it needs what only a client of Spark Connect has
        )

        return ConnectQueryableWriter(df, told)
    return QueryableWriter(df, told)


@dataclass(frozen=True)
class _Published:
    """What `publish` remembers of a query from one micro-batch to the next."""

    run: Run
    asked: object
    publisher: Publisher


def _run_of(batch: DataFrame, checkpoint: str | Path | None, job: str | None) -> Run:
    if is_connect(batch):
        from spark_hooks.publish.connect import run_of_batch

        return run_of_batch(batch.sparkSession, checkpoint, job)
    return Run.of_batch(batch)


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
    progress: bool | None = None,
    takeover: bool = False,
    catch_up_timeout: float | None = CATCH_UP_TIMEOUT_S,
    checkpoint: str | Path | None = None,
    **columns: Unpack[StateArguments],
) -> None:
    """Publish a micro-batch from inside a foreachBatch function.

    This is `queryable` for a query that has a foreachBatch function already. Call it once for every micro-batch, also
    for an empty one, and let it run to its end: the epoch is committed when it returns.

    Args:
        batch_df: The DataFrame that Spark gave to the function.
        batch_id: The number that Spark gave to the function; it is the number of the epoch.
        *states: A state's name, or one or several `StateDescriptor`s, as for `queryable`.
        mode: What the batch holds: changed rows (`update`, `append`) or the whole result (`complete`).
        job: The name that keys begin with. Default: the query's name.
        log: As for `queryable`.
        wait_for_visibility: As for `queryable`.
        on_rewind: As for `queryable`.
        progress: As for `queryable`.
        takeover: As for `queryable`.
        catch_up_timeout: As for `queryable`.
        checkpoint: The query's checkpoint. Under Spark Connect it is needed, and so is `job`; elsewhere it is ignored.
        **columns: For a single state: the arguments of `StateDescriptor`.

    Raises:
        DescriptorError: As for `queryable`.
        RowError: A row cannot become a change, such as one whose key is null.
        JobInUseError: Another query writes the job and is alive.
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
    with logged():
        run = _run_of(batch_df, checkpoint, job)
        name = job or run.name
        if name is None:
            raise DescriptorError(NAME_MISSING)
        check_name("job", name)
        place = (_root_of(batch_df.sparkSession, log), name, run.query_id)
        asked = (states, columns, mode, wait_for_visibility, on_rewind, progress, takeover, catch_up_timeout)
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
                progress=progress,
                catch_up_timeout=catch_up_timeout,
                query=run.query,
                takeover=takeover,
            )
            if is_connect(batch_df):
                from spark_hooks.publish.connect import know_server

                know_server(batch_df.sparkSession, told.log)
            known = _published[place] = _Published(run, asked, Publisher(told))
            others = (each.publisher.writer_id for each in _published.values() if each.run == run)
            known.publisher.open(run, [writer for writer in others if writer is not None])
        known.publisher.write(batch_df, batch_id)
