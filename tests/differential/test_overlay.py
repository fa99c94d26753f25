"""Random steps of several clients: an overlay answers each of them as one Redis that has all keys.

`tests/worlds.py` has the worlds, and the reference. Each client has a twin at the reference, which does the same. Their
replies are equal to the byte, and so are messages, invalidations and notifications, but for the moment at which they
arrive. Writes of states' keys are refused, and do nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from select import select
from typing import ClassVar, NamedTuple

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from compat.conformance.generators import checked
from compat.conformance.wire import Connection, Reply, Words, requests
from compat.waiting import eventually
from tests import worlds
from tests.differential.through_a_swap import GIVEN, LINES
from tests.worlds import ACCOUNTS, CARS, MEMBERS, METRICS, World, Written

CLIENTS_MAX = 4
# A reply that does not come ends the test after this time.
REPLY_S_MAX = 60.0

KEYS = ["s", "n", "h", "l", "set", "z", "x", "other", "job:speed", "dash/7", "car"]
WORDS = ["0", "1", "-1", "2", "a", "b", "10", "1.5", "", "nan", "(1", "-", "+", "*", "9223372036854775807"]
# In a table of hashes, their items have another order at each server, and what expires does so at another time.
UNEQUAL = ("EXPIRE K W", "SADD K W", "PUBLISH W W", "PUBSUB NUMSUB W")
OF_UPSTREAM = [line for line in LINES if line not in UNEQUAL]
OF_UPSTREAM += ["EXPIRE K 1000", "EXPIRE K -1", "EXPIRE K x", "SADD K 4 5", "CLIENT CACHING yes", "CLIENT CACHING no"]
OF_UPSTREAM += ["GET Q", "INCR Q", "STRLEN Q", "EXISTS Q", "SET Q W", "SET Q W"]
# S, H, T and Z are keys of states: a string, a hash, a set, a sorted set, and N is any.
READS = """
GET F|MGET F K S F|EXISTS F F K|STRLEN F|TYPE F|TTL F|TOUCH F S
GET S|GET S|GET N|MGET S K S|MGET N S Q|EXISTS N K N|TOUCH S K|STRLEN S|GETRANGE S 0 W|TYPE N|TTL N|PTTL S|SUBSTR S 0 1
HGET H errors|HGET H W|HMGET H errors W users|HGETALL H|HLEN H|HEXISTS H users|HKEYS H|HVALS H|HSTRLEN H users|HGET S a
SISMEMBER T a|SMISMEMBER T a W|SCARD T|SCARD S|SINTERCARD 1 T
ZSCORE Z a|ZMSCORE Z a W c|ZRANGE Z 0 -1|ZRANGE Z 0 W WITHSCORES|ZRANGEBYSCORE Z W +inf|ZRANK Z b|ZREVRANK Z c|ZCARD Z
ZCOUNT Z - W|LRANGE S 0 -1|LLEN H|GET H|GET|STRLEN S W
""".replace("\n", "|").strip("|")
WRITES = """
SET S W|DEL N|DEL K N K|UNLINK K S|MSET K W S W|MSETNX K W S W|EXPIRE S 5|RENAME K S|RENAME S K|COPY S K|LPUSH S W
INCR S
SADD T W|ZADD Z 1 W|HSET H a W|APPEND S W|SINTERSTORE K K T|SORT K STORE S|EVAL return(1) 2 K S|EVALSHA ffff 1 S
GETDEL S
BLPOP K S 0.001|BRPOPLPUSH S K 0.001|LMOVE K S LEFT LEFT|XREAD BLOCK 1 STREAMS S 0|XADD S 1-1 a W|PFADD S a
SETRANGE S 0 W|GETEX S EX 5
""".replace("\n", "|").strip("|")
STRINGS = [*(f"job:speed:{car}" for car in CARS), *(f"car/{car}" for car in CARS), "job:speed:absent", "dash/7/apdex"]
HASHES, SET, SORTED_SET = [f"job:facts:{each.decode()}" for each in ACCOUNTS], "job:ids:1", "job:top:1"
FACTS = [f"fact/{account.decode()}/{metric.decode()}" for account in ACCOUNTS for metric in METRICS]
OWNED = re.compile(rb"-ERR key '[^']+' is owned by state job:\w+\r\n")
BLOCKING = """
BLPOP K l 0|BRPOP l 0|BLMOVE l K LEFT RIGHT 0|BRPOPLPUSH l K 0|BLMPOP 0 2 K l LEFT|BZPOPMIN z 0|BZPOPMAX K z 0
BZMPOP 0 1 z MIN
XREAD BLOCK 0 STREAMS x $|BLPOP l 0
""".replace("\n", "|").strip("|")
PUSHES = "RPUSH l W|RPUSH l a b c|LPUSH l W|ZADD z 1.5 a|ZADD z 1 b 2 c|XADD x * a W|RPUSH l 1|DEL l|DEL z"
SUBSCRIPTIONS = """
SUBSCRIBE C|SUBSCRIBE C C|UNSUBSCRIBE C|PSUBSCRIBE P|PSUBSCRIBE P P|PUNSUBSCRIBE P|SSUBSCRIBE C|SUNSUBSCRIBE C|PING W
RESET
""".replace("\n", "|").strip("|")
CHANNELS, PATTERNS = (
    ["a", "b", "ab", "job:speed:1"],
    ["a*", "?", "job:*", "__keyspace@0__:[jdc]*", "__keyevent@?__:zadd"],
)
MESSAGES = "PUBLISH C W|PUBLISH C W|SPUBLISH C W|PUBSUB NUMSUB C C|PUBSUB NUMPAT|PUBSUB SHARDNUMSUB C"
TRACKING = ["", "OPTIN", "OPTOUT", "NOLOOP", "BCAST", "BCAST PREFIX job: PREFIX s", "BCAST NOLOOP PREFIX ca"]
ASYNC = (b"message", b"pmessage", b"smessage", b"invalidate")
# No two values of states are the same, so that each epoch changes what it writes.
VALUES = count(1000)


class Line(NamedTuple):
    """A request. is_refused: it would write a state's key."""

    words: Words
    is_refused: bool = False


def lines(templates: str | Sequence[str], *, are_refused: bool = False) -> st.SearchStrategy[Line]:
    """Draw a request."""
    chosen = {
        "K": st.sampled_from(KEYS),
        "W": st.sampled_from(WORDS),
        "C": st.sampled_from(CHANNELS),
        "P": st.sampled_from(PATTERNS),
        "S": st.sampled_from(STRINGS),
        "H": st.sampled_from(HASHES),
        "T": st.just(SET),
        "Z": st.just(SORTED_SET),
        "N": st.sampled_from([*STRINGS, *HASHES, SET, SORTED_SET]),
        "F": st.sampled_from(FACTS),
        "Q": st.just("cached:CLIENT:1"),
    }

    @st.composite
    def line(draw: st.DrawFn) -> Line:
        parts = draw(st.sampled_from(templates.split("|") if isinstance(templates, str) else templates)).split(" ")
        words = [GIVEN[part] if part in GIVEN else (draw(chosen[part]) if part in chosen else part) for part in parts]
        encoded = [word if isinstance(word, bytes) else word.encode() for word in words]
        return Line([word.replace(b"_", b" ") if b"return_" in word else word for word in encoded], are_refused)

    return line()


ANY_LINES = st.lists(
    st.one_of(lines(OF_UPSTREAM), lines(READS), lines(READS), lines(WRITES, are_refused=True)), min_size=1, max_size=8
)
CLIENT = st.integers(0, CLIENTS_MAX - 1)
CHANGES = st.lists(
    st.one_of(
        st.builds(lambda car: worlds.speed(car, b"%d" % next(VALUES)), st.sampled_from(CARS)),
        st.builds(lambda car: worlds.speed(car, None), st.sampled_from(CARS)),
        st.builds(lambda account: worlds.apdex(account, b"0.%d" % next(VALUES)), st.sampled_from(ACCOUNTS)),
        st.builds(
            lambda *of: worlds.fact(*of, b"%d" % next(VALUES)), st.sampled_from(ACCOUNTS), st.sampled_from(METRICS)
        ),
        st.builds(lambda member: worlds.score(member, next(VALUES)), st.sampled_from(MEMBERS)),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda each: each.keys[0],
)


class Side:
    """One connection of a client: to the world's program, or to the reference."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        connection._socket.settimeout(REPLY_S_MAX)
        self.pushes: list[Reply] = []
        self._replies: list[Reply] = []

    def read(self) -> Reply:
        """Return the next reply; what is pushed before it is kept apart."""
        while not self._replies:
            self._take(self.connection.read())
        return self._replies.pop(0)

    def has_reply(self) -> bool:
        """Read all that has arrived; return whether there is a reply in it."""
        while self.connection._buffered or select([self.connection], [], [], 0)[0]:
            self._take(self.connection.read())
        return bool(self._replies)

    def _take(self, frame: Reply) -> None:
        is_pushed = frame.type in ">*" and frame.value and frame.value[0].value in ASYNC
        (self.pushes if is_pushed else self._replies).append(frame)

    def pushed(self) -> Counter[object]:
        """Return what was pushed, read up to now: messages, and each invalidated key."""
        found: Counter[object] = Counter()
        for frame in self.pushes:
            kind, *rest = frame.plain
            if kind == b"invalidate":
                found.update((kind, key) for key in (rest[0] if rest[0] is not None else [None]))
            else:
                found[frame.raw] += 1
        return found


class Client:
    """A client of the world, and its twin at the reference."""

    def __init__(self, world: World, number: int, protocol: int) -> None:
        self._world, self._number, self.protocol = world, number, protocol
        self.through, self.alone = Side(world.connect()), Side(world.reference.connect())
        self.id = self.alone.connection.call("CLIENT", "ID").plain
        for side in (self.through, self.alone):
            assert not side.connection.call("HELLO", protocol).is_error
        self.is_blocked = self.is_tracking = self.is_watching = False

    def leave(self) -> None:
        """Close both connections."""
        for side in (self.through, self.alone):
            side.connection.__exit__()

    def facts(self) -> dict[str, str]:
        """Return what the reference knows of the client."""
        with self._world.reference.connect() as direct:
            row = direct.call("CLIENT", "LIST", "ID", self.id).plain.decode()
        return dict(part.split("=", 1) for part in row.split())

    @property
    def is_subscribed(self) -> bool:
        """Whether it has subscriptions."""
        facts = self.facts()
        return any(facts[each] != "0" for each in ("sub", "psub", "ssub") if each in facts)

    @property
    def is_free(self) -> bool:
        """Whether it may send any request, and each has one reply."""
        facts = self.facts()
        return not self.is_blocked and facts["multi"] == "-1" and not (self.protocol == 2 and self.is_subscribed)

    def ask(self, asked: Sequence[Line], cuts: Sequence[int] = (), count: int = 1) -> None:
        """Send a pipeline in chunks to both, and compare the replies. count: the number of replies to each request."""
        facts = self.facts()
        owns = facts["db"] == "0"
        named = [[word.replace(b"CLIENT", b"%d" % self._number) for word in line.words] for line in asked]
        data = requests(named)
        at = 0
        for end in [*sorted(cut % len(data) for cut in cuts), len(data)]:
            self.through.connection.send(data[at:end])
            at = end
        # A request that is refused is one at the reference, too: it does nothing, and aborts a transaction.
        alone = [[b"SET"] if line.is_refused and owns else words for line, words in zip(asked, named, strict=True)]
        self.alone.connection.send(requests(alone))
        expected = [self.alone.read() for _ in range(count * len(asked))]
        found = [self.through.read() for _ in expected]
        for line, words, one, other in zip(list(asked) * count, named * count, found, expected, strict=True):
            if line.is_refused and owns:
                is_owned = OWNED.fullmatch(one.raw) or (self.protocol == 2 and one.is_error)
                assert other.is_error and is_owned, (words, one.raw)
            else:
                assert one.raw == other.raw, (words, one.raw, other.raw)


class Overlay(RuleBasedStateMachine):
    """Clients of one world; each step is one client's, or an epoch of the states."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.world.clear()
        self._numbers = count()
        self.clients: list[Client] = []

    def teardown(self) -> None:
        """Let all clients leave, and wait until the servers know."""
        for client in self.clients:
            client.leave()
        self._wait_for_blocked(0)

    def _client(self, number: int) -> Client:
        return self.clients[number % len(self.clients)]

    @initialize()
    def begin(self) -> None:
        """Begin with a client of each protocol."""
        for protocol in (2, 3):
            self.clients.append(Client(self.world, next(self._numbers), protocol))

    @rule(protocol=st.sampled_from([2, 3]))
    def connect(self, protocol: int) -> None:
        """One more client."""
        if len(self.clients) < CLIENTS_MAX:
            self.clients.append(Client(self.world, next(self._numbers), protocol))

    @rule(number=CLIENT)
    def leave(self, number: int) -> None:
        """A client leaves, whatever it is doing."""
        if len(self.clients) > 2:
            client = self._client(number)
            self.clients.remove(client)
            client.leave()
            if client.is_blocked:
                self._wait_for_blocked(sum(each.is_blocked for each in self.clients))

    @rule(number=CLIENT, asked=ANY_LINES, cuts=st.lists(st.integers(0, 10_000), max_size=3))
    def ask(self, number: int, asked: list[Line], cuts: list[int]) -> None:
        """A client sends a pipeline."""
        client = self._client(number)
        if not client.is_blocked:
            client.ask(asked, cuts)

    @rule(number=CLIENT, database=st.sampled_from(["0", "0", "1", "2", "99", "x", ""]))
    def select(self, number: int, database: str) -> None:
        """A client selects a database; an overlay refuses it of one that watches, listens or tracks."""
        client = self._client(number)
        if not (client.is_blocked or client.is_watching or client.is_tracking or client.is_subscribed):
            client.ask([Line([b"SELECT", database.encode()])])

    @rule(number=CLIENT, keys=st.lists(st.sampled_from([*KEYS, *STRINGS, *HASHES, *FACTS, SET]), max_size=3))
    def watch(self, number: int, keys: list[str]) -> None:
        """A client watches keys; no keys: it is an error."""
        if not (client := self._client(number)).is_blocked:
            client.ask([Line([b"WATCH", *(key.encode() for key in keys)])])
            client.is_watching = True

    @rule(
        number=CLIENT,
        asked=ANY_LINES,
        end=st.sampled_from([None, "EXEC", "EXEC", "EXEC", "DISCARD", "RESET", "EXEC x"]),
    )
    def transact(self, number: int, asked: list[Line], end: str | None) -> None:
        """A client queues requests; it ends the transaction now, or later."""
        client = self._client(number)
        if not client.is_blocked:
            begin = [] if client.facts()["multi"] != "-1" else [Line([b"MULTI"])]
            client.ask([*begin, *asked, *([Line(end.encode().split())] if end else [])])
            client.is_watching &= end in (None, "EXEC x")
            self._note_reset(client, end or "")

    @staticmethod
    def _note_reset(client: Client, line: str) -> None:
        if line == "RESET":
            client.protocol, client.is_tracking, client.is_watching = 2, False, False

    @rule(changes=CHANGES)
    def publish(self, changes: list[Written]) -> None:
        """The states change."""
        self.world.publish(*changes)

    @rule(number=CLIENT, options=st.sampled_from(TRACKING))
    def track(self, number: int, options: str) -> None:
        """A client of RESP3 begins to track keys, or ends it."""
        client = self._client(number)
        if client.protocol == 3 and client.is_free:
            is_on = not client.is_tracking
            words = f"CLIENT TRACKING ON {options}" if is_on else "CLIENT TRACKING OFF"
            client.ask([Line(words.encode().split())])
            client.is_tracking = is_on

    @rule(number=CLIENT, line=lines(SUBSCRIPTIONS))
    def subscribe(self, number: int, line: Line) -> None:
        """A client changes its subscriptions."""
        client = self._client(number)
        if client.is_blocked or client.facts()["multi"] != "-1":
            return
        name = line.words[0].decode()
        client.ask([line], count=max(1, len(line.words) - 1))
        self._note_reset(client, name)

    @rule(number=CLIENT, line=lines(MESSAGES))
    def send_message(self, number: int, line: Line) -> None:
        """A client sends a message, or asks for subscriptions."""
        if not (client := self._client(number)).is_blocked:
            client.ask([line])

    @rule(number=CLIENT, line=lines(BLOCKING))
    def block(self, number: int, line: Line) -> None:
        """A client blocks until another one writes."""
        client = self._client(number)
        if not client.is_free:
            return
        before = sum(each.is_blocked for each in self.clients)
        client.alone.connection.send(requests([line.words]))
        eventually(lambda: client.alone.has_reply() or self._blocked_alone() > before)
        client.through.connection.send(requests([line.words]))
        if client.alone.has_reply():
            assert client.through.read().raw == client.alone.read().raw
        else:
            client.is_blocked = True
            self._wait_for_blocked(before + 1)

    @rule(number=CLIENT, asked=st.lists(lines(PUSHES), min_size=1, max_size=3))
    def push(self, number: int, asked: list[Line]) -> None:
        """A client writes keys that others block for."""
        client = self._client(number)
        if not client.is_blocked and not any(b"*" in line.words for line in asked):
            client.ask(asked)

    def _blocked_alone(self) -> int:
        with self.world.reference.connect() as direct:
            return blocked_at(direct)

    def _wait_for_blocked(self, number: int) -> None:
        for nodes in (self.world.upstream.nodes, [self.world.reference]):
            with ExitStack() as stack:
                directs = [stack.enter_context(node.connect()) for node in nodes]
                eventually(lambda: sum(map(blocked_at, directs)), lambda found: found == number)  # noqa: B023

    @rule(number=CLIENT)
    def list_keys(self, number: int) -> None:
        """A client lists and counts the keys, and draws one."""
        client = self._client(number)
        if not client.is_free or client.is_subscribed:
            return
        keys = [set(each.connection.call("KEYS", "*").plain) for each in self._sides(client)]
        assert keys[0] == keys[1]
        assert set(scanned(client.through)) == keys[1]
        sizes = [each.connection.call("DBSIZE").plain for each in self._sides(client)]
        if client.facts()["db"] == "0":
            sizes[1] += self.world.copies - self.world.aliases()
        assert sizes[0] == sizes[1]
        drawn = client.through.connection.call("RANDOMKEY").plain
        assert drawn in keys[1] if keys[1] else drawn is None

    @staticmethod
    def _sides(client: Client) -> tuple[Side, Side]:
        return client.through, client.alone

    @invariant()
    def all_get_the_same(self) -> None:
        """Clients that are unblocked get the same reply, and all clients the same messages and invalidations."""
        with self.world.reference.connect() as direct:
            direct.call("PING")  # what the step before has caused has been sent
        for client in self.clients:
            if client.alone.has_reply():
                assert client.is_blocked
                assert client.through.read().raw == client.alone.read().raw
                client.is_blocked = False
        for client in self.clients:
            expected = client.alone.pushed()

            def arrived(client: Client = client) -> Counter[object]:
                assert not client.through.has_reply(), "a reply to no request"
                return client.through.pushed()

            eventually(arrived, lambda found, expected=expected: found >= expected, timeout_s=REPLY_S_MAX)  # type: ignore[misc]
            assert client.through.pushed() == expected


def blocked_at(direct: Connection) -> int:
    """Return the number of a server's blocked clients."""
    found = re.search(rb"\r\nblocked_clients:(\d+)\r\n", direct.call("INFO", "clients").plain)
    assert found is not None
    return int(found[1])


def scanned(side: Side) -> list[bytes]:
    """Return all keys of a scan."""
    found, cursor = [], b"0"
    while True:
        cursor, keys = side.connection.call("SCAN", cursor, "COUNT", "7").plain
        found += keys
        if cursor == b"0":
            return found


WORLDS = [
    ("proxy", "single"),
    ("serve", "single"),
    pytest.param(("proxy", "TLS"), marks=pytest.mark.slow),
    pytest.param(("proxy", "Sentinel"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: "-".join(world))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("world"), stack, *request.param, "--upstream-connections", "2")


def test_overlay_answers_as_one_redis_with_all_keys(world: World) -> None:
    Overlay.world = world
    # Without shrinking: a step without a reply would be tried hundreds of times, and each time waited for.
    once = settings(checked(40), stateful_step_count=30, phases=[Phase.generate], report_multiple_bugs=False)
    run_state_machine_as_test(Overlay, settings=once)
