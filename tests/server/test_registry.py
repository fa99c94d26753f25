"""A registry over its listener: the requests of servers, drivers and people, and the pushes to each of them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hiredis
import pytest

from compat.conformance.servers import CONTROL_TOKEN, PATIENT_REGISTRY, child_environment
from compat.fork_server import ForkedProcess
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.registry import service
from resp_server.registry.registry_file import RegistryLease
from state_backend.log.change_log import ChangeLog
from state_backend.log.filesystems import open_filesystem
from state_backend.log.identity import ensure_identity
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.server.relay import Relay

NAMES = [f"{number:040x}" for number in range(1, 5)]
PROGRAM = [sys.executable, "-m", "resp_server.programs.registry", "--port", "0"]
# One thread plays all the servers, and that may stand still for long.
PATIENT = [sys.executable, *PATIENT_REGISTRY, "--port", "0"]
IMPATIENT = [sys.executable, "-c", PATIENT_REGISTRY[1].replace("sys.exit", "service.PEER_SILENT_S = 0.5; sys.exit")]
IMPATIENT += ["--port", "0"]


class Talk:
    """A connection to a registry: replies in order, and what is pushed between them."""

    def __init__(self, port: int, token: str | None = CONTROL_TOKEN) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT_S_MAX)
        self._reader = hiredis.Reader()
        self.pushed: list[Any] = []
        if token is not None:
            assert self.call("AUTH", token) == b"OK"

    def send(self, *words: str) -> None:
        self.socket.sendall(hiredis.pack_command(words))  # type: ignore[arg-type]

    def call(self, *words: str) -> Any:
        self.send(*words)
        while isinstance(reply := self._read(), hiredis.PushNotification):
            self.pushed.append(list(reply))
        return reply

    def next_push(self, kind: bytes) -> Any:
        """Return the next push of a kind, in order."""
        while True:
            push = self.pushed.pop(0) if self.pushed else self._read()
            if push[0] == kind:
                return push

    def _read(self) -> Any:
        while (reply := self._reader.gets()) is False:
            received = self.socket.recv(65536)
            if not received:
                raise EOFError
            self._reader.feed(received)
        return reply


class Server(Talk):
    """A state server in the registry's eyes."""

    def __init__(self, port: int, number: int) -> None:
        super().__init__(port)
        self.directive: dict[str, Any] = {}
        self.facts: dict[str, Any] = {
            "id": NAMES[number],
            "host": "10.0.0.1",
            "port": 7000 + number,
            "is_draining": False,
            "topology_version": -1,
            "owned_slots": "",
            "jobs": {},
        }

    def report(self, **facts: Any) -> Any:
        self.facts.update(facts)
        return self.call("REPORT", json.dumps(self.facts))

    def live(self) -> str:
        """Report, do what was assigned by now, and return the slots that are wanted."""
        self.report()
        for push in self.pushed:
            if push[0] == b"assignment":
                self.directive = json.loads(push[2])
        if self.directive:
            self.pushed = [push for push in self.pushed if push[0] != b"assignment"]
            version, slots = self.directive["topology"]["version"], self.directive["desired_slots"]
            self.report(topology_version=version, owned_slots=slots)
        return str(self.directive.get("desired_slots"))


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Start a registry and return its port."""
    with ExitStack() as stack:

        def started(*options: str, program: Sequence[str] = PATIENT) -> int:
            process = ForkedProcess(
                [*program, "--child", "--log", str(tmp_path), "--loglevel", "error", *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"SPARKIS_CONTROL_TOKEN": CONTROL_TOKEN},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            return int(json.loads(process.stdout.readline())["port"])

        yield started


def test_only_clients_with_token_are_answered(registry: Callable[..., int]) -> None:
    port = registry()
    for words in (("MEMBERS",), ("AUTH", "guessed"), ("AUTH",)):
        stranger = Talk(port, token=None)
        assert "AUTH with the registry's token" in str(stranger.call(*words))
        with pytest.raises((EOFError, ConnectionError)):
            stranger.call("MEMBERS")
    assert Talk(port).call("MEMBERS") == []


def test_request_that_is_not_understood_gets_its_error(registry: Callable[..., int]) -> None:
    talk = Talk(registry())
    for words, complaint in (
        (("GET", "a"), "not a request of a registry; there are REPORT json, WATCH"),
        (("REPORT", "{"), "not a report of a state server"),
        (("REPORT", "[]"), "not a report of a state server"),
        (("REPORT", '{"id": "x", "host": "a", "port": 1}'), "id 'x' is not 40 hex digits"),
        (("REPORT", json.dumps({"id": NAMES[0], "host": "0.0.0.0", "port": 1})), "is a wildcard address"),
        (("REPORT", json.dumps({"id": NAMES[0], "host": "a", "port": 0})), "port 0 is not from 1 to 65535"),
        (
            ("REPORT", json.dumps({"id": NAMES[0], "host": "a", "port": 1, "owned_slots": "1-", "jobs": {}})),
            "'1-' in '1-'",
        ),
        (("NOTICE", "job", "x"), "a number is needed"),
        (("WAIT", "job", "1", "soon"), "a number is needed"),
    ):
        assert complaint in str(talk.call(*words))
    assert talk.call("MEMBERS") == []


def test_servers_get_visible_and_desired_slots_and_watchers_visible(registry: Callable[..., int]) -> None:
    port = registry()
    watcher = Talk(port)
    assert watcher.call("WATCH") == b"OK"
    first, second = Server(port, 0), Server(port, 1)
    assert first.report() == second.report() == b"OK"
    eventually(lambda: [first.live(), second.live()] == ["0-8191", "8192-16383"], awaited="slots are shared")
    _, term, text = watcher.next_push(b"topology")
    topology = json.loads(text)
    assert (term, [node["slots"] for node in topology["nodes"]]) == (1, ["0-8191", "8192-16383"])
    late = Talk(port)
    assert late.call("WATCH") == b"OK"
    assert json.loads(late.next_push(b"topology")[2])["version"] >= topology["version"]
    rows = Talk(port).call("MEMBERS")
    assert [row[b"id"].decode() for row in rows] == NAMES[:2]
    assert [(row[b"role"], row[b"desired_slots"]) for row in rows] == [
        (b"master", b"0-8191"),
        (b"master", b"8192-16383"),
    ]


def test_servers_of_record_that_do_not_return_are_forgotten(registry: Callable[..., int], tmp_path: Path) -> None:
    gone = {"id": NAMES[3], "host": "10.0.0.9", "port": 7000, "slots": "0-16383"}
    record = {"term": 7, "address": "10.0.0.9:7377", "replicas": 0, "topology": {"version": 4, "nodes": [gone]}}
    (tmp_path / "registry.json").write_text(json.dumps(record))
    server = Server(registry(), 0)
    eventually(lambda: server.live() == "0-16383", awaited="all is the new one's")
    eventually(
        lambda: server.live() and len(server.directive["topology"]["nodes"]) == 1, awaited="the old one is forgotten"
    )
    assert server.directive["topology"]["nodes"][0]["slots"] == "0-16383"
    assert server.directive["topology"]["version"] > 4


def test_every_server_is_notified(registry: Callable[..., int]) -> None:
    port = registry()
    servers = [Server(port, number) for number in range(2)]
    for server in servers:
        server.report()
    assert Talk(port).call("NOTICE", "job", "7") == b"OK"
    for server in servers:
        assert server.next_push(b"notice") == [b"notice", b"job", 7]
    assert Talk(port).call("NOTICE", "job", "8", "2") == b"OK"
    for server in servers:
        assert server.next_push(b"notice") == [b"notice", b"job", 8, 2]


def test_epoch_is_waited_for_until_every_owner_of_slots_shows_it(registry: Callable[..., int]) -> None:
    port = registry()
    driver = Talk(port)
    assert driver.call("WAIT", "job", "0", "50") == 0
    servers = [Server(port, number) for number in range(2)]
    for server in servers:
        server.report()
    eventually(lambda: [each.live() for each in servers] == ["0-8191", "8192-16383"], awaited="slots are shared")
    shown = {"generation": "g", "term": 1, "epoch": 3}
    servers[0].report(jobs={"job": shown})
    assert driver.call("WAIT", "job", "3", "50") == 0
    driver.send("WAIT", "job", "3", "300000")
    servers[1].report(jobs={"job": shown | {"epoch": 4}})
    assert driver._read() == 1
    assert driver.call("WAIT", "job", "4", "50") == 0


def test_server_of_another_log_is_refused_by_name_and_path(registry: Callable[..., int], tmp_path: Path) -> None:
    identity = ensure_identity(open_filesystem(tmp_path))
    port = registry()
    own, other, empty = (Server(port, number) for number in range(3))
    assert own.report(logs={"/log": identity}) == b"OK"
    refusal = str(other.report(logs={"/backup": "another"}))
    assert refusal.startswith(
        f"WRONGLOG server {NAMES[1][:8]} at 10.0.0.1:7001 serves the log /backup with the identity"
    )
    assert f"this registry's log {tmp_path} has {identity}: give the server the registry's log" in refusal
    assert "which has no identity (log.json)" in str(empty.report(logs={"/unmounted": ""}))
    eventually(lambda: own.live() == "0-16383", awaited="the first has all slots")
    for server in (other, empty):
        server.report()
        assert server.pushed == []
    assert len(own.call("MEMBERS")) == 1
    assert other.report(logs={"/backup": "another", "/log": identity}) == b"OK"
    assert other.report(logs={"/log": None}) == b"OK"  # its storage is away
    assert empty.report(logs={}) == b"OK"  # an older server


def test_member_of_another_log_gives_its_slots_away(registry: Callable[..., int], tmp_path: Path) -> None:
    port = registry()
    own, other = Server(port, 0), Server(port, 1)
    own.report(logs={"/log": ""})
    other.report(logs={"/backup": "another"})
    eventually(lambda: [own.live(), other.live()] == ["0-8191", "8192-16383"], awaited="slots are shared")
    identity = ensure_identity(open_filesystem(tmp_path))

    def is_refused() -> bool:
        own.live()
        return "WRONGLOG" in str(other.report())

    eventually(is_refused, awaited="the registry has found its identity")
    own.report(logs={"/log": identity})
    eventually(lambda: own.live() == "0-16383", awaited="the first has all slots")


def test_logs_without_identity_are_distinguished_by_their_epochs(registry: Callable[..., int], tmp_path: Path) -> None:
    state = StateDescriptor("s", key="k", value="v")
    with LogWriter(tmp_path, "job", [state], "q") as writer:
        for number in range(3):
            writer.publish([Change("s", Op.PUT, b"job:s:a", value=b"%d" % number)])
    (tmp_path / "log.json").unlink()
    job = ChangeLog(tmp_path).job("job")
    current = job.visible()
    assert current is not None
    epoch = job.newest(current)
    assert epoch is not None
    port = registry()
    seen = {"generation": current.generation, "term": 1, "epoch": 2, "digest": epoch.digest, "log": "/log"}
    cases = {
        "the right one": (seen, ""),
        "one that lags": (seen | {"epoch": 1, "digest": None}, ""),
        "one whose epoch this log no longer has": (seen | {"epoch": -1}, ""),
        "a copy that was written": (
            seen | {"epoch": 9, "digest": 7},
            "does not have epoch 9, term 1, of job 'job' (was a",
        ),
        "an older server": ({name: seen[name] for name in ("generation", "term", "epoch")}, ""),
        "a diverged copy": (seen | {"digest": 7}, f"has the digest 7 there, and {epoch.digest} in {tmp_path}"),
        "a copy of another writer": (seen | {"term": 2}, f"has the term 2 there, and 1 in {tmp_path}"),
        "another query": (seen | {"generation": "z.1", "epoch": 7, "digest": 7}, "began the generation z.1 there"),
    }
    for number, (name, (reported, expected)) in enumerate(cases.items()):
        server = Server(port, 0)
        is_old = "digest" not in reported
        facts = {"id": f"{100 + number:040x}", "port": 7100 + number, "jobs": {"job": reported}}
        facts |= {} if is_old else {"logs": {"/log": ""}}

        def outcome(server: Server = server, facts: dict[str, Any] = facts) -> str:
            return str(server.report(**facts))

        if expected:
            eventually(outcome, lambda found, expected=expected: expected in found, awaited=name)  # type: ignore[misc]
        else:
            assert outcome() == "b'OK'", name
            eventually(lambda server=server: server.live(), lambda found: found != "None", awaited=name)  # type: ignore[misc]
            assert outcome() == "b'OK'", name


def test_servers_with_different_common_epochs_are_not_both_members(
    registry: Callable[..., int], tmp_path: Path
) -> None:
    port, identity = registry(), ensure_identity(open_filesystem(tmp_path))
    first, second, third = (Server(port, number) for number in range(3))
    seen = {"generation": "g.1", "term": 1, "epoch": 3, "digest": 5, "log": "/log"}
    first.report(logs={"/log": identity, "/more": "m"}, jobs={"job": seen})
    logs = {"/copy": identity}
    refusal = str(second.report(logs=logs, jobs={"job": seen | {"digest": 6, "log": "/copy"}}))
    assert "has epoch 3 of job 'job', term 1, with the digest 6, from the log /copy" in refusal
    assert "has it with 5, from /log. Was a copy of the log written?" in refusal
    assert second.report(jobs={"job": seen | {"epoch": 4, "digest": 6, "log": "/copy"}}) == b"OK"
    # A root that the registry does not have.
    first.report(jobs={"more": seen | {"log": "/more"}})
    refusal = str(third.report(logs={"/log": identity, "/old": "n"}, jobs={"more": seen | {"log": "/old", "epoch": 9}}))
    assert "serves job 'more' from the log /old with the identity n; server" in refusal
    first.socket.close()
    eventually(lambda: third.report() == b"OK", awaited="the first is gone")


def test_two_servers_at_one_address_are_refused(registry: Callable[..., int]) -> None:
    port = registry()
    first, second = Server(port, 0), Server(port, 1)
    first.report()
    assert f"server {NAMES[0]} is at 10.0.0.1:7000 already" in str(second.report(port=7000))
    assert second.report(port=7001) == b"OK"
    assert f"server {NAMES[0]} is at 10.0.0.1:7000 already" in str(second.report(port=7000))
    eventually(lambda: first.live() not in ("", "None"), awaited="the first has slots")
    first.socket.close()
    eventually(lambda: second.report() == b"OK", awaited="the first is gone")
    back = Server(port, 0)
    assert f"server {NAMES[1]} is at 10.0.0.1:7000 already" in str(back.report())
    assert back.report(port=7002) == second.report() == b"OK"


def test_draining_server_gives_its_slots_away(registry: Callable[..., int]) -> None:
    port = registry("--replicas", "0")
    first, second = Server(port, 0), Server(port, 1)
    for server in (first, second):
        server.report()
    eventually(lambda: [first.live(), second.live()] == ["0-8191", "8192-16383"], awaited="slots are shared")
    second.report(is_draining=True)
    eventually(lambda: [first.live(), second.live()] == ["0-16383", ""], awaited="all is the first one's")
    second.socket.close()
    eventually(lambda: len(Talk(port).call("MEMBERS")) == 1, awaited="the registry forgets the server")


def test_silent_server_has_failed_and_replica_answers(registry: Callable[..., int]) -> None:
    port = registry("--replicas", "1", program=PROGRAM)
    first, second = Server(port, 0), Server(port, 1)
    for server in (first, second):
        server.report()
    eventually(lambda: [first.live(), second.live()] == ["0-16383", "0-16383"], awaited="both hold all")

    def roles() -> list[tuple[bytes, bytes]]:
        second.live()
        return [(row[b"role"], row[b"health"]) for row in second.call("MEMBERS")]

    eventually(lambda: roles() == [(b"replica", b"fail"), (b"master", b"online")], awaited="the replica is promoted")
    assert first.report() == b"OK"  # its connection is still there


def test_connection_of_server_or_watcher_that_falls_silent_is_closed(registry: Callable[..., int]) -> None:
    port = registry(program=IMPATIENT)
    relay = Relay(port)
    try:
        server, asks = Server(relay.port, 0), Talk(port)
        server.report()
        watches, waits = Talk(port), Talk(port)
        assert watches.call("WATCH") == b"OK"
        relay.drop()
        # The row stays while the server has slots.
        eventually(lambda: all(row[b"connected"] == 0 for row in asks.call("MEMBERS")), awaited="the server is away")
        with pytest.raises((EOFError, ConnectionError)):
            watches.next_push(b"none")
        # A driver is silent between its epochs.
        assert len(waits.call("MEMBERS")) == 1
    finally:
        relay.stop()


def test_server_without_room_gives_its_slots_to_one_that_has_some(registry: Callable[..., int]) -> None:
    port = registry()
    full, other = Server(port, 0), Server(port, 1)
    full.report()
    other.report()
    eventually(lambda: [full.live(), other.live()] == ["0-8191", "8192-16383"], awaited="slots are shared")
    full.report(has_room=False)
    eventually(lambda: [full.live(), other.live()] == ["", "0-16383"], awaited="the full server has no slots")


def test_driver_ends_its_servers_if_no_other_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DRAIN_S_MAX", "SILENT_S"):
        monkeypatch.setattr(service, name, 100 * WAIT_S_MAX)

    async def play() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        own = service.Registry(RegistryLease.acquire(open_filesystem(tmp_path), "127.0.0.1:1", 0), CONTROL_TOKEN)
        await own.start(listener)
        deciding = asyncio.create_task(own.run())
        try:
            await asyncio.to_thread(_end_all, listener.getsockname()[1])
        finally:
            deciding.cancel()
            await own.stop()

    asyncio.run(play())


def _end_all(port: int) -> None:
    servers = [Server(port, number) for number in range(2)]
    for server in servers:
        server.report(driver="mine")
    eventually(lambda: [each.live() for each in servers] == ["0-8191", "8192-16383"], awaited="slots are shared")
    assert "not a request of a registry" in str(Talk(port).call("END", ""))
    assert Talk(port).call("END", "another") == b"OK"
    assert Talk(port).call("END", "mine") == b"OK"
    for server in servers:
        server.report()
        assert [push for push in server.pushed if push[0] == b"end"] == [[b"end"]]


def test_servers_of_driver_end_once_one_that_stays_owns_all(registry: Callable[..., int], tmp_path: Path) -> None:
    port = registry()
    placed, own = Server(port, 0), Server(port, 1)
    placed.report(driver="mine")
    own.report()
    eventually(lambda: [placed.live(), own.live()] == ["0-8191", "8192-16383"], awaited="slots are shared")
    driver = Talk(port)
    drivers = {row[b"id"].decode(): row[b"driver"] for row in driver.call("MEMBERS")}
    assert drivers == {NAMES[0]: b"mine", NAMES[1]: b""}
    driver.send("END", "mine")
    eventually(lambda: [placed.live(), own.live()] == ["", "0-16383"], awaited="it takes over")
    assert driver._read() == b"OK"
    assert placed.next_push(b"end") == [b"end"]
    nodes = json.loads((tmp_path / "registry.json").read_text())["topology"]["nodes"]
    assert [node["id"] for node in nodes if node.get("slots") == "0-16383"] == [NAMES[1]]
    own.report()
    assert not [push for push in own.pushed if push[0] == b"end"]


def _run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = child_environment() | environment
    return subprocess.run(
        [*PROGRAM, *options], env=given, capture_output=True, text=True, timeout=WAIT_S_MAX, check=False
    )


def test_bad_options_are_named(tmp_path: Path) -> None:
    log = ("--log", str(tmp_path))
    token = {"SPARKIS_CONTROL_TOKEN": "t"}
    for options, environment, complaint in (
        (log, {}, "there is no token: give registry and servers the same secret"),
        ((*log, "--token-file", str(tmp_path / "none")), {}, "--token-file"),
        ((*log, "--bind", "0.0.0.0"), token, "say with --advertise HOST where state servers find this machine"),
        ((*log, "--replicas", "-1"), token, "is not a number of replicas"),
        (("--log", "/proc/nowhere"), token, "cannot make the folder"),
    ):
        done = _run(*options, **environment)
        assert done.returncode != 0
        assert complaint in done.stderr


def _started(log: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """Start a registry; return its process and what it has logged until it has started."""
    process = subprocess.Popen(
        [*PROGRAM, "--log", str(log), *options],
        stderr=subprocess.PIPE,
        env=os.environ | {"SPARKIS_CONTROL_TOKEN": "t"},
        text=True,
    )
    assert process.stderr is not None
    said = ""
    while "started registry" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return process, said


@pytest.mark.parametrize("options", [(), ("--advertise", "host.example")])
def test_registry_warns_of_unreachable_own_address(tmp_path: Path, options: tuple[str, ...]) -> None:
    process, said = _started(tmp_path, *options)
    process.terminate()
    process.communicate(timeout=WAIT_S_MAX)
    assert ("only processes of this machine reach" in said) == (not options), said


def test_record_that_is_no_record_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "registry.json").write_text("{")
    process, said = _started(tmp_path)
    process.terminate()
    process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == 0
    assert "is not a registry's record" in said
    assert json.loads((tmp_path / "registry.json").read_text())["term"] == 1
