"""A job's log in an S3 bucket: written, read, followed, compacted and swept; whole whatever the network does."""

from __future__ import annotations

import os
import random
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import pytest

from compat.object_store.faulty_proxy import FaultyProxy, Kind
from state_backend.apply import applier as applier_module
from state_backend.apply.applier import Applier, follow_until_end
from state_backend.apply.compact import compact_log
from state_backend.apply.heartbeats import HeartbeatWatch
from state_backend.apply.replay import read_snapshot
from state_backend.log.change_log import ChangeLog
from state_backend.log.log_writer import LogWriter
from state_backend.model.errors import FencedWriterError, LogError, LogUnavailableError
from state_backend.model.records import Change, Op
from tests.object_store.logs import STATE, methods, one, writer_of

LATER_MS = 10**13


def counts(root: str) -> dict[bytes, int]:
    """Return what the log says."""
    with read_snapshot(root, "job") as shown:
        return {change.key: int(change.value or b"0") for change in shown.changes()}


class Followed:
    """An applier of a log, and all that it reported."""

    def __init__(self, root: str, folder: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self.applier = Applier(ChangeLog(root), "job", folder, self.events.append)

    @property
    def known(self) -> dict[str, Any]:
        return {name: value for event in self.events for name, value in event.items()}

    def counts(self) -> dict[bytes, int]:
        store = self.applier.store
        assert store is not None
        with store.snapshot(0) as shown:
            return {change.key: int(change.value or b"0") for change in shown.changes()}


@pytest.fixture
def followed(root: str, tmp_path: Path) -> Iterator[Followed]:
    followed = Followed(root, tmp_path)
    yield followed
    followed.applier.close()


def test_log_is_written_read_compacted_and_collected(root: str, tmp_path: Path) -> None:
    writer = writer_of(root)
    for turn in range(5):
        writer.publish([one(key) for key in range(turn + 1)], clock_ms=turn)
    large = [Change("count", Op.FOLD, b"job:count:%0512d" % key, None, b"1") for key in range(500)]
    writer.publish(large, clock_ms=5)
    expected = {b"job:count:%d" % key: 5 - key for key in range(5)} | {change.key: 1 for change in large}
    assert counts(root) == expected
    job = ChangeLog(root).job("job")
    current = job.current()
    assert current is not None
    assert job.numbers(current.generation) == [0, 1, 2, 3, 4, 5]
    assert "snapshot" in compact_log(root, "job", 0)
    assert job.numbers(current.generation) == [5]
    assert len(job.filesystem.names(job.changes_folder(current.generation))) == 1
    assert counts(root) == expected
    writer.publish([one(0)], clock_ms=6)
    followed = Followed(root, tmp_path)
    followed.applier.step()
    assert (followed.known["applied"], followed.known["error"]) == (6, "")
    assert followed.counts() == counts(root) == expected | {b"job:count:0": 6}
    followed.applier.close()


def test_acknowledged_epoch_is_never_overwritten(root: str) -> None:
    racer = """
import sys
from state_backend.model.errors import LogError
sys.path.insert(0, sys.argv[3])
from tests.object_store.logs import one, writer_of
print("ready", flush=True)
for line in sys.stdin:
    try:
        writer = writer_of(sys.argv[1])
        print(writer.publish([one(int(line), int(sys.argv[2]))]), flush=True)
    except LogError:
        print(-1, flush=True)
"""
    writer_of(root).publish([one(0)])
    command = [sys.executable, "-c", racer, root]
    racers = [
        subprocess.Popen(
            [*command, str(10**number), os.path.dirname(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for number in range(4)
    ]
    acknowledged: set[tuple[int, int]] = set()
    epochs = [0]
    try:
        for racer_process in racers:
            assert racer_process.stdout is not None
            assert racer_process.stdout.readline() == "ready\n"
        for turn in range(1, 5):
            for racer_process in racers:
                assert racer_process.stdin is not None
                racer_process.stdin.write(f"{turn}\n")
            for number, racer_process in enumerate(racers):
                assert racer_process.stdout is not None
                epoch = int(racer_process.stdout.readline())
                if epoch >= 0:
                    epochs.append(epoch)
                    acknowledged.add((turn, number))
        assert len(set(epochs)) == len(epochs)
        found = {turn: counts(root).get(b"job:count:%d" % turn, 0) for turn in range(1, 9)}
        assert all(set(str(count)) <= {"0", "1"} for count in found.values())
        stored = {(turn, number) for turn, count in found.items() for number in range(4) if count // 10**number % 10}
        # The commit of a writer that finds a newer one may be in the log, although it raised an error.
        assert acknowledged <= stored
    finally:
        for racer_process in racers:
            assert racer_process.stdin is not None
            racer_process.stdin.close()
            racer_process.wait()


def test_older_writer_is_fenced(root: str) -> None:
    older = writer_of(root)
    older.publish([one(0)])
    writer_of(root).publish([one(0)])
    with pytest.raises(FencedWriterError):
        older.publish([one(0)])
    assert counts(root) == {b"job:count:0": 2}


@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2))])
def test_no_epoch_is_lost_or_doubled_on_bad_network(
    proxy: FaultyProxy, root: str, followed: Followed, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """What Spark does is done here: a batch that failed is run again, by a new writer, with the same number."""
    monkeypatch.setattr("state_backend.log.filesystems.object_store.RETRY_TIMEOUT_S", 0.3)
    monkeypatch.setattr("state_backend.log.filesystems.object_store.RETRY_PAUSES_S", (0.01, 0.02))
    rng = random.Random(seed)
    kinds: tuple[Kind, ...] = ("cut", "lose", "500", "503", "late")
    followed.applier = Applier(ChangeLog(root), "job", followed.applier._stores.path.parent, followed.events.append)
    writer: LogWriter | None = None
    failures = 0
    for batch in range(12):
        for _ in range(rng.randint(0, 3)):
            method = rng.choice(["GET", "PUT", "PUT", "POST"])
            proxy.fail(rng.choice(kinds), method, times=rng.choice([1, 2, 30]))
        rows = [one(key) for key in range(batch + 1)]
        if rng.random() < 0.3:  # a change file
            rows += [Change("count", Op.FOLD, b"job:count:%0512d" % key, None, b"1") for key in range(200)]
        while True:
            try:
                writer = writer or writer_of(root)
                if writer.last is None or writer.last.epoch < batch:
                    writer.publish(rows, batch)
                break
            except LogError:
                failures += 1
                writer = None
                proxy.heal()
        followed.applier.step()
    proxy.heal()
    assert failures > 0
    followed.applier.step()
    assert followed.known["applied"] == 11
    assert followed.known["error"] == ""
    assert followed.counts() == counts(root)
    assert {key: value for key, value in counts(root).items() if len(key) < 100} == {
        b"job:count:%d" % key: 12 - key for key in range(12)
    }


def test_server_serves_its_state_while_object_store_is_unreachable(
    proxy: FaultyProxy, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("state_backend.log.filesystems.object_store.RETRY_TIMEOUT_S", 0.0)
    monkeypatch.setattr("state_backend.log.filesystems.object_store.RETRY_PAUSES_S", ())
    followed = Followed(root, tmp_path)
    writer = writer_of(root)
    writer.publish([one(0)])
    followed.applier.step()
    for method in ("GET", "PUT"):
        proxy.fail("503", method, times=10**6)
    with pytest.raises(LogUnavailableError):
        writer.publish([one(0)])
    followed.applier.step()
    assert root in followed.known["error"]
    assert followed.counts() == {b"job:count:0": 1}
    proxy.heal()
    writer_of(root).publish([one(0)])
    followed.applier.step()
    assert followed.known["error"] == ""
    assert followed.counts() == {b"job:count:0": 2}
    followed.applier.close()


def test_epoch_is_few_requests(
    monkeypatch: pytest.MonkeyPatch, proxy: FaultyProxy, root: str, followed: Followed
) -> None:
    # The applier looks for heartbeats as time passes; here none passes.
    monkeypatch.setattr(applier_module, "time", SimpleNamespace(monotonic=lambda: 0.0, perf_counter_ns=perf_counter_ns))
    writer = writer_of(root, sends_heartbeats=False)  # a heartbeat is a PUT
    writer.publish([one(0)])
    followed.applier.step()
    proxy.taken()
    for _ in range(10):
        writer.publish([one(0)])
    written = methods(proxy)
    assert written["PUT"] == 10
    assert written["GET"] <= 40
    assert written["LIST"] == 0
    writer.send_heartbeat()
    followed.applier.step()
    proxy.taken()
    for _ in range(10):
        writer.publish([one(0)])
        proxy.taken()
        followed.applier.step()
        read = methods(proxy)
        assert read["GET"] + read["HEAD"] <= 7
        assert set(read) <= {"GET", "HEAD"}


@pytest.mark.parametrize("has_heartbeat", [True, False])
def test_poll_without_news_is_one_get(
    monkeypatch: pytest.MonkeyPatch, proxy: FaultyProxy, root: str, followed: Followed, has_heartbeat: bool
) -> None:
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s, perf_counter_ns=perf_counter_ns)
    monkeypatch.setattr(applier_module, "time", clock)
    writer = writer_of(root, sends_heartbeats=False)
    writer.publish([one(0)])
    if has_heartbeat:
        writer.send_heartbeat()
    for _ in range(20):  # the first heartbeat is looked for a few times
        now_s += 1
        followed.applier.step()
    proxy.taken()
    looks = 5
    for _ in range(looks):
        followed.applier.step()
    assert methods(proxy) == {"GET": looks}
    epochs = [writer.publish([one(0)]) for _ in range(3)]
    followed.applier.step()
    assert followed.known["applied"] == epochs[-1]


@pytest.mark.parametrize("folder", ["epochs", "changes"])
def test_several_epochs_are_requested_at_once(proxy: FaultyProxy, root: str, followed: Followed, folder: str) -> None:
    writer = writer_of(root, sends_heartbeats=False)
    writer.publish([one(0)])
    followed.applier.step()
    for _ in range(3):
        writer.publish([one(key) for key in range(5_000)])
    log = ChangeLog(root).job("job")
    current = log.current()
    assert current is not None
    proxy.held = (f"/{folder}/", threading.Barrier(2))  # each request waits for the other one
    epochs = log.next_epochs(current, 1, 2)
    assert [epoch.epoch for epoch in epochs] == [1, 2]
    proxy.held = None
    proxy.taken()
    assert [run.num_rows for epoch in epochs for run in log.runs(current.generation, epoch)] == [5_000, 5_000]
    assert proxy.taken() == []


def test_new_writer_is_found_by_announcement(monkeypatch: pytest.MonkeyPatch, root: str, followed: Followed) -> None:
    monkeypatch.setattr(applier_module, "time", SimpleNamespace(monotonic=lambda: 0.0, perf_counter_ns=perf_counter_ns))
    writer_of(root).publish([one(0)])
    followed.applier.step()
    other = LogWriter(root, "job", [STATE], "q2", takeover=True)
    other.publish([one(1)])
    followed.applier.take_announcement(2, 0)
    followed.applier.step()
    assert followed.counts() == {b"job:count:1": 1}


def test_announced_epoch_costs_two_requests_before_due_work(
    monkeypatch: pytest.MonkeyPatch, proxy: FaultyProxy, root: str, tmp_path: Path
) -> None:
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s, perf_counter_ns=perf_counter_ns)
    monkeypatch.setattr(applier_module, "time", clock)
    requests: list[list[str]] = []  # before each report

    def report(event: dict[str, Any]) -> None:
        requests.append([path.rpartition("/")[2] for _, path in proxy.taken()])

    applier = Applier(ChangeLog(root), "job", tmp_path, report)
    writer = writer_of(root, sends_heartbeats=False)
    writer.publish([one(0)])
    for _ in range(2):
        applier.step()
    for _ in range(3):
        now_s += 100  # heartbeats, a new writer and missing epochs are looked for again
        epoch = writer.publish([one(0)])
        applier.take_announcement(1, epoch)
        proxy.taken()
        requests.clear()
        assert applier.step()  # there is more to do
        assert applier.last_report["applied"] == epoch
        assert sorted(requests[0]) == sorted([f"{epoch}.json", "2.json"])
        proxy.taken()
        applier.step()
        assert any("/heartbeats/" in path for _, path in proxy.taken())
    applier.close()


def test_next_writers_epoch_is_found_unannounced(
    monkeypatch: pytest.MonkeyPatch, root: str, followed: Followed
) -> None:
    monkeypatch.setattr(applier_module, "time", SimpleNamespace(monotonic=lambda: 0.0, perf_counter_ns=perf_counter_ns))
    for epoch in range(4):
        writer_of(root).publish([one(0)])
        followed.applier.step()
        assert followed.known["applied"] == epoch
    assert followed.counts() == {b"job:count:0": 4}


def test_heartbeats_are_rare_and_end_is_written_at_once(proxy: FaultyProxy, root: str) -> None:
    writer = writer_of(root, sends_heartbeats=False)
    proxy.taken()
    for _ in range(15):
        assert writer.send_heartbeat()
    assert methods(proxy) == {"PUT": 1, "GET": 1}
    writer.close()
    assert methods(proxy) == {"PUT": 1, "GET": 1}
    assert ChangeLog(root).job("job").heartbeat()["is_running"] is False


def test_writer_is_stale_after_three_missed_heartbeats(root: str) -> None:
    now_s = 0.0
    pulse = HeartbeatWatch(lambda: now_s)
    writer = writer_of(root, sends_heartbeats=False)
    writer.send_heartbeat()
    sign = ChangeLog(root).job("job").heartbeat()
    assert pulse.is_stale(sign)
    assert not pulse.is_stale(sign | {"count": 2})
    now_s = 3 * sign["interval_s"]
    assert not pulse.is_stale(sign | {"count": 2})
    now_s += 1
    assert pulse.is_stale(sign | {"count": 2})


def test_polling_slows_down_until_next_epoch(root: str, followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(root)
    writer.publish([one(0)])
    waits: list[float] = []
    reading, writing = os.pipe()

    def wait(lines: list[int], _: Any, __: Any, timeout_s: float) -> tuple[list[int], list[int], list[int]]:
        """Stand for the time between two looks."""
        if not timeout_s:  # an epoch was found: has the server sent a line before it?
            return [], [], []
        waits.append(timeout_s)
        if len(waits) == 7:
            writer.publish([one(0)])  # and nobody tells
        if len(waits) == 14:
            writer.publish([one(0)])
            os.write(writing, b"look\n")
        if len(waits) == 17:
            os.close(writing)
        return (lines if len(waits) in (14, 17) else [], [], [])

    monkeypatch.setattr(applier_module, "select", type("Select", (), {"select": staticmethod(wait)}))
    follow_until_end(followed.applier, reading, 1.0)
    os.close(reading)
    assert waits == [1, 2, 4, 8, 15, 15, 15, 1, 2, 4, 8, 15, 15, 15, 15, 15, 15]
    assert followed.known["applied"] == 2
    assert select.select([], [], [], 0) == ([], [], [])
