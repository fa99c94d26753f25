"""A user's script, which a test checks with mypy and never runs."""

from datetime import timedelta

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import sparkis
from sparkis import Change, Kind, LogWriter, Op, Snapshot, StateDescriptor


def served(spark: SparkSession) -> str:
    with sparkis.serve(spark, log="/log", port=7379, workers=2) as endpoint:
        port: int = endpoint.port
        log: str = endpoint.log
        url: str = endpoint.url
    return f"{url} {port} {log}"


def published(df: DataFrame) -> StreamingQuery:
    state = StateDescriptor("top", key="day", member="player", score="points", ttl=timedelta(days=1))
    kind: Kind = state.kind
    by: sparkis.By | None = state.by
    late: sparkis.Late = state.late
    writer: DataStreamWriter = sparkis.queryable(df, state, mode="append", wait_for_visibility=2.0)
    return writer.queryName(f"{kind} {by} {late}").option("checkpointLocation", "/checkpoint").start()


def published_by_hand(batch: DataFrame, batch_id: int) -> None:
    sparkis.publish(batch, batch_id, "last", key="sensor", value="temp", reduce="max", job="sensors")


def a_table(df: DataFrame) -> int:
    return sparkis.publish_table(df, "limits", field="sensor", value="limit", job="rules")


def attached(query: StreamingQuery, processor: StatefulProcessor) -> bool:
    declared: sparkis.QueryableProcessor = sparkis.queryable_processor(processor, states={"last": "lastTemp"})
    first: sparkis.AttachedState = declared.states[0]
    with sparkis.attach(query, states=[first], job="sensors") as attachment:
        batch: int = attachment.batch
        error: Exception | None = attachment.error
        return attachment.wait(batch, timeout_s=5.0) and error is None


def a_place(df: DataFrame) -> DataFrame:
    score: Column = sparkis.geo_score("lon", df["lat"])
    return df.withColumn("score", score)


def without_spark(root: str) -> bytes | None:
    with LogWriter(root, "market", [StateDescriptor("price", key="ticker", value="price")]) as writer:
        epoch: int = writer.publish([Change("price", Op.PUT, b"market:price:ACME", value=b"12.5")])
    with sparkis.read_snapshot(root, "market", epoch) as snapshot:
        return value_of(snapshot)


def value_of(snapshot: Snapshot) -> bytes | None:
    return snapshot.value(b"market:price:ACME")


def refused(df: DataFrame) -> str:
    try:
        published(df).awaitTermination()
    except (sparkis.DescriptorError, sparkis.JobInUseError, sparkis.RowError, sparkis.QueryFailedError) as error:
        as_any_of_sparkis: sparkis.SparkisError = error
        return str(as_any_of_sparkis)
    return sparkis.__version__
