"""An upstream of any kind: one Redis, the master that sentinels know, or a Redis Cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from resp_server.backends.redis.cluster import NodeConnections, UpstreamCluster
from resp_server.backends.redis.connection import UpstreamConnection
from resp_server.backends.redis.pool import UpstreamPool
from resp_server.backends.redis.role import RoleCheck
from resp_server.backends.redis.sentinel import MasterLocator
from resp_server.backends.redis.tls import UpstreamTls
from resp_server.backends.redis.tracking import Tracking
from resp_server.backends.redis.url import UpstreamUrl
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.command.spec import CommandSpec
from resp_server.protocol.replies import Reply
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.raw_reply import RawReply
from resp_server.raw_replies.reply_sinks import Defer, ReplySink


class Upstream(Protocol):
    """The connections to an upstream.

    Args:
        defer: Calls back in a later turn.
        on_hello: Called with the fields of its reply to HELLO.
        on_state_lost: Called with a client whose dedicated connection was lost with its state, such as watched keys,
            and with the reason.
        on_moved: Called when keys have moved to other nodes, with clients that have to forget all keys that they have
            cached.
        on_push: Called with a client and a frame that it gets without a request.
        poller: The compiled core's epoll for clients and servers, where there is one.

    Attributes:
        node_count: The number of nodes; each has keys of its own.
        dedicated_connections: The connections of clients that share none. None: requests go to several nodes.
    """

    url: UpstreamUrl
    defer: Defer
    on_facts: Callable[[Mapping[str, CommandSpec]], None] | None
    on_hello: Callable[[Mapping[bytes, Reply]], None]
    on_state_lost: Callable[[int, str], None]
    on_moved: Callable[[Collection[int]], None]
    on_push: Callable[[int, RawReply], None]
    poller: Any
    dedicated_connections: Mapping[int, object] | None

    @property
    def node_count(self) -> int: ...
    def start(self) -> None:
        """Open the first connections."""

    def stop(self) -> None:
        """Close all connections."""

    def send_request(
        self,
        client: int,
        protocol: int,
        routed: OverlayCommand,
        request: Request,
        sink: ReplySink,
        index: int,
        *,
        caching: bytes = b"",
    ) -> bool:
        """Send a client's request; the sink gets the reply later, or an error at once or later.

        True: parts of it are sent later, so that the client's later requests have to wait.

        Args:
            caching: The client's CLIENT CACHING before it, which is sent before each part, to each node that gets it.
        """

    def send_to_node(self, node: int, client: int, protocol: int, packed: bytes, sink: ReplySink, index: int) -> None:
        """Send a read about all keys to a node."""

    def block(
        self,
        client: int,
        protocol: int,
        routed: OverlayCommand,
        request: Request,
        sink: ReplySink,
        index: int,
        *,
        caching: bytes = b"",
    ) -> None:
        """Send a blocking command over a connection of the client's own; ReplyError if that is not possible."""

    def for_database(self, number: int) -> Upstream:
        """Return the connections to another database; GenericError if there is only one."""

    def for_login(self, user: bytes, password: bytes) -> Upstream:
        """Return the connections for another login.

        Args:
            user: The user; empty: AUTH with the password only.
        """

    def connection_for_forwarder(self, client: int, protocol: int) -> UpstreamConnection | NodeConnections | None:
        """Return the connections for a client's forwardable requests; None: they take the general path."""

    @property
    def is_down(self) -> bool:
        """Return whether the upstream, or a part of it, cannot be reached."""

    @property
    def is_unused(self) -> bool:
        """Return whether there are no connections."""

    @property
    def pools(self) -> Sequence[UpstreamPool]:
        """The pools of all nodes."""

    @property
    def masters(self) -> Sequence[UpstreamPool]:
        """The pools of all nodes that have keys: a client that tracks keys has a connection to each."""

    def begin_tracking(self, client: int, tracking: Tracking) -> None:
        """Have a client, whose CLIENT TRACKING all nodes have confirmed, track keys at nodes that join later."""

    def end_tracking(self, client: int) -> None:
        """Have a client track no keys at nodes that join later."""

    def notice_moves(self) -> None:
        """Notice within seconds when keys move to other nodes, from now on, also if no request is redirected."""

    def pool_of(self, routed: OverlayCommand, request: Request) -> UpstreamPool:
        """Return the pool of the node that has a request's keys, by the first one; ReplyError if none is known."""

    def pool_of_slot(self, slot: int) -> UpstreamPool:
        """Return the pool of the node that has a slot; ReplyError if none is known."""

    @property
    def message_pool(self) -> UpstreamPool | None:
        """The pool of a node that sends all messages of channels; None: no node is known."""

    def checked(self, reply: RawReply) -> RawReply:
        """Return the reply to a request that was sent to such a pool. A redirect becomes an error to try again."""

    def info_fields(self) -> Mapping[str, object]:
        """Return the fields of INFO."""


def upstream_at(
    url: UpstreamUrl, timeout_s: float, connections: int, tls: UpstreamTls | None, dedicated_max: int
) -> Upstream:
    """Return the connections to the upstream of a URL.

    Args:
        connections: The number of shared connections to each node.
        dedicated_max: The most connections of single clients to each node.
    """

    def pool_at(server: UpstreamUrl) -> UpstreamPool:
        return UpstreamPool(server, timeout_s, connections, tls, dedicated_max)

    if url.is_cluster:
        return UpstreamCluster(url, pool_at)
    pool = pool_at(url)
    if url.master:
        pool.locator, pool.role = MasterLocator(url, tls), RoleCheck(must_be_master=True)
    return pool
