"""Random pipelines in random chunks: an overlay answers each of them as one Redis that has all keys.

The pipelines have what the compiled forwarder sends on: transactions, requests over several keys, scripts, WATCH. Each
has requests, too, that it leaves to the general path, so that both answer parts of the same input. Others have requests
of all kinds, and some that change the connection, such as SELECT.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat.conformance.generators import checked
from compat.conformance.wire import Connection, requests
from tests.differential.overlay_clients import may_be_sent_to_cluster
from tests.differential.overlay_requests import OF_CONNECTIONS, OF_UPSTREAM, lines
from tests.worlds import World

WORLDS = [("proxy", "single"), ("serve", "single"), ("proxy", "cluster")]
Line = tuple[bytes, ...]

# One hash tag, so that a Redis Cluster runs all of them.
STRINGS, SETS, SORTED, LISTS = ([b"{u}%b%d" % (kind, n) for n in range(2)] for kind in (b"s", b"e", b"z", b"l"))
SPEEDS = [b"job:speed:%d" % car for car in range(3)]
SCRIPT = b"return redis.call(ARGV[1], KEYS[1])"
FORWARDED: list[Line] = [
    (b"GET", STRINGS[0]),
    (b"get", STRINGS[1]),
    (b"SET", STRINGS[0], b"1"),
    (b"INCR", STRINGS[0]),
    (b"INCR", SETS[0]),
    (b"APPEND", STRINGS[1], b"x"),
    (b"MGET", *STRINGS, SETS[0]),
    (b"EXISTS", *STRINGS, *SETS),
    (b"DEL", STRINGS[1], SETS[1]),
    (b"MSET", STRINGS[0], b"3", STRINGS[1], b"4"),
    (b"MSET", STRINGS[0], b"3", STRINGS[1]),
    (b"MSETNX", STRINGS[0], b"5", STRINGS[1], b"6"),
    (b"SADD", SETS[0], b"a"),
    (b"SADD", SETS[1], b"a", b"b"),
    (b"SINTERCARD", b"2", *SETS),
    (b"SDIFFSTORE", SETS[0], SETS[1], SETS[0]),
    (b"SMOVE", SETS[1], SETS[0], b"b"),
    (b"ZADD", SORTED[0], b"1", b"a", b"2", b"b"),
    (b"ZUNION", b"2", *SORTED),
    (b"ZUNION", b"0", SORTED[0]),
    (b"ZUNION", b"7", SORTED[0]),
    (b"ZUNION", b"-1", SORTED[0]),
    (b"ZUNION", b"01", SORTED[0]),
    (b"ZUNIONSTORE", SORTED[1], b"1", SORTED[0]),
    (b"RPUSH", LISTS[0], b"a", b"b"),
    (b"LMOVE", LISTS[0], LISTS[1], b"LEFT", b"RIGHT"),
    (b"LMPOP", b"2", *LISTS, b"LEFT"),
    (b"RENAME", STRINGS[0], STRINGS[1]),
    (b"EVAL", SCRIPT, b"1", STRINGS[0], b"GET"),
    (b"EVAL", SCRIPT, b"1", STRINGS[0], b"INCR"),
    (b"EVAL", b"return ARGV[1]", b"0", b"x"),
    (b"EVAL", SCRIPT, b"x", STRINGS[0]),
    (b"EVALSHA", b"0" * 40, b"1", STRINGS[0]),
    (b"EVALSHA", b"0" * 40),
]
OF_STATES: list[Line] = [
    *((b"GET", key) for key in SPEEDS),
    (b"STRLEN", SPEEDS[0]),
    (b"MGET", *SPEEDS),
    (b"MGET", SPEEDS[0], SPEEDS[0]),
    (b"EXISTS", *SPEEDS, b"job:speed:none"),
    (b"EXISTS", SPEEDS[1], SPEEDS[1]),
    (b"TOUCH", *SPEEDS),
    (b"HGETALL", SPEEDS[0]),
    (b"ZRANGE", b"job:top:1", b"0", b"-1"),
    (b"ZCARD", b"job:top:1"),
    (b"SCARD", b"job:ids:1"),
    (b"ZUNION", b"1", b"job:top:1"),
    (b"LCS", SPEEDS[1], SPEEDS[1]),
]
OTHERS: list[Line] = [
    (b"MGET", STRINGS[0], SPEEDS[0]),
    (b"EXISTS", SPEEDS[0], STRINGS[0]),
    (b"GET", b"car/1"),
    (b"PING",),
    (b"ECHO", b"x"),
    (b"PUBLISH", b"c", b"m"),
    (b"SELECT", b"0"),
    (b"SELECT", b"x"),
    (b"SET", STRINGS[0]),
    (b"GET",),
    (b"MGET",),
    (b"NOPE", STRINGS[0]),
    (b"MULTI", b"x"),
    (b"EXEC",),
    (b"DISCARD",),
    (b"UNWATCH",),
]
WATCHES: list[Line] = [(b"WATCH", STRINGS[0]), (b"WATCH", *STRINGS), (b"WATCH", SPEEDS[0]), (b"WATCH", *SETS)]


def tagged(templates: Sequence[str]) -> st.SearchStrategy[Line]:
    """Draw a request from templates; its keys have the hash tag."""
    return lines(templates).map(lambda line: tuple(word.replace(b"<tag>", b"{u}") for word in line.words))


forwarded, of_states, any_line = st.sampled_from(FORWARDED), st.sampled_from(OF_STATES), tagged(OF_UPSTREAM)
alone = st.one_of(forwarded, any_line, of_states, st.sampled_from(OTHERS), st.sampled_from(WATCHES))
queued = st.one_of(*(st.lists(each, max_size=4) for each in (forwarded, any_line, of_states)))
mixed = st.lists(alone, max_size=3)
transactions = st.builds(lambda lines: [(b"MULTI",), *lines, (b"EXEC",)], st.one_of(queued, queued, mixed))
with_transactions = st.lists(st.one_of(alone.map(lambda line: [line]), transactions), min_size=1, max_size=6).map(
    lambda parts: [line for part in parts for line in part]
)
with_connections = st.lists(st.one_of(any_line, of_states, tagged(OF_CONNECTIONS)), max_size=12)
# The keys that another client writes after a pipeline; the sizes of the chunks in which it is sent, in bytes.
steps_of_any = [
    st.lists(
        st.tuples(each, st.lists(st.sampled_from(STRINGS), max_size=1), st.lists(st.integers(1, 200), max_size=3)),
        min_size=1,
        max_size=4,
    )
    for each in (with_transactions, with_connections)
]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: "-".join(world))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("world"), stack, *request.param)


def send(client: Connection, other: Connection, lines: Sequence[Line], chunks: Sequence[int]) -> list[bytes]:
    """Send a pipeline in chunks of these sizes, and the rest in one; return the replies."""
    data = requests(lines)
    for size in chunks:
        client.send(data[:size])
        data = data[size:]
        assert other.call("PING").plain == b"PONG"  # the server has read the chunk, most times
    client.send(data)
    return [client.read().raw for _ in lines]


@given(steps=st.one_of(*steps_of_any), protocol=st.sampled_from([2, 3]))
@checked(40)
def test_pipelines_are_answered_as_by_one_redis(
    world: World, steps: list[tuple[list[Line], list[bytes], list[int]]], protocol: int
) -> None:
    world.clear()
    with ExitStack() as stack:
        ours = [stack.enter_context(world.connect()) for _ in range(2)]
        theirs = [stack.enter_context(world.reference.connect()) for _ in range(2)]
        for client, other in (ours, theirs):
            assert other.call("SET", STRINGS[0], "1").plain == b"OK"
            assert not client.call("HELLO", protocol).is_error
        for lines, written, chunks in steps:
            sent = [line for line in lines if not world.is_cluster or may_be_sent_alone(line)]
            assert send(*ours, sent, chunks) == send(*theirs, sent, ()), sent
            for key in written:
                assert {other.call("SET", key, "9").plain for _, other in (ours, theirs)} == {b"OK"}
        last = [
            (b"DISCARD",),
            (b"MGET", *STRINGS),
            (b"SMISMEMBER", SETS[0], b"a", b"b"),
            (b"LRANGE", LISTS[0], b"0", b"-1"),
        ]
        assert send(*ours, last, ()) == send(*theirs, last, ())


def may_be_sent_alone(line: Line) -> bool:
    """Return whether a Redis Cluster, which has one database, answers a request as the reference does."""
    return line[0] != b"SELECT" and may_be_sent_to_cluster(list(line), in_one_slot=True)
