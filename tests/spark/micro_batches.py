"""Streams whose micro-batches a test controls, and the session that runs them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

Found = TypeVar("Found")
Settings = Callable[[dict[str, str]], None]


# The session that modules of this process share.
_shared: list[SparkSession] = []


@contextmanager
def shared_session() -> Iterator[SparkSession]:
    """Give the session of two cores that the modules of a process share; its settings and queries end with the block.

    A session of a module's own would cost seconds of processor time: it begins with cold Python workers, for example.
    """
    if not _shared:
        _shared.append(local_session("local[2]"))
    (session,) = _shared
    before = settings_of(session)
    yield session
    for query in session.streams.active:
        query.stop()
    after = settings_of(session)
    for name in after.keys() - before.keys():
        session.conf.unset(name)
    for name, value in before.items():
        if after.get(name) != value:
            session.conf.set(name, value)


def settings_of(session: SparkSession) -> dict[str, str]:
    """Return all settings of a session, in any version of Spark."""
    return {row.key: row.value for row in session.sql("SET").collect()}


def end_shared_session() -> None:
    """Stop the shared session, if there is one: before a session with other settings is made, and at the end."""
    while _shared:
        _shared.pop().stop()


def local_session(master: str, **settings: str) -> SparkSession:
    """Start Spark with as few resources and as little output as possible."""
    end_shared_session()
    quiet = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.extraJavaOptions": os.environ.get("SPARK_SUBMIT_OPTS", ""),  # as for drivers: tests/conftest.py
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        # Python workers of Spark connect within this time (15 s by default), also on a machine with other work.
        "spark.python.authenticate.socketTimeout": "300s",
        "spark.python.daemon.module": "compat.spark_daemon",
    }
    builder = SparkSession.builder.master(master).appName("sparkis tests")
    for name, value in (quiet | settings).items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


class Batches:
    """A stream of JSON rows in files; each file is one micro-batch, in the order of arrival.

    The files of a driver that was killed are continued.
    """

    def __init__(self, spark: SparkSession, folder: Path, schema: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.df: DataFrame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(folder))
        self._spark = spark
        self._schema = schema
        self._count = len(list(folder.iterdir()))

    def add(self, *rows: dict[str, Any]) -> None:
        """Add one file."""
        self._count += 1
        unfinished = self.folder / f".{self._count}.json"
        unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(unfinished, (self._count, self._count))  # Spark takes files by their times
        unfinished.rename(self.folder / f"{self._count:04d}.json")

    def as_table(self) -> DataFrame:
        """Return all rows as a plain DataFrame."""
        return self._spark.read.schema(self._schema).json(str(self.folder))


def start(writer: DataStreamWriter, name: str, checkpoint: Path) -> StreamingQuery:
    """Start a query and let it process all files."""
    query = writer.queryName(name).option("checkpointLocation", str(checkpoint)).start()
    query.processAllAvailable()
    return query


def failure_of(query: StreamingQuery) -> str:
    """Run a query until it fails and return the message."""
    try:
        query.processAllAvailable()
    except Exception as error:  # several classes, by where the query was when it failed
        return str(query.exception() or error)
    raise AssertionError("the query did not fail")
