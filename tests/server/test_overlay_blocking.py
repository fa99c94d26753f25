"""Blocking commands at an upstream: each client that blocks has a connection of its own, which ends with the client."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import redis

from compat.conformance.servers import redis_server
from compat.conformance.wire import Connection, request
from compat.waiting import eventually
from tests.server.conftest import on_linux
from tests.server.overlay import Overlay

PINNED_MAX = 3


OPTIONS = ("--upstream-timeout", "1500", "--upstream-pinned", str(PINNED_MAX))


def wait_until_blocked(direct: Connection, count: int = 1) -> None:
    eventually(lambda: b"\r\nblocked_clients:%d\r\n" % count in direct.call("INFO", "clients").plain)


def test_blocking_command_outlasts_upstream_timeout(client: Connection, direct: Connection) -> None:
    client.send(request("BLPOP", "q", "0"))
    assert direct.call("BLPOP", "nothing", "2").plain is None
    direct.call("RPUSH", "q", "job")
    assert client.read().plain == [b"q", b"job"]


@pytest.mark.parametrize("behind", [b"", request("GET", "a") * 4000])
@pytest.mark.parametrize("leave", [Connection.__exit__, Connection.end])
def test_leaving_blocked_client_takes_no_element(
    overlay: Overlay, direct: Connection, leave: Callable[[Connection], None], behind: bytes
) -> None:
    client = overlay.proxy.connect()
    client.send(request("BLPOP", "q", "0"))
    wait_until_blocked(direct)
    client.send(behind)
    leave(client)
    wait_until_blocked(direct, 0)
    direct.call("RPUSH", "q", "job")
    assert direct.call("LRANGE", "q", 0, -1).plain == [b"job"]


@pytest.mark.parametrize(
    "end", [Connection.end, pytest.param(Connection.reset, marks=[pytest.mark.compiled, on_linux])]
)
def test_ended_blocked_client_takes_no_element_of_later_push(
    overlay: Overlay, client: Connection, direct: Connection, end: Callable[[Connection], None]
) -> None:
    for _ in range(50):
        with overlay.proxy.connect() as blocked:
            blocked.send(request("BLPOP", "q", "0"))
            wait_until_blocked(direct)
            end(blocked)
            if end is Connection.end:
                assert blocked.read_to_end() == b""
            assert client.call_each("RPUSH q job", "LPOP q") == [1, b"job"]


def test_blocking_command_at_end_of_input_does_not_block(overlay: Overlay, direct: Connection) -> None:
    with overlay.proxy.connect() as client:
        client.send(request("SET", "k", "1") + request("BLPOP", "q", "0"))
        client.end()
        assert client.read_to_end() == b"+OK\r\n"
    direct.call("RPUSH", "q", "job")
    assert direct.call("LLEN", "q").plain == 1


def test_client_unblock_waits_for_command_on_its_way(overlay: Overlay, client: Connection, direct: Connection) -> None:
    number = client.call("CLIENT", "ID").plain
    with overlay.proxy.connect() as other:
        other.call("PING")
        overlay.upstream.process.send_signal(signal.SIGSTOP)  # the client's own connection is not opened yet
        try:
            client.send(request("BLPOP", "q", "0"))
            eventually(lambda: b"cmd=blpop" in other.call("CLIENT", "LIST", "ID", number).plain)
            other.send(request("CLIENT", "UNBLOCK", str(number)))
            with overlay.proxy.connect() as third:  # by its reply the proxy has read the request
                third.call("CLIENT", "LIST")
        finally:
            overlay.upstream.process.send_signal(signal.SIGCONT)
        assert other.read().plain == 1
        assert client.read().raw == b"*-1\r\n"


def test_dedicated_connections_are_limited_and_idle_ones_given_up(overlay: Overlay, direct: Connection) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(overlay.proxy.connect()) for _ in range(PINNED_MAX + 2)]
        for number, each in enumerate(clients[:PINNED_MAX]):
            each.send(request("BLPOP", f"q{number}", "0"))
        wait_until_blocked(direct, PINNED_MAX)
        assert clients[-1].call("BLPOP", "other", "0").plain == (
            b"ERR max number of clients with an upstream connection of their own reached, %d; see --upstream-pinned"
            % PINNED_MAX
        )
        assert clients[-1].call("SET", "k", "1").plain == b"OK"  # what needs none works
        fields = overlay.info()
        assert fields["upstream_pinned"] == fields["upstream_pinned_max"] == fields["upstream_blocked"] == "3"
        direct.call("RPUSH", "q1", "job")
        assert clients[1].read().plain == [b"q1", b"job"]
        clients[-1].send(request("BLPOP", "other", "0"))  # takes the place of the idle one
        wait_until_blocked(direct, PINNED_MAX)
        assert clients[1].call("GET", "k").plain == b"1"
        assert clients[1].call("BLPOP", "q1", "0").is_error
    eventually(lambda: overlay.info()["upstream_pinned"] == "0")


def test_requests_after_blocking_command_keep_order(client: Connection, direct: Connection) -> None:
    assert client.call("BLPOP", "none", "0.01").plain is None
    for number in range(50):
        client.send(request("HELLO", 2 + number % 2) + request("SET", "k", number) + request("RESET"))
        client.send(request("GET", "k") + request("BLPOP", "none", "0.001"))
        assert [client.read() for _ in range(5)][3].plain == b"%d" % number


def test_suppressed_reply_of_blocking_command_delays_next_request(client: Connection, direct: Connection) -> None:
    client.send(request("CLIENT", "REPLY", "SKIP") + request("BLPOP", "q", "0") + request("LLEN", "q"))
    wait_until_blocked(direct)
    direct.call("RPUSH", "q", "1", "2")
    assert client.read().plain == 1


def test_dead_upstream_disconnects_blocked_client(overlay: Overlay, client: Connection, direct: Connection) -> None:
    client.send(request("SET", "k", "1") + request("BLPOP", "q", "0") + request("GET", "k"))
    wait_until_blocked(direct)
    overlay.signal_upstream(signal.SIGKILL)
    assert client.read_to_end() == b"+OK\r\n"
    with overlay.proxy.connect() as other:
        assert other.call("GET", "job:speed:1").plain == b"10"
        assert other.call("BLPOP", "q", "0").raw.startswith(b"-TRYAGAIN the upstream")
        overlay.start_upstream()
        eventually(lambda: other.call("SET", "a", "5").plain == b"OK")
        assert other.call("BLPOP", "q", "0.01").plain is None


def test_cut_dedicated_connection_disconnects_blocked_client(client: Connection, direct: Connection) -> None:
    client.send(request("BLPOP", "q", "0"))
    wait_until_blocked(direct)
    direct.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert client.read_to_end() == b""


def test_queue_elements_are_popped_once_while_blocked_clients_leave(overlay: Overlay, direct: Connection) -> None:
    """Workers leave while they are blocked: all jobs are with workers that have a reply, or in the queue."""
    count = 60
    done: list[bytes] = []
    number = 0
    while len(done) < count:
        with overlay.proxy.connect() as worker, overlay.proxy.connect() as leaver:
            leaver.send(request("BLPOP", "q", "0"))
            wait_until_blocked(direct)
            leaver.__exit__()
            wait_until_blocked(direct, 0)
            direct.call("RPUSH", "q", number)
            number += 1
            done.append(worker.call("BLPOP", "q", "0").plain[1])
    assert done == [b"%d" % each for each in range(count)]


def test_redis_py_workers_pop_each_element_once(overlay: Overlay, direct: Connection) -> None:
    def work(name: str) -> list[bytes]:
        done = []
        with redis.Redis(port=overlay.proxy.port, protocol=2) as worker:
            while (job := worker.blpop(["q"], timeout=1)) is not None:
                done.append(job[1])
            while read := worker.xreadgroup("g", name, {"s": ">"}, block=200):
                done += [fields[b"n"] for _, fields in read[0][1]]
        return done

    direct.call("XGROUP", "CREATE", "s", "g", "$", "MKSTREAM")
    with ThreadPoolExecutor() as threads:
        running = [threads.submit(work, f"w{number}") for number in range(PINNED_MAX)]
        for number in range(100):
            direct.call("RPUSH", "q", number)
            direct.call("XADD", "s", "*", "n", number)
        found = [job for each in running for job in each.result()]
    assert sorted(found) == sorted(2 * [b"%d" % number for number in range(100)])


def test_wait_covers_writes_before_dedicated_connection(overlay: Overlay, direct: Connection) -> None:
    folder = overlay.folder / "replica"
    folder.mkdir()
    with redis_server(folder, "--replicaof", "127.0.0.1", str(overlay.upstream.port)) as replica:
        eventually(lambda: b"state=online" in direct.call("INFO", "replication").plain)
        with overlay.proxy.connect() as client:
            client.call("SET", "k", "1")
            eventually(lambda: client.call("WAIT", 1, 1000).plain == 1)
        with overlay.proxy.connect() as client:
            client.call("BLPOP", "none", "0.001")
        replica.process.send_signal(signal.SIGSTOP)
        try:
            with overlay.proxy.connect() as client:
                assert client.call_each("SET k 2", "WAIT 1 50", "GET k") == [b"OK", 0, b"2"]
                client.call("BLPOP", "none", "0.001")
                assert client.call_each("SET k 3", "WAIT 1 50") == [b"OK", 0]
        finally:
            replica.process.send_signal(signal.SIGCONT)
