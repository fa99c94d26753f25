"""A watch notices the jobs in whose folders a file got its name, and no others."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from compat.waiting import eventually_async
from resp_server.serving.log_watch import LogWatch
from state_backend.log.filesystems.local import LocalFilesystem

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has inotify")


def watched(tmp_path: Path, body: Callable[[LogWatch, list[str], LocalFilesystem], Awaitable[None]]) -> None:
    """Run a body with a watch of the jobs `a` and `b`, each with one folder of its name."""

    async def run() -> None:
        noticed: list[str] = []
        watch, filesystem = LogWatch(noticed.append), LocalFilesystem(tmp_path)
        for job in ("a", "b"):
            filesystem.make_folder(job)
            watch.watch(job, [str(tmp_path / job)])
        await eventually_async(lambda: sorted(noticed), lambda jobs: jobs == ["a", "b"])  # files may have come before
        noticed.clear()
        try:
            await body(watch, noticed, filesystem)
        finally:
            await watch.stop()

    asyncio.run(run())


def test_new_file_notices_its_job(tmp_path: Path) -> None:
    async def body(watch: LogWatch, noticed: list[str], filesystem: LocalFilesystem) -> None:
        for number in range(3):
            assert filesystem.create(f"b/{number}.json", b"")
            await eventually_async(lambda: noticed)
            assert set(noticed) == {"b"}
            noticed.clear()

    watched(tmp_path, body)


def test_unfinished_file_notices_no_job(tmp_path: Path) -> None:
    async def body(watch: LogWatch, noticed: list[str], filesystem: LocalFilesystem) -> None:
        (tmp_path / "a/.1.json.tmp").touch()
        filesystem.create("b/1.json", b"")
        await eventually_async(lambda: "b" in noticed)
        assert "a" not in noticed

    watched(tmp_path, body)


def test_replaced_folder_is_watched_again(tmp_path: Path) -> None:
    async def body(watch: LogWatch, noticed: list[str], filesystem: LocalFilesystem) -> None:
        (tmp_path / "a").rename(tmp_path / "away")
        filesystem.make_folder("a")
        watch.watch("a", [str(tmp_path / "a")])
        await eventually_async(lambda: noticed)
        noticed.clear()
        filesystem.create("a/1.json", b"")
        await eventually_async(lambda: noticed)

    watched(tmp_path, body)


def test_forgotten_job_is_not_noticed(tmp_path: Path) -> None:
    async def body(watch: LogWatch, noticed: list[str], filesystem: LocalFilesystem) -> None:
        watch.forget("a")
        filesystem.create("a/1.json", b"")
        filesystem.create("b/1.json", b"")
        await eventually_async(lambda: "b" in noticed)
        assert "a" not in noticed

    watched(tmp_path, body)


def test_missing_folder_is_watched_when_it_is_there(tmp_path: Path) -> None:
    async def body(watch: LogWatch, noticed: list[str], filesystem: LocalFilesystem) -> None:
        watch.watch("a", [str(tmp_path / "a"), str(tmp_path / "late")])
        filesystem.make_folder("late")
        watch.watch("a", [str(tmp_path / "a"), str(tmp_path / "late")])
        await eventually_async(lambda: noticed)
        noticed.clear()
        filesystem.create("late/1.json", b"")
        await eventually_async(lambda: noticed)

    watched(tmp_path, body)


def test_system_without_watch_left_is_named_once_in_log(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            watch = LogWatch(lambda job: None)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        watch.watch("a", ["a/epochs", "a/terms"])
        await watch.stop()

    asyncio.run(run())
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "found by polls" in line
    assert "inotify: Too many open files" in line
    assert "fs.inotify.max_user_instances" in line


def test_folder_that_cannot_be_watched_is_named_once_in_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(watch: LogWatch, noticed: list[str], filesystem: LocalFilesystem) -> None:
        for name in ("c", "d"):
            (tmp_path / name).symlink_to(tmp_path / name)
            watch.watch(name, [str(tmp_path / "missing"), str(tmp_path / name)])
        filesystem.make_folder("e")
        watch.watch("e", [str(tmp_path / "e")])
        await eventually_async(lambda: "e" in noticed)
        await eventually_async(lambda: caplog.records)

    watched(tmp_path, body)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(tmp_path) in line
    assert "missing" not in line
