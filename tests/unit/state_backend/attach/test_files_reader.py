"""Checkpoints of several versions of Spark, followed commit by commit: each epoch has the rows of its batch."""

from __future__ import annotations

from pathlib import Path

import pytest

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
