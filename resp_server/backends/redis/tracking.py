"""CLIENT TRACKING of one client at a node of the upstream, over its dedicated connection, with or without REDIRECT.

With REDIRECT, the upstream has no connection of the client that gets the invalidations. So the client that tracks keys
gets a second dedicated connection to the node, in RESP3, to which the node redirects them:

    upstream --replies--------> dedicated connection -> client
             --invalidations--> its listener ------> tracking table -> client that REDIRECT names

From the tracking table on, they are sent like invalidations of states. Replies and invalidations have no common order,
as they have none at a Redis, where the client has two connections, too.

CLIENT CACHING is answered by the proxy. It belongs to the next request, and is sent to a node with that request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from resp_server.backends.redis.connection import UpstreamRequest
from resp_server.backends.redis.dedicated_connection import DedicatedConnection, DedicatedConnections
from resp_server.protocol.errors import GenericError
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.reply_sinks import ReplySink
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.tracking import TrackingState

CACHING_YES, CACHING_NO = pack((b"CLIENT", b"CACHING", b"YES")), pack((b"CLIENT", b"CACHING", b"NO"))


def caching_before(state: TrackingState | None) -> bytes:
    """Return the CLIENT CACHING that a client has sent before its current request; empty: it has sent none."""
    if state is None or not state.is_caching_set:
        return b""
    return CACHING_YES if state.is_optin else CACHING_NO


class Tracking(NamedTuple):
    """A client's valid CLIENT TRACKING.

    Args:
        is_redirected: It has the option REDIRECT: another client gets the invalidations.
    """

    request: Request
    is_redirected: bool = False


@dataclass(frozen=True)
class TrackingRequest:
    """A CLIENT TRACKING for one node; the sink gets its reply.

    Args:
        is_wanted: False if it is not to be sent any more.
    """

    tracking: Tracking
    protocol: int
    sink: ReplySink
    index: int
    is_wanted: Callable[[], bool] = lambda: True

    def send(self, dedicated: DedicatedConnections, client: int) -> None:
        """Send the request, over connections that are made if there are none; ReplyError: too many clients have one."""
        connection = dedicated.open(client, self.protocol)
        sink = connection.with_attributes(self.sink, is_tracking=self.tracking.request[2].upper() == b"ON")
        if self.tracking.is_redirected:
            listener = dedicated.open_listener(client)
            sink = listener.with_attributes(sink, is_tracking=True)
            listener.with_upstream_id(partial(self._send_redirected, connection, sink))
            return
        former = dedicated.listener_of(client)
        if former is not None:
            sink = former.with_attributes(sink, is_tracking=False)
        self._send(connection, self.tracking.request, sink)

    def _send(self, connection: DedicatedConnection, request: Request, sink: ReplySink) -> None:
        connection.send_request(UpstreamRequest(pack(request), sink, self.index, is_read=False), self.protocol)

    def _send_redirected(self, connection: DedicatedConnection, sink: ReplySink, listener_id: int | None) -> None:
        request = self.tracking.request
        if listener_id is None:
            error = GenericError("the upstream has not replied to CLIENT ID, which REDIRECT needs")
            sink.fail(self.index, error)
        elif self.is_wanted():
            self._send(connection, (*request[:3], *_redirected(iter(request[3:]), b"%d" % listener_id)), sink)


def _redirected(options: Iterator[bytes], target: bytes) -> Iterator[bytes]:
    """Return valid options with another client in REDIRECT."""
    for option in options:
        yield option
        if option.upper() == b"PREFIX":
            yield next(options)
        elif option.upper() == b"REDIRECT":
            next(options)
            yield target
