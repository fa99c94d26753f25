"""`sparkis attach --serve`: attachments of one log share a server, which outlives one that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from compat.waiting import eventually
from resp_server.serving.server_file import ServerFile, folder_of
from tests.golden_checkpoints import NEWEST
from tests.spark.processes import Command
from tests.spark.processes import sparkis as command
from tests.unit.state_backend.attach.following import GrowingCheckpoint


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    found = []
    for name in ("one", "two"):
        growing = GrowingCheckpoint(NEWEST, "hdfs-aggregation", tmp_path / name)
        for batch in growing.batches:
            growing.commit(batch)
        found.append(growing.path)
    return found


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A log; the server that is left behind is ended."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "log").mkdir()
    yield tmp_path / "log"
    record = ServerFile.read(folder_of(str(tmp_path / "log")))
    if record is not None:
        with suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)


def url_of(running: Command) -> str:
    return running.wait_for(r"redis-cli -u (\S+)")[1]


def jobs_of(url: str) -> set[str]:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        return {key.partition(":")[0] for key in client.keys("*")}


def test_one_command_serves_several_checkpoints(checkpoints: list[Path], log: Path):
    given = [word for path, job in zip(checkpoints, "ab", strict=True) for word in ("--checkpoint", path, "--job", job)]
    with command("attach", *given, "--log", log, "--serve", "--port", 0) as running:
        assert jobs_of(url_of(running)) == {"a", "b"}
        assert running.end(signal.SIGTERM) == 0
    assert ServerFile.read(folder_of(str(log))) is None


def test_second_command_finds_server_of_first_and_keeps_it(checkpoints: list[Path], log: Path):
    shared = ("--log", log, "--serve", "--port", 0)
    with command("attach", "--checkpoint", checkpoints[0], "--job", "a", *shared) as first:
        url = url_of(first)
        with command("attach", "--checkpoint", checkpoints[1], "--job", "b", *shared) as second:
            assert url_of(second) == url
            eventually(lambda: jobs_of(url), {"a", "b"}.__eq__)
            assert first.end(signal.SIGTERM) == 0
            assert jobs_of(url) == {"a", "b"}
            assert second.end(signal.SIGTERM) == 0
    with pytest.raises(redis.ConnectionError):
        jobs_of(url)


def test_next_command_takes_over_server_of_killed_one(checkpoints: list[Path], log: Path):
    given = ("--checkpoint", checkpoints[0], "--job", "a", "--log", log, "--serve", "--port", 0, "--linger", 3600)
    with command("attach", *given) as killed:
        url = url_of(killed)
        killed.end(signal.SIGKILL)
    assert jobs_of(url) == {"a"}
    with command("attach", *given) as following:
        assert url_of(following) == url
        assert following.end(signal.SIGTERM) == 0


def test_server_has_passwords_and_addresses_of_it(checkpoints: list[Path], log: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPARKIS_PASSWORD", "secret")
    given = ("--checkpoint", checkpoints[0], "--job", "a", "--log", log, "--serve", "--port", 0, "--bind", "127.0.0.1")
    with command("attach", *given) as running:
        url = url_of(running)
        assert jobs_of(url) == {"a"}
        with pytest.raises(redis.AuthenticationError):
            jobs_of(url.replace(":secret@", ""))
        assert running.end(signal.SIGTERM) == 0
