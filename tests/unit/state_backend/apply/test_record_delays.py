"""The histogram of the times from records to readers."""

from __future__ import annotations

from typing import Any

import numpy as np

from state_backend.apply.record_delays import BOUNDS_MS, RecordDelays, joined
from state_backend.log.epochs import Epoch
from state_backend.log.record_ages import ages_of

SINCE_MS = 1_700_000_000_000
CLOCK_MS = SINCE_MS + 1000


def epoch(number: int, *ages_ms: int, term: int = 1, clock_ms: int = CLOCK_MS) -> Epoch:
    """Return an epoch whose records have these ages."""
    times = np.array([clock_ms - age_ms for age_ms in ages_ms], np.int64)
    return Epoch(number, term, None, clock_ms, record_ages=ages_of(times, clock_ms))


def counts(report: Any) -> dict[float, int]:
    """Return the buckets that have records, by their upper bounds."""
    return {bound: count for bound, count in zip((*BOUNDS_MS, float("inf")), report["counts"], strict=True) if count}


def test_delay_is_age_and_wait_from_epochs_clock_to_readers() -> None:
    delays = RecordDelays(SINCE_MS)
    assert delays.report() is None
    delays.add(epoch(0, 0, 0, 700), CLOCK_MS + 40)
    assert counts(delays.report()) == {50: 2, 1000: 1}
    delays.add(epoch(1, 10_000_000), CLOCK_MS)
    assert counts(delays.report()) == {50: 2, 1000: 1, float("inf"): 1}


def test_server_whose_clock_is_behind_counts_no_negative_wait() -> None:
    delays = RecordDelays(0)
    delays.add(epoch(0, 0), SINCE_MS - 5000)
    assert counts(delays.report()) == {10: 1}


def test_quantiles_are_those_of_last_epoch_with_records() -> None:
    delays = RecordDelays(0)
    delays.add(epoch(0, *[0] * 98, 1000, 1000), CLOCK_MS)
    delays.add(epoch(1), CLOCK_MS)
    report = delays.report()
    assert report is not None and report["p50_ms"] == 0 and 1000 <= report["p99_ms"] < 1200
    delays.add(epoch(2, *[0] * 99, 1000), CLOCK_MS + 7)
    report = delays.report()
    assert report is not None and (report["p50_ms"], report["p99_ms"]) == (7, 7)


def test_epoch_counts_once_and_not_if_it_is_older_than_process() -> None:
    delays = RecordDelays(SINCE_MS)
    delays.add(epoch(0, 0, clock_ms=SINCE_MS), SINCE_MS + 1)
    assert delays.report() is None
    for number, term in ((1, 1), (1, 1), (0, 1), (0, 2), (0, 2), (1, 1)):
        delays.add(epoch(number, 0, term=term), CLOCK_MS + 1)
    assert counts(delays.report()) == {10: 2}


def test_reports_of_two_processes_are_one_histogram_with_later_quantiles() -> None:
    one, other = RecordDelays(0), RecordDelays(0)
    one.add(epoch(0, 0), CLOCK_MS)
    other.add(epoch(1, 600), CLOCK_MS)
    both = joined(one.report(), other.report())
    assert both is not None and counts(both) == {10: 1, 1000: 1} and 600 <= both["sum_ms"] == both["p99_ms"] < 720
    assert joined(None, other.report()) == other.report() and joined(one.report(), None) == one.report()
