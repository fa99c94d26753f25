"""Two servers with half of the slots each, a single server and a proxy, on one event loop, for injected faults.

All three speak over real sockets. One loop, so that what one of them does in a turn is in the way of all others of that
turn, and so that a fault is put in between two turns.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any

import uvloop

from compat.waiting import WAIT_S_MAX, eventually_async
from resp_server.backends.servers.proxy_connection import ProxyConnection
from resp_server.backends.servers.proxy_message_bus import connect_pubsub
from resp_server.backends.servers.server_access import ServerAccess
from resp_server.backends.servers.servers_backend import ServersBackend
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.cluster.topology import Topology
from resp_server.pipeline.batched import BatchedPipeline
from resp_server.pipeline.context import ServerContext
from resp_server.serving.server import Server
from resp_server.settings.server import ServerConfig
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.keyspace import Job, Keyspace
from state_backend.store.memory_store import MemoryStore
from tests.builders import apply_epoch
from tests.server.conftest import NOW_MS, Peer

STATES = [
    StateDescriptor("n", key="k", value="v"),
    StateDescriptor("l", key="k", value="v", kind="list"),
    StateDescriptor("s", key="k", member="v"),
]
KEYS = [b"job:n:%d" % number for number in range(40)]
LONG_LIST = b"job:l:long"
CHANGES = [
    *(Change("n", Op.PUT, key, value=b"v%d" % number) for number, key in enumerate(KEYS)),
    *(Change("l", Op.APPEND, LONG_LIST, value=b"item %d" % number) for number in range(3000)),
    *(Change("s", Op.PUT, b"job:s:1", field=b"m%d" % number, value=b"") for number in range(3)),
]
SLOTS = ("0-8191", "8192-16383")
# What is answered where something was raised that nobody expected.
ERROR = rb"-(?:ERR|EXECABORT Transaction discarded because of:) internal error [0-9a-f]{8}\r\n"


class InjectedError(Exception):
    """An injected exception."""


class Scene:
    """The three servers. `call` runs on their loop's thread. is_compiled: what the compiled core knows, it answers."""

    states = STATES

    def __init__(self, *, is_compiled: bool = True, **settings: Any) -> None:
        self.epoch = 1
        self._is_compiled = is_compiled
        self.loop = uvloop.new_event_loop()
        self.loop.set_exception_handler(lambda loop, context: None)  # what guards nothing is told by what is answered
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.peers: list[Peer] = []
        self.run(self._start(settings))

    async def _start(self, settings: dict[str, Any]) -> None:
        config = ServerConfig(port=0, hosts=("127.0.0.1",), **settings)
        self.store = MemoryStore("g1")
        apply_epoch(self.store, STATES, CHANGES, 1, clock_ms=NOW_MS)
        self.nodes = []
        for _ in SLOTS:
            keyspace = Keyspace()
            job = Job("job", "g1", STATES, self.store, committed_epoch=1, committed_clock_ms=NOW_MS, is_stale=False)
            keyspace.put(job)
            self.nodes.append(self._server(keyspace, config))
            await self.nodes[-1].start()
        rows = [
            {"host": "127.0.0.1", "port": node.port, "slots": slots}
            for node, slots in zip(self.nodes, SLOTS, strict=True)
        ]
        topology = Topology.of_json({"version": 1, "nodes": rows})
        for node, row in zip(self.nodes, topology.nodes, strict=True):
            node.set_topology(topology, row.id)
        # Nothing is to be asked again because a loaded machine took its time.
        self.cluster = StateCluster(access=ServerAccess(timeout_s=WAIT_S_MAX))
        clusters = StateClusters([self.cluster])
        self.proxy = Server(
            Keyspace(),
            config,
            clock=lambda: NOW_MS,
            pipeline=lambda server: BatchedPipeline(server, self._backend(server, clusters)),
            connection=ProxyConnection,
        )
        self.proxy.context.proxy.info_fields = clusters.info_fields
        self.relay = connect_pubsub(clusters, self.proxy.context)
        self.clusters = clusters
        clusters.start()
        self.cluster.apply_topology(topology, "the test")
        await self.proxy.start()
        self.alone = self._server(self.nodes[0].context.keyspace, config)
        await self.alone.start()

    def _server(self, keyspace: Keyspace, config: ServerConfig) -> Server:
        made = Server(keyspace, config, pipeline_of_stores, clock=lambda: NOW_MS)
        if not self._is_compiled:
            made.pipeline.compiled = None
        return made

    def _backend(self, server: ServerContext, clusters: StateClusters) -> ServersBackend:
        made = ServersBackend(server, clusters)
        if not self._is_compiled:
            made._stored_reads = None
        return made

    def port(self, of: str) -> int:
        """Return the port of the server alone, or of the proxy."""
        port: int = getattr(self, of).port
        return port

    @property
    def servers(self) -> list[Server]:
        return [self.alone, self.proxy, *self.nodes]

    def run(self, awaitable: Any) -> Any:
        """Run a coroutine on the servers' loop and return its result."""
        return asyncio.run_coroutine_threadsafe(awaitable, self.loop).result(WAIT_S_MAX)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function between two turns of the loop."""

        async def called() -> Any:
            return function()

        return self.run(called())

    def connect(self, port: int) -> Peer:
        self.peers.append(Peer(port))
        return self.peers[-1]

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Block the loop, so that all input that is sent meanwhile arrives in one turn."""
        is_held, goes_on = threading.Event(), threading.Event()

        def hold() -> None:
            is_held.set()
            goes_on.wait(WAIT_S_MAX)

        self.loop.call_soon_threadsafe(hold)
        assert is_held.wait(WAIT_S_MAX)
        try:
            yield
        finally:
            goes_on.set()

    def let_all_go(self) -> None:
        """Close all clients' connections, and wait until the servers have closed their sessions."""
        for peer in self.peers:
            peer.socket.close()
        self.peers.clear()

        def are_closed() -> bool:
            return not (self.alone.context.sessions or self.proxy.context.sessions or self.waiting)

        self.run(eventually_async(are_closed, awaited="the end of all sessions", interval_s=0.001))

    @property
    def waiting(self) -> int:
        """The number of requests for which the proxy waits."""
        return sum(connection.pending_count for connection in self.cluster.connections.values())

    def stop(self) -> None:
        for peer in self.peers:
            peer.socket.close()

        async def stop() -> None:
            for server in (self.alone, self.proxy):
                await server.stop()
            self.relay.stop()
            self.clusters.stop()
            for node in self.nodes:
                await node.stop()

        with suppress(Exception):
            self.run(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    # -- faults -------------------------------------------------------------------------------------------------------

    def watch_calls(self, on_call: Callable[[CodeType], None] | None) -> None:
        """Have each function of resp_server told by its code when the loop calls it. What that raises, it does."""

        def profile(frame: FrameType, event: str, argument: object) -> None:
            if event == "call" and "/resp_server/" in frame.f_code.co_filename and on_call is not None:
                on_call(frame.f_code)

        self.call(lambda: sys.setprofile(None if on_call is None else profile))
