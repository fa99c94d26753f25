"""The files that a sweep removes and those that it keeps, beside other writers and after an interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from state_backend.apply import snapshots
from state_backend.apply.applier import Applier
from state_backend.apply.compact import compact_log
from state_backend.apply.replay import read_snapshot
from state_backend.log.change_log import ChangeLog, CurrentGeneration
from state_backend.log.epochs import EpochContent
from state_backend.log.filesystems import LocalFilesystem
from state_backend.log.filesystems.local import _temporary_of
from state_backend.log.garbage_collector import sweep
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import FencedWriterError
from state_backend.model.records import Change, Op, runs_of
from tests.builders import current_of, numbers_in, put_large

STATE = StateDescriptor("s", key="k", value="v")
FAR_MS = 1 << 50


put = partial(put_large, "s")


def publish(root: Path | LocalFilesystem, epochs: range, query_id: str = "q", **more: Any) -> LogWriter:
    writer = LogWriter(root, "job", [STATE], query_id, **{"sends_heartbeats": False, "takeover": True} | more)
    for number in epochs:
        writer.publish([put(number)], number, clock_ms=1_000 + number)
    return writer


def test_paused_compactor_keeps_newer_generation(
    tmp_path: Path,
) -> None:
    """The process is stopped (SIGSTOP) behind its snapshot; its checkpoint is deleted, and the query begins anew."""
    log = tmp_path / "log"
    publish(log, range(5)).close()
    applier = Applier(ChangeLog(log), "job", tmp_path / "store", lambda event: None)
    applier.step()
    assert applier.store is not None
    store = applier.store.path
    applier.close()
    stopping = """
        import os, signal, sys
        from state_backend.apply import compactor
        sweep = compactor.sweep
        def stopped(*arguments):
            os.kill(os.getpid(), signal.SIGSTOP)
            return sweep(*arguments)
        compactor.sweep = stopped
        sys.exit(compactor.main(sys.argv[1:]))
    """
    command = [sys.executable, "-c", dedent(stopping), "--log", str(log), "--job", "job", "--store", str(store)]
    process = subprocess.Popen([*command, "--retention-ms", "0"])
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        publish(log, range(5), "another")
        process.send_signal(signal.SIGCONT)
        assert process.wait() == 0
    finally:
        process.kill()
    assert numbers_in(log) == [0, 1, 2, 3, 4]
    assert LogWriter(log, "job", [STATE], "another").publish([put(5)]) == 5
    assert numbers_in(log) == [0, 1, 2, 3, 4, 5]


def test_sweep_planned_before_rewind_keeps_files_of_new_servers(tmp_path: Path) -> None:
    writer = publish(tmp_path, range(7), on_rewind="truncate")
    log, before = current_of(tmp_path)
    with read_snapshot(tmp_path, "job", at_ms=0) as shown:
        snapshots.write(log, before, shown)
    for number in (5, 6):
        writer.publish([put(10 + number)], number, clock_ms=2_000)
    sweep(log, before, FAR_MS, retention_ms=0)
    assert numbers_in(tmp_path) == [0, 1, 2, 3, 4, 15, 16]
    assert LogWriter(tmp_path, "job", [STATE], "q").publish([put(17)]) == 7


def test_collection_keeps_change_files_of_rewinding_batch(tmp_path: Path) -> None:
    writer = publish(tmp_path, range(7), on_rewind="truncate")
    writer.start(2)
    file, _ = writer.change_files(2).write(runs_of([put(12)], ["s"]))
    assert file is not None
    log, current = current_of(tmp_path)
    for generation in ("q.1", current.generation):
        sweep(log, CurrentGeneration(generation, 1), FAR_MS, retention_ms=0)
    assert writer.commit(2, EpochContent(files=[file], rows=1), clock_ms=2_000)
    assert numbers_in(tmp_path) == [0, 1, 12]


def test_collected_epoch_written_again_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older writer has looked whether it is in charge, and is stopped there for longer than the retention."""
    zombie = publish(tmp_path, range(3))
    look = zombie.check_in_charge

    def looked_long_ago() -> None:
        monkeypatch.setattr(zombie, "check_in_charge", look)
        publish(tmp_path, range(3, 8))
        compact_log(str(tmp_path), "job", retention_ms=0)

    monkeypatch.setattr(zombie, "check_in_charge", looked_long_ago)
    with pytest.raises(FencedWriterError):
        zombie.publish([Change("s", Op.PUT, b"3", None, b"of the zombie")], 3)
    epochs = tmp_path / "job" / "q.1" / "epochs"
    assert sorted(file.name for file in epochs.iterdir()) == ["3.json", "7.json"]
    assert numbers_in(tmp_path) == [0, 1, 2, 3, 4, 5, 6, 7]
    with read_snapshot(tmp_path, "job") as shown:
        assert shown.value(b"3") == put(3).value
    log, current = current_of(tmp_path)
    assert (log.numbers("q.1"), log.epoch(current, 3)) == ([7], None)
    applier = Applier(ChangeLog(tmp_path), "job", tmp_path.with_name("store"), lambda event: None)
    applier.step()
    assert applier.store is not None
    assert applier.store.applied.epoch == 7
    applier.close()
    publish(tmp_path, range(8, 10))
    compact_log(str(tmp_path), "job", retention_ms=0)
    assert [file.name for file in epochs.iterdir()] == ["9.json"]
    assert list((tmp_path / "job" / "q.1" / "changes").glob("3-*")) == []


def test_beginning_generation_is_not_collected(tmp_path: Path) -> None:
    """A sweep runs before each change that the new writer makes to the disk."""
    publish(tmp_path, range(3))

    class Swept(LocalFilesystem):
        def create(self, path: str, content: bytes) -> bool:
            compact_log(str(tmp_path), "job", retention_ms=0)
            return super().create(path, content)

        def copy(self, source: str, target: str) -> bool:
            compact_log(str(tmp_path), "job", retention_ms=0)
            return super().copy(source, target)

    publish(Swept(tmp_path), range(2), "another")
    assert numbers_in(tmp_path) == [0, 1]


def test_files_of_killed_tasks_are_collected_once_a_later_epoch_is_committed(tmp_path: Path) -> None:
    publish(tmp_path, range(3))
    folder = tmp_path / "job" / "q.1"
    for path in (*(f"changes/{number}-0123.arrow" for number in range(5)), "epochs/0.json", "epochs/3.json"):
        _temporary_of(folder / path).write_bytes(b"half of it")
    compact_log(str(tmp_path), "job", retention_ms=FAR_MS)
    left_behind = sorted(each.name[1:].partition("-")[0][:6] for each in folder.glob("*/.*"))
    assert left_behind == ["2", "3", "3.json", "4"], "of the last epoch, which may be replayed, and of later ones"


def test_collection_returns_number_of_removed_entries(tmp_path: Path) -> None:
    publish(tmp_path, range(2), "old")
    publish(tmp_path, range(5))
    log, current = current_of(tmp_path)
    with read_snapshot(tmp_path, "job") as shown:
        snapshots.write(log, current, shown)
    assert sweep(log, current, FAR_MS, retention_ms=0) == 4 + 4 + 1, "change files, epochs, and the generation before"
    assert sweep(log, current, FAR_MS, retention_ms=0) == 0


def test_collection_continues_interrupted_one(tmp_path: Path) -> None:
    publish(tmp_path, range(3))
    LocalFilesystem(tmp_path).create("job/q.1/floor/2", b"")
    log, current = current_of(tmp_path)
    sweep(log, current, 0, retention_ms=0)
    folder = tmp_path / "job" / "q.1"
    assert [file.name for file in (folder / "epochs").iterdir()] == ["2.json"]
    assert [file.name.partition("-")[0] for file in (folder / "changes").iterdir()] == ["2"]


def test_two_newest_snapshots_remain(tmp_path: Path) -> None:
    writer = publish(tmp_path, range(0))
    for number in range(4):
        writer.publish([put(number)], clock_ms=1_000 + number)
        log, current = current_of(tmp_path)
        with read_snapshot(tmp_path, "job") as shown:
            snapshots.write(log, current, shown)
        sweep(log, current, FAR_MS, retention_ms=0)
    assert sorted(folder.name for folder in (tmp_path / "job" / "q.1" / "snapshots").iterdir()) == ["2", "3"]


def test_heartbeats_of_older_terms_are_removed(tmp_path: Path) -> None:
    for _ in range(3):
        writer = publish(tmp_path, range(0))
        writer.send_heartbeat()
    writer.publish([put(0)])
    compact_log(str(tmp_path), "job", retention_ms=FAR_MS)
    assert [file.name for file in (tmp_path / "job" / "heartbeats").iterdir()] == ["3.json"]


def test_unbegun_generation_is_removed(tmp_path: Path) -> None:
    publish(tmp_path, range(2))
    (tmp_path / "job" / "q.2" / "epochs").mkdir(parents=True)
    claimed = ChangeLog(tmp_path).job("job").terms.claim(1)
    assert claimed is not None
    (tmp_path / "job" / "terms" / "2.claim").write_bytes(replace(claimed, term=2).to_bytes())
    publish(tmp_path, range(2, 3))
    compact_log(str(tmp_path), "job", retention_ms=FAR_MS)
    assert not (tmp_path / "job" / "q.2").exists()
    assert numbers_in(tmp_path) == [0, 1, 2]


def test_returning_query_begins_anew_during_removal_of_its_files(tmp_path: Path) -> None:
    publish(tmp_path, range(4))
    publish(tmp_path, range(2), "another")

    class Stopped(Exception):
        pass

    class Stopping(LocalFilesystem):
        def remove(self, path: str) -> None:
            if path == "job/q.1":
                super().remove("job/q.1/epochs/3.json")
                raise Stopped
            super().remove(path)

    log = ChangeLog(Stopping(tmp_path)).job("job")
    current = log.current()
    assert current is not None
    with pytest.raises(Stopped):
        sweep(log, current, FAR_MS, retention_ms=0)
    back = LogWriter(tmp_path, "job", [STATE], "q")
    assert back.last is None, "the last epoch is gone, so that nothing could follow"
    assert back.publish([put(4)], 4) == 4
