"""The wall clock, in one place: a request or an epoch reads it once, and tests can replace it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date, timedelta

Clock = Callable[[], int]
MS_PER_S = 1000
MS_PER_MINUTE = 60_000
DAY_MS = 86_400_000
# The last day that Python's dates have, and the days of 400 years, after which the calendar repeats.
LAST_DAY = (date.max - date(1970, 1, 1)).days
CYCLE_DAYS = 146_097


def now_ms() -> int:
    """Return milliseconds since 1970-01-01 UTC."""
    return time.time_ns() // 1_000_000


def iso_text(clock_ms: int) -> str:
    """Return a clock reading, or a watermark, as ISO 8601 text in UTC, with milliseconds."""
    days, rest = divmod(clock_ms, DAY_MS)
    if days > LAST_DAY:  # beyond Python's years
        cycles, days = divmod(days, CYCLE_DAYS)
        year, _, others = str(date(1970, 1, 1) + timedelta(days)).partition("-")
        day = f"+{int(year) + 400 * cycles}-{others}"
    else:
        day = str(date(1970, 1, 1) + timedelta(days))
    seconds, milliseconds = divmod(rest, MS_PER_S)
    return f"{day}T{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{milliseconds:03}Z"
