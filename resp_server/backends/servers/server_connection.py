"""One connection from a proxy to a server. All clients share it; it is opened when needed, and reopened when lost.

The requests of a round of the event loop are sent in one write, and replies arrive in order. A request has
minimum epochs. It is sent when the server has announced (STATE FOLLOW) that it has reached them. If the next reply is
long, it is received over the current socket, and the requests after it are sent again over a new socket.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, cast

import hiredis

from resp_server.acl.rules import DEFAULT_USER
from resp_server.backends.servers.job_keys import JobKeys
from resp_server.backends.servers.min_epochs import has_reached
from resp_server.backends.servers.outages import Outages
from resp_server.backends.servers.requests import PING, DiscardSink, InFlightRequest, ServerRequest
from resp_server.forwarding.handshake import Handshake, HandshakeError
from resp_server.forwarding.pipelined_connection import REQUESTS_MAX, PipelinedConnection
from resp_server.forwarding.raw_replies import RawReply, as_bytes
from resp_server.forwarding.reply_splitter import FrameError, ReplySplitter, pack
from resp_server.limits import SERVER_REQUESTS_BYTES_MAX
from resp_server.net.tls import Certificates, reason_of
from resp_server.protocol.errors import GenericError, TryAgainError, internal_error
from resp_server.protocol.request_parser import Request
from resp_server.session.epoch_feed import EMPTY_EPOCHS, NO_EPOCHS, REMOVED, Epochs, JobEpoch, ReplyEpochs, epochs_in
from state_backend.apply.store_log import StoreLog
from state_backend.store.keyspace import UNREADABLE

logger = logging.getLogger("sparkis.proxy")

# Pauses between attempts to connect. Several attempts a second cost little. The pause also grows if a server accepts
# connections and closes them; it starts again at `PAUSE_S` after a connection that lasted for `PAUSE_S_MAX`.
PAUSE_S = 0.02
PAUSE_S_MAX = 0.25
# The longest reply that is forwarded. A reply is buffered until it is complete (guess).
REPLY_BYTES_MAX = 256 << 20
# A longer reply gets its own connection (guess: 10 ms of a gigabit network).
LONG_REPLY_BYTES = 1 << 20
# The start of a push about changed keys; the keys follow as one text, or nil.
CHANGED = b">2\r\n$7\r\nchanged\r\n"


class ConnectionKey(NamedTuple):
    """Identifies a connection to a server.

    Args:
        is_long: For requests that may take long.
        is_history: For histories.
    """

    address: str
    protocol: int
    is_long: bool
    is_history: bool = False


class ClusterFacts(Protocol):
    """The facts of an application that a connection to one of its servers needs.

    seen: the newest epochs that each server has announced. removed_jobs: jobs that all servers have dropped.
    follows_keys: servers have to report changed keys. log: the proxy's own log; None: it has none, or the log has no
    identity.
    """

    @property
    def password(self) -> str | None: ...
    @property
    def certificates(self) -> Certificates | None: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def seen(self) -> Mapping[str, Epochs]: ...
    @property
    def removed_jobs(self) -> set[str]: ...
    @property
    def keys(self) -> JobKeys: ...
    @property
    def log(self) -> StoreLog | None: ...
    @property
    def follows_keys(self) -> bool: ...

    def deadline_s(self, is_long: bool = False) -> float:
        """Return the deadline of a request that is sent now."""

    def shared_epochs(self, epochs: Epochs) -> ReplyEpochs:
        """Return an object with these epochs, the same one for all servers at the same epochs."""

    def at_end_of_round(self, then: Callable[[], None]) -> None:
        """Call back at the end of this round of the event loop."""

    async def connect(
        self, make: Callable[[], ServerProtocol], host: str, port: int, context: ssl.SSLContext | None
    ) -> ServerProtocol:
        """Open a socket to a server."""

    def send(self, request: ServerRequest) -> None:
        """Route a request to the server that answers it now."""


class ClusterEvents(ClusterFacts, Protocol):
    """Handles the events of the connections to an application's servers."""

    @property
    def on_changed(self) -> Callable[[Sequence[bytes] | None], None]: ...
    @property
    def outages(self) -> Outages: ...

    def agree_on_epochs(self) -> None:
        """Handle a server that can no longer read a job's log, or can again."""

    def error_received(self, request: ServerRequest, reply: bytes, connection: ServerConnection) -> None:
        """Handle an error reply."""

    def on_topology_version(self, version: int, address: str) -> None:
        """Handle a server's report of its topology version."""

    def on_epoch(self, connection: ServerConnection, job: str, reached: JobEpoch) -> None:
        """Handle a server's report of a job's epoch."""

    def log_refused(self, address: str, reason: str) -> None:
        """Handle a server of another log."""

    def check_alignment(self) -> None:
        """Compare the epochs of all servers, after one became ready."""

    def state_changed(self, connection: ServerConnection) -> None:
        """Handle a connection that was opened, or a failed attempt to open it."""

    def resend_lost(self, requests: Sequence[ServerRequest], reason: str) -> None:
        """Handle a lost connection and the requests that were sent over it."""

    def tracking_lost(self) -> None:
        """Handle a gap in the reports of changed keys."""

    def cut_silent_server(self, address: str) -> None:
        """Handle a server that does not reply."""

    def reason_to_give_up(self, connection: ServerConnection) -> str | None:
        """Return the reason why the server of a connection takes no requests for now; None: it may take some."""

    def detach_long_reply(self, link: ServerProtocol, request: ServerRequest, epochs: ReplyEpochs) -> None:
        """Take over a socket whose next reply is long."""


class ServerConnection(PipelinedConnection[InFlightRequest]):
    """One connection to a server, its queue, and its requests in flight."""

    def __init__(self, cluster: ClusterEvents, key: ConnectionKey) -> None:
        super().__init__()
        self._cluster = cluster
        self.key = key
        self._loop = asyncio.get_running_loop()
        self._queue: list[ServerRequest] = []  # they wait for a connection, or for their minimum epochs
        self._queued_bytes = 0
        self._link: ServerProtocol | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._pause_s = 0.0
        self._not_before_s = 0.0
        self._connect_now = asyncio.Event()  # ends the pause before an attempt to connect
        self._down_since_s: float | None = None
        self._was_reached = False  # the last failure was the loss of a connection, not a failed attempt to connect
        self._connected_s = 0.0
        self._last_received_s = 0.0
        self._min_epochs: Epochs = EMPTY_EPOCHS  # the server had announced these epochs before this connection
        self.announced: Epochs = EMPTY_EPOCHS
        self.stalled: dict[str, list[JobEpoch]] = {}  # jobs whose log the server cannot read, and their epochs there
        self.held: dict[str, JobEpoch] = {}  # the epochs that STATE HOLD requested
        self.epochs: Epochs = EMPTY_EPOCHS  # the announced ones as they count (see `outages`)
        self.reply_epochs: ReplyEpochs = NO_EPOCHS  # `epochs` in the form of a reply's epochs
        self._awaited: dict[str, JobEpoch] = {}  # the epochs that the server was asked to look for since the last check
        self._logs: dict[str, tuple[str, str]] = {}  # the root and the identity of each job's log
        self._follows_keys = False  # the server reports changed keys
        self.is_ready = False
        self.is_detaching = False  # it left its socket to a long reply, and is connecting again
        self.reason = ""

    @property
    def is_connected(self) -> bool:
        """Return whether the connection is open."""
        return self._link is not None

    @property
    def is_usable(self) -> bool:
        """Return whether the server can take requests."""
        return self.is_ready or self.is_detaching

    @property
    def is_idle(self) -> bool:
        """Return whether no request is queued or in flight."""
        return not self._queue and not self._in_flight

    @property
    def pending_count(self) -> int:
        """The number of requests that wait for a reply."""
        return len(self._queue) + self._awaited_replies

    def add(self, request: ServerRequest) -> None:
        """Send a request as soon as possible."""
        if self.pending_count >= REQUESTS_MAX or self._output_bytes() + len(request.packed) > SERVER_REQUESTS_BYTES_MAX:
            request.refuse(GenericError(f"too many requests wait for {self.key.address}"))
        elif self.is_ready and has_reached(self.epochs, request.min_epochs or EMPTY_EPOCHS, self._cluster.removed_jobs):
            request.sends += 1
            self.send(request.packed, request)
        elif (reason := self._cluster.reason_to_give_up(self)) is not None:
            request.refuse(GenericError(reason))
        else:
            if request.queued_until_s is None:
                request.queued_until_s = min(request.deadline_s, self._cluster.clock() + self._cluster.timeout_s)
            self._queue.append(request)
            self._queued_bytes += len(request.packed)
            self.connect()
            self.await_epochs(request.min_epochs or EMPTY_EPOCHS)

    def await_epochs(self, epochs: Epochs) -> None:
        """Have the server look for these epochs, for which a request waits, unless it has them or is looking.

        Otherwise it could find them later than requests wait: it looks ever more rarely at a bucket without news.
        """
        for job, awaited in epochs.items() if self._link is not None else ():
            known = max(self.epochs.get(job, REMOVED), self._awaited.get(job, REMOVED))
            if known < awaited and job not in self._cluster.removed_jobs:
                self._awaited[job] = awaited
                packed = pack((b"STATE", b"NOTICE", job.encode(), *(b"%d" % number for number in awaited)))
                deadline_s = self._cluster.deadline_s()
                self.send(packed, ServerRequest(packed, 0, 2, deadline_s, DiscardSink(), 0, self.key.address))

    @property
    def _open_link(self) -> ServerProtocol | None:
        return self._link

    def _at_end_of_round(self, then: Callable[[], None]) -> None:
        self._cluster.at_end_of_round(then)

    def has_room(self, count: int) -> bool:
        return self.is_ready and super().has_room(count)

    def take_queued(self) -> list[ServerRequest]:
        """Remove and return the queued requests."""
        requests, self._queue, self._queued_bytes = self._queue, [], 0
        return requests

    def take_sent(self) -> list[ServerRequest]:
        """Return the requests in flight that another server of the shard can answer; discard this server's replies.

        Requests to this very server stay.
        """
        if self._link is None:
            return []
        self._flush()
        sent, kept = list(self._in_flight), self._in_flight
        kept.clear()
        taken: list[ServerRequest] = []
        for each in sent:
            if isinstance(each, ServerRequest) and each.address is not None:
                kept.append(each)
                continue
            discarded = ServerRequest(PING, 0, 2, each.deadline_s, DiscardSink(), 0, self.key.address)
            kept.extend([discarded] * each.remaining)
            taken += [each.next_request() for _ in range(each.remaining)]
        return taken

    def connect(self) -> None:
        """Open the connection, unless it is open or is being opened."""
        if self._link is None and self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())

    def wake(self) -> None:
        """Try to connect at once, because another connection to the server was opened."""
        if self._link is None:
            self._down_since_s, self.reason = None, ""
            if not self._was_reached:
                self._not_before_s = 0.0
                self._connect_now.set()

    def check(self, now_s: float, patience_s: float) -> None:
        """Close a silent connection, and refuse requests that were queued for too long.

        Args:
            patience_s: A server that sends nothing for this time counts as failed; shorter if another server can
                answer.
        """
        timeout_s = self._cluster.timeout_s
        self._awaited.clear()
        if self._link is not None:
            if now_s > self._connected_s + PAUSE_S_MAX:
                self._pause_s = 0.0
            if self._in_flight:
                # A look-up's deadline is one timeout after it was sent. So `until_s` is `patience_s` after it was sent.
                until_s = self._in_flight[0].deadline_s - timeout_s + patience_s
                if now_s > max(until_s, self._last_received_s + patience_s):
                    self._cluster.cut_silent_server(self.key.address)
            elif now_s > self._last_received_s + timeout_s / 2:
                self.send(PING, ServerRequest(PING, 0, 2, now_s + timeout_s, DiscardSink(), 0))
        if any((request.queued_until_s or 0.0) <= now_s for request in self._queue):
            for request in self.take_queued():
                if (request.queued_until_s or 0.0) > now_s:
                    self.add(request)
                elif self.is_ready:
                    request.refuse(TryAgainError(f"{self.key.address} has not reached the epochs of earlier replies"))
                else:
                    request.refuse(GenericError(self.reason or f"{self.key.address} cannot be reached in time"))

    def cut(self, reason: str) -> None:
        """Close the connection, if it is open; requests in flight are sent again."""
        if self._link is not None:
            self._link.cut(reason)

    def cut_silent(self) -> None:
        """Close the connection to a server that does not reply. It counts as unreachable since its last reply."""
        if self._link is not None:
            self._down_since_s = self._last_received_s
            self._link.cut(f"{self.key.address} did not reply in time")

    def close(self) -> None:
        """Close the connection for good."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None and self.is_idle:
            self._link.forget()
            self._link = None
        self.cut("the proxy stops")

    # -- called by the protocol ---------------------------------------------------------------------------------------

    def receive_batch_replies(self, data: bytes) -> bytes:
        """Pass the replies at the front of received data to the forwarder's batches; return the rest of the data."""
        rest = self.take_batch_replies(data, self.reply_epochs)
        if rest is not data:
            self._last_received_s = self._cluster.clock()
        return rest

    def receive_replies(self, replies: Sequence[RawReply]) -> None:
        """Take replies, in the order of the requests."""
        self._last_received_s = self._cluster.clock()
        for reply in map(as_bytes, replies):
            if reply[:1] == b">":
                self.handle_push(reply)
                continue
            if not self._in_flight:
                raise FrameError("more replies than requests")
            in_flight = self._in_flight[0]
            remaining = in_flight.remaining
            if remaining == 1:
                self._in_flight.popleft()
            self._awaited_replies -= 1
            if reply[:1] == b"-":
                self._cluster.error_received(in_flight.next_request(), reply, self)
            else:
                try:
                    in_flight.take([reply], self.reply_epochs)
                except Exception as error:
                    in_flight.fail_all(error)
                    if remaining > 1:
                        in_flight.remaining = remaining - 1

    def handle_push(self, push: bytes) -> None:
        """Handle a push about epochs, the topology or changed keys."""
        if push.startswith(CHANGED):
            self._cluster.on_changed(_keys_in(push[len(CHANGED) :]))
            return
        words = push.split(b"\r\n")
        if words[2] == b"topology":
            self._cluster.on_topology_version(int(words[3][1:]), self.key.address)
        elif words[2] == b"log":
            self._logs[words[4].decode()] = words[6].decode(), words[8].decode()
            if self._link is not None and (refusal := self._refusal()):
                self.cut(refusal)
        elif words[2] == b"epoch":
            job, reached = words[4].decode(), (int(words[5][1:]), int(words[6][1:]))
            if reached == UNREADABLE:  # no request waits for its epochs
                self._cluster.keys.epoch_reported(job, reached)
                return
            others = {name: each for name, each in self.announced.items() if name != job}
            self.announced = others if reached == REMOVED else {**others, job: reached}
            if self.held.get(job) != reached:
                self.held.pop(job, None)  # the server has left that epoch, so it may have to be requested again
            self.count_epochs()
            self._cluster.on_epoch(self, job, self.epochs.get(job, REMOVED))
        elif words[2] == b"stalled":
            job = words[4].decode()
            self.stalled = {name: each for name, each in self.stalled.items() if name != job}
            if words[5] != b"$-1" and words[5] != b"_":
                self.stalled[job] = epochs_in(words[6])
            self.held.pop(job, None)
            self._cluster.agree_on_epochs()

    def count_epochs(self) -> None:
        """Set `epochs` to the announced ones as they count now."""
        counted = self._cluster.outages.counted
        self.reply_epochs = self._cluster.shared_epochs(
            {job: counted(job, each) for job, each in self.announced.items()}
        )
        self.epochs = self.reply_epochs[0]

    def hold(self, job: str, reached: JobEpoch | None) -> None:
        """Have the server answer from an earlier epoch of a job, whose log it cannot read; None: from the newest."""
        if self.held.get(job) == reached or self._link is None:
            return
        self.held = {name: each for name, each in self.held.items() if name != job}
        if reached is not None:
            self.held[job] = reached
        words = () if reached is None else (b"%d" % reached[0], b"%d" % reached[1])
        packed = pack((b"STATE", b"HOLD", job.encode(), *words))
        self.send(packed, ServerRequest(packed, 0, 2, self._cluster.deadline_s(), DiscardSink(), 0, self.key.address))

    def _refusal(self) -> str:
        """Return why the server must not answer: none of its jobs is of the log that the proxy has. Empty: it may."""
        own = self._cluster.log
        if own is None or not self._logs or own.id in {identity for _, identity in self._logs.values()}:
            return ""
        root, identity = next(iter(self._logs.values()))
        self._cluster.log_refused(
            self.key.address,
            refusal
            := f"it serves the log {root} (identity {identity}), and the proxy's --log is {own.root} ({own.id}); "
            "give the server or the proxy the other's log",
        )
        return refusal

    def follow(self) -> None:
        """Request the server to report changed keys, or to stop, as `follows_keys` says."""
        if self._link is not None and self._follows_keys != self._cluster.follows_keys:
            self._follows_keys = self._cluster.follows_keys
            packed = pack(follow_request(has_keys=self._follows_keys))
            self.send(packed, ServerRequest(packed, 0, 2, self._cluster.deadline_s(), DiscardSink(), 0))

    def send_queued(self) -> None:
        """Send the queued requests whose minimum epochs the server has reached."""
        if not self.is_ready and self._link is not None:
            self.is_ready = has_reached(self.epochs, self._min_epochs, self._cluster.removed_jobs)
            self.is_detaching &= not self.is_ready
            self._cluster.check_alignment()
        if self.is_ready and self._queue:
            for request in self.take_queued():
                self.add(request)

    def detach(self, link: ServerProtocol) -> None:
        """Leave the socket to the long reply that is arriving; send the requests after it over a new socket."""
        self._close_batch()
        in_flight, self._link = self._in_flight[0], None
        request = in_flight.next_request()
        if not in_flight.remaining or in_flight is request:
            self._in_flight.popleft()
        self.is_detaching, self.is_ready = True, False
        queued = self._take_in_flight()
        self._cluster.tracking_lost()
        self._cluster.detach_long_reply(link, request, self.reply_epochs)
        for each in queued:
            self._cluster.send(each)
        self.connect()

    def disconnected(self, reason: str) -> None:
        """Handle the loss of the connection."""
        self._link, self.is_ready = None, False
        self._cluster.tracking_lost()
        requests = [*self._take_in_flight(), *self.take_queued()]
        self._failed(reason)
        self._was_reached = True
        log = logger.warning if requests else logger.info
        log("lost the connection to %s with %d requests: %s", self.key.address, len(requests), reason)
        self._cluster.resend_lost(requests, reason)

    def _take_in_flight(self) -> list[ServerRequest]:
        """Remove and return the requests in flight, those of batches as separate requests."""
        return [each.next_request() for each in self._clear() for _ in range(each.remaining)]

    def _output_bytes(self) -> int:
        return self._queued_bytes + (self._link.output_bytes if self._link is not None else 0)

    @property
    def is_given_up(self) -> bool:
        """Return whether to refuse requests at once: the server is unreachable for longer than a request may wait.

        Attempts to connect go on meanwhile. A host that drops packets delays each of them by the whole timeout.
        """
        return (
            self._down_since_s is not None
            and self._connecting is not None
            and self._cluster.clock() - self._down_since_s > self._cluster.timeout_s
        )

    async def _connect(self) -> None:
        host, _, port = self.key.address.rpartition(":")
        certificates = self._cluster.certificates
        self.announced, self.epochs, self.reply_epochs = EMPTY_EPOCHS, EMPTY_EPOCHS, NO_EPOCHS
        self.stalled, self.held, self._logs = {}, {}, {}
        self._min_epochs = dict(self._cluster.seen.get(self.key.address, EMPTY_EPOCHS))
        try:
            await self._pause()
            async with asyncio.timeout(self._cluster.timeout_s):
                context = None if certificates is None else certificates.for_server()
                link = await self._cluster.connect(lambda: ServerProtocol(self), host, int(port), context)
                try:
                    self._follows_keys = self._cluster.follows_keys
                    await link.greet(self.key.protocol, self._cluster.password, has_keys=self._follows_keys)
                    if refusal := self._refusal():
                        raise HandshakeError(refusal)
                except BaseException:
                    link.forget()
                    raise
        except Exception as error:
            if not isinstance(error, (OSError, ValueError, OverflowError, HandshakeError, FrameError)):
                internal_error(error)  # the address or the server causes the other exceptions
            text = reason_of(error) or "it does not reply"
            self._failed(f"{self.key.address} cannot be reached: {text}")
            self._was_reached = False
            if self.is_given_up:
                for request in self.take_queued():
                    request.refuse(GenericError(self.reason))
        else:
            self._link = link
            self._connected_s = self._last_received_s = self._cluster.clock()
            self._down_since_s, self.reason = None, ""
            try:
                self.follow()
                self.send_queued()
            except Exception as error:  # the requests that wait would do so in vain
                internal_error(error)
                self.cut("an internal error")
        finally:
            self._connecting = None
        self._cluster.state_changed(self)

    async def _pause(self) -> None:
        """Wait for the end of the pause before the next attempt to connect."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._not_before_s - self._cluster.clock())):
                await self._connect_now.wait()

    def _failed(self, reason: str) -> None:
        now_s = self._cluster.clock()
        self._connect_now.clear()
        if self._down_since_s is None:
            self._down_since_s = now_s
        self.is_detaching = False
        self.reason = reason
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(max(2 * self._pause_s, PAUSE_S), PAUSE_S_MAX)


def follow_request(*, has_keys: bool) -> Request:
    """Return the request after which a server announces epochs and topologies.

    Args:
        has_keys: And changed keys.
    """
    return (b"STATE", b"FOLLOW", b"KEYS") if has_keys else (b"STATE", b"FOLLOW")


def _keys_in(text: bytes) -> list[bytes] | None:
    """Return the changed keys of a push; None: any key may have changed. FrameError if it is malformed."""
    if not text.startswith(b"$"):
        return None
    reader = hiredis.Reader()
    reader.feed(text.partition(b"\r\n")[2])
    try:
        keys = reader.gets()
    except hiredis.HiredisError as error:
        raise FrameError(f"a push about changed keys is malformed: {error}") from None
    if not isinstance(keys, list) or not all(isinstance(key, bytes) for key in keys):
        raise FrameError("a push about changed keys contains values that are not keys")
    return keys


class ReplyReceiver(Protocol):
    """Receives the replies of a socket."""

    def receive_replies(self, replies: Sequence[RawReply]) -> None:
        """Take replies, in order."""

    def disconnected(self, reason: str) -> None:
        """Handle the loss of the connection."""


class ServerProtocol(asyncio.Protocol):
    """A socket to a server. It belongs to a connection, until it is left to a long reply."""

    _transport: asyncio.Transport
    is_idle = False  # the compiled sockets read this attribute; the fast path is for clients only

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._receiver: ReplyReceiver | None = connection
        self._splitter = ReplySplitter(REPLY_BYTES_MAX)
        self._handshake: Handshake | None = None
        self._is_lost = False
        self._reason = f"{connection.key.address} closed the connection"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = self._transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def greet(self, protocol: int, password: str | None, *, has_keys: bool) -> None:
        """Authenticate, and receive the server's epochs; HandshakeError if it refuses a request."""
        words: list[Request] = [] if password is None else [(b"AUTH", DEFAULT_USER, password.encode())]
        words += [(b"HELLO", b"%d" % protocol), (b"CLIENT", b"SETNAME", b"sparkis-proxy")]
        # The server announces its epochs after the reply to STATE FOLLOW, so they arrive before the reply to PING.
        words += [(b"READONLY",), follow_request(has_keys=has_keys), (b"PING",)]
        # A server outside a cluster refuses READONLY, and does not need it.
        self._handshake = Handshake(words, optional=(b"READONLY",))
        await self._handshake.run(self._transport)
        self._handshake = None
        if self._is_lost:
            raise HandshakeError(self._reason)

    @property
    def output_bytes(self) -> int:
        """The size of unsent output."""
        return self._transport.get_write_buffer_size()

    @property
    def partial_bytes(self) -> int:
        """The size that the incomplete reply will have at least."""
        return self._splitter.partial_bytes

    def set_receiver(self, receiver: ReplyReceiver) -> None:
        """Pass further replies to another receiver, long ones as the chunks in which they arrive."""
        self._receiver = receiver
        self._splitter.returns_chunks = True

    def pause(self, is_paused: bool) -> None:
        """Pause reading, or resume it."""
        if is_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self._transport.write(data)

    def cut(self, reason: str) -> None:
        """Close the socket now; the receiver is notified."""
        self._reason = reason
        self._transport.abort()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.disconnected(self._reason)

    def forget(self) -> None:
        """Close the socket without notifying the receiver."""
        self._receiver = None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            if self._receiver is self._connection and self._handshake is None and self._splitter.is_empty:
                data = self._connection.receive_batch_replies(data)
                if not data:
                    return
            replies = self._splitter.feed(data)
            if self._handshake is not None:
                self._take_handshake_replies(self._handshake, replies)
            elif self._receiver is not None:
                if replies:
                    self._receiver.receive_replies(replies)
                if self._receiver is self._connection and self._splitter.partial_bytes > LONG_REPLY_BYTES:
                    self._connection.detach(self)
            if self._splitter.error is not None:
                raise self._splitter.error
        except Exception as error:
            if not isinstance(error, (FrameError, ValueError, IndexError)):
                internal_error(error)
            self._fail(f"its data is malformed: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._fail(self._reason if error is None else f"{self._reason}: {error}")

    def _take_handshake_replies(self, handshake: Handshake, replies: Sequence[RawReply]) -> None:
        for reply in map(as_bytes, replies):
            if reply[:1] == b">":
                self._connection.handle_push(reply)
            else:
                handshake.take(reply)

    def _fail(self, reason: str) -> None:
        if self._handshake is not None:
            self._handshake.fail(reason)
        else:
            self.cut(reason)
