"""Helpers of all examples: a local Spark with little output, files for streams, and a temporary folder."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

# transformWithState needs RocksDB, and attaching to RocksDB needs its changelog.
ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


@contextmanager
def spark(name: str, settings: dict[str, str] | None = None) -> Iterator[SparkSession]:
    """Run a local Spark with two cores during a `with` block; stop it and its queries at the end."""
    print("starting Spark ...", file=sys.stderr)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master("local[2]").appName(name)
    quiet = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
    }
    for setting, value in (quiet | (settings or {})).items():
        builder = builder.config(setting, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        for query in session.streams.active:
            query.stop()
        session.stop()


def add_file(file: Path, text: str, modified_s: float | None = None) -> None:
    """Write a file under a hidden name and rename it, so that a stream never reads half a file.

    modified_s: the file's modification time. Spark reads files in the order of these times.
    """
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text(text)
    if modified_s is not None:
        os.utime(unfinished, (modified_s, modified_s))
    unfinished.rename(file)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a temporary folder for data, checkpoints and the change log; delete it at the end of the `with` block."""
    with tempfile.TemporaryDirectory(prefix="sparkis-example-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
