"""CLIENT PAUSE, UNPAUSE, KILL, NO-EVICT, REPLY and WAIT at a server, and through a proxy to its upstream."""

from __future__ import annotations

import select
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from compat.conformance.judge import client_lines
from compat.conformance.pair import Pair
from compat.conformance.servers import Running
from compat.conformance.wire import Connection, request
from compat.waiting import eventually
from tests.server.overlay import Overlay

LONG_MS = 1_000_000
# Requests of one client during CLIENT PAUSE ... WRITE. The last request of a line is the one that may wait.
READS = ["GET k", "MGET k l", "PING", "NOSUCH k", "GET", "MULTI; GET k", "MULTI; GET k; EXEC", "WATCH k", "CLIENT ID"]
MESSAGES = ["PUBLISH c x", "SPUBLISH c x", "MULTI; PUBLISH c x"]
WRITES = [
    "SET k 1",
    "SET k",
    "LPUSH l 1",
    "EVAL return_redis.call('set','k','2') 1 k",
    "EVAL return_1 0",
    "EVAL_RO return_1 0",
    "DEL k nokey",
    "MSET k 1 m 2",
    "BLPOP l 0",
    "PFCOUNT p",
    "PFADD p 1",
    "MULTI; SET k 1",
    "SET k 1 EX 0",
    "SELECT 1; SET k 1",
    "SELECT 1; GET k",
    "WAIT 0 10",
]
LINES = [*READS, *MESSAGES, *WRITES]


def sent(client: Connection, words: str) -> bytes:
    """Send a request; return its bytes."""
    data = request(*(word.replace("_", " ") if "return" in word else word for word in words.split(" ")))
    client.send(data)
    return data


def is_readable(client: Connection) -> bool:
    return bool(select.select([client], [], [], 0)[0])


def flags_of(control: Connection, client_id: int) -> str:
    (line,) = client_lines(control.call("CLIENT", "LIST", "ID", client_id))
    return line["flags"]


@pytest.fixture
def direct(overlay: Overlay) -> Iterator[Connection]:
    with overlay.upstream.connect() as connection:
        yield connection


def paused(server: Running, line: str, upstream: Connection | None = None) -> tuple[bool, list[bytes]]:
    """Pause writes, send a client's requests, end the pause; return whether the last one waited, and all replies."""
    with server.connect() as control, server.connect() as client:
        if upstream is not None:
            upstream.call("FLUSHALL")
            upstream.call("RPUSH", "l", "a", "b")
        client_id = client.call("CLIENT", "ID").value
        *before, last = line.split("; ")
        replies = [client.call(*each.split(" ")).raw for each in before]
        assert control.call("CLIENT", "PAUSE", LONG_MS, "WRITE").plain == b"OK"
        try:
            sent(client, last)
            waited = eventually(
                lambda: (is_readable(client), "b" in flags_of(control, client_id)), lambda found: any(found)
            )[1]
        finally:
            assert control.call("CLIENT", "UNPAUSE").plain == b"OK"
        return waited, [*replies, client.read().raw]


@pytest.mark.parametrize("line", [*READS[:4], READS[-1], *MESSAGES])
def test_pause_of_writes_delays_same_requests_at_server(pair: Pair, line: str) -> None:
    found = paused(pair.sparkis, line)[0], paused(pair.redis, line)[0]
    assert found[0] == found[1] == (line in MESSAGES)


@pytest.mark.parametrize("line", [line for line in LINES if line != "CLIENT ID"])
def test_pause_of_writes_delays_same_requests_at_overlay(overlay: Overlay, direct: Connection, line: str) -> None:
    found = [paused(server, line, direct) for server in (overlay.upstream, overlay.proxy)]
    assert found[0] == found[1]


def test_paused_transaction_is_queued_and_executed_after_pause(overlay: Overlay, direct: Connection) -> None:
    direct.call("FLUSHALL")
    with overlay.proxy.connect() as control, overlay.proxy.connect() as client:
        client_id = client.call("CLIENT", "ID").value
        client.call("MULTI")
        client.call("SET", "k", "1")
        client.call("GET", "job:speed:1")
        control.call("CLIENT", "PAUSE", LONG_MS, "WRITE")
        client.send(request("EXEC") + request("GET", "k"))
        eventually(lambda: "b" in flags_of(control, client_id))
        assert control.call("GET", "k").plain is None
        control.call("CLIENT", "UNPAUSE")
        assert [client.read().plain, client.read().plain] == [[b"OK", b"10"], b"1"]


def test_write_of_client_that_leaves_during_pause_is_not_run(overlay: Overlay, direct: Connection) -> None:
    direct.call("FLUSHALL")
    with overlay.proxy.connect() as control:
        control.call("CLIENT", "PAUSE", LONG_MS, "WRITE")
        with overlay.proxy.connect() as client:
            client_id = client.call("CLIENT", "ID").value
            sent(client, "SET k 1")
            eventually(lambda: "b" in flags_of(control, client_id))
        eventually(lambda: not client_lines(control.call("CLIENT", "LIST", "ID", client_id)))
        control.call("CLIENT", "UNPAUSE")
        control.call("SET", "other", "1")
        assert direct.call("GET", "k").plain is None


@pytest.mark.parametrize("mode", ["ALL", "WRITE"])
@pytest.mark.parametrize("through", ["proxy", "upstream"])
def test_pause_ended_by_time_loses_no_reply(overlay: Overlay, direct: Connection, mode: str, through: str) -> None:
    """The client whose timer ends the pause is one of these, in any order."""
    lines = [["SET", "n", "1"], ["INCR", "n"], ["GET", "n"], ["LPUSH", "l", "x"], ["MGET", "n", "job:speed:1"]]
    server = overlay.proxy if through == "proxy" else overlay.upstream
    with ExitStack() as stack:
        clients = [stack.enter_context(server.connect()) for _ in range(6)]
        for number in range(8):
            direct.call("FLUSHALL")
            with server.connect() as control:
                control.send(request("CLIENT", "PAUSE", 30 + number, mode))
                assert control.read().plain == b"OK"
                for client in clients:
                    client.send(b"".join(request(*line) for line in lines))
                replies = [[client.read() for _ in lines] for client in clients]
            assert not [each.plain for answered in replies for each in answered if each.is_error]
            assert direct.call("LLEN", "l").plain == len(clients)


def outcomes(server: Running, lines: Sequence[str]) -> list[bytes]:
    """Return what one client reads after a pipeline that it ends with PING."""
    with server.connect() as client:
        for line in lines:
            sent(client, line)
        client.send(request("ECHO", "end"))
        return client.read_to_end(b"$3\r\nend\r\n").splitlines()


@pytest.mark.parametrize(
    "line",
    [
        "CLIENT REPLY OFF; SET k 1; GET k; CLIENT REPLY ON; GET k",
        "CLIENT REPLY SKIP; SET k 2; GET k",
        "CLIENT REPLY SKIP; CLIENT REPLY SKIP; GET k; PING",
        "CLIENT REPLY SKIP; BLPOP l 0; GET k",
        "CLIENT REPLY SKIP; SUBSCRIBE c; RESET; PING",
        "CLIENT REPLY NOPE; PING",
        "CLIENT NO-EVICT on; CLIENT NO-EVICT off; CLIENT NO-EVICT x; GET k",
        "CLIENT PAUSE 0; SET k 3; CLIENT PAUSE 0 WRITE; SET k 4; CLIENT UNPAUSE; GET k",
        "CLIENT PAUSE 20; SET k 5; GET k; CLIENT PAUSE 20 WRITE; GET k; SET k 6; GET k",
        "CLIENT PAUSE x WRITE; CLIENT PAUSE -1 WRITE; CLIENT PAUSE 1 READ; CLIENT UNPAUSE x",
        "SET k 7; WAIT 0 100; WAIT 0 0; GET k",
        "SET k 8; WAIT 1 20; GET k",
        "CLIENT KILL ID 999999999; CLIENT KILL 1.1.1.1:1; CLIENT KILL TYPE nope; CLIENT KILL; GET k",
        "CLIENT UNBLOCK 999999999; CLIENT UNBLOCK x; CLIENT UNBLOCK 1 NOPE",
    ],
)
def test_verbs_about_clients_reply_as_upstream_alone(overlay: Overlay, direct: Connection, line: str) -> None:
    found = []
    for server in (overlay.upstream, overlay.proxy):
        direct.call("FLUSHALL")
        direct.call("RPUSH", "l", "a")
        found.append(outcomes(server, line.split("; ")))
    assert found[0] == found[1]


def test_killed_blocked_client_takes_nothing_from_upstream(overlay: Overlay, direct: Connection) -> None:
    direct.call("FLUSHALL")
    for server in (overlay.upstream, overlay.proxy):
        with server.connect() as control, server.connect() as client:
            client_id = client.call("CLIENT", "ID").value
            client.send(request("BLPOP", "l", 0))
            eventually(lambda: b"\r\nblocked_clients:1\r\n" in direct.call("INFO", "clients").plain)
            assert control.call("CLIENT", "KILL", "ID", client_id).plain == 1
            assert client.read_to_end() == b""
            eventually(lambda: b"\r\nblocked_clients:0\r\n" in direct.call("INFO", "clients").plain)
            assert direct.call("RPUSH", "l", "x").plain == 1
            assert direct.call("LPOP", "l").plain == b"x"
