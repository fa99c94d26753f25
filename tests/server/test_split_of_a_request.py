"""The steps of a request are timed where they happen."""

from __future__ import annotations

import pytest

from benchmarks import split
from benchmarks.options import Options


@pytest.mark.compiled
def test_steps_of_request_make_up_whole() -> None:
    rows = list(split.run(Options(rounds=1, keys=2_000, scale=0.02)))
    assert len(rows) == len(split.PIPELINES) * 6
    for depth in split.PIPELINES:
        found = {row.name.partition(": ")[2]: row.ours for row in rows if row.name.startswith(f"pipeline {depth}: ")}
        assert set(found) == {split.ANSWER, split.RENEW, split.WRITE, split.REST, split.WHOLE, split.IN_PYTHON}
        assert all(found[step] > 0 for step in (split.ANSWER, split.RENEW, split.WRITE, split.WHOLE, split.IN_PYTHON))
