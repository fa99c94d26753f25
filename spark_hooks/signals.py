"""SIGINT (Ctrl-C) and SIGTERM in programs that start a Spark of their own: they end in order, without a traceback."""

from __future__ import annotations

import logging
import signal
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
        """Install the signal handlers. Call it again after a SparkContext was created, which handles SIGINT itself."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._received.set())

    def is_set(self) -> bool:
        """Tell whether a signal has arrived."""
        return self._received.is_set()

    def wait(self, seconds_max: float | None = None) -> bool:
        """Wait until a signal arrives; False after `seconds_max`."""
        return self._received.wait(seconds_max)


def start_spark(settings: Mapping[str, str]) -> SparkSession:
    """Start Spark, its JVM in a session of its own: a signal to a process group then reaches Python alone.

    Service managers and `timeout` signal the group. Python stops the queries and the JVM in order.
    """
    conf = SparkConf().setAll(list(settings.items()))
    gateway = launch_gateway(conf, {"start_new_session": True})  # type: ignore[no-untyped-call]
    SparkContext(conf=conf, gateway=gateway)
    return SparkSession.builder.getOrCreate()
