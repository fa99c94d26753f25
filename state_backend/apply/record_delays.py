"""The time from records to the moment at which clients of this server can read them, as a histogram.

An epoch has the ages of its records at its clock reading (see `record_ages`). The time from there to the end of its
transaction in the readers' store is added to each. An epoch counts once, and only if it was committed while this
process followed the log: epochs that a server applies to catch up say nothing about readers of other servers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from state_backend.log.epochs import Epoch, EpochRef
from state_backend.log.record_ages import RecordAges, bound_ms

# The upper bounds of the histogram's buckets; one more has all above.
BOUNDS_MS = (10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 300_000, 3_600_000)
QUANTILES = {"p50_ms": 0.5, "p99_ms": 0.99}


class RecordDelays:
    """The histogram of one process.

    Args:
        since_ms: Only epochs with a later clock reading count.
    """

    def __init__(self, since_ms: int) -> None:
        self._since_ms = since_ms
        self._last = EpochRef(-1, -1)
        self._counts = [0] * (len(BOUNDS_MS) + 1)
        self._sum_ms = 0.0
        self._quantiles: Mapping[str, int] = {}

    def add(self, epoch: Epoch, now_ms: int) -> None:
        """Count the records of an epoch that has become readable."""
        is_old = epoch.clock_ms <= self._since_ms or (epoch.term, epoch.epoch) <= (self._last.term, self._last.epoch)
        if is_old or not epoch.record_ages:
            return
        self._last = epoch.ref
        delays = delays_of(epoch.record_ages, max(0, now_ms - epoch.clock_ms))
        for delay_ms, count in delays:
            self._counts[bisect_left(BOUNDS_MS, delay_ms)] += count
            self._sum_ms += delay_ms * count
        self._quantiles = {name: quantile_of(delays, share) for name, share in QUANTILES.items()}

    def report(self) -> Mapping[str, Any] | None:
        """Return the histogram as JSON, with the quantiles of the last epoch that has ages; None before there is one.

        `counts`: the number of records in each bucket. `sum_ms`: the sum of their delays.
        """
        if not self._quantiles:
            return None
        return {"counts": list(self._counts), "sum_ms": round(self._sum_ms), **self._quantiles}


def delays_of(ages: RecordAges, waited_ms: int) -> list[tuple[float, int]]:
    """Return (delay in ms, number of records), from the shortest delay on."""
    return [(bound_ms(bucket) + waited_ms, count) for bucket, count in sorted(ages.items())]


def quantile_of(delays: list[tuple[float, int]], share: float) -> int:
    """Return a delay that this share of the records does not exceed; at least one delay."""
    totals = list(accumulate(count for _, count in delays))
    return round(
        next(delay_ms for (delay_ms, _), total in zip(delays, totals, strict=True) if total >= share * totals[-1])
    )


def joined(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the reports of two processes, one after the other, as one report."""
    if one is None or other is None:
        return one or other
    counts = [before + after for before, after in zip(one["counts"], other["counts"], strict=True)]
    return {**other, "counts": counts, "sum_ms": one["sum_ms"] + other["sum_ms"]}
