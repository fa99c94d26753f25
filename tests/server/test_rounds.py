"""Clients whose requests come in one round of the event loop: each gets its own replies, and only its own errors."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from compat.conformance.wire import request
from resp_server.cluster.topology import Topology
from state_backend.model.records import Change, Op
from state_backend.store.memory_store import MemoryStore
from tests.builders import apply_epoch
from tests.server.conftest import LARGE_BYTES, NOW_MS, STATES, Peer
from tests.server.socket_requests import bulk

pytestmark = pytest.mark.pure

NIL, NIL3 = b"$-1\r\n", b"_\r\n"
WRONG_KIND = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"


def get(number: int) -> bytes:
    return request(b"GET", b"job:temp:%d" % number)


def values(*numbers: int) -> bytes:
    return b"".join(bulk(b"%d" % number) for number in numbers)


def send_together(running: Any, *sent: tuple[Peer, bytes]) -> None:
    """Send input that the event loop finds when it looks at its sockets the next time."""
    running.call(lambda: [peer.send(data) for peer, data in sent])


def test_each_client_gets_its_own_replies(serve: Callable[..., Any]) -> None:
    running = serve()
    peers = [running.connect() for _ in range(100)]
    peers[3].ask("HELLO", 3)
    asked = 0
    for first in range(5):
        numbers = [[first * 1000 + at * 7 + more for more in range(1 + at % 4)] for at in range(len(peers))]
        numbers[2] = list(range(20))
        numbers[3] = [-1]  # a missing key
        asked += sum(map(len, numbers))
        send_together(running, *((peer, b"".join(map(get, own))) for peer, own in zip(peers, numbers, strict=True)))
        for at, (peer, own) in enumerate(zip(peers, numbers, strict=True)):
            peer.expect(NIL3 if at == 3 else values(*own))
    stats = running.server.context.stats
    running.call(stats.collect)
    assert (stats.commands["get"].calls, stats.hits, stats.misses) == (asked, asked - 5, 5)


def test_error_reaches_its_client_alone(serve: Callable[..., Any]) -> None:
    running = serve()
    peers = [running.connect() for _ in range(6)]
    wrong = request("GET", "job:stats:a")
    send_together(
        running,
        (peers[0], get(0)),
        (peers[1], get(1) + wrong + get(11)),
        (peers[2], request("GET", "a", "b")),
        (peers[3], b"*2\r\n$3\r\nGET\r\n$x\r\n"),
        (peers[4], wrong),
        (peers[5], get(5) + get(55)),
    )
    peers[0].expect(values(0))
    peers[1].expect(values(1) + WRONG_KIND + values(11))
    peers[2].expect(b"-ERR wrong number of arguments for 'get' command\r\n")
    assert peers[3].read_all() == b"-ERR Protocol error: invalid bulk length\r\n"
    peers[4].expect(WRONG_KIND)
    peers[5].expect(values(5, 55))


def test_partial_request_is_not_continued_by_another_client(serve: Callable[..., Any]) -> None:
    running = serve()
    one, two = running.connect(), running.connect()
    send_together(running, (one, get(1) + b"*"), (two, get(2)[1:]))
    one.expect(values(1))
    one.expect_reply(get(3)[1:], values(3))
    two.expect(b"-ERR unknown command '2', with args beginning with: \r\n")


def test_long_value_delays_only_later_requests_of_its_client(serve: Callable[..., Any]) -> None:
    running = serve()
    peers = [running.connect() for _ in range(4)]
    large = request("GET", "job:temp:large")
    together = [(peers[0], get(0)), (peers[1], get(1) + large + get(11)), (peers[2], large), (peers[3], get(3))]
    send_together(running, *together)
    peers[0].expect(values(0))
    peers[3].expect(values(3))
    peers[2].expect(bulk(b"x" * LARGE_BYTES))
    peers[1].expect(values(1) + bulk(b"x" * LARGE_BYTES) + values(11))


def test_commands_of_all_kinds_are_answered_beside_each_other(serve: Callable[..., Any]) -> None:
    running = serve()
    peers = [running.connect() for _ in range(7)]
    peers[0].ask("MULTI")
    peers[1].ask("SELECT", 1)
    peers[2].ask("CLIENT", "REPLY", "ON")
    sent = [
        (get(0), b"+QUEUED\r\n"),
        (get(1), NIL),
        (request("CLIENT", "REPLY", "SKIP") + get(2) + get(22), values(22)),
        (request("STRLEN", "job:temp:333"), b":3\r\n"),
        (get(4) + request("STRLEN", "job:temp:44") + b"GET job:temp:444\r\n", values(4) + b":2\r\n" + values(444)),
        (request("get", "job:temp:5"), values(5)),
        (request("GETRANGE", "job:temp:678", "1", "2"), values(78)),
    ]
    send_together(running, *((peer, data) for peer, (data, _) in zip(peers, sent, strict=True)))
    for peer, (_, expected) in zip(peers, sent, strict=True):
        peer.expect(expected)
    peers[0].expect_reply(request("EXEC"), b"*1\r\n" + values(0))


def test_client_that_sends_no_more_is_answered_before_its_connection_ends(serve: Callable[..., Any]) -> None:
    running = serve()
    going, staying = running.connect(), running.connect()

    def send() -> None:
        going.send(get(1) + get(11))
        going.socket.shutdown(socket.SHUT_WR)
        staying.send(get(2))

    running.call(send)
    assert going.read_all() == values(1, 11)
    staying.expect(values(2))


def test_follower_gets_epoch_before_its_reply(serve: Callable[..., Any]) -> None:
    store = MemoryStore("g1")

    def publish(epoch: int) -> None:
        changes = [Change("temp", Op.PUT, b"job:temp:%d" % number, value=b"%d" % epoch) for number in range(3)]
        apply_epoch(store, STATES, changes, epoch, clock_ms=NOW_MS)

    publish(4)
    running = serve(store)
    follower, other, busy = (running.connect() for _ in range(3))
    follower.send(request("STATE", "FOLLOW"))
    follower.read_until(b":4\r\n")

    def send() -> None:
        publish(5)
        follower.send(get(0))
        other.send(get(1))
        busy.send(get(2) + request("GET", "job:map:none"))

    running.call(send)
    assert follower.read_until(b"$1\r\n5\r\n") == b">4\r\n$5\r\nepoch\r\n$3\r\njob\r\n:1\r\n:5\r\n$1\r\n5\r\n"
    other.expect(values(5))
    busy.expect(values(5) + NIL)


def test_key_of_another_node_redirects_its_client_alone(serve: Callable[..., Any]) -> None:
    running = serve()
    rows = [
        {"host": "127.0.0.1", "port": running.server.port, "slots": "0-8191"},
        {"host": "127.0.0.1", "port": 1, "slots": "8192-16383"},
    ]
    topology = Topology.of_json({"version": 1, "nodes": rows})
    running.call(lambda: running.server.set_topology(topology, topology.nodes[0].id))
    peers = [running.connect() for _ in range(20)]
    send_together(running, *((peer, get(at) + get(at + 20)) for at, peer in enumerate(peers)))
    moved = 0
    for at, peer in enumerate(peers):
        with peer.socket.makefile("rb") as replies:
            for number in (at, at + 20):
                line = replies.readline()
                if line.startswith(b"-MOVED "):
                    moved += 1
                    assert line.endswith(b" 127.0.0.1:1\r\n")
                else:
                    assert line + replies.readline() == values(number)
    assert 0 < moved < 40
    stats = running.server.context.stats
    running.call(stats.collect)
    assert (stats.commands["get"].calls, stats.commands["get"].rejected) == (40 - moved, moved)


def test_monitor_sees_requests_of_all_clients(serve: Callable[..., Any]) -> None:
    running = serve()
    monitor, one, two = (running.connect() for _ in range(3))
    monitor.expect_reply(request("MONITOR"), b"+OK\r\n")
    send_together(running, (one, get(1)), (two, get(2)))
    seen = monitor.read_until(b'"job:temp:2"\r\n')
    assert b'"GET" "job:temp:1"\r\n' in seen
    one.expect(values(1))
    two.expect(values(2))


def test_input_of_several_reads_is_answered_once_and_in_order(serve: Callable[..., Any]) -> None:
    running = serve()
    one, two = running.connect(), running.connect()
    for peer in (one, two):
        peer.expect_reply(request("PING"), b"+PONG\r\n")
    first, second = running.server._connections.values()
    stats = running.server.context.stats
    running.call(stats.collect)
    before = stats.input_bytes

    def receive() -> None:
        for chunk in (get(1), get(2)[:5], get(2)[5:], get(3)):
            first.data_received(chunk)
            second.data_received(get(9))

    running.call(receive)
    one.expect_reply(request("PING"), values(1, 2, 3) + b"+PONG\r\n")
    two.expect_reply(request("PING"), values(9, 9, 9, 9) + b"+PONG\r\n")
    running.call(stats.collect)
    asked = sum(map(len, (get(1), get(2), get(3), *[get(9)] * 4, *[request("PING")] * 2)))
    assert (stats.commands["get"].calls, stats.input_bytes - before) == (7, asked)
    assert [each.session.calls for each in (first, second)] == [1 + 3 + 1, 1 + 4 + 1]
