"""The sink's Spark task, which writes a partition of a micro-batch, and the commit of the tasks' results.

`Task` runs on executors, in Spark's Python workers; `check` and `commit` run on the driver.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_hooks.serving.placement import ServerPlan, ensure_state_server
from state_backend.codec.row_encoding import KEY_HASH, RECORD_TIME, RowError, RowPlan, SkippedRows, encode
from state_backend.log.change_files import ChangeFileWriter
from state_backend.log.epochs import ChangeFile, EpochContent, to_stream
from state_backend.log.filesystems import open_filesystem
from state_backend.log.log_writer import LogWriter
from state_backend.log.record_ages import RecordAges, ages_in, ages_json, ages_of, total_of
from state_backend.model.errors import LogError, LogUnavailableError, SparkisError

logger = logging.getLogger("sparkis.sink")

# The schema of the one row that a task returns, as Spark's DDL.
RESULT = (
    "file string, inline binary, rows long, digest long, error string, is_log_error boolean, hashes binary, "
    "skipped long, example string, ages string"
)
# The schema of `as_streams`.
STREAMS = "stream binary"
NO_SPARKIS = "No module named 'spark_hooks'"
DIGEST_MASK = 0xFFFF_FFFF_FFFF_FFFF


class WorkersLackSparkisError(SparkisError):
    """The Python of Spark's workers has no sparkis."""


class TooManyRowsError(Exception):
    """A task has more rows than `Task.hashes_max`."""


@dataclass(frozen=True)
class Task:
    """Writes one partition of an epoch; picklable.

    Args:
        hashes_max: The task returns the hashes of its keys, unless it has more rows than this; None: it returns no
            hashes.
        clock_ms: The epoch's clock reading, if the ages of records are to be counted; then rows have the column t.
    """

    log: str
    folder: str
    epoch: int
    row_plans: tuple[RowPlan, ...]
    server_plan: ServerPlan | None = None
    hashes_max: int | None = None
    clock_ms: int | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write one partition's changes. Runs on an executor, perhaps several times for one partition.

        Errors in the user's rows are returned as data, because after raised errors Spark retries the task and prints
        tracebacks.
        """
        ensure_state_server(self.server_plan)
        digest, skipped = [0], SkippedRows()
        rows, ages = 0, list[RecordAges]()
        hashes: list[npt.NDArray[np.int64]] | None = None if self.hashes_max is None else []

        def counted(runs: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            nonlocal rows
            for run in runs:
                rows += run.num_rows
                yield run

        def with_ages(batches: Iterator[pa.RecordBatch], clock_ms: int) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                ages.append(ages_of(batch.column(RECORD_TIME).drop_null().to_numpy(), clock_ms))
                yield batch

        def with_hashes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            remaining = self.hashes_max or 0
            for batch in batches:
                if hashes is not None:
                    remaining -= batch.num_rows
                    if remaining < 0:
                        raise TooManyRowsError
                    hashes.append(batch.column(KEY_HASH).to_numpy())
                yield batch

        if self.clock_ms is not None:
            batches = with_ages(batches, self.clock_ms)
        file, inline, error, is_log_error = None, None, None, False
        try:
            writer = ChangeFileWriter(open_filesystem(self.log), self.folder, self.epoch)
            file, inline = writer.write(counted(encode(self.row_plans, with_hashes(batches), digest, skipped)))
        except (RowError, LogError) as failed:
            error, is_log_error = str(failed), isinstance(failed, LogError)
        except TooManyRowsError:
            hashes = None
            for _ in batches:  # without a full pass, a stateful query loses its checkpoint
                pass
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
                "hashes": pa.array([None if hashes is None else b"".join(map(bytes, hashes))], pa.binary()),
                "skipped": pa.array([skipped.count], pa.int64()),
                "example": pa.array([skipped.example or None], pa.string()),
                "ages": pa.array([json.dumps(ages_json(total_of(ages))) if ages else None], pa.string()),
            }
        )


def as_streams(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write each batch as one Arrow IPC stream, for a driver that collects rows. Runs on an executor."""
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"stream": pa.array([to_stream([batch])], pa.binary())})


def check(results: Iterable[Any], job: str, batch: int | None = None) -> None:
    """Raise the first error in the results of tasks.

    Args:
        batch: The number of the micro-batch; None: each result has it.
    """
    for each in results:
        if each.error is not None:
            kind = LogUnavailableError if each.is_log_error else RowError
            raise kind(f"job {job!r}, batch {each.batch if batch is None else batch}: {each.error}")
    if count := sum(result.skipped for result in results):
        example = next(result.example for result in results if result.example is not None)
        logger.warning("job %s: %d row(s) are left out; STATE JOBS counts them. For example: %s", job, count, example)


def has_unique_keys(results: Sequence[Any]) -> bool:
    """Return whether all rows of unshuffled tasks have different key hashes; False also if a task had too many rows.

    Two keys rarely have the same hash: in one of 30 million batches of a million rows.
    """
    if any(result.hashes is None for result in results):
        return False
    hashes = np.frombuffer(b"".join(result.hashes for result in results), np.int64)
    ordered = np.sort(hashes)
    return not bool(np.any(ordered[1:] == ordered[:-1]))


def check_workers(error: Exception) -> None:
    """Raise WorkersLackSparkisError if the workers' Python has no sparkis: one line instead of Spark's hundreds."""
    if NO_SPARKIS in str(error):
        raise WorkersLackSparkisError(
            "the Python of Spark's workers has no sparkis. On this machine it is the python3 of the PATH unless "
            f"PYSPARK_PYTHON names another one: set that to {sys.executable}, or activate its environment, before the "
            "session starts. On a cluster every executor needs sparkis"
        ) from None


def commit(
    writer: LogWriter,
    epoch: int,
    clock_ms: int,
    results: Sequence[Any],
    replaces: tuple[str, ...] = (),
    extra_inline: bytes | None = None,
    offsets: tuple[str, ...] = (),
) -> bool:
    """Commit the results of an epoch's tasks; see `LogWriter.commit`.

    Args:
        extra_inline: Inline changes that are not part of the digest that recognizes a replay.
    """
    content = changes_of(results, replaces).with_inline(extra_inline)
    return writer.commit(epoch, content, clock_ms=clock_ms, offsets=offsets)


def changes_of(results: Sequence[Any], replaces: tuple[str, ...] = ()) -> EpochContent:
    """Return the changes that the tasks of an epoch wrote."""
    return EpochContent(
        files=[ChangeFile.from_json(json.loads(result.file)) for result in results if result.file is not None],
        inline=[bytes(result.inline) for result in results if result.inline is not None],
        rows=sum(result.rows for result in results),
        digest=sum(result.digest for result in results) & DIGEST_MASK,
        replaces=replaces,
        skipped_rows=sum(result.skipped for result in results),
        record_ages=total_of(ages_in(json.loads(result.ages)) for result in results if result.ages is not None),
    )
