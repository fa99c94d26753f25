"""The ages of records in an epoch's file."""

from __future__ import annotations

import numpy as np
import pytest

from state_backend.log.epochs import Epoch
from state_backend.log.record_ages import BUCKET_MAX, RecordAges, ages_of, bound_ms, total_of

CLOCK_MS = 1_700_000_000_000


def ages(*ages_ms: int) -> RecordAges:
    """Count records of these ages."""
    return ages_of(np.array([CLOCK_MS - age_ms for age_ms in ages_ms], np.int64), CLOCK_MS)


@pytest.mark.parametrize("age_ms", [0, 1, 2, 9, 100, 999, 1000, 1001, 86_400_000, 2**39])
def test_bound_of_bucket_is_at_most_fifth_above_age(age_ms: int) -> None:
    [(bucket, count)] = ages(age_ms).items()
    assert count == 1 and age_ms <= bound_ms(bucket) + 1e-3 <= (age_ms + 1) * 2**0.25


def test_future_records_have_no_age_and_old_ones_last_bucket() -> None:
    assert ages(-1, -86_400_000, 0) == {0: 3}
    assert ages(CLOCK_MS, 2 * CLOCK_MS) == {BUCKET_MAX: 2}


def test_counts_of_parts_are_added_up() -> None:
    parts = [ages(), ages(0, 1, 500), ages(500)]
    assert total_of(parts) == ages(0, 1, 500, 500)
    assert total_of([]) == {}


def test_reread_epoch_keeps_ages_or_none() -> None:
    epoch = Epoch(1, 1, None, CLOCK_MS, record_ages=ages(0, 1, 500))
    assert Epoch.from_bytes(epoch.to_bytes(), "") == epoch
    unknown = Epoch(1, 1, None, CLOCK_MS)
    assert b"record_ages" not in unknown.to_bytes() and Epoch.from_bytes(unknown.to_bytes(), "") == unknown
