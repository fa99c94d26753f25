"""CLIENT TRACKING through a proxy with an upstream: invalidations of both sides, before any newer reply."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from compat.conformance.wire import Connection, Reply, request
from state_backend.log.log_writer import LogWriter
from state_backend.model.records import Change, Op
from tests.server.swap import STATES, Swap


@pytest.fixture
def client(swap: Swap) -> Iterator[Connection]:
    with swap.proxy.connect() as connection:
        connection.call("HELLO", 3)
        yield connection


@pytest.fixture
def direct(swap: Swap) -> Iterator[Connection]:
    with swap.upstream.connect() as connection:
        connection.call("FLUSHALL")
        yield connection


def is_of(push: Reply, *keys: bytes) -> bool:
    return push.type == ">" and push.plain == [b"invalidate", list(keys)]


def publish(swap: Swap, key: bytes, value: bytes) -> None:
    with LogWriter(swap.log, "job", STATES, "first") as writer:
        writer.publish([Change("speed", Op.PUT, key, value=value)])


def test_changed_keys_of_both_sides_are_invalidated_once(swap: Swap, client: Connection, direct: Connection) -> None:
    assert client.call("CLIENT", "TRACKING", "ON").plain == b"OK"
    assert client.call("GET", "a").plain is None
    assert client.call("GET", "job:speed:7").plain == b"70"
    direct.call("SET", "a", "1")
    assert is_of(client.read(), b"a")
    publish(swap, b"job:speed:7", b"71")
    assert is_of(client.read(), b"job:speed:7")
    direct.call("SET", "a", "2")  # it was not read again
    direct.call("SET", "job:speed:7", "an old copy")
    publish(swap, b"job:speed:7", b"70")
    assert client.call("PING").plain == b"PONG"


def test_an_invalidation_comes_before_any_newer_reply(client: Connection, direct: Connection) -> None:
    client.call("CLIENT", "TRACKING", "ON")
    direct.call("MSET", "a", "0", "b", "0")
    assert client.call("MGET", "a", "b").plain == [b"0", b"0"]
    for number in range(1, 300):
        value = b"%d" % number
        direct.call("SET", "b" if number % 2 else "a", value)
        client.send(request("GET", "a") + request("GET", "b"))
        seen: list[Reply] = []
        while sum(each.type != ">" for each in seen) < 2:
            seen.append(client.read())
        key, replies = (b"b" if number % 2 else b"a"), [each for each in seen if each.type != ">"]
        newer = next(at for at, each in enumerate(seen) if each.plain == value)
        assert any(is_of(each, key) for each in seen[:newer]), seen
        assert value in [each.plain for each in replies]


@pytest.mark.parametrize("line", ["MGET a job:speed:7", "EXISTS job:speed:7 a"])
def test_a_state_s_key_of_a_read_over_both_sides_is_invalidated_after_it(
    client: Connection, direct: Connection, line: str
) -> None:
    client.call("CLIENT", "TRACKING", "ON")
    assert client.call(*line.split(" ")).type in ("*", ":")
    found = [client.read(), client.read()]
    assert {each.plain[1][0] for each in found} == {b"a", b"job:speed:7"}
    client.send(request("MULTI") + request(*line.split(" ")) + request("GET", "job:speed:6") + request("EXEC"))
    assert [client.read().type for _ in range(4)] == ["+", "+", "+", "*"]
    keys: set[bytes] = set()
    while keys != {b"a", b"job:speed:7", b"job:speed:6"}:
        keys.add(client.read().plain[1][0])


def test_a_flush_invalidates_everything(client: Connection, direct: Connection) -> None:
    client.call("CLIENT", "TRACKING", "ON")
    client.call("GET", "a")
    direct.call("FLUSHALL")
    assert client.read().raw == b">2\r\n$10\r\ninvalidate\r\n_\r\n"


def test_caching_chooses_the_keys_of_the_next_request(client: Connection, direct: Connection) -> None:
    client.call("CLIENT", "TRACKING", "ON", "OPTIN")
    client.call("GET", "a")
    assert client.call("CLIENT", "CACHING", "YES").plain == b"OK"
    client.call("GET", "b")
    client.call("GET", "c")
    client.send(request("CLIENT", "CACHING", "YES") + request("MULTI") + request("GET", "d") + request("EXEC"))
    assert client.read().plain == b"OK" and [client.read().type for _ in range(3)][-1] == "*"
    client.call("GET", "e")
    for key in "abcde":
        direct.call("SET", key, "1")
    assert is_of(client.read(), b"b") and is_of(client.read(), b"d")
    assert client.call("CLIENT", "TRACKING", "OFF").plain == b"OK"
    client.call("CLIENT", "TRACKING", "ON", "OPTOUT")
    client.call("CLIENT", "CACHING", "NO")
    client.call("GET", "job:speed:1")  # the next request is one of states: later ones of the upstream are tracked
    client.call("GET", "a")
    client.call("CLIENT", "CACHING", "NO")
    client.call("GET", "b")
    direct.call("MSET", "b", "2", "a", "2")
    assert is_of(client.read(), b"a")
    assert client.call("PING").plain == b"PONG"


def test_broadcasts_are_those_of_both_sides(swap: Swap, client: Connection, direct: Connection) -> None:
    client.call("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", "job:speed:", "PREFIX", "mine", "NOLOOP")
    direct.call("SET", "other", "1")
    direct.call("SET", "job:speed:5", "an old copy")
    client.call("SET", "mine:own", "1")
    direct.call("SET", "mine:1", "1")
    assert is_of(client.read(), b"mine:1")
    publish(swap, b"job:speed:7", b"72")
    assert is_of(client.read(), b"job:speed:7")
    publish(swap, b"job:speed:7", b"70")


def test_what_cannot_be_tracked_in_order_is_refused(swap: Swap, client: Connection, direct: Connection) -> None:
    assert client.call("CLIENT", "TRACKING", "ON", "REDIRECT", 1).plain.endswith(b"cannot REDIRECT")
    assert client.call("CLIENT", "TRACKING", "ON", "PREFIX", "a").raw == (
        b"-ERR PREFIX option requires BCAST mode to be enabled\r\n"
    )
    assert client.call("CLIENT", "TRACKING", "maybe").plain == b"ERR syntax error"
    assert client.call("CLIENT", "CACHING", "YES").is_error
    with swap.proxy.connect() as other:
        assert other.call("CLIENT", "TRACKING", "ON").plain.endswith(b"send HELLO 3 first")
        assert other.call("CLIENT", "TRACKING", "OFF").plain == b"OK"


def test_a_key_that_gets_another_owner_is_invalidated(swap: Swap, client: Connection, direct: Connection) -> None:
    client.call("CLIENT", "TRACKING", "ON")
    client.call("GET", "job:speed:1")
    with swap.proxy.connect() as admin:
        admin.call("STATE", "RELEASE", "job")
        assert client.read().plain == [b"invalidate", None]
        admin.call("STATE", "CONFIRM", "job")
        assert client.read().plain == [b"invalidate", None]


def test_a_client_is_disconnected_when_the_upstreams_tracking_was_lost(
    swap: Swap, client: Connection, direct: Connection
) -> None:
    client.call("CLIENT", "TRACKING", "ON")
    client.call("GET", "a")
    swap.signal_upstream(signal.SIGKILL)
    assert client.read_to_end() == b""
    swap.start_upstream()
    swap.wait_until_ready(swap.proxy)
