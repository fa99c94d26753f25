"""A reader in a child process: it reads what a reader in this process reads, whatever happens to the two processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compat.processes import killed_at_end
from compat.waiting import eventually
from state_backend.attach.reader_process import ProcessReader
from state_backend.model.errors import DescriptorError
from tests.golden_checkpoints import NEWEST
from tests.unit.state_backend.attach.following import (
    WAIT_S,
    GrowingCheckpoint,
    coalesced,
    epochs,
    following,
    generations,
    in_spark,
    values_in_log,
    without_json,
)

# Operators, providers, expressions: what is sent to the child. Slow are those of which another one has each part.
JOBS = ("hdfs-window", "hdfs-dedupe-within", "format2-join", "rocksdb-sessions", "transform", "transform-ttl")
SLOW = ("hdfs-dedupe-within", "format2-join", "transform")
EACH_JOB = [pytest.param(job, marks=[pytest.mark.slow] if job in SLOW else []) for job in JOBS]


class CountingReader(ProcessReader):
    """A reader that counts the reads for which it has found its child alive."""

    reads = 0

    def _running(self) -> subprocess.Popen[bytes]:
        child = super()._running()
        self.reads += 1
        return child


class Readers:
    """Makes readers, and remembers the last one."""

    def __call__(self, *given: object) -> ProcessReader:
        self.last = CountingReader(*given)  # type: ignore[arg-type]
        return self.last

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self.last.pid is not None
        return self.last.pid


@pytest.fixture
def readers() -> Readers:
    return Readers()


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended and is not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("job", EACH_JOB)
def test_each_epoch_has_rows_of_its_batch(job: str, readers: Readers, log: Path, tmp_path: Path):
    growing = GrowingCheckpoint(NEWEST, job, tmp_path)
    growing.commit(0)
    with following(growing.path, log, coalesced(growing.path), reader=readers) as attachment:
        for batch in growing.batches:
            growing.commit(batch)
            assert attachment.wait(batch, WAIT_S)
            expected = in_spark(growing.path, batch)
            assert without_json(values_in_log(log), expected) == expected, batch
        pid = readers.pid
    assert epochs(log) == growing.batches
    assert not is_running(pid), "stop() ends it"


def test_child_that_dies_is_restarted_at_next_read(
    growing: GrowingCheckpoint, readers: Readers, log: Path, caplog: pytest.LogCaptureFixture
):
    growing.commit(0)
    with following(growing.path, log, reader=readers) as attachment:
        assert attachment.wait(0, WAIT_S)
        os.kill(readers.pid, signal.SIGKILL)
        eventually(lambda: is_running(readers.pid), lambda is_there: not is_there)
        growing.commit(1)
        assert attachment.wait(1, WAIT_S)
        assert attachment.error is None
    assert "ended with exit code -9; restarted" in caplog.text
    assert (epochs(log), generations(log)) == ([0, 1], 1)
    assert values_in_log(log) == in_spark(growing.path, 1)


def test_child_lost_during_read_fails_and_batch_is_reread(growing: GrowingCheckpoint, readers: Readers, log: Path):
    growing.commit(0)
    with following(growing.path, log, reader=readers) as attachment:
        assert attachment.wait(0, WAIT_S)
        first = readers.pid
        os.kill(first, signal.SIGSTOP)
        growing.commit(1)
        eventually(lambda: readers.last.reads, lambda reads: reads == 2)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: attachment.failure, lambda failure: "ended with the exit code -9" in str(failure))
        assert attachment.wait(1, WAIT_S)
        eventually(lambda: attachment.failure, lambda failure: failure is None)
        assert readers.pid != first
    assert (epochs(log), generations(log)) == ([0, 1], 1)
    assert values_in_log(log) == in_spark(growing.path, 1)


def test_stop_ends_read(growing: GrowingCheckpoint, readers: Readers, log: Path):
    growing.commit(0)
    with following(growing.path, log, reader=readers) as attachment:
        assert attachment.wait(0, WAIT_S)
        pid = readers.pid
        os.kill(pid, signal.SIGSTOP)
        growing.commit(1)
        eventually(lambda: readers.last.reads, lambda reads: reads == 2)
    assert not is_running(pid)
    assert (attachment.batch, attachment.error) == (0, None)
    with following(growing.path, log, reader=readers) as attachment:
        assert attachment.wait(1, WAIT_S)
    assert (epochs(log), generations(log)) == ([0, 1], 1)


def test_killed_driver_takes_its_reader_along(growing: GrowingCheckpoint, log: Path):
    driver = """\
import sys, threading
from state_backend.attach.reader_process import ProcessReader
from state_backend.attach.start import attach_files
attachment = attach_files(sys.argv[1], job="j", log=sys.argv[2], reader=ProcessReader)
attachment.wait()
print(attachment._reader.pid, flush=True)
threading.Event().wait()
"""
    growing.commit(0)
    command = [sys.executable, "-c", driver, str(growing.path), str(log)]
    with killed_at_end(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_running(pid)
        process.kill()
    eventually(lambda: is_running(pid), lambda is_there: not is_there)


def test_error_of_child_ends_attachment(growing: GrowingCheckpoint, readers: Readers, log: Path):
    growing.commit(0)
    with following(growing.path, log, reader=readers) as attachment:
        assert attachment.wait(0, WAIT_S)
        pid = readers.pid
        schema = growing.path / "state/0/0/_metadata/schema"
        other = GrowingCheckpoint(NEWEST, "hdfs-dedupe", log.parent / "other")
        schema.write_bytes((other.path / "state/0/0/_metadata/schema").read_bytes())
        growing.commit(1)
        with pytest.raises(DescriptorError, match="the query's plan has changed"):
            attachment.wait(1, WAIT_S)
        eventually(lambda: is_running(pid), lambda is_there: not is_there)


def test_log_lines_of_child_go_to_handlers_of_this_process(
    readers: Readers, log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    growing = GrowingCheckpoint(NEWEST, "rocksdb-no-changelog", tmp_path)
    growing.commit(0)
    with (
        caplog.at_level(logging.WARNING),
        following(growing.path, log, coalesced(growing.path), reader=readers) as attachment,
    ):
        assert attachment.wait(0, WAIT_S)
    (record,) = (record for record in caplog.records if "without a change log" in record.getMessage())
    assert record.name == "sparkis.attach"
