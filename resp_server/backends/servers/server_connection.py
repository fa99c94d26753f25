"""One connection from a proxy to a server. All clients share it; it is opened when needed, and reopened when lost.

The requests of a round of the event loop are sent in one write, and replies arrive in order. A request has
minimum epochs. It is sent when the server has announced (STATE FOLLOW) that it has reached them. If the next reply is
long, it is received over the current socket, and the requests after it are sent again over a new socket.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import hiredis

from resp_server.acl.user import DEFAULT_USER
from resp_server.backends.servers.announced_epochs import AnnouncedEpochs
from resp_server.backends.servers.cluster_epochs import ClusterEpochs
from resp_server.backends.servers.job_keys import JobKeys
from resp_server.backends.servers.min_epochs import has_reached
from resp_server.backends.servers.reconnecting import Reconnecting
from resp_server.backends.servers.requests import ConnectionKey, DiscardSink, InFlightRequest, ServerRequest
from resp_server.backends.servers.server_access import ServerAccess
from resp_server.limits import SERVER_REQUESTS_BYTES_MAX, SERVER_REQUESTS_MAX
from resp_server.net.tls import reason_of
from resp_server.protocol.errors import GenericError, TryAgainError, internal_error
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.handshake import Handshake, HandshakeError
from resp_server.raw_replies.pipelined_connection import Link, PipelinedConnection
from resp_server.raw_replies.raw_reply import RawReply, as_bytes
from resp_server.raw_replies.reply_splitter import PING, FrameError, ReplySplitter, pack
from resp_server.session.epochs import EMPTY_EPOCHS, REMOVED, Epochs, JobEpoch, ReplyEpochs, epochs_in
from state_backend.apply.store_log import StoreLog
from state_backend.store.keyspace import UNREADABLE

logger = logging.getLogger("sparkis.proxy")

# The longest reply that is forwarded. A reply is buffered until it is complete (guess).
REPLY_BYTES_MAX = 256 << 20
# A longer reply gets its own connection (guess: 10 ms of a gigabit network).
LONG_REPLY_BYTES = 1 << 20
READS_COMMITTED = (b"STATE", b"FRESHNESS", b"COMMITTED")
# The start of a push about changed keys; the keys follow as one text, or nil.
CHANGED = b">2\r\n$7\r\nchanged\r\n"


class LongReplySockets(Protocol):
    """Takes over sockets whose next replies are long (`long_replies.LongReplies`)."""

    def take(self, link: ServerProtocol, request: ServerRequest, epochs: ReplyEpochs) -> None:
        """Take over a socket."""


class Agreement(Protocol):
    """Agrees with servers on the epochs of jobs whose log no server can read (`stalled_jobs.StalledJobs`)."""

    def agree(self) -> None:
        """Handle a server that can no longer read a job's log, or can again."""


class ClusterEvents(Protocol):
    """The cluster of a connection, which handles the connection's events (`state_cluster.StateCluster`)."""

    @property
    def on_changed(self) -> Callable[[Sequence[bytes] | None], None]: ...
    @property
    def follows_keys(self) -> bool: ...
    @property
    def log(self) -> StoreLog | None: ...
    @property
    def refused_logs(self) -> dict[str, str]: ...
    @property
    def access(self) -> ServerAccess: ...
    @property
    def epochs(self) -> ClusterEpochs: ...
    @property
    def keys(self) -> JobKeys: ...
    @property
    def long_replies(self) -> LongReplySockets: ...
    @property
    def stalled_jobs(self) -> Agreement: ...

    def send(self, request: ServerRequest) -> None:
        """Route a request to the server that answers it now."""

    def error_received(self, request: ServerRequest, reply: bytes, connection: ServerConnection) -> None:
        """Handle an error reply."""

    def on_topology_version(self, version: int, address: str) -> None:
        """Handle a server's report of its topology version."""

    def on_epoch(self, connection: ServerConnection, job: str, reached: JobEpoch) -> None:
        """Handle a server's report of a job's epoch."""

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


class ServerConnection(PipelinedConnection[InFlightRequest]):
    """One connection to a server, its queue, and its requests in flight."""

    link: ServerProtocol | None

    def __init__(self, cluster: ClusterEvents, key: ConnectionKey) -> None:
        super().__init__()
        self._cluster, self._access = cluster, cluster.access
        self.at_end_of_round = self._access.at_end_of_round
        self.key = key
        self._queue: list[ServerRequest] = []  # they wait for a connection, or for their minimum epochs
        self._queued_bytes = 0
        self._connecting: asyncio.Task[None] | None = None
        self._reconnecting = Reconnecting(self._access.clock)
        self._connected_s = 0.0
        self._last_received_s = 0.0
        self.announced = AnnouncedEpochs()
        self._logs: dict[str, tuple[str, str]] = {}  # the root and the identity of each job's log
        self._follows_keys = False  # the server reports changed keys
        self.is_detaching = False  # it left its socket to a long reply, and is connecting again

    @property
    def epochs(self) -> Epochs:
        """The epochs that the server has announced, as they count."""
        return self.announced.counted

    @property
    def reply_epochs(self) -> ReplyEpochs:
        """The epochs that a reply is from which arrives now."""
        return self.announced.reply_epochs

    @property
    def is_ready(self) -> bool:
        """Return whether the server has reached the epochs that it had announced before this connection."""
        return self.announced.is_ready

    @property
    def reason(self) -> str:
        """Why the server cannot be reached; empty: it can be."""
        return self._reconnecting.reason

    @property
    def is_connected(self) -> bool:
        """Return whether the connection is open."""
        return self.link is not None

    @property
    def is_usable(self) -> bool:
        """Return whether the server can take requests."""
        return self.is_ready or self.is_detaching

    @property
    def is_idle(self) -> bool:
        """Return whether no request is queued or in flight."""
        return not self._queue and not self.in_flight

    @property
    def pending_count(self) -> int:
        """The number of requests that wait for a reply."""
        return len(self._queue) + self.awaited_replies

    def add(self, request: ServerRequest) -> None:
        """Send a request as soon as possible."""
        if (
            self.pending_count >= SERVER_REQUESTS_MAX
            or self._output_bytes() + len(request.packed) > SERVER_REQUESTS_BYTES_MAX
        ):
            request.refuse(TryAgainError(f"too many requests wait for {self.key.address}"))
        elif self.announced.is_ready and has_reached(
            self.announced.counted, request.min_epochs or EMPTY_EPOCHS, self._cluster.epochs.removed_jobs
        ):
            request.sends += 1
            self.send(request.packed, request)
        elif (reason := self._cluster.reason_to_give_up(self)) is not None:
            request.refuse(GenericError(reason))
        else:
            if request.queued_until_s is None:
                request.queued_until_s = min(request.deadline_s, self._access.deadline_s())
            self._queue.append(request)
            self._queued_bytes += len(request.packed)
            self.connect()
            self.await_epochs(request.min_epochs or EMPTY_EPOCHS)

    def await_epochs(self, epochs: Epochs) -> None:
        """Have the server look for these epochs, for which a request waits, unless it has them or is looking.

        Otherwise it could find them later than requests wait: it looks ever more rarely at a bucket without news.
        """
        if self.link is not None:
            for job, reached in self.announced.to_await(epochs, self._cluster.epochs.removed_jobs).items():
                self._request((b"STATE", b"NOTICE", job.encode(), b"%d" % reached[0], b"%d" % reached[1]))

    def _request(self, request: Request) -> None:
        """Send a request of the proxy itself, whose reply is ignored."""
        packed, deadline_s = pack(request), self._access.deadline_s()
        self.send(packed, ServerRequest(packed, 0, 2, deadline_s, DiscardSink(), 0, self.key.address))

    def has_room(self, count: int) -> bool:
        return self.announced.is_ready and super().has_room(count)

    def take_queued(self) -> list[ServerRequest]:
        """Remove and return the queued requests."""
        requests, self._queue, self._queued_bytes = self._queue, [], 0
        return requests

    def take_sent(self) -> list[ServerRequest]:
        """Return the requests in flight that another server of the shard can answer; discard this server's replies.

        Requests to this very server stay.
        """
        if self.link is None:
            return []
        self.flush()
        sent, kept = list(self.in_flight), self.in_flight
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
        if self.link is None and self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def wake(self) -> None:
        """Try to connect at once, because another connection to the server was opened."""
        if self.link is None:
            self._reconnecting.wake()

    def check(self, now_s: float, patience_s: float) -> None:
        """Close a silent connection, and refuse requests that were queued for too long.

        Args:
            patience_s: A server that sends nothing for this time counts as failed; shorter if another server can
                answer.
        """
        timeout_s = self._access.timeout_s
        self.announced.forget_awaited()
        if self.link is not None:
            self._reconnecting.check(now_s, self._connected_s)
            if self.in_flight:
                # A look-up's deadline is one timeout after it was sent. So `until_s` is `patience_s` after it was sent.
                until_s = self.in_flight[0].deadline_s - timeout_s + patience_s
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
        if self.link is not None:
            self.link.cut(reason)

    def cut_silent(self) -> None:
        """Close the connection to a server that does not reply. It counts as unreachable since its last reply."""
        if self.link is not None:
            self._reconnecting.down_since_s = self._last_received_s
            self.link.cut(f"{self.key.address} did not reply in time")

    def close(self) -> None:
        """Close the connection for good."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self.link is not None and self.is_idle:
            self.link.forget()
            self.link = None
        self.cut("the proxy stops")

    # -- called by the protocol ---------------------------------------------------------------------------------------

    def receive_batch_replies(self, data: bytes) -> bytes:
        """Pass the replies at the front of received data to the forwarder's batches; return the rest of the data."""
        rest = self.take_batch_replies(data, self.announced.reply_epochs)
        if rest is not data:
            self._last_received_s = self._access.clock()
        return rest

    def receive_replies(self, replies: Sequence[RawReply]) -> None:
        """Take replies, in the order of the requests."""
        self._last_received_s = self._access.clock()
        for reply in map(as_bytes, replies):
            if reply[:1] == b">":
                self.handle_push(reply)
                continue
            if not self.in_flight:
                raise FrameError("more replies than requests")
            in_flight = self.in_flight[0]
            remaining = in_flight.remaining
            if remaining == 1:
                self.in_flight.popleft()
            self.awaited_replies -= 1
            if reply[:1] == b"-":
                self._cluster.error_received(in_flight.next_request(), reply, self)
            else:
                try:
                    in_flight.take([reply], self.announced.reply_epochs)
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
            if self.link is not None and (refusal := self._refusal()):
                self.cut(refusal)
        elif words[2] == b"epoch":
            self._epoch_announced(words[4].decode(), (int(words[5][1:]), int(words[6][1:])))
        elif words[2] == b"stalled":
            is_stalled = words[5] != b"$-1" and words[5] != b"_"
            self.announced.set_stalled(words[4].decode(), epochs_in(words[6]) if is_stalled else None)
            self._cluster.stalled_jobs.agree()

    def _epoch_announced(self, job: str, reached: JobEpoch) -> None:
        if reached == UNREADABLE:  # no request waits for its epochs
            self._cluster.keys.epoch_reported(job, reached)
            return
        self.announced.set_epoch(job, reached)
        self._cluster.epochs.count(self.announced)
        self._cluster.on_epoch(self, job, self.announced.counted.get(job, REMOVED))

    def hold(self, job: str, reached: JobEpoch | None) -> None:
        """Have the server answer from an earlier epoch of a job, whose log it cannot read; None: from the newest."""
        if self.announced.held.get(job) != reached and self.link is not None:
            self.announced.set_held(job, reached)
            words = () if reached is None else (b"%d" % reached[0], b"%d" % reached[1])
            self._request((b"STATE", b"HOLD", job.encode(), *words))

    def _refusal(self) -> str:
        """Return why the server must not answer: none of its jobs is of the log that the proxy has. Empty: it may."""
        own = self._cluster.log
        if own is None or not self._logs or own.id in {identity for _, identity in self._logs.values()}:
            return ""
        root, identity = next(iter(self._logs.values()))
        refusal = (
            f"it serves the log {root} (identity {identity}), and the proxy's --log is {own.root} ({own.id}); "
            "give the server or the proxy the other's log"
        )
        if self._cluster.refused_logs.get(self.key.address) != refusal:
            self._cluster.refused_logs[self.key.address] = refusal
            logger.error("server %s is refused: %s; its keys are errors", self.key.address, refusal)
        return refusal

    def follow(self) -> None:
        """Request the server to report changed keys, or to stop, as `follows_keys` says."""
        if self.link is not None and self._follows_keys != self._cluster.follows_keys:
            self._follows_keys = self._cluster.follows_keys
            packed = pack(follow_request(has_keys=self._follows_keys))
            self.send(packed, ServerRequest(packed, 0, 2, self._access.deadline_s(), DiscardSink(), 0))

    def send_queued(self) -> None:
        """Send the queued requests whose minimum epochs the server has reached."""
        if not self.is_ready and self.link is not None:
            self.announced.update_readiness(self._cluster.epochs.removed_jobs)
            self.is_detaching &= not self.is_ready
            self._cluster.epochs.check_alignment()
        if self.is_ready and self._queue:
            for request in self.take_queued():
                self.add(request)

    def detach(self, link: ServerProtocol) -> None:
        """Leave the socket to the long reply that is arriving; send the requests after it over a new socket."""
        self.close_batch()
        in_flight, self.link = self.in_flight[0], None
        request = in_flight.next_request()
        if not in_flight.remaining or in_flight is request:
            self.in_flight.popleft()
        self.is_detaching, self.announced.is_ready = True, False
        queued = self._take_in_flight()
        self._cluster.tracking_lost()
        self._cluster.long_replies.take(link, request, self.reply_epochs)
        for each in queued:
            self._cluster.send(each)
        self.connect()

    def disconnected(self, reason: str) -> None:
        """Handle the loss of the connection."""
        self.link, self.announced.is_ready = None, False
        self._cluster.tracking_lost()
        requests = [*self._take_in_flight(), *self.take_queued()]
        self._failed(reason, was_reached=True)
        log = logger.warning if requests else logger.info
        log("lost the connection to %s with %d requests: %s", self.key.address, len(requests), reason)
        self._cluster.resend_lost(requests, reason)

    def _take_in_flight(self) -> list[ServerRequest]:
        """Remove and return the requests in flight, those of batches as separate requests."""
        return [each.next_request() for each in self._clear() for _ in range(each.remaining)]

    def _output_bytes(self) -> int:
        return self._queued_bytes + (self.link.output_bytes if self.link is not None else 0)

    @property
    def is_given_up(self) -> bool:
        """Return whether to refuse requests at once: the server is unreachable for longer than a request may wait.

        Attempts to connect go on meanwhile. A host that drops packets delays each of them by the whole timeout.
        """
        down_since_s = self._reconnecting.down_since_s
        return (
            down_since_s is not None
            and self._connecting is not None
            and self._access.clock() - down_since_s > self._access.timeout_s
        )

    async def _connect(self) -> None:
        self.announced.begin(self._cluster.epochs.newest_announced_by(self.key.address))
        self._logs = {}
        try:
            await self._reconnecting.pause()
            async with asyncio.timeout(self._access.timeout_s):
                link = await self._access.connect(lambda: ServerProtocol(self), self.key.address)
                try:
                    self._follows_keys = self._cluster.follows_keys
                    await link.greet(self.key, self._access.password, has_keys=self._follows_keys)
                    if refusal := self._refusal():
                        raise HandshakeError(refusal)
                except BaseException:
                    link.forget()
                    raise
        except Exception as error:
            if not isinstance(error, (OSError, ValueError, OverflowError, HandshakeError, FrameError)):
                internal_error(error)  # the address or the server causes the other exceptions
            text = reason_of(error) or "it does not reply"
            self._failed(f"{self.key.address} cannot be reached: {text}", was_reached=False)
            if self.is_given_up:
                for request in self.take_queued():
                    request.refuse(GenericError(self.reason))
        else:
            self.link = link
            self._connected_s = self._last_received_s = self._access.clock()
            self._reconnecting.succeeded()
            try:
                self.follow()
                self.send_queued()
            except Exception as error:  # the requests that wait would do so in vain
                internal_error(error)
                self.cut("an internal error")
        finally:
            self._connecting = None
        self._cluster.state_changed(self)

    def _failed(self, reason: str, *, was_reached: bool) -> None:
        self.is_detaching = False
        self._reconnecting.failed(reason, was_reached=was_reached)


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


class ServerProtocol(asyncio.Protocol, Link):
    """A socket to a server. It belongs to a connection, until it is left to a long reply."""

    _transport: asyncio.Transport

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

    async def greet(self, key: ConnectionKey, password: str | None, *, has_keys: bool) -> None:
        """Authenticate, and receive the server's epochs; HandshakeError if it refuses a request."""
        words: list[Request] = [] if password is None else [(b"AUTH", DEFAULT_USER, password.encode())]
        words += [(b"HELLO", b"%d" % key.protocol), (b"CLIENT", b"SETNAME", b"sparkis-proxy")]
        words += [READS_COMMITTED] if key.is_committed else []
        # The server announces its epochs after the reply to STATE FOLLOW, so they arrive before the reply to PING.
        words += [(b"READONLY",), follow_request(has_keys=has_keys), (b"PING",)]
        # A server outside a cluster refuses READONLY, and does not need it. One of a version that has no values before
        # their commit refuses STATE FRESHNESS.
        self._handshake = Handshake(words, ((b"READONLY",), READS_COMMITTED).__contains__)
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
