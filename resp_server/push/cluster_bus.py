"""Forwards clients' messages to the other nodes of a cluster, so that subscribers may be at any node.

There is one connection to each node, opened for the first message. Replies only show that the node is there: if one
does not come in time, the next message gets a new connection. A message that cannot be sent is lost: delivery is at
most once, as on the bus of a Redis Cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import hiredis

from resp_server.acl.user import DEFAULT_USER
from resp_server.cluster.node_view import NodeView
from resp_server.limits import NODE_MESSAGES_BYTES_MAX
from resp_server.net.client import pack_request
from resp_server.net.tls import Certificates, certificates_of, reason_of
from resp_server.session.subscriptions import SubscriptionKind
from resp_server.settings.server import ServerConfig

logger = logging.getLogger("sparkis.server")

CONNECT_S_MAX = 1.0
# A node that replies to nothing for this long is left: the network may have dropped the connection (guess).
SILENT_S = 5.0
# After a failed connection, messages to that node are dropped for this long.
PAUSE_S = 0.5

KINDS = {SubscriptionKind.CHANNEL: "CHANNEL", SubscriptionKind.SHARD: "SHARD"}


class NodeConnection(asyncio.Protocol):
    """The connection to one other node."""

    def __init__(self, address: str, password: str | None, certificates: Certificates | None) -> None:
        self._address = address
        self._password = password
        self._certificates = certificates
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._buffered: list[bytes] = []
        self._buffered_bytes = 0
        self._not_before_s = 0.0
        self._is_full = False
        self._replies = hiredis.Reader(notEnoughData=Ellipsis)
        self._unanswered = 0
        self._silence: asyncio.TimerHandle | None = None

    def send(self, packed: bytes) -> None:
        """Send now, or once connected; drop if too much is unsent, or if the last attempt to connect just failed."""
        transport = self._transport
        waiting_bytes = self._buffered_bytes if transport is None else transport.get_write_buffer_size()
        is_full = waiting_bytes + len(packed) > NODE_MESSAGES_BYTES_MAX
        if is_full and not self._is_full:
            logger.warning("%s reads clients' messages too slowly; some are dropped", self._address)
        self._is_full = is_full
        if is_full:
            return
        if transport is not None:
            self._write(transport, packed, 1)
        elif self._loop.time() >= self._not_before_s:
            self._buffered.append(packed)
            self._buffered_bytes += len(packed)
            if self._connecting is None:
                self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        host, _, port = self._address.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                context = None if self._certificates is None else self._certificates.for_server()
                transport, _ = await self._loop.create_connection(lambda: self, host, int(port), ssl=context)
        except (OSError, TimeoutError) as error:
            self._not_before_s = self._loop.time() + PAUSE_S
            logger.warning(
                "clients' messages cannot be forwarded to %s: %s",
                self._address,
                reason_of(error) or "it does not reply",
            )
        else:
            self._transport = transport
            self._replies = hiredis.Reader(notEnoughData=Ellipsis)
            greeting = [pack_request("CLIENT", "SETNAME", "sparkis-node")]
            if self._password is not None:
                greeting.insert(0, pack_request("AUTH", DEFAULT_USER, self._password))
            self._write(transport, b"".join(greeting + self._buffered), len(greeting) + len(self._buffered))
        finally:
            self._connecting = None
            self._buffered, self._buffered_bytes = [], 0

    def _write(self, transport: asyncio.Transport, packed: bytes, requests: int) -> None:
        transport.write(packed)
        self._unanswered += requests
        if self._silence is None:
            self._silence = self._loop.call_later(SILENT_S, self._leave)

    def _leave(self) -> None:
        """Leave a node that does not reply. The next message is sent over a new connection."""
        logger.warning("%s does not reply to clients' messages; it gets a new connection", self._address)
        if self._transport is not None:
            self._transport.abort()
        self._end()

    def _end(self) -> None:
        self._transport, self._unanswered = None, 0
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def data_received(self, data: bytes) -> None:
        """Count the replies."""
        self._replies.feed(data)
        try:
            while self._replies.gets() is not Ellipsis:
                self._unanswered -= 1
        except hiredis.ProtocolError:
            self._leave()
            return
        self._stop_waiting()
        if self._unanswered > 0:
            self._silence = self._loop.call_later(SILENT_S, self._leave)

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def close(self) -> None:
        """Close the connection."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()


class ClusterBus:
    """The connections to the other nodes of a cluster.

    Args:
        cluster: Returns the process as a node; None: it is in no cluster.
    """

    def __init__(self, config: Callable[[], ServerConfig], cluster: Callable[[], NodeView | None]) -> None:
        self._config = config
        self._cluster = cluster
        self._certificates: Certificates | None = None
        self._peers: dict[str, NodeConnection] = {}

    def forward(self, kind: SubscriptionKind, channel: bytes, text: bytes) -> None:
        """Forward a message to the other nodes; on a shard channel, to those of this node's shard."""
        cluster = self._cluster()
        if cluster is None:
            return
        nodes = cluster.topology.nodes
        if kind is SubscriptionKind.SHARD:
            nodes = (cluster.master, *cluster.topology.replicas(cluster.master))
        addresses = {node.address for node in nodes if node.id != cluster.myself.id}
        for address in self._peers.keys() - {node.address for node in cluster.topology.nodes}:
            self._peers.pop(address).close()
        packed = pack_request("STATE", "PUBLISH", KINDS[kind], channel, text) if addresses else b""
        for address in addresses:
            if address not in self._peers:
                if self._certificates is None:
                    self._certificates = certificates_of(self._config().tls)
                config = self._config()
                password = config.server_password or config.password
                self._peers[address] = NodeConnection(address, password, self._certificates)
            self._peers[address].send(packed)

    def stop(self) -> None:
        """Close all connections."""
        for peer in self._peers.values():
            peer.close()
