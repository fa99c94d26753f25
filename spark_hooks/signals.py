"""The handling of SIGINT (Ctrl-C) and SIGTERM in programs with a Spark of their own: they end without a traceback."""

from __future__ import annotations

import logging
import signal
import threading


class EndSignal:
    """Records whether SIGINT or SIGTERM has arrived. The main thread creates it and calls `take`."""

    def __init__(self) -> None:
        self._came = threading.Event()
        # When a query is stopped within a batch, py4j logs its broken connections to the JVM; the user need not see
        # that.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        self.take()

    def take(self) -> None:
        """Install the signal handlers; again after a SparkContext was created, which installs its own for SIGINT."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._came.set())

    def is_set(self) -> bool:
        """Tell whether a signal has arrived."""
        return self._came.is_set()

    def wait(self, seconds_max: float | None = None) -> bool:
        """Wait until a signal arrives; False after `seconds_max`."""
        return self._came.wait(seconds_max)
