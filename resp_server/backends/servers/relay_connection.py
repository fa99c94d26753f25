"""A proxy's connection to a server that subscribes to channels and patterns of the proxy's clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import hiredis

from resp_server.acl.user import DEFAULT_USER
from resp_server.backends.servers.field_notifications import FieldReadError
from resp_server.backends.servers.message_delivery import MessageDelivery
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.limits import SLOW_CLIENT_POLL_S, SLOW_CLIENT_WAIT_S
from resp_server.net.tls import reason_of
from resp_server.protocol.request_parser import Request
from resp_server.push.pubsub import MessageBatch
from resp_server.raw_replies.answers import StepPauses, in_background, run_in_steps
from resp_server.raw_replies.raw_reply import Steps
from resp_server.raw_replies.reply_sinks import Defer
from resp_server.raw_replies.reply_splitter import PING, pack
from resp_server.session.session import Session
from resp_server.session.subscriptions import SUBSCRIBED_BYTES_MAX, SUBSCRIPTIONS_MAX, SubscriptionKind

logger = logging.getLogger("sparkis.proxy")

# The interval of checking the connections, among others (guess).
CHECK_S = 0.05
# The pause before reconnecting to a server that cannot be reached.
PAUSE_S = 0.5
# A server that is silent for one timeout of the proxy is pinged. After this many timeouts it counts as lost (guess).
SILENT_TIMEOUTS_MAX = 5
NAMES_PER_REQUEST = 1_000
# Frames of a server that are delivered together, after the fields that they need were read (guess: 2 ms).
FRAMES_AT_ONCE = 64
VERBS = {
    SubscriptionKind.CHANNEL: b"SUBSCRIBE",
    SubscriptionKind.PATTERN: b"PSUBSCRIBE",
    SubscriptionKind.SHARD: b"SSUBSCRIBE",
}

# The channels and patterns to subscribe to at a server.
Names = dict[SubscriptionKind, set[bytes]]
# Channels and patterns whose server may have changed.
Changes = Iterator[tuple[SubscriptionKind, bytes]]


def no_names() -> Names:
    """Return no channel and no pattern of any kind."""
    return {kind: set() for kind in VERBS}


def each_name(names: Mapping[SubscriptionKind, Iterable[bytes]]) -> Changes:
    """Iterate over channels and patterns, each with its kind."""
    return ((kind, name) for kind, some in names.items() for name in some)


class RelayEvents(NamedTuple):
    """The functions that a connection calls.

    Args:
        enqueue: Gets names to assign again, or a function to call after the names before were sent to servers.
        is_home: Returns whether a connection's server relays messages between clients.
        on_pong: Is called when the server has confirmed some subscriptions.
    """

    enqueue: Callable[[Changes | Callable[[], None]], None]
    is_home: Callable[[RelayConnection], bool]
    on_pong: Callable[[], None]
    on_lost: Callable[[RelayConnection], None]


class RelayConnection(asyncio.Protocol):
    """A connection to a server that subscribes to channels and patterns of the proxy's clients."""

    def __init__(self, events: RelayEvents, delivery: MessageDelivery, cluster: StateCluster, address: str) -> None:
        self.address = address
        self.cluster = cluster
        self.desired = no_names()
        self._desired_bytes = 0
        self.pings = 0  # sent, or to be sent after connecting
        self.pongs = 0
        self._events, self._messages = events, delivery
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._subscribed = no_names()
        self._changed = no_names()  # to be subscribed or unsubscribed by the next request
        self._refused: list[bytes] = []  # shard channels that the server has refused or ended
        self._is_resubscribing = False  # the connection is new, and has not all desired names yet
        self._notified: str | None = None
        self._reader = hiredis.Reader()
        self._connecting: asyncio.Task[None] | None = None
        self._not_before_s = 0.0
        # Checks since data was received. A count, because the clock also advances while this process is stopped.
        self._silent_checks = 0
        self._paused_steps = 0
        self._is_delivering = False

    def has_room(self, name: bytes) -> bool:
        """Return whether the server's limits allow this connection another channel or pattern."""
        count = sum(map(len, self.desired.values()))
        return count < SUBSCRIPTIONS_MAX and self._desired_bytes + len(name) <= SUBSCRIBED_BYTES_MAX

    def set_desired(self, kind: SubscriptionKind, name: bytes, is_desired: bool) -> None:
        """Add a channel or pattern to this connection, or remove it; `sync` sends the change to the server."""
        names = self.desired[kind]
        if is_desired and name not in names:
            names.add(name)
            self._desired_bytes += len(name)
        elif not is_desired and name in names:
            names.remove(name)
            self._desired_bytes -= len(name)
        if is_desired is not (name in self._subscribed[kind]):
            self._changed[kind].add(name)

    def desired_names(self) -> Changes:
        """Return all channels and patterns of this connection."""
        return each_name({kind: list(names) for kind, names in self.desired.items()})

    def sync(self, events: str) -> None:
        """Send the changes made by `set_desired`; connect if the connection is not open."""
        if self._transport is None:
            self.pings = max(self.pings, self.pongs + 1)
            if self._connecting is None and self._loop.time() >= self._not_before_s:
                self._connecting = self._loop.create_task(self._connect())
            return
        words: list[Request] = []
        if events != self._notified:
            self._notified = events
            words.append((b"STATE", b"NOTIFY", events.encode()))
        for kind, verb in VERBS.items():
            changed, has = self._changed[kind], self._subscribed[kind]
            if not changed:
                continue
            added, removed = (changed & self.desired[kind]) - has, (changed & has) - self.desired[kind]
            words += _in_chunks(verb.replace(b"SUB", b"UNSUB"), removed)
            words += _in_chunks(verb, added)
            has -= removed
            has |= added
            self._changed[kind] = set()
        if not words:
            return
        packed = b"".join(map(pack, words))
        if not self._is_resubscribing:
            self.pings += 1
            packed += PING
        self._transport.write(packed)

    async def _connect(self) -> None:
        host, _, port = self.address.rpartition(":")
        certificates, password = self.cluster.access.certificates, self.cluster.access.password
        try:
            async with asyncio.timeout(self.cluster.access.timeout_s):
                context = None if certificates is None else certificates.for_server()
                transport, _ = await self._loop.create_connection(lambda: self, host, int(port), ssl=context)
        except (OSError, TimeoutError) as error:
            logger.warning("no messages from %s: %s", self.address, reason_of(error) or "it does not reply")
            self._not_before_s = self._loop.time() + PAUSE_S
            return
        finally:
            self._connecting = None
        words: list[Request] = [] if password is None else [(b"AUTH", DEFAULT_USER, password.encode())]
        words += [(b"HELLO", b"3"), (b"CLIENT", b"SETNAME", b"sparkis-proxy")]
        transport.write(b"".join(map(pack, words)))
        self._transport, self._subscribed, self._changed, self._notified = transport, no_names(), no_names(), None
        self._silent_checks = 0
        self.pongs = self.pings - 1  # one ping after all names replaces the pings of the lost connection
        self._is_resubscribing = True
        self._events.enqueue(self.desired_names())
        self._events.enqueue(partial(self._end_resubscribing, transport))

    def _end_resubscribing(self, transport: asyncio.Transport) -> None:
        if transport is self._transport:
            self._is_resubscribing = False
            transport.write(PING)

    @property
    def is_empty(self) -> bool:
        """Return whether no channel and no pattern is desired any more."""
        return not any(self.desired.values())

    def check(self, events: str) -> None:
        """Connect if the connection is not open. Ping a silent server; close the connection if it stays silent."""
        timeout_s = self.cluster.access.timeout_s
        if self._transport is None:
            self.sync(events)
            return
        if self._refused:
            self._events.enqueue((SubscriptionKind.SHARD, name) for name in self._refused)
            self._refused = []
        if self._paused_steps or self._is_delivering:
            return
        self._silent_checks += 1
        silent_s = self._silent_checks * CHECK_S
        if silent_s > SILENT_TIMEOUTS_MAX * timeout_s:
            logger.warning("no data from %s, a server of messages: closing the connection", self.address)
            self._transport.abort()
        elif silent_s > timeout_s and self.pings == self.pongs:
            self.pings += 1
            self._transport.write(PING)

    def close(self) -> None:
        """Close the connection, because no client needs it any more."""
        if self._connecting is not None:
            self._connecting.cancel()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._silent_checks = 0
        self._reader.feed(data)
        if not self._is_delivering and self._transport is not None:
            self._is_delivering = True
            in_background(self._deliver(self._transport))
            if self._is_delivering:
                self._transport.pause_reading()

    async def _deliver(self, transport: asyncio.Transport) -> None:
        """Handle the server's replies and pushes, some now and the others in later turns of the event loop."""
        recipients: dict[Session, None] = {}
        try:
            batch, clients = MessageBatch(), self._messages.server.clients

            def send_and_defer(then: Callable[[], None]) -> None:
                recipients.update(dict.fromkeys(batch.send(clients.push)))
                clients.defer(lambda: then() if transport is self._transport else None)

            while transport is self._transport and (frames := self._next_frames()):
                await self._deliver_frames(frames, batch, send_and_defer)
            if transport is self._transport:
                recipients.update(dict.fromkeys(batch.send(clients.push)))
        except Exception as error:
            if transport is self._transport:
                self._fail(error)
        if transport is not self._transport:
            return  # the connection was lost
        self._is_delivering = False
        self._silent_checks = 0
        self._wait_for_slow_clients(list(recipients))
        if not self._paused_steps:
            transport.resume_reading()

    async def _deliver_frames(self, frames: Sequence[Any], batch: MessageBatch, defer: Defer) -> None:
        """Handle some replies and pushes. First the reads that they need are sent, for all of them together."""
        pauses, transport, needs_reads = StepPauses(defer), self._transport, self._messages.fields.is_needed
        reads = [
            await self._messages.read_fields(self.cluster, each, pauses) if needs_reads else None for each in frames
        ]
        for frame, read in zip(frames, reads, strict=True):
            if isinstance(frame, hiredis.PushNotification):
                await run_in_steps(self._receive(batch, frame), defer)
                if read is not None:
                    replies = await read.arrived()
                    if transport is not self._transport:
                        return
                    await run_in_steps(self._messages.fields.post_in_steps(batch, read.event, replies), defer)
            elif isinstance(frame, hiredis.ReplyError):
                self._on_refusal(str(frame))
            elif frame == b"PONG":
                self.pongs += 1
                self._events.on_pong()
            await pauses

    def _next_frames(self) -> Sequence[Any]:
        """Return the next replies and pushes that have arrived."""
        frames: list[Any] = []
        while len(frames) < FRAMES_AT_ONCE and (reply := self._reader.gets()) is not False:
            frames.append(reply)
        return frames

    def _fail(self, error: Exception) -> None:
        if isinstance(error, hiredis.ProtocolError):
            logger.warning("%s sent a malformed message: %s", self.address, error)
        elif isinstance(error, FieldReadError):
            logger.warning("notifications from %s are lost: %s", self.address, error)
        else:
            self._messages.server.report(error)
        assert self._transport is not None
        self._transport.abort()

    def _receive(self, batch: MessageBatch, push: Sequence[Any]) -> Steps[None]:
        deliver = partial(self._messages.deliver, batch, is_from_home=self._events.is_home(self))
        match push:
            case [b"message", bytes(channel), bytes(text)]:
                yield from deliver(SubscriptionKind.CHANNEL, channel, channel, text)
            case [b"pmessage", bytes(pattern), bytes(channel), bytes(text)]:
                yield from deliver(SubscriptionKind.PATTERN, pattern, channel, text)
            case [b"smessage", bytes(channel), bytes(text)]:
                yield from deliver(SubscriptionKind.SHARD, channel, channel, text)
            case [b"sunsubscribe", bytes(channel), _]:
                # The channel's slot has moved. The proxy soon subscribes at the new owner.
                self._subscribed[SubscriptionKind.SHARD].discard(channel)
                self._refused.append(channel)

    def _on_refusal(self, reason: str) -> None:
        """Subscribe again at the next check, because most likely a slot has moved."""
        logger.warning("%s refused a subscription: %s", self.address, reason)
        self._subscribed[SubscriptionKind.SHARD].clear()
        self._refused = list(self.desired[SubscriptionKind.SHARD])
        if reason.startswith("MOVED"):
            self.cluster.refresh(self.address)

    def _wait_for_slow_clients(self, recipients: list[Session]) -> None:
        """Pause reading while clients do not read their messages, for at most `SLOW_CLIENT_WAIT_S`."""
        if self._transport is None:
            return
        if self._messages.slow(recipients) and self._paused_steps * SLOW_CLIENT_POLL_S < SLOW_CLIENT_WAIT_S:
            if not self._paused_steps:
                self._transport.pause_reading()
            self._paused_steps += 1
            self._loop.call_later(SLOW_CLIENT_POLL_S, self._wait_for_slow_clients, recipients)
        elif self._paused_steps:
            self._messages.stop_waiting_for(recipients)
            self._paused_steps = 0
            self._silent_checks = 0
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is None:
            return
        self._transport, self._reader, self._is_delivering = None, hiredis.Reader(), False
        self._not_before_s = self._loop.time()
        self._events.on_lost(self)


def _in_chunks(verb: bytes, names: Iterable[bytes]) -> Iterator[Request]:
    remaining = iter(names)
    while some := list(islice(remaining, NAMES_PER_REQUEST)):
        yield (verb, *some)
