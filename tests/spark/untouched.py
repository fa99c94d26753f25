"""A driver of a query without sparkis, as a process, to be killed.

    python untouched.py INPUT CHECKPOINT

Counts the rows of each key, a file a micro-batch. Prints "started"; runs until it is killed.
"""

from __future__ import annotations

import sys

from pyspark.sql import functions as F

from tests.spark.attaching import SCHEMA
from tests.spark.micro_batches import local_session


def main(folder: str, checkpoint: str) -> None:
    rows = local_session("local[2]").readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(folder)
    counted = rows.groupBy("k").agg(F.count("*").alias("n"))
    writer = counted.writeStream.outputMode("update").format("noop").option("checkpointLocation", checkpoint)
    query = writer.start()
    print("started", flush=True)
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
