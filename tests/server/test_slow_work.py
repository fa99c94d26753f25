"""Long replies and slow readers delay no other client, and no buffer grows without a limit."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from compat.waiting import eventually
from resp_server.commands import sliced_reply
from resp_server.settings.server import OUTPUT_LIMITS

KEYS = 20_000
LARGE_BYTES = 1 << 20
PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"


@pytest.fixture
def tiny_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a turn end after one step, however fast the machine is."""
    monkeypatch.setattr("resp_server.client.connection.TURN_NS_MAX", 0)
    yield


def test_others_are_served_between_steps_of_keys(
    serve: Callable[..., Any], tiny_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    slow, quick = server.connect(), server.connect()
    quick.expect_reply(PING, PONG)
    order: list[str] = []
    scan = type(server.server.context.view).scan

    def noted(view: Any, *step: Any) -> Any:
        order.append("step")
        if order.count("step") == 1:
            quick.send(b"ECHO x\r\n")  # it is waiting from now on
        return scan(view, *step)

    monkeypatch.setattr(type(server.server.context.view), "scan", noted)
    pipeline = server.server.pipeline
    reply_to = pipeline.reply_to

    def noted_reply(context: Any, request: Any) -> Any:
        order.append(request[0].decode())
        return reply_to(context, request)

    monkeypatch.setattr(pipeline, "reply_to", noted_reply)
    slow.send(b"KEYS *\r\n")
    assert quick.read(7) == b"$1\r\nx\r\n"
    assert slow.read(8) == b"*%d\r\n" % (KEYS + 3)
    assert order[0] == "KEYS"
    assert 1 < order.index("ECHO") < order.index("step") + KEYS // sliced_reply.CHUNK_ITEMS_MAX


def test_input_waits_while_reply_is_made_in_steps(serve: Callable[..., Any], tiny_turns: None) -> None:
    peer = serve().connect()
    peer.send(b"HKEYS job:visits:/\r\n")
    peer.send(PING * 10)
    reply = b""
    while not reply.endswith(PONG * 10):
        reply += peer.read(1000 if len(reply) < 40_000 else 1)
    assert reply.startswith(b"*5000\r\n$")
    assert reply.count(b"\r\nu") == 5000
    assert reply.count(PONG) == 10


def test_many_requests_of_one_buffer_take_several_turns(serve: Callable[..., Any], tiny_turns: None) -> None:
    peer = serve().connect()
    peer.expect_reply(b"TTL nope\r\n" * 2000, b":-2\r\n" * 2000)


def slow_reader(server: Any) -> Any:
    peer = server.connect()
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    return peer


def test_client_that_does_not_read_is_not_read_from(serve: Callable[..., Any]) -> None:
    server = serve(output_pause_bytes=65_536)
    peer = slow_reader(server)
    request = b"GET job:temp:large\r\n"
    peer.send(request * 60)
    server.connect().expect_reply(PING, PONG)
    connection = next(iter(server.server._connections.values()))

    def waiting() -> int:
        return int(connection.output.size_bytes)

    # One turn's output and what a single reply adds to it.
    assert server.call(waiting) <= 2 * LARGE_BYTES + 65_536
    expected = b"$%d\r\n%b\r\n" % (LARGE_BYTES, b"x" * LARGE_BYTES)
    for _ in range(60):
        assert peer.read(len(expected)) == expected
    assert server.call(waiting) == 0


def test_many_long_values_at_once_are_sent_as_client_takes_them(serve: Callable[..., Any]) -> None:
    server = serve(client_output_buffer_limit=OUTPUT_LIMITS | {"normal": (2 * LARGE_BYTES, 0, 0)})
    peer = slow_reader(server)
    peer.send(b"MGET" + b" job:temp:large" * 64 + b"\r\n")
    assert peer.read(5) == b"*64\r\n"
    expected = b"$%d\r\n%b\r\n" % (LARGE_BYTES, b"x" * LARGE_BYTES)
    for _ in range(64):
        assert peer.read(len(expected)) == expected
    peer.expect_reply(PING, PONG)


def test_reply_beyond_hard_limit_ends_connection(serve: Callable[..., Any]) -> None:
    server = serve(client_output_buffer_limit=OUTPUT_LIMITS | {"normal": (LARGE_BYTES // 2, 0, 0)})
    peer = slow_reader(server)
    peer.send(b"GET job:temp:large\r\n" * 64)
    assert len(peer.read_until_cut()) < 64 * LARGE_BYTES
    server.connect().expect_reply(PING, PONG)


def test_reply_in_steps_beyond_hard_limit_ends_connection(serve: Callable[..., Any], tiny_turns: None) -> None:
    server = serve(client_output_buffer_limit=OUTPUT_LIMITS | {"normal": (50_000, 0, 0)})
    peer = server.connect()
    peer.send(b"KEYS *\r\n")
    assert peer.read_until_cut() == b""
    server.connect().expect_reply(PING, PONG)


def test_unread_reply_in_steps_is_ended_by_sweep(serve: Callable[..., Any], tiny_turns: None) -> None:
    server = serve(output_pause_bytes=1, sliced_reply_ms_max=1000)
    peer = slow_reader(server)
    peer.send(b"HGETALL job:visits:/\r\n" * 200)
    now_ms = server.server.context.clock()
    assert peer.read(10)
    connection = next(iter(server.server._connections.values()))
    eventually(
        lambda: server.call(lambda: connection.reply.stream is not None and not connection.output.is_writable),
        awaited="the reply waits for its reader",
    )
    server.call(lambda: server.server.sweep(now_ms + 1001))
    peer.read_until_cut()
    assert server.call(lambda: len(server.server._connections)) == 0


def test_client_that_leaves_amid_reply_leaves_nothing_behind(
    serve: Callable[..., Any], tiny_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []
    server = serve(output_pause_bytes=1)
    close = type(server.server.context.view).close

    def noted(view: Any) -> None:
        closed.append(view)
        close(view)

    monkeypatch.setattr(type(server.server.context.view), "close", noted)
    peer = slow_reader(server)
    peer.send(b"HGETALL job:visits:/\r\n" * 200)
    assert peer.read(10)
    peer.socket.close()
    eventually(lambda: server.call(lambda: len(server.server._connections)), lambda count: count == 0)
    assert closed
