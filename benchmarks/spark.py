"""The Spark session of the benchmarks: two cores of this machine, with as little output as possible."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

CORES = 2
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "3g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": str(CORES),
    "spark.sql.session.timeZone": "UTC",
}


@contextmanager
def session(**settings: str) -> Iterator[SparkSession]:
    """Run Spark for a block, with more settings; dots in their names are written as two underscores."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(f"local[{CORES}]").appName("sparkis benchmarks")
    for name, value in (SETTINGS | {name.replace("__", "."): value for name, value in settings.items()}).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        spark.sparkContext.setLogLevel("OFF")
        yield spark
    finally:
        for query in spark.streams.active:
            query.stop()
        spark.stop()
