"""MONITOR and CLIENT PAUSE: while one of them is active, and only then, each request takes the general path."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from compat.waiting import eventually
from resp_server.push import monitor as monitors
from resp_server.settings.server import OUTPUT_LIMITS

pytestmark = pytest.mark.pure

PONG = b"+PONG\r\n"
GET = b"*2\r\n$3\r\nGET\r\n$10\r\njob:temp:1\r\n"
ONE = b"$1\r\n1\r\n"


def shown(data: bytes) -> list[bytes]:
    """Return the requests in lines of MONITOR; their times and addresses are each run's own."""
    lines = data.split(b"\r\n")[:-1]
    matches = [re.fullmatch(rb"\+1700000000\.000000 (\[\d+) 127\.0\.0\.1:\d+\] (.*)", line) for line in lines]
    assert all(matches), lines
    return [b"%b] %b" % match.groups() for match in matches if match]


def test_a_monitor_sees_the_requests_of_all_clients_once_they_are_answered(serve: Callable[..., Any]) -> None:
    running = serve()
    seeing, other = running.connect(), running.connect()
    seeing.expect_reply(b"MONITOR\r\n", b"+OK\r\n")
    other.expect_reply(GET * 2 + b"SELECT 3\r\nMULTI\r\nGET x\r\nEXEC\r\nNOPE\r\nGET\r\n", 2 * ONE + b"+OK\r\n" * 2)
    other.send(b'RESET\r\nAUTH secret\r\nCLIENT ID\r\nCONFIG GET save\r\nECHO "a\\x00\\"b"\r\nPING\r\n')
    assert shown(seeing.read_until(b'"PING"\r\n')) == [
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


def test_a_monitor_may_not_read_keys_and_ends_with_reset(serve: Callable[..., Any]) -> None:
    running = serve()
    seeing, other = running.connect(), running.connect()
    seeing.expect_reply(b"MONITOR\r\n", b"+OK\r\n")
    seeing.expect_reply(GET, b"-ERR Replica can't interact with the keyspace\r\n")
    info = seeing.send(b"CLIENT INFO\r\n") or seeing.read_until(b'"INFO"\r\n')
    assert b"flags=O " in info
    seeing.send(b"RESET\r\n")
    assert seeing.read_until(b"+RESET\r\n")
    other.expect_reply(GET, ONE)
    seeing.expect_reply(GET, ONE)
    assert running.call(lambda: all(each.can_use_fast_path for each in running.server.context.sessions.values()))


def test_a_monitor_that_goes_leaves_all_others_to_the_core(serve: Callable[..., Any]) -> None:
    running = serve()
    seeing, other = running.connect(), running.connect()
    other.expect_reply(b"PING\r\n", PONG)
    seeing.expect_reply(b"MONITOR\r\n", b"+OK\r\n")
    sessions = running.server.context.sessions
    assert running.call(lambda: [each.can_use_fast_path for each in sessions.values()]) == [False, False]
    seeing.expect_reply(b"QUIT\r\n", b"+OK\r\n")
    assert seeing.is_closed
    other.expect_reply(GET, ONE)
    assert running.call(lambda: [each.can_use_fast_path for each in sessions.values()]) == [True]


def test_monitor_that_reads_nothing_is_disconnected_and_delays_no_client(serve: Callable[..., Any]) -> None:
    running = serve(client_output_buffer_limit=OUTPUT_LIMITS | {"pubsub": (1 << 20, 8 << 20, 60)})
    seeing, other = running.connect(), running.connect()
    seeing.expect_reply(b"MONITOR\r\n", b"+OK\r\n")
    text = b"x" * 10_000
    request = b"*2\r\n$4\r\nECHO\r\n$10000\r\n%b\r\n" % text
    for _ in range(3_000):
        other.expect_reply(request, b"$10000\r\n%b\r\n" % text)
        if running.call(lambda: len(running.server.context.sessions)) == 1:
            break
    assert running.call(lambda: len(running.server.context.sessions)) == 1
    other.expect_reply(GET, ONE)


class Others:
    """Another process of the server, which answers at once, or when it is told to."""

    def __init__(self, running: Any) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.waiting: list[Callable[[list[Any]], None]] = []
        self.monitors = 1
        running.call(lambda: setattr(running.server.context, "workers", self))

    def query(self, query_name: str, argument: Any, then: Callable[[list[Any]], None]) -> None:
        self.asked.append((query_name, argument))
        if query_name == monitors.RELAY_LINES:
            self.waiting.append(then)
        else:
            then([self.monitors])


def test_monitors_at_other_processes_get_requests(serve: Callable[..., Any]) -> None:
    running = serve()
    others = Others(running)
    server, peer = running.server.context, running.connect()
    peer.expect_reply(GET, ONE)
    assert not others.asked
    running.call(lambda: server.table.worker_queries[monitors.ANNOUNCE_MONITORS].respond(server, None))
    peer.expect_reply(GET, ONE)
    peer.expect_reply(GET + GET, ONE + ONE)  # waits: one portion is on its way
    running.call(lambda: None)
    ((query_name, lines),) = others.asked
    assert (query_name, len(lines), lines[0][1:]) == (monitors.RELAY_LINES, 1, [["job:temp:1"], "default"])
    running.call(lambda: others.waiting.pop()([1]))
    assert [len(lines) for _, lines in others.asked] == [1, 2]
    running.call(lambda: others.waiting.pop()([0]))
    peer.expect_reply(GET, ONE)
    peer.expect_reply(GET, ONE)
    assert len(others.asked) == 2
    assert running.call(lambda: server.sessions[1].can_use_fast_path)


def test_monitors_that_would_miss_requests_are_cut(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "MONITOR_LINES_BYTES_MAX", 500)
    running = serve()
    others = Others(running)
    server, peer = running.server.context, running.connect()
    running.call(lambda: server.table.worker_queries[monitors.ANNOUNCE_MONITORS].respond(server, None))
    for _ in range(12):
        peer.expect_reply(GET, ONE)
    running.call(lambda: None)
    assert monitors.CUT_MONITORS in [query_name for query_name, _ in others.asked]
    seeing = running.connect()
    seeing.expect_reply(b"MONITOR\r\n", b"+OK\r\n")
    running.call(lambda: server.table.worker_queries[monitors.CUT_MONITORS].respond(server, None))
    assert len(server.observation.monitors) == 0


def test_requests_of_other_processes_are_shown_here(serve: Callable[..., Any]) -> None:
    running = serve()
    seeing = running.connect()
    seeing.expect_reply(b"MONITOR\r\n", b"+OK\r\n")
    server = running.server.context
    line = monitors.line_of(1_700_000_000_000, 0, "127.0.0.1:1", [b"GET", b"x"])
    told = [monitors.MonitorLine(line, [b"x"], b"default").to_json()]
    assert running.call(lambda: server.table.worker_queries[monitors.RELAY_LINES].respond(server, told)) == 1
    assert seeing.read(len(line)) == line


def test_a_pause_holds_back_all_clients_until_it_is_over(serve: Callable[..., Any]) -> None:
    running = serve()
    first, second = running.connect(), running.connect()
    second.expect_reply(GET, ONE)
    first.expect_reply(b"CLIENT PAUSE 1000000\r\nPING\r\n", b"+OK\r\n")
    second.send(GET + GET)
    third = running.connect()
    third.send(b"PING\r\n")
    sessions = running.server.context.sessions
    eventually(
        lambda: running.call(lambda: [each.is_paused for each in sessions.values()]), lambda found: found == [True] * 3
    )
    assert running.call(lambda: [each.can_use_fast_path for each in sessions.values()]) == [False] * 3
    running.call(running.server.context.observation.pause.end)
    assert first.read(len(PONG)) == PONG
    assert second.read(2 * len(ONE)) == ONE + ONE
    assert third.read(len(PONG)) == PONG
    assert running.call(lambda: [each.can_use_fast_path for each in sessions.values()]) == [True] * 3


def test_a_pause_ends_by_itself(serve: Callable[..., Any]) -> None:
    running = serve()
    peer, server = running.connect(), running.server.context
    peer.expect_reply(b"CLIENT PAUSE 20\r\n", b"+OK\r\n")
    server.clock = lambda: 1_700_000_000_020
    peer.expect_reply(GET, ONE)
    assert not running.call(lambda: server.observation.is_on)


def test_a_reply_that_has_begun_is_sent_to_its_end_in_spite_of_a_pause(serve: Callable[..., Any]) -> None:
    running = serve()
    peer = running.connect()
    peer.send(b"HGETALL job:visits:/\r\nPING\r\n")
    whole = peer.read_until(PONG)
    peer.send(b"HGETALL job:visits:/\r\nPING\r\n")
    begun = peer.read(8)
    running.call(lambda: running.server.context.observation.pause.begin(running.server.context.clock() + 1_000_000))
    assert begun + peer.read(len(whole) - len(begun) - len(PONG)) + PONG == whole
    running.call(running.server.context.observation.pause.end)
    assert peer.read(len(PONG)) == PONG


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (b"CLIENT PAUSE x", b"-ERR timeout is not an integer or out of range\r\n"),
        (b"CLIENT PAUSE -1", b"-ERR timeout is negative\r\n"),
        (b"CLIENT PAUSE 0 maybe", b"-ERR CLIENT PAUSE mode must be WRITE or ALL\r\n"),
        (b"CLIENT PAUSE 100000 write", b"+OK\r\n"),
        (b"CLIENT PAUSE 0", b"+OK\r\n"),
        (b"CLIENT UNPAUSE", b"+OK\r\n"),
        (b"CLIENT UNBLOCK 5 error", b":0\r\n"),
        (b"CLIENT UNBLOCK 5 nope", b"-ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR\r\n"),
    ],
)
def test_commands_about_held_clients_have_answers(serve: Callable[..., Any], line: bytes, answer: bytes) -> None:
    serve().connect().expect_reply(line + b"\r\nPING\r\n", answer + PONG)
