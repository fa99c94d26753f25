"""A Spark driver as a process, to be killed: it counts the rows of files, one file per micro-batch.

    python driver.py '{"input": ..., "log": ..., "checkpoint": ..., ...}'

Prints one JSON object a line: {"ready": port of its server or null}, then {"failed": message} if the query fails. Runs
until it is killed or its input ends.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkis
from sparkis import LogWriter

JOB = "job"


@dataclass(frozen=True)
class Orders:
    """A driver's options.

    input, log, checkpoint   folders
    port       where its own server listens; None for no server
    store      the server's folder
    dies       [when, epoch]: `before` or `after` the commit of that epoch, as if the machine had lost its power
    rewinds    what to do when the checkpoint was set back
    reduces    the rows are counted by reducing states, and not by Spark
    takeover   take the job over from another driver that runs
    """

    input: str
    log: str
    checkpoint: str
    port: int | None = None
    store: str | None = None
    dies: tuple[str, int] | None = None
    rewinds: str = "refuse"
    reduces: bool = False
    takeover: bool = False


def session() -> SparkSession:
    """Start Spark on two cores; a task may fail three times (by default it may not, on a local master)."""
    builder = SparkSession.builder.master("local[2,4]").appName("sparkis adversity")
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    return made


def rows(spark: SparkSession, folder: str) -> DataFrame:
    return spark.readStream.schema("k string, file int").option("maxFilesPerTrigger", 1).json(folder)


def counts(spark: SparkSession, folder: str) -> DataFrame:
    """Return, for each key, how many rows it had and the last file that named it."""
    return rows(spark, folder).groupBy("k").agg(F.count("*").alias("n"), F.max("file").alias("last"))


def states(reduces: bool = False) -> list[sparkis.StateDescriptor]:
    if reduces:
        return [
            sparkis.StateDescriptor("n", key="k", reduce="count"),
            sparkis.StateDescriptor("last", key="k", value="file", reduce="max"),
        ]
    return [
        sparkis.StateDescriptor("n", key="k", value="n"),
        sparkis.StateDescriptor("both", key="k", value=["n", "last"]),
    ]


def die_at(when: str, epoch: int) -> None:
    """End this process without clean-up, before or after the commit of an epoch."""
    commit = LogWriter.commit

    def deadly(self: LogWriter, number: int, *given: Any, **named: Any) -> bool:
        if number == epoch and when == "before":
            os._exit(9)
        done = commit(self, number, *given, **named)
        if number == epoch and when == "after":
            os._exit(9)
        return done

    LogWriter.commit = deadly  # type: ignore[method-assign]


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    orders = Orders(**json.loads(sys.argv[1]))
    if orders.dies is not None:
        die_at(*orders.dies)
    spark = session()
    endpoint = None
    if orders.port is not None:
        place = sparkis.Driver(store=orders.store, linger=0)
        endpoint = sparkis.serve(spark, log=orders.log, port=orders.port, placement=place)
    writer = sparkis.queryable(
        (rows if orders.reduces else counts)(spark, orders.input),
        *states(orders.reduces),
        mode="update",
        job=JOB,
        log=orders.log,
        on_rewind=orders.rewinds,  # type: ignore[arg-type]
        takeover=orders.takeover,
    )
    try:
        query = writer.option("checkpointLocation", orders.checkpoint).start()
        say(ready=endpoint.port if endpoint else None)
        query.awaitTermination()
    except Exception as error:  # whatever it is, it is what the test wants to read
        say(failed=str(error))


if __name__ == "__main__":
    main()
