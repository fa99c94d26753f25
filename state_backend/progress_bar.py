"""The progress bar of a command: on a terminal, and nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

WIDTH = 30


class ProgressBar:
    """A bar on standard error, if that is a terminal, removed at the end.

    Args:
        noun: What is counted, in the plural.
    """

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._is_shown = sys.stderr.isatty()
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def show(self, count: int, total: int) -> None:
        """Show that `count` of all are done."""
        if not self._is_shown:
            return
        full = WIDTH * min(count, total) // max(total, 1)
        text = f"[{'#' * full}{'-' * (WIDTH - full)}] {count:,} of {total:,} {self._noun}"
        if text != self._shown:
            print(f"\r{text} ", end="", file=sys.stderr, flush=True)
            self._shown = text
