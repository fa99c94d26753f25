"""The messages that a server itself publishes: keyspace notifications, and one channel for each job's epochs.

    __keyspace@0__:<key>      <event>      for each event of a key, if the enabled classes have K
    __keyevent@0__:<event>    <key>        after it, if they have E
    __sparkis__:epoch:<job>   {"job": "<job>", "term": 1, "epoch": 7}

While notifications are enabled, appliers store the events of each key (`key_events`). The events are read from the view
that answers clients, so no message is ahead of the readable epoch.

Messages are sent in batches. Between batches the server waits a bounded time for slow subscribers. After that their
messages stay in the output buffer, up to the limit at which a client is cut. A subscriber is also cut if the store
dropped events that were not yet sent to it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from time import perf_counter_ns
from typing import NamedTuple, Protocol

from resp_server.acl.visibility import can_see_job
from resp_server.cluster.node_view import NodeView
from resp_server.limits import SLOW_CLIENT_POLL_S, SLOW_CLIENT_WAIT_S
from resp_server.protocol.glob import literal_start
from resp_server.push.clients import Clients
from resp_server.push.message_bus import MessageBus
from resp_server.push.pubsub import OWN_CHANNELS, MessageBatch
from resp_server.session.epochs import JobEpoch
from resp_server.session.session import Session
from resp_server.session.subscriptions import PATTERN, SubscriptionKind
from resp_server.settings.event_classes import CLASSES, TO_KEYEVENT, TO_KEYSPACE, classes_of
from resp_server.settings.server import ServerConfig
from state_backend.model.errors import StoreError
from state_backend.model.slots import slot_of
from state_backend.store.key_events import EventBatch, KeyEvent
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import Snapshot

logger = logging.getLogger("sparkis.server")

KEYSPACE, KEYEVENT = b"__keyspace@0__:", b"__keyevent@0__:"
# How the channels of any database begin.
OF_ANY_DATABASE = b"__keyspace@", b"__keyevent@"
# How their names begin, and patterns that may match them: most others are found out by this alone.
POSSIBLE_STARTS = b"_", b"*", b"?", b"[", b"\\"
EPOCH = OWN_CHANNELS + b"epoch:"

# Nothing signals that expired keys were removed, about once a second, so the view is polled (guess).
POLL_S = 0.1
# The time for building messages in one turn of the event loop.
TURN_NS_MAX = 2_000_000


class KeyspaceEvent(NamedTuple):
    """The name of an event in Redis, and its class."""

    name: bytes
    event_class: int


EVENTS: Mapping[int, KeyspaceEvent] = {
    KeyEvent.NEW: KeyspaceEvent(b"new", CLASSES["n"]),
    KeyEvent.SET: KeyspaceEvent(b"set", CLASSES["$"]),
    KeyEvent.DELETED: KeyspaceEvent(b"del", CLASSES["g"]),
    KeyEvent.EXPIRED: KeyspaceEvent(b"expired", CLASSES["x"]),
    KeyEvent.EXPIRY_SET: KeyspaceEvent(b"expire", CLASSES["g"]),
    KeyEvent.EXPIRY_REMOVED: KeyspaceEvent(b"persist", CLASSES["g"]),
    KeyEvent.FIELDS_SET: KeyspaceEvent(b"hset", CLASSES["h"]),
    KeyEvent.FIELDS_DELETED: KeyspaceEvent(b"hdel", CLASSES["h"]),
    KeyEvent.FIELDS_EXPIRED: KeyspaceEvent(b"hexpired", CLASSES["h"]),
    KeyEvent.FIELD_EXPIRY_SET: KeyspaceEvent(b"hexpire", CLASSES["h"]),
    KeyEvent.APPENDED: KeyspaceEvent(b"rpush", CLASSES["l"]),
    KeyEvent.TRIMMED: KeyspaceEvent(b"ltrim", CLASSES["l"]),
    KeyEvent.MEMBERS_ADDED: KeyspaceEvent(b"sadd", CLASSES["s"]),
    KeyEvent.MEMBERS_REMOVED: KeyspaceEvent(b"srem", CLASSES["s"]),
    KeyEvent.SCORES_SET: KeyspaceEvent(b"zadd", CLASSES["z"]),
    KeyEvent.SCORES_REMOVED: KeyspaceEvent(b"zrem", CLASSES["z"]),
}


def enables_messages(classes: int) -> bool:
    """Return whether these classes enable any message."""
    return bool(classes & (TO_KEYSPACE | TO_KEYEVENT) and classes & ~(TO_KEYSPACE | TO_KEYEVENT))


def may_match_notifications(kind: SubscriptionKind, name: bytes) -> bool:
    """Return whether a channel is one of keyspace notifications, or whether a pattern may match one."""
    return name.startswith(POSSIBLE_STARTS) and _may_start(kind, name, (KEYSPACE, KEYEVENT))


def may_match_of_any_database(kind: SubscriptionKind, name: bytes) -> bool:
    """Return whether a channel is one of keyspace notifications of any database, or whether a pattern may match one."""
    return name.startswith(POSSIBLE_STARTS) and _may_start(kind, name, OF_ANY_DATABASE)


def _may_start(kind: SubscriptionKind, name: bytes, starts: tuple[bytes, ...]) -> bool:
    if kind is PATTERN:
        literal = literal_start(name)
        return any(each.startswith(literal) or literal.startswith(each) for each in starts)
    return name.startswith(starts)


class Heads(NamedTuple):
    """The beginnings of a database's channels of notifications."""

    keyspace: bytes
    keyevent: bytes


@cache
def heads_of(database: int) -> Heads:
    """Return the beginnings of a database's channels."""
    return Heads(b"__keyspace@%d__:" % database, b"__keyevent@%d__:" % database)


class _Position(NamedTuple):
    """The next event of a job to publish.

    Args:
        serial: Its number in the series of events that the store calls `id`.
    """

    id: bytes
    serial: int


class NotificationHost(Protocol):
    """The process whose clients are notified of the changes in its view."""

    config: ServerConfig
    cluster: NodeView | None
    view: KeyspaceView
    clients: Clients
    message_bus: MessageBus
    sessions: dict[int, Session]

    def renew_all(self) -> None:
        """Move the view to the newest epochs of all jobs."""

    def report(self, error: Exception) -> object:
        """Log an unexpected exception."""


class Notifications:
    """The notifications of one process. Runs on the event loop's thread.

    Attributes:
        classes_of_clients: The classes that clients have enabled for themselves.
        too_slow: Clients whose messages are not waited for any more.
    """

    def __init__(self, host: NotificationHost) -> None:
        self._host = host
        self._pubsub = host.message_bus.pubsub
        self._pubsub.on_change = self._subscriptions_changed
        self._pubsub.on_leave = self._leave
        self._classes = classes_of(host.config.notify_keyspace_events)
        self.classes_of_clients: dict[Session, int] = {}
        self._positions: dict[str, _Position | None] = {}
        self._epochs: dict[str, JobEpoch] = {}
        self._task: asyncio.Task[None] | None = None
        self._wakeup = asyncio.Event()
        # The channels and patterns with subscribers that notifications may match.
        self._listeners: dict[tuple[SubscriptionKind, bytes], None] = {}
        self.too_slow: set[Session] = set()
        # Enabled by the settings, or for any client.
        self._enabled_classes = self._classes
        self._is_needed = self.is_needed
        # Called when appliers have to start or stop storing the events of keys.
        self.on_demand_change: Callable[[bool], None] = lambda is_needed: None

    # -- enabled classes ---------------------------------------------------------------------------------------------

    @property
    def is_needed(self) -> bool:
        """Return whether notifications are enabled, by the settings or for a client."""
        return any(map(enables_messages, (self._classes, *self.classes_of_clients.values())))

    def configure(self) -> None:
        """Apply changed settings."""
        self._classes = classes_of(self._host.config.notify_keyspace_events)
        self._update_demand()

    def enable_for(self, session: Session, classes: int) -> None:
        """Notify one client of these classes, regardless of the settings."""
        self.classes_of_clients[session] = classes
        self._update_demand()

    def _leave(self, session: Session) -> None:
        """Remove a client that disconnected, or sent RESET."""
        self.too_slow.discard(session)
        if self.classes_of_clients.pop(session, None) is not None:
            self._update_demand()

    def _update_demand(self) -> None:
        self._enabled_classes = self._classes
        for classes in self.classes_of_clients.values():
            self._enabled_classes |= classes
        is_needed = self.is_needed
        if is_needed != self._is_needed:
            self._is_needed = is_needed
            self.on_demand_change(is_needed)

    # -- polling ------------------------------------------------------------------------------------------------------

    def _subscriptions_changed(self, kind: SubscriptionKind, name: bytes) -> None:
        """Update `_listeners`: a name got its first subscriber, or lost its last one."""
        if kind is not SubscriptionKind.SHARD and may_match_notifications(kind, name):
            if name in self._pubsub.names(kind):
                self._listeners[kind, name] = None
            else:
                self._listeners.pop((kind, name), None)
        self.poll_soon()

    def poll_soon(self) -> None:
        """Poll at once: subscriptions or an epoch may have changed."""
        if self._task is None and not self._pubsub.is_empty:
            self._skip_past_events()
            self._task = asyncio.get_running_loop().create_task(self._poll_forever())
        self._wakeup.set()

    def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()

    def _skip_past_events(self) -> None:
        """Skip all events before the first subscription."""
        self._host.renew_all()
        for name, snapshot in self._snapshots():
            stored = snapshot.stored_event_batches()
            self._positions[name] = None if stored is None else _Position(stored.id, stored.next)
            self._epochs[name] = (snapshot.applied.term, snapshot.applied.epoch)

    async def _poll_forever(self) -> None:
        try:
            while not self._pubsub.is_empty:
                self._wakeup.clear()
                try:
                    await self._publish()
                except StoreError as error:  # readers get the same error; the store may work at the next poll
                    logger.warning("notifications of a job are paused: %s", error)
                except Exception as error:
                    self._host.report(error)
                    self._cut_listeners()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wakeup.wait(), POLL_S)
        finally:
            self._task = None
            self._positions.clear()
            self._epochs.clear()

    async def _publish(self) -> None:
        """Publish all new epochs and events."""
        self._host.renew_all()
        self._publish_epochs()
        for name in [name for name, _ in self._snapshots()]:
            await self._publish_events(name)

    def _snapshots(self) -> Iterator[tuple[str, Snapshot]]:
        return ((job.name, snapshot) for job, snapshot in self._host.view.snapshots())

    # -- epochs -------------------------------------------------------------------------------------------------------

    def _publish_epochs(self) -> None:
        for name, snapshot in self._snapshots():
            applied = snapshot.applied
            newest = (applied.term, applied.epoch)
            if self._epochs.get(name) != newest and applied.epoch >= 0:
                self._epochs[name] = newest
                self.announce_epoch(name, newest)

    def announce_epoch(self, job: str, job_epoch: JobEpoch) -> None:
        """Publish that an epoch of a job is readable."""
        message = {"job": job, "term": job_epoch[0], "epoch": job_epoch[1]}
        self._host.message_bus.post(
            SubscriptionKind.CHANNEL,
            EPOCH + job.encode(),
            json.dumps(message).encode(),
            lambda session: can_see_job(session.user, job),
        )

    # -- keys ---------------------------------------------------------------------------------------------------------

    async def _publish_events(self, name: str) -> None:
        """Publish a job's new events, batch by batch."""
        while (event_batch := self._next_batch(name)) is not None:
            await self._publish_batch(event_batch)

    def _next_batch(self, name: str) -> EventBatch | None:
        try:
            snapshot = self._host.view.snapshot_of(name)
        except KeyError:  # the job was removed meanwhile
            self._positions.pop(name, None)
            return None
        stored = snapshot.stored_event_batches()
        if stored is None:
            self._positions[name] = None
            return None
        at = self._positions.get(name)
        serial = at.serial if at is not None and at.id == stored.id else stored.first
        if not self._listeners:
            serial = stored.next
        elif serial < stored.first:
            self._cut_listeners()
            serial = stored.next
        self._positions[name] = _Position(stored.id, min(serial + 1, stored.next))
        return snapshot.events(serial) if serial < stored.next else None

    def _cut_listeners(self) -> None:
        """Disconnect all listeners, because they would miss events; they reconnect and read again."""
        for kind, name in list(self._listeners):
            for session in self._pubsub.sessions(kind, name):
                if session.id in self._host.sessions:  # it may have been cut for another name
                    self._host.clients.cut(session.id, "its next notifications were lost")

    async def _publish_batch(self, event_batch: EventBatch) -> None:
        batch = MessageBatch()
        ends_ns = perf_counter_ns() + TURN_NS_MAX
        for key, numbers in event_batch.events:
            for _ in self._messages(batch, key, numbers):
                if perf_counter_ns() >= ends_ns:
                    await self._send(batch)
                    ends_ns = perf_counter_ns() + TURN_NS_MAX
        await self._send(batch)

    def _messages(self, batch: MessageBatch, key: bytes, numbers: bytes) -> Iterator[None]:
        cluster = self._host.cluster
        if cluster is not None and slot_of(key) not in cluster.slots:
            return
        for number in numbers:
            event = EVENTS[number]
            if event.event_class & self._enabled_classes:
                of_key, of_event = (
                    partial(self._accepts, key, event.event_class, target) for target in (TO_KEYSPACE, TO_KEYEVENT)
                )
                yield from self._pubsub.post_in_steps(batch, KEYSPACE + key, event.name, of_key)
                yield from self._pubsub.post_in_steps(batch, KEYEVENT + event.name, key, of_event)

    def _accepts(self, key: bytes, event_class: int, target: int, session: Session) -> bool:
        """Return whether a client has enabled a class for one of the two channels, and may read the key."""
        classes = self.classes_of_clients.get(session, self._classes)
        user = session.user
        return bool(classes & event_class and classes & target) and (user.is_unrestricted or user.can_read(key))

    async def _send(self, batch: MessageBatch) -> None:
        """Send messages, and wait for slow receivers."""
        receivers = batch.send(self._host.clients.push)
        await asyncio.sleep(0)
        waited_s = 0.0
        while slow := self._slow(receivers):
            if waited_s >= SLOW_CLIENT_WAIT_S:
                self.too_slow |= slow
                return
            waited_s += SLOW_CLIENT_POLL_S
            await asyncio.sleep(SLOW_CLIENT_POLL_S)

    def _slow(self, receivers: list[Session]) -> set[Session]:
        pause_bytes = self._host.config.output_pause_bytes
        full = {receiver for receiver in receivers if self._host.clients.output_bytes(receiver.id) > pause_bytes}
        self.too_slow -= set(receivers) - full
        return full - self.too_slow
