"""Runs hold what was put into them: sorted, and the changes of one key in their order."""

from __future__ import annotations

from unittest.mock import patch

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from state_backend.log.epochs import runs_in, slots_of_run, to_stream
from state_backend.model.records import Change, Op, changes_in, runs_of
from state_backend.model.slots import hash_position, slot_at

STATES = ("a", "b")
CHANGES = st.builds(
    Change,
    st.sampled_from(STATES),
    st.sampled_from(Op),
    st.sampled_from((b"", b"k1", b"k2", b"\xff")) | st.binary(max_size=5),
    st.none() | st.binary(max_size=5),
    st.none() | st.binary(max_size=300),
    st.none() | st.integers(-(2**63), 2**63 - 1),
)


@settings(deadline=None)
@given(st.lists(CHANGES, max_size=40), st.integers(1, 10), st.integers(1, 1000))
def test_runs_are_sorted_and_keep_order_of_each_key(changes: list[Change], rows_max: int, bytes_max: int) -> None:
    with (
        patch("state_backend.model.records.RUN_ROWS_MAX", rows_max),
        patch("state_backend.model.records.RUN_BYTES_MAX", bytes_max),
    ):
        runs = list(runs_of(changes, STATES))
    assert all(0 < run.num_rows <= rows_max for run in runs)
    for run in runs:
        positions = run.column("position").to_pylist()
        assert positions == sorted(positions) == [hash_position(change.key) for change in changes_in(run)]
        assert slots_of_run(run) == (slot_at(positions[0]), slot_at(positions[-1]), run.num_rows)
    found = [change for run in runs for change in changes_in(run)]
    for key in {change.key for change in changes}:
        assert [each for each in found if each.key == key] == [each for each in changes if each.key == key]
    assert len(found) == len(changes)


@settings(deadline=None)
@given(st.lists(CHANGES, min_size=1, max_size=40), st.integers(1, 10))
def test_runs_of_different_dictionaries_round_trip(changes: list[Change], rows_max: int) -> None:
    with patch("state_backend.model.records.RUN_ROWS_MAX", rows_max):
        runs = list(runs_of(changes, STATES)) + list(runs_of(changes, reversed(STATES)))
    given = [change for run in runs for change in changes_in(run)]
    assert [change for run in runs_in(to_stream(runs)) for change in changes_in(run)] == given
    unified = pa.Table.from_batches(runs).unify_dictionaries().to_batches()
    assert [change for run in unified for change in changes_in(run)] == given
