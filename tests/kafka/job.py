"""A Spark driver that reads a topic of Kafka, as a process that is killed.

    python -m tests.kafka.job '{"kafka": ..., "topic": ..., "log": ..., "checkpoints": ..., "provider": ...}'

Two queries count the messages of each key, add them up, and keep the last one: `sink` by sparkis' own states, and
`attached` by an aggregation of Spark's, whose checkpoint is read. Prints `{"ready": true}` when both run, and
`{"failed": message}`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkis
from tests.kafka.broker import CONNECTOR
from tests.spark.micro_batches import local_session

PROVIDER = "spark.sql.streaming.stateStore.providerClass"
STORES = "org.apache.spark.sql.execution.streaming.state"
PROVIDERS = {"hdfs": f"{STORES}.HDFSBackedStateStoreProvider", "rocksdb": f"{STORES}.RocksDBStateStoreProvider"}
SINK, ATTACHED = "sink", "attached"


@dataclass(frozen=True)
class Orders:
    """The job's options. provider: of `PROVIDERS`."""

    kafka: str
    topic: str
    log: str
    checkpoints: str
    provider: str


def messages(spark: SparkSession, orders: Orders) -> DataFrame:
    """Return the messages: their keys, their numbers, and their places."""
    source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", orders.kafka)
    read = source.option("subscribe", orders.topic).option("startingOffsets", "earliest").load()
    return read.select(
        F.col("key").cast("string").alias("k"), F.col("value").cast("string").cast("bigint").alias("n"), "offset"
    )


def start(spark: SparkSession, orders: Orders) -> None:
    """Start both queries."""
    rows = messages(spark, orders)
    sparkis.queryable(
        rows,
        sparkis.StateDescriptor("count", key="k", reduce="count"),
        sparkis.StateDescriptor("sum", key="k", value="n", reduce="sum"),
        sparkis.StateDescriptor("last", key="k", value="n", last_by="offset"),
        mode="append",
        job=SINK,
        log=orders.log,
    ).option("checkpointLocation", f"{orders.checkpoints}/{SINK}").start()
    # The numbers of a key's messages increase.
    by_key = rows.groupBy("k").agg(F.count("*").alias("count"), F.sum("n").alias("sum"), F.max("n").alias("last"))
    writer = by_key.writeStream.format("noop").outputMode("update").queryName(ATTACHED)
    query = writer.option("checkpointLocation", f"{orders.checkpoints}/{ATTACHED}").start()
    sparkis.attach(query, state="facts", log=orders.log)


def main() -> None:
    orders = Orders(**json.loads(sys.argv[1]))
    settings = {"spark.jars": ",".join(map(str, sorted(CONNECTOR.glob("*.jar")))), PROVIDER: PROVIDERS[orders.provider]}
    spark = local_session("local[2,4]", **settings)
    try:
        start(spark, orders)
        print(json.dumps({"ready": True}), flush=True)
        spark.streams.awaitAnyTermination()
    except Exception as error:  # whatever it is, it is what the test wants to read
        print(json.dumps({"failed": str(error)}), flush=True)


if __name__ == "__main__":
    main()
