"""What a run was asked for, and where it shows what it is doing."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The options that all parts share. `is_full`: what takes many minutes or much memory, too."""

    rounds: int = 5
    keys: int = 100_000
    scale: float = 1.0
    is_full: bool = False

    def report(self, text: str) -> None:
        """Show what is going on, on a terminal only."""
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def end_in_order() -> None:
    """Make SIGTERM an exception: what was started is ended, and files are removed, as with Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
