"""A watch ends its wait when a file gets its name in the folder, and when it is woken."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compat.waiting import eventually
from state_backend import folder_watch
from state_backend.folder_watch import FolderWatch

HOUR_S = 3600.0
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has inotify")


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no wait end by itself."""
    monkeypatch.setattr(folder_watch, "PAUSE_S", HOUR_S)
    monkeypatch.setattr(folder_watch, "WATCHED_PAUSE_S", HOUR_S)


@contextmanager
def waiting(watch: FolderWatch) -> Iterator[None]:
    """Wait in a thread; at the end of the block the wait has to end."""
    thread = threading.Thread(target=watch.wait, daemon=True)
    thread.start()
    yield
    eventually(lambda: not thread.is_alive(), awaited="the end of the wait")


def name(path: Path) -> None:
    """Make a file as Spark does: it gets its name when it is complete."""
    path.parent.mkdir(exist_ok=True)
    unfinished = path.parent.with_name("unfinished")
    unfinished.write_bytes(b"")
    unfinished.rename(path)


@on_linux
def test_wait_ends_when_file_gets_its_name(tmp_path: Path):
    name(tmp_path / "folder/0")
    watch = FolderWatch()
    watch.watch(str(tmp_path / "folder"))
    with waiting(watch):
        name(tmp_path / "folder/1")
    name(tmp_path / "folder/2")  # also if the file comes between a look and the wait
    with waiting(watch):
        pass


@on_linux
def test_only_last_folder_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in ("one", "other"):
        name(tmp_path / folder / "0")
    watch = FolderWatch()
    watch.watch(str(tmp_path / "one"))
    name(tmp_path / "one/1")
    watch.watch(str(tmp_path / "other"))
    name(tmp_path / "one/2")
    monkeypatch.setattr(folder_watch, "PAUSE_S", 0.0)
    watch.wait()
    monkeypatch.setattr(folder_watch, "PAUSE_S", HOUR_S)
    watch.found()
    with waiting(watch):
        name(tmp_path / "other/1")


@on_linux
@pytest.mark.parametrize("has_told", [True, False])
def test_waits_are_short_after_file_without_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_told: bool):
    name(tmp_path / "folder/0")
    watch = FolderWatch()
    watch.watch(str(tmp_path / "folder"))
    name(tmp_path / "folder/1")
    watch.wait()
    watch.found()
    if not has_told:
        watch.wait(0.0)
        watch.found()
    # The pause that the next wait must not take has an hour.
    monkeypatch.setattr(folder_watch, "WATCHED_PAUSE_S" if has_told else "PAUSE_S", 0.0)
    with waiting(watch):
        pass


def test_another_thread_ends_wait(tmp_path: Path):
    watch = FolderWatch()
    watch.watch(str(tmp_path))
    with waiting(watch):
        watch.wake()
    for _ in range(100_000):  # more than a pipe takes
        watch.wake()
    with waiting(watch):
        pass


def test_missing_folder_is_watched_once_it_is_there(tmp_path: Path):
    watch = FolderWatch()
    watch.watch(str(tmp_path / "folder"))
    watch.wait(0.0)
    name(tmp_path / "folder/0")
    watch.watch(str(tmp_path / "folder"))
    if sys.platform == "linux":
        with waiting(watch):
            name(tmp_path / "folder/1")
