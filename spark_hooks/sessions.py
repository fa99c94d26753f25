"""Spark sessions: what differs between classic Spark and Spark Connect, and the Spark that a command starts itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from state_backend.model.errors import DescriptorError

SPARK_VERSION = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
# Spark splits a range of ids into one partition per core. No application has so many cores.
SPREAD_IDS = 1 << 16


def require_spark_4(subject: str) -> None:
    """Raise DescriptorError under Spark 3.5, for what needs an interface of Spark 4.0."""
    if SPARK_VERSION < (4, 0):
        raise DescriptorError(f"{subject} needs Spark 4.0 or later, and this is Spark {pyspark.__version__}")


def check_connect(of: object) -> None:
    """Raise DescriptorError for an object of Spark Connect under Spark 3.5, whose classes are others."""
    if is_connect(of):
        require_spark_4("sparkis under Spark Connect")


def is_connect(of: object) -> bool:
    """Return whether a session, DataFrame or query belongs to Spark Connect."""
    return type(of).__module__.startswith("pyspark.sql.connect.")


def current_session() -> SparkSession:
    """Return this thread's active session, or else the process' session; create one if there is none."""
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def existing_session() -> SparkSession | None:
    """Return the current session; None if this process has no Spark."""
    if SparkSession.getActiveSession() is None and SparkContext._active_spark_context is None:
        return None
    return current_session()


def is_stopped(session: SparkSession) -> bool:
    """Return whether a session was stopped in this process."""
    if is_connect(session):
        remote: Any = session
        return bool(remote.is_stopped)
    return session.sparkContext._jsc is None


def describe_jobs(session: SparkSession, text: str) -> None:
    """Set the description of this thread's next jobs in Spark's UI. Does nothing under Spark Connect."""
    if not is_connect(session):
        session.sparkContext.setJobDescription(text)


def analyzed_plan(df: DataFrame) -> str:
    """Return a DataFrame's analyzed plan as text; Spark marks streaming relations in it with `~`."""
    if not is_connect(df):
        return str(df._jdf.queryExecution().analyzed().toString())
    explained: Any = df
    return str(explained._explain_string(extended=True)).partition("== Optimized")[0]


def execution_of(query: StreamingQuery) -> Any:
    """Return a classic query's StreamExecution in the JVM, without its wrapper if it has one."""
    running: Any = query._jsq
    return running.streamingQuery() if running.getClass().getSimpleName() == "StreamingQueryWrapper" else running


def input_partitions_of(batch: DataFrame) -> int:
    """Return a micro-batch's number of partitions; 0 if it is unknown before a run, as under Spark Connect."""
    if is_connect(batch):
        return 0
    plan: Any = batch._jdf.queryExecution().analyzed()
    return int(plan.rdd().getNumPartitions()) if plan.getClass().getSimpleName() == "LogicalRDD" else 0


def parallelism_of(session: SparkSession) -> int:
    """Return how many tasks the application runs at once; under Spark Connect this takes a small Spark job."""
    return _measured_parallelism(session) if is_connect(session) else session.sparkContext.defaultParallelism


@lru_cache(maxsize=8)
def _measured_parallelism(session: SparkSession) -> int:
    ids = session.range(SPREAD_IDS).select(F.spark_partition_id().alias("partition"))
    (found,) = ids.agg(F.max("partition")).collect()
    return int(found[0]) + 1


def start_spark(name: str, master: str, settings: Mapping[str, str]) -> SparkSession:
    """Start Spark with little output; a local one only on the loopback interface, with this Python for its workers.

    The JVM runs in its own session of the operating system, so a signal to a process group (as from service managers
    and `timeout`) reaches Python alone. Python then stops the queries and the JVM in order.
    """
    own = {
        "spark.master": master,
        "spark.app.name": name,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if master.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark's default is the python3 of the PATH
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        own |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    conf = SparkConf().setAll(list((own | dict(settings)).items()))
    gateway = launch_gateway(conf, {"start_new_session": True})  # type: ignore[no-untyped-call]
    SparkContext(conf=conf, gateway=gateway)
    return SparkSession.builder.getOrCreate()
