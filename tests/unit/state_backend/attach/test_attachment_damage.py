"""Damaged files of a checkpoint that is followed: a clear error, nothing published until they are whole again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from compat.waiting import eventually
from state_backend.attach import attachment
from state_backend.model.errors import SparkisError
from tests.golden_checkpoints import NEWEST
from tests.unit.state_backend.attach.following import (
    WAIT_S,
    GrowingCheckpoint,
    coalesced,
    epochs,
    following,
    in_spark,
    values_in_log,
    without_json,
)

BATCH = 4
JOBS = (
    "hdfs-window",
    "rocksdb-window",
    "rocksdb-no-changelog",
    "rocksdb-checksums",
    "format2-aggregation",
    "transform",
)


def files_of(growing: GrowingCheckpoint) -> list[Path]:
    """Return the files that the last batch needs, and the batches before do not: its state, and its plan."""
    state = [path for path in growing.path.glob(f"state/**/{BATCH + 1}*") if path.suffix not in (".crc", ".snapshot")]
    changed = [path for path in state if path.suffix == ".changelog"] or state
    return [*sorted(changed), growing.path / f"offsets/{BATCH}"]


@pytest.mark.parametrize("job", JOBS)
def test_damaged_file_is_named_and_waited_for(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attachment, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(attachment, "RETRY_PAUSE_S_MAX", 0.01)
    growing = GrowingCheckpoint(NEWEST, job, tmp_path)
    for batch in range(BATCH + 1):
        growing.commit(batch)
    expected = in_spark(growing.path, BATCH)
    (growing.path / f"commits/{BATCH}").unlink()
    states = coalesced(growing.path)
    paths = files_of(growing)
    assert len(paths) >= 3
    for number, path in enumerate(paths):
        whole = path.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 0x10]) + whole[middle + 1 :]
        log = tmp_path / f"log{number}"
        with following(growing.path, log, states) as attached:
            assert attached.wait(BATCH - 1, WAIT_S)
            replace_file(path, whole[:middle])
            growing.commit(BATCH)
            for damaged in (whole[:middle], flipped) if path.parent.name != "offsets" else (whole[:middle],):
                replace_file(path, damaged)
                attached.failure = None
                failure = eventually(partial(getattr, attached, "failure"))
                assert isinstance(failure, SparkisError)
                assert str(path.parent) in str(failure)
                assert (epochs(log), attached.error) == ([BATCH - 1], None)
            replace_file(path, whole)
            assert attached.wait(BATCH, WAIT_S)
        assert without_json(values_in_log(log), expected) == expected
        (growing.path / f"commits/{BATCH}").unlink()


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file as a whole, as Spark does."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_bytes(content)
    unfinished.rename(path)
