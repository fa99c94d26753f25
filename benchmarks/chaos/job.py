"""The driver of the chaos: a job on executors, each epoch of which writes its number to all keys, and `sparkis.serve`.

    python -m benchmarks.chaos.job --log ROOT --checkpoint FOLDER --replicas 1
    python -m benchmarks.chaos.job --log ROOT --checkpoint FOLDER --master spark://10.0.0.1:7077 --host 10.0.0.2

With --master it runs on that cluster, and serves nothing: others serve the log. It prints a line of JSON when it has
started, and one for each command on its standard input: `lose` ends an executor, `gain` requests another one. It ends
with its standard input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

import sparkis
from benchmarks.chaos.judge import FIELDS, GROUPS, JOB, PAIR, STATE

EXECUTORS = 2
PERIOD_MS = 1000
ROWS = 2 * GROUPS


def session(master: str, host: str) -> SparkSession:
    """Start Spark."""
    spark = (
        SparkSession.builder.master(master)
        .appName("sparkis chaos")
        .config("spark.executor.memory", "512m")
        .config("spark.driver.host", host)
        .config("spark.driver.bindAddress", host)
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", str(EXECUTORS))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def start(spark: SparkSession, log: str, checkpoint: str) -> None:
    """Start the query."""
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("numPartitions", 2).load()
    number = sf.col("value")
    group, member = (
        (number % GROUPS).cast("string"),
        sf.when((number / GROUPS).cast("long") % 2 == 0, "a").otherwise("b"),
    )
    keyed = rows.select(
        sf.concat(sf.lit("{"), group, sf.lit("}"), member).alias("key"), (number / ROWS).cast("long").alias("epoch")
    )
    text = sf.concat(sf.col("epoch"), sf.lit(" "), sf.col("key"))
    valued = keyed.select("key", text.alias("value"), *(text.alias(name) for name in FIELDS))
    states = [
        sparkis.StateDescriptor(STATE, key="key", value="value"),
        sparkis.StateDescriptor(PAIR, key="key", value=FIELDS),
    ]
    writer = sparkis.queryable(valued, *states, mode="append", log=log)
    writer.queryName(JOB).option("checkpointLocation", checkpoint).trigger(
        processingTime=f"{PERIOD_MS} milliseconds"
    ).start()


def main() -> int:
    """Run the job until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--master")
    parser.add_argument("--host", default="127.0.0.1", help="the address at which executors reach this driver")
    given = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", given.host)
    spark = session(given.master or f"local-cluster[{EXECUTORS},1,512]", given.host)
    url = None if given.master else sparkis.serve(spark, log=given.log, replicas=given.replicas).url
    start(spark, given.log, given.checkpoint)
    print(json.dumps({"event": "started", "url": url, "pid": os.getpid()}), flush=True)
    context = spark.sparkContext._jsc.sc()
    for line in sys.stdin:
        # Spark counts the requested executors less the killed ones, so after a loss the full number is requested again.
        executors = sorted(context.getExecutorIds().mkString(",").split(","))
        done = context.killExecutor(executors[0]) if line.strip() == "lose" else context.requestExecutors(EXECUTORS)
        print(json.dumps({"event": line.strip(), "done": bool(done), "executors": executors}), flush=True)
    os._exit(0)  # ends like a killed driver, without waiting for Spark; all processes that it started end by themselves


if __name__ == "__main__":
    sys.exit(main())
