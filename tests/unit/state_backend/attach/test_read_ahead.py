"""The changes of a batch are read before its commit and published after it; those of a failed try never are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.checkpoints import WrittenCheckpoint, key_of
from compat.waiting import eventually
from state_backend.attach.attachment import StateReader
from state_backend.attach.files_reader import FilesReader
from state_backend.attach.reader_process import ProcessReader
from state_backend.log.change_log import ChangeLog
from tests.unit.state_backend.attach.following import JOB, WAIT_S, epochs, following, values_in_log

PARTITIONS = 3
KEYS = 6_000  # so many that their changes do not fit into the file of an epoch
NUMBERS = np.arange(KEYS)

Reader = Callable[..., StateReader]


def change_files(log: Path, batch: int) -> list[str]:
    """Return the names of the finished change files of a batch."""
    return sorted(path.name for path in log.glob(f"{JOB}/*/changes/{batch}-*.arrow"))


def listed(log: Path, batch: int) -> list[str]:
    """Return the names of the change files that a batch's epoch lists."""
    job = ChangeLog(str(log)).job(JOB)
    current = job.current()
    assert current is not None
    epoch = job.epoch(current, batch)
    assert epoch is not None
    return [file.name for file in epoch.files]


def counts(log: Path) -> set[bytes]:
    """Return the values of the field `count`, by which the last batch that wrote a key is known."""
    return {value[b"count"] for value in values_in_log(log).values()}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sparkis-read-ahead")]


@pytest.mark.parametrize("reader", [FilesReader, ProcessReader])
def test_changes_are_in_file_before_commit_and_in_log_after_it(written: WrittenCheckpoint, log: Path, reader: Reader):
    with following(written.folder, log, reader=reader) as attachment:
        assert attachment.wait(0, WAIT_S)
        for batch in (1, 2):
            written.plan(batch)
            written.write_changes(batch, NUMBERS)
            names = eventually(lambda batch=batch: change_files(log, batch))
            assert epochs(log) == list(range(batch))
            written.commit(batch)
            assert attachment.wait(batch, WAIT_S)
            assert listed(log, batch) == names
            assert counts(log) == {b"%d" % (batch + 1)}


def test_files_are_read_one_by_one_while_batch_runs(written: WrittenCheckpoint, log: Path, tmp_path: Path):
    other = WrittenCheckpoint(tmp_path / "other", PARTITIONS)
    other.write_changes(1, NUMBERS)
    with following(written.folder, log) as attachment:
        assert attachment.wait(0, WAIT_S)
        written.plan(1)
        for partition in range(PARTITIONS):
            assert change_files(log, 1) == []
            path = f"state/0/{partition}/2.delta"
            (other.folder / path).rename(written.folder / path)
        names = eventually(lambda: change_files(log, 1))
        written.commit(1)
        assert attachment.wait(1, WAIT_S)
    assert listed(log, 1) == names
    assert counts(log) == {b"2"}


@pytest.mark.parametrize("is_same_size", [True, False])
def test_replaced_rows_of_repeated_batch_are_never_in_log(written: WrittenCheckpoint, log: Path, is_same_size: bool):
    with following(written.folder, log) as attachment:
        assert attachment.wait(0, WAIT_S)
        written.plan(1)
        written.write_changes(1, NUMBERS)
        names = eventually(lambda: change_files(log, 1))
        chosen = NUMBERS if is_same_size else NUMBERS[: KEYS // 2]
        written.write_changes(1, chosen, value=7)
        written.commit(1)
        assert attachment.wait(1, WAIT_S)
    assert not set(listed(log, 1)) & set(names)
    found = values_in_log(log)
    expected = {number: b"7" if number in chosen else b"1" for number in NUMBERS}
    assert {number: found[f"{JOB}:aggregation:{key_of(number)}".encode()][b"count"] for number in NUMBERS} == expected


def test_one_replaced_partition_is_enough_to_read_batch_again(written: WrittenCheckpoint, log: Path):
    with following(written.folder, log) as attachment:
        assert attachment.wait(0, WAIT_S)
        written.plan(1)
        written.write_changes(1, NUMBERS)
        names = eventually(lambda: change_files(log, 1))
        last = written.folder / f"state/0/{PARTITIONS - 1}/2.delta"
        copy = last.with_suffix(".tmp")
        copy.write_bytes(last.read_bytes())
        copy.rename(last)
        written.commit(1)
        assert attachment.wait(1, WAIT_S)
    assert not set(listed(log, 1)) & set(names)
    assert counts(log) == {b"2"}


def test_batch_whose_layout_changes_before_its_commit_is_read_again(written: WrittenCheckpoint, log: Path):
    with following(written.folder, log) as attachment:
        assert attachment.wait(0, WAIT_S)
        written.plan(1)
        written.write_changes(1, NUMBERS)
        names = eventually(lambda: change_files(log, 1))
        written.plan(1, {"spark.sql.streaming.stateStore.rowChecksum.enabled": "true"})
        written.commit(1)
        # The rows have no checksums: a read with this setting finds damage.
        eventually(lambda: attachment.failure, lambda failure: "checksum" in str(failure))
        assert epochs(log) == [0]
        written.plan(1)
        assert attachment.wait(1, WAIT_S)
    assert not set(listed(log, 1)) & set(names)


def test_stop_ends_wait_for_file(written: WrittenCheckpoint, log: Path):
    with following(written.folder, log) as attachment:
        assert attachment.wait(0, WAIT_S)
        written.plan(1)
        eventually(threads)
    assert threads() == []
    assert epochs(log) == [0]


def test_batch_not_read_ahead_is_read_after_its_commit(
    written: WrittenCheckpoint, log: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FilesReader, "read_ahead", StateReader.read_ahead)
    with following(written.folder, log) as attachment:
        assert attachment.wait(0, WAIT_S)
        written.plan(1)
        written.write_changes(1, NUMBERS)
        written.commit(1)
        assert attachment.wait(1, WAIT_S)
        assert change_files(log, 1) == listed(log, 1)
        assert threads() == []
    assert counts(log) == {b"2"}
