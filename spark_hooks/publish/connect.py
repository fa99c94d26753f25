"""The sink under Spark Connect, where foreachBatch functions run in a Python worker of the server.

    the client                          the worker, one for each run of a query
    ConnectQueryableWriter, `BatchWriter` ──pickled──► `BatchWriter.__call__`, or `publish` in a function of the user's

The worker has a session of its own, whose settings are a copy of the client's, and nothing that tells which query it
works for. So the checkpoint tells: its file `metadata` has the query's id, and Spark wrote it before the first batch.
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

from spark_hooks.publish.publisher import Publication, Publisher, Run
from spark_hooks.publish.sink_checks import CHECKPOINT_OPTION, SinkChecks, logged
from spark_hooks.serving import endpoints
from state_backend.model.errors import DescriptorError

# Spark sets it in its Python workers; a client has another value, or none.
RUNTIME_VARIABLE = "SPARK_PYTHON_RUNTIME"
WORKER_RUNTIME = "PYTHON_WORKER"

CHECKPOINT_MISSING = (
    "under Spark Connect the sink runs in a process that is not told which query it works for, and learns it from the "
    "checkpoint: "
)


class ConnectQueryableWriter(SinkChecks, ConnectDataStreamWriter):  # type: ignore[misc]  # to a type checker both are one
    """Spark Connect's DataStreamWriter with the sink set. The log is opened by the query's first micro-batch."""

    def start(self, *args: Any, **options: Any) -> StreamingQuery:  # type: ignore[override]
        """Start the query. What the log refuses fails the first micro-batch."""
        self._check_start(args, options)
        checkpoint = self._checkpoint_location(self._session)
        if checkpoint is None:
            raise DescriptorError(f"{CHECKPOINT_MISSING}give the query .option({CHECKPOINT_OPTION!r}, ...)")
        write = BatchWriter(self._told, self._name, checkpoint)
        ConnectDataStreamWriter.foreachBatch(self, write)
        return super().start(*args, **options)


class BatchWriter:
    """What a query's foreachBatch calls: picklable, made in the client, called in the server's Python worker."""

    def __init__(self, told: Publication, name: str | None, checkpoint: str) -> None:
        self._told = told
        self._name = name
        self._checkpoint = checkpoint
        self._publisher: Publisher | None = None  # made in the worker, which lives as long as the query runs

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write one micro-batch."""
        with logged():
            if self._publisher is None:
                run = run_at(batch.sparkSession, self._checkpoint, self._name)
                know_server(batch.sparkSession, self._told.log)
                publisher = Publisher(self._told)
                publisher.open(run)
                self._publisher = publisher
            self._publisher.write(batch, batch_id)


# By checkpoint; a worker is one run of one query, so that what was read once stays true.
_runs: dict[str, Run] = {}


def run_of_batch(session: SparkSession, checkpoint: str | Path | None, name: str | None) -> Run:
    """Return the run that a foreachBatch function of the user's was called for."""
    if os.environ.get(RUNTIME_VARIABLE) != WORKER_RUNTIME:
        raise DescriptorError(
            "sparkis.publish was called outside of a streaming query's foreachBatch function; "
            "to publish without Spark use sparkis.LogWriter"
        )
    if checkpoint is None:
        raise DescriptorError(f"{CHECKPOINT_MISSING}pass checkpoint= to sparkis.publish, as the query has it")
    if name is None:
        raise DescriptorError("under Spark Connect a foreachBatch function is not told the query's name: pass job=")
    place = str(checkpoint)
    if place not in _runs:
        _runs[place] = run_at(session, place, name)
    return _runs[place]


def run_at(session: SparkSession, checkpoint: str, name: str | None) -> Run:
    """Return the run of the query whose checkpoint it is; the server reads it, wherever Spark can keep one."""
    path = f"{checkpoint.rstrip('/')}/metadata"
    try:
        rows = session.read.text(path, wholetext=True).collect()
        query_id = str(json.loads(rows[0].value)["id"])
    except PySparkException as error:
        raise DescriptorError(
            f"{path} cannot be read, which has the query's id; is {checkpoint!r} this query's checkpoint? {error}"
        ) from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise DescriptorError(f"{path} is not what Spark writes; is {checkpoint!r} this query's checkpoint?") from None
    return Run(query_id, "", name, None, checkpoint)


def know_server(session: SparkSession, log: str) -> None:
    """Make the server that the client started known to the sinks of this worker, if it is on this machine."""
    path = session.conf.get(endpoints.ADDRESS_SETTING, None)
    if path is not None and os.path.exists(path) and not endpoints.of_log(log):
        endpoints.add(log, endpoints.AddressFileEndpoint(Path(path)))
