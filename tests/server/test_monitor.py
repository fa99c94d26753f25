"""MONITOR: while a client monitors a server, and only then, each request takes the general path."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from resp_server.push import monitor as monitors
from resp_server.settings.server import OUTPUT_LIMITS
from tests.server.conftest import OtherWorkers

pytestmark = pytest.mark.pure

PONG = b"+PONG\r\n"
GET = b"*2\r\n$3\r\nGET\r\n$10\r\njob:temp:1\r\n"
ONE = b"$1\r\n1\r\n"


def monitor_lines(data: bytes) -> list[bytes]:
    """Return the requests in lines of MONITOR; their times and addresses are each run's own."""
    lines = data.split(b"\r\n")[:-1]
    matches = [re.fullmatch(rb"\+1700000000\.000000 (\[\d+) 127\.0\.0\.1:\d+\] (.*)", line) for line in lines]
    assert all(matches), lines
    return [b"%b] %b" % match.groups() for match in matches if match]


def test_monitor_gets_requests_of_all_clients_once_they_are_answered(serve: Callable[..., Any]) -> None:
    running = serve()
    monitor, other = running.connect(), running.connect()
    monitor.expect_reply(b"MONITOR\r\n", b"+OK\r\n")
    other.expect_reply(GET * 2 + b"SELECT 3\r\nMULTI\r\nGET x\r\nEXEC\r\nNOPE\r\nGET\r\n", 2 * ONE + b"+OK\r\n" * 2)
    other.send(b'RESET\r\nAUTH secret\r\nCLIENT ID\r\nCONFIG GET save\r\nECHO "a\\x00\\"b"\r\nPING\r\n')
    assert monitor_lines(monitor.read_until(b'"PING"\r\n')) == [
        b'[0] "GET" "job:temp:1"',
        b'[0] "GET" "job:temp:1"',
        b'[3] "SELECT" "3"',
        b'[3] "MULTI"',
        b'[3] "GET" "x"',
        b'[3] "EXEC"',
        b'[0] "RESET"',
        b'[0] "AUTH" "(redacted)"',
        b'[0] "CLIENT" "ID"',
        b'[0] "ECHO" "a\\x00\\"b"',
        b'[0] "PING"',
    ]


def test_monitor_may_not_read_keys_until_reset(serve: Callable[..., Any]) -> None:
    running = serve()
    monitor, other = running.connect(), running.connect()
    monitor.expect_reply(b"MONITOR\r\n", b"+OK\r\n")
    monitor.expect_reply(GET, b"-ERR Replica can't interact with the keyspace\r\n")
    info = monitor.send(b"CLIENT INFO\r\n") or monitor.read_until(b'"INFO"\r\n')
    assert b"flags=O " in info
    monitor.send(b"RESET\r\n")
    assert monitor.read_until(b"+RESET\r\n")
    other.expect_reply(GET, ONE)
    monitor.expect_reply(GET, ONE)
    assert running.call(lambda: all(each.can_use_fast_path for each in running.server.context.sessions.values()))


def test_core_answers_others_again_after_monitor_quits(serve: Callable[..., Any]) -> None:
    running = serve()
    monitor, other = running.connect(), running.connect()
    other.expect_reply(b"PING\r\n", PONG)
    monitor.expect_reply(b"MONITOR\r\n", b"+OK\r\n")
    sessions = running.server.context.sessions
    assert running.call(lambda: [each.can_use_fast_path for each in sessions.values()]) == [False, False]
    monitor.expect_reply(b"QUIT\r\n", b"+OK\r\n")
    monitor.expect_close()
    other.expect_reply(GET, ONE)
    assert running.call(lambda: [each.can_use_fast_path for each in sessions.values()]) == [True]


def test_monitor_that_reads_nothing_is_disconnected_and_delays_no_client(serve: Callable[..., Any]) -> None:
    running = serve(client_output_buffer_limit=OUTPUT_LIMITS | {"pubsub": (1 << 20, 8 << 20, 60)})
    monitor, other = running.connect(), running.connect()
    monitor.expect_reply(b"MONITOR\r\n", b"+OK\r\n")
    text = b"x" * 10_000
    request = b"*2\r\n$4\r\nECHO\r\n$10000\r\n%b\r\n" % text
    for _ in range(3_000):
        other.expect_reply(request, b"$10000\r\n%b\r\n" % text)
        if running.call(lambda: len(running.server.context.sessions)) == 1:
            break
    assert running.call(lambda: len(running.server.context.sessions)) == 1
    other.expect_reply(GET, ONE)


class WorkerWithMonitor(OtherWorkers):
    """Another worker that has a monitor. A test answers the lines that it gets; it answers other queries itself."""

    def __init__(self, running: Any) -> None:
        self.queries: list[tuple[str, Any]] = []
        super().__init__(running)

    def query(self, name: str, argument: Any, then: Callable[[list[Any]], None]) -> None:
        self.queries.append((name, argument))
        if name == monitors.RELAY_LINES:
            super().query(name, argument, then)
        else:
            then([1])


def test_monitors_of_other_workers_get_requests(serve: Callable[..., Any]) -> None:
    running = serve()
    worker = WorkerWithMonitor(running)
    server, peer = running.server.context, running.connect()
    peer.expect_reply(GET, ONE)
    assert not worker.queries
    running.call(lambda: server.table.worker_queries[monitors.ANNOUNCE_MONITORS].respond(server, None))
    peer.expect_reply(GET, ONE)
    peer.expect_reply(GET + GET, ONE + ONE)  # waits: one portion is on its way
    running.call(lambda: None)
    ((query_name, lines),) = worker.queries
    assert (query_name, len(lines)) == (monitors.RELAY_LINES, 1)
    line = monitors.MonitorLine.from_json(lines[0])
    assert (line.keys, line.user) == ([b"job:temp:1"], b"default")
    worker.answer(1)
    assert [len(lines) for _, lines in worker.queries] == [1, 2]
    worker.answer(0)
    peer.expect_reply(GET, ONE)
    peer.expect_reply(GET, ONE)
    assert len(worker.queries) == 2
    assert running.call(lambda: server.sessions[1].can_use_fast_path)


def test_monitors_of_workers_that_would_miss_requests_are_disconnected(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitors, "MONITOR_LINES_BYTES_MAX", 500)
    running = serve()
    worker = WorkerWithMonitor(running)
    server, peer = running.server.context, running.connect()
    running.call(lambda: server.table.worker_queries[monitors.ANNOUNCE_MONITORS].respond(server, None))
    for _ in range(12):
        peer.expect_reply(GET, ONE)
    running.call(lambda: None)
    assert monitors.CUT_MONITORS in [query_name for query_name, _ in worker.queries]
    monitor = running.connect()
    monitor.expect_reply(b"MONITOR\r\n", b"+OK\r\n")
    running.call(lambda: server.table.worker_queries[monitors.CUT_MONITORS].respond(server, None))
    assert len(server.observation.monitors) == 0


def test_monitor_gets_requests_of_other_workers(serve: Callable[..., Any]) -> None:
    running = serve()
    monitor = running.connect()
    monitor.expect_reply(b"MONITOR\r\n", b"+OK\r\n")
    server = running.server.context
    line = monitors.line_of(1_700_000_000_000, 0, "127.0.0.1:1", [b"GET", b"x"])
    lines = [monitors.MonitorLine(line, [b"x"], b"default").to_json()]
    assert running.call(lambda: server.table.worker_queries[monitors.RELAY_LINES].respond(server, lines)) == 1
    assert monitor.read(len(line)) == line
