"""Relays messages: a proxy subscribes at servers to its clients' channels and patterns, and delivers the messages.

    channels, patterns        at one server, the proxy's home: cluster nodes pass published messages to each other
    keyspace notifications    at the active server of each shard of all applications, because a server notifies of its
                              own slots only. A pattern that may match both kinds is subscribed at all these servers;
                              its other messages are taken from the home only
    shard channels            at the active server of the slot
    keys with other names,    their notifications at the servers, by the states' names of the keys, in database 0
    or in other databases     (`AliasedKeys`)
    __sparkis__:...           nowhere: the proxy itself announces an epoch when all shards serve it

With several applications the first one relays the messages of clients. The proxy's own setting (STATE NOTIFY) decides
which events are notified, not the servers' settings. When a connection is lost or silent, clients that may have missed
a message are disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from time import perf_counter_ns
from typing import Any

import hiredis

from resp_server.acl.rules import DEFAULT_USER
from resp_server.backends.routing.rules import Rule
from resp_server.backends.servers.aliased_keys import AliasedKeys, may_name
from resp_server.backends.servers.field_names import has_fields
from resp_server.backends.servers.field_notifications import HASH_CLASS, FieldListeners, FieldReadError, FieldReads
from resp_server.backends.servers.requests import PING, ConnectionKey, ServerRequest
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.forwarding.answers import Answer, ReplyFuture, deliver
from resp_server.forwarding.raw_replies import RawReply, Steps, as_bytes
from resp_server.forwarding.reply_splitter import pack
from resp_server.forwarding.reply_stages import ReplySink
from resp_server.limits import STEP_NS_MAX
from resp_server.net.tls import reason_of
from resp_server.pipeline.context import ServerContext
from resp_server.protocol.errors import ClusterDownError, GenericError
from resp_server.protocol.replies import Frames, Pending, Reply
from resp_server.protocol.request_parser import Request
from resp_server.push.deliveries import Deliveries
from resp_server.push.keyspace_notifications import KEYEVENT, KEYSPACE, heads_of, may_match_notifications
from resp_server.push.message_bus import MessageBus
from resp_server.push.pubsub import OWN_CHANNELS, MessageBatch, ReceiverCount
from resp_server.session.epoch_feed import NO_EPOCHS, ReplyEpochs
from resp_server.session.session import Session
from resp_server.session.subscriptions import (
    SUBSCRIBED_BYTES_MAX,
    SUBSCRIPTIONS_MAX,
    SubscriptionKind,
    check_name,
    message,
)
from resp_server.settings.event_classes import classes_of, letters_of
from state_backend.model.slots import slot_of

logger = logging.getLogger("sparkis.proxy")

# The interval of checking for new epochs of all servers, and for changed active servers (guess).
CHECK_S = 0.05
# The pause before reconnecting to a server that cannot be reached.
PAUSE_S = 0.5
# A server that is silent for one timeout of the proxy is pinged. After this many timeouts it counts as lost (guess).
SILENT_TIMEOUTS_MAX = 5
NAMES_PER_REQUEST = 1_000
# Frames of a server that are delivered together, after the fields that they need were read (guess: 2 ms).
FRAMES_AT_ONCE = 64
# Names that are assigned between two readings of the clock (guess: 0.2 ms).
NAMES_PER_STEP = 64
# The longest pause of reading a server's messages while slow clients do not read theirs.
SLOW_CLIENT_WAIT_S = 1.0
SLOW_CLIENT_POLL_S = 0.01
VERBS = {
    SubscriptionKind.CHANNEL: b"SUBSCRIBE",
    SubscriptionKind.PATTERN: b"PSUBSCRIBE",
    SubscriptionKind.SHARD: b"SSUBSCRIBE",
}

# The channels and patterns to subscribe to at a server.
Names = dict[SubscriptionKind, set[bytes]]
# Channels and patterns whose server may have changed.
Changes = Iterator[tuple[SubscriptionKind, bytes]]


def _no_names() -> Names:
    return {kind: set() for kind in VERBS}


def _each_name(names: Mapping[SubscriptionKind, Iterable[bytes]]) -> Changes:
    return ((kind, name) for kind, some in names.items() for name in some)


class RelayConnection(asyncio.Protocol):
    """A connection to a server that subscribes to channels and patterns of the proxy's clients."""

    def __init__(self, relay: PubsubRelay, cluster: StateCluster, address: str) -> None:
        self.address = address
        self.cluster = cluster
        self.desired = _no_names()
        self._desired_bytes = 0
        self.pings = 0  # sent, or to be sent after connecting
        self.pongs = 0
        self._relay = relay
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._subscribed = _no_names()
        self._changed = _no_names()  # to be subscribed or unsubscribed by the next request
        self._refused: list[bytes] = []  # shard channels that the server has refused or ended
        self._is_resubscribing = False  # the connection is new, and has not all desired names yet
        self._events: str | None = None
        self._reader = hiredis.Reader()
        self._connecting: asyncio.Task[None] | None = None
        self._not_before_s = 0.0
        # Checks since data was received. A count, because the clock also advances while this process is stopped.
        self._silent_checks = 0
        self._paused_steps = 0
        # Delivers the data that was received, in steps; a step with reads waits for them.
        self._delivery: Iterator[FieldReads | None] | None = None

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
        return _each_name({kind: list(names) for kind, names in self.desired.items()})

    def sync(self, events: str) -> None:
        """Send the changes made by `set_desired`; connect if the connection is not open."""
        if self._transport is None:
            self.pings = max(self.pings, self.pongs + 1)
            if self._connecting is None and self._loop.time() >= self._not_before_s:
                self._connecting = self._loop.create_task(self._connect())
            return
        words: list[Request] = []
        if events != self._events:
            self._events = events
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
        self._transport, self._subscribed, self._changed, self._events = transport, _no_names(), _no_names(), None
        self._silent_checks = 0
        self.pongs = self.pings - 1  # one ping after all names replaces the pings of the lost connection
        self._is_resubscribing = True
        self._relay.enqueue(self.desired_names())
        self._relay.enqueue(partial(self._end_resubscribing, transport))

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
            self._relay.enqueue((SubscriptionKind.SHARD, name) for name in self._refused)
            self._refused = []
        if self._paused_steps or self._delivery is not None:
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
        if self._delivery is None:
            batch = MessageBatch()
            self._delivery = self._deliver(batch)
            self._run_delivery(self._delivery, batch, {})

    def _run_delivery(
        self, steps: Iterator[FieldReads | None], batch: MessageBatch, recipients: dict[Session, None]
    ) -> None:
        """Deliver some messages now and the others in later rounds. Until then the socket is not read."""
        transport, server = self._transport, self._relay.server
        if transport is None or steps is not self._delivery:
            return  # the connection was lost
        ends_ns, is_done, reads = perf_counter_ns() + STEP_NS_MAX, True, None
        try:
            for reads in steps:
                if reads is not None or perf_counter_ns() >= ends_ns:
                    is_done = False
                    break
        except Exception as error:
            self._fail(error)
        recipients |= dict.fromkeys(batch.send(server.clients.push))
        if not is_done:
            transport.pause_reading()
            later = partial(server.clients.defer, partial(self._run_delivery, steps, batch, recipients))
            if reads is None:
                later()
            else:
                reads.on_complete = later
            return
        self._delivery = None
        self._silent_checks = 0
        self._wait_for_slow_clients(list(recipients))
        if not self._paused_steps:
            transport.resume_reading()

    def _deliver(self, batch: MessageBatch) -> Iterator[FieldReads | None]:
        """Handle the server's replies and pushes, in steps."""
        while frames := self._next_frames():
            reads = yield from self._relay.read_fields(self, frames)
            if reads is not None and not reads.is_complete:
                yield reads
            for number, reply in enumerate(frames):
                if isinstance(reply, hiredis.PushNotification):
                    yield from self._receive(batch, reply)
                    read = None if reads is None else reads.event_and_replies(number)
                    if read is not None:
                        yield from self._relay.fields.post_in_steps(batch, *read)
                elif isinstance(reply, hiredis.ReplyError):
                    self._on_refusal(str(reply))
                elif reply == b"PONG":
                    self.pongs += 1
                    self._relay.on_pong()
                yield None

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
            self._relay.server.report(error)
        assert self._transport is not None
        self._transport.abort()

    def _receive(self, batch: MessageBatch, push: Sequence[Any]) -> Iterator[None]:
        match push:
            case [b"message", bytes(channel), bytes(text)]:
                yield from self._relay.deliver(batch, self, SubscriptionKind.CHANNEL, channel, channel, text)
            case [b"pmessage", bytes(pattern), bytes(channel), bytes(text)]:
                yield from self._relay.deliver(batch, self, SubscriptionKind.PATTERN, pattern, channel, text)
            case [b"smessage", bytes(channel), bytes(text)]:
                yield from self._relay.deliver(batch, self, SubscriptionKind.SHARD, channel, channel, text)
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
        if self._relay.slow(recipients) and self._paused_steps * SLOW_CLIENT_POLL_S < SLOW_CLIENT_WAIT_S:
            if not self._paused_steps:
                self._transport.pause_reading()
            self._paused_steps += 1
            self._loop.call_later(SLOW_CLIENT_POLL_S, self._wait_for_slow_clients, recipients)
        elif self._paused_steps:
            self._relay.stop_waiting_for(recipients)
            self._paused_steps = 0
            self._silent_checks = 0
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is None:
            return
        self._transport, self._reader, self._delivery = None, hiredis.Reader(), None
        self._not_before_s = self._loop.time()
        self._relay.disconnect_listeners(self)


def _in_chunks(verb: bytes, names: Iterable[bytes]) -> Iterator[Request]:
    remaining = iter(names)
    while some := list(islice(remaining, NAMES_PER_REQUEST)):
        yield (verb, *some)


class PubsubRelay:
    """All connections of a proxy that subscribe at servers.

    aliases: None without an upstream. With one, the relay sends clients only the notifications of states' keys, also
    with the clients' names of the keys; the upstream sends all other messages.
    """

    def __init__(self, clusters: StateClusters, server: ServerContext, aliases: AliasedKeys | None = None) -> None:
        self.server = server
        self._aliases = aliases
        # The relay's own patterns for keys with other names or in other databases, with their rules, and the number of
        # clients' channels and patterns that need each.
        self._sources: Mapping[bytes, Sequence[Rule]] = {}
        self._needed: Counter[bytes] = Counter()
        self._counted_for: object = None  # the rules and events for which the above was made
        self._clusters = clusters
        self._pubsub = server.message_bus.pubsub
        self.fields = FieldListeners(self._pubsub)
        # By (application, address). A server limits the subscriptions of a connection, so there may be several.
        self._connections: defaultdict[tuple[int, str], list[RelayConnection]] = defaultdict(list)
        # Names to assign, and callbacks that are called after the names before them were assigned.
        self._queue: deque[Changes | Callable[[], None]] = deque()
        self._changed: dict[tuple[SubscriptionKind, bytes], None] = {}  # since the last entry of the queue
        self._home: str | None = None
        self._waiting: list[tuple[dict[RelayConnection, int], Callable[[], None]]] = []
        self._epochs: dict[tuple[int, str], tuple[int, int]] = {}
        self._check_timer: asyncio.TimerHandle | None = None
        self._ignored_slow_clients: set[Session] = set()
        self._is_stopped = False
        self._is_sync_scheduled = False
        self._disconnects = Deliveries(server.clients.defer)
        self._last_layout: object = None
        self._next_on_change = self._pubsub.on_change
        self._pubsub.on_change = self._subscriptions_changed

    def stop(self) -> None:
        """Close all connections."""
        self._is_stopped = True
        if self._check_timer is not None:
            self._check_timer.cancel()
        for connection in self._all_connections():
            connection.close()

    def _all_connections(self) -> list[RelayConnection]:
        return [connection for connections in self._connections.values() for connection in connections]

    @property
    def home(self) -> str | None:
        """The server that relays messages between clients; None if there is none."""
        answering = self._active_servers(0)
        if self._home not in answering:
            self._home = answering[0] if answering else None
        return self._home

    def _active_servers(self, number: int) -> list[str]:
        cluster = self._clusters[number]
        return list(dict.fromkeys(cluster.active_server(master) for master in cluster.slots.counts))

    def _subscriptions_changed(self, kind: SubscriptionKind, name: bytes) -> None:
        self._next_on_change(kind, name)
        self._changed[kind, name] = None
        if not self._update_sources():
            self._count_sources(kind, name, is_added=name in self._pubsub.names(kind))
        self.sync_soon()

    def _update_sources(self) -> bool:
        """Take the current rules and setting; tell whether the patterns have changed."""
        if self._aliases is None:
            return False
        events = self.server.config.notify_keyspace_events
        rules_and_events = (self._aliases.rules, events)
        if self._counted_for == rules_and_events:
            return False
        self._counted_for = rules_and_events
        sources = self._aliases.sources(has_keyspace="K" in events)
        self._changed |= dict.fromkeys((SubscriptionKind.PATTERN, source) for source in {*self._sources, *sources})
        self._sources, self._needed = sources, Counter()
        self.fields.reset(self._aliases.field_rules, classes_of(events))
        for kind in (SubscriptionKind.CHANNEL, SubscriptionKind.PATTERN):
            for name in self._pubsub.names(kind):
                self._count_sources(kind, name, is_added=True)
        return True

    @property
    def _server_events(self) -> str:
        """The events that servers send: those of clients, and those of hashes if names of fields need them."""
        events = self.server.config.notify_keyspace_events
        return letters_of(classes_of(events) | HASH_CLASS) if self.fields.is_needed else events

    def _count_sources(self, kind: SubscriptionKind, name: bytes, *, is_added: bool) -> None:
        self.fields.on_subscription_change(kind, name, is_added=is_added)
        for source, rules in self._sources.items():
            if may_name(kind, name, rules):
                self._needed[source] += 1 if is_added else -1
                self._changed[SubscriptionKind.PATTERN, source] = None

    def enqueue(self, entry: Changes | Callable[[], None]) -> None:
        """Enqueue names to assign again, or a function to call after all subscriptions so far were sent to servers."""
        self._enqueue_changed()
        self._queue.append(entry)
        self.sync_soon()

    def _enqueue_changed(self) -> None:
        if self._changed:
            self._queue.append(iter(self._changed))
            self._changed = {}

    def sync_soon(self) -> None:
        """Run `sync` in the next round of the event loop, for all changes until then."""
        if not self._is_sync_scheduled and not self._is_stopped:
            self._is_sync_scheduled = True
            asyncio.get_running_loop().call_soon(self.sync)

    def sync(self) -> None:
        """Subscribe at servers to clients' channels and patterns: a limited number of changes now, the others later."""
        self._is_sync_scheduled = False
        if self._is_stopped:
            return
        self._update_sources()
        layout = self._layout()
        if layout != self._last_layout:
            self._last_layout = layout
            self.enqueue(_each_name({kind: list(self._pubsub.names(kind)) for kind in SubscriptionKind}))
            self.enqueue(_each_name({SubscriptionKind.PATTERN: list(self._sources)}))
        assigned = self._assign_some()
        self._close_empty()
        events = self._server_events
        for connection in self._all_connections():
            connection.sync(events)
        if self._check_timer is None and not self._is_empty:
            self._epochs = dict(self._common_epochs())
            self._check_timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)
        for then in assigned:
            then()
        if (self._queue or self._changed) and not self._is_sync_scheduled:
            self._is_sync_scheduled = True
            self.server.clients.defer(self.sync)

    def _close_empty(self) -> None:
        """Close the connections that no client needs."""
        closed = {connection for connection in self._all_connections() if connection.is_empty}
        if not closed:
            return
        for target, connections in list(self._connections.items()):
            self._connections[target] = [connection for connection in connections if connection not in closed]
            if not self._connections[target]:
                del self._connections[target]
        for connection in closed:
            connection.close()
        # A callback that waits for a closed connection now waits for the connections that replace it.
        waiting, self._waiting = self._waiting, []
        for missing, then in waiting:
            if closed & missing.keys():
                self.when_synced(then)
            else:
                self._waiting.append((missing, then))

    def _layout(self) -> object:
        """Return the notification settings and the active servers, on which subscriptions depend."""
        return (
            self._server_events,
            list(self._sources),
            [(each.slots.version, self._active_servers(at)) for at, each in enumerate(self._clusters)],
        )

    @property
    def _is_empty(self) -> bool:
        return self._pubsub.is_empty and not self._pubsub.names(SubscriptionKind.SHARD)

    def _assign_some(self) -> list[Callable[[], None]]:
        """Assign names for a limited time; return the callbacks that were queued between them."""
        everywhere = [(number, each) for number in range(len(self._clusters)) for each in self._active_servers(number)]
        at_home = [] if self.home is None else [(0, self.home)]
        self._enqueue_changed()
        assigned: list[Callable[[], None]] = []
        ends_ns = perf_counter_ns() + STEP_NS_MAX
        while self._queue:
            entry = self._queue[0]
            if callable(entry):
                self._queue.popleft()
                assigned.append(entry)
                continue
            names = list(islice(entry, NAMES_PER_STEP))
            if not names:
                self._queue.popleft()
            for kind, name in names:
                self._assign(kind, name, everywhere, at_home)
            if perf_counter_ns() >= ends_ns:
                break
        return assigned

    def _assign(
        self,
        kind: SubscriptionKind,
        name: bytes,
        everywhere: list[tuple[int, str]],
        at_home: list[tuple[int, str]],
    ) -> None:
        """Assign a name to the connections of the servers that have its messages, and remove it from the others."""
        targets: list[tuple[int, str]] = []
        is_of_keys = may_match_notifications(kind, name)
        is_of_upstream = self._aliases is not None and (kind is SubscriptionKind.SHARD or not is_of_keys)
        is_needed = name in self._pubsub.names(kind) or (kind is SubscriptionKind.PATTERN and self._needed[name] > 0)
        is_own = kind is not SubscriptionKind.SHARD and name.startswith(OWN_CHANNELS)
        if not is_needed or is_own or is_of_upstream:
            pass
        elif kind is SubscriptionKind.SHARD:
            first = self._clusters[0]
            owner = first.slots.owners[slot_of(name)]
            targets = [] if owner is None else [(0, first.active_server(owner))]
        else:
            targets = everywhere if is_of_keys else at_home
        for target in {*self._connections, *targets}:
            self._assign_name(target, kind, name, target in targets)

    def _assign_name(self, target: tuple[int, str], kind: SubscriptionKind, name: bytes, is_desired: bool) -> None:
        connections = self._connections[target]
        holder = next((connection for connection in connections if name in connection.desired[kind]), None)
        if holder is None and is_desired:
            holder = next((connection for connection in connections if connection.has_room(name)), None)
            if holder is None:
                number, address = target
                holder = RelayConnection(self, self._clusters[number], address)
                connections.append(holder)
        if holder is not None:
            holder.set_desired(kind, name, is_desired)

    def _check(self) -> None:
        """Announce epochs that all shards have reached; sync if active servers changed; check the connections."""
        self._check_timer = None
        if self._is_stopped or self._is_empty:
            return
        self._check_timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)
        if self._last_layout != self._layout():
            self.sync()
        for connection in self._all_connections():
            connection.check(self._server_events)
        for (number, job), reached in self._common_epochs():
            if self._epochs.get((number, job)) != reached:
                self._epochs[number, job] = reached
                self.server.notifications.announce_epoch(job, reached)

    def _common_epochs(self) -> Iterator[tuple[tuple[int, str], tuple[int, int]]]:
        """Iterate over the epochs of jobs that all shards have reached."""
        for number, cluster in enumerate(self._clusters):
            connections = [
                cluster.connections.get(ConnectionKey(each, 2, False)) for each in self._active_servers(number)
            ]
            epochs = [
                connection.epochs for connection in connections if connection is not None and connection.is_connected
            ]
            if epochs and len(epochs) == len(connections):
                for job in set(epochs[0]).intersection(*epochs[1:]):
                    yield (number, job), min(each[job] for each in epochs)

    # -- called by connections ----------------------------------------------------------------------------------------

    def deliver(
        self,
        batch: MessageBatch,
        connection: RelayConnection,
        kind: SubscriptionKind,
        name: bytes,
        channel: bytes,
        text: bytes,
    ) -> Iterator[None]:
        """Deliver a message to the subscribers of its channel or pattern, one client in each step."""
        is_of_keys = kind is not SubscriptionKind.SHARD and channel.startswith((KEYSPACE, KEYEVENT))
        is_from_home = connection.address == self._home and connection.cluster is self._clusters[0]
        if channel.startswith(OWN_CHANNELS) or not (is_of_keys or is_from_home or kind is SubscriptionKind.SHARD):
            return
        key, event = _event_in(channel, text)
        if is_of_keys and self.fields.is_hidden(event):
            return
        if kind is SubscriptionKind.PATTERN and name in self._sources:
            yield from self._deliver_by_aliases(batch, name, key, event)
        if self._aliases is not None and not (is_of_keys and self._aliases.is_state(key)):
            return
        frames: dict[int, bytes] = {}
        for session in self._pubsub.sessions(kind, name):
            if not session.is_subscribed(kind, name):
                continue  # the client has unsubscribed
            if is_of_keys and not (session.user.is_unrestricted or session.user.can_read(key)):
                continue
            if session.protocol not in frames:
                frames[session.protocol] = message(kind, name, channel, text, session.protocol)
            batch.add(session, frames[session.protocol])
            yield

    def _deliver_by_aliases(self, batch: MessageBatch, source: bytes, key: bytes, event: bytes) -> Iterator[None]:
        """Deliver a notification of a state's key with the names that clients know."""
        assert self._aliases is not None
        events = self.server.config.notify_keyspace_events
        rules = [rule for rule in self._sources[source] if not has_fields(rule)]
        for database, name in self._aliases.aliases_of(key, rules):
            heads = heads_of(database)

            def accepts(session: Session, name: bytes = name) -> bool:
                return session.user.is_unrestricted or session.user.can_read(name)

            if "K" in events:
                yield from self._pubsub.post_in_steps(batch, heads.keyspace + name, event, accepts)
            if "E" in events:
                yield from self._pubsub.post_in_steps(batch, heads.keyevent + event, name, accepts)

    def read_fields(self, connection: RelayConnection, frames: Sequence[Any]) -> Steps[FieldReads | None]:
        """Read the fields of hashes whose names clients listen to, for frames of a server; None: there are none."""
        if not self.fields.is_needed:
            return None
        events = {}
        for number, frame in enumerate(frames):
            match frame:
                case [b"pmessage", bytes(pattern), bytes(channel), bytes(text)] if pattern in self._sources:
                    event = self.fields.event_of(*_event_in(channel, text), self._sources[pattern])
                    if event is not None:
                        events[number] = event
                    yield
        if not events:
            return None
        cluster, reads = connection.cluster, FieldReads(events)

        def send(key: bytes, request: Request, sink: ReplySink, index: int) -> None:
            cluster.send(ServerRequest(pack(request), slot_of(key), 2, cluster.deadline_s(), sink, index))

        yield from reads.send_in_steps(send)
        return reads

    def slow(self, recipients: Sequence[Session]) -> set[Session]:
        """Return the clients to wait for: their output exceeds `output_pause_bytes`, and their time is not over yet."""
        pause_bytes = self.server.config.output_pause_bytes
        full = {each for each in recipients if self.server.clients.output_bytes(each.id) > pause_bytes}
        self._ignored_slow_clients -= set(recipients) - full
        return full - self._ignored_slow_clients

    def stop_waiting_for(self, recipients: Sequence[Session]) -> None:
        """Stop waiting for clients that are still slow, until they have caught up."""
        self._ignored_slow_clients |= self.slow(recipients)

    def when_synced(self, then: Callable[[], None]) -> None:
        """Call back after the servers have confirmed all subscriptions so far."""
        self.enqueue(partial(self._wait, then))

    def _wait(self, then: Callable[[], None]) -> None:
        missing = {
            connection: connection.pings
            for connection in self._all_connections()
            if connection.pings > connection.pongs
        }
        if missing:
            self._waiting.append((missing, then))
        else:
            then()

    def on_pong(self) -> None:
        """Call the callbacks whose subscriptions all servers have confirmed."""
        waiting, self._waiting = self._waiting, []
        for missing, then in waiting:
            if any(connection.pongs < pings for connection, pings in missing.items()):
                self._waiting.append((missing, then))
            else:
                then()

    def disconnect_listeners(self, connection: RelayConnection) -> None:
        """Disconnect the clients that may have missed a message."""
        steps = self._disconnecting(connection.desired_names(), connection.address)
        self._disconnects.add(steps, lambda: None, lambda: None)

    def _disconnecting(self, names: Changes, address: str) -> Iterator[None]:
        for kind, name in names:
            for session in self._pubsub.sessions(kind, name):
                if session.id in self.server.sessions:
                    self.server.clients.cut(
                        session.id, f"the connection to {address}, which sends its messages, was lost"
                    )
            yield
            rules = self._sources.get(name, ()) if kind is SubscriptionKind.PATTERN else ()
            if rules:
                yield from self._disconnecting(self._names_for(rules), address)

    def _names_for(self, rules: Sequence[Rule]) -> Changes:
        """Return the clients' channels and patterns of notifications with the names of rules, not the relay's own."""
        kinds = (SubscriptionKind.CHANNEL, SubscriptionKind.PATTERN)
        found = _each_name({kind: list(self._pubsub.names(kind)) for kind in kinds})
        return ((kind, name) for kind, name in found if name not in self._sources and may_name(kind, name, rules))


def _event_in(channel: bytes, text: bytes) -> tuple[bytes, bytes]:
    """Return the key and the event of a keyspace notification."""
    if channel.startswith(KEYEVENT):
        return text, channel.removeprefix(KEYEVENT)
    return channel.removeprefix(KEYSPACE), text


class _PendingSink(ReplySink):
    """Takes a pending reply."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        self._pending.resolve(lambda: Frames(as_bytes(reply)))

    def fail(self, index: int, error: Exception) -> None:
        self._pending.resolve(partial(_raise, error))


class ProxyMessageBus(MessageBus):
    """Publishes at the proxy's home server, which also sends the message back for the proxy's own clients."""

    def __init__(self, server: ServerContext, clusters: StateClusters, relay: PubsubRelay) -> None:
        super().__init__(server.clients, lambda: server.workers, server.cluster_bus, server.message_bus.pubsub)
        self.clusters = clusters
        self.relay = relay

    def publish(
        self, publisher: Session, kind: SubscriptionKind, channel: bytes, text: bytes, *, is_forwarded: bool = True
    ) -> Reply:
        if channel.startswith(OWN_CHANNELS):
            raise GenericError(f"channels that begin with {OWN_CHANNELS.decode()} are the server's own")
        cluster = self.clusters[0]
        home = self.relay.home
        if home is None:
            raise ClusterDownError
        check_name(channel)
        found = ReceiverCount()  # of the proxy's own clients, because the server counts relay connections
        pending = Pending(2 * cluster.access.timeout_s, _too_late)
        packed = pack((b"SPUBLISH" if kind is SubscriptionKind.SHARD else b"PUBLISH", channel, text))
        address = None if kind is SubscriptionKind.SHARD else home

        async def receivers() -> Answer:
            """Return the number of receivers, or the server's error."""
            sent = ReplyFuture()
            cluster.send(ServerRequest(packed, slot_of(channel), 2, cluster.deadline_s(), sent, 0, address))
            reply = as_bytes((await sent).reply)
            if reply[:1] != b":":
                return Answer(reply)
            return Answer(b":%d\r\n" % (max(int(reply[1:]) - found.names, 0) + found.clients))

        count = self.pubsub.count_in_steps(found, kind, channel)
        self._deliveries.add(count, lambda: None, lambda: deliver(receivers(), _PendingSink(pending), 0))
        return pending

    def subscription_reply(self, session: Session, frames: bytes) -> Reply:
        answered = partial(super().subscription_reply, session, frames)
        pending = Pending(self.clusters[0].access.timeout_s, answered)
        self.relay.when_synced(lambda: pending.resolve(answered))
        return pending


def connect_pubsub(clusters: StateClusters, server: ServerContext, aliases: AliasedKeys | None = None) -> PubsubRelay:
    """Relay the messages and subscriptions of a proxy's clients over its servers; return the relay."""
    relay = PubsubRelay(clusters, server, aliases)
    server.message_bus = ProxyMessageBus(server, clusters, relay)
    return relay


def _raise(error: Exception) -> Reply:
    raise error


def _too_late() -> Reply:
    raise GenericError("no server took the message in time")
