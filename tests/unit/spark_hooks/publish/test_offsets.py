"""Offsets of two checkpoints are compared where they count what the source counts, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spark_hooks.publish.offsets import OffsetLog, have_passed


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
def test_only_offsets_that_count_what_the_source_counts_are_compared(now: Any, before: Any, is_passed: bool) -> None:
    assert passed(now, before) is is_passed


def test_every_source_has_to_be_as_far() -> None:
    before = ['{"t":{"0":5}}', '{"u":{"0":5}}']
    assert have_passed(['{"t":{"0":5}}', '{"u":{"0":5}}'], before)
    assert not have_passed(['{"t":{"0":5}}', '{"u":{"0":4}}'], before)
    assert not have_passed(['{"t":{"0":5}}', "-"], before)
    assert not have_passed(['{"t":{"0":5}}', '{"logOffset":9}'], ['{"t":{"0":5}}', '{"logOffset":5}'])
    assert not have_passed(['{"t":{"0":5}}'], before)
    assert not have_passed([], [])


def test_offsets_are_read_as_spark_writes_them(tmp_path: Path) -> None:
    folder = tmp_path / "a checkpoint" / "offsets"
    folder.mkdir(parents=True)
    (folder / "3").write_text('v1\n{"batchWatermarkMs":0}\n{"t":{"0":5}}\n-')
    (folder / "4").write_text('v2\n{}\n{"0":"5"}')
    (folder / "5").write_text("")
    for location in (str(folder.parent), folder.parent.as_uri()):
        log = OffsetLog(location)
        assert log.ends_of(3) == ('{"t":{"0":5}}', "-")
        assert [log.ends_at(batch) for batch in (3, 5, 6)] == [False, True, False]
        assert [log.ends_of(batch) for batch in (4, 5, 6)] == [(), (), ()]
    assert OffsetLog(None).ends_of(3) == OffsetLog("s3://bucket/checkpoint").ends_of(3) == ()
