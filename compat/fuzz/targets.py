"""The servers under test and their state, which is in LMDB so that the compiled core reads it, too."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from compat.fuzz.loop import Loop
from resp_server.acl.rate_limits import RateLimit
from resp_server.backends.servers.proxy_connection import ProxyConnection
from resp_server.backends.servers.proxy_message_bus import connect_pubsub
from resp_server.backends.servers.server_access import ServerAccess
from resp_server.backends.servers.servers_backend import ServersBackend
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.client.connection import Connection
from resp_server.cluster.topology import Topology
from resp_server.pipeline.batched import Backend, BatchedPipeline
from resp_server.pipeline.context import ServerContext
from resp_server.pipeline.pipeline import Pipeline
from resp_server.serving.server import Server
from resp_server.settings.server import ServerConfig
from state_backend.codec import packed_map
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from state_backend.model.slots import SLOTS
from state_backend.store.keyspace import Job, Keyspace
from state_backend.store.store import EpochChanges

PASSWORD, NODE, LOADING, TWO, EPOCHS, USER, PROXY, SCRIPTED = 1, 2, 4, 8, 16, 32, 64, 128
# The options that need a server of their own; the number of connections does not.
TARGET_OPTIONS = PASSWORD | NODE | LOADING | EPOCHS | USER | PROXY
NOW_MS = 1_700_000_000_000
PORT = 7379
HERE = f"10.0.0.1:{PORT}"
# The rules of the restricted user: one of each kind.
RULES = (b"resetkeys", b"~j:v:*", b"%R~j:m:?", b"%W~j:l:*", b"-hgetall", b"-zrange", b"(+mget +lrange ~j:[lv]:*)")
# Requests are counted, but only inputs of several hundred requests reach the limit.
LIMIT = RateLimit("default", 1000)
# After this time a scripted server closes a connection over which it has sent all: longer than a proxy's time limits.
SCRIPT_S_MAX = 60.0
# Much more than the inputs can write.
STORE_BYTES_MAX = 64 << 20

STATES = [
    StateDescriptor("v", key="k", value="v"),
    StateDescriptor("m", key="k", value="v", field="f"),
    StateDescriptor("l", key="k", value="v", kind="list"),
    StateDescriptor("s", key="k", member="m"),
    StateDescriptor("z", key="k", member="m", score="s"),
]


def topology(*hosts: str) -> Topology:
    """Return a topology of servers that share the slots."""
    bounds = [SLOTS * at // len(hosts) for at in range(len(hosts) + 1)]
    slots = [f"{first}-{end - 1}" for first, end in pairwise(bounds)]
    nodes = [{"host": host, "port": PORT, "slots": some} for host, some in zip(hosts, slots, strict=True)]
    return Topology.of_json({"version": 1, "nodes": nodes})


class Target:
    """A server and its state. Its clock is the loop's."""

    def __init__(self, options: int, loop: Loop) -> None:
        self.inputs: list[bytes] = []
        self._options = options
        self._loop, self._began_s = loop, loop.time()
        # Without epochs the store never changes, so targets share it.
        self.store = _filled() if options & EPOCHS else _shared()
        password, limits = "secret" if options & PASSWORD else None, (LIMIT,) if options & USER else ()
        # Socket pairs have no TCP keepalive.
        self._config = ServerConfig(password=password, rate_limits=limits, tcp_keepalive=0)
        self.server = self._started_server()
        self.server.start_sweeping()

    def _started_server(self) -> Server:
        """Return a started server."""
        server = self._new_server(self._keyspace(), is_loading=bool(self._options & LOADING))
        self._restrict(server)
        if self._options & NODE:
            server.set_topology(topology("10.0.0.1", "10.0.0.2"), HERE)
        return server

    def _keyspace(self) -> Keyspace:
        keyspace = Keyspace()
        keyspace.put(Job("j", "g", STATES, self.store))
        return keyspace

    def _new_server(
        self,
        keyspace: Keyspace,
        pipeline: Callable[[ServerContext], Pipeline] = pipeline_of_stores,
        *,
        is_loading: bool = False,
        **parts: Any,
    ) -> Server:
        server = Server(keyspace, self._config, pipeline, self._now_ms, **parts)
        server.context.is_loading = is_loading
        return server

    def _restrict(self, server: Server) -> None:
        if self._options & USER:
            server.users.set(b"default", RULES)

    def _now_ms(self) -> int:
        return NOW_MS + int((self._loop.time() - self._began_s) * 1000)

    def connection(self) -> Connection:
        """Return the server's end of a new client's connection."""
        return self.server._connect(self.server)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing of closed clients remains."""
        return not self.server._connections and not self.server.context.sessions

    def change(self, turn: int) -> None:
        """Publish an epoch that changes some keys, if the options have EPOCHS."""
        if self._options & EPOCHS:
            changes = [Change("v", Op.PUT, b"j:v:%d" % (turn % 8), value=b"at %d" % turn)]
            changes += [Change("m", Op.PUT, b"j:m:l", b"f%d" % turn, b"y")]
            changes += [Change("l", Op.APPEND, b"j:l:s", value=b"c")]
            _put(self.store, changes)

    def close(self) -> None:
        """Close the server."""
        _close(self.server)
        if self._options & EPOCHS:
            self.store.close()
            rmtree(self.store.path)


class ProxyTarget(Target):
    """A proxy in front of two servers with half of the slots each, or of two clusters with a server each.

    replies: the bytes that its servers send on each connection, after the greeting; None: real replies.
    """

    _numbers = count()
    _has_upstream = False

    def __init__(self, options: int, loop: Loop, replies: ScriptedReplies | None = None) -> None:
        self._replies = replies
        self._servers: list[Server] = []
        self._addresses: list[str] = []
        super().__init__(options, loop)

    def _started_server(self) -> Server:
        number = next(self._numbers)  # of addresses, so that no target reaches another target's servers
        hosts = [f"10.{number >> 8 & 255}.{number & 255}.{each}" for each in (1, 2)]
        topologies = [topology(each) for each in hosts] if self._options & NODE else [topology(*hosts)] * 2
        for host, node_topology in zip(hosts, topologies, strict=True):
            self._add(host, node_topology)
        names = [f"application {at}" for at in range(len(set(map(id, topologies))))]
        many = [StateCluster(name, ServerAccess(self._config.password)) for name in names]
        clusters = self._clusters = StateClusters(many, needs_key_formats=self._has_upstream)
        proxy = self._new_server(
            Keyspace(),
            lambda server: BatchedPipeline(server, self._backend(server, clusters, number)),
            connection=ProxyConnection,
        )
        self._restrict(proxy)
        proxy.context.proxy.info_fields = clusters.info_fields
        self._relay = connect_pubsub(clusters, proxy.context)
        clusters.start()
        for cluster, node_topology in zip(many, topologies, strict=False):
            cluster.apply_topology(node_topology, "the target")
        return proxy

    def _backend(self, server: ServerContext, clusters: StateClusters, number: int) -> Backend:
        return ServersBackend(server, clusters)

    def _add(self, host: str, node_topology: Topology) -> None:
        """Start a server at an address. The second of two clusters has a job of another name."""
        keyspace = self._keyspace()
        if self._servers and self._options & NODE:
            keyspace = Keyspace()
            keyspace.put(Job("i", "g", STATES[:1], _shared()))
        server = self._new_server(keyspace, is_loading=bool(self._options & LOADING))
        address, replies = f"{host}:{PORT}", self._replies
        server.set_topology(node_topology, address)

        def new_connection() -> Connection:
            return Connection(server) if replies is None else ScriptedServer(server, replies)

        self._loop.listening[address] = new_connection
        self._servers.append(server)
        self._addresses.append(address)

    @property
    def is_idle(self) -> bool:
        connections = [connection for cluster in self._clusters for connection in cluster.connections.values()]
        # With scripted replies, the proxy's own background requests never end.
        return super().is_idle and (self._replies is not None or all(connection.is_idle for connection in connections))

    def close(self) -> None:
        for address in self._addresses:
            del self._loop.listening[address]
        self._relay.stop()
        self._clusters.stop()
        for server in self._servers:
            _close(server)
        super().close()


class ScriptedReplies(NamedTuple):
    """The bytes that a scripted server sends. greets: it answers a connection's greeting first.

    known: the requests to which a server that greets replies correctly.
    """

    chunks: Sequence[bytes]
    greets: bool
    known: Mapping[bytes, bytes] = {}


class ScriptedServer(Connection):
    """A server connection that sends scripted bytes, and closes when more is requested, or after a minute."""

    def __init__(self, server: Server, replies: ScriptedReplies) -> None:
        super().__init__(server)
        self._chunks = iter(replies.chunks)
        self._is_greeting = replies.greets
        self._known = replies.known if replies.greets else {}
        self._is_replying = self._is_at_end = False
        self._end: asyncio.TimerHandle | None = None

    def connection_lost(self, error: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._is_greeting:
            self._is_greeting = False
            super().data_received(data)
        elif data in self._known and not self._is_replying:
            self._transport.write(self._known[data])
        elif self._is_at_end:
            self._transport.abort()
        elif not self._is_replying:
            self._is_replying = True
            self._send_next()

    def _send_next(self) -> None:
        chunk = next(self._chunks, None)
        if chunk is None:
            self._is_at_end = True
            self._end = asyncio.get_running_loop().call_later(SCRIPT_S_MAX, self._transport.abort)
        elif not self._transport.is_closing():
            self._transport.write(chunk)
            # The loop is idle by then, so two chunks are not read together.
            asyncio.get_running_loop().call_later(0.001, self._send_next)


def _close(server: Server) -> None:
    for connection in list(server._connections.values()):
        connection.output.abort("the target is closed")
    server._invalidations.stop()
    server.context.close()
    server._epochs.stop()
    if server._sweep is not None:
        server._sweep.cancel()


_store_numbers = count()


@cache
def _folder() -> Path:
    """Make the folder of this process's stores."""
    made = TemporaryDirectory(prefix="sparkis-fuzz-stores-")
    atexit.register(made.cleanup)
    return Path(made.name)


def _filled() -> LmdbStore:
    store = LmdbStore(_folder() / str(next(_store_numbers)), "g", map_bytes_max=STORE_BYTES_MAX)
    fill(store)
    return store


def fill(store: LmdbStore) -> None:
    """Put the keys of all targets into a store."""
    changes = [Change("v", Op.PUT, b"j:v:%d" % number, value=b"%d" % number) for number in range(8)]
    changes += [Change("v", Op.PUT, b"j:v:soon", value=b"x", expire_at_ms=NOW_MS + 2500)]
    changes += [Change("v", Op.PUT, b"j:v:big", value=b"x" * 20_000)]
    small = packed_map.pack([(b"a", b"1"), (b"b", b"2")])
    changes += [Change("m", Op.PUT, b"j:m:s", value=small), Change("m", Op.PUT, b"j:m:t", b"a", b"1", NOW_MS + 1000)]
    changes += [Change("m", Op.PUT, b"j:m:l", b"f%d" % number, b"x") for number in range(150)]
    changes += [Change("l", Op.APPEND, b"j:l:s", value=each) for each in (b"a", b"b", b"a")]
    changes += [Change("l", Op.APPEND, b"j:l:l", value=b"%d" % number) for number in range(300)]
    changes += [Change("s", Op.PUT, b"j:s:l", b"m%d" % number, b"") for number in range(150)]
    changes += [Change("z", Op.PUT, b"j:z:l", b"m%d" % number, b"%d" % (number // 2)) for number in range(150)]
    _put(store, changes)


_shared = cache(_filled)


def _put(store: LmdbStore, changes: list[Change]) -> None:
    runs = list(runs_of(changes, [state.name for state in STATES]))
    store.apply(EpochChanges(store.applied.epoch + 1, 1, NOW_MS, runs), STATES)
