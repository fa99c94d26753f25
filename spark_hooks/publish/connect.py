"""The sink under Spark Connect: foreachBatch functions run in a Python worker of Spark's server.

    client                              worker, one for each query run
    ConnectQueryableWriter, `BatchWriter` ──pickled──► `BatchWriter.__call__`, or `publish` in the user's function

The worker has its own session with a copy of the client's settings, and Spark does not give it the query's id. It reads
the id from the checkpoint's file `metadata`, which Spark writes before the first batch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.connect.streaming.readwriter import DataStreamWriter as ConnectDataStreamWriter
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.publish.failures import Failure
from spark_hooks.publish.publisher import Publisher, QueryRun, SinkOptions
from spark_hooks.publish.sink_checks import CHECKPOINT_OPTION, SinkChecks
from spark_hooks.serving import endpoints
from state_backend.model.errors import DescriptorError

# Spark sets this variable in its Python workers. A client has another value, or none.
RUNTIME_VARIABLE = "SPARK_PYTHON_RUNTIME"
WORKER_RUNTIME = "PYTHON_WORKER"

CHECKPOINT_MISSING = (
    "under Spark Connect the sink runs in a process that does not know its query, and reads the query's id from the "
    "checkpoint: "
)


class ConnectQueryableWriter(SinkChecks, ConnectDataStreamWriter):  # type: ignore[misc]  # to a type checker both are one
    """Spark Connect's DataStreamWriter with the sink set. The query's first micro-batch opens the log."""

    def start(self, *args: Any, **options: Any) -> StreamingQuery:  # type: ignore[override]
        """Start the query. Errors of the log fail its first micro-batch."""
        self._check_start(args, options)
        checkpoint = self._checkpoint_location(self._session)
        if checkpoint is None:
            raise DescriptorError(f"{CHECKPOINT_MISSING}give the query .option({CHECKPOINT_OPTION!r}, ...)")
        write = BatchWriter(self._sink_options, self._name, checkpoint)
        ConnectDataStreamWriter.foreachBatch(self, write)
        return super().start(*args, **options)


class BatchWriter:
    """The foreachBatch function of a query; picklable. The client makes it, the server's Python worker calls it."""

    def __init__(self, options: SinkOptions, name: str | None, checkpoint: str) -> None:
        self._options = options
        self._name = name
        self._checkpoint = checkpoint
        self._publisher: Publisher | None = None  # made in the worker, which runs as long as the query

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write one micro-batch."""
        with Failure().reported():
            if self._publisher is None:
                run = read_run(batch.sparkSession, self._checkpoint, self._name)
                register_servers(batch.sparkSession, self._options.log)
                publisher = Publisher(self._options)
                publisher.open(run)
                self._publisher = publisher
            self._publisher.write(batch, batch_id)


# Query runs by checkpoint. A worker serves one query run, so its entry never changes.
_runs: dict[str, QueryRun] = {}


def run_of_batch(session: SparkSession, checkpoint: str | Path | None, name: str | None) -> QueryRun:
    """Return the query run for which Spark called the user's foreachBatch function."""
    if os.environ.get(RUNTIME_VARIABLE) != WORKER_RUNTIME:
        raise DescriptorError(
            "sparkis.publish was called outside of a streaming query's foreachBatch function; "
            "to publish without Spark use sparkis.LogWriter"
        )
    if checkpoint is None:
        raise DescriptorError(f"{CHECKPOINT_MISSING}pass checkpoint= to sparkis.publish, as the query has it")
    if name is None:
        raise DescriptorError("under Spark Connect a foreachBatch function does not know the query's name: pass job=")
    location = str(checkpoint)
    if location not in _runs:
        _runs[location] = read_run(session, location, name)
    return _runs[location]


def read_run(session: SparkSession, checkpoint: str, name: str | None) -> QueryRun:
    """Return the run of the query with this checkpoint. Spark's server reads its file, on any storage that it knows."""
    path = f"{checkpoint.rstrip('/')}/metadata"
    try:
        rows = session.read.text(path, wholetext=True).collect()
        query_id = str(json.loads(rows[0].value)["id"])
    except PySparkException as error:
        raise DescriptorError(
            f"{path}, the file with the query's id, cannot be read; is {checkpoint!r} this query's checkpoint? {error}"
        ) from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise DescriptorError(
            f"{path} is not Spark's metadata file; is {checkpoint!r} this query's checkpoint?"
        ) from None
    return QueryRun(query_id, "", name, None, checkpoint)


def register_servers(session: SparkSession, log: str) -> None:
    """Have this worker announce the epochs of a log, as a driver does; DescriptorError.

    They are announced to the server that the client started, if it runs on this machine; to the log's registry; and to
    the addresses in the session's settings.
    """
    endpoints.announce_as_set(session, log)
    path = session.conf.get(endpoints.ADDRESS_SETTING, None)
    if path is not None and os.path.exists(path) and not endpoints.of_log(log):
        endpoints.add(log, endpoints.AddressFileEndpoint(Path(path)))
