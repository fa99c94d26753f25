"""The link of a state server to its registry, with registries of this test's own making on the other end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from compat.waiting import eventually_async
from resp_server.cluster.topology import Topology
from resp_server.protocol.replies import Push, encode
from resp_server.protocol.request_parser import RequestParser
from resp_server.registry import client as registry_link
from resp_server.registry.client import AdvertisedAddress, RegistryClient
from resp_server.registry.registry_file import RegistryFile
from resp_server.registry.report import Report
from resp_server.serving.applier_process import Visible
from state_backend.log.filesystems import open_filesystem
from state_backend.model.slot_set import ALL, NONE, SlotSet

ME, OTHER = "1" * 40, "2" * 40


def topology(version: int, mine: str = "0-8191") -> dict[str, Any]:
    nodes = [
        {"id": ME, "host": "127.0.0.1", "port": 7400, "slots": mine},
        {"id": OTHER, "host": "127.0.0.1", "port": 7401, "slots": str(ALL - SlotSet.parse(mine))},
    ]
    return {"version": version, "nodes": nodes}


class Appliers:
    """Owns the desired slots at once."""

    def __init__(self) -> None:
        self.owned_slots = NONE
        self.visible = {"job": Visible("g", 1, 7)}
        self.has_room = True
        self.identities: dict[str, str | None] = {}
        self.noticed: list[str] = []

    def set_desired_slots(self, slots: SlotSet) -> None:
        self.owned_slots = slots

    def notice_soon(self, job: str, epoch: int = -1, term: int = 0) -> None:
        self.noticed.append(job)


class Topologies:
    """Serves any topology."""

    def __init__(self) -> None:
        self.topology: Topology | None = None

    def take(self, topology: Topology, name: str) -> None:
        self.topology = topology


class Registry:
    """Answers as a registry of a term, unless it is mute; `push` sends to whoever is connected."""

    def __init__(self, term: int) -> None:
        self.term = term
        self.is_mute = False
        self.reports: list[Report] = []
        self.connections: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = RequestParser()
        self.connections.append(writer)
        while data := await reader.read(65536):
            for request in parser.feed(data):
                if request[0] == b"REPORT":
                    self.reports.append(Report.parse(bytes(request[1])))
                if not self.is_mute:
                    writer.write(b"+OK\r\n")

    def push(self, *words: Any) -> None:
        self.connections[-1].write(encode(Push(words), 3))

    def assign(self, given: dict[str, Any], desired_slots: str) -> None:
        self.push(b"assignment", self.term, json.dumps({"topology": given, "desired_slots": desired_slots}).encode())

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self.connections:
            connection.close()


class Scene:
    """A link, what it moves, and a log."""

    def __init__(self, folder: Path, address: str | None) -> None:
        self.folder, self.appliers, self.topologies = folder, Appliers(), Topologies()
        self.desired_slots: list[SlotSet] = []
        self.link = RegistryClient(
            ME,
            AdvertisedAddress(None, 7400),
            self.topologies.take,
            self.appliers,
            logs=[open_filesystem(folder)],
            address=address,
            token="t",
            on_desired_slots=self.desired_slots.append,
        )

    def write_record(self, term: int, address: str, given: dict[str, Any] | None = None) -> None:
        made = None if given is None else Topology.of_json(given)
        open_filesystem(self.folder).replace("registry.json", RegistryFile(term, address, 0, made).to_bytes())

    @property
    def version(self) -> int:
        return -1 if self.topologies.topology is None else self.topologies.topology.version


def play(scene: Scene, acts: Callable[[], Awaitable[None]]) -> None:
    """Run a link while something is done."""

    async def run() -> None:
        running = asyncio.create_task(scene.link.run())
        try:
            await acts()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    asyncio.run(run())


def test_assigned_slots_are_taken_and_reported(tmp_path: Path) -> None:
    scene, registry = Scene(tmp_path, None), Registry(3)

    async def acts() -> None:
        scene.write_record(3, await registry.start())
        await eventually_async(lambda: registry.reports, awaited="a report")
        first = registry.reports[0]
        assert (first.id, first.host, first.port, first.topology_version, first.owned_slots) == (
            ME,
            "127.0.0.1",
            7400,
            -1,
            NONE,
        )
        assert first.jobs == {"job": Visible("g", 1, 7)}
        registry.assign(topology(5), "0-9000")
        await eventually_async(
            lambda: registry.reports[-1].topology_version == 5, awaited="the server has the topology"
        )
        assert str(registry.reports[-1].owned_slots) == "0-9000"
        assert registry.reports[-1].has_room
        scene.appliers.has_room = False
        await eventually_async(lambda: not registry.reports[-1].has_room, awaited="its report of a full disk")
        registry.push(b"notice", b"job", 8)
        await eventually_async(lambda: scene.appliers.noticed == ["job"], awaited="the appliers are notified")
        assert list(map(str, scene.desired_slots)) == ["0-9000"]

    play(scene, acts)


def test_registry_of_lower_term_is_not_followed(tmp_path: Path) -> None:
    scene, newer, older = Scene(tmp_path, None), Registry(3), Registry(2)

    async def acts() -> None:
        scene.write_record(3, await newer.start())
        await eventually_async(lambda: newer.reports, awaited="a report")
        newer.assign(topology(5), "0-8191")
        await eventually_async(lambda: scene.version == 5, awaited="the server has the topology")
        newer.stop()
        scene.link._configured_address = await older.start()
        await eventually_async(lambda: older.reports, awaited="a report to the older registry")
        older.assign(topology(6, ""), "")
        await eventually_async(lambda: len(older.connections) > 1, awaited="a second connection")
        assert scene.version == 5
        assert str(scene.appliers.owned_slots) == "0-8191"

    play(scene, acts)


def test_registry_that_does_not_answer_is_left_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_link, "SILENT_S", 0.3)
    scene, hung, other = Scene(tmp_path, None), Registry(3), Registry(4)

    async def acts() -> None:
        scene.write_record(3, await hung.start())
        await eventually_async(lambda: hung.reports, awaited="a report")
        hung.assign(topology(5), "0-8191")
        await eventually_async(lambda: scene.version == 5, awaited="the server has the topology")
        hung.is_mute = True
        scene.write_record(4, await other.start())
        await eventually_async(lambda: other.reports, awaited="it reports to the other one")
        assert other.reports[0].topology_version == 5

    play(scene, acts)


def test_registry_is_not_left_because_this_process_stood_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_link, "SILENT_S", 1.0)
    scene, registry = Scene(tmp_path, None), Registry(3)

    async def acts() -> None:
        scene.write_record(3, await registry.start())
        await eventually_async(lambda: registry.reports, awaited="a report")
        registry.assign(topology(5), "0-8191")
        await eventually_async(lambda: scene.version == 5, awaited="the server has the topology")
        time.sleep(1.5)  # on the thread of the event loop, which hears nobody meanwhile
        before = len(registry.reports)
        await eventually_async(lambda: len(registry.reports) > before + 4, awaited="more reports")
        assert len(registry.connections) == 1

    play(scene, acts)


def test_server_without_registry_serves_its_recorded_slots(tmp_path: Path) -> None:
    scene = Scene(tmp_path, None)

    async def acts() -> None:
        scene.write_record(3, "127.0.0.1:1", topology(5))
        await eventually_async(lambda: scene.version == 5, awaited="the server has the topology")
        assert list(map(str, scene.desired_slots)) == ["0-8191"]
        await scene.link.drain(1000)  # there is nobody to wait for

    play(scene, acts)


def test_server_leaves_once_others_have_its_slots(tmp_path: Path) -> None:
    scene, registry = Scene(tmp_path, None), Registry(1)

    async def acts() -> None:
        scene.write_record(1, await registry.start())
        await eventually_async(lambda: registry.reports, awaited="a report")
        registry.assign(topology(5), "0-8191")
        await eventually_async(lambda: scene.version == 5, awaited="the server has the topology")
        draining = asyncio.create_task(scene.link.drain(1000))
        await eventually_async(lambda: registry.reports[-1].is_draining, awaited="a report that it drains")
        registry.assign(topology(6, ""), "0-8191")
        await eventually_async(
            lambda: registry.reports[-1].topology_version == 6, awaited="the server has the topology"
        )
        assert not draining.done()  # others may still send clients here
        registry.assign(topology(6, ""), "")
        await draining

    play(scene, acts)


def test_assignment_that_cannot_be_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene, registry = Scene(tmp_path, None), Registry(1)

    async def acts() -> None:
        scene.write_record(1, await registry.start())
        await eventually_async(lambda: registry.reports, awaited="a report")
        for text in (b"{", b"{}", b'{"topology": {"version": 1, "nodes": []}, "desired_slots": ""}'):
            registry.push(b"assignment", 1, text)
        await eventually_async(
            lambda: caplog.text.count("the registry's assignment is invalid") == 3, awaited="three warnings"
        )
        registry.assign(topology(5), "0-8191")
        await eventually_async(lambda: scene.version == 5, awaited="the valid topology")

    play(scene, acts)
