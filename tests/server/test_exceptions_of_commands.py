"""An exception in a command's code is the reply to that request alone, at a server and at a proxy.

For every command and subcommand of the table its body, or what looks at its arguments before that, is made to raise.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from compat.conformance.wire import replies_in, request
from resp_server.command.table import Command
from resp_server.serving.server import Server
from tests.server.conftest import Peer
from tests.server.faults import ERROR, KEYS, InjectedError, Scene

AFTER, BEFORE = b"$5\r\nafter\r\n", b"$6\r\nbefore\r\n"


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    made = Scene(is_compiled=False)  # every request reaches its command's body
    yield made
    made.stop()


def all_commands(scene: Scene) -> list[Command]:
    found: list[Command] = []
    for command in scene.alone.context.table:
        found += [*command.subcommands.values()] or [command]
    return found


def words_of(command: Command) -> list[bytes]:
    """Return a request of the right number of words. As it is spelled, a proxy has no faster way for it."""
    name = command.name.title().encode().split(b"|")
    return name + [b"1"] * (abs(command.facts.arity) - len(name))


def boom(*given: Any) -> Any:
    raise InjectedError


@contextmanager
def raising(scene: Scene, servers: Sequence[Server], name: str, attribute: str) -> Iterator[None]:
    """Make an attribute of a command raise at some servers."""
    found = [server.context.table.get(name.encode()) for server in servers]
    commands = {id(command): command for command in found if command is not None}.values()  # servers share commands
    scene.call(lambda: [command.__dict__.update({attribute: boom}) for command in commands])
    try:
        yield
    finally:
        scene.call(lambda: [command.__dict__.pop(attribute) for command in commands])


def check(scene: Scene, port: int, command: Command, log: pytest.LogCaptureFixture, *, is_bug: bool) -> list[Peer]:
    """Ask for a command whose code raises: alone, in a pipeline and in a transaction, while others ask for keys."""
    words = request(*words_of(command))
    read, value = (request("GET", KEYS[3]), b"$2\r\nv3\r\n")
    if command.name == "get":
        read, value = request("STRLEN", KEYS[3]), b":2\r\n"
    say = "PING" if command.name == "echo" else "ECHO"
    before, after = request(say, "before"), request(say, "after")
    clients = [scene.connect(port) for _ in range(3)]
    bystanders = [scene.connect(port) for _ in range(4)]
    with scene.held_up():
        for bystander in bystanders[:2]:
            bystander.send(read * 3)
        clients[0].send(words + after)
        clients[1].send(before + read + words + read + after)
        clients[2].send(request("MULTI") + words + read + request("EXEC") + after)
        for bystander in bystanders[2:]:
            bystander.send(read)
    alone, piped, queued = (client.read_until(AFTER) for client in clients)
    for bystander, count in zip(bystanders, (3, 3, 1, 1), strict=True):
        assert bystander.read(count * len(value)) == value * count
    error = ERROR if is_bug else rb"-[^\r]*\r\n"
    assert re.fullmatch(error + re.escape(AFTER), alone), alone
    assert re.fullmatch(re.escape(BEFORE + value) + error + re.escape(value + AFTER), piped), piped
    replies = replies_in(queued)
    assert len(replies) == 5, queued
    if command.name not in ("multi", "exec", "discard", "watch", "reset", "quit"):
        assert replies[1].raw == b"+QUEUED\r\n" or replies[1].is_error
        assert replies[2].raw == b"+QUEUED\r\n"
        is_run = re.fullmatch(rb"\*2\r\n" + error + re.escape(value), replies[3].raw)
        assert is_run or replies[3].raw.startswith(b"-EXECABORT "), queued
    for error_id in re.findall(rb"internal error ([0-9a-f]{8})", alone + piped + queued):
        record = next(each for each in log.records if error_id.decode() in each.getMessage())
        assert record.exc_info is not None and record.exc_info[0] is InjectedError
    log.clear()
    return [*clients, *bystanders]


def check_that_nothing_is_left(scene: Scene, peers: Sequence[Peer]) -> None:
    """Go on over the same connections, then close them."""
    for peer in peers:
        peer.expect_reply(
            request("MULTI") + request("GET", KEYS[4]) + request("EXEC"), b"+OK\r\n+QUEUED\r\n*1\r\n$2\r\nv4\r\n"
        )
    scene.let_all_go()


@pytest.mark.parametrize("of", ["server", "proxy"])
def test_exception_of_command_is_its_error_reply(scene: Scene, caplog: pytest.LogCaptureFixture, of: str) -> None:
    """At a proxy most bodies are run by the servers, and what these answer is passed on."""
    caplog.set_level(logging.ERROR)
    server, *others = (scene.alone,) if of == "server" else (scene.proxy, *scene.nodes)
    for command in all_commands(scene):
        if of == "proxy" and command.name in ("multi", "exec", "watch", "state|mget", "info"):
            continue  # it has no body there: see `test_exceptions_everywhere`
        with raising(scene, (server, *others), command.name, "execute"):
            is_served = command.handler is not None and (of == "server" or not command.policy.is_internal)
            peers = check(scene, server.port, command, caplog, is_bug=is_served)
        check_that_nothing_is_left(scene, peers)


@pytest.mark.parametrize("of", ["server", "proxy"])
def test_exception_during_admission_is_error_reply(scene: Scene, caplog: pytest.LogCaptureFixture, of: str) -> None:
    caplog.set_level(logging.ERROR)
    server = scene.alone if of == "server" else scene.proxy
    backend: Any = scene.proxy.pipeline.backend  # type: ignore[attr-defined]
    forwarded = {each.name for each in backend._routes.state_forward_specs()}
    for command in all_commands(scene):
        if of == "proxy" and (command.single_key_at or command.name in ("exec", "watch", *forwarded)):
            continue  # told by its name alone, or forwarded
        with raising(scene, [server], command.name, "check_arity"):
            peers = check(scene, server.port, command, caplog, is_bug=True)
        check_that_nothing_is_left(scene, peers)
