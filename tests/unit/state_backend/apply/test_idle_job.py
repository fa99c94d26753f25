"""An idle job wakes for work of its applier, and for nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from state_backend.apply.applier import Applier, follow_until_end
from state_backend.apply.idle_job import IdleJob
from state_backend.lmdb.store import SUSPECT
from state_backend.log.change_log import ChangeLog
from state_backend.log.drop import drop
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

STATE = StateDescriptor("s", key="k", value="v")


class Scene:
    """A job whose applier rests, and whose writer is alive."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "log"
        self.writer = self.new_writer()
        self.publish()
        self.writer.send_heartbeat(is_running=True)
        events: list[dict[str, Any]] = []
        applier = Applier(ChangeLog(self.root), "job", folder / "store", events.append)
        reading, writing = os.pipe()
        follow_until_end(applier, reading, 0.01, rest_after_s=0.0)  # returns although the input has not ended
        os.close(reading)
        os.close(writing)
        applier.close()
        self.rest = events[-1]

    def new_writer(self) -> LogWriter:
        return LogWriter(self.root, "job", [STATE], "q", sends_heartbeats=False)

    def publish(self) -> None:
        self.writer.publish([Change("s", Op.PUT, b"job:s:a", None, b"v")])

    def remove_log(self) -> None:
        self.root.rename(self.root.with_name("away"))

    def suspect(self) -> None:
        (Path(self.rest["path"]) / SUSPECT).touch()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_job_without_news_has_no_work(scene: Scene) -> None:
    assert scene.rest["event"] == "rest"
    job = IdleJob(str(scene.root), "job", scene.rest)
    for _ in range(3):
        assert not job.has_work()
        scene.writer.send_heartbeat(is_running=True)


@pytest.mark.parametrize(
    "change",
    [
        Scene.publish,
        Scene.new_writer,
        Scene.suspect,
        Scene.remove_log,
        lambda scene: drop(scene.root, "job", is_forced=True),
    ],
    ids=["an epoch", "a writer", "damage", "no log", "a drop"],
)
def test_changed_job_has_work(scene: Scene, change: Callable[[Scene], object]) -> None:
    job = IdleJob(str(scene.root), "job", scene.rest)
    assert not job.has_work()
    change(scene)
    # That the log is gone is noticed by one poll, and looked into by the next.
    assert job.has_work() or job.has_work()


def test_writer_that_ends_makes_job_stale_and_is_no_work(scene: Scene) -> None:
    job = IdleJob(str(scene.root), "job", scene.rest | {"is_stale": False})
    assert not job.has_work()
    assert not job.is_stale
    scene.writer.close()
    assert not job.has_work()
    assert job.is_stale


def test_newer_offsets_of_sources_are_no_work(scene: Scene) -> None:
    offsets = {"source_offsets": ['{"orders":{"0":10}}'], "source_lag": None}
    job = IdleJob(str(scene.root), "job", scene.rest | offsets)
    scene.writer.send_heartbeat(sources={"at_ms": 7, "newest": {"0": {"orders": {"0": 12}}}})
    assert not job.has_work()
    assert job.source_lag == {"records": 2, "at_ms": 7, "partitions": {"orders/0": 2}}
