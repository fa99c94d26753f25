"""A Spark driver that reads a topic of Kafka, as a process that is killed.

    python -m tests.kafka.job '{"kafka": ..., "topic": ..., "log": ..., "checkpoints": ..., "provider": ...}'

Two queries count the messages of each key, add them up, and keep the last one: `sink` by sparkis' own states, and
`attached` by an aggregation of Spark's, whose checkpoint is read. With `"real_time": "2 seconds"` the only query is
`attached`, in Real-Time Mode with batches of this length; with `"rows_port": 1234` a `RowReceiver` gets its
rows, with `"servers": "redis://..."` these servers. Prints `{"ready": true}` when all run, and `{"failed": message}`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkis
from compat.waiting import WAIT_S_MAX
from spark_hooks.real_time.servers import SERVERS_SETTING
from tests.kafka.broker import CONNECTOR
from tests.kafka.row_receiver import row_sender_jar
from tests.spark.micro_batches import local_session

PROVIDER = "spark.sql.streaming.stateStore.providerClass"
STORES = "org.apache.spark.sql.execution.streaming.state"
PROVIDERS = {"hdfs": f"{STORES}.HDFSBackedStateStoreProvider", "rocksdb": f"{STORES}.RocksDBStateStoreProvider"}
FOR_REAL_TIME = {
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
    "spark.sql.streaming.realTimeMode.minBatchDuration": "1s",
    "spark.sql.streaming.minBatchesToRetain": "1000000",
}
SINK, ATTACHED = "sink", "attached"


@dataclass(frozen=True)
class Orders:
    """The job's options.

    provider: of `PROVIDERS`. real_time: the length of a batch in Real-Time Mode; empty: in micro-batches. rows_port:
    that of a `RowReceiver`; 0: the results of Real-Time Mode go to another topic. servers: their URLs; they show these
        results before their commit.
    """

    kafka: str
    topic: str
    log: str
    checkpoints: str
    provider: str
    real_time: str = ""
    rows_port: int = 0
    servers: str = ""


def messages(spark: SparkSession, orders: Orders) -> DataFrame:
    """Return the messages: their keys, their numbers, and their places."""
    source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", orders.kafka)
    read = source.option("subscribe", orders.topic).option("startingOffsets", "earliest").load()
    return read.select(
        F.col("key").cast("string").alias("k"), F.col("value").cast("string").cast("bigint").alias("n"), "offset"
    )


def by_key(rows: DataFrame) -> DataFrame:
    """Return the facts of each key. The numbers of a key's messages increase."""
    return rows.groupBy("k").agg(F.count("*").alias("count"), F.sum("n").alias("sum"), F.max("n").alias("last"))


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
    writer = by_key(rows).writeStream.format("noop").outputMode("update").queryName(ATTACHED)
    query = writer.option("checkpointLocation", f"{orders.checkpoints}/{ATTACHED}").start()
    sparkis.attach(query, state="facts", log=orders.log, timeout_s=WAIT_S_MAX)


def start_real_time(spark: SparkSession, orders: Orders) -> None:
    """Start the query in Real-Time Mode; its results go to another topic, or to a `RowReceiver`."""
    results = by_key(messages(spark, orders))
    if orders.servers:
        spark.conf.set(SERVERS_SETTING, orders.servers)
        value = ["count", "sum", "last"]
        writer = sparkis.queryable(results, "facts", key="k", value=value, freshness="record", log=orders.log)
    elif orders.rows_port:
        writer = results.writeStream
        jvm: Any = spark._jvm
        writer._jwrite.foreach(jvm.tests.RowSender("127.0.0.1", orders.rows_port, uuid4().hex))
    else:
        writer = results.select(F.to_json(F.struct("*")).alias("value")).writeStream.format("kafka")
        writer = writer.option("kafka.bootstrap.servers", orders.kafka).option("topic", f"{orders.topic}-results")
    writer = writer.outputMode("update").queryName(ATTACHED)
    writer = writer.option("checkpointLocation", f"{orders.checkpoints}/{ATTACHED}")
    trigger: Any = {"realTime": orders.real_time}
    writer.trigger(**trigger).start()


def main() -> None:
    orders = Orders(**json.loads(sys.argv[1]))
    jars = [*sorted(CONNECTOR.glob("*.jar")), *([row_sender_jar()] if orders.rows_port else [])]
    settings = {"spark.jars": ",".join(map(str, jars)), PROVIDER: PROVIDERS[orders.provider]}
    # In Real-Time Mode, the tasks of all stages run at the same time.
    spark = local_session(
        "local[8,4]" if orders.real_time else "local[2,4]", **settings | (FOR_REAL_TIME if orders.real_time else {})
    )
    try:
        (start_real_time if orders.real_time else start)(spark, orders)
        print(json.dumps({"ready": True}), flush=True)
        spark.streams.awaitAnyTermination()
    except Exception as error:  # whatever it is, it is what the test wants to read
        print(json.dumps({"failed": str(error)}), flush=True)


if __name__ == "__main__":
    main()
