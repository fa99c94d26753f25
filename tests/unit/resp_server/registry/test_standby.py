"""A standby takes over from an absent registry, and not after a pause of its own."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from compat.waiting import eventually_async
from resp_server.net.client import Client, ErrorReplyError
from resp_server.registry import standby
from resp_server.registry.registry_file import RECORD_FILE, RegistryFile
from resp_server.registry.standby import wait_for_absence
from state_backend.log.filesystems import Filesystem, open_filesystem
from state_backend.log.identity import ensure_identity

CHECK_EVERY_S, ABSENT_S = 0.01, 0.5


class Other:
    """The registry of a log, as one that stands by sees it: connections to it succeed."""

    def __init__(self, listener: socket.socket) -> None:
        self.port = listener.getsockname()[1]
        self.looks = 0

    def connect(self, host: str, port: int) -> Client:
        self.looks += 1
        return Client(host, port)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[Other]:
    for name, seconds in (("CHECK_EVERY_S", CHECK_EVERY_S), ("ABSENT_S", ABSENT_S), ("ANSWER_S_MAX", 0.1)):
        monkeypatch.setattr(standby, name, seconds)
    with closing(socket.create_server(("127.0.0.1", 0), backlog=1000)) as listener:
        yield Other(listener)


@pytest.fixture
def log(tmp_path: Path, other: Other) -> Filesystem:
    made = open_filesystem(tmp_path)
    made.replace(RECORD_FILE, RegistryFile(1, f"127.0.0.1:{other.port}", 0, None).to_bytes())
    return made


def test_own_pause_is_not_taken_for_absence_of_others(log: Filesystem, other: Other) -> None:
    async def play() -> None:
        waiting = asyncio.create_task(wait_for_absence(log, other.connect))
        await eventually_async(lambda: other.looks)
        for _ in range(3):
            before = other.looks
            time.sleep(2 * ABSENT_S)  # on the thread of the event loop
            await eventually_async(lambda before=before: other.looks > before + 3 or waiting.done())  # type: ignore[misc]
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(play())


def test_unreachable_registry_counts_as_absent(log: Filesystem, other: Other) -> None:
    def refuses(host: str, port: int) -> Client:
        raise standby.ClientError("nobody listens")

    asyncio.run(wait_for_absence(log, refuses))


class OlderRegistry:
    """A connection to a registry of an older version, which has no verb LOG."""

    def __enter__(self) -> OlderRegistry:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, *words: str) -> object:
        raise ErrorReplyError("ERR not a request of a registry")


def test_registry_of_older_version_is_stood_by_for(log: Filesystem, other: Other) -> None:
    ensure_identity(log)
    compared: set[tuple[str, int]] = set()
    assert standby._answers(log, lambda host, port: OlderRegistry(), compared)  # type: ignore[arg-type, return-value]
    assert compared == {(f"127.0.0.1:{other.port}", 1)}
