"""WATCH of keys at an upstream, maybe of others at state servers."""

from __future__ import annotations

from collections.abc import Callable

from resp_server.backends.redis.connection import UpstreamRequest
from resp_server.backends.redis.dedicated_connection import DedicatedConnection
from resp_server.backends.redis.pool import UpstreamPool
from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.route import SplitRoute
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.backends.servers.watch import watch_states
from resp_server.protocol.errors import CrossSlotError
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import Answer, ReplyFuture, merge_answers, start
from resp_server.raw_replies.raw_reply import is_error
from resp_server.raw_replies.reply_sinks import Defer
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.session import Session
from resp_server.session.transaction import check_watch_limits


async def watch_both(
    upstream: Upstream,
    cluster_of: Callable[[bytes], StateCluster],
    route: SplitRoute,
    request: Request,
    session: Session,
    defer: Defer,
) -> Answer:
    """Watch keys at the upstream, over the client's dedicated connection, and the others at state servers.

    Keys whose rule is `prefer-state` are watched at both. GenericError if there are too many keys, or too many clients
    with dedicated connections.
    """
    at_states = set(route.state_keys)
    theirs = [request[at] for at in range(1, len(request)) if at not in at_states]
    of_states = dict.fromkeys(request[at] for at in route.state_keys)
    of_states |= dict.fromkeys(each.exists[1] for each in route.preferred.values())
    ours = [key for key in of_states if (0, key) not in session.watched]
    check_watch_limits(session.watched, ours)
    sent = (request[0], *theirs)
    pool = upstream.pool_of(route.routed, sent)
    if any(each is not pool and _watches(each, session) for each in upstream.pools):
        raise CrossSlotError
    dedicated = pool.dedicated.open(session.id, session.protocol)
    check_watch_limits({*session.watched, *((0, key) for key in dedicated.watched)}, theirs)
    targets = [(cluster_of(key), key) for key in ours]
    from_states = [start(watch_states(session.watched, targets))] if targets else []
    from_upstream = start(_watch_upstream(upstream, dedicated, sent, session.protocol))
    return await merge_answers([from_upstream, *from_states], lambda replies: replies[0], defer)


async def _watch_upstream(
    upstream: Upstream, dedicated: DedicatedConnection, request: Request, protocol: int
) -> Answer:
    """Watch keys at the upstream, which watches none of them if it refuses the request."""
    future, new = ReplyFuture(), set(request[1:]) - dedicated.watched
    dedicated.send_request(UpstreamRequest(pack(request), future, 0, is_read=False), protocol)
    dedicated.watched |= new
    try:
        reply = upstream.checked((await future).reply)
    except Exception:
        dedicated.watched -= new
        raise
    if is_error(reply):
        dedicated.watched -= new
    return Answer(reply)


def _watches(pool: UpstreamPool, session: Session) -> bool:
    dedicated = pool.dedicated.get(session.id)
    return dedicated is not None and bool(dedicated.watched)
