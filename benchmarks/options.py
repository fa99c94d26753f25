"""The options of a run, and its progress line."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The options that all parts share.

    is_full: also measures that take many minutes or much memory. is_written: results are stored. rows: which rows of
    `commands` are measured; None: all.
    """

    rounds: int = 5
    keys: int = 100_000
    scale: float = 1.0
    is_full: bool = False
    is_written: bool = True
    rows: re.Pattern[str] | None = None

    def report(self, text: str) -> None:
        """Show the progress, on a terminal only."""
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
