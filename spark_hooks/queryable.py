"""`sparkis.queryable`: the writer of a query whose rows Redis clients read, at each commit or as they come."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Unpack, get_args

from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_hooks.publish.publisher import Mode
from spark_hooks.publish.sink import sink_options_of, sink_writer
from spark_hooks.real_time.checks import check_session
from spark_hooks.real_time.record_writer import RecordWriter
from spark_hooks.sessions import check_connect
from state_backend.codec.row_encoding import OnBadKey
from state_backend.log.catch_up import CATCH_UP_TIMEOUT_S
from state_backend.log.log_writer import OnRewind
from state_backend.model.descriptor import StateArguments, StateDescriptor
from state_backend.model.errors import DescriptorError

Freshness = Literal["commit", "record"]


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
    on_bad_key: OnBadKey = "fail",
    record_time: str | None = None,
    freshness: Freshness = "commit",
    columns: Mapping[str, str] | None = None,
    **state: Unpack[StateArguments],
) -> DataStreamWriter:
    """Return a writer whose query publishes the rows of a streaming DataFrame as state for Redis clients.

    Every micro-batch becomes one epoch of the change log: readers see all of its changes or none. Describe a single
    state by its name and the arguments of `StateDescriptor`, several states by `StateDescriptor`s; one epoch has the
    changes of all states. The arguments are validated here, before the query starts.

    Args:
        df: The streaming DataFrame.
        *states: A state's name, or one or several `StateDescriptor`s.
        mode: Spark's output mode: `update`, `append`, or `complete`, which replaces the states with every micro-batch.
        job: The name that keys begin with. Default: the query's name.
        log: The root of the change log. Default: the setting `spark.sparkis.log`, which `serve` sets.
        wait_for_visibility: True, or a number of seconds: a micro-batch ends only when its epoch is readable on every
            server that this driver started, or after that time (True: 10 seconds).
        on_rewind: For a checkpoint that was set back to before the log's last epoch: `refuse` fails the query,
            `truncate` drops the epochs that the query writes again.
        progress: True: publish the query's progress (watermark, rates, observed metrics) as the hash `job:_progress`.
            Default: the setting `spark.sparkis.progress`.
        takeover: True: take the job over from another running query, which then fails.
        catch_up_timeout: The seconds for which readers keep the old state at most while a query with a new checkpoint
            catches up. 0: readers see the new state at once. None: no limit.
        on_bad_key: For a row that cannot be written, such as one with a null in its key: `fail` fails the micro-batch,
            `skip` leaves the row out, counts it, and logs one example of each micro-batch.
        record_time: A timestamp column with the time of each record, such as Kafka's `timestamp`: servers then measure
            the time from there until clients can read the record. Default: it is not measured.
        freshness: `commit`: readers see what is committed. `record`: the query runs in Real-Time Mode (`trigger(
            realTime=...)`, Spark 4.3), and readers see each row as soon as the query emits it (docs/real-time.md).
        columns: With `record`: columns that the query computes from the results of its aggregation, as SQL expressions
            over these results, as for `attach`.
        **state: For a single state: the arguments of `StateDescriptor`, such as `key=` and `value=`.

    Returns:
        Spark's `DataStreamWriter` with its sink set. Give it a name and a checkpoint, and start it.

    Raises:
        DescriptorError: The DataFrame is not streaming, a column is missing or has a type that cannot be written, two
            states could make the same key, or an argument is invalid.
        LogUnavailableError: The log's storage does not answer, or refuses access.

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
    check_connect(df)
    if not isinstance(df, DataFrame):
        raise DescriptorError(f"sparkis.queryable takes a DataFrame, not {type(df).__module__}.{type(df).__qualname__}")
    if freshness not in get_args(Freshness):
        raise DescriptorError(f"freshness= is 'commit' or 'record', not {freshness!r}")
    if freshness == "record":
        check_session(df)
    elif columns is not None:
        raise DescriptorError("columns= has an effect with freshness='record' alone; compute the column in the query")
    if not df.isStreaming:
        raise DescriptorError(
            "sparkis.queryable takes a streaming DataFrame, and this one is not (spark.readStream makes one)"
        )
    sink_options = sink_options_of(
        df,
        states,
        state,
        mode=mode,
        job=job,
        log=log,
        wait_for_visibility=wait_for_visibility,
        on_rewind=on_rewind,
        progress=progress,
        takeover=takeover,
        catch_up_timeout=catch_up_timeout,
        on_bad_key=on_bad_key,
        record_time=record_time,
    )
    return sink_writer(df, sink_options) if freshness == "commit" else RecordWriter.of(df, sink_options, columns)
