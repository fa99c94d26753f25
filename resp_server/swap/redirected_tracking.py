"""CLIENT TRACKING with REDIRECT at a proxy with an upstream.

The upstream has no connection of the client that gets the invalidations. So the client that tracks keys gets a second
pinned connection, in RESP3, to which the upstream redirects them:

    upstream --replies--------> pinned connection -> client
             --invalidations--> its listener ------> tracking table -> client that REDIRECT names

From the tracking table on, they are sent like invalidations of states. Replies and invalidations have no common order,
as they have none at a Redis, where the client has two connections, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from resp_server.commands.tracking import TrackingOptions, no_such_client
from resp_server.forwarding.reply_splitter import pack
from resp_server.forwarding.reply_stages import ReplySink
from resp_server.protocol.errors import PlainError
from resp_server.protocol.request_parser import Request
from resp_server.session.session import Session
from resp_server.upstream.connection import UpstreamRequest
from resp_server.upstream.pinned import PinnedConnection
from resp_server.upstream.pool import UpstreamPool


def redirect_of(request: Request, clients: Collection[int]) -> int:
    """Return the client to which CLIENT TRACKING redirects, 0 for none; ReplyError if it is not connected here."""
    target = TrackingOptions.of(request[3:]).redirect
    if target and target not in clients:
        raise no_such_client()
    return target


def track_redirected(pool: UpstreamPool, request: Request, session: Session, sink: ReplySink, index: int) -> None:
    """Send CLIENT TRACKING ON with REDIRECT to a node; the sink gets its reply. ReplyError: too many connections."""
    own = pool.pinned.pin(session.id, session.protocol)
    listener = pool.pinned.pin_listener(session.id)
    own.is_tracking = listener.is_tracking = True
    listener.with_upstream_id(partial(_track, own, session.protocol, request, sink, index))


def _track(
    own: PinnedConnection, protocol: int, request: Request, sink: ReplySink, index: int, listener_id: int | None
) -> None:
    if listener_id is None:
        sink.fail(index, PlainError("the upstream has not replied to CLIENT ID, which REDIRECT needs"))
        return
    packed = pack((*request[:3], *_redirected(iter(request[3:]), b"%d" % listener_id)))
    own.send_request(UpstreamRequest(packed, sink, index, is_read=False), protocol)


def _redirected(words: Iterator[bytes], target: bytes) -> Iterator[bytes]:
    """Return valid options with another client in REDIRECT."""
    for word in words:
        yield word
        if word.upper() == b"PREFIX":
            yield next(words)
        elif word.upper() == b"REDIRECT":
            next(words)
            yield target
