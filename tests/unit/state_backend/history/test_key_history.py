"""The values of a key: how much of the log is read for them, and how many are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from state_backend.apply.compact import compact_log
from state_backend.history import key_history
from state_backend.history.key_history import history_of
from state_backend.log.change_log import ChangeLog, JobLog
from state_backend.log.log_writer import LogWriter
from state_backend.log.time_travel import AsOf, moment_of
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.errors import LogError
from state_backend.model.records import Change, Op

STATE = StateDescriptor("temp", key="k", value="v")
KEY = b"job:temp:a"
START_MS = 1_700_000_000_000
KEEP_ALL_MS = 10**12


@pytest.fixture
def log(tmp_path: Path) -> JobLog:
    """A log of epochs 0 to 5, each of which sets the key, with snapshots of the epochs 2 and 4."""
    for number in range(6):
        with LogWriter(tmp_path, "job", [STATE], "query") as writer:
            writer.publish([Change("temp", Op.PUT, KEY, value=b"%d" % number)], clock_ms=START_MS + number)
        if number in (2, 4):
            compact_log(str(tmp_path), "job", retention_ms=KEEP_ALL_MS)
    return ChangeLog(tmp_path).job("job")


def epochs(log: JobLog, count: int) -> list[int]:
    found = history_of(log, KEY, count)
    assert [(each.kind, each.value) for each in found] == [(Kind.VALUE, b"%d" % each.epoch) for each in found]
    return [each.epoch for each in found]


def test_stretches_between_snapshots_are_joined(log: JobLog) -> None:
    assert epochs(log, 10) == [5, 4, 3, 2, 1, 0]
    assert epochs(log, 4) == [5, 4, 3, 2]
    assert [each.epoch for each in history_of(log, KEY, 2, moment_of(log, AsOf(4)))] == [4, 3]


def test_epochs_before_requested_values_are_not_read(log: JobLog, tmp_path: Path) -> None:
    (epoch,) = tmp_path.glob("job/*/epochs/1.json")
    epoch.write_bytes(b"damaged")
    assert epochs(log, 3) == [5, 4, 3]
    with pytest.raises(LogError, match=r"epochs/1\.json"):
        epochs(log, 4)


def test_newest_value_is_kept_at_any_size_and_older_that_fit(log: JobLog, monkeypatch: pytest.MonkeyPatch) -> None:
    size = key_history._size(b"1")
    for fitting, kept in ((0, [5]), (1, [5]), (2, [5, 4]), (4, [5, 4, 3, 2])):
        monkeypatch.setattr(key_history, "VALUES_BYTES_MAX", fitting * size)
        assert epochs(log, 10) == kept
