"""What a client did not ask for goes out between two replies, never within one, and not without a limit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from resp_server.client.connection import Connection
from resp_server.settings.server import OUTPUT_LIMITS
from tests.server.conftest import OtherWorkers

pytestmark = pytest.mark.pure

PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"
PUSH = b">2\r\n$4\r\nnews\r\n:1\r\n"
CLIENT_INFO = b"*2\r\n$6\r\nCLIENT\r\n$4\r\nINFO\r\n"
CLIENT_LIST = b"*2\r\n$6\r\nCLIENT\r\n$4\r\nLIST\r\n"
HGETALL = b"*2\r\n$7\r\nHGETALL\r\n$12\r\njob:visits:/\r\n"
HGETALL_IN_TRANSACTION = b"*1\r\n$5\r\nMULTI\r\n" + HGETALL + b"*1\r\n$4\r\nEXEC\r\n"
FIELDS = 5000


@pytest.fixture
def running(serve: Callable[..., Any]) -> Any:
    return serve(client_output_buffer_limit=OUTPUT_LIMITS | {"normal": (4 << 20, 0, 0)})


def test_push_is_sent_at_once_to_idle_client(running: Any) -> None:
    peer = running.connect()
    peer.expect_reply(PING, PONG)
    running.call(lambda: running.server.push(1, PUSH))
    assert peer.read(len(PUSH)) == PUSH
    peer.expect_reply(PING, PONG)


def test_push_in_own_turn_precedes_reply(running: Any) -> None:
    peer = running.connect()

    def pushing(session_id: int) -> int:
        running.server.push(session_id, PUSH)
        return 0

    running.server.output_bytes = pushing  # asked for while the reply to CLIENT INFO is made
    peer.send(PING + CLIENT_INFO + PING)
    received = peer.read_until(PONG)
    assert re.fullmatch(rb"\+PONG\r\n" + re.escape(PUSH) + rb"\$\d+\r\nid=1 .*\r\n\+PONG\r\n", received, re.DOTALL)


@pytest.mark.parametrize("asked", [HGETALL, HGETALL_IN_TRANSACTION], ids=["a reply", "EXEC"])
def test_push_waits_for_end_of_reply_in_steps(running: Any, asked: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, peer = running.connect(), running.connect()
    for each in (quiet, peer):
        each.expect_reply(PING, PONG)
    quiet.send(asked + PING)
    expected = quiet.read_until(PONG)
    pushes = 0
    step = Connection._step_stream

    def stepping(connection: Connection, sliced: Any, out: list[bytes]) -> None:
        nonlocal pushes
        pushes += 1
        connection.push(PUSH)
        step(connection, sliced, out)

    monkeypatch.setattr(Connection, "_step_stream", stepping)
    peer.send(asked + PING)
    received = peer.read_until(PONG)
    assert pushes > 3
    assert received == expected.removesuffix(PONG) + PUSH * pushes + PONG


def test_push_waits_for_reply_that_needs_other_workers(running: Any) -> None:
    server = running.server.context
    workers = OtherWorkers(running)
    peer = running.connect()
    peer.expect_reply(PING, PONG)
    peer.send(CLIENT_LIST + PING)
    workers.wait_for_queries()
    running.call(lambda: server.clients.push(1, PUSH))
    workers.answer()
    received = peer.read_until(PONG)
    assert re.fullmatch(rb"\$\d+\r\nid=1 .*\n\r\n" + re.escape(PUSH + PONG), received, re.DOTALL)


def test_client_that_does_not_read_is_disconnected(running: Any) -> None:
    peer, other = running.connect(), running.connect()
    for each in (peer, other):
        each.expect_reply(PING, PONG)
    server = running.server.context
    frame = b"$1048576\r\n%b\r\n" % bytes(1 << 20)
    sent = 0
    while 1 in server.sessions:
        running.call(lambda: server.clients.push(1, frame))
        sent += 1
        assert sent < 100
    assert len(peer.read_all()) < sent * len(frame)
    other.expect_reply(PING, PONG)


def test_bytes_behind_pending_reply_count_against_limit(running: Any) -> None:
    server = running.server.context
    workers = OtherWorkers(running)
    peer = running.connect()
    peer.send(CLIENT_LIST)
    workers.wait_for_queries()
    frame = b"$1048576\r\n%b\r\n" % bytes(1 << 20)
    for _ in range(3):
        running.call(lambda: server.clients.push(1, frame))
    assert running.call(lambda: running.server.output_bytes(1)) == 3 * len(frame)
    running.call(lambda: server.clients.push(1, frame))
    peer.expect_close()
