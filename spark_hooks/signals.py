"""How a program that runs a Spark of its own is told to end: by SIGINT (Ctrl-C) or SIGTERM, and without a trace."""

from __future__ import annotations

import logging
import signal
import threading


class EndSignal:
    """Takes SIGINT and SIGTERM, and tells whether one came. The main thread makes it, and calls `take`."""

    def __init__(self) -> None:
        self._came = threading.Event()
        # Its connections to the JVM break when a query is stopped in the middle of a batch: no news to whoever ends it.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        self.take()

    def take(self) -> None:
        """Take the signals; again after a SparkContext was made, which takes SIGINT itself to raise inside of calls."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._came.set())

    def is_set(self) -> bool:
        """Tell whether this process was told to end."""
        return self._came.is_set()

    def wait(self, seconds_max: float | None = None) -> bool:
        """Wait until this process is told to end, or that long; return whether it is."""
        return self._came.wait(seconds_max)
