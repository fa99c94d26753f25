"""Make an archive of the classes that Spark loads, for the tests: `python scripts/spark_archive.py FILE`.

A JVM that maps this archive (class data sharing) starts Spark in half the processor time; the tests start many JVMs.
The archive holds the classes of a small streaming query. A JVM that cannot use it, because it is another version or has
another class path, starts as usual.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa


def main(file: Path) -> None:
    """Run a streaming query; its JVM writes the archive when it ends."""
    file.unlink(missing_ok=True)
    os.environ["SPARK_SUBMIT_OPTS"] = (
        f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ArchiveClassesAtExit={file} -Xlog:disable"
    )
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    settings = {"spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "1"}
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    with tempfile.TemporaryDirectory() as folder:
        session.range(10).write.json(f"{folder}/rows")
        rows = session.readStream.schema("id LONG").json(f"{folder}/rows")
        counts = rows.groupBy("id").count()
        writer = counts.writeStream.outputMode("update").option("checkpointLocation", f"{folder}/checkpoint")
        query = writer.foreachBatch(lambda batch, number: batch.mapInArrow(_same, batch.schema).collect()).start()
        query.processAllAvailable()
        query.stop()
    session.stop()
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()  # Spark's JVM ends with its input
    gateway.proc.wait()


def _same(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return rows


if __name__ == "__main__":
    archive = Path(sys.argv[1])
    try:
        main(archive.absolute())
    except Exception as error:
        print(f"setup: no archive of Spark's classes, so the tests' JVMs start slower: {error}")
    archive.touch()
