"""MULTI, EXEC, DISCARD, WATCH and UNWATCH: the same bytes as of a real server, in every order that clients use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat.conformance.generators import checked
from compat.conformance.pair import Pair
from compat.conformance.servers import Running, redis_server, sparkis_server, wait_for_keys
from compat.conformance.wire import Connection, Reply, Words, requests
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

GREETINGS: list[list[str]] = [[], ["HELLO 3"]]

CONVERSATIONS = [
    ["MULTI", "EXEC"],
    ["MULTI", "GET plain", "GET missing", "STRLEN big", "EXEC", "GET plain"],
    ["MULTI", "MGET plain missing hash:one", "HGETALL hash:one", "HGETALL missing", "LRANGE list:short 0 -1", "EXEC"],
    ["MULTI", "GET hash:one", "LRANGE plain 0 -1", "PING", "EXEC"],
    ["MULTI", "LRANGE list:long 0 -1", "GET big", "LRANGE list:edge 1 2", "EXEC", "PING"],
    ["MULTI", "EXISTS plain missing plain", "TYPE list:one", "PEXPIRETIME later", "HEXISTS hash:one field", "EXEC"],
    ["EXEC"],
    ["DISCARD"],
    ["MULTI", "MULTI", "GET plain", "EXEC"],
    ["MULTI", "MULTI", "MULTI", "DISCARD", "EXEC"],
    ["MULTI", "GET plain", "DISCARD", "GET plain", "EXEC"],
    ["MULTI", "NOPE a b", "GET plain", "EXEC", "GET plain"],
    ["MULTI", "GET", "GET plain", "EXEC", "MULTI", "GET plain", "EXEC"],
    ["MULTI", "CLIENT NOPE", "EXEC"],
    ["MULTI", "GET", "DISCARD", "MULTI", "PING", "EXEC"],
    ["MULTI", "GETRANGE plain a b", "GETRANGE plain 0 1", "SELECT 99", "SCAN x", "EXEC"],
    ["MULTI", "WATCH plain", "GET plain", "EXEC"],
    ["MULTI", "UNWATCH", "GET plain", "EXEC"],
    ["WATCH plain missing", "MULTI", "GET plain", "EXEC"],
    ["WATCH plain", "UNWATCH", "MULTI", "EXEC"],
    ["WATCH plain", "WATCH plain", "DISCARD", "EXEC", "MULTI", "DISCARD"],
    ["WATCH hash:large list:long big soon", "MULTI", "PING", "EXEC"],
    ["WATCH", "UNWATCH x", "MULTI x", "DISCARD x", "EXEC x"],
    ["MULTI", "WATCH", "EXEC"],
    ["MULTI", "EXEC x", "EXEC", "MULTI", "GET plain", "EXEC"],
    ["MULTI", "DISCARD x", "EXEC"],
    ["MULTI", "MULTI x", "EXEC"],
    ["MULTI", "RESET", "EXEC", "GET plain"],
    ["WATCH plain", "RESET", "MULTI", "EXEC"],
    ["MULTI", "GET plain", "QUIT", "EXEC"],
    ["MULTI", "QUIT x"],
    ["MULTI", "SELECT 1", "GET plain", "SELECT 0", "GET plain", "EXEC", "GET plain"],
    ["MULTI", "SELECT 3", "EXEC", "GET plain"],
    ["SELECT 1", "MULTI", "GET plain", "SELECT 0", "GET plain", "EXEC", "GET plain"],
    ["SELECT 1", "WATCH plain", "MULTI", "GET plain", "EXEC"],
    ["MULTI", "CLIENT SETNAME me", "CLIENT GETNAME", "EXEC", "CLIENT GETNAME"],
    ["MULTI", "SAVE", "GET plain", "EXEC"],
    ["MULTI", "SHUTDOWN NOW", "EXEC"],
    ["MULTI", "SYNC", "EXEC"],
    ["MULTI", "PSYNC ? -1", "EXEC"],
    ["MULTI", "CLUSTER INFO", "READONLY", "ASKING", "GET plain", "EXEC"],
    ["MULTI", "EVALSHA 0123456789012345678901234567890123456789 0", "GET plain", "EXEC"],
    ["MULTI", "DEBUG SLEEP 0", "GET plain", "EXEC"],
    ["MULTI", "ECHO a", "COMMAND GETKEYS GET x", "SCRIPT EXISTS a", "ROLE", "DBSIZE", "EXEC"],
    ["MULTI", "KEYS user:1:*", "KEYS nothing*", "RANDOMKEY x", "EXEC"],
    ["MULTI", "KEYS user:1:*", "KEYS nothing*", "EXEC"],
    ["MULTI", "READWRITE", "AUTH x", "AUTH default x", "AUTH a b c", "EXEC"],
]
# HELLO's reply has the server's own facts in it, so that these are compared as bytes around them.
SILENCES = [
    ["CLIENT REPLY OFF", "MULTI", "GET plain", "EXEC", "CLIENT REPLY ON", "PING"],
    ["MULTI", "CLIENT REPLY OFF", "GET plain", "EXEC", "PING", "CLIENT REPLY ON", "PING"],
    ["MULTI", "GET plain", "CLIENT REPLY OFF", "GET plain", "CLIENT REPLY ON", "GET plain", "EXEC", "PING"],
    ["MULTI", "CLIENT REPLY SKIP", "GET plain", "EXEC", "PING", "ECHO a"],
    ["CLIENT REPLY SKIP", "MULTI", "GET plain", "EXEC"],
    ["MULTI", "GET plain", "CLIENT REPLY SKIP", "EXEC", "PING"],
    ["CLIENT REPLY OFF", "MULTI", "GET plain", "CLIENT REPLY ON", "LRANGE list:long 0 -1", "EXEC", "PING"],
    ["CLIENT REPLY OFF", "MULTI", "LRANGE list:long 0 -1", "EXEC", "CLIENT REPLY ON", "PING"],
    ["CLIENT REPLY OFF", "MULTI", "NOPE", "EXEC", "CLIENT REPLY ON", "PING"],
    ["MULTI", "NOPE", "CLIENT REPLY OFF", "EXEC", "PING"],
    ["WATCH plain", "CLIENT REPLY OFF", "MULTI", "CLIENT REPLY ON", "GET plain", "EXEC"],
    ["CLIENT REPLY OFF", "CLIENT REPLY SKIP", "PING", "PING", "CLIENT REPLY ON", "ECHO a"],
    ["CLIENT REPLY OFF", "MULTI", "CLIENT REPLY SKIP", "PING", "EXEC", "PING", "PING", "CLIENT REPLY ON", "ECHO a"],
]


def words(lines: list[str]) -> list[Words]:
    return [line.encode().split(b" ") for line in lines]


@pytest.mark.parametrize("greeting", GREETINGS, ids=["RESP2", "RESP3"])
@pytest.mark.parametrize("lines", CONVERSATIONS, ids="; ".join)
def test_transactions_equal_redis(pair: Pair, lines: list[str], greeting: list[str]) -> None:
    pair.check(words(greeting + lines))


@pytest.mark.parametrize("lines", SILENCES, ids="; ".join)
def test_suppressed_replies_are_those_of_redis(pair: Pair, lines: list[str]) -> None:
    pair.check_bytes(requests(words(lines)))


PIECES = [
    *["MULTI", "EXEC", "GET plain", "LRANGE list:short 0 1", "DISCARD", "WATCH plain", "UNWATCH", "NOPE", "GET"],
    *["PING", "SELECT 1", "SELECT 0", "WATCH missing", "MULTI", "EXEC", "EXEC x", "RESET", "HGETALL hash:one"],
    *["HELLO 9"],
]


@given(lines=st.lists(st.sampled_from(PIECES), max_size=14))
@checked(50)
def test_transactions_in_any_order_equal_redis(pair: Pair, lines: list[str]) -> None:
    pair.check(words(lines))


@pytest.mark.parametrize(
    "lines",
    [
        ["MULTI", "SET a b", "GET a", "EXEC", "GET a"],
        ["MULTI", "PING", "DEL a", "EXEC"],
        ["MULTI", "SET a", "SET a b", "EXEC"],
        ["MULTI", "SETEX a 0 x", "DISCARD", "MULTI", "PING", "EXEC"],
        ["WATCH a", "MULTI", "INCR a", "EXEC", "MULTI", "PING", "EXEC"],
        ["MULTI", "BLPOP a 0", "EXEC"],
        ["MULTI", "WAIT 0 0", "PING", "EXEC"],
        ["MULTI", "FLUSHALL", "PING", "EXEC"],
    ],
    ids="; ".join,
)
@pytest.mark.parametrize("greeting", GREETINGS, ids=["RESP2", "RESP3"])
def test_writes_are_refused_as_read_only_replica_does(
    replica_pair: Pair, lines: list[str], greeting: list[str]
) -> None:
    replica_pair.check(words(greeting + lines))


@pytest.mark.parametrize(
    "lines",
    [
        ["EXEC"],
        ["MULTI", "EXEC"],
        ["AUTH default wrong", "MULTI", "GET plain", "EXEC", "EXEC x"],
        ["WATCH plain", "DISCARD", "UNWATCH"],
    ],
    ids="; ".join,
)
def test_unauthenticated_client_gets_replies_of_redis(locked_pair: Pair, lines: list[str]) -> None:
    locked_pair.check(words(lines))


STATES = [StateDescriptor("s", key="k", value="v"), StateDescriptor("h", key="k", value="v", field="f")]


class Changing:
    """A server of each kind, and changes that both take."""

    def __init__(self, redis: Running, ours: Running, writer: LogWriter) -> None:
        self.redis, self.ours, self._writer = redis, ours, writer
        self._epochs = 0

    def put(self, key: str, value: str) -> None:
        """Change a string on both, and wait until it can be read."""
        with self.redis.connect() as connection:
            connection.call("SET", f"job:s:{key}", value)
        self._epochs += 1
        marker = f"{self._epochs}"
        changes = [("job:s:zz", marker), (f"job:s:{key}", value)]
        self._writer.publish([Change("s", Op.PUT, name.encode(), value=text.encode()) for name, text in changes])
        with self.ours.connect() as connection:
            while connection.call("GET", "job:s:zz").value != marker.encode():
                pass


@pytest.fixture
def changing(tmp_path: Path) -> Iterator[Changing]:
    (tmp_path / "redis").mkdir()
    with LogWriter(tmp_path / "log", "job", STATES) as writer:
        writer.publish([Change("s", Op.PUT, b"job:s:a", value=b"1"), Change("s", Op.PUT, b"job:s:zz", value=b"0")])
        with (
            redis_server(tmp_path / "redis") as redis,
            sparkis_server(tmp_path / "store", tmp_path / "log") as ours,
            redis.connect() as connection,
        ):
            wait_for_keys(ours, 2)
            connection.call("SET", "job:s:a", "1")
            yield Changing(redis, ours, writer)


def talk(connections: list[Connection], *lines: str) -> list[Reply]:
    """Send lines to both and return the last replies, which are the same for each line."""
    last: list[Reply] = []
    for line in lines:
        last = [connection.call(*line.split(" ")) for connection in connections]
        assert last[0].raw == last[1].raw, line
    return last


@pytest.mark.parametrize("greeting", ["PING", "HELLO 3"])
def test_changed_watched_key_fails_exec_as_at_redis(changing: Changing, greeting: str) -> None:
    with changing.redis.connect() as theirs, changing.ours.connect() as ours:
        both = [theirs, ours]
        for connection in both:
            connection.call(*greeting.split(" "))
        talk(both, "WATCH job:s:a", "GET job:s:a")
        changing.put("a", "2")
        aborted = talk(both, "MULTI", "GET job:s:a", "EXEC")
        assert aborted[1].raw == (b"_\r\n" if greeting == "HELLO 3" else b"*-1\r\n")
        # What is watched is forgotten, and what changes before it is watched is no matter.
        talk(both, "MULTI", "GET job:s:a", "EXEC", "WATCH job:s:a", "WATCH job:s:new", "MULTI", "GET job:s:a")
        changing.put("other", "x")
        assert talk(both, "EXEC")[1].value[0].value == b"2"
        talk(both, "WATCH job:s:new")
        changing.put("new", "made")
        assert talk(both, "MULTI", "EXEC")[1].value is None
        talk(both, "WATCH job:s:a job:s:new")
        changing.put("new", "again")
        talk(both, "UNWATCH", "MULTI", "GET job:s:new", "EXEC")
        talk(both, "WATCH job:s:new", "MULTI", "NOPE")
        changing.put("new", "more")
        assert talk(both, "EXEC")[1].is_error  # refused, whatever has changed
