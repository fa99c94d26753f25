"""Relays messages: a proxy subscribes at servers to its clients' channels and patterns, and delivers the messages.

    channels, patterns        at one server, the proxy's home: cluster nodes pass published messages to each other
    keyspace notifications    at the active server of each shard of all state clusters, because a server notifies of its
                              own slots only. A pattern that may match both kinds is subscribed at all these servers;
                              its other messages are taken from the home only
    shard channels            at the active server of the slot
    keys with other names,    their notifications at the servers, by the states' names of the keys, in database 0
    or in other databases     (`AliasedKeys`)
    __sparkis__:...           nowhere: the proxy itself announces an epoch when all shards serve it

With several state clusters the first one relays the messages of clients. The proxy's own setting (STATE NOTIFY) decides
which events are notified, not the servers' settings. When a connection is lost or silent, clients that may have missed
a message are disconnected.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from time import perf_counter_ns

from resp_server.backends.routing.rules import Rule, Rules
from resp_server.backends.servers.aliased_keys import AliasedKeys, may_name
from resp_server.backends.servers.field_notifications import HASH_CLASS
from resp_server.backends.servers.message_delivery import MessageDelivery
from resp_server.backends.servers.relay_connection import CHECK_S, Changes, RelayConnection, RelayEvents, each_name
from resp_server.backends.servers.requests import ConnectionKey
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.limits import STEP_NS_MAX
from resp_server.pipeline.context import ServerContext
from resp_server.push.deliveries import Deliveries
from resp_server.push.keyspace_notifications import may_match_notifications
from resp_server.push.pubsub import OWN_CHANNELS
from resp_server.session.subscriptions import SubscriptionKind
from resp_server.settings.event_classes import classes_of, letters_of
from state_backend.model.slots import slot_of

# Names that are assigned between two readings of the clock (guess: 0.2 ms).
NAMES_PER_STEP = 64


class PubsubRelay:
    """All connections of a proxy that subscribe at servers.

    aliases: None without an upstream. With one, the relay sends clients only the notifications of states' keys, also
    with the clients' names of the keys; the upstream sends all other messages.
    """

    def __init__(self, clusters: StateClusters, server: ServerContext, aliases: AliasedKeys | None = None) -> None:
        self.server = server
        self._aliases = aliases
        self._messages = MessageDelivery(server, aliases)
        # The number of clients' channels and patterns that need each of the relay's own patterns.
        self._needed: Counter[bytes] = Counter()
        # The rules and events for which the above was made. Rules that were read again name keys by new objects.
        self._counted_rules: Rules | None = None
        self._counted_events = ""
        self._clusters = clusters
        self._pubsub = server.message_bus.pubsub
        # By (cluster, address). A server limits the subscriptions of a connection, so there may be several.
        self._connections: defaultdict[tuple[int, str], list[RelayConnection]] = defaultdict(list)
        # Names to assign, and callbacks that are called after the names before them were assigned.
        self._queue: deque[Changes | Callable[[], None]] = deque()
        self._changed: dict[tuple[SubscriptionKind, bytes], None] = {}  # since the last entry of the queue
        self._home: str | None = None
        self._waiting: list[tuple[dict[RelayConnection, int], Callable[[], None]]] = []
        self._epochs: dict[tuple[int, str], tuple[int, int]] = {}
        self._check_timer: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self._is_sync_scheduled = False
        self._disconnects = Deliveries(server.clients.defer)
        self._last_layout: object = None
        self._events = RelayEvents(self.enqueue, self._is_home, self.on_pong, self.disconnect_listeners)
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

    def _is_home(self, connection: RelayConnection) -> bool:
        """Return whether a connection's server relays messages between clients."""
        return connection.address == self._home and connection.cluster is self._clusters[0]

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
        rules, events = self._aliases.rules, self.server.config.notify_keyspace_events
        if self._counted_rules is rules and self._counted_events == events:
            return False
        self._counted_rules, self._counted_events = rules, events
        sources = self._aliases.sources(has_keyspace="K" in events)
        self._changed |= dict.fromkeys(
            (SubscriptionKind.PATTERN, source) for source in {*self._messages.sources, *sources}
        )
        self._messages.sources, self._needed = sources, Counter()
        self._messages.fields.reset(self._aliases.field_rules, classes_of(events))
        for kind in (SubscriptionKind.CHANNEL, SubscriptionKind.PATTERN):
            for name in self._pubsub.names(kind):
                self._count_sources(kind, name, is_added=True)
        return True

    @property
    def _server_events(self) -> str:
        """The events that servers send: those of clients, and those of hashes if names of fields need them."""
        events = self.server.config.notify_keyspace_events
        return letters_of(classes_of(events) | HASH_CLASS) if self._messages.fields.is_needed else events

    def _count_sources(self, kind: SubscriptionKind, name: bytes, *, is_added: bool) -> None:
        self._messages.fields.on_subscription_change(kind, name, is_added=is_added)
        for source, rules in self._messages.sources.items():
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
            self.enqueue(each_name({kind: list(self._pubsub.names(kind)) for kind in SubscriptionKind}))
            self.enqueue(each_name({SubscriptionKind.PATTERN: list(self._messages.sources)}))
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
            list(self._messages.sources),
            [(each.slots.version, self._active_servers(index)) for index, each in enumerate(self._clusters)],
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
                holder = RelayConnection(self._events, self._messages, self._clusters[number], address)
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
                cluster.connections.get(ConnectionKey(server, 2, False)) for server in self._active_servers(number)
            ]
            epochs = [
                connection.epochs for connection in connections if connection is not None and connection.is_connected
            ]
            if epochs and len(epochs) == len(connections):
                for job in set(epochs[0]).intersection(*epochs[1:]):
                    yield (number, job), min(epoch[job] for epoch in epochs)

    # -- called by connections ----------------------------------------------------------------------------------------

    def when_synced(self, then: Callable[[], None]) -> None:
        """Call back after the servers have confirmed all subscriptions so far."""
        self.enqueue(partial(self._wait, then))

    @property
    def is_synced(self) -> bool:
        """Whether the servers have confirmed all subscriptions so far."""
        if self._changed or self._queue or self._is_sync_scheduled:
            return False
        for connections in self._connections.values():
            for connection in connections:
                if connection.pings > connection.pongs:
                    return False
        return True

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
            rules = self._messages.sources.get(name, ()) if kind is SubscriptionKind.PATTERN else ()
            if rules:
                yield from self._disconnecting(self._names_for(rules), address)

    def _names_for(self, rules: Sequence[Rule]) -> Changes:
        """Return the clients' channels and patterns of notifications with the names of rules, not the relay's own."""
        kinds = (SubscriptionKind.CHANNEL, SubscriptionKind.PATTERN)
        found = each_name({kind: list(self._pubsub.names(kind)) for kind in kinds})
        return (
            (kind, name) for kind, name in found if name not in self._messages.sources and may_name(kind, name, rules)
        )
