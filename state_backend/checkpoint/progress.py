"""The progress bar of commands that read a whole checkpoint: on stderr, and only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WIDTH = 40


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many of all partitions have been read. The bar is removed after the block."""
    terminal = sys.stderr if sys.stderr.isatty() else None

    def show(done: int, total: int) -> None:
        if terminal is not None and total:
            bar = "#" * (WIDTH * done // total)
            print(f"\r[{bar:<{WIDTH}}] {done} of {total} partitions", end="", file=terminal, flush=True)

    try:
        yield show
    finally:
        if terminal is not None:
            print("\r\x1b[K", end="", file=terminal, flush=True)
