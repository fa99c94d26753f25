"""What a classic Spark session and one of Spark Connect do in different ways; all else is written once for both."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

# More ids than any Spark has cores; a range of them is spread over as many partitions as the application has cores.
SPREAD_IDS = 1 << 16


def is_connect(of: object) -> bool:
    """Tell whether a session, a DataFrame or a query is one of Spark Connect."""
    return type(of).__module__.startswith("pyspark.sql.connect.")


def session_at_hand() -> SparkSession:
    """Return the session that this thread works with, else the one of this process; a classic one if there is none."""
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def is_stopped(session: SparkSession) -> bool:
    """Tell whether a session's Spark was stopped, by whom that may be done in this process."""
    if is_connect(session):
        remote: Any = session
        return bool(remote.is_stopped)
    return session.sparkContext._jsc is None


def describe_jobs(session: SparkSession, text: str) -> None:
    """Say in Spark's UI what this thread's next jobs are for; under Spark Connect there is no such place."""
    if not is_connect(session):
        session.sparkContext.setJobDescription(text)


def analyzed_plan(df: DataFrame) -> str:
    """Return what Spark makes of a DataFrame's columns and tables, as text; `~` stands before what is streaming."""
    if not is_connect(df):
        return str(df._jdf.queryExecution().analyzed().toString())
    explained: Any = df
    return str(explained._explain_string(extended=True)).partition("== Optimized")[0]


def execution_of(query: StreamingQuery) -> Any:
    """Return what runs a classic query in the JVM: it is behind what `start` returns, or that itself."""
    running: Any = query._jsq
    return running.streamingQuery() if running.getClass().getSimpleName() == "StreamingQueryWrapper" else running


def input_partitions_of(batch: DataFrame) -> int:
    """Return in how many partitions a micro-batch arrives; 0 if only running it would tell, as under Spark Connect."""
    if is_connect(batch):
        return 0
    plan: Any = batch._jdf.queryExecution().analyzed()
    return int(plan.rdd().getNumPartitions()) if plan.getClass().getSimpleName() == "LogicalRDD" else 0


def parallelism_of(session: SparkSession) -> int:
    """Return how many tasks the application runs at once. Under Spark Connect a small Spark job finds out."""
    return _found_parallelism(session) if is_connect(session) else session.sparkContext.defaultParallelism


@lru_cache(maxsize=8)
def _found_parallelism(session: SparkSession) -> int:
    ids = session.range(SPREAD_IDS).select(F.spark_partition_id().alias("partition"))
    (found,) = ids.agg(F.max("partition")).collect()
    return int(found[0]) + 1
