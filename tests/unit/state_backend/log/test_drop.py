"""A job is removed from a log for good, whatever happens meanwhile."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from state_backend.apply.applier import Applier
from state_backend.apply.replay import read_snapshot
from state_backend.log import drop as dropping
from state_backend.log.change_log import ChangeLog
from state_backend.log.drop import drop
from state_backend.log.filesystems import LocalFilesystem
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import FencedWriterError, JobInUseError, LogError
from tests.builders import put_value
from tests.unit.state_backend.dying import Died, Dying

STATE = StateDescriptor("s", key="k", value="v")


put = partial(put_value, "s", b"k")


def job(root: Any, **more: Any) -> LogWriter:
    writer = LogWriter(root, "job", [STATE], "q", **{"sends_heartbeats": False} | more)
    writer.publish([put(b"1" * 100_000)])
    return writer


def left(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "job").iterdir())


def test_dropped_job_is_gone_and_so_are_its_files(tmp_path: Path) -> None:
    job(tmp_path).close()
    assert drop(tmp_path, "job") == "job job is dropped"
    assert ChangeLog(tmp_path).jobs() == []
    assert ChangeLog(tmp_path).job("job").current() is None
    assert left(tmp_path) == ["heartbeats", "terms"]
    with pytest.raises(LogError, match="has no epoch of a job 'job'"):
        read_snapshot(tmp_path, "job")
    assert drop(tmp_path, "job") == "job job was dropped already"


def test_query_that_starts_again_under_name_begins_with_nothing(tmp_path: Path) -> None:
    job(tmp_path).close()
    drop(tmp_path, "job")
    writer = LogWriter(tmp_path, "job", [STATE], "q")
    assert (writer.last, writer.generation) == (None, "q.3")
    writer.publish([put(b"2")])
    assert ChangeLog(tmp_path).jobs() == ["job"]


def test_job_that_is_being_written_is_dropped_by_force_alone(tmp_path: Path) -> None:
    class Beating(LocalFilesystem):
        def read(self, path: str) -> bytes | None:
            if path == "job/heartbeats/1.json":
                writer.send_heartbeat()
            return super().read(path)

    writer = job(tmp_path, sends_heartbeats=True)
    with pytest.raises(JobInUseError, match=r"is being written by query q .*--force"):
        drop(Beating(tmp_path), "job")
    writer.publish([put(b"2")])
    drop(tmp_path, "job", is_forced=True)
    with pytest.raises(FencedWriterError, match="was dropped while query q wrote it"):
        writer.publish([put(b"3")])
    assert left(tmp_path) == ["heartbeats", "terms"]


def test_crash_anywhere_leaves_job_as_it_was_or_dropped(tmp_path: Path) -> None:
    outcomes = set()
    for allowed in range(20):
        root = tmp_path / str(allowed)
        job(root).close()
        try:
            drop(Dying(root, allowed), "job")
            break
        except Died:
            pass
        jobs = ChangeLog(root).jobs()
        outcomes.add(bool(jobs))
        if jobs:
            with read_snapshot(root, "job") as shown:
                assert shown.value(b"k") == b"1" * 100_000
            assert LogWriter(root, "job", [STATE], "q", sends_heartbeats=False).publish([put(b"2")]) == 1, (
                "its query goes on"
            )
        drop(root, "job")
        assert (ChangeLog(root).jobs(), left(root)) == ([], ["heartbeats", "terms"])
    assert outcomes == {True, False}
    assert allowed < 20


def test_missing_job_is_named(tmp_path: Path) -> None:
    job(tmp_path)
    with pytest.raises(LogError, match="has no job 'jbo'; jobs: job"):
        drop(tmp_path, "jbo")


def test_command_prints_its_result_or_reason_of_its_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path).close()
    parser = argparse.ArgumentParser()
    dropping.add_options(parser)
    assert dropping.run(parser.parse_args(["--log", str(tmp_path), "job"])) == 0
    assert "job job is dropped" in capsys.readouterr().out
    assert dropping.run(parser.parse_args(["--log", str(tmp_path), "other"])) == 1
    assert "sparkis drop: the log" in capsys.readouterr().err


def test_applier_reports_lost_folder_but_no_dropped_job(tmp_path: Path) -> None:
    log = tmp_path / "log"
    writer = job(log)
    writer.send_heartbeat()
    events: list[dict[str, Any]] = []
    applier = Applier(ChangeLog(log), "job", tmp_path / "store", events.append)
    applier.step()
    (log / "job").rename(log / "away")
    applier.step()
    assert "job 'job' is missing in the log" in events[-1]["error"]
    assert "sparkis drop" in events[-1]["error"]
    (log / "away").rename(log / "job")
    applier.step()
    assert events[-1]["error"] == ""
    drop(log, "job", is_forced=True)
    applier.step()
    assert events[-1]["error"] == ""
    applier.close()
