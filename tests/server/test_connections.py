"""Bytes in, bytes out, over real sockets: order, protocols, passwords, limits."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest

from resp_server.client.output import ClientOutput
from tests.server.socket_requests import bulk

pytestmark = pytest.mark.pure

KEYS = 20_000
LARGE_BYTES = 1 << 20
PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"


def get(key: bytes) -> bytes:
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key)


def test_pipelined_requests_are_answered_in_order(serve: Callable[..., Any]) -> None:
    peer = serve().connect()
    numbers = [at * 7 % KEYS for at in range(30_000)]
    expected = b"".join(bulk(b"%d" % number) for number in numbers)
    peer.expect_reply(b"".join(get(b"job:temp:%d" % number) for number in numbers), expected)


PIPELINE = b"".join(get(b"job:temp:%d" % number) for number in range(200))
ANSWERED = b"".join(bulk(b"%d" % number) for number in range(200))


@pytest.fixture
def hurried(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server whose event loop's rounds are long as soon as somebody asks for much, and four clients.

    No turn is too long, so that a system that stops the process for a while does not change what is deferred.
    """
    monkeypatch.setattr("resp_server.client.turn_scheduler.ROUND_NS_MAX", 0)
    monkeypatch.setattr("resp_server.client.connection.TURN_NS_MAX", 3_600_000_000_000)
    server = serve()
    for _ in range(4):
        server.connect().expect_reply(PING, PONG)
    return server


def arrive(server: Any, patch: pytest.MonkeyPatch, *sent: bytes) -> tuple[list[int], list[bool]]:
    """Have clients' input come in one round of the event loop; return in whose order they are answered, who is read."""
    connections = [server.server._connections[number] for number in range(1, len(server.peers) + 1)]
    order: list[int] = []
    outputs = [connection.output for connection in connections]
    write = ClientOutput.write

    def noting(output: ClientOutput, reply: bytes) -> None:
        order.append(outputs.index(output))
        write(output, reply)

    patch.setattr(ClientOutput, "write", noting)

    async def receive() -> list[bool]:
        for number, data in enumerate(sent):
            if number == len(connections) and server.server.add_to_round is not None:
                await asyncio.sleep(0)  # without the core, turns are given out at the round's end
            connections[number % len(connections)].data_received(data)
        return [connection.input.is_reading for connection in connections]

    return order, server.run(receive())


def test_simultaneous_pipelines_are_answered_whole(hurried: Any) -> None:
    hurried.call(lambda: [peer.send(PIPELINE) for peer in hurried.peers])  # found when the event loop looks again
    for peer in hurried.peers:
        peer.expect_reply(PING + PIPELINE, ANSWERED + PONG + ANSWERED)


def test_small_request_waits_for_no_pipeline_but_first(hurried: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order, _ = arrive(hurried, monkeypatch, PIPELINE, PIPELINE, PIPELINE, PING)
    for peer, expected in zip(hurried.peers, [ANSWERED] * 3 + [PONG], strict=True):
        peer.expect(expected)
    assert order.index(3) < 2 and [each for each in order if each != 3] == [0, 1, 2]


def test_waiting_client_is_read_one_more_buffer_at_most(hurried: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, is_read = arrive(hurried, monkeypatch, PIPELINE, PIPELINE, PIPELINE, PING, PING, PING)
    assert is_read[1:] == [False, True, True]
    for peer, expected in zip(hurried.peers, [ANSWERED + PONG] * 2 + [ANSWERED, PONG], strict=True):
        peer.expect_reply(PING, expected + PONG)


def test_replies_in_steps_keep_their_place(serve: Callable[..., Any]) -> None:
    peer = serve().connect()
    peer.send(PING + b"KEYS job:temp:1\r\n" + PING + b"HLEN job:visits:/\r\n" + b"HKEYS job:visits:/\r\n" + PING)
    before = PONG + b"*1\r\n" + bulk(b"job:temp:1") + PONG + b":5000\r\n" + b"*5000\r\n"
    fields = [bulk(b"u%d" % i) for i in range(5000)]  # in the order of a scan
    assert peer.read(len(before)) == before
    found = peer.read(sum(map(len, fields)))
    assert sorted(re.findall(rb"\$\d+\r\nu\d+\r\n", found)) == sorted(fields)
    assert peer.read(len(PONG)) == PONG


def test_request_may_come_in_chunks(serve: Callable[..., Any]) -> None:
    peer = serve().connect()
    peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in get(b"job:temp:5"):
        peer.send(bytes([byte]))
    assert peer.read(7) == bulk(b"5")


def test_inline_commands_are_understood(serve: Callable[..., Any]) -> None:
    peer = serve().connect()
    peer.expect_reply(b'PING\n\r\nECHO "a\\x41b"\r\nget job:temp:5\n', PONG + bulk(b"aAb") + bulk(b"5"))


def test_hello_moves_to_resp3_and_reset_back(serve: Callable[..., Any]) -> None:
    peer = serve().connect()
    peer.send(b"HELLO 3\r\n")
    assert peer.read(3) == b"%8\r"
    peer.send(b"ECHO end\r\n")
    head = b""
    while not head.endswith(b"end\r\n"):
        head += peer.read(1)
    peer.expect_reply(b"GET nope\r\n", b"_\r\n")
    peer.expect_reply(b"HGETALL job:stats:a\r\n", b"%2\r\n$3\r\nlow\r\n$1\r\n1\r\n$4\r\nhigh\r\n$1\r\n9\r\n")
    peer.expect_reply(b"RESET\r\nGET nope\r\n", b"+RESET\r\n$-1\r\n")


def test_login_lifts_limits_at_once(serve: Callable[..., Any]) -> None:
    peer = serve(password="secret").connect()
    peer.expect_reply(get(b"job:temp:1"), b"-NOAUTH Authentication required.\r\n")
    mget = b"*12\r\n$4\r\nMGET\r\n" + b"$1\r\na\r\n" * 11
    peer.expect_reply(b"AUTH secret\r\n" + mget + get(b"job:temp:1"), b"+OK\r\n*11\r\n" + b"$-1\r\n" * 11 + bulk(b"1"))


def test_long_requests_before_login_are_refused(serve: Callable[..., Any]) -> None:
    server = serve(password="secret")
    counted, long = server.connect(), server.connect()
    counted.send(b"*11\r\n")
    long.send(PING + b"*1\r\n$16385\r\n")
    assert counted.read_all() == b"-ERR Protocol error: unauthenticated multibulk length\r\n"
    noauth = b"-NOAUTH Authentication required.\r\n"
    assert long.read_all() == noauth + b"-ERR Protocol error: unauthenticated bulk length\r\n"


@pytest.mark.parametrize("before", [b"", b"MULTI\r\n"], ids=["plain", "in MULTI"])
def test_requests_behind_reset_in_one_buffer_are_those_of_client_without_login(
    serve: Callable[..., Any], before: bytes
) -> None:
    server = serve(password="secret")
    refused = b"-NOAUTH Authentication required.\r\n"
    cases = [
        (b"*12\r\n$4\r\nMGET\r\n" + b"$1\r\na\r\n" * 11, b"unauthenticated multibulk length"),
        (get(b"a" * 16_385), b"unauthenticated bulk length"),
    ]
    for request, error in cases:
        peer = server.connect()
        peer.send(b"AUTH secret\r\n" + before + b"RESET\r\n" + get(b"job:temp:1") + request + PING)
        expected = (
            b"+OK\r\n" * (2 if before else 1) + b"+RESET\r\n" + refused + b"-ERR Protocol error: " + error + b"\r\n"
        )
        assert peer.read_all() == expected


def test_broken_request_is_answered_after_those_before_it_and_closed(serve: Callable[..., Any]) -> None:
    peer = serve().connect()
    peer.send(PING + b"*1\r\n+PING\r\n" + PING)
    assert peer.read_all() == PONG + b"-ERR Protocol error: expected '$', got '+'\r\n"


def test_connection_of_browser_is_closed_without_reply(serve: Callable[..., Any]) -> None:
    peer = serve().connect()
    peer.send(b"POST / HTTP/1.1\r\nHost: here\r\n\r\n")
    peer.expect_close()


def test_too_large_query_is_closed_without_reply(serve: Callable[..., Any]) -> None:
    peer = serve(client_query_buffer_limit=100_000).connect()
    peer.send(b"*2\r\n$4\r\nECHO\r\n$300000\r\n" + b"x" * 200_000)
    assert peer.read_until_cut() == b""


def test_quit_closes_after_its_reply(serve: Callable[..., Any]) -> None:
    peer = serve().connect()
    peer.send(PING + b"QUIT\r\n" + PING)
    assert peer.read_all() == PONG + b"+OK\r\n"


def test_half_closed_client_gets_all_its_replies(serve: Callable[..., Any]) -> None:
    peer = serve().connect()
    peer.send(b"HKEYS job:visits:/\r\n" + PING)
    peer.socket.shutdown(socket.SHUT_WR)
    reply = peer.read_all()
    assert reply.startswith(b"*5000\r\n")
    assert reply.endswith(PONG)


def test_client_beyond_limit_gets_error(serve: Callable[..., Any]) -> None:
    server = serve(maxclients=2)
    first, second = server.connect(), server.connect()
    first.expect_reply(PING, PONG)
    second.expect_reply(PING, PONG)
    assert server.connect().read_all() == b"-ERR max number of clients reached\r\n"
    first.socket.close()
    second.expect_reply(b"CLIENT ID\r\n", b":2\r\n")
    assert server.server.context.stats.connections_rejected == 1


def test_idle_client_is_closed_after_its_timeout(serve: Callable[..., Any]) -> None:
    server = serve(timeout=10)
    peer = server.connect()
    peer.expect_reply(PING, PONG)
    now_ms = server.server.context.clock()
    server.call(lambda: server.server.sweep(now_ms + 10_000))
    peer.expect_reply(PING, PONG)
    server.call(lambda: server.server.sweep(now_ms + 10_001))
    peer.expect_close()


def test_stop_closes_clients(serve: Callable[..., Any]) -> None:
    server = serve()
    peer = server.connect()
    peer.expect_reply(PING, PONG)
    server.run(server.server.stop())
    peer.expect_close()
    with pytest.raises(ConnectionRefusedError):
        server.connect()


def test_stopped_server_lets_go_of_its_snapshots(serve: Callable[..., Any]) -> None:
    server = serve()
    server.connect().expect_reply(get(b"job:temp:1"), bulk(b"1"))
    server.run(server.server.stop())
    assert server.server.context.view._snapshots == {}


def outward_address() -> str | None:
    """Return an address of this machine that is not a loopback one, if it has any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address; nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return None


def test_protected_mode_denies_other_machines(serve: Callable[..., Any]) -> None:
    address = outward_address()
    if address is None or address.startswith("127."):
        pytest.skip("this machine has no address but the loopback one")
    server = serve(hosts=("0.0.0.0",))
    assert server.connect(address).read_all().startswith(b"-DENIED Redis is running in protected mode because")
    server.connect().expect_reply(PING, PONG)
    serve(hosts=("0.0.0.0",), protected_mode=False).connect(address).expect_reply(PING, PONG)
    serve(hosts=("0.0.0.0",), password="x").connect(address).expect_reply(b"AUTH x\r\n", b"+OK\r\n")


def test_both_loopback_addresses_share_port(serve: Callable[..., Any]) -> None:
    server = serve(hosts=("127.0.0.1", "::1"))
    server.connect().expect_reply(PING, PONG)
    if len(server.server._listeners) < 2:
        pytest.skip("this machine has no ::1")
    server.connect("::1").expect_reply(PING, PONG)


def test_bytes_and_connections_are_counted(serve: Callable[..., Any]) -> None:
    server = serve()
    peer = server.connect()
    peer.expect_reply(PING * 3, PONG * 3)
    stats = server.server.context.stats
    server.call(stats.collect)
    assert (stats.input_bytes, stats.output_bytes, stats.connections_received) == (len(PING) * 3, len(PONG) * 3, 1)
    assert stats.commands["ping"].calls == 3
