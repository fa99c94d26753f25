"""A proxy's reads of its state server's stores are the server's own replies, for keys of states only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from compat.conformance.wire import requests
from compat.examples import examples
from compat.fuzz.targets import NOW_MS, STATES
from resp_server.backends.routing.key_matcher import KeyOwner
from resp_server.backends.routing.rules import Owner
from resp_server.backends.servers.native import forwarder, stored_reads
from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.command.keys import keys_of
from resp_server.protocol.request_parser import RequestParser
from resp_server.serving.server import Server
from resp_server.session.session import Session
from resp_server.settings.server import ServerConfig
from state_backend.lmdb.store import LmdbStore
from state_backend.model.slots import SLOTS
from state_backend.store.keyspace import Job, Keyspace
from tests.properties.core_requests import COMPILED, apply, endings, reads, runs

pytestmark = pytest.mark.compiled

# Of the keys that a store has, some are the upstream's by a rule, and some depend on the request.
SOME_FORWARDED = [
    KeyOwner(b"j:v:1", Owner.UPSTREAM),
    KeyOwner(b"j:m:l*", None),
    KeyOwner(b"j:*", Owner.STATE),
]
OF_UPSTREAM = (b"j:v:1", b"j:m:large")
# Commands without keys that any process of a server answers alike, and those that the proxy answers itself.
KEYLESS = (b"ping", b"echo", b"client", b"select")
OF_PROXY = (b"TIME", b"DBSIZE", b"SCAN", b"KEYS", b"XLEN")


class Scene:
    """A state server with a store, and a proxy's reads of the same store."""

    def __init__(self, store: LmdbStore, forwarded: list[KeyOwner]) -> None:
        keyspace = Keyspace()
        keyspace.put(Job("j", "g", STATES, store))
        apply(store, 0)
        self.server = Server(keyspace, ServerConfig(), pipeline_of_stores, clock=lambda: NOW_MS)
        self.proxy = Server(Keyspace(), ServerConfig(), pipeline_of_stores, clock=lambda: NOW_MS)
        self.view = keyspace.view(NOW_MS)
        cluster = SimpleNamespace(
            slot_connections={
                protocol: SimpleNamespace(numbers=bytes(SLOTS), connections=[None]) for protocol in (2, 3)
            },
            epochs=None,
        )
        commands = forwarder.Forwarder(cluster, self.proxy.context, [])
        commands.set_upstream(lambda client, protocol, database: None, (), lambda client, database: None, [])
        commands.set_key_owners({0: forwarded})
        self._commands = commands
        self.renew_reads()

    def renew_reads(self) -> None:
        """Have the next request decide whether it is for the core, as after a reply of a server."""
        self.reads = stored_reads.StoredReads(self.proxy.context)
        self._commands.use_stores(self.reads, SimpleNamespace(current_view=lambda: self.view))

    def session(self, server: Server, protocol: int) -> Session:
        session = Session(1, "a:1", "b:2", server.users.default, NOW_MS)
        session.protocol = protocol
        return session

    def ask(self, data: bytes, protocol: int) -> tuple[bytes, int]:
        """Return the proxy's replies, and the number of bytes after the requests that they are for."""
        replies, left, rest = self.reads.answer(self.session(self.proxy, protocol), data)
        return replies, len(requests(left)) + len(rest)

    def ask_server(self, data: bytes, protocol: int) -> bytes:
        """Return the server's replies to the requests that its core answers."""
        replies: bytes = self.server.pipeline.compiled.answer(self.session(self.server, protocol), data)[0]
        return replies

    def close(self) -> None:
        self.view.close()
        self.server.context.close()
        self.proxy.context.close()

    def keys_of(self, words: list[bytes]) -> list[bytes]:
        return [key for key, _ in keys_of(self.server.context.table.find(words).facts, words) or ()]


def run(test: Any, forwarded: list[KeyOwner] = SOME_FORWARDED) -> None:
    async def with_scene() -> None:
        with TemporaryDirectory() as folder:
            store = LmdbStore(folder, "g", map_bytes_max=1 << 26)
            scene = Scene(store, forwarded)
            try:
                test(scene)
            finally:
                scene.close()
                store.close()

    asyncio.run(with_scene())


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(st.one_of(runs, reads.map(lambda read: [read])), min_size=1, max_size=6).map(
        lambda groups: [request for group in groups for request in group]
    ),
    endings,
    st.sampled_from([2, 3]),
)
def test_stored_reads_equal_servers_replies(sent: list[list[bytes]], ending: bytes, protocol: int) -> None:
    data = requests(sent) + ending

    def test(scene: Scene) -> None:
        replies, left = scene.ask(data, protocol)
        answered = RequestParser().feed(data[: len(data) - left])
        assert scene.ask_server(requests(answered), protocol) == replies
        for words in answered:
            keys = scene.keys_of(words)
            assert keys or words[0].lower() in KEYLESS
            for key in keys:
                assert key.startswith(b"j:") and key not in OF_UPSTREAM
        stats = scene.proxy.context.stats
        stats.collect()
        assert sum(each.calls for each in stats.commands.values()) == len(answered)
        assert (stats.hits, stats.misses) == (0, 0)  # as with the forwarder, which does not know them

    run(test)


@pytest.mark.parametrize("protocol", [2, 3])
def test_reads_of_stored_keys_are_all_answered(protocol: int) -> None:
    absent = {b"j:nope", b"j:v:gone"}
    lines = [line.split() for line in COMPILED if b"RAND" not in line and not line.endswith(b" nope")]
    sent = [[word for word in words if word not in absent] for words in lines if words[0] not in OF_PROXY]

    def test(scene: Scene) -> None:
        for words in sent:
            data = requests([words])
            scene.renew_reads()
            replies, left = scene.ask(data, protocol)
            assert (left, replies) == (0, scene.ask_server(data, protocol)), words

    run(test, [KeyOwner(b"j:*", Owner.STATE)])


def test_session_that_needs_more_than_forwarder_is_left_to_it() -> None:
    data = requests([[b"GET", b"j:v:0"]])

    def test(scene: Scene) -> None:
        session = scene.session(scene.proxy, 2)
        assert scene.reads.answer(session, data)[0]
        changes: list[Callable[[Session], None]] = [
            lambda each: each.select(1),
            lambda each: each.set_observed(True),
        ]
        for change in changes:
            session = scene.session(scene.proxy, 2)
            change(session)
            assert scene.reads.answer(session, data)[0] == b""

    run(test)
