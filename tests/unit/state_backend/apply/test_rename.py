"""A job of a log gets another name, with all of its state, whatever happens meanwhile."""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from state_backend.apply import file_split
from state_backend.apply import rename as renaming
from state_backend.apply.applier import Applier
from state_backend.apply.rename import rename
from state_backend.apply.replay import read_snapshot
from state_backend.codec.packed_map import pack
from state_backend.log import fencing
from state_backend.log.change_log import ChangeLog
from state_backend.log.filesystems import LocalFilesystem
from state_backend.log.log_writer import LogWriter
from state_backend.log.promotion import promote
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import DescriptorError, EpochHoleError, FencedWriterError, JobInUseError, LogError
from state_backend.model.records import Change, Op
from tests.unit.state_backend.dying import Died, Dying

STATES = (
    StateDescriptor("temp", key="k", value="v"),
    StateDescriptor("facts", key=["k", "j"], value=["a", "b"]),
    StateDescriptor("hours", key="k", field="f", value="v"),
    StateDescriptor("trail", key="k", value="v", kind="list"),
    StateDescriptor("planes", key_format="plane/<k>", value="v"),
)
CLOCK_MS = 1_700_000_000_000
FAR_MS = 4_000_000_000_000


@pytest.fixture(autouse=True)
def no_wait_for_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for one more heartbeat of the last writer, and not for three seconds; `test_fencing.py` tests the wait."""
    monkeypatch.setattr(fencing, "HEARTBEATS_MISSED_MAX", 0.01)


# A writer that is not closed, and does not say that it lives.
silent_writer = partial(LogWriter, sends_heartbeats=False)


def old_job(root: Any, **more: Any) -> LogWriter:
    """Publish three epochs of all kinds of state as `old`."""
    writer = LogWriter(root, "old", STATES, "q", **{"sends_heartbeats": False} | more)
    writer.publish([Change("temp", Op.PUT, b"old:temp:gone", None, b"1")], clock_ms=CLOCK_MS)
    writer.publish(
        [
            Change("temp", Op.DELETE, b"old:temp:gone", None, None),
            Change("temp", Op.PUT, b"old:temp:a", None, b"1"),
            Change("temp", Op.PUT, b"old:temp:old:temp:b", None, b"2", FAR_MS),
            Change("facts", Op.PUT, b"old:facts:a:b", None, pack([(b"a", b"1"), (b"b", b"2")])),
            *(Change("hours", Op.PUT, b"old:hours:a", b"%d" % hour, b"x" * 100) for hour in range(300)),
            Change("planes", Op.PUT, b"plane/old:1", None, b"B737"),
        ],
        clock_ms=CLOCK_MS + 1,
    )
    writer.publish(
        [Change("trail", Op.APPEND, b"old:trail:a", None, b"%d" % number) for number in range(3)],
        clock_ms=CLOCK_MS + 2,
    )
    return writer


def content(root: Any, job: str) -> list[Change]:
    """Return all that a job holds, as changes out of nothing."""
    with read_snapshot(root, job, at_ms=CLOCK_MS + 3) as snapshot:
        return ordered(list(snapshot.changes()))


def ordered(changes: list[Change]) -> list[Change]:
    return sorted(changes, key=lambda change: (change.key, change.field or b""))


def as_new(changes: list[Change]) -> list[Change]:
    """Return what is to become of them: keys that began with the job's name begin with the new one."""
    return ordered([each._replace(key=b"new:" + each.key[4:]) if each.key[:4] == b"old:" else each for each in changes])


def test_renamed_job_has_new_keys_only(tmp_path: Path) -> None:
    old_job(tmp_path)
    before = content(tmp_path, "old")
    assert "job old is now new" in rename(tmp_path, "old", "new")
    assert content(tmp_path, "new") == as_new(before)
    with read_snapshot(tmp_path, "new", at_ms=CLOCK_MS + 3) as snapshot:
        assert snapshot.value(b"new:temp:a") == b"1"
        assert snapshot.value(b"new:temp:old:temp:b") == b"2"
        assert snapshot.value(b"plane/old:1") == b"B737"  # a format of its own does not hold the job's name
        assert (snapshot.applied.epoch, snapshot.applied.clock_ms) == (2, CLOCK_MS + 2)
    assert ChangeLog(tmp_path).jobs() == ["new"]
    assert sorted(file.name for file in (tmp_path / "old").iterdir()) == ["heartbeats", "terms"]


def test_large_state_is_in_bounded_files_and_no_key_in_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_split, "STATE_FILE_BYTES_MAX", 100)
    old_job(tmp_path)
    before = content(tmp_path, "old")
    rename(tmp_path, "old", "new")
    assert len(list((tmp_path / "new" / "q.1" / "changes").iterdir())) > 1
    assert content(tmp_path, "new") == as_new(before)


def test_query_continues_under_new_name_and_replay_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old_job(tmp_path)
    rename(tmp_path, "old", "new")
    writer = silent_writer(tmp_path, "new", STATES, "q")
    with caplog.at_level(logging.WARNING):
        replayed = [Change("trail", Op.APPEND, b"old:trail:a", None, b"%d" % number) for number in range(3)]
        writer.publish(replayed, epoch=2, clock_ms=CLOCK_MS + 9)
    assert caplog.text == ""
    writer.publish([Change("temp", Op.PUT, b"new:temp:a", None, b"9")])
    with read_snapshot(tmp_path, "new") as snapshot:
        assert (snapshot.value(b"new:temp:a"), snapshot.applied.epoch) == (b"9", 3)
        assert snapshot.list_size(b"new:trail:a") == 3
    with pytest.raises(DescriptorError, match=r"sparkis rename --log .* new old"):
        silent_writer(tmp_path, "old", STATES, "q")


def test_total_is_carried_on(tmp_path: Path) -> None:
    totals = [StateDescriptor("total", key="k", value="v", reduce="sum", columns={"v": "bigint"})]

    def add(job: str, number: int) -> None:
        fold = Change("total", Op.FOLD, f"{job}:total:a".encode(), None, b"%d" % number)
        silent_writer(tmp_path, job, totals, "q").publish([fold])

    add("old", 2)
    add("old", 3)
    rename(tmp_path, "old", "new")
    add("new", 4)
    with read_snapshot(tmp_path, "new") as snapshot:
        assert snapshot.value(b"new:total:a") == b"9"


def test_renamed_job_is_incomplete_like_old_job(tmp_path: Path) -> None:
    silent_writer(tmp_path, "old", STATES[:1], "q").publish([], epoch=7)
    rename(tmp_path, "old", "new")
    assert ChangeLog(tmp_path).job("new").description("q.1").incomplete == ("temp",)
    silent_writer(tmp_path, "late", STATES[:1], "p").publish([])
    silent_writer(tmp_path, "late", STATES[:2], "p").publish([])
    rename(tmp_path, "late", "later")
    assert ChangeLog(tmp_path).job("later").description("p.1").incomplete == ("facts",)
    rename(tmp_path, "later", "late")
    assert ChangeLog(tmp_path).job("late").description("p.4").incomplete == ("facts",)


def test_dropped_state_that_is_not_yet_emptied_is_not_continued(tmp_path: Path) -> None:
    old_job(tmp_path)
    silent_writer(tmp_path, "old", STATES[1:], "q")
    rename(tmp_path, "old", "new")
    assert {change.state for change in content(tmp_path, "new")} == {"facts", "hours", "trail", "planes"}


def test_crash_at_any_write_leaves_whole_job_and_command_continues(tmp_path: Path) -> None:
    for allowed in range(100):
        root = tmp_path / str(allowed)
        old_job(root)
        before = content(root, "old")
        try:
            rename(Dying(root, allowed), "old", "new")
            break
        except Died:
            pass
        jobs = ChangeLog(root).jobs()
        assert jobs in (["old"], ["new", "old"], ["new"])
        for job in jobs:
            assert content(root, job) == (before if job == "old" else as_new(before))
        if allowed % 2 and "old" in jobs:  # it is as if nothing had happened, or the command is run again
            added = Change("temp", Op.PUT, b"old:temp:c", None, b"3")
            silent_writer(root, "old", STATES, "q").publish([added])
            if jobs == ["old"]:
                rename(root, "old", "new")
                assert content(root, "new") == as_new([*before, added])
            else:
                with pytest.raises(LogError, match="the log has both: 'old' was written again, up to epoch 3"):
                    rename(root, "old", "new")
        else:
            rename(root, "old", "new")
            assert (ChangeLog(root).jobs(), content(root, "new")) == (["new"], as_new(before))
            assert sorted(file.name for file in (root / "old").iterdir()) == ["heartbeats", "terms"]
    assert 10 < allowed < 100
    assert content(root, "new") == as_new(before)


def test_writer_of_old_name_is_fenced(tmp_path: Path) -> None:
    writer = old_job(tmp_path)
    with pytest.raises(Died):
        rename(Dying(tmp_path, 5), "old", "new")
    with pytest.raises(FencedWriterError):
        writer.publish([])
    rename(tmp_path, "old", "new")
    with pytest.raises(FencedWriterError, match="was renamed to 'new'"):
        writer.publish([])
    with pytest.raises(EpochHoleError):
        silent_writer(tmp_path, "new", STATES, "q").publish([], epoch=4)


def test_job_that_is_being_written_is_not_renamed(tmp_path: Path) -> None:
    writer = old_job(tmp_path, checkpoint="/checkpoint", sends_heartbeats=True)
    writer.send_heartbeat()

    class Beating(LocalFilesystem):
        def read(self, path: str) -> bytes | None:
            if path == "old/heartbeats/1.json":
                writer.send_heartbeat()
            return super().read(path)

    with pytest.raises(JobInUseError, match=r"job 'old' .* is being written by query q .*checkpoint /checkpoint"):
        rename(Beating(tmp_path), "old", "new")
    writer.publish([])


def test_job_whose_new_generation_is_held_back_is_not_renamed(tmp_path: Path) -> None:
    old_job(tmp_path).close()
    before = content(tmp_path, "old")
    with LogWriter(tmp_path, "old", STATES, "p", holds_back=True) as writer:
        writer.publish([Change("temp", Op.PUT, b"old:temp:a", None, b"half")])
    with pytest.raises(LogError, match=r"job 'old' .* is held back .*sparkis promote --log .* old"):
        rename(tmp_path, "old", "new")
    assert (ChangeLog(tmp_path).jobs(), content(tmp_path, "old")) == (["old"], before)
    promote(tmp_path, "old")
    rename(tmp_path, "old", "new")
    with read_snapshot(tmp_path, "new") as snapshot:
        assert (snapshot.value(b"new:temp:a"), snapshot.applied.epoch) == (b"half", 0)


def test_impossible_rename_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="has no job 'old'; jobs: none"):
        rename(tmp_path, "old", "new")
    silent_writer(tmp_path, "empty", STATES[:1], "e")
    with pytest.raises(LogError, match="job 'empty' has no epoch yet; start its query under the new name"):
        rename(tmp_path, "empty", "new")
    old_job(tmp_path)
    with pytest.raises(DescriptorError, match="the job is called 'old' already"):
        rename(tmp_path, "old", "old")
    with pytest.raises(DescriptorError, match="the job name 'a b'"):
        rename(tmp_path, "old", "a b")
    with pytest.raises(DescriptorError, match="has a job 'empty' already; take another name"):
        rename(tmp_path, "old", "empty")
    silent_writer(tmp_path, "attached", STATES[:1], "q-0", source={"states": {}}).publish([])
    with pytest.raises(DescriptorError, match="attach, or publish, with job='new', and drop 'attached'"):
        rename(tmp_path, "attached", "new")
    silent_writer(tmp_path, "old", STATES, "q").publish([])


def test_command_prints_its_result_or_reason_of_its_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old_job(tmp_path).close()
    parser = argparse.ArgumentParser()
    renaming.add_options(parser)
    options = parser.parse_args(["--log", str(tmp_path), "old", "new"])
    assert renaming.run(options) == 0
    assert (
        "job old is now new, with 2 as its first epoch; start its query under the new name" in capsys.readouterr().out
    )
    assert renaming.run(options) == 0
    assert "job old is called new already" in capsys.readouterr().out
    assert renaming.run(parser.parse_args(["--log", str(tmp_path), "x", "y"])) == 1
    assert "sparkis rename: the log" in capsys.readouterr().err


def test_applier_takes_renamed_job_and_logs_its_former_name(tmp_path: Path) -> None:
    old_job(tmp_path / "log")
    rename(tmp_path / "log", "old", "new")
    events: list[dict[str, Any]] = []
    applier = Applier(ChangeLog(tmp_path / "log"), "new", tmp_path / "store", events.append)
    applier.step()
    applier.close()
    (opened,) = (event for event in events if event["event"] == "open")
    assert (opened["renamed_from"], opened["is_incomplete"]) == ("old", False)


def test_applier_of_old_name_makes_no_error_of_its_jobs_end(tmp_path: Path) -> None:
    old_job(tmp_path / "log")
    events: list[dict[str, Any]] = []
    applier = Applier(ChangeLog(tmp_path / "log"), "old", tmp_path / "store", events.append)
    applier.step()
    rename(tmp_path / "log", "old", "new")
    applier.step()
    applier.close()
    assert [event["error"] for event in events if "error" in event] == [""] * len(events[1:])
