"""The wall clock, in one place, so that tests and one reading per request or epoch are possible."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]


def now_ms() -> int:
    """Return milliseconds since 1970-01-01 UTC."""
    return time.time_ns() // 1_000_000
