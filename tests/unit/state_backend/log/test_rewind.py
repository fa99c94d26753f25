"""A generation that begins with a copy of a swept one has its snapshot and the epochs behind it, or is not begun."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from state_backend.apply import snapshots
from state_backend.apply.replay import read_snapshot
from state_backend.log import rewind
from state_backend.log.garbage_collector import sweep
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import LogCorruptError, RewoundCheckpointError
from tests.builders import current_of, numbers_in, put_large

STATE = StateDescriptor("s", key="k", value="v")
FAR_MS = 1 << 50
SNAPSHOT, LAST = 4, 7


put = partial(put_large, "s")


def writer_of(root: Path, query_id: str = "q", **more: Any) -> LogWriter:
    return LogWriter(root, "job", [STATE], query_id, **{"sends_heartbeats": False} | more)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A log of the query `q` that begins with a snapshot, because the epochs before it are swept."""
    with writer_of(tmp_path) as writer:
        for number in range(LAST + 1):
            writer.publish([put(number)], number)
            if number == SNAPSHOT:
                log, current = current_of(tmp_path)
                with read_snapshot(tmp_path, "job") as shown:
                    snapshots.write(log, current, shown)
                sweep(log, current, FAR_MS, retention_ms=0)
    log, current = current_of(tmp_path)
    assert log.numbers(current.generation) == list(range(SNAPSHOT, LAST + 1))
    return tmp_path


def test_returning_query_has_its_snapshot_and_later_epochs(root: Path) -> None:
    writer_of(root, "another").publish([put(100)])
    back = writer_of(root)
    assert (back.generation, back.publish([put(LAST + 1)])) == ("q.3", LAST + 1)
    assert numbers_in(root) == list(range(LAST + 2))
    log, current = current_of(root)
    assert (log.floor("q.3"), log.numbers("q.3")) == (SNAPSHOT, list(range(SNAPSHOT, LAST + 2)))
    assert [manifest.epoch for manifest in log.snapshots(current)] == [SNAPSHOT]


@pytest.mark.parametrize("number", range(SNAPSHOT + 1, LAST))
def test_checkpoint_may_be_set_back_to_any_epoch_behind_snapshot(root: Path, number: int) -> None:
    assert writer_of(root, on_rewind="truncate").publish([put(100)], number) == number
    assert numbers_in(root) == [*range(number), 100]


@pytest.mark.parametrize("number", [1, SNAPSHOT - 1, SNAPSHOT])
def test_checkpoint_cannot_be_set_back_before_snapshot(root: Path, number: int) -> None:
    writer = writer_of(root, on_rewind="truncate")
    with pytest.raises(RewoundCheckpointError, match=f"set back to epoch {number}"):
        writer.publish([put(100)], number)
    assert numbers_in(root) == list(range(LAST + 1))


def test_damaged_snapshot_is_left_out_and_one_before_it_is_copied(root: Path) -> None:
    log, current = current_of(root)
    with read_snapshot(root, "job") as shown:
        snapshots.write(log, current, shown)
    (root / "job" / "q.1" / "snapshots" / f"{LAST}" / "manifest.json").write_bytes(b"{}")
    writer_of(root, "another").publish([put(100)])
    assert writer_of(root).publish([put(LAST + 1)]) == LAST + 1
    log, current = current_of(root)
    assert [manifest.epoch for manifest in log.snapshots(current)] == [SNAPSHOT]
    assert numbers_in(root) == list(range(LAST + 2))


def test_copy_does_not_reach_over_missing_epoch(root: Path) -> None:
    log, current = current_of(root)
    assert rewind.reaches(log, current, LAST)
    (root / "job" / "q.1" / "epochs" / f"{LAST - 1}.json").unlink()
    assert not rewind.reaches(log, current, LAST)
    assert rewind.reaches(log, current, LAST - 1)


@pytest.mark.parametrize("pattern", [f"snapshots/{SNAPSHOT}/*.arrow", f"changes/{LAST}-*.arrow"])
def test_missing_uncollected_file_is_error(root: Path, pattern: str) -> None:
    (file,) = (root / "job" / "q.1").glob(pattern)
    file.unlink()
    writer_of(root, "another").publish([put(100)])
    with pytest.raises(LogCorruptError, match=r"files of generation q\.1 are missing"):
        writer_of(root)
