"""CLIENT TRACKING through a proxy with an upstream: invalidations of both backends, before any newer reply."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from compat.conformance.wire import Connection, Reply, request
from compat.waiting import eventually
from tests.meanwhile import meanwhile, repeated
from tests.server.caching import CachingClient, turns_of
from tests.server.overlay import Overlay


@pytest.fixture
def client(overlay: Overlay) -> Iterator[Connection]:
    with overlay.proxy.connect() as connection:
        connection.call("HELLO", 3)
        yield connection


def is_of(push: Reply, *keys: bytes) -> bool:
    return push.type == ">" and push.plain == [b"invalidate", list(keys)]


MODES = [(), (b"NOLOOP",), (b"BCAST", b"PREFIX", b"n:"), (b"OPTIN",), (b"OPTOUT",)]


@pytest.mark.parametrize("options", MODES, ids=lambda options: b" ".join(options).decode())
def test_tracking_client_caches_no_value_older_than_confirmed_write(
    overlay: Overlay, direct: Connection, options: tuple[bytes, ...]
) -> None:
    keys, confirmed = [b"n:%d" % number for number in range(8)], dict[bytes, int]()
    direct.call("MSET", *(word for key in keys for word in (key, b"0")))

    def write() -> None:
        number = confirmed.get(keys[0], 0) + 1
        direct.call("MSET", *(word for key in keys for word in (key, number)))
        confirmed.update(dict.fromkeys(keys, number))

    clients = [CachingClient(overlay.proxy.port, *options) for _ in range(3)]
    with meanwhile(repeated(write)):
        for turn in turns_of(clients):
            for client in clients:
                before = dict(confirmed)
                client.read(keys, is_in_transaction=turn % 5 == 4)
                # Invalidations of changes before this request precede its reply.
                assert all(value >= before.get(key, 0) for key, value in client.cache.items()), client.cache
    assert confirmed[keys[0]] > 10
    assert all(client.pushes for client in clients)
    for client in clients:
        eventually(partial(client.holds_only, confirmed))
        client.close()


PIPELINES = [
    ["GET a"],
    ["GET b"],
    ["MGET a c"],
    ["CLIENT CACHING YES"],
    ["CLIENT CACHING NO"],
    ["CLIENT ID"],
    ["STRLEN d"],
]
PIPELINES += [["MULTI", "GET a", "STRLEN d", "EXEC"], ["CLIENT CACHING YES", "MULTI", "PTTL b", "GET b", "EXEC"]]


@pytest.mark.parametrize("options", [["ON"], ["ON", "OPTIN"], ["ON", "OPTOUT"]], ids=" ".join)
def test_client_caching_replies_as_upstream(
    overlay: Overlay, client: Connection, direct: Connection, options: list[str]
) -> None:
    """The same pipelines give the same replies, and the same keys are invalidated after them."""
    choice = random.Random(5)
    with overlay.upstream.connect() as alone:
        alone.call("HELLO", 3)
        for connection in (client, alone):
            assert connection.call("CLIENT", "TRACKING", *options).plain == b"OK"
        for turn in range(60):
            lines = [line for group in choice.choices(PIPELINES, k=choice.randrange(1, 9)) for line in group]
            data = b"".join(request(*line.split(" ")) for line in lines)
            found = []
            for connection in (client, alone):
                connection.send(data)
                replies = [next(frame for frame in iter(connection.read, None) if frame.type != ">") for _ in lines]
                found.append([each.raw for each, line in zip(replies, lines, strict=True) if line != "CLIENT ID"])
            assert found[0] == found[1], lines
            direct.call("MSET", *(word for key in "abcd" for word in (key, turn)))
            direct.call("SET", "marker", turn)
            invalidated = []
            for connection in (client, alone):
                keys: set[bytes] = set()
                connection.send(request("PING") + request("CLIENT", "CACHING", "YES") + request("GET", "marker"))
                while (frame := connection.read()).plain != b"%d" % turn:
                    keys |= set(frame.plain[1]) if frame.type == ">" else set()
                direct.call("SET", "marker", f"old {turn}")
                while b"marker" not in keys:
                    keys |= set(connection.read().plain[1])
                direct.call("SET", "marker", turn)
                invalidated.append(keys)
            assert invalidated[0] == invalidated[1], lines


@pytest.mark.parametrize("line", ["SET a 2", "DEL a", "FLUSHDB", "EVAL return(redis.call('set',KEYS[1],3)) 1 a"])
def test_tracking_own_write_is_invalidated_with_reply(client: Connection, direct: Connection, line: str) -> None:
    """A client that reads both together, as from a Redis, never takes a value from its cache that it has changed."""
    client.call("CLIENT", "TRACKING", "ON")
    for _ in range(20):
        client.call("SET", "a", "1")
        client.call("GET", "a")
        assert not client.call(*line.split(" ")).is_error
        assert client._buffered, "the invalidation comes later"
        assert client.read().plain[0] == b"invalidate"


@pytest.mark.parametrize("line", ["MGET a job:speed:7", "EXISTS job:speed:7 a"])
def test_tracking_invalidates_keys_read_at_both_backends(client: Connection, direct: Connection, line: str) -> None:
    client.call("CLIENT", "TRACKING", "ON")
    assert client.call(*line.split(" ")).type in ("*", ":")
    found = [client.read(), client.read()]
    assert {each.plain[1][0] for each in found} == {b"a", b"job:speed:7"}
    client.send(request("MULTI") + request(*line.split(" ")) + request("GET", "job:speed:6") + request("EXEC"))
    assert [client.read().type for _ in range(4)] == ["+", "+", "+", "*"]
    keys: set[bytes] = set()
    client.send(request("PING"))
    while (frame := client.read()).plain != b"PONG":
        keys.add(frame.plain[1][0])
    assert {b"a", b"job:speed:7"} <= keys


def test_tracking_invalidates_repeated_key_once(client: Connection, direct: Connection) -> None:
    client.call("CLIENT", "TRACKING", "ON")
    assert client.call("EXISTS", *["a", "job:speed:7"] * 200).plain == 200
    client.send(request("PING"))
    assert [client.read().plain for _ in range(3)] == [
        [b"invalidate", [b"a"]],
        [b"invalidate", [b"job:speed:7"]],
        b"PONG",
    ]


def test_tracking_flush_invalidates_all(client: Connection, direct: Connection) -> None:
    client.call("CLIENT", "TRACKING", "ON")
    client.call("GET", "a")
    direct.call("FLUSHALL")
    assert client.read().raw == b">2\r\n$10\r\ninvalidate\r\n_\r\n"


def test_client_caching_ends_with_refused_request(client: Connection, direct: Connection) -> None:
    client.call("CLIENT", "TRACKING", "ON", "OPTOUT")
    for refused in (["SET", "job:speed:1", "1"], ["NOPE"], ["GET"], ["SUNION", "a", "job:speed:1"]):
        client.call("CLIENT", "CACHING", "NO")
        assert client.call(*refused).is_error
        client.call("GET", "a")
        direct.call("SET", "a", "1")
        assert is_of(client.read(), b"a")


@pytest.fixture
def listener(overlay: Overlay) -> Iterator[Connection]:
    """A client of RESP2 to which others redirect."""
    with overlay.proxy.connect() as connection:
        assert connection.call("SUBSCRIBE", "__redis__:invalidate").plain[0] == b"subscribe"
        yield connection


def id_of(overlay: Overlay, listener: Connection) -> int:
    """Return the id of a subscriber: the only client with a subscription."""
    with overlay.proxy.connect() as other:
        lines = other.call("CLIENT", "LIST", "TYPE", "pubsub").plain.decode().splitlines()
    (line,) = lines
    return int(line.split(" ")[0].removeprefix("id="))


def test_tracking_redirect_to_lost_client_is_reported(overlay: Overlay, client: Connection, direct: Connection) -> None:
    with overlay.proxy.connect() as target:
        number = target.call("CLIENT", "ID").plain
        assert client.call("CLIENT", "TRACKING", "ON", "REDIRECT", number).plain == b"OK"
        client.call("GET", "a")
    eventually(lambda: b"id=" in client.call("CLIENT", "LIST", "ID", number).plain, lambda is_there: not is_there)
    direct.call("SET", "a", "1")
    assert client.read().plain == [b"tracking-redir-broken", number]


def test_tracking_redirect_connections_end_with_client(overlay: Overlay, listener: Connection) -> None:
    before = int(overlay.info()["upstream_pinned"])
    with overlay.proxy.connect() as client:
        assert client.call("CLIENT", "TRACKING", "ON", "REDIRECT", id_of(overlay, listener)).plain == b"OK"
        assert int(overlay.info()["upstream_pinned"]) == before + 2
    eventually(lambda: int(overlay.info()["upstream_pinned"]), lambda found: found == before)


def test_tracking_mistakes_are_refused(overlay: Overlay, client: Connection, direct: Connection) -> None:
    assert client.call("CLIENT", "TRACKING", "ON", "REDIRECT", 10**9).raw == (
        b"-ERR The client ID you want redirect to does not exist\r\n"
    )
    assert client.call("CLIENT", "TRACKING", "ON", "REDIRECT").plain == b"ERR syntax error"
    assert client.call("CLIENT", "TRACKING", "ON", "PREFIX", "a").raw == (
        b"-ERR PREFIX option requires BCAST mode to be enabled\r\n"
    )
    assert client.call("CLIENT", "TRACKING", "maybe").plain == b"ERR syntax error"
    assert client.call("CLIENT", "CACHING", "YES").is_error


@pytest.mark.parametrize("is_redirected", [False, True])
def test_refused_tracking_leaves_client_as_before(client: Connection, direct: Connection, is_redirected: bool) -> None:
    number = client.call("CLIENT", "ID").plain
    options: list[object] = ["REDIRECT", number] if is_redirected else []
    assert client.call("CLIENT", "TRACKING", "ON", "OPTIN", "OPTOUT", *options).is_error  # type: ignore[arg-type]
    assert client.call("SELECT", "1").plain == b"OK"
    assert direct.call("ACL", "SETUSER", "default", "-client|tracking").plain == b"OK"
    try:
        found = client.call("CLIENT", "TRACKING", "ON", *options).raw  # type: ignore[arg-type]
    finally:
        direct.call("ACL", "SETUSER", "default", "+client|tracking")
    assert found.startswith(b"-NOPERM")
    assert client.call("SELECT", "0").plain == b"OK"
    assert client.call("CLIENT", "TRACKING", "ON").plain == b"OK"
    assert client.call("SELECT", "1").is_error
    assert client.call("CLIENT", "TRACKING", "ON", "BCAST").is_error  # it goes on to track without
    assert client.call("SELECT", "1").is_error
    client.call("GET", "a")
    direct.call("SET", "a", "1")
    assert is_of(client.read(), b"a")


def test_tracking_in_resp2_sends_nothing_before_hello_3(overlay: Overlay, direct: Connection) -> None:
    with overlay.proxy.connect() as client:
        assert client.call("CLIENT", "TRACKING", "ON").plain == b"OK"
        client.call("GET", "a")
        direct.call("SET", "a", "1")
        assert client.call("GET", "b").plain is None
        client.call("HELLO", 3)
        client.call("GET", "a")
        direct.call("SET", "a", "2")
        assert is_of(client.read(), b"a")
        assert client.call("CLIENT", "TRACKING", "OFF").plain == b"OK"


def test_tracking_change_of_owner_invalidates_all(overlay: Overlay, client: Connection, direct: Connection) -> None:
    client.call("CLIENT", "TRACKING", "ON")
    client.call("GET", "job:speed:1")
    with overlay.proxy.connect() as admin:
        admin.call("STATE", "RELEASE", "job")
        assert client.read().plain == [b"invalidate", None]
        admin.call("STATE", "CONFIRM", "job")
        assert client.read().plain == [b"invalidate", None]


def test_tracking_lost_upstream_disconnects_client(overlay: Overlay, client: Connection, direct: Connection) -> None:
    client.call("CLIENT", "TRACKING", "ON")
    client.call("GET", "a")
    overlay.signal_upstream(signal.SIGKILL)
    assert client.read_to_end() == b""
    overlay.start_upstream()
    overlay.wait_until_ready(overlay.proxy)
