"""WATCH of keys at an upstream, maybe of others at state servers."""

from __future__ import annotations

from collections.abc import Callable

from resp_server.forwarding.reply_splitter import pack
from resp_server.forwarding.reply_stages import Defer, ReplyAggregator, ReplySink
from resp_server.protocol.request_parser import Request
from resp_server.proxy.batch import ReplyBatch
from resp_server.proxy.side_split import STATES_PART, UPSTREAM_PART
from resp_server.proxy.state_cluster import StateCluster
from resp_server.proxy.transactions import ProxyWatch
from resp_server.session.session import Session
from resp_server.session.transaction import check_watch_limits
from resp_server.upstream.connection import UpstreamRequest
from resp_server.upstream.pinned import PinnedConnections
from resp_server.upstream.routing import Route


def watch_both(
    pinned_connections: PinnedConnections,
    cluster_of: Callable[[bytes], StateCluster],
    route: Route,
    request: Request,
    session: Session,
    batch: ReplyBatch,
    defer: Defer,
) -> None:
    """Watch keys at the upstream, over a connection of the client's own, and the others at state servers.

    Keys whose rule is `prefer-state` are watched at both. PlainError if there are too many keys, or too many clients
    with connections of their own.
    """
    owned = set(route.state_keys)
    theirs = [request[at] for at in range(1, len(request)) if at not in owned]
    of_states = dict.fromkeys(request[at] for at in (*route.state_keys, *route.preferred))
    ours = [key for key in of_states if (0, key) not in session.watched]
    check_watch_limits(session.watched, ours)
    pinned = pinned_connections.pin(session.id, session.protocol)
    check_watch_limits({*session.watched, *((0, key) for key in pinned.watched)}, theirs)
    targets = [(cluster_of(key), key) for key in ours]
    index = batch.expect(session.is_silent)
    sink: ReplySink = batch
    if targets:
        sink = ReplyAggregator(2, lambda replies: replies[0], batch, index, defer)
        ProxyWatch(session.watched, targets, sink, STATES_PART).send()
    sent = UpstreamRequest(pack((request[0], *theirs)), sink, UPSTREAM_PART if targets else index, is_read=False)
    pinned.send_request(sent, session.protocol)
    pinned.watched.update(theirs)
