"""A driver of a query without sparkis that kills itself between a micro-batch's state and its commit.

    python dying.py INPUT CHECKPOINT RUN BATCH SETTINGS

Counts the rows of each key, and keeps the greatest RUN of those that wrote it. When the sink has all results of BATCH,
all tasks have written their state. Then the process' group, with its JVM, gets SIGKILL, before Spark commits.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.spark.attaching import SCHEMA
from tests.spark.micro_batches import local_session


def main(folder: str, checkpoint: str, run: str, dies_at: str, settings: str) -> None:
    def consume(results: DataFrame, batch: int) -> None:
        results.collect()
        if batch == int(dies_at):
            os.killpg(os.getpgrp(), signal.SIGKILL)

    session = local_session("local[2]", **json.loads(settings))
    rows = session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(folder)
    counted = rows.groupBy("k").agg(F.count("*").alias("n"), F.max(F.lit(int(run))).alias("run"))
    writer = counted.writeStream.outputMode("update").foreachBatch(consume)
    writer.option("checkpointLocation", checkpoint).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
