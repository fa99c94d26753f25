"""The process of a command: the signals that end it, its standard error, the folder of its files."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TextIO


class EndSignal:
    """Records whether SIGINT (Ctrl-C) or SIGTERM has arrived, so that a command ends without a traceback.

    The main thread creates it.
    """

    def __init__(self) -> None:
        # A handler may run while this thread waits, or within another handler: then an Event's lock is held already.
        self._received: SimpleQueue[int] = SimpleQueue()
        # When a query is stopped within a batch, py4j logs broken connections to the JVM, which are expected.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        self.install()

    def install(self) -> None:
        """Install the signal handlers. To be called again after a SparkContext was created, which handles SIGINT."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self._received.put(number))

    def is_set(self) -> bool:
        """Return whether a signal has arrived."""
        return not self._received.empty()

    def wait(self, seconds_max: float | None = None) -> bool:
        """Wait until a signal arrives; False after `seconds_max`."""
        try:
            self._received.put(self._received.get(timeout=seconds_max))  # it stays for the next call
        except Empty:
            return False
        return True


@contextmanager
def standard_error_in(file: Path) -> Iterator[TextIO]:
    """Send what this process and its children write to standard error into a file; yield the former standard error.

    The file is truncated first. OSError if it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    sys.stderr.flush()
    former = os.dup(2)
    os.dup2(target, 2)
    os.close(target)
    try:
        with open(former, "w", buffering=1, closefd=False) as terminal:
            yield terminal
    finally:
        sys.stderr.flush()
        os.dup2(former, 2)
        os.close(former)


def state_folder() -> Path:
    """Return the folder of files that stay between runs, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "sparkis")
