"""SIGINT (Ctrl-C) and SIGTERM of a command, without a traceback."""

from __future__ import annotations

import logging
import signal
import threading


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
