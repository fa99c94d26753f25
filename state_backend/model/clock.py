"""The wall clock, in one place: a request or an epoch reads it once, and tests can replace it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], int]


def now_ms() -> int:
    """Return milliseconds since 1970-01-01 UTC."""
    return time.time_ns() // 1_000_000


def iso_text(clock_ms: int) -> str:
    """Return a clock reading as ISO 8601 text in UTC, with milliseconds."""
    return datetime.fromtimestamp(clock_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
