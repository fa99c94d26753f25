"""A checkpoint that grows commit by commit, one with many keys, and the log of their attachments."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoints import WrittenCheckpoint
from tests.golden_checkpoints import NEWEST
from tests.unit.state_backend.attach.following import GrowingCheckpoint


@pytest.fixture
def growing(tmp_path: Path) -> GrowingCheckpoint:
    return GrowingCheckpoint(NEWEST, "hdfs-window", tmp_path)


@pytest.fixture
def written(tmp_path: Path, request: pytest.FixtureRequest) -> WrittenCheckpoint:
    """A checkpoint whose first batch is committed, with the PARTITIONS and KEYS of the module."""
    checkpoint = WrittenCheckpoint(tmp_path / "checkpoint", request.module.PARTITIONS)
    checkpoint.plan(0)
    checkpoint.write_snapshot(0, request.module.KEYS)
    checkpoint.commit(0)
    return checkpoint


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"
