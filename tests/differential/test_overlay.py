"""Random steps of several clients: an overlay answers each of them as one Redis that has all keys.

`tests/worlds.py` has the worlds, and the reference. Each client has a twin at the reference, which does the same. Their
replies are equal to the byte, and so are messages, invalidations and notifications, but for the moment at which they
arrive. Writes of states' keys are refused, and do nothing.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from itertools import count
from typing import ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from compat.conformance.generators import checked
from compat.conformance.wire import requests, scanned
from compat.waiting import eventually
from tests.differential.overlay_clients import Client, blocked_at
from tests.differential.overlay_requests import (
    BLOCKING,
    CHANGES,
    CHOSEN,
    LISTED,
    MESSAGES,
    OF_STATES,
    PUSHES,
    READS,
    REQUESTS,
    SUBSCRIPTIONS,
    TRACKING,
    Line,
    lines,
)
from tests.worlds import World, Written

CLIENTS_MAX = 4
CLIENT = st.integers(0, CLIENTS_MAX - 1)
WATCHED = st.lists(st.sampled_from([key for name in "KNFBD" for key in CHOSEN[name]]), max_size=3)
LONG = b"0123456789abcdef" * 4096
# So many copies of a few keys make a request that is not read at once.
COPIES = 400


def step(**given: st.SearchStrategy[object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a rule whose first error is shown: when Hypothesis repeats the steps, the world is not as it was before."""

    def made(run: Callable[..., None]) -> Callable[..., None]:
        @wraps(run)
        def shown(machine: Overlay, **values: object) -> None:
            try:
                run(machine, **values)
            except Exception:
                traceback.print_exc()
                raise

        return shown

    return lambda run: rule(**given)(made(run))


def line_of(text: str) -> Line:
    """Return a request."""
    return Line(text.encode().split(b" "))


class Overlay(RuleBasedStateMachine):
    """Clients of one world; each step is one client's, or an epoch of the states."""

    world: ClassVar[World]
    # No two examples have clients of the same number: what is cached for one is not read by another.
    numbers: ClassVar[Iterator[int]] = count()

    def __init__(self) -> None:
        super().__init__()
        self.world.clear()
        self.clients: list[Client] = []
        self._may_repeat: set[bytes] = set(self.world.last_changed)

    def teardown(self) -> None:
        """Let all clients leave, and wait until the servers know."""
        for client in self.clients:
            client.leave()
        for client in self.clients:
            self._wait_until_left(client)
        self._wait_for_blocked(0)

    def _client(self, number: int) -> Client:
        return self.clients[number % len(self.clients)]

    @initialize()
    def begin(self) -> None:
        """Begin with a client of each protocol."""
        for protocol in (2, 3):
            self._add_client(protocol)

    def _add_client(self, protocol: int) -> None:
        self.clients.append(Client(self.world, next(self.numbers), protocol, self._may_repeat))

    @step(protocol=st.sampled_from([2, 3]))
    def connect(self, protocol: int) -> None:
        """One more client."""
        if len(self.clients) < CLIENTS_MAX:
            self._add_client(protocol)

    @step(number=CLIENT)
    def leave(self, number: int) -> None:
        """A client leaves, with all that it has."""
        client = self._client(number)
        if len(self.clients) > 1:
            client.leave()
            self._forget(client)

    def _forget(self, client: Client) -> None:
        self.clients.remove(client)
        self._wait_until_left(client)
        if client.is_blocked:
            self._wait_for_blocked(sum(each.is_blocked for each in self.clients))

    def _wait_until_left(self, client: Client) -> None:
        """Wait until no server has the client's connections and subscriptions any more, which PUBLISH counts."""
        for side, server in zip(client.sides, (self.world.running, self.world.reference), strict=True):
            with server.connect() as other:
                is_there = partial(other.call, "CLIENT", "LIST", "ID", side.id)
                eventually(is_there, lambda found: not found.plain)
        for node in self.world.upstream.nodes:  # the program has closed its connections before
            with node.connect() as direct:
                assert direct.call("PING").plain == direct.call("PING").plain

    @step(number=CLIENT, other=CLIENT)
    def kill(self, number: int, other: int) -> None:
        """A client disconnects another one."""
        client, target = self._client(number), self._client(other)
        if client.is_free and target is not client:
            client.ask([line_of("CLIENT KILL ID <id>")], about=target)
            for side in target.sides:
                side.connection.read_to_end()
            self._forget(target)

    @step(number=CLIENT, asked=REQUESTS, cuts=st.lists(st.integers(0, 10_000), max_size=3))
    def ask(self, number: int, asked: list[Line], cuts: list[int]) -> None:
        """A client sends a pipeline."""
        client = self._client(number)
        if not client.is_blocked:
            client.ask(asked, cuts)

    @step(number=CLIENT, asked=REQUESTS, mode=st.sampled_from(["OFF", "SKIP"]))
    def ask_silently(self, number: int, asked: list[Line], mode: str) -> None:
        """A client suppresses replies, and sends something."""
        client = self._client(number)
        if client.is_plain:
            client.ask_silently(asked if mode == "OFF" else asked[:1], line_of(f"CLIENT REPLY {mode}"))

    @step(number=CLIENT, line=lines(READS), name=st.sampled_from(["MGET", "EXISTS", "TOUCH", "DEL", "MSET"]))
    def ask_at_length(self, number: int, line: Line, name: str) -> None:
        """A client sends a request with many keys, or with a long value."""
        client = self._client(number)
        if not client.is_free or client.is_tracking:  # all keys are invalidated after it
            return
        if name == "MSET":
            key = b"s<tag>"
            client.ask([Line([b"SET", key, LONG]), Line([b"GET", key]), line, Line([b"APPEND", key, LONG[:20_000]])])
        elif name == "DEL":
            client.ask([Line([b"DEL", *(b"none%d<tag>" % at for at in range(COPIES)), b"s<tag>", b"n<tag>"])])
        else:
            client.ask([Line([name.encode(), *(line.words[1:] * COPIES or [b"x"])]), line])

    @step(number=CLIENT, database=st.sampled_from(CHOSEN["DB"]))
    def select(self, number: int, database: str) -> None:
        """A client selects a database; an overlay refuses it of one that watches, listens or tracks."""
        client = self._client(number)
        if not client.is_blocked:
            client.ask([line_of(f"SELECT {database}")])

    @step(number=CLIENT, protocol=st.sampled_from([2, 3]))
    def greet(self, number: int, protocol: int) -> None:
        """A client changes its protocol."""
        client = self._client(number)
        if client.is_plain:
            client.greet(protocol)

    @step(number=CLIENT, keys=WATCHED)
    def watch(self, number: int, keys: list[str]) -> None:
        """A client watches keys; no keys: it is an error."""
        client = self._client(number)
        if not client.is_blocked:
            client.ask([Line([b"WATCH", *(key.encode() for key in keys)])])
            client.is_watching = True

    @step(
        number=CLIENT,
        asked=REQUESTS,
        database=st.sampled_from([None, None, *CHOSEN["DB"]]),
        end=st.sampled_from([None, "EXEC", "EXEC", "EXEC", "DISCARD", "RESET", "EXEC x"]),
    )
    def transact(self, number: int, asked: list[Line], database: str | None, end: str | None) -> None:
        """A client queues requests; it ends the transaction now, or later."""
        client = self._client(number)
        if client.is_blocked:
            return
        begin = [] if client.is_queueing else [line_of("MULTI")]
        selected = [line_of(f"SELECT {database}")] if database is not None else []
        client.ask([*begin, *asked[:3], *selected, *asked[3:], *([line_of(end)] if end else [])])
        client.is_watching &= end in (None, "EXEC x")
        self._note_reset(client, end or "")

    @staticmethod
    def _note_reset(client: Client, line: str) -> None:
        if line == "RESET":
            client.protocol, client.is_tracking, client.is_watching = 2, False, False

    @step(changes=CHANGES)
    def publish(self, changes: list[Written]) -> None:
        """The states change."""
        self.world.publish(*changes)
        self._may_repeat |= self.world.last_changed

    @step()
    def reload(self) -> None:
        """The rules give states' keys another name. It ends watches and tracking, which a Redis does not do."""
        if all(client.is_plain for client in self.clients):
            self.world.rename()

    @step(number=CLIENT, asked=st.lists(lines(OF_STATES), min_size=1, max_size=4))
    def ask_while_upstream_hangs(self, number: int, asked: list[Line]) -> None:
        """States' keys are answered while the upstream does not answer."""
        client = self._client(number)
        if not self.world.may_pause or not client.is_plain or client.facts()["db"] != "0":
            return
        for node in self.world.upstream.nodes:
            node.process.send_signal(signal.SIGSTOP)
        try:
            client.ask(asked)
        finally:
            for node in self.world.upstream.nodes:
                node.process.send_signal(signal.SIGCONT)

    @step(number=CLIENT, options=st.sampled_from(TRACKING), other=st.one_of(st.none(), CLIENT))
    def track(self, number: int, options: str, other: int | None) -> None:
        """A client begins to track keys, maybe for another client, or ends it."""
        client, target = self._client(number), None if other is None else self._client(other)
        if not client.is_free or (client.protocol == 2 and target is None and not client.is_tracking):
            return
        redirect = " REDIRECT <id>" if target else ""
        line = (
            "CLIENT TRACKING OFF"
            if client.is_tracking
            else f"CLIENT TRACKING ON {options}{redirect}".replace("  ", " ")
        )
        client.ask([line_of(line.rstrip(" "))], about=target)
        client.is_tracking = "t" in client.facts()["flags"]

    @step(number=CLIENT, line=lines(SUBSCRIPTIONS))
    def subscribe(self, number: int, line: Line) -> None:
        """A client changes its subscriptions."""
        client = self._client(number)
        if client.is_blocked or client.is_queueing:
            return
        if line.words == [b"MONITOR"] and not (client.protocol == 2 and client.is_subscribed):
            return  # a subscriber of RESP2 gets an error
        client.ask([line], count=max(1, len(line.words) - 1))
        self._note_reset(client, line.words[0].decode())

    @step(number=CLIENT, line=lines(MESSAGES))
    def send_message(self, number: int, line: Line) -> None:
        """A client sends a message, or asks for subscriptions."""
        client = self._client(number)
        if not client.is_blocked:
            client.ask([line])

    @step(number=CLIENT, line=lines(BLOCKING))
    def block(self, number: int, line: Line) -> None:
        """A client blocks until another one writes."""
        client = self._client(number)
        if client.is_free:
            before = sum(each.is_blocked for each in self.clients)
            client.block(line, lambda: self._blocked_alone() > before)
            if client.is_blocked:
                self._wait_for_blocked(before + 1)

    @step(number=CLIENT, other=CLIENT, end=st.sampled_from(["", " TIMEOUT", " ERROR"]))
    def unblock(self, number: int, other: int, end: str) -> None:
        """A client unblocks another one."""
        client, target = self._client(number), self._client(other)
        if client.is_free:
            client.ask([line_of(f"CLIENT UNBLOCK <id>{end}")], about=target)

    @step(number=CLIENT, asked=st.lists(lines(PUSHES), min_size=1, max_size=3))
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

    @step(
        number=CLIENT,
        pattern=st.sampled_from(LISTED),
        options=st.sampled_from(["", "COUNT 3", "TYPE string", "TYPE hash"]),
    )
    def list_keys(self, number: int, pattern: str, options: str) -> None:
        """A client lists and counts the keys, and draws one."""
        client = self._client(number)
        if not client.is_free or client.is_subscribed:
            return
        keys = [set(each.call("KEYS", pattern).plain) for each in client.sides]
        assert keys[0] == keys[1]
        words = ["MATCH", pattern, *options.split()]
        assert set(scanned(client.through, *words)) == set(scanned(client.alone, *words))
        # Old copies, and names of another database, may be drawn too often: then it is to be tried again.
        random_key = partial(client.through.call, "RANDOMKEY")
        drawn = eventually(random_key, lambda found: not found.raw.startswith(b"-TRYAGAIN each random key")).plain
        everything = client.alone.call("KEYS", "*").plain
        assert drawn in everything if everything else drawn is None
        sizes = [each.call("DBSIZE").plain for each in client.sides]
        assert sizes[0] == sizes[1] - self.world.uncounted(int(client.facts()["db"]))

    @step(number=CLIENT, pattern=st.sampled_from(LISTED))
    def list_keys_in_transaction(self, number: int, pattern: str) -> None:
        """A client lists and counts the keys within a transaction."""
        client = self._client(number)
        if not client.is_free or client.is_subscribed:
            return
        found = []
        for side in client.sides:
            side.connection.send(requests([[b"MULTI"], [b"KEYS", pattern.encode()], [b"DBSIZE"], [b"EXEC"]]))
            found.append([side.read().plain for _ in range(4)][-1])
        assert (found[0] is None) == (found[1] is None)
        if found[0] is not None:
            assert set(found[0][0]) == set(found[1][0])
            assert found[0][1] == found[1][1] - self.world.uncounted(int(client.facts()["db"]))
        client.is_watching = False

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
            try:
                client.compare_pushes()
            except AssertionError:
                traceback.print_exc()
                raise


# Two connections to the upstream: what one of them mixes up would show. The upstream is never too slow.
OPTIONS = ("--upstream-connections", "2", "--upstream-timeout", "60000", "--copiers", "report")
WORLDS = [
    ("proxy", "single"),
    ("serve", "single"),
    ("proxy", "cluster"),
    ("serve", "cluster"),
    # What differs with TLS is below all that the steps try: test_overlay_tls.py has it.
    pytest.param(("proxy", "TLS"), marks=pytest.mark.slow, id="proxy-TLS"),
    ("proxy", "Sentinel"),
]


@pytest.fixture(scope="module", params=WORLDS, ids="-".join)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("world"), stack, *request.param, *OPTIONS)


def test_overlay_answers_as_one_redis_with_all_keys(world: World) -> None:
    Overlay.world = world
    # Without shrinking: a step without a reply would be tried hundreds of times, and each time waited for.
    once = settings(checked(20), stateful_step_count=30, phases=[Phase.generate], report_multiple_bugs=False)
    run_state_machine_as_test(Overlay, settings=once)
