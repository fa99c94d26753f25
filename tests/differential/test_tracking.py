"""Client-side caching: the same answers and the same pushes as of a real server, after the same changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from time import time

import pytest

from compat.conformance.pair import Pair
from compat.conformance.servers import CONTROL_TOKEN, Running, redis_server, sparkis_server, wait_for_keys
from compat.conformance.wire import Connection, Reply
from compat.waiting import WAIT_S_MAX
from resp_server.net.client import Client
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

ANSWERS = [
    ["CLIENT TRACKINGINFO", "CLIENT GETREDIR", "CLIENT CACHING YES", "CLIENT CACHING x"],
    ["CLIENT TRACKING ON", "CLIENT TRACKINGINFO", "CLIENT GETREDIR", "CLIENT TRACKING OFF", "CLIENT TRACKINGINFO"],
    [
        "CLIENT TRACKING",
        "CLIENT TRACKING x",
        "CLIENT TRACKING ON x",
        "CLIENT TRACKING x BCAST",
        "CLIENT TRACKING ON PREFIX",
    ],
    ["CLIENT TRACKING ON REDIRECT", "CLIENT TRACKING ON REDIRECT x", "CLIENT TRACKING ON REDIRECT 987654321"],
    ["CLIENT TRACKING ON REDIRECT 0", "CLIENT TRACKING OFF REDIRECT 987654321", "CLIENT TRACKING OFF PREFIX a"],
    ["CLIENT TRACKING ON PREFIX a", "CLIENT TRACKING ON OPTIN OPTOUT", "CLIENT TRACKING ON BCAST OPTIN"],
    ["CLIENT TRACKING on bcast", "CLIENT TRACKINGINFO", "CLIENT TRACKING ON", "CLIENT TRACKING ON BCAST PREFIX a"],
    ["CLIENT TRACKING ON BCAST PREFIX b PREFIX a", "CLIENT TRACKINGINFO", "CLIENT TRACKING ON BCAST PREFIX ab"],
    ["CLIENT TRACKING ON BCAST PREFIX b", "CLIENT TRACKING ON BCAST PREFIX c NOLOOP", "CLIENT TRACKINGINFO"],
    [
        "CLIENT TRACKING ON BCAST PREFIX a PREFIX ab",
        "CLIENT TRACKING ON BCAST PREFIX a PREFIX a",
        "CLIENT TRACKINGINFO",
    ],
    ["CLIENT TRACKING ON OPTIN", "CLIENT CACHING NO", "CLIENT CACHING x", "CLIENT CACHING YES", "CLIENT TRACKINGINFO"],
    ["CLIENT TRACKING ON OPTOUT", "CLIENT CACHING YES", "CLIENT CACHING no", "CLIENT TRACKINGINFO", "PING"],
    ["CLIENT TRACKING ON OPTIN", "CLIENT TRACKING ON OPTOUT", "CLIENT TRACKING ON BCAST", "CLIENT TRACKING ON NOLOOP"],
    ["CLIENT TRACKING ON OPTIN", "CLIENT CACHING YES", "PING", "CLIENT TRACKINGINFO", "NOPE", "CLIENT TRACKINGINFO"],
    ["CLIENT TRACKING ON OPTIN", "CLIENT CACHING YES", "MULTI", "GET plain", "EXEC", "CLIENT TRACKINGINFO"],
    ["CLIENT TRACKING ON OPTIN", "MULTI", "CLIENT CACHING YES", "GET plain", "EXEC", "CLIENT TRACKINGINFO"],
    ["CLIENT TRACKING ON NOLOOP", "CLIENT TRACKINGINFO", "RESET", "CLIENT TRACKINGINFO", "CLIENT GETREDIR"],
    ["CLIENT TRACKING ON", "GET plain", "MGET plain missing", "HGETALL hash:one", "LRANGE list:long 0 -1", "PING"],
    ["CLIENT CACHING", "CLIENT GETREDIR x", "CLIENT TRACKINGINFO x"],
]


@pytest.mark.parametrize("lines", ANSWERS, ids="; ".join)
@pytest.mark.parametrize("greeting", [[], ["HELLO 3"]], ids=["RESP2", "RESP3"])
def test_commands_about_tracking_equal_redis(pair: Pair, lines: list[str], greeting: list[str]) -> None:
    pair.check([[word.encode() for word in line.split(" ")] for line in [*greeting, *lines]])


STATES = [StateDescriptor("s", key="k", value="v"), StateDescriptor("m", key="k", value="v")]


class Both:
    """A server of each kind that take the same changes, and clients that are connected to both."""

    def __init__(self, redis: Running, ours: Running, writer: LogWriter) -> None:
        self._redis, self._ours, self._writer = redis, ours, writer
        self._control = Client("127.0.0.1", ours.control_port, password=CONTROL_TOKEN, timeout_s=WAIT_S_MAX)
        self._changes = 0
        self._marker = 0
        self._stack = ExitStack()
        self._clients: dict[str, tuple[Connection, Connection]] = {}
        self._ids: dict[str, list[int]] = {}

    def forget(self) -> None:
        """Let go of all clients."""
        self._stack.close()
        self._clients.clear()

    def close(self, name: str) -> None:
        """End a client."""
        for connection in self._clients.pop(name):
            connection.__exit__()

    def client(self, name: str) -> tuple[Connection, Connection]:
        """Return a client's connection to the real server, and to ours."""
        if name not in self._clients:
            both = self._redis.connect(), self._ours.connect()
            self._clients[name] = self._stack.enter_context(both[0]), self._stack.enter_context(both[1])
            self._ids[name] = [connection.call("CLIENT", "ID").value for connection in both]
        return self._clients[name]

    def say(self, name: str, *lines: str) -> None:
        """Have a client say something to both, and hold the answers against each other; `@x` is the id of a client."""
        for line in lines:
            answers = []
            for at, connection in enumerate(self.client(name)):
                words = [str(self._ids[each[1:]][at]) if each[:1] == "@" else each for each in line.split(" ")]
                answers.append(connection.call(*words))
            assert answers[0].raw == answers[1].raw or line.startswith("HELLO"), line

    def change(self, *keys: str, expire_at_ms: int | None = None, is_deleted: bool = False) -> None:
        """Change keys on both, at once, and wait until that can be read."""
        self._changes += 1
        value = str(self._changes)
        until = [] if expire_at_ms is None else ["PXAT", str(expire_at_ms)]
        with self._redis.connect() as connection:
            connection.call("MULTI")
            for key in keys:
                connection.call(*(["DEL", key] if is_deleted else ["SET", key, value, *until]))
            connection.call("EXEC")
        op = Op.DELETE if is_deleted else Op.PUT
        changes = [Change("s", op, key.encode(), value=value.encode(), expire_at_ms=expire_at_ms) for key in keys]
        self._writer.publish([*changes, Change("m", Op.PUT, b"job:m:~", value=value.encode())])
        self._control.call("NOTICE", "job", value)
        with self._ours.connect() as connection:
            while connection.call("GET", "job:m:~").value != value.encode():
                pass

    def received(self, name: str) -> list[bytes]:
        """Return what a client was told since, which has to be the same of both: in any order."""
        theirs, ours = self.client(name)
        self._marker += 1
        expected = self._up_to_marker(theirs)
        found = [ours.read() for _ in expected]
        found += self._up_to_marker(ours)
        texts = sorted(each.raw for each in found)
        assert texts == sorted(each.raw for each in expected)
        return texts

    def _up_to_marker(self, connection: Connection) -> list[Reply]:
        marker = b"marker %d" % self._marker
        frames = [connection.call("PING", marker)]
        while marker not in frames[-1].raw:
            frames.append(connection.read())
        return frames[:-1]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("tracking")
    (folder / "redis").mkdir()
    with LogWriter(folder / "log", "job", STATES) as writer:
        writer.publish([Change("m", Op.PUT, b"job:m:~", value=b"0")])
        with redis_server(folder / "redis") as redis, sparkis_server(folder / "store", folder / "log") as ours:
            wait_for_keys(ours, 1)
            yield Both(redis, ours, writer)


@pytest.fixture
def both(servers: Both) -> Iterator[Both]:
    servers.change(*(f"job:s:{each}" for each in "abc"))
    yield servers
    servers.forget()


def test_read_key_is_invalidated_once(both: Both) -> None:
    both.say(
        "x", "HELLO 3", "CLIENT TRACKING ON", "GET job:s:a", "MGET job:s:b job:s:new", "EXISTS job:s:c", "TTL job:s:d"
    )
    both.change("job:s:a", "job:s:b", "job:s:new", "job:s:d", "job:s:else")
    assert len(both.received("x")) == 4
    both.change("job:s:a", "job:s:c")
    assert len(both.received("x")) == 1
    both.change("job:s:a", "job:s:b", "job:s:c", "job:s:new")
    assert both.received("x") == []


def test_deleted_keys_are_invalidated(both: Both) -> None:
    both.say("x", "HELLO 3", "CLIENT TRACKING ON", "GET job:s:a", "STRLEN job:s:b")
    both.change("job:s:a", "job:s:b", is_deleted=True)
    assert len(both.received("x")) == 2


def test_client_of_resp2_without_redirect_gets_no_invalidation(both: Both) -> None:
    both.say("x", "CLIENT TRACKING ON", "GET job:s:a")
    both.change("job:s:a")
    assert both.received("x") == []
    both.say("x", "CLIENT TRACKING OFF", "GET job:s:a", "HELLO 3", "GET job:s:b")
    both.change("job:s:a", "job:s:b")
    assert both.received("x") == []


def test_optin_and_optout_choose_tracked_keys(both: Both) -> None:
    both.say(
        "in", "HELLO 3", "CLIENT TRACKING ON OPTIN", "GET job:s:a", "CLIENT CACHING YES", "GET job:s:b", "GET job:s:c"
    )
    both.say(
        "out", "HELLO 3", "CLIENT TRACKING ON OPTOUT", "GET job:s:a", "CLIENT CACHING NO", "GET job:s:b", "GET job:s:c"
    )
    both.say(
        "all",
        "HELLO 3",
        "CLIENT TRACKING ON OPTIN",
        "CLIENT CACHING YES",
        "MULTI",
        "GET job:s:a",
        "GET job:s:b",
        "EXEC",
    )
    both.change("job:s:a", "job:s:b", "job:s:c")
    assert [len(both.received(name)) for name in ("in", "out", "all")] == [1, 2, 2]


@pytest.mark.parametrize("words", [" PREFIX job:s:", " PREFIX job:s:a PREFIX job:s:b NOLOOP", " PREFIX job:s:ab"])
def test_broadcast_invalidates_keys_with_prefix_in_one_frame(both: Both, words: str) -> None:
    both.say("x", "HELLO 3", f"CLIENT TRACKING ON BCAST{words}")
    for _ in range(2):
        both.change("job:s:b", "job:s:a", "job:s:ab")
        assert both.received("x")


@pytest.mark.parametrize("greeting", ["PING", "HELLO 3"], ids=["RESP2", "RESP3"])
@pytest.mark.parametrize("source", ["PING", "HELLO 3"], ids=["of RESP2", "of RESP3"])
def test_redirect_sends_invalidations_to_another_client(both: Both, greeting: str, source: str) -> None:
    both.say("told", greeting)
    both.say("x", source, "CLIENT TRACKING ON REDIRECT @told", "GET job:s:a")
    if greeting == "PING":
        both.change("job:s:a")  # it is not subscribed to anything, and so cannot be told
        assert both.received("told") == []
        both.say("x", "GET job:s:a")
    both.say("told", "SUBSCRIBE __redis__:invalidate")
    both.say("x", "GET job:s:b")
    both.change("job:s:a", "job:s:b")
    assert len(both.received("told")) == 2
    assert both.received("x") == []
    both.say("x", "CLIENT TRACKING OFF", "CLIENT TRACKING ON BCAST PREFIX job:s: REDIRECT @told")
    both.change("job:s:a", "job:s:b")
    assert len(both.received("told")) == 1


def test_redirect_to_lost_client_is_reported(both: Both) -> None:
    both.say("told", "HELLO 3")
    both.say("x", "HELLO 3", "CLIENT TRACKING ON REDIRECT @told", "GET job:s:a")
    both.close("told")
    both.change("job:s:a")
    theirs, ours = both.client("x")
    frames = [connection.call("PING") for connection in (theirs, ours)]
    while any(frame.type == "+" for frame in frames[1:]):
        frames[1] = ours.read()
    assert [frame.type for frame in frames] == [">", ">"]
    assert all(b"tracking-redir-broken" in frame.raw for frame in frames)
    info = [connection.call("CLIENT", "TRACKINGINFO").raw for connection in (theirs, ours)]
    assert all(b"broken_redirect" in each or b"PONG" in each for each in info)


def test_expired_key_is_invalidated(both: Both) -> None:
    both.change("job:s:t", expire_at_ms=int(time() * 1000) + 1500)
    both.say("x", "HELLO 3", "CLIENT TRACKING ON", "GET job:s:t")
    both.say("all", "HELLO 3", "CLIENT TRACKING ON BCAST PREFIX job:s:t")
    for name in ("x", "all"):
        frames = {connection.read().raw for connection in both.client(name)}
        assert len(frames) == 1
