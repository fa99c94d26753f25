"""One connection to an upstream. Clients share it, requests are pipelined, and a lost connection is opened again.

The requests of one round of the event loop are sent in one write, and replies arrive in order. When the connection is
lost, requests without a reply that only read are sent again. Other requests may have run or not: their sinks get an
`UnansweredError`, and their clients' connections are closed. A request that was never sent gets TRYAGAIN.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from resp_server import native
from resp_server.backends.redis.breaker import PAUSE_S, PAUSE_S_MAX, Breaker
from resp_server.backends.redis.link import TURN_BYTES_MAX, UpstreamProtocol
from resp_server.backends.redis.role import RoleCheck
from resp_server.backends.redis.tls import UpstreamTls
from resp_server.backends.redis.url import UpstreamUrl
from resp_server.backends.retries import may_send_again
from resp_server.limits import SERVER_REQUESTS_BYTES_MAX, SERVER_REQUESTS_MAX
from resp_server.net.connecting import connected
from resp_server.net.tls import reason_of
from resp_server.protocol.errors import TryAgainError, internal_error
from resp_server.raw_replies.handshake import HandshakeError
from resp_server.raw_replies.packing import Packed, prefixed, size_of
from resp_server.raw_replies.pipelined_connection import PipelinedConnection
from resp_server.raw_replies.raw_reply import RawReply
from resp_server.raw_replies.reply_sinks import ReplySink, UnansweredError
from resp_server.raw_replies.reply_splitter import FrameError
from resp_server.session.epochs import NO_EPOCHS

# The time to connect and to log in (guess).
CONNECT_S_MAX = 1.0
READONLY = b"-READONLY "


@dataclass(slots=True)
class UpstreamRequest:
    """A request to the upstream.

    Args:
        is_read: It only reads, so it may be sent twice.
        is_blocking: It may wait for other clients' writes, so no time limit applies.
        prefix: A request that is sent right before it each time, ASKING or CLIENT CACHING, whose reply is dropped.
        replies_before: The number of other replies before its own, to MULTI and the queued commands, which are dropped,
            too.
        replies_to_drop: Those that have not arrived yet.
        confirmations: The number of frames that SUBSCRIBE and the like get in place of a reply.
    """

    packed: Packed
    sink: ReplySink
    index: int
    is_read: bool
    sends: int = 0
    sent_s: float = 0.0
    is_blocking: bool = False
    prefix: bytes = b""
    replies_before: int = 0
    replies_to_drop: int = 0
    confirmations: int = 0
    remaining: ClassVar[int] = 1
    is_batch: ClassVar[bool] = False

    def next_request(self) -> UpstreamRequest:
        """Return the request itself."""
        return self


class UpstreamInFlight(Protocol):
    """An entry in flight: a request, or a batch of the compiled forwarder."""

    sent_s: float

    @property
    def is_batch(self) -> bool: ...
    @property
    def is_blocking(self) -> bool: ...
    @property
    def remaining(self) -> int: ...
    def next_request(self) -> UpstreamRequest:
        """Return the next request without a reply as a separate request, whose sink gets that reply."""


class ConnectionEvents(Protocol):
    """The pool of a connection."""

    @property
    def url(self) -> UpstreamUrl: ...
    @property
    def tls(self) -> UpstreamTls | None: ...
    @property
    def role(self) -> RoleCheck: ...
    @property
    def breaker(self) -> Breaker: ...
    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def poller(self) -> Any: ...

    def at_end_of_round(self, then: Callable[[], None]) -> None:
        """Call back at the end of this round of the event loop."""

    def located(self) -> UpstreamUrl:
        """Return the server's URL; OSError if no sentinel knows the master now."""

    def opened(self, connection: UpstreamConnection) -> None:
        """Handle a connection that was opened."""

    def failed(self, connection: UpstreamConnection, reason: str) -> float:
        """Handle a failed attempt to connect; return the pause before the next attempt, in seconds."""

    def lost(self, reason: str) -> None:
        """Handle a lost connection."""

    def refused_write(self, connection: UpstreamConnection) -> None:
        """Handle the reply READONLY: the master may have become a replica."""


class UpstreamConnection(PipelinedConnection[UpstreamInFlight]):
    """One connection to the upstream, in one version of the protocol.

    Args:
        follow: Sends a forwarded request of a client, in a version of the protocol, to the node that a redirect of a
            Redis Cluster names; None: the upstream is no cluster.
        node_numbers: For each slot the number of its node; None: this connection is for the keys of all slots.
        may_watch: It is its client's own, so that it may watch keys.
        has_watched: It watches keys, or has watched one that has another owner now, so that EXEC needs it.
        is_dirty: A watched key has another owner now, so EXEC must run nothing.
    """

    link: UpstreamProtocol | None
    follow: Callable[[UpstreamRequest, int, int], None] | None = None
    node_numbers: bytes | None = None
    may_watch = has_watched = is_dirty = False

    def __init__(
        self, pool: ConnectionEvents, protocol: int, waiting_bytes_max: int = SERVER_REQUESTS_BYTES_MAX
    ) -> None:
        super().__init__()
        self._waiting_bytes_max = waiting_bytes_max
        self._pool = pool
        self.at_end_of_round = pool.at_end_of_round
        self.protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._connecting: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._queue: list[UpstreamRequest] = []  # they wait until the connection is open
        self._queued_bytes = 0
        self._opened_s = self._received_s = 0.0
        self._pause_s = 0.0
        self._is_stopping = False

    @property
    def is_open(self) -> bool:
        """Return whether requests can be sent now."""
        return self.link is not None

    @property
    def pending_count(self) -> int:
        """The number of requests without a reply."""
        return len(self._queue) + self.awaited_replies

    def add(self, request: UpstreamRequest) -> None:
        """Send a request now, or after the connection was opened. It gets TRYAGAIN at once if the breaker is open."""
        link = self.link
        waiting_bytes = self._queued_bytes if link is None else link.output_bytes
        if (
            self.pending_count >= SERVER_REQUESTS_MAX
            or waiting_bytes + size_of(request.packed) > self._waiting_bytes_max
        ):
            request.sink.fail(request.index, TryAgainError("too many requests wait for the upstream"))
        elif link is not None:
            request.sends += 1
            request.sent_s = self._pool.clock()
            packed, request.replies_to_drop = request.packed, request.replies_before
            if request.prefix:
                packed = prefixed(request.prefix, packed)
                request.replies_to_drop += 1
            if not isinstance(packed, bytes) and not request.is_read:
                request.packed = b""  # it is not sent again, so each text is freed after it is sent
            self.send(packed, request)
        elif self._pool.breaker.is_open or self._is_stopping:
            request.sink.fail(request.index, self._unreachable())
        else:
            self._queue.append(request)
            self._queued_bytes += size_of(request.packed)
            self.connect()

    def change_watched(self, ends_watch: bool, keys: Sequence[bytes]) -> bool:
        """Note what the forwarder's next requests watch; False: too many keys. A shared connection watches nothing.

        Args:
            ends_watch: They have an EXEC.
            keys: The keys that they watch, after the last EXEC.
        """
        return not keys

    def connect(self) -> None:
        """Open the connection, unless it is open or is being opened."""
        if self.link is None and self._connecting is None and self._retry is None and not self._is_stopping:
            self._connecting = self._loop.create_task(self._connect())

    def is_late(self, now_s: float, timeout_s: float) -> bool:
        """Return whether the oldest request has waited longer than `timeout_s`, and nothing was received meanwhile.

        This is called often. What the forwarder has sent or received since the last call counts as of now: it reads no
        clock for each request.
        """
        if self.has_received:
            self.has_received, self._received_s = False, now_s
        if not self.in_flight or self.in_flight[0].is_blocking:
            return False
        first = self.in_flight[0]
        first.sent_s = first.sent_s or now_s
        return now_s > max(first.sent_s, self._received_s) + timeout_s

    def cut(self, reason: str) -> None:
        """Close the connection, if it is open, and open it again."""
        if self.link is not None:
            self.link.cut(reason)

    def stop(self) -> None:
        """Close the connection for good."""
        self._is_stopping = True
        for each in (self._connecting, self._retry):
            if each is not None:
                each.cancel()
        if self.link is not None:
            self.link.cut("the proxy stops")
        self._refuse_queued()

    def _write(self, link: UpstreamProtocol, out: Sequence[bytes]) -> None:
        if size_of(out) > TURN_BYTES_MAX:
            link.write_texts(out)
        else:
            super()._write(link, out)

    def note_progress(self) -> None:
        """Handle that a part of a long request was sent, or of a long reply received."""
        self._received_s = self._pool.clock()

    def receive_batch_replies(self, data: bytes) -> bytes:
        """Pass the replies at the front of received data to the forwarder's batches; return the rest of the data."""
        self.has_received = True
        return self.take_batch_replies(data, NO_EPOCHS)

    def receive_replies(self, replies: Sequence[RawReply]) -> None:
        """Take replies, in the order of the requests. Pushes are dropped: shared connections subscribe to nothing."""
        self._received_s = self._pool.clock()
        for reply in replies:
            if reply[:1] == b">" if isinstance(reply, bytes) else reply.texts[0][:1] == b">":
                continue
            self._receive_reply(reply)

    def _receive_reply(self, reply: RawReply) -> None:
        if not self.in_flight:
            raise FrameError("more replies than requests")
        in_flight = self.in_flight[0]
        if in_flight is self.batch:
            self.close_batch()
        request = in_flight.next_request()
        if type(reply) is bytes and reply.startswith(READONLY):
            self._pool.refused_write(self)
        if request.replies_to_drop:
            request.replies_to_drop -= 1
            return
        self.awaited_replies -= 1
        if not in_flight.is_batch or not in_flight.remaining:
            self.in_flight.popleft()
        request.sink.put(request.index, reply)

    def disconnected(self, reason: str) -> None:
        """Handle the loss of the connection."""
        self.link = None
        lost = self._take_requests()
        self._pool.lost(reason)
        for request in lost:
            if may_send_again(request.sends, is_read=request.is_read):
                self.add(request)
            else:
                request.sink.fail(request.index, UnansweredError(reason))
        if self._pool.breaker.is_open:
            self._try_later(self._pool.failed(self, self._pool.breaker.reason))
            return
        # The pauses also apply to an upstream that accepts connections and closes them soon after.
        if self._pool.clock() > self._opened_s + PAUSE_S_MAX:
            self._pause_s = 0.0
        self._try_later(self._pause_s)
        self._pause_s = min(max(2 * self._pause_s, PAUSE_S), PAUSE_S_MAX)

    def _take_requests(self) -> list[UpstreamRequest]:
        """Remove and return the requests in flight, those of batches as separate requests."""
        return [each.next_request() for each in self._clear() for _ in range(each.remaining)]

    def _unreachable(self) -> TryAgainError:
        return unreachable(self._pool.url, self._pool.breaker.reason or "the proxy stops")

    def _refuse_queued(self) -> None:
        queue, self._queue, self._queued_bytes = self._queue, [], 0
        for request in queue:
            request.sink.fail(request.index, self._unreachable())

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                url = self._pool.located()
                link = await self._open(url)
                try:
                    await link.greet(url.greeting(self.protocol), self._pool.role)
                    if url is not self._pool.url:
                        raise OSError("the master has moved")
                except BaseException:
                    link.forget()
                    raise
        except Exception as error:
            self._connecting = None
            if not isinstance(error, (OSError, HandshakeError, FrameError)):  # a timeout is an OSError
                internal_error(error)
            silence = "it does not reply" + ("" if self._pool.tls is None else ", or does not speak TLS")
            reason = reason_of(error) or silence
            self._try_later(self._pool.failed(self, reason))
            self._refuse_queued()
            return
        self._connecting = None
        self.link = link
        self._opened_s = self._received_s = self._pool.clock()
        self._pool.opened(self)
        queue, self._queue, self._queued_bytes = self._queue, [], 0
        for request in queue:
            self.add(request)

    async def _open(self, url: UpstreamUrl) -> UpstreamProtocol:
        tls = self._pool.tls
        if tls is None and self._pool.poller is not None:
            made = UpstreamProtocol(self)
            self.at_end_of_round = self._pool.poller.call_before_flush
            transport = self._pool.poller.add(await connected(self._loop, url.path or (url.host, url.port)), made)
            assert native.pipelines is not None
            transport.set_interceptor(native.pipelines.ReplyInterceptor(self, NO_EPOCHS))
            return made
        if url.path:
            return (await self._loop.create_unix_connection(lambda: UpstreamProtocol(self), url.path))[1]
        context, name = (None, None) if tls is None else (tls.context(), tls.server_name or url.host)
        return (
            await self._loop.create_connection(
                lambda: UpstreamProtocol(self), url.host, url.port, ssl=context, server_hostname=name
            )
        )[1]

    def _try_later(self, pause_s: float) -> None:
        if not self._is_stopping and self._retry is None:
            self._retry = self._loop.call_later(pause_s, self._try_again)

    def try_now(self) -> None:
        """Connect now, if the connection waits for the end of a pause."""
        if self._retry is not None:
            self._retry.cancel()
            self._try_again()

    def _try_again(self) -> None:
        self._retry = None
        self.connect()


def unreachable(url: UpstreamUrl, reason: str) -> TryAgainError:
    """Return the error for a request that was not sent."""
    return TryAgainError(f"the upstream {url.address} cannot be reached: {reason}")
