"""CLIENT PAUSE, UNPAUSE and UNBLOCK: while clients are paused, and only then, each request takes the general path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from compat.waiting import eventually

pytestmark = pytest.mark.pure

PONG = b"+PONG\r\n"
GET = b"*2\r\n$3\r\nGET\r\n$10\r\njob:temp:1\r\n"
ONE = b"$1\r\n1\r\n"


def test_all_clients_wait_until_pause_ends(serve: Callable[..., Any]) -> None:
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


def test_pause_ends_after_its_timeout(serve: Callable[..., Any]) -> None:
    running = serve()
    peer, server = running.connect(), running.server.context
    peer.expect_reply(b"CLIENT PAUSE 20\r\n", b"+OK\r\n")
    server.clock = lambda: 1_700_000_000_020
    peer.expect_reply(GET, ONE)
    assert not running.call(lambda: server.observation.is_on)


def test_pause_does_not_interrupt_reply(serve: Callable[..., Any]) -> None:
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
def test_client_pause_and_unblock_check_their_arguments(serve: Callable[..., Any], line: bytes, answer: bytes) -> None:
    serve().connect().expect_reply(line + b"\r\nPING\r\n", answer + PONG)
