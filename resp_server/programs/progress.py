"""The progress of a command: a bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

WIDTH = 30


class ProgressBar:
    """A bar on standard error, if that is a terminal. total: the count at the end. noun: of what."""

    def __init__(self, total: int, noun: str) -> None:
        self._total, self._noun = max(total, 1), noun
        self._is_shown = sys.stderr.isatty()
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def show(self, count: int) -> None:
        """Show that this many are done."""
        if not self._is_shown:
            return
        full = WIDTH * min(count, self._total) // self._total
        text = f"[{'#' * full}{'-' * (WIDTH - full)}] {count:,} of {self._total:,} {self._noun}"
        if text != self._shown:
            print(f"\r{text} ", end="", file=sys.stderr, flush=True)
            self._shown = text
