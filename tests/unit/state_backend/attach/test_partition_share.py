"""Changes that several processes read: the same records as those of one, whatever happens to a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.checkpoints import WrittenCheckpoint
from compat.waiting import eventually
from state_backend.attach import partition_share
from state_backend.attach.attachment import StateReader
from state_backend.attach.files_reader import FilesReader
from state_backend.log.change_log import ChangeLog
from state_backend.model.records import Change, changes_in
from tests.golden_checkpoints import NEWEST
from tests.unit.state_backend.attach.following import (
    JOB,
    WAIT_S,
    GrowingCheckpoint,
    coalesced,
    epochs,
    following,
    values_in_log,
)

# Both providers and checkpoint formats, several stores, column families, lists, and changes found by comparison.
JOBS = ("hdfs-window", "rocksdb-join", "format2-join", "transform", "rocksdb-no-changelog")
# Operators differ in what is read, which test_files_reader.py compares for all of them, and not in how it is divided.
EACH_JOB = [pytest.param(job, marks=[pytest.mark.slow] if job.startswith("rocksdb") else []) for job in JOBS]
PARTITIONS = 4
KEYS = 6_000
NUMBERS = np.arange(KEYS)


class Readers:
    """Makes readers, and remembers the last one."""

    last: FilesReader
    used: Sequence[int] = ()

    def __call__(self, *given: object) -> StateReader:
        self.last = FilesReader(*given)  # type: ignore[arg-type]
        return self.last

    @property
    def pids(self) -> list[int]:
        """The processes of the last reader."""
        return self.last._processes.pids


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two processes read all partitions."""
    monkeypatch.setattr(partition_share, "PARALLEL_AFTER_S", 0.0)
    monkeypatch.setattr(partition_share, "PARALLEL_AGAIN_AFTER_S", 0.0)
    monkeypatch.setattr(partition_share.os, "cpu_count", lambda: 2)


@pytest.fixture
def read_after_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read no batch before its commit."""
    monkeypatch.setattr(FilesReader, "read_ahead", StateReader.read_ahead)


def records(log: Path, batch: int) -> list[Change]:
    """Return the changes of an epoch in the order of a store; those of one key in their own order."""
    job = ChangeLog(str(log)).job(JOB)
    current = job.current()
    assert current is not None
    epoch = job.epoch(current, batch)
    assert epoch is not None
    changes = (change for run in job.runs(current.generation, epoch) for change in changes_in(run))
    return sorted(changes, key=lambda change: (change.state, change.key, change.field or b""))


def change_batch(written: WrittenCheckpoint, batch: int) -> None:
    written.plan(batch)
    written.write_changes(batch, NUMBERS)
    written.commit(batch)


def counts(log: Path) -> set[bytes]:
    """Return the values of the field `count`, by which the last batch that wrote a key is known."""
    return {value[b"count"] for value in values_in_log(log).values()}


def follow(job: str, folder: Path, readers: Readers) -> list[int]:
    """Follow a growing checkpoint, whose batches are read after their commits; return the batches."""
    folder.mkdir()
    growing = GrowingCheckpoint(NEWEST, job, folder)
    growing.commit(0)
    with following(growing.path, folder / "log", coalesced(growing.path), reader=readers) as attachment:
        for batch in growing.batches:
            growing.commit(batch)
            assert attachment.wait(batch, WAIT_S)
        readers.used = readers.pids
    return growing.batches


@pytest.mark.parametrize("job", EACH_JOB)
@pytest.mark.usefixtures("read_after_commit")
def test_epochs_equal_those_that_one_process_reads(job: str, tmp_path: Path, request: pytest.FixtureRequest):
    one, several = Readers(), Readers()
    batches = follow(job, tmp_path / "one", one)
    request.getfixturevalue("in_processes")
    assert follow(job, tmp_path / "several", several) == batches
    assert (one.used, len(several.used), several.pids) == ([], 2, [])
    for batch in batches:
        expected = records(tmp_path / "one/log", batch)
        assert records(tmp_path / "several/log", batch) == expected, batch
        assert batch or expected


@pytest.mark.usefixtures("in_processes")
def test_processes_read_partitions_missed_before_commit(written: WrittenCheckpoint, log: Path, tmp_path: Path):
    other = WrittenCheckpoint(tmp_path / "other", PARTITIONS)
    other.write_changes(1, NUMBERS)
    readers = Readers()
    with following(written.folder, log, reader=readers) as attachment:
        assert attachment.wait(0, WAIT_S)
        written.plan(1)
        (other.folder / "state/0/0/2.delta").rename(written.folder / "state/0/0/2.delta")
        eventually(lambda: readers.last._ahead is not None and list(readers.last._ahead.partitions) == [(0, 0)])
        for partition in range(1, PARTITIONS):
            path = f"state/0/{partition}/2.delta"
            # No event of the folder tells of a file that is copied into it.
            (written.folder / path).write_bytes((other.folder / path).read_bytes())
        written.commit(1)
        assert attachment.wait(1, WAIT_S)
    assert len(records(log, 1)) == KEYS
    assert counts(log) == {b"2"}


@pytest.mark.parametrize("is_reading", [True, False], ids=["within a read", "before a read"])
@pytest.mark.usefixtures("in_processes", "read_after_commit")
def test_killed_process_is_failure_and_batch_is_read_again(written: WrittenCheckpoint, log: Path, is_reading: bool):
    readers = Readers()
    with following(written.folder, log, reader=readers) as attachment:
        assert attachment.wait(0, WAIT_S)
        change_batch(written, 1)
        assert attachment.wait(1, WAIT_S)
        killed, kept = readers.pids
        if is_reading:
            os.kill(killed, signal.SIGSTOP)  # it does not answer, so the batch waits for it
            change_batch(written, 2)
            eventually(readers.last._processes._lock.locked)
            os.kill(killed, signal.SIGKILL)
        else:
            os.kill(killed, signal.SIGKILL)
            os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
            change_batch(written, 2)
        eventually(lambda: attachment.failure, lambda failure: "ended with the code -9" in str(failure))
        assert epochs(log) == [0, 1]
        assert attachment.wait(2, WAIT_S)
        assert not {killed, kept} & set(readers.pids)
        change_batch(written, 3)
        assert attachment.wait(3, WAIT_S)
        assert attachment.error is None
    assert epochs(log) == [0, 1, 2, 3]
    assert [len(records(log, batch)) for batch in (1, 2, 3)] == [KEYS] * 3
    assert counts(log) == {b"4"}


@pytest.mark.usefixtures("in_processes")
def test_idle_processes_are_ended(written: WrittenCheckpoint, log: Path, monkeypatch: pytest.MonkeyPatch):
    readers = Readers()
    with following(written.folder, log, reader=readers) as attachment:
        assert attachment.wait(0, WAIT_S)
        assert len(readers.pids) == 2
        monkeypatch.setattr(partition_share, "IDLE_S_MAX", 0.0)
        eventually(lambda: readers.pids, lambda pids: pids == [])
        change_batch(written, 1)
        assert attachment.wait(1, WAIT_S)
    assert counts(log) == {b"2"}
