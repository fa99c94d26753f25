"""Offsets of two checkpoints are compared where they count what the source counts, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from state_backend.log.source_offsets import have_passed


def passed(now: Any, before: Any) -> bool:
    return have_passed([json.dumps(now)], [json.dumps(before)])


def delta(version: int, index: int, table: str = "a") -> dict[str, Any]:
    counted = {"sourceVersion": 1, "reservoirId": table, "reservoirVersion": version, "index": index}
    return counted | {"isStartingVersion": False}


@pytest.mark.parametrize(
    ("now", "before", "is_passed"),
    [
        ({"t": {"0": 5, "1": 7}}, {"t": {"0": 5, "1": 7}}, True),
        ({"t": {"0": 9, "1": 7, "2": 0}, "u": {"0": 1}}, {"t": {"0": 5, "1": 7}}, True),
        ({"t": {"0": 9, "1": 6}}, {"t": {"0": 5, "1": 7}}, False),
        ({"t": {"0": 9}}, {"t": {"0": 5, "1": 7}}, False),
        ({"u": {"0": 9}}, {"t": {"0": 5}}, False),
        (delta(8, -1), delta(7, 3), True),
        (delta(7, 2), delta(7, 3), False),
        (delta(9, 2, "b"), delta(7, 3), False),
        ({"logOffset": 9}, {"logOffset": 5}, False),
        (9, 5, False),
        ({"version": 1, "snapshot_id": 9, "position": 1}, {"version": 1, "snapshot_id": 5, "position": 1}, False),
        ({"offset": 9}, {"offset": 5}, False),
        ({"t": {"0": True}}, {"t": {"0": 0}}, False),
        ({"t": {"shard": 9}}, {"t": {"shard": 5}}, False),
        ({}, {}, False),
        (None, None, False),
    ],
)
def test_only_offsets_of_same_unit_are_compared(now: Any, before: Any, is_passed: bool) -> None:
    assert passed(now, before) is is_passed


def test_every_source_has_to_be_as_far() -> None:
    before = ['{"t":{"0":5}}', '{"u":{"0":5}}']
    assert have_passed(['{"t":{"0":5}}', '{"u":{"0":5}}'], before)
    assert not have_passed(['{"t":{"0":5}}', '{"u":{"0":4}}'], before)
    assert not have_passed(['{"t":{"0":5}}', "-"], before)
    assert not have_passed(['{"t":{"0":5}}', '{"logOffset":9}'], ['{"t":{"0":5}}', '{"logOffset":5}'])
    assert not have_passed(['{"t":{"0":5}}'], before)
    assert not have_passed([], [])


def test_named_sources_are_compared_by_their_names() -> None:
    before = ['a:{"t":{"0":5}}', 'b:{"u":{"0":7}}']
    assert have_passed(['b:{"u":{"0":7}}', 'a:{"t":{"0":5}}'], before)
    assert have_passed(['a:{"t":{"0":5}}', 'b:{"u":{"0":8}}', 'new:{"v":{"0":1}}'], before)
    assert not have_passed(['a:{"t":{"0":5}}', 'b:{"u":{"0":6}}'], before)
    assert not have_passed(['a:{"t":{"0":5}}', 'c:{"u":{"0":7}}'], before)  # another source
    assert not have_passed(['a:{"t":{"0":5}}'], before)  # b has no data yet
    assert not have_passed(['{"t":{"0":5}}', '{"u":{"0":7}}'], before)  # named since
    assert not have_passed(['a:{"logOffset":9}'], ['a:{"logOffset":5}'])
