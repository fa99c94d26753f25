"""A proxy on an event loop whose turns are measured, without and with an upstream."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compat.waiting import WAIT_S_MAX
from resp_server.backends.overlay.overlay_backend import OverlayBackend
from resp_server.backends.redis.upstream import upstream_at
from resp_server.backends.redis.url import UpstreamUrl
from resp_server.backends.routing.long_arguments import FIRST_ARGUMENT_BYTES_MAX, VALUE_BYTES_MAX
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.rules_file import RulesFile
from resp_server.backends.servers.proxy_connection import ProxyConnection
from resp_server.backends.servers.proxy_message_bus import connect_pubsub
from resp_server.backends.servers.pubsub_relay import PubsubRelay
from resp_server.backends.servers.server_access import ServerAccess
from resp_server.backends.servers.servers_backend import ServersBackend
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.cluster.topology import Topology
from resp_server.pipeline.batched import Backend, BatchedPipeline
from resp_server.pipeline.context import ServerContext
from resp_server.serving.server import Server
from resp_server.settings.server import ServerConfig
from state_backend.lmdb.store import LmdbStore
from state_backend.store.keyspace import Keyspace
from tests.server.conftest import NOW_MS, LoopThread, Running
from tests.server.turns_measured import MeasuredLoop, keyspace_of

CONFIG = ServerConfig(port=0, hosts=("127.0.0.1",))
SLOTS = ("0-8191", "8192-16383")


class Proxy(LoopThread):
    """A proxy on a loop that is measured, and two servers with half of the slots each on loops of their own."""

    needs_key_formats = False
    config = CONFIG

    def __init__(self, store: LmdbStore) -> None:
        self.nodes = [Running(CONFIG, keyspace_of(store)) for _ in SLOTS]
        rows = [
            {"host": "127.0.0.1", "port": node.server.port, "slots": slots}
            for node, slots in zip(self.nodes, SLOTS, strict=True)
        ]
        topology = Topology.of_json({"version": 1, "nodes": rows})
        for node, row in zip(self.nodes, topology.nodes, strict=True):
            node.run(self._shown(node.server, topology, row.id))
        super().__init__(MeasuredLoop)
        self.run(self._start(topology))

    @staticmethod
    async def _shown(server: Server, topology: Topology, node_id: str) -> None:
        server.set_topology(topology, node_id)

    async def _start(self, topology: Topology) -> None:
        self.cluster = StateCluster(access=ServerAccess(timeout_s=WAIT_S_MAX))
        self.clusters = StateClusters([self.cluster], needs_key_formats=self.needs_key_formats)
        self.server = Server(Keyspace(), self.config, self._pipeline, clock=lambda: NOW_MS, connection=ProxyConnection)
        self.server.context.proxy.info_fields = self.clusters.info_fields
        self.relay: PubsubRelay = connect_pubsub(self.clusters, self.server.context)
        self.clusters.start()
        self.cluster.apply_topology(topology, "the test")
        await self.server.start()

    def _pipeline(self, server: ServerContext) -> BatchedPipeline:
        return BatchedPipeline(server, self.backend(server))

    def backend(self, server: ServerContext) -> Backend:
        """Return what answers the proxy's requests."""
        return ServersBackend(server, self.clusters)

    def stop(self) -> None:
        async def stop() -> None:
            await self.server.stop()
            self.relay.stop()
            self.clusters.stop()

        self.run(stop())
        super().stop()
        for node in self.nodes:
            node.stop()


class SwapProxy(Proxy):
    """A proxy with an upstream."""

    needs_key_formats = True
    config = replace(CONFIG, proto_max_bulk_len=FIRST_ARGUMENT_BYTES_MAX, value_bytes_max=VALUE_BYTES_MAX)

    def __init__(self, store: LmdbStore, folder: Path, url: str, rules: str = "") -> None:
        self._url, self._folder = UpstreamUrl.parse(url), folder
        self._rules = folder / "rules.toml"
        self._rules.write_text(rules)
        super().__init__(store)

    def backend(self, server: ServerContext) -> Backend:
        upstream = upstream_at(self._url, WAIT_S_MAX, 4, None, 10)
        made = OverlayBackend(
            server,
            ServersBackend(server, self.clusters, is_routed=True),
            upstream,
            Ownership(self._folder / "owners.json", rules_file=RulesFile(self._rules)),
        )
        upstream.start()
        return made
