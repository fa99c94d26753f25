"""Checkpoints of several versions of Spark, followed commit by commit: each epoch has the rows of its batch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from state_backend.attach import shard
from state_backend.attach.states import AttachedState
from tests import golden_checkpoints as golden
from tests.unit.state_backend.attach.following import (
    WAIT_S,
    GrowingCheckpoint,
    coalesced,
    epochs,
    following,
    in_spark,
    shown,
    without_json,
)

# Keys with a null in a column that is no text, and with nested columns.
WITHOUT_TEXT_KEYS = ("hdfs-types", "rocksdb-types")
# Of older versions only some jobs: `tests/unit/state_backend/checkpoint` reads all.
OF_EACH_VERSION = ("hdfs-aggregation", "rocksdb-join", "format2-aggregation", "transform")
JOBS = [
    (version, job)
    for version, job in golden.jobs()
    if job not in WITHOUT_TEXT_KEYS and (version == golden.NEWEST or job in OF_EACH_VERSION)
]


@pytest.mark.parametrize(("version", "job"), JOBS, ids=["-".join(each) for each in JOBS])
def test_after_each_commit_the_log_has_the_state_of_its_batch(version: str, job: str, tmp_path: Path):
    growing = GrowingCheckpoint(version, job, tmp_path)
    log = tmp_path / "log"
    growing.commit(growing.batches[0])
    with following(growing.path, log, coalesced(growing.path)) as attachment:
        for batch in growing.batches:
            growing.commit(batch)
            assert attachment.wait(batch, WAIT_S)
            expected = in_spark(growing.path, batch)
            assert without_json(shown(log), expected) == expected, batch
    assert epochs(log) == growing.batches


def test_a_change_log_that_an_earlier_run_has_left_is_not_read(tmp_path: Path):
    growing = GrowingCheckpoint(golden.NEWEST, "rocksdb-switched", tmp_path)
    for partition in growing.path.glob("state/0/[0-9]"):
        # Versions 3 and 4 have zips: the query had stopped writing change logs.
        for version in (3, 4):
            shutil.copy(partition / "2.changelog", partition / f"{version}.changelog")
    log = tmp_path / "log"
    growing.commit(0)
    with following(growing.path, log, coalesced(growing.path)) as attachment:
        for batch in growing.batches:
            growing.commit(batch)
            assert attachment.wait(batch, WAIT_S)
            assert shown(log) == in_spark(growing.path, batch), batch
    assert epochs(log) == growing.batches


@pytest.mark.parametrize("parallel_after_s", [shard.PARALLEL_AFTER_S, 0.0], ids=["one process", "several processes"])
def test_stores_of_states_that_are_not_attached_are_not_read(
    parallel_after_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shard, "PARALLEL_AFTER_S", parallel_after_s)
    monkeypatch.setattr(shard.os, "cpu_count", lambda: 2)
    growing = GrowingCheckpoint(golden.NEWEST, "hdfs-join", tmp_path)
    left = [
        {key: value for key, value in in_spark(tmp_path / "whole", batch).items() if key.startswith(b"j:left:")}
        for batch in growing.batches
    ]
    for delta in growing.path.glob("state/0/*/right-*/*.delta"):
        delta.unlink()
    log = tmp_path / "log"
    growing.commit(0)
    with following(growing.path, log, [AttachedState(variable="left")]) as attachment:
        for batch, expected in zip(growing.batches, left, strict=True):
            growing.commit(batch)
            assert attachment.wait(batch, WAIT_S)
            assert without_json(shown(log), expected) == expected, batch
