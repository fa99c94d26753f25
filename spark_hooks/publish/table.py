"""Small tables, such as rules or limits that a stream is joined with. Each is one hash, replaced as a whole.

Tables have their own job in the change log. Each call writes one epoch, with or without a running query. Runs on the
driver, which collects the table's rows once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame

from spark_hooks.publish import task
from spark_hooks.publish.columns import check_columns
from spark_hooks.publish.shuffle_plan import ShufflePlan, check_shuffle_plan
from spark_hooks.publish.sink import VISIBILITY_TIMEOUT_S, log_of, logger
from spark_hooks.publish.task import DIGEST_MASK
from spark_hooks.serving import endpoints
from spark_hooks.sessions import check_connect
from state_backend.codec.row_encoding import DuplicateRowsError, encode
from state_backend.log.change_log import ChangeLog
from state_backend.log.epochs import EpochContent, to_stream
from state_backend.log.log_writer import LogWriter
from state_backend.model.clock import now_ms
from state_backend.model.descriptor import Encoding, StateDescriptor, check_name, check_user_name
from state_backend.model.errors import DescriptorError, FencedWriterError

ROWS_MAX = 100_000
# The `source` in the description of a job of tables.
SOURCE = {"kind": "tables"}

# By log and job. All calls in a driver use the writer of the first call, until another driver takes the job over and
# fences it.
_writers: dict[tuple[str, str], LogWriter] = {}
_writing = threading.Lock()


def publish_table(
    df: DataFrame,
    name: str,
    *,
    field: str | None = None,
    value: str | Sequence[str] = (),
    member: str | None = None,
    score: str | None = None,
    job: str,
    encoding: Encoding | str = Encoding.TEXT,
    log: str | Path | None = None,
) -> int:
    """Publish all rows of a static DataFrame as one hash or set, replacing its former content, and return the epoch.

    The key is `job:name`. Readers see the whole table change at once. Call this again whenever the table has changed.
    It returns when the table is readable on the servers that this driver started, or after 10 seconds.

    Args:
        df: A static DataFrame of up to 100,000 rows.
        name: The table's name.
        field: The column with the fields of the hash; each row must have a different one.
        value: The column with the values; several columns become one JSON object. A row with a null value is left out.
        member: Instead of `field` and `value`: the column with the members of a set; each row must have a different
            one.
        score: With `member`: the column of scores, which makes a sorted set. A row with a null score is left out.
        job: The name of the tables' job, which no query may have. Several tables may share it.
        encoding: `text`, `json` or `binary`, as for a `StateDescriptor`.
        log: The root of the change log. Default: the setting `spark.sparkis.log`, which `serve` sets.

    Returns:
        The number of the epoch; each call for the job adds one.

    Raises:
        DescriptorError: The DataFrame is streaming, has too many rows, or has two rows with the same field or member.
        RowError: A row cannot be written, such as one whose field is null.
        FencedWriterError: Another driver has published a table of this job since this driver did.

    Examples:
        >>> limits = spark.createDataFrame([("boiler", 90.0), ("cellar", 15.0)], "sensor string, limit double")
        >>> sparkis.publish_table(limits, "limits", field="sensor", value="limit", job="rules", log=f"{path}/log")
        0
        >>> with sparkis.read_snapshot(f"{path}/log", "rules") as snapshot:
        ...     dict(snapshot.map_pairs(b"rules:limits"))
        {b'boiler': b'90', b'cellar': b'15'}
    """
    check_user_name(name)
    check_name("job", job)
    check_connect(df)
    if not isinstance(df, DataFrame) or df.isStreaming:
        raise DescriptorError(
            f"table {name!r}: sparkis.publish_table takes a static DataFrame; for a streaming one, call it in a "
            f"foreachBatch function, or make a state of it with sparkis.queryable(df, {name!r}, key=..., ...)"
        )
    is_object = not isinstance(value, str) and len(value) > 1
    state = StateDescriptor(
        name,
        key_format=f"{job}:{name}",
        field=field,
        value=value,
        member=member,
        score=score,
        encoding=Encoding.JSON if is_object else encoding,
    )
    state = check_columns(df, state, job)
    check_shuffle_plan(df, [state], job)
    root = log_of(df.sparkSession, log)
    clock_ms = now_ms()
    runs, digest = _encoded(df, state, job, clock_ms)
    epoch, term = _commit(root, job, state, runs, digest, clock_ms)
    endpoints.announce(root, job, epoch, term)
    if not endpoints.wait(root, job, epoch, VISIBILITY_TIMEOUT_S):
        logger.warning("job %s: epoch %d was not readable after %s s", job, epoch, VISIBILITY_TIMEOUT_S)
    return epoch


def _encoded(df: DataFrame, state: StateDescriptor, job: str, clock_ms: int) -> tuple[list[pa.RecordBatch], int]:
    """Return the rows as runs of changes, and their digest; DescriptorError for too many rows, or duplicate ones."""
    shuffle_plan = ShufflePlan.of(df, [state], job)
    batches = _batches_of(shuffle_plan.rows(df.limit(ROWS_MAX + 1), 1))
    if sum(batch.num_rows for batch in batches) > ROWS_MAX:
        raise DescriptorError(
            f"table {state.name!r}: the DataFrame has more than {ROWS_MAX} rows, and each call writes the whole table "
            f"again; filter out rows that nobody reads, or publish changed rows from a stream with sparkis.queryable"
        )
    digest = [0]
    try:
        runs = list(encode(shuffle_plan.row_plans_at(clock_ms), batches, digest))
    except DuplicateRowsError as error:
        raise DescriptorError(
            f"table {state.name!r}: several rows have the {'member' if state.member else 'field'} "
            f"{(error.field or b'')[:100]!r} in the column {state.member or state.field!r}; "
            f"keep one of them, for example with dropDuplicates()"
        ) from None
    return runs, digest[0] & DIGEST_MASK


def _commit(
    root: str, job: str, state: StateDescriptor, runs: list[pa.RecordBatch], digest: int, clock_ms: int
) -> tuple[int, int]:
    """Commit runs as the next epoch of a job, in place of a table's former rows; return the epoch's number and term."""
    with _writing:
        writer = _writer_of(root, job, state)
        epoch = writer.last.epoch + 1 if writer.last else 0
        try:
            writer.commit(
                epoch,
                EpochContent(
                    inline=[to_stream(runs)] if runs else [],
                    rows=sum(run.num_rows for run in runs),
                    digest=digest,
                    replaces=(state.name,),
                ),
                clock_ms=clock_ms,
            )
        except FencedWriterError:
            raise _fenced(state.name, job) from None
        writer.mark_final()
    return epoch, writer.current.term


def _batches_of(rows: DataFrame) -> list[pa.RecordBatch]:
    """Return the rows on the driver. Before Spark 4.0, a DataFrame has no `toArrow`: its tasks write the batches."""
    if hasattr(rows, "toArrow"):
        return list(rows.toArrow().to_batches())
    written = rows.mapInArrow(task.as_streams, task.STREAMS).collect()
    return [batch for row in written for batch in pa.ipc.open_stream(row.stream)]


def _writer_of(root: str, job: str, state: StateDescriptor) -> LogWriter:
    """Return this driver's writer of a job's tables; a new writer if this one does not have the table."""
    writer = _writers.get((root, job))
    table = state.for_job(job)
    if writer is not None and table in writer.states:
        return writer
    if writer is not None:
        try:
            writer.check_in_charge()
        except FencedWriterError:
            raise _fenced(state.name, job) from None
    others = [each for each in _tables_of(root, job) if each.name != state.name]
    writer = _writers[root, job] = LogWriter(
        root,
        job,
        [*others, table],
        source=SOURCE,
        rewrites_states=True,
        sends_heartbeats=False,  # each epoch of a table is final
    )
    return writer


def _tables_of(root: str, job: str) -> tuple[StateDescriptor, ...]:
    """Return the descriptors of a job's tables in the log; DescriptorError if a query writes the job."""
    log = ChangeLog(root).job(job)
    current = log.current()
    if current is None:
        return ()
    described = log.description(current.generation)
    if described.source != SOURCE:
        raise DescriptorError(f"job {job!r} in the log {root} is written by a query; give the tables another job=")
    return described.states


def _fenced(name: str, job: str) -> FencedWriterError:
    return FencedWriterError(
        f"table {name!r}: another driver publishes the tables of job {job!r} now, and this driver may no longer write "
        f"them; publish them from one driver, or give each driver its own job="
    )
