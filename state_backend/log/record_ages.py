"""The ages of an epoch's records: from a record's timestamp to the epoch's clock reading.

A sink with `record_time=` counts them in buckets, and an epoch's file has the counts as `record_ages`. A server that
makes the epoch readable adds the time since the clock reading (see `record_delays`).

Bucket N has the ages of up to 2^(N/4) - 1 ms that bucket N-1 has not, so a bound is at most 19 % above an age. A record
from the future has the age 0, because clocks of machines differ. The last bucket has all ages above 34 years.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The number of records of each bucket that has some.
RecordAges = Mapping[int, int]

BUCKETS_PER_DOUBLING = 4
BUCKET_MAX = 160


def ages_of(times_ms: npt.NDArray[np.int64], clock_ms: int) -> RecordAges:
    """Count the ages of records.

    Args:
        times_ms: The time of each record, in milliseconds since 1970 UTC.
        clock_ms: The epoch's clock reading.
    """
    import numpy as np

    ages = np.maximum(clock_ms - times_ms.astype(np.float64), 0)
    buckets = np.minimum(np.ceil(BUCKETS_PER_DOUBLING * np.log2(ages + 1)), BUCKET_MAX)
    found, counts = np.unique(buckets.astype(np.int64), return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def total_of(parts: Iterable[RecordAges]) -> RecordAges:
    """Return the counts of all parts of an epoch."""
    total = Counter[int]()
    for part in parts:
        total.update(part)
    return dict(sorted(total.items()))


def ages_json(ages: RecordAges) -> dict[str, int]:
    """Return the counts as a JSON object."""
    return {str(bucket): count for bucket, count in ages.items()}


def ages_in(stored: Mapping[str, int]) -> RecordAges:
    """Read a JSON object of `ages_json`."""
    return {int(bucket): count for bucket, count in stored.items()}


def bound_ms(bucket: int) -> float:
    """Return the largest age of a bucket."""
    return float(2 ** (bucket / BUCKETS_PER_DOUBLING) - 1)
