"""At which epochs the owners of slots write their parts, without talking to each other."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.fs
import pytest

from compat.waiting import WAIT_S_MAX
from state_backend.apply import compactor as compactor_module
from state_backend.apply import snapshots
from state_backend.apply.applier import Applier
from state_backend.apply.compact import compact_log
from state_backend.apply.compactor import (
    CHANGES_BYTES_MIN,
    EPOCHS_MAX,
    Compactor,
    _Requests,
    compact,
    intervals_after,
    is_marked,
    main,
)
from state_backend.apply.replay import read_snapshot
from state_backend.lmdb.store import LmdbStore
from state_backend.log.change_log import ChangeLog
from state_backend.log.checked_json import with_checksum
from state_backend.log.epochs import ChangeFile, Epoch
from state_backend.log.filesystems import Filesystem
from state_backend.log.filesystems.arrow import ArrowFilesystem
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.model.slot_set import ALL, NONE, SlotSet
from tests.builders import current_of

STATE = StateDescriptor("v", key="k", value="v").for_job("job")
LOW, HIGH = SlotSet.parse("0-8191"), SlotSet.parse("8192-16383")
KEYS = [b"key:%d" % number for number in range(100)]


def epochs_of(sizes: list[int]) -> list[Epoch]:
    """Return epochs that list changes of these sizes, from the first of a log on."""
    listed = [(ChangeFile("", size, 0, 1),) for size in sizes]
    totals = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [
        Epoch(number + 1, 1, None, 0, files=files, log_bytes=total)
        for number, (files, total) in enumerate(zip(listed, totals, strict=True))
    ]


def snapshot_of(size: int, log_bytes: int = 0) -> Epoch:
    return Epoch(0, 1, None, 0, files=(ChangeFile("", size, 0, 1),), log_bytes=log_bytes)


# Marks --------------------------------------------------------------------------------------------------------------


def test_marks_are_at_most_one_step_and_one_epoch_apart() -> None:
    random = Random(1)
    since = 0
    for epoch in epochs_of([random.randrange(CHANGES_BYTES_MIN // 2) for _ in range(900)]):
        since += epoch.change_bytes
        if is_marked(epoch, CHANGES_BYTES_MIN, EPOCHS_MAX):
            assert since >= 1
            since = 0
        assert since < CHANGES_BYTES_MIN


def test_mark_of_larger_step_is_mark_of_smaller_step() -> None:
    random = Random(2)
    for epoch in epochs_of([random.randrange(CHANGES_BYTES_MIN) for _ in range(900)]):
        steps = [CHANGES_BYTES_MIN << power for power in range(8)]
        marked = [is_marked(epoch, step, EPOCHS_MAX) for step in steps]
        assert marked == sorted(marked, reverse=True)


def test_epochs_without_changes_are_marked_by_their_number() -> None:
    epochs = epochs_of([0] * 2_500)
    assert [epoch.epoch for epoch in epochs if is_marked(epoch, CHANGES_BYTES_MIN, EPOCHS_MAX)] == [1_000, 2_000]


@pytest.mark.parametrize(("state", "steps"), [(0, 1), (8 << 20, 1), (9 << 20, 2), (100 << 20, 16), (1 << 30, 128)])
def test_step_is_twice_state_rounded_up_to_power_of_two(state: int, steps: int) -> None:
    (epoch,) = epochs_of([1])
    assert intervals_after(snapshot_of(state), epoch) == (steps * CHANGES_BYTES_MIN, EPOCHS_MAX)


def test_unfinished_snapshots_write_bounded_bytes() -> None:
    """Parts are written for nothing all the time, each as large as all changes so far."""
    written = 0
    epochs = epochs_of([1 << 20] * 20_000)
    for epoch in epochs:
        if is_marked(epoch, *intervals_after(epochs[0], epoch)):
            written += epoch.log_bytes
    assert 0 < written < 4 * epochs[-1].log_bytes


def test_marks_of_busy_owners_move_apart_until_they_meet() -> None:
    """Each is busy for 2,500 epochs with a part that the other did not begin."""
    free_at, written = [0, 1_500], [0, 0]
    for epoch in epochs_of([0] * 10_000):
        if is_marked(epoch, *intervals_after(snapshot_of(0), epoch)):
            for which in (0, 1):
                if epoch.epoch >= free_at[which]:
                    free_at[which], written[which] = epoch.epoch + 2_500, epoch.epoch
            if written[0] == written[1]:
                break
    assert 2_500 < written[0] == written[1] < 10_000


def test_writer_counts_bytes_of_its_log_from_its_beginning(tmp_path: Path) -> None:
    log = ChangeLog(tmp_path).job("job")
    for _ in range(3):  # a writer goes on where another ended
        with LogWriter(tmp_path, "job", [STATE], "q", on_rewind="truncate") as writer:
            for size in (10, 100_000):
                writer.publish([Change("v", Op.PUT, b"k", None, b"x" * size)])
    writer.publish([], 4)
    current = log.current()
    assert current is not None
    epochs = [log.epoch(current, number) for number in log.numbers(current.generation)]
    total = 0
    for epoch in epochs:
        assert epoch is not None
        total += epoch.change_bytes
        assert epoch.log_bytes == total
    assert len(epochs) == 5


def test_epoch_of_older_version_is_read_and_marked_by_its_number_alone() -> None:
    for number in (999, 1_000):
        stored = json.loads(Epoch(number, 1, None, 0, files=(ChangeFile("", 1 << 30, 0, 1),)).to_bytes())
        del stored["log_bytes"], stored["checksum"]
        epoch = Epoch.from_bytes(with_checksum(stored), "here")
        assert (epoch.log_bytes, epoch.change_bytes) == (0, 1 << 30)
        assert is_marked(epoch, *intervals_after(epoch, epoch)) is (number == 1_000)


# Owners -------------------------------------------------------------------------------------------------------------


class InThisProcess(Compactor):
    """Writes at once, and in this process, what another process would."""

    def __init__(self, filesystem: Filesystem | str, retention_ms: int) -> None:
        super().__init__("", "job", retention_ms)
        self._log = ChangeLog(filesystem).job("job")
        self.now_ms = 0

    def _start_process(self) -> None:
        pass

    def _let_open(self, store: LmdbStore) -> None:
        with store.snapshot(store.applied.clock_ms) as shown:
            compact(self._log, shown, self._retention_ms, self.now_ms)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactor_module, "CHANGES_BYTES_MIN", 1 << 16)
    monkeypatch.setattr(compactor_module, "EPOCHS_MAX", 300)


def publish(writer: LogWriter, number: int) -> None:
    writer.publish([Change("v", Op.PUT, KEYS[number % len(KEYS)], None, b"%d" % number)], clock_ms=1_000 + number)


def settle(owner: Applier) -> None:
    """Have slots that are gained loaded to their end, however slow this machine is."""
    while owner.step():
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("often")
def test_disk_stays_bounded_over_ten_thousand_epochs_of_two_owners(tmp_path: Path) -> None:
    """The owners fall behind, move slots, and are away for some time; nothing is asserted of time."""
    unsynced = ArrowFilesystem(pyarrow.fs.LocalFileSystem(), str(tmp_path / "log"), "unsynced")
    log = ChangeLog(unsynced).job("job")
    random = Random(3)
    events: list[dict[str, Any]] = []
    most, found = 0, set()
    with LogWriter(unsynced, "job", [STATE], "q") as writer:
        compactors = [InThisProcess(unsynced, 100) for _ in range(2)]
        owners = [
            Applier(ChangeLog(unsynced), "job", tmp_path / str(slots), events.append, compactor=compactor, slots=slots)
            for slots, compactor in zip((LOW, HIGH), compactors, strict=True)
        ]
        away_until = 0
        for number in range(10_000):
            publish(writer, number)
            for compactor in compactors:
                compactor.now_ms = 1_000 + number
            if random.random() < 0.05:
                settle(owners[0])
            if random.random() < 0.05 and number >= away_until:
                settle(owners[1])
            if number % 2_000 == 1_500:
                away_until = number + 400
            if number % 1_000 == 250:
                edge = random.randrange(1, 16_383)
                for owner, slots in zip(owners, (f"0-{edge - 1}", f"{edge}-16383"), strict=True):
                    owner.set_desired_slots(SlotSet.parse(slots))
            if number % 20 == 0:
                most = max(most, sum(1 for _ in (tmp_path / "log").rglob("*")))
                current = log.current()
                assert current is not None
                newest = snapshots.newest(log, current)
                found |= {newest.epoch} if newest else set()
        for owner in owners:
            settle(owner)
            owner.close()
    assert not any(event.get("error") for event in events)
    assert len(found) > 20
    assert most < 1_500
    with read_snapshot(tmp_path / "log", "job") as snapshot:
        assert {key: snapshot.value(key) for key in KEYS} == {key: b"99%02d" % each for each, key in enumerate(KEYS)}


@pytest.mark.usefixtures("often")
def test_owners_continue_beside_sparkis_compact(tmp_path: Path) -> None:
    root = tmp_path / "log"
    writer = LogWriter(root, "job", [STATE], "q")
    owners = [
        Applier(
            ChangeLog(root),
            "job",
            tmp_path / str(slots),
            lambda event: None,
            compactor=InThisProcess(str(root), 0),
            slots=slots,
        )
        for slots in (LOW, HIGH)
    ]
    log, current = current_of(root)
    newest = []
    for number in range(310):
        publish(writer, number)
        for owner in owners:
            owner.step()
        if number in (100, 200):
            compact_log(str(root), "job", retention_ms=0)
        found = snapshots.newest(log, current)
        newest.append(found.epoch if found else -1)
    by_owners = set(newest) - {-1, 100, 200}
    assert {100, 200} < set(newest)
    assert by_owners
    assert newest == sorted(newest)
    with read_snapshot(root, "job") as snapshot:
        assert snapshot.value(KEYS[9]) == b"309"
        assert snapshot.value(KEYS[10]) == b"210"
    for owner in owners:
        owner.close()


# Processes ----------------------------------------------------------------------------------------------------------


class Owner:
    """An applier in this process, of some slots, with a real compactor."""

    def __init__(self, root: Path, folder: Path, slots: SlotSet) -> None:
        self.compactor = Compactor(str(root), "job", 0)
        self.applier = Applier(
            ChangeLog(root), "job", folder, lambda event: None, compactor=self.compactor, slots=slots
        )

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        return self.compactor._process


@pytest.fixture
def marked_at_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactor_module, "EPOCHS_MAX", 5)
    monkeypatch.setattr(compactor_module, "LEAD_EPOCHS", 2)
    monkeypatch.setattr(compactor_module, "OPEN_TIMEOUT_S", WAIT_S_MAX)


@pytest.mark.usefixtures("marked_at_five")
def test_process_writes_requested_epoch_while_others_are_applied(tmp_path: Path) -> None:
    root = tmp_path / "log"
    owners = [Owner(root, tmp_path / str(slots), slots) for slots in (LOW, HIGH)]
    with LogWriter(root, "job", [STATE], "q") as writer:
        for number in range(10):
            publish(writer, number)
    for owner in owners:
        owner.applier.step()
        assert owner.process is not None
    assert {owner.process.wait() for owner in owners if owner.process is not None} == {0}
    log, current = current_of(root)
    newest = snapshots.newest(log, current)
    assert newest is not None
    assert (newest.epoch, newest.rows) == (7, 8)
    with read_snapshot(root, "job") as snapshot:
        assert snapshot.value(KEYS[9]) == b"9"
    for owner in owners:
        owner.applier.close()


@pytest.mark.usefixtures("marked_at_five")
def test_owner_of_all_slots_counts_from_newest_snapshot_of_any_writer(tmp_path: Path) -> None:
    root = tmp_path / "log"
    owners = [Owner(root, tmp_path / f"store{number}", ALL) for number in range(2)]
    with LogWriter(root, "job", [STATE], "q") as writer:
        for number in range(6):
            publish(writer, number)
            owners[0].applier.step()
        assert owners[0].process is not None
        assert owners[0].process.wait() == 0
        assert owners[0].compactor.is_busy, "its end is not noticed yet, and the job does not rest before"
        assert owners[0].applier.last_report["state_bytes"] is None
        owners[0].applier.step()
        assert not owners[0].compactor.is_busy
        assert owners[0].applier.last_report["state_bytes"] == {"v": sum(map(len, KEYS[:6])) + 6}
        owners[1].applier.step()  # epoch 5: there is a snapshot of it
        for number in range(6, 10):
            publish(writer, number)
            owners[1].applier.step()
        assert owners[1].process is None
        owners[1].applier.close()
        owners[1] = Owner(root, tmp_path / "store1", ALL)  # epochs before a restart count, too
        publish(writer, 10)
        owners[1].applier.step()
        assert owners[1].process is not None
        assert owners[1].process.wait() == 0
    log, current = current_of(root)
    assert [manifest.epoch for manifest in log.snapshots(current)] == [10, 5]
    for owner in owners:
        owner.applier.close()


@pytest.mark.usefixtures("marked_at_five")
def test_owners_of_all_or_no_slots_ignore_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "log"
    monkeypatch.setattr(Compactor, "_start_process", lambda self: pytest.fail("a part is to be written"))
    monkeypatch.setattr(Compactor, "run_if_due", lambda self, log, store: None)
    with LogWriter(root, "job", [STATE], "q") as writer:
        for number in range(10):
            publish(writer, number)
    for slots in (ALL, NONE):
        owner = Owner(root, tmp_path / f"store{len(slots)}", slots)
        owner.applier.step()
        assert owner.applier.store is not None
        assert owner.applier.store.applied.epoch == 9
        owner.applier.close()


@pytest.mark.usefixtures("marked_at_five")
def test_silent_process_is_ended_and_applier_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compactor_module, "OPEN_TIMEOUT_S", 0.01)
    monkeypatch.setattr(Compactor, "_command", lambda self: [sys.executable, "-c", "import time; time.sleep(600)"])
    with LogWriter(tmp_path / "log", "job", [STATE], "q") as writer:
        for number in range(10):
            publish(writer, number)
    owner = Owner(tmp_path / "log", tmp_path / "store", LOW)
    owner.applier.step()
    assert owner.applier.store is not None
    assert owner.applier.store.applied.epoch == 9
    assert owner.process is not None
    assert owner.process.wait() < 0
    assert "no part of a snapshot is written at epoch 7" in caplog.text
    owner.applier.close()


@pytest.mark.usefixtures("marked_at_five")
def test_ended_waiting_process_is_restarted_at_next_epoch(tmp_path: Path) -> None:
    root = tmp_path / "log"
    owner = Owner(root, tmp_path / "store", LOW)
    with LogWriter(root, "job", [STATE], "q") as writer:
        for number in range(6):
            publish(writer, number)
        owner.applier.step()
        first = owner.process
        assert first is not None
        first.kill()
        first.wait()
        publish(writer, 6)
        publish(writer, 7)
        owner.applier.step()
    assert owner.process is not None
    assert owner.process is not first
    assert owner.process.wait() == 0
    assert [path.suffix for path in sorted((root / "job/q.1/snapshots/7").glob("part-*"))] == [".claim", ".json"]
    owner.applier.close()


@pytest.mark.usefixtures("marked_at_five")
def test_running_process_logs_as_its_applier_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "log"
    owner = Owner(root, tmp_path / "store", LOW)
    with LogWriter(root, "job", [STATE], "q") as writer:
        for number in range(6):
            publish(writer, number)
        owner.applier.step()
        started = owner.process
        owner.applier.set_up_log("json info")
        publish(writer, 6)
        publish(writer, 7)
        owner.applier.step()
    assert started is not None and owner.process is started
    assert started.wait() == 0
    [line] = [each for each in capfd.readouterr().err.splitlines() if "lacks parts" in each]
    assert json.loads(line)["part"] == "sparkis.compactor"
    owner.applier.set_up_log("text info")  # there is no process
    owner.applier.close()


@pytest.mark.usefixtures("marked_at_five")
def test_process_is_ended_while_it_waits(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "log", tmp_path / "store", LOW)
    with LogWriter(tmp_path / "log", "job", [STATE], "q") as writer:
        for number in range(6):
            publish(writer, number)
    owner.applier.step()
    assert owner.process is not None and owner.process.poll() is None  # it waits for epoch 7
    owner.applier.close()
    owner.compactor.close()
    assert owner.process.poll() == -signal.SIGKILL


def test_process_ends_with_its_applier(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "state_backend.apply.compactor", "--log", str(tmp_path), "--job", "job"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE).stdout == b""


def test_process_waits_for_its_epoch_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactor_module, "IDLE_S_MAX", 0.0)
    reading, writing = os.pipe()
    with os.fdopen(reading) as silent:
        monkeypatch.setattr(sys, "stdin", silent)
        assert main(["--log", str(tmp_path), "--job", "job"]) == 0
    os.close(writing)


def test_requests_are_read_from_given_input_despite_reused_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as given:
        monkeypatch.setattr(sys, "stdin", given)
        requests = _Requests()
    with open(os.devnull) as other:
        assert other.fileno() == reading
        for number in range(3):
            os.write(writing, b'{"store": "%d"}\n' % number)
            assert requests.next() == {"store": str(number)}
        os.close(writing)
        assert requests.next() is None


def test_store_of_another_generation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner(tmp_path / "log", tmp_path / "store", LOW)
    with LogWriter(tmp_path / "log", "job", [STATE], "q") as writer:
        publish(writer, 0)
    owner.applier.step()
    LogWriter(tmp_path / "log", "job", [STATE], "q2").close()
    assert owner.applier.store is not None
    path = str(owner.applier.store.path)
    owner.applier.close()
    with caplog.at_level(logging.ERROR), open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert main(["--log", str(tmp_path / "log"), "--job", "job", "--store", path]) == 1
    assert "not of the visible generation" in caplog.text
