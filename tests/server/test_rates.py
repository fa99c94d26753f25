"""A user beyond its rate is delayed, and sees nothing but its replies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import sleep
from typing import Any

import pytest

from compat.waiting import WAIT_S_MAX, eventually
from resp_server.acl import rate_limits as rates
from resp_server.acl.rate_limits import RateLimit, RateLimiter
from tests.clock import ManualClock

GET = b"*2\r\n$3\r\nGET\r\n$10\r\njob:temp:1\r\n"
PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"


def auth(user: bytes) -> bytes:
    return b"*3\r\n$4\r\nAUTH\r\n$%d\r\n%b\r\n$1\r\nx\r\n" % (len(user), user)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def running(serve: Callable[..., Any], clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server whose user `slow` may ask 100 commands, and `narrow` 1000 bytes, a second of a clock put by hand."""
    monkeypatch.setattr(rates, "PAUSE_S_MAX", rates.PAUSE_S_MIN)  # they look at that clock often
    limits = (RateLimit("slow", commands_per_s=100), RateLimit("narrow", bytes_per_s=1000))
    made = serve(rate_limits=limits)

    def add_users() -> None:
        for limit in limits:
            made.server.users.set(limit.user.encode(), [b"on", b"nopass", b"+@all", b"~*"])
            made.server.users.get(limit.user.encode()).rate_limiter = RateLimiter(limit, clock)

    made.call(add_users)
    return made


def here(peer: Any) -> bytes:
    """Return what has come, without waiting for any."""
    data = b""
    peer.socket.setblocking(False)
    with suppress(BlockingIOError):
        while some := peer.socket.recv(1 << 16):
            data += some
    peer.socket.settimeout(WAIT_S_MAX)
    return data


def expect(count: int, *peers: Any) -> None:
    """Wait for so many PONGs at all of these clients; more do not come."""
    found = dict.fromkeys(peers, b"")

    def total() -> int:
        for peer in peers:
            found[peer] += here(peer)
        return sum(data.count(PONG) for data in found.values())

    eventually(total, lambda total: total >= count)
    sleep(0.1)  # on a slow machine one too many may come later, and is not seen: the test errs on that side alone
    assert total() == count


def test_user_gets_its_answers_at_its_rate_over_all_its_connections(running: Any, clock: ManualClock) -> None:
    peers = [running.connect(), running.connect()]
    for peer in peers:
        peer.expect_reply(auth(b"slow"), b"+OK\r\n")
        peer.send(PING * 150)
    # No time passes but what is put: a second's worth at once, then what comes in.
    expect(100, *peers)
    clock.now_s += 0.5
    expect(50, *peers)
    clock.now_s += 10
    expect(100, *peers)
    clock.now_s += 10
    expect(50, *peers)
    for peer in peers:
        peer.expect_reply(PING, PONG)


def test_others_are_answered_while_user_rests(running: Any) -> None:
    slow, other = running.connect(), running.connect()
    slow.expect_reply(auth(b"slow"), b"+OK\r\n")
    slow.send(PING * 1000)
    other.expect_reply(GET * 10, b"$1\r\n1\r\n" * 10)


def test_rate_of_default_user_does_not_limit_other_logins(running: Any, clock: ManualClock) -> None:
    def limit_default() -> None:
        running.server.users.set(b"default", [b"off"])
        running.server.users.get(b"default").rate_limiter = RateLimiter(RateLimit("default", commands_per_s=1), clock)

    running.call(limit_default)
    for _ in range(5):
        peer = running.connect()
        peer.expect_reply(PING, b"-NOAUTH Authentication required.\r\n")
        peer.expect_reply(auth(b"slow") + PING, b"+OK\r\n" + PONG)


def test_bytes_of_requests_and_replies_count(running: Any, clock: ManualClock) -> None:
    peer = running.connect()
    peer.expect_reply(auth(b"narrow"), b"+OK\r\n")
    text = b"*2\r\n$4\r\nECHO\r\n$1200\r\n" + b"x" * 1200 + b"\r\n"
    peer.expect_reply(text, b"$1200\r\n" + b"x" * 1200 + b"\r\n")  # there was room when it came; it is paid for now
    peer.send(PING)
    expect(0, peer)
    clock.now_s += 1
    expect(0, peer)
    clock.now_s += 1
    expect(1, peer)


def test_flood_of_slow_user_is_not_read(running: Any) -> None:
    peer = running.connect()
    peer.expect_reply(auth(b"slow"), b"+OK\r\n")
    peer.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        for _ in range(1000):
            peer.socket.sendall(PING * 100_000)
    held = running.call(lambda: [each.input.unparsed_bytes for each in running.server._connections.values()])
    assert max(held) <= 4 << 20


def test_client_that_leaves_during_its_pause_leaves_nothing_behind(running: Any, clock: ManualClock) -> None:
    peer = running.connect()
    peer.expect_reply(auth(b"slow"), b"+OK\r\n")
    peer.send(PING * 1000)
    expect(100, peer)
    peer.socket.close()
    other = running.connect()
    while running.call(lambda: len(running.server._connections)) > 1:
        clock.now_s += 1  # it is found out when it is answered
        other.expect_reply(PING, PONG)
