"""A job has one writer at a time: the takeover of a job, its conditions, and the end of the former writer."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from compat.waiting import eventually
from state_backend.apply.heartbeats import HeartbeatWatch
from state_backend.apply.replay import read_snapshot
from state_backend.log import fencing, heartbeat_writer
from state_backend.log.change_log import ChangeLog
from state_backend.log.fencing import begin, claim, new_candidate, seal
from state_backend.log.filesystems import LocalFilesystem
from state_backend.log.log_writer import LogWriter
from state_backend.log.terms import Term, Terms
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import DescriptorError, FencedWriterError, JobInUseError
from tests.builders import put_value

STATE = StateDescriptor("s", key="k", value="v")


class FrequentHeartbeats(LocalFilesystem):
    """A log whose heartbeats are frequent; one may come while another writer reads it."""

    heartbeat_interval_s = 0.05
    writer: LogWriter | None = None

    def read(self, path: str) -> bytes | None:
        if path.startswith("job/heartbeats/") and self.writer is not None:
            self.writer.send_heartbeat()
        return super().read(path)


def writer_of(root: Path | LocalFilesystem, query_id: str | None = "q", **more: Any) -> LogWriter:
    options: dict[str, Any] = {"sends_heartbeats": False, "checkpoint": "/c"} | more
    return LogWriter(root, "job", [STATE], query_id, **options)


put = partial(put_value, "s", b"k")


class Clock:
    """Stands for `time` in what takes a job over: nobody sleeps, and sleeping is all that takes time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fencing, "time", clock)
    return clock


@pytest.fixture
def nobody_waits(clock: Clock) -> Iterator[None]:
    yield
    assert clock.now_s == 0


@pytest.mark.parametrize(
    "other",
    [
        {"query_id": "other"},
        {"checkpoint": "/copy/of/c"},
        {"query_id": None, "checkpoint": ""},
    ],
)
def test_another_query_does_not_take_living_writers_job(
    tmp_path: Path, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "now_ms", lambda: 1_700_000_000_000)
    log = FrequentHeartbeats(tmp_path)
    living = log.writer = writer_of(log)
    living.publish([put(b"1")])
    with pytest.raises(JobInUseError) as refused:
        writer_of(log, **({"query_id": "q"} | other))
    message = str(refused.value)
    for part in (
        "'job'",
        "query q ",
        socket.gethostname(),
        f"pid {os.getpid()}",
        "since 2023-11-14T22:13:20+00:00",
        "/c",
    ):
        assert part in message
    assert "takeover=True" in message
    assert living.publish([put(b"2")]) == 1


def test_pause_during_first_poll_does_not_free_job_of_living_writer(tmp_path: Path, clock: Clock) -> None:
    class Paused(FrequentHeartbeats):
        def read(self, path: str) -> bytes | None:
            if path.startswith("job/heartbeats/") and not clock.now_s:
                clock.now_s = 10.0
            return super().read(path)

    log = Paused(tmp_path)
    log.writer = writer_of(log)
    with pytest.raises(JobInUseError):
        writer_of(log, "other")


@pytest.mark.usefixtures("nobody_waits")
@pytest.mark.parametrize(
    ("taker", "epoch", "error"),
    [({}, 1, "query q, term 2"), ({"query_id": "other", "takeover": True}, 0, "query other")],
    ids=["same query", "takeover"],
)
def test_living_writer_is_replaced(tmp_path: Path, taker: dict[str, Any], epoch: int, error: str) -> None:
    log = FrequentHeartbeats(tmp_path)
    before = log.writer = writer_of(log)
    before.publish([put(b"1")])
    assert writer_of(log, **taker).publish([put(b"2")]) == epoch
    with pytest.raises(FencedWriterError, match=f"now written by {error}"):
        before.publish([put(b"3")])


@pytest.mark.usefixtures("nobody_waits")
def test_job_of_ended_query_is_free_at_once(tmp_path: Path) -> None:
    writer = writer_of(FrequentHeartbeats(tmp_path))
    writer.send_heartbeat()
    writer.close()
    writer_of(tmp_path, "other").publish([put(b"2")])


@pytest.mark.usefixtures("nobody_waits")
def test_job_with_final_state_is_free_at_once(tmp_path: Path) -> None:
    writer_of(FrequentHeartbeats(tmp_path)).mark_final()
    writer_of(tmp_path, "other").publish([put(b"2")])


@pytest.mark.parametrize("has_beaten", [True, False])
def test_job_of_silent_writer_is_free_after_three_heartbeats(tmp_path: Path, clock: Clock, has_beaten: bool) -> None:
    silent = writer_of(FrequentHeartbeats(tmp_path))
    if has_beaten:
        silent.send_heartbeat()
    writer_of(FrequentHeartbeats(tmp_path), "other").publish([put(b"2")])
    assert 0.15 <= clock.now_s < 0.4
    with pytest.raises(FencedWriterError):
        silent.publish([put(b"3")])


@pytest.mark.usefixtures("nobody_waits")
def test_older_writer_without_heartbeats_is_followed_at_once(tmp_path: Path) -> None:
    claim(Terms(LocalFilesystem(tmp_path), "job"), new_candidate("one"))
    writer_of(tmp_path, "other").publish([put(b"2")])


def test_heartbeat_of_fenced_writer_is_ignored(tmp_path: Path) -> None:
    before = writer_of(tmp_path)
    before.send_heartbeat()
    after = writer_of(tmp_path)
    log = ChangeLog(tmp_path).job("job")
    assert log.heartbeat() == {}
    before.close()
    before.send_heartbeat()
    assert log.heartbeat() == {}
    after.send_heartbeat()
    assert log.heartbeat()["writer"] == after.current.writer
    assert (before.send_heartbeat(), after.send_heartbeat()) == (False, True)


@pytest.mark.parametrize("end", ["close", "forget"])
def test_writers_heartbeat_thread_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(heartbeat_writer, "HEARTBEAT_INTERVAL_S", 0.01)
    writer = writer_of(tmp_path, sends_heartbeats=True)
    log, watch = ChangeLog(tmp_path).job("job"), HeartbeatWatch()
    thread = next(each for each in threading.enumerate() if each.name == "sparkis-heartbeat-job")
    eventually(lambda: watch.is_stale(log.heartbeat()), lambda is_stale: not is_stale)
    if end == "close":
        writer.close()
        assert log.heartbeat()["is_running"] is False
    del writer
    gc.collect()
    thread.join()


def test_heartbeat_repeats_last_status(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    writer.mark_final()
    before = writer.log.heartbeat()
    assert (writer._heartbeats.repeat(), writer.log.heartbeat()) == (True, before)
    writer.send_heartbeat()
    assert writer._heartbeats.repeat()
    assert writer.log.heartbeat()["is_running"] is True
    writer.close()
    assert not writer._heartbeats.repeat()
    assert writer.log.heartbeat()["is_running"] is False


def test_idle_job_stays_idle_while_taken_over(tmp_path: Path) -> None:
    before = writer_of(tmp_path)
    before.mark_final()
    writer_of(tmp_path)
    assert ChangeLog(tmp_path).job("job").heartbeat()["is_final"] is True


def test_refused_start_fences_no_writer(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    writer.publish([put(b"1")])
    with pytest.raises(DescriptorError, match="'s'"):
        LogWriter(tmp_path, "job", [StateDescriptor("s", key="k", value="v", field="f")], "q", checkpoint="/c")
    assert writer.publish([put(b"2")]) == 1


def test_claim_of_dead_writer_is_void(tmp_path: Path) -> None:
    writer_of(tmp_path).publish([put(b"1")])
    terms = Terms(LocalFilesystem(tmp_path), "job")
    died = claim(terms, new_candidate("other"))
    assert read_snapshot(tmp_path, "job").applied.generation == "q.1", "readers know nothing of it"
    assert writer_of(tmp_path).publish([put(b"2")]) == 1
    with pytest.raises(FencedWriterError, match="now written by query q, term 3"):
        begin(terms, Term(died.term, "start", died.writer, "other.2"), died)
    assert [terms.read(number).reason for number in (1, 2, 3)] == ["start", "void", "restart"]  # type: ignore[union-attr]


def test_simultaneous_claims_get_different_terms(tmp_path: Path) -> None:
    terms = Terms(LocalFilesystem(tmp_path), "job")
    claims = [claim(terms, new_candidate(f"q{number}")) for number in range(5)]
    assert [each.term for each in claims] == [1, 2, 3, 4, 5]
    assert seal(terms, claims[-1]) is None
    assert [terms.read(number).is_void for number in range(1, 5)] == [True] * 4  # type: ignore[union-attr]


def test_void_term_ends_its_writer_before_anything_counts(tmp_path: Path) -> None:
    """The newer writer comes between the older one's claim and its beginning."""

    class Late(LocalFilesystem):
        def create(self, path: str, content: bytes) -> bool:
            if path == "job/terms/2.json":
                LogWriter(tmp_path, "job", [STATE], "q").publish([put(b"newer")])
            return super().create(path, content)

    LogWriter(tmp_path, "job", [STATE], "q", sends_heartbeats=False).publish([put(b"1")])
    with pytest.raises(FencedWriterError):
        LogWriter(Late(tmp_path), "job", [STATE], "other")
    with read_snapshot(tmp_path, "job") as shown:
        assert shown.value(b"k") == b"newer"


class Watched(LocalFilesystem):
    """A folder that records the paths of reads and listings."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.looked: list[str] = []

    def read(self, path: str) -> bytes | None:
        self.looked.append(path)
        return super().read(path)

    def names(self, path: str) -> list[str]:
        self.looked.append(path)
        return super().names(path)


def test_new_reader_reads_no_terms_but_newest(tmp_path: Path) -> None:
    filesystem = Watched(tmp_path)
    looked = filesystem.looked
    for _ in range(3):
        writer_of(tmp_path)
    assert ChangeLog(filesystem).job("job").current() is not None
    assert looked == ["job/terms/1.json", "job/terms", "job/terms/3.json", "job/terms/4.json"]
    looked.clear()
    assert ChangeLog(filesystem).job("other").current() is None
    assert set(looked) == {"other/terms/1.json"}


def test_reader_finds_next_term_in_one_file(tmp_path: Path) -> None:
    filesystem = Watched(tmp_path)
    looked = filesystem.looked
    writer_of(tmp_path)
    log = ChangeLog(filesystem).job("job")
    assert log.current() is not None
    looked.clear()
    assert log.current() is not None
    assert looked == ["job/terms/2.json"]
