"""Small whole tables: the rules or thresholds that a stream is joined with, as one hash that is replaced as a whole.

Tables have a job of their own in the change log; each call writes one epoch of it, with or without a running query.
Runs on the driver: a table is small, and Spark is asked for its rows once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame

from spark_hooks.publish.columns import check_columns
from spark_hooks.publish.encoding import DuplicateRowsError, encode
from spark_hooks.publish.layout import Layout, check_layout
from spark_hooks.publish.sink import VISIBILITY_TIMEOUT_S, log_of, logger
from spark_hooks.publish.task import DIGEST_MASK
from spark_hooks.serving import endpoints
from state_backend.log.change_log import ChangeLog
from state_backend.log.epochs import to_stream
from state_backend.log.log_writer import LogWriter
from state_backend.model.clock import now_ms
from state_backend.model.descriptor import Encoding, StateDescriptor, check_name, check_user_name
from state_backend.model.errors import DescriptorError, FencedWriterError

ROWS_MAX = 100_000
# What a job's description says of where its states come from.
SOURCE = {"kind": "tables"}

# By log and job. One driver writes a job's tables: the writer of its first call is the one of all later ones, so that
# it learns that another driver took over.
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
    """Publish all rows of a static DataFrame as one hash or set, in place of what it was, and return the epoch.

    The key is `job:name`. Readers see the whole table change at one moment. Call this again whenever the table has
    changed. It returns when the servers that this driver started show the table.

    Args:
        df: A static DataFrame of up to 100,000 rows.
        name: The table's name.
        field: The column that names the fields of the hash; no two rows may have the same.
        value: The column of the fields' values; several columns become one JSON object. A row without a value is left
            out.
        member: In place of `field` and `value`: the column of the members of a set; no two rows may have the same.
        score: With `member`: the column of scores, which makes a sorted set. A row without a score is left out.
        job: The name of the tables' job, which is no query's. Several tables may share it.
        encoding: `text`, `json` or `binary`, as for a `StateDescriptor`.
        log: The root of the change log. Default: the setting `spark.sparkis.log`, which `serve` makes.

    Returns:
        The number of the epoch, one more for each table that the job publishes.

    Raises:
        DescriptorError: The DataFrame cannot be a table: it is streaming, has too many rows, or two with one field.
        RowError: A row cannot be a field, such as one whose field is null.
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
    check_layout(df, [state], job)
    root = log_of(df.sparkSession, log)
    clock_ms = now_ms()
    layout = Layout.of(df, [state], job)
    rows = layout.rows(df.limit(ROWS_MAX + 1), 1).toArrow()
    if rows.num_rows > ROWS_MAX:
        raise DescriptorError(
            f"table {name!r}: the DataFrame has more than {ROWS_MAX} rows, and a table is one hash that each call "
            f"writes anew; leave out what nobody reads, or publish changed rows from a stream with sparkis.queryable"
        )
    digest = [0]
    try:
        runs = list(encode(layout.plans(clock_ms), rows.to_batches(), digest))
    except DuplicateRowsError as error:
        raise DescriptorError(
            f"table {name!r}: several rows have the {'member' if member else 'field'} "
            f"{(error.field or b'')[:100]!r} in the column {member or field!r}; "
            f"leave one of them, for example with dropDuplicates()"
        ) from None
    with _writing:
        writer = _writer_of(root, job, state)
        epoch = writer.last.epoch + 1 if writer.last else 0
        try:
            writer.commit(
                epoch,
                clock_ms=clock_ms,
                inline=[to_stream(runs)] if runs else [],
                rows=sum(run.num_rows for run in runs),
                digest=digest[0] & DIGEST_MASK,
                replaces=(name,),
            )
        except FencedWriterError:
            raise _fenced(name, job) from None
        writer.rest()
    _make_visible(root, job, epoch)
    return epoch


def _writer_of(root: str, job: str, state: StateDescriptor) -> LogWriter:
    """Return this driver's writer of a job's tables, which knows this one too."""
    known = _writers.get((root, job))
    mine = state.for_job(job)
    if known is not None and mine in known.states:
        return known
    if known is not None:
        try:
            known.check_in_charge()
        except FencedWriterError:
            raise _fenced(state.name, job) from None
    others = [each for each in _tables_of(root, job) if each.name != state.name]
    writer = _writers[root, job] = LogWriter(root, job, [*others, mine], source=SOURCE, is_whole=True)
    return writer


def _tables_of(root: str, job: str) -> tuple[StateDescriptor, ...]:
    """Return the tables that a job has in the log; DescriptorError if it is a query's."""
    log = ChangeLog(root).job(job)
    current = log.current()
    if current is None:
        return ()
    described = log.description(current.generation)
    if described.source != SOURCE:
        raise DescriptorError(
            f"job {job!r} in the log {root} is not one of tables: a query writes it; give the tables a job of their own"
        )
    return described.states


def _fenced(name: str, job: str) -> FencedWriterError:
    return FencedWriterError(
        f"table {name!r}: the tables of job {job!r} are now published by another driver, and this one stops, so that "
        f"neither undoes what the other did; publish them from one driver, or from each under a job= of its own"
    )


def _make_visible(root: str, job: str, epoch: int) -> None:
    """Tell the servers that this driver knows of, and wait until they show the table."""
    known = endpoints.of_log(root)
    for endpoint in known:
        endpoint.notice(job, epoch)
    deadline = time.monotonic() + VISIBILITY_TIMEOUT_S
    for endpoint in known:
        if not endpoint.wait(job, epoch, max(0.0, deadline - time.monotonic())):
            logger.warning("job %s: epoch %d was not readable after %s s", job, epoch, VISIBILITY_TIMEOUT_S)
