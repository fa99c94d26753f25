"""For any chunks of input, the compiled core replies and counts as the general path does, byte for byte."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Sequence
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from compat.conformance.wire import replies_in, requests
from compat.examples import examples
from compat.fuzz.subject import RecordingTransport
from compat.fuzz.targets import HERE, NOW_MS, STATES
from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.client.connection import Connection
from resp_server.cluster.topology import Topology
from resp_server.pipeline.immediate import ImmediatePipeline
from resp_server.serving.server import Server
from resp_server.settings.server import ServerConfig
from state_backend.lmdb.store import LmdbStore
from state_backend.store.keyspace import Job, Keyspace
from tests.properties.core_requests import (
    COMPILED,
    KEYS,
    apply,
    endings,
    place_reads,
    reads,
    requests_sent,
    runs,
    transactions,
)

pytestmark = pytest.mark.compiled

# The pushes that tests leave out, as they may come sooner or later.
PUSHED = (b"invalidate", b"epoch")
# What a client has sent and got is counted later than it may ask for it: after a buffer, or a batch of requests.
TOTALS = re.compile(rb"[=$]\d+\r\n(?=(?:txt:)?id=)| tot-net-out=\d+ tot-cmds=\d+")
# Bounds a test that would hang.
TURNS_MAX = 10_000

NO_CLUSTER: list[Topology] = []


def topology(version: int, here: str, there: str, is_replica: bool) -> Topology:
    """Return a topology in which the server owns some slots, or another one does of which it is a replica."""
    nodes = [{"host": "10.0.0.1", "port": 7379}, {"host": "10.0.0.2", "port": 7379}, {"host": "10.0.0.3", "port": 1}]
    nodes[2]["slots"] = there
    nodes[int(is_replica)]["slots"] = here
    if is_replica:
        nodes[0]["replica_of"] = "10.0.0.2:7379"
    return Topology.of_json({"version": version, "nodes": nodes})


# Slots of all keys, of some, of others; some that nobody has.
PARTS = [("0-16383", ""), ("0-8191", "8192-16383"), ("8192-16383", "0-4000"), ("", "0-16383"), ("100-12000", "")]
topologies = st.lists(st.tuples(st.sampled_from(PARTS), st.booleans()), min_size=1, max_size=3).map(
    lambda some: [topology(version, *parts, is_replica) for version, (parts, is_replica) in enumerate(some)]
)


CROSS_SLOT = [[b"MULTI"], [b"GET", b"j:v:0"], [b"GET", b"j:v:1"], [b"EXEC"]]

# What the client's user may do; texts that look like the protocol are the interesting ones here as well.
user_rules = st.sampled_from(
    [
        [b"resetkeys", b"~j:v:*", b"~j:m:small"],
        [b"resetkeys", b"%R~j:l:*", b"%W~j:m:*", b"~\\**", b"~$", b"(+mget ~j:v:[01])"],
        [b"-@all", b"+get", b"+hget", b"+state|mget"],
        [b"-get", b"-hgetall", b"-state"],
        [b"resetkeys", b"(+get ~j:v:0)", b"(+@all -get ~j:*)"],
        [b"resetkeys", b"~??*2*", b"~a*", b"~j:?:?"],
        [b"resetkeys"],
        [b"-client", b"+client|getname", b"-acl", b"resetchannels", b"&a*"],
        # More than the core keeps; a pattern that takes long.
        [b"resetkeys", *(b"(+@all ~j:?:%b*)" % bytes([97 + number]) for number in range(24)), b"(+@all ~j:v:[0-9])"],
        [b"resetkeys", b"~" + b"*[a-z:]" * 100 + b"*"],
    ]
)


async def replies_of(
    config: ServerConfig,
    chunks: list[bytes],
    is_loading: bool,
    shown: list[Topology],
    rules: Sequence[bytes],
    is_compiled: bool,
) -> Any:
    """Return what a client is sent that sends these chunks, what was counted for it, and which keys it may hold.

    There is an epoch after each chunk, and a topology before each as long as there are any. When a client that tracks
    is told is left out: it is sooner where a request was looked up before it was found to be none.
    """
    with TemporaryDirectory() as folder:
        store = LmdbStore(folder, "g", map_bytes_max=1 << 26)
        try:
            return await _answered(store, config, chunks, is_loading, shown, rules, is_compiled)
        finally:
            store.close()


async def _answered(
    store: LmdbStore,
    config: ServerConfig,
    chunks: list[bytes],
    is_loading: bool,
    shown: list[Topology],
    rules: Sequence[bytes],
    is_compiled: bool,
) -> Any:
    keyspace = Keyspace()
    keyspace.put(Job("j", "g", STATES, store))
    apply(store, 0)
    server = Server(keyspace, config, pipeline_of_stores, clock=lambda: NOW_MS)
    server.context.is_loading = is_loading
    if not is_compiled:
        server.pipeline.compiled = None
    server.users.set(b"default", rules)
    wire, connection = RecordingTransport(), Connection(server)
    connection.connection_made(wire)  # type: ignore[arg-type]
    # A request that fails before it reads notices no epoch, where the other path has noticed it with an earlier one. So
    # the keys that its client may hold would differ.
    tracks = b"TRACKING" in b"".join(chunks)
    for turn, chunk in enumerate(chunks, 1):
        if turn <= len(shown):
            server.set_topology(shown[turn - 1], HERE)
        if not wire.is_closed:
            connection.data_received(chunk)
        for _ in range(TURNS_MAX):
            if connection._next_turn is None or wire.is_closed:
                break
            await asyncio.sleep(0)
        else:
            raise AssertionError("the connection does not come to rest")
        server.write_queue.flush()
        apply(store, turn % 4)
        if tracks:
            server.context.renew_all()
    stats = server.context.stats
    stats.collect()
    commands = {
        name: dataclasses.replace(command_stats, nanoseconds=0, took=[sum(command_stats.took)])
        for name, command_stats in stats.commands.items()
        if command_stats.calls or command_stats.rejected
    }
    session = connection.session
    server.context.renew_all()
    held = sorted(server.context.tracking.clients_by_key)
    server.context.close()
    sent = replies_in(b"".join(wire.sent))
    pushed = [each for each in sent if each.type == ">" and each.value[0].value in PUSHED]
    replies = [each for each in sent if each not in pushed]
    answers = b"".join(each.raw for each in replies)
    without_totals = TOTALS.sub(b"", answers)
    output_bytes = stats.output_bytes - sum(len(each.raw) for each in pushed) - len(answers) + len(without_totals)
    counted = (stats.hits, stats.misses, stats.errors, stats.input_bytes, output_bytes, commands)
    return (
        without_totals,
        wire.is_closed,
        counted,
        session.last_command,
        session.active_ms,
        (session.calls, session.input_bytes),
        held,
    )


@patch("resp_server.serving.epoch_notifier.NOTIFY_SECONDS", 3600)  # no client is notified by the clock
@patch("resp_server.pipeline.loading_waits.LOADING_WAIT_S", 0.0)  # no request waits for a job to be loaded
@settings(max_examples=examples(12), deadline=None)
@given(
    requests_sent,
    endings,
    st.lists(st.integers(0, 2_000), max_size=6),
    st.booleans(),
    st.one_of(st.just(NO_CLUSTER), topologies),
    st.one_of(st.just([]), user_rules),
    st.sampled_from([None, None, "secret"]),
)
# What the core looks up behind what it leaves is not answered by it, and so not counted by it.
@example([[b"GET", b"j:v:0"], [b"GeT", b"j:v:0"], [b"SMEMBERS", b"j:v:gone"]], b"", [], False, NO_CLUSTER, [], None)
@example(
    [[b"GET", b"j:v:0"], [b"OBJECT|ENCODING", b"j:v:0"], [b"object|encoding", b"x", b"j:v:0"]],
    b"",
    [],
    False,
    NO_CLUSTER,
    [],
    None,
)
@example([[b"", b"j:v:0"], [b"GET", b"j:v:0"], [b"", b"j:v:0"]], b"", [], False, NO_CLUSTER, [], None)
# A node refuses a transaction over several slots, however it arrives.
@example(CROSS_SLOT, b"", [], False, [topology(0, "0-16383", "", False)], [], None)
@example(CROSS_SLOT, b"", [15, 40], False, [topology(0, "0-16383", "", False)], [], None)
@example(CROSS_SLOT[:2] + CROSS_SLOT[3:], b"", [15, 40], False, [topology(0, "0-16383", "", False)], [], None)
# A request that is refused is not queued, and its keys are not those of the transaction.
@example(
    [*CROSS_SLOT[:2], [b"MGET", b"j:v:0", b"j:v:1"], [b"EXEC"]],
    b"",
    [15, 40],
    False,
    [topology(0, "0-16383", "", False)],
    [],
    None,
)
def test_connection_answers_and_counts_as_one_without_core(
    sent: list[list[bytes]],
    ending: bytes,
    places: list[int],
    is_loading: bool,
    shown: list[Topology],
    rules: list[bytes],
    password: str | None,
) -> None:
    data = requests(sent) + ending
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    chunks = [data[start:end] for start, end in pairwise(ends)]
    config = ServerConfig(password=password)
    given_all = config, chunks, is_loading and not sent[:2], shown, rules
    assert asyncio.run(replies_of(*given_all, True)) == asyncio.run(replies_of(*given_all, False))


@settings(max_examples=examples(25), deadline=None)
@example(
    [[b"GEOSEARCH", b"j:z:places", b"FROMMEMBER", b"nobody", b"FROMMEMBER", b"m3", b"BYRADIUS", b"0", b"m"]] * 2, b"3"
)
@given(st.lists(place_reads, min_size=1, max_size=40), st.sampled_from([b"2", b"3"]))
def test_places_are_found_and_written_as_without_core(sent: list[list[bytes]], protocol: bytes) -> None:
    given_all = ServerConfig(), [requests([[b"HELLO", protocol], *sent])], False, NO_CLUSTER, ()
    assert asyncio.run(replies_of(*given_all, True)) == asyncio.run(replies_of(*given_all, False))


cachings = st.sampled_from([b"CLIENT CACHING YES", b"client caching no", b"CLIENT ID", b"CLIENT TRACKINGINFO"])


@settings(max_examples=examples(15), deadline=None)
@example(b"", [[b"GET", b"j:v:0"], [b"GETRANGE", b"j:v:1", b"0", b"x"]], [125])
@given(
    st.sampled_from([b"", b"OPTIN", b"OPTOUT", b"BCAST", b"NOLOOP", b"REDIRECT 1"]),
    st.lists(
        st.one_of(runs, transactions, reads.map(lambda read: [read]), cachings.map(lambda line: [line.split()])),
        max_size=10,
    ).map(lambda groups: [request for group in groups for request in group]),
    st.lists(st.integers(0, 1_000), max_size=6),
)
def test_tracking_client_may_cache_same_keys_as_pure(
    options: bytes, sent: list[list[bytes]], places: list[int]
) -> None:
    data = requests([[b"HELLO", b"3"], [b"CLIENT", b"TRACKING", b"ON", *options.split()], *sent])
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    given_all = ServerConfig(), [data[start:end] for start, end in pairwise(ends)], False, NO_CLUSTER, ()
    with patch("resp_server.serving.epoch_notifier.NOTIFY_SECONDS", 3600):
        assert asyncio.run(replies_of(*given_all, True)) == asyncio.run(replies_of(*given_all, False))


clocks = st.sampled_from([NOW_MS, NOW_MS - 3_600_000, NOW_MS + 1_000, NOW_MS + 3_600_000, 1, 0, 1 << 50])
# Groups of requests before an epoch: a transaction at a clock reading, in which it may be interrupted, and others.
at_clocks = st.tuples(clocks, st.lists(reads, max_size=4), st.sampled_from([b"EXEC", b"EXEC", b"DISCARD", b"PING"]))
within_epoch = st.lists(st.one_of(at_clocks, reads.map(lambda read: [read]), transactions), max_size=5)


def at_epoch(epoch: int, group: Any) -> list[list[bytes]]:
    """Return a group's requests; a tuple is a transaction after STATE AT."""
    if not isinstance(group, tuple):
        return list(group)
    clock_ms, queued, last = group
    return [[b"STATE", b"AT", b"j", b"1", b"%d" % epoch, b"%d" % clock_ms], [b"MULTI"], *queued, [last]]


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(within_epoch, min_size=1, max_size=4), st.booleans())
@example(
    [[(NOW_MS + 3_600_000, [[b"HGETALL", b"j:m:ttl"], [b"GET", b"j:v:0"]], b"EXEC"), [[b"HGETALL", b"j:m:ttl"]]]], True
)
@example([[(NOW_MS + 3_600_000, [[b"HGETALL", b"j:m:ttl"]] * 300, b"EXEC")] * 4], True)
def test_transaction_after_state_at_reads_at_its_clock_as_without_core(epochs: Any, follows: bool) -> None:
    """A connection that follows the epochs is a proxy's; the core leaves STATE AT of others to the general path."""
    chunks = [requests([[b"STATE", b"FOLLOW"]] * follows)]
    for epoch, groups in enumerate(epochs, 1):
        chunks.append(requests([request for group in groups for request in at_epoch(epoch, group)]))
    given_all = ServerConfig(), chunks, False, NO_CLUSTER, ()
    with patch("resp_server.serving.epoch_notifier.NOTIFY_SECONDS", 3600):
        assert asyncio.run(replies_of(*given_all, True)) == asyncio.run(replies_of(*given_all, False))


TRANSACTION = [[b"MULTI"], [b"GET", b"j:v:0"], [b"HLEN", b"j:m:small"], [b"EXEC"]]
# Some that the core calls, with each kind of effect and of reply.
SOME_CALLED = [
    b"ACL WHOAMI", b"CLIENT GETNAME", b"CLIENT SETNAME ann", b"CLIENT LIST", b"COMMAND COUNT", b"COMMAND DOCS get",
    b"CONFIG GET max*", b"CLUSTER KEYSLOT a", b"LASTSAVE", b"PUBLISH a b", b"ROLE", b"SELECT 1", b"SELECT 0",
    b"SLOWLOG LEN", b"SUBSCRIBE a", b"UNSUBSCRIBE a", b"ACL CAT nope", b"RESET",
]  # fmt: skip
# More requests than the core takes at once, so that one of these transactions begins in one part and ends in the next.
MANY_TRANSACTIONS = TRANSACTION * 300


def left_to_general_path(chunks: list[bytes], rules: Sequence[bytes] = ()) -> list[Sequence[bytes]]:
    """Return the requests that the core does not answer."""
    left: list[Sequence[bytes]] = []
    answer = ImmediatePipeline.answer

    def answered_by_general_path(
        self: ImmediatePipeline, context: Any, given: Any, out: list[bytes], *rest: Any
    ) -> Any:
        left.extend(given)
        return answer(self, context, given, out, *rest)

    with patch.object(ImmediatePipeline, "answer", answered_by_general_path):
        asyncio.run(replies_of(ServerConfig(), chunks, False, NO_CLUSTER, rules, True))
    return left


@pytest.mark.parametrize("protocol", [b"2", b"3"])
def test_core_leaves_none_of_its_commands_to_general_path(protocol: bytes) -> None:
    many = requests(MANY_TRANSACTIONS)
    chunks = [requests([[b"HELLO", protocol]]), requests(TRANSACTION), many, many[:20], many[20:70], many[70:]]
    chunks += [requests([request]) for request in TRANSACTION]  # its commands are queued
    chunks += [requests([line.split() for line in COMPILED])]  # at once: each epoch makes the lists longer
    chunks += [requests([line.split() for line in SOME_CALLED])]
    tracking = [[b"CLIENT", b"TRACKING", b"ON", b"OPTIN"]]
    chunks += map(requests, [tracking, [[b"CLIENT", b"CACHING", b"YES"]], TRANSACTION, [[b"GET", b"j:v:0"]]])
    assert left_to_general_path(chunks) == []


def test_each_keys_has_turn_and_one_transaction_has_at_most_one() -> None:
    keys = [b"KEYS", b"j:l:*"]
    assert left_to_general_path([requests([[b"PING"], *[keys] * 50, [b"MULTI"], keys, [b"PING"], [b"EXEC"]])]) == []
    transaction = [[b"MULTI"], keys, keys, [b"EXEC"]]
    assert left_to_general_path([requests([[b"PING"], *transaction, [b"PING"]])]) == transaction


def test_core_compares_many_keys_with_many_patterns_of_user() -> None:
    rules = [b"resetkeys", *(b"~j:%d:*" % number for number in range(40)), b"~j:v:*"]
    assert left_to_general_path([requests([[b"MGET", *[b"j:v:0"] * 1_000]])], rules) == []
    slow = [b"EXISTS", b"j:v:" + b"a" * 3_000]
    assert left_to_general_path([requests([slow])], [b"resetkeys", b"~*" + b"a" * 1_000 + b"b", b"~j:v:*"]) == [slow]


def test_core_answers_transactions_of_proxy_at_its_epoch() -> None:
    follow = [b"STATE", b"FOLLOW"]
    transaction = [[b"STATE", b"AT", b"j", b"1", b"1", b"%d" % NOW_MS], *TRANSACTION]
    assert left_to_general_path([requests([follow]), requests(transaction * 300)]) == [follow]


@pytest.mark.parametrize(
    ("request_line", "elements"),
    [
        (b"HRANDFIELD j:m:small", {b"f0", b"f1", b"f2"}),
        (b"SRANDMEMBER j:s:small", {b"m0", b"m1", b"m2"}),
        (b"ZRANDMEMBER j:z:small", {b"m0", b"m1", b"m2", b"m3"}),
        (b"SRANDMEMBER j:s:small 1", {b"m0", b"m1", b"m2"}),
        (b"HRANDFIELD j:m:small -1", {b"f0", b"f1", b"f2"}),
    ],
)
def test_random_element_is_any_of_all(request_line: bytes, elements: set[bytes]) -> None:
    chosen = [reply if len(request_line.split()) == 2 else reply[0] for reply in random_replies(request_line)]
    assert set(chosen) == elements


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_random_elements_are_distinct_with_positive_count(count: int) -> None:
    for reply in random_replies(b"SRANDMEMBER j:s:small %d" % count):
        assert len(reply) == len(set(reply)) == min(count, 3)
    orders = {tuple(reply) for reply in random_replies(b"SRANDMEMBER j:s:small 2")}
    assert len(orders) == 6


def test_random_fields_and_members_have_their_values() -> None:
    for reply in random_replies(b"HRANDFIELD j:m:small 9 WITHVALUES"):
        assert sorted(reply) == sorted([b"f0", b"f1", b"f2", b"0", b"0", b"0"])
    for reply in random_replies(b"ZRANDMEMBER j:z:small -7 WITHSCORES"):
        assert all(score == b"0" for score in reply[1::2])
        assert {*reply[::2]} <= {b"m0", b"m1", b"m2", b"m3"} and len(reply) == 14


def test_random_key_is_any_of_all() -> None:
    chosen = set(random_replies(b"RANDOMKEY"))
    assert len(chosen) > 10
    assert chosen <= {*KEYS} - {b"j:v:gone", b"nope"}


def random_replies(request_line: bytes) -> list[Any]:
    """Return the values of 200 replies of the core."""
    chunk = requests([request_line.split()] * 200)
    replies, *_ = asyncio.run(replies_of(ServerConfig(), [chunk], False, NO_CLUSTER, (), True))
    return [
        [each.value for each in reply.value] if isinstance(reply.value, list) else reply.value
        for reply in replies_in(replies)
    ]
