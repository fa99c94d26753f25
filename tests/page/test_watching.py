"""A watcher at a real server: what the tabs of a user share, and what they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from compat.conformance.servers import Running, sparkis_server
from compat.waiting import WAIT_S_MAX, eventually_async
from sparkis_ui import watching
from sparkis_ui.client import Client, Endpoint
from sparkis_ui.watching import KEYS_MAX, Watcher
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

STATES = (StateDescriptor("speed", key="car", value="kmh"),)
CARS, TRUCKS = b"cars:speed:c*", b"cars:speed:t*"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogWriter]:
    """The log of the job."""
    with LogWriter(tmp_path / "log", "cars", STATES) as writer:
        writer.publish([speed_of(b"c0")])
        yield writer


@pytest.fixture
def server(log: LogWriter, tmp_path: Path) -> Iterator[Running]:
    """A server that sends notifications."""
    with sparkis_server(tmp_path / "store", tmp_path / "log", "--notify-keyspace-events", "KEA") as server:
        yield server


def speed_of(name: bytes, value: bytes = b"9") -> Change:
    """Return a change of a car."""
    return Change("speed", Op.PUT, b"cars:speed:" + name, value=value)


def watch(server: Running, look: Callable[[Watcher], Awaitable[None]]) -> None:
    """Run a look at a watcher."""

    async def run() -> None:
        client = Client(Endpoint.of_url(f"redis://127.0.0.1:{server.port}"))
        watcher = Watcher(client)
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                await look(watcher)
        finally:
            await watcher.close()
            await client.close()

    asyncio.run(run())


def matching(watcher: Watcher, *patterns: bytes) -> list[bytes]:
    """Want patterns, as an open tab does again and again; return the keys of the first one."""
    watcher.want((), patterns)
    return watcher.matching(patterns[0])


def test_deleted_keys_of_pattern_make_room_for_new_ones(
    server: Running, log: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "WANTED_S", 0.5)
    names = [b"c%d" % number for number in range(KEYS_MAX)]

    async def look(watcher: Watcher) -> None:
        await eventually_async(lambda: matching(watcher, CARS), lambda found: len(found) == KEYS_MAX, "all keys")
        assert watcher.is_full
        log.publish(Change("speed", Op.DELETE, b"cars:speed:" + name) for name in names)
        await eventually_async(lambda: matching(watcher, CARS), lambda found: not found, "no keys")
        log.publish([speed_of(b"c-new")])
        await eventually_async(lambda: matching(watcher, CARS), lambda found: found == [b"cars:speed:c-new"], "it")
        assert not watcher.is_full

    log.publish(map(speed_of, names))
    watch(server, look)


def test_tab_has_notifications_of_its_own_patterns_each_once(server: Running, log: LogWriter) -> None:
    async def look(watcher: Watcher) -> None:
        await eventually_async(lambda: matching(watcher, CARS, b"cars:speed:*", TRUCKS), awaited="the first key")
        for number, name in enumerate((b"c1", b"t1", b"c1"), start=1):
            log.publish([speed_of(name, b"%d" % number)])  # epochs that are applied together give one notification
            await eventually_async(
                lambda: watcher.events_of([b"cars:speed:*"]), lambda found, wanted=number: len(found) == wanted, "it"
            )
        for patterns, keys in (
            ([CARS], [b"c1", b"c1"]),
            ([TRUCKS], [b"t1"]),
            ([CARS, b"cars:speed:*"], [b"c1", b"t1", b"c1"]),
            ([], []),
        ):
            found = [event.key.removeprefix(b"cars:speed:") for event in watcher.events_of(patterns)]
            assert (patterns, found) == (patterns, keys)

    watch(server, look)
