"""The forwarder parses what the parser and `ReplySplitter` parse, and orders replies; it leaves all else alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat.conformance.generators import examples
from resp_server.backends.redis.connection import UpstreamRequest
from resp_server.backends.routing.key_matcher import KeyMatcher, KeyOwner, OwnedFormat
from resp_server.backends.routing.result_cache import read_of
from resp_server.backends.routing.route import StatesRoute, UpstreamRoute
from resp_server.backends.routing.router import GetkeysCache, RoutingTable, route_of
from resp_server.backends.routing.rules import Owner, Rule
from resp_server.backends.servers.cluster_epochs import ClusterEpochs
from resp_server.backends.servers.command_routes import CommandRoutes, StateForwardSpec
from resp_server.backends.servers.native import forwarder
from resp_server.backends.servers.requests import ServerRequest, read_point
from resp_server.command.keys import KeyRange
from resp_server.command.overlay_commands import OverlayCommands
from resp_server.command.policy import ReplyMerge, SpecialCommand
from resp_server.commands import command_table
from resp_server.metrics.stats import CommandStats, Stats
from resp_server.protocol.errors import ReplyError, TryAgainError
from resp_server.protocol.request_parser import RequestParser
from resp_server.push.tracking_table import TrackingTable
from resp_server.raw_replies.pipelined_connection import PipelineFields
from resp_server.raw_replies.raw_reply import as_bytes
from resp_server.raw_replies.reply_sinks import UnansweredError
from resp_server.raw_replies.reply_splitter import ReplySplitter, items_of, pack
from resp_server.session.epochs import EMPTY_EPOCHS, NO_EPOCHS, Epochs, ReplyEpochs
from resp_server.session.tracking import TrackingState
from state_backend.model.descriptor import KeyFormat
from state_backend.model.slots import SLOTS, slot_of
from tests.properties.steps import result_of

pytestmark = pytest.mark.compiled

FIRST, ALL, COUNTED = [KeyRange(1)], [KeyRange(1, -1)], [KeyRange(1, counted_from=1)]
OLD: ReplyEpochs = ({"job": (1, 1)},)
NEW: ReplyEpochs = ({"job": (1, 2)},)
OK = b"+OK\r\n"
LONG_INTEGER = b":1764282345000\r\n"

keys = st.one_of(st.binary(max_size=12), st.sampled_from([b"{a}b", b"\r\n$3\r\nGET", b"*2\r\n", b"x" * 3000]))
gets = st.tuples(st.sampled_from([b"GET", b"get", b"gEt"]), keys)
mgets = st.lists(keys, min_size=1, max_size=6).map(lambda some: (b"MGET", *some))
lengths = st.tuples(st.just(b"STRLEN"), keys)
counts = st.lists(keys, min_size=1, max_size=6).map(lambda some: (b"EXISTS", *some))
requests = st.one_of(gets, gets, mgets, lengths, counts)


class ServerConnection(PipelineFields):
    """Stands for a connection: keeps what is asked, and is answered by `answer`."""

    def __init__(self, protocol: int = 2) -> None:
        super().__init__()
        self.at_end_of_round = lambda then: None
        self.epochs: Epochs = EMPTY_EPOCHS
        self.key = SimpleNamespace(address="here:1", protocol=protocol)
        self.protocol = protocol
        # Of connections to an upstream.
        self.follow: Any = None
        self.node_numbers: bytes | None = None
        self.may_watch = self.is_dirty = False
        self.watched: list[bytes] = []

    def has_room(self, count: int) -> bool:
        return True

    def flush(self) -> None:
        raise AssertionError

    @property
    def batches(self) -> list[Any]:
        return list(self.in_flight)

    @property
    def has_watched(self) -> bool:
        return bool(self.watched)

    def change_watched(self, ends_watch: bool, keys: list[bytes]) -> bool:
        self.watched = list(keys) if ends_watch else [*self.watched, *keys]
        return True

    def asked(self) -> bytes:
        batch, self.batch = self.batch, None
        return b"" if batch is None else batch.close()


class ForwarderSink:
    """Stands for a client."""

    seen: Epochs = EMPTY_EPOCHS
    watches_states = False

    def __init__(self) -> None:
        self.replies: list[bytes] = []
        self.again: list[bytes] = []
        self.ended: list[bytes] = []
        self.failed: list[Exception] = []

    def deliver(self, reply: bytes, epochs: ReplyEpochs) -> None:
        self.replies.append(reply)

    def resend(self, data: bytes, epochs: ReplyEpochs) -> None:
        self.again.append(data)

    def fail(self, error: Exception) -> None:
        self.failed.append(error)

    client_id = 1

    def end(self, replies: bytes) -> None:
        self.ended.append(replies)

    def error_reply(self, error: ReplyError) -> bytes:
        return b"-%b\r\n" % error.line


class Scene:
    """A forwarder to two servers, each with half of the slots."""

    def __init__(self, commands: Sequence[StateForwardSpec] = ()) -> None:
        self.connections = [ServerConnection(), ServerConnection()]
        self.sent: list[ServerRequest] = []
        self.connected: list[int] = []  # the versions of the protocol in which connections were missing
        self.tracking = TrackingTable()
        self.newer_connections = [ServerConnection(3), ServerConnection(3)]
        self.cluster = SimpleNamespace(
            slot_connections={
                protocol: SimpleNamespace(
                    numbers=bytes([1, 2] * (SLOTS // 2)),
                    connections=[None, *connections],
                    open=partial(self.connected.append, protocol),
                )
                for protocol, connections in ((2, self.connections), (3, self.newer_connections))
            },
            epochs=ClusterEpochs(),
            access=SimpleNamespace(clock=lambda: 0.0),
            deadline_s=lambda: 1.0,
            send=self.sent.append,
            defer=lambda batch: batch(),
        )
        self.cluster.epochs.newest, self.cluster.epochs.newest_announced["here:1"] = NEW[0], {"job": (1, 1)}
        self.tallies = {name: CommandStats() for name in ("get", "mget", "strlen")}
        rows: list[tuple[str, int, int, Sequence[KeyRange], ReplyMerge | None, SpecialCommand | None]] = [
            ("get", 2, 2, FIRST, None, None),
            ("mget", 2, 1024, ALL, ReplyMerge.LIST, SpecialCommand.MGET),
            ("strlen", 2, 2, FIRST, None, None),
            ("exists", 2, 1024, ALL, ReplyMerge.SUM, None),
            ("zunion", 3, 1024, COUNTED, None, None),
            ("multi", 1, 1, (), None, SpecialCommand.MULTI),
            ("exec", 1, 1, (), None, SpecialCommand.EXEC),
        ]
        self.tallies |= {name: CommandStats() for name, *_ in rows if name not in self.tallies}
        assert forwarder is not None
        self.forwarder = forwarder.Forwarder(
            self.cluster,
            SimpleNamespace(
                report=print, stats=Stats(), table=command_table(), tracking=self.tracking, clock=lambda: 7
            ),
            commands or [StateForwardSpec(*row, self.tallies[row[0]]) for row in rows],
        )

        self.upstream = ServerConnection()
        self.databases = [self.upstream, ServerConnection(), ServerConnection()]

    def use_upstream(
        self,
        patterns: Mapping[int, Sequence[KeyOwner]],
        connection_of: Callable[[int, int, int], Any] | None = None,
        cache: Any = None,
        rows: Sequence[tuple[str, bool, bool, Sequence[KeyRange], SpecialCommand | None, bool, int, CommandStats]] = (),
    ) -> None:
        few: list[tuple[str, bool, bool, Sequence[KeyRange], SpecialCommand | None]] = [
            ("get", True, False, FIRST, None),
            ("mget", True, False, ALL, SpecialCommand.MGET),
            ("set", False, False, FIRST, None),
            ("del", False, False, ALL, None),
            ("exists", True, False, ALL, None),
            ("mset", False, False, [KeyRange(1, -1, 2)], None),
            ("sinterstore", False, False, [KeyRange(1), KeyRange(2, -1)], None),
            ("zunion", True, False, COUNTED, None),
            ("eval", False, True, [KeyRange(2, counted_from=1)], None),
            ("publish", False, True, (), None),
            ("watch", False, False, ALL, SpecialCommand.WATCH),
        ]
        self.forwarder.set_upstream(
            connection_of or (lambda client, protocol, database: self.databases[database]),
            (),
            lambda client, database: cache,
            rows or [(*row, False, -2, CommandStats()) for row in few],
        )
        self.forwarder.set_key_owners(patterns)

    def connection_of(self, key: bytes) -> ServerConnection:
        return self.connections[slot_of(key) % 2]


def value_of(key: bytes) -> bytes:
    return b"$-1\r\n" if len(key) % 3 == 0 else b"$%d\r\n%b\r\n" % (len(key), key[::-1])


def reply_to(words: Sequence[bytes]) -> bytes:
    if words[0].upper() == b"GET":
        return value_of(words[1])
    if words[0] == b"STRLEN":
        return b":%d\r\n" % len(words[1])
    if words[0] == b"EXISTS":
        return b":%d\r\n" % len(words[1:])
    some = words[1:] if words[0] == b"MGET" else words[2:]
    return b"*%d\r\n%b" % (len(some), b"".join(map(value_of, some)))


def requests_in(data: bytes) -> list[list[bytes]]:
    return [list(each) for each in RequestParser().feed(data)]


@given(asked=st.lists(requests, min_size=1, max_size=12), cuts=st.lists(st.integers(0, 1 << 14), max_size=5))
def test_replies_come_in_order_of_requests(asked: list[tuple[bytes, ...]], cuts: list[int]) -> None:
    scene, sink = Scene(), ForwarderSink()
    data = b"".join(map(pack, asked))
    assert scene.forwarder.forward(sink, data, 2) == len(data)
    for connection in scene.connections:
        sent = connection.asked()
        if not sent:
            continue
        replies = b"".join(map(reply_to, requests_in(sent)))
        (batch,) = connection.batches
        rest, start = b"", 0
        for end in sorted({*(cut % (len(replies) + 1) for cut in cuts), len(replies)}):
            rest += replies[start:end]
            rest, start = rest[batch.feed(rest, 0, NEW) :], end
        assert rest == b""
        assert batch.remaining == 0
    assert sink.replies == [b"".join(map(reply_to, asked))]
    scene.forwarder.collect()
    assert scene.tallies["get"].calls == sum(each[0].upper() == b"GET" for each in asked)


@given(asked=st.lists(requests, min_size=1, max_size=4), data=st.data())
def test_forwarder_cuts_requests_as_parser_does(asked: list[tuple[bytes, ...]], data: st.DataObject) -> None:
    as_bytes = b"".join(map(pack, asked)) + data.draw(
        st.sampled_from([b"", b"*1\r\n$4\r\nPING\r\n", b"\r\n", b"*2\r\n$3"])
    )
    at = data.draw(st.integers(0, len(as_bytes) - 1))
    as_bytes = as_bytes[:at] + data.draw(st.sampled_from([b"", b"*", b"\r\n", b"1", b"$", b"-"])) + as_bytes[at + 1 :]
    scene, sink = Scene(), ForwarderSink()
    took = scene.forwarder.forward(sink, as_bytes, 2)
    if took:
        found = [words for connection in scene.connections for words in requests_in(connection.asked())]
        expected = requests_in(as_bytes[:took])
        names = [[each.upper() for each in words[:1]] for words in expected]
        assert sum(name == [b"GET"] for name in names) == sum(words[0].upper() == b"GET" for words in found)
        assert sum(batch.remaining for connection in scene.connections for batch in connection.batches) == len(found)
        # Each key goes to whom its slot has, once for each time that it is asked for.
        keys = sorted(key for words in expected for key in words[1:])
        assert keys == sorted(key for words in found for key in words[2 if words[0] == b"STATE" else 1 :])


@given(
    replies=st.lists(
        st.sampled_from([b"$1\r\na\r\n", b"$-1\r\n", b":-7\r\n", LONG_INTEGER, b"+OK\r\n", b"*1\r\n$0\r\n\r\n"]),
        min_size=1,
    ),
    data=st.data(),
)
def test_replies_are_cut_as_frames_cuts_them(replies: list[bytes], data: st.DataObject) -> None:
    sent = b"".join(replies)
    at = data.draw(st.integers(0, len(sent) - 1))
    odd = data.draw(st.sampled_from([b"", b"\r", b"\n", b"-", b"0", b"$", b"*", b"-ERR no\r\n", b">1\r\n:1\r\n"]))
    sent = sent[:at] + odd + sent[at + data.draw(st.integers(0, 1)) :]
    scene, takers = Scene(), [ForwarderSink() for _ in range(len(replies) + 2)]
    for sink in takers:
        scene.forwarder.forward(sink, pack((b"GET", b"k")), 2)
    connection = scene.connection_of(b"k")
    connection.asked()
    took = connection.batches[0].feed(sent, 0, NO_EPOCHS)
    found = [reply for sink in takers for reply in sink.replies]
    frames = ReplySplitter(1 << 20)
    assert frames.feed(sent[:took]) == found
    assert frames.is_empty


def test_replies_from_uneven_epochs_are_requested_again() -> None:
    for first, second, is_even in ((NEW, NEW, True), (OLD, NEW, True), (NEW, OLD, False)):
        scene, sink = Scene(), ForwarderSink()
        one = next(key for key in (b"%d" % n for n in range(99)) if slot_of(key) % 2 == 0)
        other = next(key for key in (b"%d" % n for n in range(99)) if slot_of(key) % 2 == 1)
        data = pack((b"GET", one)) + pack((b"GET", other))
        assert scene.forwarder.forward(sink, data, 2) == len(data)
        for connection, epochs in zip(scene.connections, (first, second), strict=True):
            connection.asked()
            connection.batches[0].feed(b"$1\r\na\r\n", 0, epochs)
        assert sink.replies == ([b"$1\r\na\r\n" * 2] if is_even else [])
        assert sink.again == ([] if is_even else [data])
        scene.forwarder.collect()
        assert scene.tallies["get"].calls == (2 if is_even else 0)


@pytest.mark.parametrize(
    "reply", [b"*1\r\n$1\r\na\r\n", b"*3\r\n$1\r\na\r\n$1\r\na\r\n$1\r\na\r\n", b":1\r\n", b"*2\r\n:1\r\n:2\r\n"]
)
def test_mget_is_error_if_server_reply_is_malformed(reply: bytes) -> None:
    scene, sink = Scene(), ForwarderSink()
    key = b"k"
    scene.forwarder.forward(sink, pack((b"MGET", key, key)), 2)
    connection = scene.connection_of(key)
    connection.asked()
    assert connection.batches[0].feed(reply, 0, NEW) == len(reply)
    assert sink.replies == [b"-ERR a server's reply has an unexpected form\r\n"]


def test_lost_requests_are_sent_again_and_mget_by_slots() -> None:
    scene, sink = Scene(), ForwarderSink()
    scene.forwarder.forward(sink, pack((b"GET", b"k")) + pack((b"MGET", b"k", b"k")), 2)
    connection = scene.connection_of(b"k")
    connection.asked()
    batch = connection.batches[0]
    get, mget = batch.next_request(), batch.next_request()
    assert (get.packed, get.slot, get.sends, batch.remaining) == (pack((b"GET", b"k")), slot_of(b"k"), 1, 0)
    get.sink.put(get.index, b"$1\r\na\r\n", NEW)
    mget.sink.put(mget.index, b"-ERR lost\r\n", NEW)
    (ask,) = scene.sent
    assert ask.packed == pack((b"MGET", b"k", b"k"))
    ask.sink.put(ask.index, b"*2\r\n$1\r\na\r\n$1\r\na\r\n", NEW)
    assert sink.replies == [b"$1\r\na\r\n*2\r\n$1\r\na\r\n$1\r\na\r\n"]


def of_slots(number: int) -> bytes:
    """Return a key of the first server (0), or of the second one (1)."""
    return next(key for key in (b"%d" % n for n in range(99)) if slot_of(key) % 2 == number)


def tracking_client(scene: Scene, *flags: str) -> TrackingState:
    state = TrackingState(1)
    for flag in flags:
        setattr(state, flag, True)
    scene.tracking.begin(state)
    return state


def invalidated(state: TrackingState) -> list[Sequence[bytes] | None]:
    return [each.keys for each in state.take(is_reply_pending=False)]


def test_keys_are_recorded_when_their_reply_arrives() -> None:
    scene, sink = Scene(), ForwarderSink()
    state, one, other = tracking_client(scene), of_slots(0), of_slots(1)
    data = pack((b"GET", one)) + pack((b"MGET", other, one))
    assert scene.forwarder.forward(sink, data, 2, tracking_state=state) == len(data)
    for connection in scene.connections:
        connection.asked()
    scene.tracking.changed([one, other])
    assert not state.has_pending
    first, second = (connection.batches[0] for connection in scene.connections)
    first.feed(b"$1\r\na\r\n*1\r\n$1\r\na\r\n", 0, NEW)
    assert sink.replies == []
    scene.tracking.changed([one, other])
    assert invalidated(state) == [[one]]
    second.feed(b"*1\r\n$1\r\na\r\n", 0, NEW)
    assert len(sink.replies) == 1
    scene.tracking.changed([one, other])
    assert invalidated(state) == [[other]]


def test_reply_to_request_before_flush_is_followed_by_invalidation() -> None:
    scene, sink = Scene(), ForwarderSink()
    state, key = tracking_client(scene), of_slots(0)
    scene.forwarder.forward(sink, pack((b"GET", key)), 2, tracking_state=state)
    scene.connections[0].asked()
    scene.tracking.changed(None)
    assert invalidated(state) == [None]
    scene.connections[0].batches[0].feed(b"$1\r\na\r\n", 0, NEW)
    assert invalidated(state) == [[key]]
    assert scene.tracking.keys == 0


@pytest.mark.parametrize(("mode", "word"), [("is_optin", b"YES"), ("is_optout", b"NO")])
def test_client_caching_is_about_next_request(mode: str, word: bytes) -> None:
    scene, sink = Scene(), ForwarderSink()
    scene.use_upstream({0: [KeyOwner(b"j:*", Owner.STATE)]})
    state, caching = tracking_client(scene, mode), pack((b"CLIENT", b"CACHING", word))
    sent = [
        caching,
        pack((b"GET", b"j:1")),
        pack((b"GET", b"j:2")),
        caching,
        pack((b"GET", b"a")),
        pack((b"GET", b"b")),
    ]
    data = b"".join([*sent, caching])
    assert scene.forwarder.forward(sink, data, 3, tracking_state=state) == len(data)
    assert state.is_caching_set
    assert scene.upstream.asked() == b"".join(sent[3:])
    for connection in scene.newer_connections:
        if asked := connection.asked():
            connection.batches[0].feed(b"$1\r\ns\r\n" * len(requests_in(asked)), 0, NEW)
    scene.upstream.batches[0].feed(b"+OK\r\n$1\r\na\r\n$1\r\nb\r\n", 0, NO_EPOCHS)
    value = [b"$1\r\n%b\r\n" % each for each in (b"s", b"s", b"a", b"b")]
    assert sink.replies == [b"".join([OK, *value[:2], OK, *value[2:], OK])]
    assert list(scene.tracking.clients_by_key) == [b"j:1" if mode == "is_optin" else b"j:2"]
    state.is_optin, state.is_optout = state.is_optout, state.is_optin
    assert scene.forwarder.forward(ForwarderSink(), caching, 3, tracking_state=state) == 0  # the general path's error


def test_repeated_requests_have_their_client_caching_before_them() -> None:
    scene, sink = Scene(), ForwarderSink()
    state = tracking_client(scene, "is_optin")
    state.is_caching_set = True
    data = pack((b"GET", of_slots(0))) + pack((b"GET", of_slots(1)))
    scene.forwarder.forward(sink, data, 2, tracking_state=state)
    assert not state.is_caching_set
    for connection, epochs in zip(scene.connections, (NEW, OLD), strict=True):
        connection.asked()
        connection.batches[0].feed(b"$1\r\na\r\n", 0, epochs)
    assert sink.again == [data]
    assert state.is_caching_set


texts = st.text(st.sampled_from("ab*?[\\:\n"), max_size=3)
formats = st.builds("{}<x>{}".format, texts, texts) | st.builds("{}<x>:{}<y>{}".format, texts, texts, texts) | texts
near = st.lists(st.sampled_from([b"a", b"b", b"*", b"?", b"[", b"\\", b":", b"\n", b"\xff"]), max_size=6).map(b"".join)
WRITES = (b"SET", b"DEL")


@given(
    formats=st.lists(formats, max_size=4),
    rules=st.lists(st.tuples(formats, st.sampled_from([Owner.STATE, Owner.UPSTREAM]), st.integers(0, 1)), max_size=3),
    database=st.integers(0, 2),
    asked=st.lists(
        st.one_of(
            st.tuples(st.just(b"GET"), near),
            st.tuples(st.just(b"MGET"), near, near),
            st.tuples(st.just(b"SET"), near, near),
            st.tuples(st.just(b"DEL"), near, near),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_requests_beside_upstream_go_to_owner_of_their_keys(
    formats: list[str], rules: list[tuple[str, Owner, int]], database: int, asked: list[tuple[bytes, ...]]
) -> None:
    """The forwarder stops at writes of states' keys and at keys of both backends; it leaves writes with states' reads.

    Rules are about one database. A database without rules has no keys of states.
    """
    owners = KeyMatcher(
        [OwnedFormat(text, "job:state") for text in formats],
        [Rule(text, KeyFormat.parse(text), owner, database=number) for text, owner, number in rules],
    )
    scene = Scene()
    scene.use_upstream(owners.key_owners)

    def side_of(words: tuple[bytes, ...]) -> str:
        keys = words[1:2] if words[0] in (b"GET", b"SET") else words[1:]
        sides = {"upstream" if owners.owner_of(key, database) is None else "states" for key in keys}
        return sides.pop() if len(sides) == 1 else "both"

    forwarded = list(
        takewhile(
            lambda words: side_of(words) == "upstream" or (side_of(words), words[0] in WRITES) == ("states", False),
            asked,
        )
    )
    sides = {side_of(words) for words in forwarded}
    if "states" in sides and any(words[0] in WRITES for words in forwarded):
        forwarded = []
    took = scene.forwarder.forward(ForwarderSink(), b"".join(map(pack, asked)), 2, database)
    assert took == len(b"".join(map(pack, forwarded)))
    of_upstream = b"".join(pack(words) for words in forwarded if side_of(words) == "upstream")
    asked_of_each = [each.asked() for each in scene.databases]
    assert asked_of_each == [of_upstream if number == database else b"" for number in range(3)]


def test_other_database_without_upstream_takes_general_path() -> None:
    scene = Scene()
    assert scene.forwarder.forward(ForwarderSink(), pack((b"GET", b"k")), 2, 1) == 0
    assert scene.forwarder.forward(ForwarderSink(), pack((b"GET", b"k")), 2, 0) == len(pack((b"GET", b"k")))


def test_requests_before_owners_are_known_take_general_path() -> None:
    scene = Scene()
    scene.use_upstream({})
    scene.forwarder.set_key_owners({}, [KeyOwner(b"*", None)])
    assert [scene.forwarder.forward(ForwarderSink(), pack((b"GET", b"k")), 2, database) for database in range(3)] == [
        0,
        0,
        0,
    ]


def test_first_pattern_of_key_decides() -> None:
    scene = Scene()
    scene.use_upstream({0: [KeyOwner(b"a:b", None), KeyOwner(b"a:*", Owner.STATE)]})
    for key, size in ((b"a:b", 0), (b"a:c", 22), (b"b:c", 22)):
        assert scene.forwarder.forward(ForwarderSink(), pack((b"GET", key)), 2) == size
    assert requests_in(scene.upstream.asked()) == [[b"GET", b"b:c"]]
    assert requests_in(scene.connection_of(b"a:c").asked()) == [[b"GET", b"a:c"]]


def test_client_with_dedicated_connection_takes_general_path() -> None:
    scene = Scene()
    scene.use_upstream({}, connection_of=lambda client, protocol, database: None)
    assert scene.forwarder.forward(ForwarderSink(), pack((b"GET", b"k")), 2) == 0


@given(
    asked=st.lists(
        st.sampled_from(
            [
                *((b"GET", b"u"), (b"SET", b"u", b"x"), (b"GET", b"j:1"), (b"MGET", b"j:1", b"j:2")),
                *((b"GET", b"c:1"), (b"get", b"c:1"), (b"MGET", b"c:1", b"c:2"), (b"GET", b"c:missing")),
                *((b"SET", b"c:1", b"x"), (b"MGET", b"c:1", b"u")),
            ]
        ),
        max_size=8,
    ),
    has_cache=st.booleans(),
    database=st.integers(0, 2),
)
def test_cached_replies_keep_order_of_requests(asked: list[tuple[bytes, ...]], has_cache: bool, database: int) -> None:
    """The forwarder stops at a request about keys of the cache that has no cached reply of the same database."""
    scene, sink = Scene(), ForwarderSink()
    cached = {
        read_of((b"GET", b"c:1"), 0, 2): b"$3\r\none\r\n",
        read_of((b"MGET", b"c:1", b"c:2"), 0, 2): b"*2\r\n$3\r\none\r\n$-1\r\n",
        read_of((b"GET", b"c:1"), 1, 2): b"$6\r\nin one\r\n",
    }
    of_each = [KeyOwner(b"j:*", Owner.STATE), KeyOwner(b"c:*", Owner.UPSTREAM, is_cached=True)]
    patterns = dict.fromkeys(range(3), of_each)
    cache = SimpleNamespace(get=cached.get, hits=0)
    scene.use_upstream(patterns, cache=cache if has_cache else None)
    asked = [(b"GET", b"u"), *asked]  # so that the batch waits for a reply

    def is_forwarded(words: tuple[bytes, ...]) -> bool:
        return words[1][:2] != b"c:" or (has_cache and read_of(words, database, 2) in cached)

    forwarded = list(takewhile(is_forwarded, asked))
    if any(words[0] == b"SET" for words in forwarded) and any(words[1][:2] == b"j:" for words in forwarded):
        forwarded = []
    assert scene.forwarder.forward(sink, b"".join(map(pack, asked)), 2, database) == len(b"".join(map(pack, forwarded)))
    for connection in (scene.databases[database], *scene.connections):
        replies = b"".join(
            b"+OK\r\n" if words[0] == b"SET" else reply_to(words) for words in requests_in(connection.asked())
        )
        for batch in connection.batches:
            batch.feed(replies, 0, NO_EPOCHS)
    expected = [
        b"+OK\r\n" if words[0] == b"SET" else cached.get(read_of(words, database, 2)) or reply_to(words)
        for words in forwarded
    ]
    assert sink.replies == ([b"".join(expected)] if forwarded else [])
    assert cache.hits == sum(words[1][:2] == b"c:" for words in forwarded)


def test_mget_of_state_keys_in_other_database_is_forwarded() -> None:
    scene, sink = Scene(), ForwarderSink()
    scene.use_upstream({0: [KeyOwner(b"*", Owner.UPSTREAM)]})
    data = pack((b"MGET", b"k", b"k"))
    assert scene.forwarder.forward(sink, data, 2, is_of_states=True) == len(data)
    assert requests_in(scene.connection_of(b"k").asked()) == [[b"STATE", b"MGET", b"k", b"k"]]


OF_STATES, OF_UPSTREAM = (b"GET", b"j:1"), (b"GET", b"u")
MULTI, EXEC = (b"MULTI",), (b"EXEC",)
QUEUED = [OF_UPSTREAM, (b"SET", b"u", b"1"), (b"MSET", b"u", b"1", b"v", b"2"), (b"EVAL", b"return 1", b"1", b"u")]
QUEUED += [OF_STATES, (b"STRLEN", b"j:1"), (b"EXISTS", b"j:1", b"j:1"), (b"MGET", b"j:1", b"j:1"), (b"GET", b"j:2")]
NOT_QUEUED: list[tuple[bytes, ...]] = [(b"SET", b"j:1", b"1"), (b"GET", b"s:1"), (b"PING",), (b"WATCH", b"u"), MULTI]


def is_forwarded(transaction: Sequence[tuple[bytes, ...]]) -> bool:
    """Return whether all commands of a transaction go over one connection."""
    if not transaction or any(words in NOT_QUEUED for words in transaction):
        return False
    return len({slot_of(words[1]) % 2 if words[1][:2] == b"j:" else 2 for words in transaction}) == 1


def with_patterns() -> Scene:
    scene = Scene()
    scene.use_upstream({0: [KeyOwner(b"j:*", Owner.STATE), KeyOwner(b"s:*", None)]})
    return scene


@given(
    transactions=st.lists(
        st.lists(st.sampled_from([*QUEUED, *QUEUED, *NOT_QUEUED]), max_size=3)
        | st.lists(st.sampled_from(QUEUED[:4]), max_size=5)
        | st.lists(st.sampled_from(QUEUED[4:8]), max_size=5),
        min_size=1,
        max_size=4,
    ),
    end=st.sampled_from([(), (MULTI,), (MULTI, OF_UPSTREAM), (EXEC,)]),
    cut=st.integers(0, 10),
)
def test_transaction_over_one_connection_is_sent_as_it_is(
    transactions: list[list[tuple[bytes, ...]]], end: tuple[tuple[bytes, ...], ...], cut: int
) -> None:
    """The forwarder stops at one over servers at different epochs, and at one without an EXEC in the same buffer."""
    scene, sink = with_patterns(), ForwarderSink()
    scene.cluster.epochs.is_aligned = False
    forwarded = [[MULTI, *each, EXEC] for each in takewhile(is_forwarded, transactions)]
    of_states = [words for each in forwarded for words in each if each[1][1][:2] == b"j:"]
    writes = any(words[0] in (b"SET", b"MSET", b"EVAL") for each in forwarded for words in each)
    if of_states and writes:
        forwarded = of_states = []
    data = b"".join(pack(words) for each in transactions for words in (MULTI, *each, EXEC))
    last = b"".join(map(pack, end))
    data += last[: max(0, len(last) - cut)]
    expected = b"".join(pack(words) for each in forwarded for words in each)
    assert scene.forwarder.forward(sink, data, 2) == len(expected)
    asked = [each.asked() for each in (scene.upstream, *scene.connections)]
    assert sum(map(len, asked)) == len(expected)
    assert asked[0] == b"".join(pack(words) for each in forwarded for words in each if each[1][1][:2] != b"j:")
    replies = b""
    for connection, some in zip((scene.upstream, *scene.connections), asked, strict=True):
        for batch in connection.batches:
            sent = [b"+%b\r\n" % words[0] for words in requests_in(some)]
            replies += b"".join(sent)
            assert batch.feed(b"".join(sent), 0, NEW) == len(b"".join(sent))
    assert sorted(b"".join(sink.replies).split(b"\r\n")) == sorted(replies.split(b"\r\n"))
    assert b"".join(sink.replies) == b"".join(b"+%b\r\n" % words[0] for each in forwarded for words in each)


READ_POINT = read_point({"job": (1, 2)}, 7)
DIVIDED = [(b"GET", b"j:1"), (b"GET", b"j:2"), (b"STRLEN", b"j:3"), (b"GET", b"j:four"), (b"ZUNION", b"1", b"j:5")]


def divided(commands: Sequence[tuple[bytes, ...]], at: int) -> list[tuple[bytes, ...]]:
    """Return the commands that one of the two servers gets."""
    return [words for words in commands if slot_of(words[-1]) % 2 == at]


def reply_to_part(commands: Sequence[tuple[bytes, ...]]) -> list[bytes]:
    """Return a server's replies to its part of a transaction."""
    queued = [b"+QUEUED\r\n"] * len(commands)
    return [OK, OK, *queued, b"*%d\r\n%b" % (len(commands), b"".join(map(reply_to, commands)))]


@given(
    lists=st.lists(st.lists(st.sampled_from(DIVIDED), min_size=1, max_size=6), min_size=1, max_size=3),
    between=st.booleans(),
    protocol=st.sampled_from([2, 3]),
    cut=st.integers(0, 1000),
)
def test_transaction_over_two_servers_is_divided(
    lists: list[list[tuple[bytes, ...]]], between: bool, protocol: int, cut: int
) -> None:
    """Each server gets its commands, to be read at one epoch; the replies are those to the whole."""
    scene, sink = Scene(), ForwarderSink()
    single, nil = [OF_STATES] * between, b"_\r\n" if protocol == 3 else b"$-1\r\n"
    data = b"".join(pack(words) for each in lists for words in (*single, MULTI, *each, EXEC))
    assert scene.forwarder.forward(sink, data, protocol) == len(data)
    for at, connection in enumerate(scene.connections if protocol == 2 else scene.newer_connections):
        expected, replies = b"", []
        for commands in lists:
            part = divided(commands, at)
            is_whole = part == commands
            expected += b"".join(map(pack, divided(single, at)))
            replies += map(reply_to, divided(single, at))
            if part:
                expected += READ_POINT * (not is_whole) + b"".join(map(pack, (MULTI, *part, EXEC)))
                replies += reply_to_part(part)[is_whole:]
        assert connection.asked() == expected
        for batch in connection.batches:
            received = b"".join(replies).replace(b"$-1\r\n", nil)
            end = cut % (len(received) + 1)
            took = batch.feed(received[:end], 0, NEW)
            assert batch.feed(received[took:], 0, NEW) == len(received) - took and batch.remaining == 0
    whole = [b"".join([*map(reply_to, single), *reply_to_part(each)[1:]]) for each in lists]
    assert b"".join(sink.replies) == b"".join(whole).replace(b"$-1\r\n", nil)
    assert sink.again == []


def two_parts() -> tuple[Scene, ForwarderSink, bytes]:
    """Forward a transaction over two servers."""
    scene, sink = Scene(), ForwarderSink()
    data = b"".join(map(pack, (OF_STATES, MULTI, (b"GET", of_slots(0)), (b"GET", of_slots(1)), EXEC)))
    assert scene.forwarder.forward(sink, data, 2) == len(data)
    for connection in scene.connections:
        connection.asked()
    return scene, sink, data


@pytest.mark.parametrize("line", [b"-NOEPOCH job 1:1\r\n", b"-EXECABORT x\r\n", b"+PONG\r\n"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_refused_transaction_part_resends_whole(line: bytes, at: int) -> None:
    scene, sink, data = two_parts()
    single = slot_of(OF_STATES[1]) % 2
    for number, connection in enumerate(scene.connections):
        (batch,) = connection.batches
        replies = [*[b"$1\r\na\r\n"] * (number == single), OK, OK, b"+QUEUED\r\n", b"*1\r\n$1\r\na\r\n"]
        before = len(replies) - 4 + at if number == 0 else len(replies)
        batch.feed(b"".join(replies[:before]), 0, NEW)
        if number == 0:
            request = batch.next_request()
            assert request.packed == pack((b"PING",))
            request.sink.put(request.index, line, NEW)
            batch.feed(b"".join(replies[before + 1 :]), 0, NEW)
        assert batch.remaining == 0
    assert (sink.again, sink.replies) == ([data], [])


@pytest.mark.parametrize(
    ("item", "is_resent"),
    [
        (b"-MOVED 1 here:2\r\n", True),
        (b"-TRYAGAIN x\r\n", True),
        (b"-WRONGTYPE x\r\n", False),
        (b"$1\r\nb\r\n:1\r\n", True),
    ],
)
def test_item_of_divided_transaction_is_reply_unless_slot_moved(item: bytes, is_resent: bool) -> None:
    scene, sink, data = two_parts()
    single = slot_of(OF_STATES[1]) % 2
    for number, connection in enumerate(scene.connections):
        (batch,) = connection.batches
        batch.feed(b"$1\r\na\r\n" * (number == single) + OK + OK + b"+QUEUED\r\n", 0, NEW)
        batch.take([b"*1\r\n" + (b"$1\r\na\r\n" if number else item)], NEW)
    first = b"$1\r\na\r\n" + OK + b"+QUEUED\r\n" * 2 + b"*2\r\n"
    assert sink.again == [data] * is_resent
    assert sink.replies == [first + item + b"$1\r\na\r\n"] * (not is_resent)


def test_transaction_over_uneven_epochs_takes_general_path() -> None:
    scene, sink = Scene(), ForwarderSink()
    one, both = [(b"GET", of_slots(0))] * 2, [(b"GET", of_slots(0)), (b"GET", of_slots(1))]
    scene.cluster.epochs.is_aligned = False
    data = [b"".join(map(pack, (MULTI, *each, EXEC))) for each in (one, both)]
    assert scene.forwarder.forward(sink, b"".join(data), 2) == len(data[0])
    scene.cluster.epochs.is_aligned = True
    assert scene.forwarder.forward(sink, b"".join(data), 2) == len(b"".join(data))


@pytest.mark.parametrize("is_newest", [True, False])
def test_keys_of_divided_transaction_are_recorded_at_newest_epoch(is_newest: bool) -> None:
    scene, sink, state = Scene(), ForwarderSink(), None
    state, keys = tracking_client(scene), [of_slots(0), of_slots(1)]
    data = b"".join(map(pack, (MULTI, *((b"GET", key) for key in keys), EXEC)))
    assert scene.forwarder.forward(sink, data, 2, tracking_state=state) == len(data)
    for connection in scene.connections:
        connection.asked()
        announced = scene.cluster.epochs.newest_shared if is_newest else NEW
        connection.batches[0].feed(b"".join([OK, OK, b"+QUEUED\r\n", b"*1\r\n$1\r\na\r\n"]), 0, announced)
    assert len(sink.replies) == 1
    assert sorted(scene.tracking.clients_by_key) == sorted(keys) * is_newest
    assert bool(invalidated(state)) is not is_newest


def test_transaction_beyond_batch_room_is_forwarded_later() -> None:
    scene, sink = Scene(), ForwarderSink()
    short = b"".join(map(pack, [MULTI, (b"GET", of_slots(0)), (b"GET", of_slots(1)), EXEC])) * 63
    for count in (3_900, 4_000, 5_000):
        last = b"".join(map(pack, [MULTI, *[(b"GET", of_slots(0))] * count, EXEC]))
        took = scene.forwarder.forward(sink, short + last, 2)
        assert took == len(short) or (count < 4_000 and took == len(short + last))


def test_slot_without_connection_in_clients_protocol_gets_one() -> None:
    scene = Scene()
    scene.cluster.slot_connections[3].numbers = bytes(SLOTS)
    data = b"".join(map(pack, (MULTI, (b"GET", b"k"), EXEC)))
    assert [scene.forwarder.forward(ForwarderSink(), data, protocol) for protocol in (2, 3)] == [len(data), 0]
    assert scene.connected == [3]


def test_long_transaction_is_forwarded_whole() -> None:
    scene, sink = Scene(), ForwarderSink()
    data = b"".join(map(pack, [MULTI, *[(b"GET", b"j:1"), (b"GET", b"j:2")] * 1000, EXEC]))
    assert scene.forwarder.forward(sink, data, 2) == len(data)
    assert scene.forwarder.forward(sink, data[:-1], 2) == 0 and scene.forwarder.has_partial


def test_transaction_keys_are_recorded_with_exec_reply() -> None:
    scene, sink = Scene(), ForwarderSink()
    state, key = tracking_client(scene), of_slots(0)
    data = b"".join(map(pack, (MULTI, (b"GET", key), (b"STRLEN", key), EXEC)))
    assert scene.forwarder.forward(sink, data, 2, tracking_state=state) == len(data)
    (batch,) = scene.connections[0].batches
    assert scene.connections[0].asked() == data
    batch.feed(b"+OK\r\n+QUEUED\r\n+QUEUED\r\n", 0, NEW)
    assert scene.tracking.keys == 0
    batch.feed(b"*2\r\n$1\r\na\r\n:1\r\n", 0, NEW)
    assert list(scene.tracking.clients_by_key) == [key]
    assert len(sink.replies) == 1


@pytest.mark.parametrize("end", [(EXEC,), (), ((b"CLIENT", b"CACHING", b"YES"), EXEC)])
def test_client_caching_precedes_its_transaction(end: Sequence[tuple[bytes, ...]]) -> None:
    scene, sink = with_patterns(), ForwarderSink()
    state, caching = tracking_client(scene, "is_optin"), pack((b"CLIENT", b"CACHING", b"YES"))
    transaction = b"".join(map(pack, (MULTI, OF_UPSTREAM, OF_UPSTREAM, *end)))
    is_forwarded = end == (EXEC,)
    took = scene.forwarder.forward(sink, caching + transaction, 2, tracking_state=state)
    assert took == len(caching) + is_forwarded * len(transaction)
    assert state.is_caching_set is not is_forwarded
    assert scene.upstream.asked() == (caching + transaction) * is_forwarded
    if is_forwarded:
        replies = b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n$1\r\na\r\n$1\r\na\r\n"
        scene.upstream.batches[0].feed(OK + replies, 0, NO_EPOCHS)
        assert sink.replies == [OK + replies]
        assert scene.tracking.keys == 0


def test_incomplete_transaction_may_become_forwardable() -> None:
    scene, data = with_patterns(), b"".join(map(pack, (MULTI, OF_UPSTREAM, EXEC)))
    ends = [end for end in range(1, len(data)) if scene.forwarder.forward(ForwarderSink(), data[:end], 2) == 0]
    assert ends == list(range(1, len(data)))
    assert (
        scene.forwarder.forward(ForwarderSink(), data[: len(pack(MULTI))], 2) == 0 and not scene.forwarder.has_partial
    )
    assert scene.forwarder.forward(ForwarderSink(), data[:-1], 2) == 0 and scene.forwarder.has_partial


@pytest.mark.parametrize("reply", [b"-MOVED 1 here:2\r\n", b"+PONG\r\n"])
def test_refused_transaction_is_resent_whole(reply: bytes) -> None:
    scene, sink = with_patterns(), ForwarderSink()
    data = b"".join(map(pack, (OF_STATES, MULTI, OF_STATES, EXEC)))
    assert scene.forwarder.forward(sink, data, 2) == len(data)
    connection = scene.connection_of(b"j:1")
    connection.asked()
    (batch,) = connection.batches
    batch.feed(b"$1\r\na\r\n+OK\r\n", 0, NEW)
    request = batch.next_request()
    assert isinstance(request, ServerRequest) and request.packed == pack((b"PING",)) and request.sends == 2
    request.sink.put(request.index, reply, NEW)
    assert (sink.again, sink.replies) == ([data], [])
    last = batch.next_request()
    last.sink.put(last.index, b"+PONG\r\n", NEW)
    assert (len(sink.again), sink.replies) == (1, [])


def test_error_within_transaction_of_upstream_is_its_reply() -> None:
    scene, sink = with_patterns(), ForwarderSink()
    data = b"".join(map(pack, (MULTI, (b"SET", b"u"), OF_UPSTREAM, EXEC)))
    assert scene.forwarder.forward(sink, data, 2) == len(data)
    scene.upstream.asked()
    (batch,) = scene.upstream.batches
    replies = [b"+OK\r\n", b"-ERR wrong number\r\n", b"+QUEUED\r\n", b"-EXECABORT discarded\r\n"]
    sent = b"".join(replies)
    assert batch.feed(sent, 0, NO_EPOCHS) == len(sent)
    assert sink.replies == [sent]


def test_redirects_and_former_masters_errors_take_general_path() -> None:
    error, readonly, moved = b"-ERR no\r\n", b"-READONLY replica\r\n", b"-MOVED 1 there:1\r\n"
    for follow, reply, is_taken in (
        (None, error, True),
        (None, LONG_INTEGER, True),
        (None, readonly, False),
        (lambda *arguments: None, moved, False),
    ):
        scene, sink = with_patterns(), ForwarderSink()
        scene.upstream.follow = follow
        assert scene.forwarder.forward(sink, pack(OF_UPSTREAM), 2)
        scene.upstream.asked()
        (batch,) = scene.upstream.batches
        for size in range(1, len(reply)):
            assert (batch.feed(reply[:size], 0, NO_EPOCHS), batch.remaining) == (0, 1)
        assert batch.feed(reply, 0, NO_EPOCHS) == (len(reply) if is_taken else 0)
        assert (sink.replies, batch.has_partial) == ([reply] if is_taken else [], False)


def test_watched_keys_are_those_after_last_exec() -> None:
    watch, transaction = (b"WATCH", b"u", b"v"), (MULTI, OF_UPSTREAM, EXEC)
    for may_watch, lines, expected in (
        (True, [watch, (b"WATCH", b"w")], [b"a", b"u", b"v", b"w"]),
        (True, [watch, *transaction], []),
        (True, [*transaction, watch], [b"u", b"v"]),
        (False, [watch], [b"a"]),
        (True, [MULTI, OF_STATES, EXEC], [b"a"]),  # EXEC has to compare keys at the upstream
    ):
        scene, data = with_patterns(), b"".join(map(pack, lines))
        scene.upstream.may_watch, scene.upstream.watched = may_watch, [b"a"]
        took = scene.forwarder.forward(ForwarderSink(), data, 2)
        assert took == (0 if expected == [b"a"] else len(data))
        assert scene.upstream.watched == expected


@pytest.mark.parametrize("is_caching_set", [False, True])
def test_watch_of_tracking_client_is_forwarded_except_after_client_caching(
    is_caching_set: bool,
) -> None:
    scene, sink = Scene(), ForwarderSink()
    scene.use_upstream({})
    state = tracking_client(scene, "is_optin")
    state.is_caching_set = is_caching_set
    scene.upstream.may_watch = True
    data = b"".join(map(pack, ((b"WATCH", b"u"), (b"GET", b"u"), MULTI, OF_UPSTREAM, EXEC)))
    assert scene.forwarder.forward(sink, data, 3, tracking_state=state) == len(data) * (not is_caching_set)
    assert scene.upstream.asked() == data * (not is_caching_set)


def test_transactions_of_watching_client_take_general_path() -> None:
    scene, sink = with_patterns(), ForwarderSink()
    sink.watches_states = True
    for lines in ((MULTI, OF_UPSTREAM, EXEC), (MULTI, OF_STATES, EXEC)):
        assert scene.forwarder.forward(sink, b"".join(map(pack, lines)), 2) == 0
    scene.upstream.watched, scene.upstream.is_dirty, sink.watches_states = [b"a"], True, False
    assert scene.forwarder.forward(sink, b"".join(map(pack, (MULTI, OF_UPSTREAM, EXEC))), 2) == 0


@pytest.mark.parametrize(
    ("line", "is_forwarded"),
    [
        ((b"MSET", b"u", b"j:1", b"v", b"j:2"), True),
        ((b"MSET", b"u", b"1", b"j:1", b"2"), False),
        ((b"SINTERSTORE", b"u", b"v", b"w"), True),
        ((b"SINTERSTORE", b"u", b"v", b"j:1"), False),
        ((b"SINTERSTORE", b"u"), False),
        ((b"ZUNION", b"2", b"u", b"v", b"WEIGHTS", b"1", b"2"), True),
        ((b"ZUNION", b"1", b"u", b"j:1"), True),
        ((b"ZUNION", b"2", b"u", b"j:1"), False),
        ((b"ZUNION", b"3", b"u", b"v"), False),
        ((b"ZUNION", b"02", b"u", b"v"), False),
        ((b"ZUNION", b"1", b"j:1"), True),
        ((b"ZUNION", b"2", b"j:1", b"j:1"), True),
        ((b"EVAL", b"j:1", b"1", b"u", b"j:1"), True),
        ((b"EVAL", b"return 1", b"0", b"j:1"), True),
        ((b"EVAL", b"return 1", b"1", b"j:1"), False),
        ((b"EVAL", b"return 1"), False),
        ((b"EVAL", b"return 1", b"-1", b"u"), False),
        ((b"PUBLISH", b"j:1", b"m"), True),
    ],
)
def test_keys_of_request_are_at_positions_of_its_row(line: tuple[bytes, ...], is_forwarded: bool) -> None:
    scene = with_patterns()
    assert scene.forwarder.forward(ForwarderSink(), pack(line), 2) == (len(pack(line)) if is_forwarded else 0)


def test_keyless_write_takes_general_path() -> None:
    scene = Scene()
    scene.use_upstream({0: [KeyOwner(b"c:*", Owner.UPSTREAM, is_cached=True)]})
    for line in ((b"EVAL", b"return 1", b"0"), (b"PUBLISH", b"c", b"m")):
        assert scene.forwarder.forward(ForwarderSink(), pack(line), 2) == 0
    scene.forwarder.set_key_owners({}, [KeyOwner(b"*", None)])  # the owners are not known
    assert scene.forwarder.forward(ForwarderSink(), pack((b"EVAL", b"return 1", b"0")), 2) == 0


TABLE = command_table()
arguments = st.sampled_from(
    [b"u", b"v", b"j:1", b"j:1", b"0", b"1", b"2", b"-1", b"BLOCK", b"STORE", b"STREAMS", b"KEYS"]
)
any_request = st.tuples(
    st.sampled_from(sorted(each.name.encode() for each in TABLE.with_subcommands())), st.lists(arguments, max_size=6)
).map(lambda parts: (*parts[0].split(b"|"), *parts[1]))


@cache
def with_all_commands() -> tuple[Scene, RoutingTable]:
    owners, commands = KeyMatcher([OwnedFormat("j:<x>", "job:state")]), OverlayCommands(TABLE)
    scene = Scene(CommandRoutes(TABLE, Stats()).state_forward_specs())
    rows = [(*each, CommandStats()) for each in commands.upstream_forward_specs()]
    scene.use_upstream(owners.key_owners, rows=rows)
    return scene, RoutingTable(commands, owners, True, GetkeysCache(), 0)


@given(line=any_request)
@settings(max_examples=examples(500))
def test_forwarder_and_router_choose_same_server(line: tuple[bytes, ...]) -> None:
    """The rows of all commands: the forwarder finds the same keys as the general path, or leaves the request to it."""
    scene, table = with_all_commands()
    if not scene.forwarder.forward(ForwarderSink(), pack(line), 2):
        return
    route = route_of(line, table)
    asked_upstream = scene.upstream.asked()
    if asked_upstream:
        assert type(route) is UpstreamRoute and route.request is None and not route.is_blocking
        assert asked_upstream == pack(line)
    else:
        assert type(route) is StatesRoute and any([each.asked() for each in scene.connections])  # noqa: C419 -- all of them


def test_publishing_requests_are_held_before_others() -> None:
    scene = Scene()
    scene.use_upstream({})
    scene.forwarder.hold(False, True)
    for line in ((b"EVAL", b"return 1", b"1", b"u"), (b"PUBLISH", b"c", b"m"), (b"GET", b"u")):
        took = scene.forwarder.forward(ForwarderSink(), pack(line), 2)
        assert took == (len(pack(line)) if line[0] == b"GET" else 0)
        assert scene.forwarder.forward(ForwarderSink(), b"".join(map(pack, (MULTI, line, EXEC))), 2) == (
            took and took + len(pack(MULTI) + pack(EXEC))
        )


@pytest.mark.parametrize("reply", [b"-ERR no\r\n", b"$1\r\n1\r\n"])
def test_count_of_keys_fails_with_one_of_its_parts(reply: bytes) -> None:
    keys = [next(key for key in (b"%d" % n for n in range(99)) if slot_of(key) % 2 == at) for at in range(2)]
    for wrong in range(2):
        scene, sink = Scene(), ForwarderSink()
        assert scene.forwarder.forward(sink, pack((b"EXISTS", *keys)), 2)
        for at, connection in enumerate(scene.connections):
            assert connection.asked() == pack((b"EXISTS", keys[at]))
            (batch,) = connection.batches
            if at != wrong:
                batch.feed(b":1\r\n", 0, NEW)
            elif reply[:1] == b"-":
                request = batch.next_request()
                request.sink.put(request.index, reply, NEW)
            else:
                batch.feed(reply, 0, NEW)
        assert sink.replies == [reply if reply[:1] == b"-" else b"-ERR a server's reply has an unexpected form\r\n"]


class NodeConnections:
    """Stands for the connections to the nodes of a Redis Cluster: node 1 has the even slots, 2 others; 0 and 1 none."""

    node_numbers = bytes([0, 0] + [1, 2] * (SLOTS // 2 - 1))

    has_watched = is_dirty = False

    def __init__(self) -> None:
        self.nodes = [ServerConnection(), ServerConnection()]

    def node_connection(self, number: int) -> ServerConnection:
        return self.nodes[number - 1]


@given(
    asked=st.lists(
        st.one_of(
            st.tuples(st.just(b"GET"), near),
            st.tuples(st.just(b"MGET"), near, near),
            st.tuples(st.just(b"SET"), near, near),
            st.tuples(st.just(b"DEL"), near, near),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_requests_for_cluster_go_to_nodes_of_their_slots(asked: list[tuple[bytes, ...]]) -> None:
    """The forwarder stops at keys of several slots, and at a slot without a node."""
    scene, upstream = Scene(), NodeConnections()
    scene.use_upstream({}, connection_of=lambda client, protocol, database: upstream)

    def slots_of(words: tuple[bytes, ...]) -> set[int]:
        return set(map(slot_of, words[1:2] if words[0] in (b"GET", b"SET") else words[1:]))

    forwarded = list(takewhile(lambda words: len(slots_of(words)) == 1 and min(slots_of(words)) > 1, asked))
    assert scene.forwarder.forward(ForwarderSink(), b"".join(map(pack, asked)), 2) == len(
        b"".join(map(pack, forwarded))
    )
    for number, node in enumerate(upstream.nodes):
        assert node.asked() == b"".join(pack(words) for words in forwarded if min(slots_of(words)) % 2 == number)


def test_redirected_request_follows_redirects() -> None:
    scene, upstream, sink = Scene(), NodeConnections(), ForwarderSink()
    followed = []
    upstream.nodes[0].follow = upstream.nodes[1].follow = lambda request, client, protocol: followed.append(
        (request.packed, client, protocol)
    )
    scene.use_upstream({}, connection_of=lambda client, protocol, database: upstream)
    data = pack((b"SET", b"k", b"v"))
    assert scene.forwarder.forward(sink, data, 2) == len(data)
    node = upstream.nodes[slot_of(b"k") % 2]
    assert node.asked() == data
    (batch,) = node.batches
    assert batch.feed(b"-MOVED 1 here:2\r\n", 0, NO_EPOCHS) == 0
    request = batch.next_request()
    assert followed == [(data, 1, 2)] and not request.is_read
    request.sink.put(request.index, b"+OK\r\n")
    assert sink.replies == [b"+OK\r\n"]


@pytest.mark.parametrize("other", [b"k", b"l"])
def test_transaction_is_forwarded_to_node_of_all_its_keys(other: bytes) -> None:
    scene, upstream, sink = Scene(), NodeConnections(), ForwarderSink()
    upstream.nodes[0].follow = upstream.nodes[1].follow = lambda request, client, protocol: None
    scene.use_upstream({}, connection_of=lambda client, protocol, database: upstream)
    data = b"".join(map(pack, (MULTI, (b"GET", b"k"), (b"SET", other, b"v"), EXEC)))
    is_of_one_node = slot_of(other) % 2 == slot_of(b"k") % 2
    assert scene.forwarder.forward(sink, data, 2) == len(data) * is_of_one_node
    if is_of_one_node:
        node = upstream.nodes[slot_of(b"k") % 2]
        assert node.asked() == data
        node.batches[0].fail_all(UnansweredError("lost"))
        assert (sink.replies, sink.ended) == ([], [b""])


@given(reads=st.lists(st.booleans(), min_size=1, max_size=8), answered=st.integers(0, 8))
def test_lost_upstream_ends_client_before_reply_of_first_write(reads: list[bool], answered: int) -> None:
    scene, sink = Scene(), ForwarderSink()
    scene.use_upstream({})
    scene.forwarder.forward(
        sink, b"".join(pack((b"GET", b"k") if is_read else (b"SET", b"k", b"v")) for is_read in reads), 2
    )
    scene.upstream.asked()
    (batch,) = scene.upstream.batches
    answered = min(answered, len(reads))
    batch.feed(b"$1\r\n1\r\n" * answered, 0, NO_EPOCHS)
    again = []
    for is_read in reads[answered:]:
        request = batch.next_request()
        assert isinstance(request, UpstreamRequest) and request.is_read == is_read and request.sends == 1
        if is_read:
            again.append(request)
        else:
            request.sink.fail(request.index, UnansweredError("lost"))
    for request in again[:-1]:
        request.sink.put(request.index, b"$1\r\n2\r\n")
    for request in again[-1:]:
        request.sink.fail(request.index, TryAgainError("still lost"))
    expected = [b"$1\r\n1\r\n"] * answered + [b"$1\r\n2\r\n"] * len(reads[answered:])
    if again:
        last = max(at for at, is_read in enumerate(reads) if is_read and at >= answered)
        expected[last] = b"-TRYAGAIN still lost\r\n"
    first_lost = next((at for at, is_read in enumerate(reads) if at >= answered and not is_read), len(reads))
    replies = b"".join(expected[:first_lost])
    assert (sink.replies, sink.ended) == ([replies], []) if first_lost == len(reads) else ([], [replies])


@given(
    replies=st.lists(
        st.sampled_from(
            [
                b"_\r\n",
                b"#t\r\n",
                b",1.5\r\n",
                b"(123\r\n",
                b"%1\r\n+a\r\n:1\r\n",
                b"~2\r\n$1\r\na\r\n_\r\n",
                b"*1\r\n%0\r\n",
            ]
        ),
        min_size=1,
        max_size=5,
    ),
    cut=st.integers(0, 100),
)
def test_replies_of_newer_protocol_are_cut_as_frames_cuts_them(replies: list[bytes], cut: int) -> None:
    sent = b"".join(replies)[:cut]
    scene, sinks = Scene(), [ForwarderSink() for _ in replies]
    scene.use_upstream({})
    for sink in sinks:
        scene.forwarder.forward(sink, pack((b"GET", b"k")), 3)
    scene.upstream.asked()
    took = scene.upstream.batches[0].feed(sent, 0, NO_EPOCHS)
    frames = ReplySplitter(1 << 20)
    found = frames.feed(sent)
    assert [reply for sink in sinks for reply in sink.replies] == found
    assert took == len(b"".join(map(as_bytes, found)))


def test_newer_protocol_has_connections_of_its_own() -> None:
    scene, sink = Scene(), ForwarderSink()
    data = pack((b"GET", b"k")) + pack((b"STRLEN", b"k"))
    assert scene.forwarder.forward(sink, data, 3) == len(data)
    assert not any(each.asked() for each in scene.connections)
    connection = scene.newer_connections[scene.connections.index(scene.connection_of(b"k"))]
    assert connection.asked() == data
    connection.batches[0].feed(b"_\r\n:0\r\n", 0, NEW)
    assert sink.replies == [b"_\r\n:0\r\n"]
    assert result_of(items_of(b"*1\r\n$-1\r\n")) == [b"$-1\r\n"]
