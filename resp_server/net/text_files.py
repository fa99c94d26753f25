"""Reads files that may be named pipes, such as those of passwords."""

from __future__ import annotations

import signal
from pathlib import Path
from threading import current_thread, main_thread

# The time after which a read that waits is interrupted again (guess).
INTERRUPT_S = 0.1


def read_text(path: str) -> str:
    """Return the text of a file. A signal ends the read, also if it arrives right before the program begins to wait.

    Python runs the handler of such a signal when the system call returns, and nobody may ever write to a named pipe. So
    a timer interrupts the call.
    """
    if current_thread() is not main_thread():  # it gets no signals
        return Path(path).read_text(encoding="utf-8")
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, INTERRUPT_S, INTERRUPT_S)
    try:
        return Path(path).read_text(encoding="utf-8")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
