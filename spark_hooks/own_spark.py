"""The Spark of a command that starts one of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession


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
