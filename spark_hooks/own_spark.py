"""For commands that start a Spark of their own: its session, and SIGINT (Ctrl-C) and SIGTERM without a traceback."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession


class EndSignal:
    """Records whether SIGINT or SIGTERM has arrived. The main thread creates it and calls `install`."""

    def __init__(self) -> None:
        self._received = threading.Event()
        # When a query is stopped within a batch, py4j logs broken connections to the JVM, which are expected.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        self.install()

    def install(self) -> None:
        """Install the signal handlers. To be called again after a SparkContext was created, which handles SIGINT."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._received.set())

    def is_set(self) -> bool:
        """Tell whether a signal has arrived."""
        return self._received.is_set()

    def wait(self, seconds_max: float | None = None) -> bool:
        """Wait until a signal arrives; False after `seconds_max`."""
        return self._received.wait(seconds_max)


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
