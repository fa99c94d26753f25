"""The steps of a request are timed where they happen."""

from __future__ import annotations

from benchmarks import split
from benchmarks.options import Options


def test_the_steps_of_a_request_make_up_the_whole() -> None:
    rows = list(split.run(Options(rounds=1, keys=2_000, scale=0.02)))
    assert len(rows) == len(split.PIPELINES) * 5
    for depth in split.PIPELINES:
        found = {row.name.partition(": ")[2]: row.ours for row in rows if row.name.startswith(f"pipeline {depth}: ")}
        whole = found.pop("whole")
        assert all(found[step] > 0 for step in (split.LOOK_UP, split.WRITE))
        assert (found[split.PARSE] > 0) == (depth > 1)  # what comes alone and is ready is found as it was sent
        assert whole > 0
        assert set(found) == {split.PARSE, split.LOOK_UP, split.WRITE, split.REST}
