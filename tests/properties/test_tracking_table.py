"""No client keeps an outdated value after it has read all invalidations before a reply.

The oracle is a dictionary: what each key holds now. Clients keep what they read; replies may take a while, and hold
what was there when they began.
"""

from __future__ import annotations

from typing import NamedTuple
from unittest.mock import patch

import hiredis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compat.examples import examples
from resp_server.push.tracking_table import TrackingTable
from resp_server.session.tracking import PUSH, TrackingState

KEYS = [b"a:0", b"a:1", b"a:2", b"b:0", b"b:1", b"", b"a"]
CLIENTS = 4
SOME_KEYS = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)


class Reply(NamedTuple):
    """What is on its way to a client: the values as they were when it was asked."""

    values: dict[bytes, int]


class Client:
    """A client that caches, and its connection."""

    def __init__(self) -> None:
        self.tracking_state = TrackingState()
        self.cache: dict[bytes, int] = {}
        self.under_way: Reply | None = None

    def take(self, frames: bytes) -> None:
        reader = hiredis.Reader()
        reader.feed(frames)
        while (push := reader.gets()) is not False:
            assert push[0] == b"invalidate"
            if push[1] is None:
                self.cache.clear()
            else:
                for key in push[1]:
                    self.cache.pop(key, None)


class Tables(RuleBasedStateMachine):
    """A table with little room, clients in all modes, and epochs."""

    @initialize(
        keys_max=st.sampled_from((0, 100, 3, 1)),
        bytes_max=st.sampled_from((1 << 20, 500, 1)),
        pending=st.sampled_from((1 << 20, 60)),
        invalidations_max=st.sampled_from((1 << 20, 3)),
        holders=st.integers(1, 4),
    )
    def begin(self, keys_max: int, bytes_max: int, pending: int, invalidations_max: int, holders: int) -> None:
        self.patches = [
            patch("resp_server.session.tracking.PENDING_BYTES_MAX", pending),
            patch("resp_server.push.tracking_table.INVALIDATIONS_PER_CHANGE_MAX", invalidations_max),
            patch("resp_server.push.tracking_table.CLIENTS_PER_KEY_MAX", holders),
            patch("resp_server.push.tracking_table.FREED_PER_STEP", 2),
        ]
        for each in self.patches:
            each.start()
        self.tracking = TrackingTable(keys_max, bytes_max)
        self.values = dict.fromkeys(KEYS, 0)
        self.clients = [Client() for _ in range(CLIENTS)]
        for client in self.clients[1:]:
            self.tracking.begin(client.tracking_state)

    def teardown(self) -> None:
        for each in getattr(self, "patches", ()):
            each.stop()

    @rule(number=st.integers(0, CLIENTS - 1), prefixes=st.sampled_from((None, (b"",), (b"a:", b"b"), (b"a",))))
    def track(self, number: int, prefixes: tuple[bytes, ...] | None) -> None:
        """A client says how it tracks, with an empty cache, as clients do."""
        client = self.clients[number]
        if client.tracking_state.is_on:
            self.tracking.end(client.tracking_state)
        client.__init__()  # type: ignore[misc]
        client.tracking_state.is_bcast = prefixes is not None
        self.tracking.begin(client.tracking_state, prefixes or ())

    @rule(number=st.integers(0, CLIENTS - 1))
    def leave(self, number: int) -> None:
        client = self.clients[number]
        if client.tracking_state.is_on:
            self.tracking.end(client.tracking_state)
        client.__init__()  # type: ignore[misc]

    def reading(self, number: int, keys: list[bytes]) -> tuple[Client, list[bytes]] | None:
        """Return a client and what it would keep of what it reads."""
        client = self.clients[number]
        if not client.tracking_state.is_on or client.under_way is not None:
            return None
        if client.tracking_state.is_bcast:
            return client, [key for key in keys if key.startswith(tuple(client.tracking_state.prefixes))]
        return client, keys

    @rule(number=st.integers(0, CLIENTS - 1), keys=SOME_KEYS)
    def read(self, number: int, keys: list[bytes]) -> None:
        """A client is answered at once: told before the reply, as the server does."""
        found = self.reading(number, keys)
        if found is not None:
            client, kept = found
            if client.tracking_state.records_reads:
                self.tracking.record_keys(client.tracking_state, keys)
            client.cache |= {key: self.values[key] for key in kept}

    @rule(number=st.integers(0, CLIENTS - 1), keys=SOME_KEYS)
    def begin_reply(self, number: int, keys: list[bytes]) -> None:
        """A reply begins that takes a while."""
        found = self.reading(number, keys)
        if found is not None:
            client, kept = found
            client.take(self.tracking.take(client.tracking_state, PUSH))
            if client.tracking_state.records_reads:
                self.tracking.record_keys(client.tracking_state, keys)
            client.under_way = Reply({key: self.values[key] for key in kept})

    @rule(number=st.integers(0, CLIENTS - 1), is_told_before=st.booleans())
    def end_reply(self, number: int, is_told_before: bool) -> None:
        """It ends; through a proxy, what is new is told before it, and again behind it."""
        client = self.clients[number]
        if client.under_way is not None:
            if is_told_before:
                client.take(self.tracking.take(client.tracking_state, PUSH, is_reply_pending=True))
            client.cache |= client.under_way.values
            client.under_way = None

    @rule(keys=SOME_KEYS)
    def change(self, keys: list[bytes]) -> None:
        """An epoch."""
        for key in keys:
            self.values[key] += 1
        self.tracking.changed(keys)
        self.tracking.free()

    @rule(keys=SOME_KEYS)
    def change_somewhere(self, keys: list[bytes]) -> None:
        """An epoch of which nobody knows what it changed."""
        for key in keys:
            self.values[key] += 1
        self.tracking.changed(None)

    @precondition(lambda self: hasattr(self, "clients"))
    @invariant()
    def nobody_holds_what_holds_no_more(self) -> None:
        """Every client between two replies takes what it is told; then its cache is right."""
        for client in self.clients:
            if client.tracking_state.is_on and client.under_way is None:
                client.take(self.tracking.take(client.tracking_state, PUSH))
                assert client.cache.items() <= self.values.items()
                assert client.tracking_state not in self.tracking.pending_clients

    @precondition(lambda self: hasattr(self, "clients"))
    @invariant()
    def the_table_is_within_its_bounds(self) -> None:
        assert not 0 < self.tracking.keys_max < self.tracking.keys
        assert self.tracking.items >= self.tracking.keys
        assert self.tracking.prefixes == len(
            {each for client in self.clients for each in client.tracking_state.prefixes}
        )
        if not self.tracking.keys:
            assert self.tracking.items == self.tracking._bytes == 0


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)
