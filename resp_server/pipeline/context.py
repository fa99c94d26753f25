"""The context of a command: its server and its connection's session. No sockets."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from resp_server.acl.denial import Reason
from resp_server.acl.user import DEFAULT_USER
from resp_server.acl.users import UserChange, UserChangeResult, Users
from resp_server.acl.visibility import Visibility
from resp_server.cluster.node_view import NodeView
from resp_server.command.handler import WorkerQuery
from resp_server.command.table import CommandTable
from resp_server.metrics.process_stats import Memory, memory_now
from resp_server.metrics.stats import Stats
from resp_server.pipeline.histories import Histories
from resp_server.pipeline.loading_waits import LoadingWaits
from resp_server.pipeline.observation import Observation
from resp_server.pipeline.proxy_context import ProxyContext
from resp_server.pipeline.reply_cache import ReplyCache
from resp_server.pipeline.shared_epochs import SharedEpochs
from resp_server.protocol.errors import GenericError, internal_error
from resp_server.protocol.replies import OK, Pending, Reply
from resp_server.push.clients import Clients, OtherWorkers
from resp_server.push.cluster_bus import ClusterBus
from resp_server.push.keyspace_notifications import Notifications
from resp_server.push.message_bus import MessageBus
from resp_server.push.tracking_table import TrackingTable
from resp_server.session.account import Account
from resp_server.session.epoch_feed import NO_TOPOLOGY, EpochFeed, SentFacts
from resp_server.session.epochs import epoch_words
from resp_server.session.session import RESP2, Session
from resp_server.session.subscriptions import SubscriptionKind, Subscriptions
from resp_server.session.tracking import PUSH
from resp_server.session.transaction import ReadPoint
from resp_server.settings.server import ServerConfig
from state_backend import log_lines
from state_backend.model.clock import Clock, now_ms
from state_backend.model.slot_set import ALL
from state_backend.store.keyspace import UNREADABLE, Keyspace, KeyspaceView
from state_backend.store.slot_view import SlotView
from state_backend.store.store import KeyInfo, Snapshot, Value
from state_backend.store.uncommitted import OnChange

Found = TypeVar("Found")
# Those of all users.
ALL_NAMES: Set[bytes] = frozenset()

# A command's longest wait for the other processes of its server. The master's own timeout is shorter, so this one is
# reached only if the master hangs.
GATHER_S_MAX = 2.0


@dataclass
class ProcessInfo:
    """The ports and identity that a server reports; with workers, those of the master.

    Args:
        tls_port: May be the same as `port`; 0: no TLS.
    """

    started_ms: int
    run_id: str = field(default_factory=lambda: secrets.token_hex(20))
    process_id: int = field(default_factory=os.getpid)
    port: int = 0
    tls_port: int = 0
    memory_at_start: Memory | None = field(default_factory=memory_now)


@dataclass
class ServerContext:
    """The server's state that commands and connections use. Only for the event loop's thread."""

    config: ServerConfig
    keyspace: Keyspace
    table: CommandTable
    clock: Clock = now_ms
    stats: Stats = field(default_factory=Stats)
    sessions: dict[int, Session] = field(default_factory=dict)
    # While jobs are being opened, commands about keys are answered with LOADING.
    is_loading: bool = False
    # This server as a node of a cluster; None: it is in no cluster, and owns all slots. Set by `become_node`.
    cluster: NodeView | None = None
    clients: Clients = field(default_factory=Clients)
    workers: OtherWorkers | None = None  # None: this is the only process that serves the port
    proxy: ProxyContext = field(default_factory=ProxyContext)
    reply_cache: ReplyCache = field(default_factory=ReplyCache)
    # What writes values that are not committed yet (`state_backend.fresh.writer.FreshWriter`), by job.
    fresh_writers: dict[str, Any] = field(default_factory=dict)
    # Incremented whenever the next reply may be from another epoch or topology than the last one.
    change_counter: int = 0

    def __post_init__(self) -> None:
        self.process = ProcessInfo(self.clock())
        config = self.config
        self.users = Users(
            self.table,
            config.password,
            config.aclfile,
            config.rate_limits,
            config.server_password,
            config.committed_only,
        )
        self.tracking = TrackingTable(self.config.tracking_table_max_keys)
        self.epochs = SharedEpochs(self.keyspace, lambda: self.clock(), lambda: self.view)
        self.view = self._own_view(self.process.started_ms)
        self.empty_view = Keyspace().view(self.process.started_ms)
        self.observation = Observation(
            lambda: self.config, lambda: self.clock(), self.clients, lambda: self.workers, self.sessions, self.attempt
        )
        self.loading_waits = LoadingWaits(self.keyspace, self.sessions, lambda: self.is_loading)
        self.histories = Histories()
        cluster_bus = ClusterBus(lambda: self.config, lambda: self.cluster)
        self.message_bus = MessageBus(self.clients, lambda: self.workers, cluster_bus)
        self.notifications = Notifications(self)
        self.keyspace.on_epoch = self._on_epoch

    def _on_epoch(self, job: str) -> None:
        self.epochs.pinned.update(job, self.clock())
        self.change_counter += self.epochs.held.note(job)
        if self.view.routes_version != self.keyspace.version:
            self.renew()  # an old view keeps the files of removed stores open, and the next request may come late
        self.notifications.poll_soon()

    def keep_epochs(self, now_ms: int, *, is_followed: bool) -> None:
        """Pin the epochs that a proxy may need while it follows this server as one of several; else release them."""
        has_other_owners = self.cluster is not None and self.cluster.slots != ALL
        self.epochs.keep(now_ms, is_needed=is_followed and has_other_owners)

    def become_node(self, node: NodeView) -> None:
        """Become this node of a cluster, from the next input buffer on."""
        self._on_changed_keys(None)
        self.cluster = node
        before, self.view = self.view, self._own_view(self.clock())
        before.close()
        for session in self.sessions.values():
            session.set_at_replica(node.is_replica)
        self.message_bus.leave_slots(node.slots)

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Change settings, given as fields of ServerConfig."""
        self.config = replace(self.config, **changes)
        if "password" in changes:
            self.users.set_password(changes["password"])
            self.apply_user_changes()
        if "loglevel" in changes:
            log_lines.set_levels(changes["loglevel"])
        self.notifications.configure()
        self.tracking.limit(self.config.tracking_table_max_keys)
        self.observation.configure()

    def reset_statistics(self) -> None:
        """Set all counters to zero."""
        self.stats.reset()

    def view_of(self, keyspace: Keyspace, now_ms: int, on_change: OnChange | None = None) -> KeyspaceView:
        """Open a view of a keyspace; in a cluster, of this node's slots."""
        if self.cluster is None or self.cluster.slots == ALL:
            view = keyspace.view(now_ms, on_change)
        else:
            view = SlotView(keyspace, self.cluster.slots, now_ms, on_change)
        self.epochs.held.hold_in(view, keyspace.jobs)
        return view

    def _own_view(self, now_ms: int) -> KeyspaceView:
        view = self.view_of(self.keyspace, now_ms, self._on_changed_keys).show_fresh()
        view.on_expiry = self._on_expiry
        return view

    def _on_expiry(self, snapshot: Snapshot, expiry_batches: int) -> None:
        """Report keys that have expired."""
        if not self.tracking.is_idle:
            self.change_counter += 1
            self._record_changes(snapshot.expired_since(expiry_batches))

    @property
    def is_replica(self) -> bool:
        """Return whether this is a replica: by the topology of a cluster, else by the settings."""
        return self.config.is_replica if self.cluster is None else self.cluster.is_replica

    def _on_changed_keys(self, keys: Sequence[bytes] | None) -> None:
        self.change_counter += 1
        self._record_changes(keys)

    def _record_changes(self, keys: Sequence[bytes] | None) -> None:
        """Enqueue invalidations. This runs within a reader's request, which an exception must not fail."""
        if not self.attempt(self.tracking.changed, keys):
            self.cut_caching_clients()

    def renew(self) -> None:
        """Move to the newest epochs. Called once per round of the event loop: its requests see one epoch and time."""
        self.view.renew(self.clock())

    def renew_all(self) -> None:
        """Move to the newest epochs, and open the snapshots of all jobs, also of those without requests."""
        self.renew()
        for _ in self.view.snapshots():
            pass

    def release_fresh_epochs(self) -> None:
        """Move to the newest fresh values, if there are any: LMDB does not reuse the pages of older ones."""
        tables = {name: job.fresh for name, job in self.keyspace.jobs.items() if job.fresh is not None}
        writers = self.fresh_writers.items()
        self.fresh_writers = {name: writer for name, writer in writers if writer.values is tables.get(name)}
        if tables:
            self.renew_all()

    def pending_pushes(self, epoch_feed: EpochFeed) -> bytes:
        """Return the encoded pending pushes of a following connection."""
        epoch_feed.change_counter = self.change_counter
        return epoch_feed.pending_pushes(self._sent_facts())

    def pushes_around_reply(self, epoch_feed: EpochFeed) -> bytes:
        """Move to the newest epochs, and return the pushes before a reply that may be from these or older epochs."""
        self.renew_all()
        epoch_feed.change_counter = self.change_counter
        return epoch_feed.pushes_around_reply(self._sent_facts())

    def _sent_facts(self) -> SentFacts:
        """Return what following connections have to know by now."""
        version = NO_TOPOLOGY if self.cluster is None else self.cluster.topology.version
        return SentFacts(self.view.term_epochs(), version, self.view.logs, self.epochs.held.stalled_epochs())

    def epochs_now(self) -> tuple[Callable[[int], ReadPoint], Sequence[bytes]]:
        """Return what makes a read point of the view's epochs, for a clock reading, and STATE AT's arguments."""
        for _ in self.view.snapshots():
            pass
        found = self.view.term_epochs().items()
        epochs = {job: reached for job, reached in found if reached is not None and reached != UNREADABLE}
        return partial(ReadPoint, epochs), epoch_words(epochs)

    def follow(self, session: Session, *, has_keys: bool) -> bytes:
        """Begin STATE FOLLOW for a session; return the current epochs as pushes.

        Args:
            has_keys: Report changed keys, too.
        """
        self._end_epoch_feed(session)
        session.epoch_feed = EpochFeed()
        self.renew_all()
        if has_keys:
            self.tracking.listeners[session.epoch_feed] = None
        return self.pending_pushes(session.epoch_feed)

    def leave(self, session: Session) -> None:
        """End all pushes to a session: it disconnected, or sent RESET."""
        stop_monitoring = self.observation.monitors.remove
        for leave in (self.message_bus.leave, stop_monitoring, self._end_epoch_feed, self._end_tracking):
            self.attempt(leave, session)
        if self.proxy.leave is not None:
            self.attempt(self.proxy.leave, session)

    def _end_tracking(self, session: Session) -> None:
        if session.tracking_state is not None:
            self.tracking.end(session.tracking_state)
            session.set_tracking(None)

    def _end_epoch_feed(self, session: Session) -> None:
        if session.epoch_feed is not None:
            self.tracking.listeners.pop(session.epoch_feed, None)
            session.epoch_feed = None

    def take_invalidations(self, session: Session, *, is_reply_pending: bool = False) -> bytes:
        """Remove a client's pending invalidations, and return them encoded.

        Args:
            is_reply_pending: See `TrackingState.take`.
        """
        tracking_state = session.tracking_state
        if tracking_state is None or not tracking_state.has_pending or tracking_state.redirect:
            return b""
        pushes = self.tracking.take(tracking_state, PUSH, is_reply_pending=is_reply_pending)
        return pushes if session.protocol > RESP2 else b""

    def pin(self, *, shows_fresh: bool = False) -> KeyspaceView:
        """Open a view of all jobs that stays at their newest epochs and at this clock reading until it is closed.

        Args:
            shows_fresh: Its reads take values that are not committed yet.
        """
        keyspace = Keyspace(dict(self.keyspace.jobs), dict(self.keyspace.unreadable))
        view = self.view_of(keyspace, self.view.now_ms)
        if shows_fresh:
            view.show_fresh()
        for _ in view.snapshots():
            # A job's snapshot is opened at its first use. A later first use would be at another epoch.
            pass
        return view

    def pin_at(self, read_point: ReadPoint) -> KeyspaceView:
        """Open a view of all jobs at given epochs and a given clock reading; NoEpochError if one is not pinned."""
        snapshots = self.epochs.pinned.snapshots_at(read_point.epochs, read_point.clock_ms, self.clock())
        if snapshots is None:
            raise self.epochs.no_epoch()
        view = self.view_of(Keyspace(dict(self.keyspace.jobs), dict(self.keyspace.unreadable)), read_point.clock_ms)
        view.pin_to(snapshots)
        return view

    def gather(self, query: WorkerQuery, argument: Any, join: Callable[[Sequence[Any]], Reply]) -> Reply:
        """Query all processes that serve this port, and merge their responses, this process's first, into a reply.

        A process that does not respond in time is left out. `join` may raise ReplyError.
        """
        own_response = query.respond(self, argument)
        if self.workers is None:
            return join([own_response])
        pending = Pending(GATHER_S_MAX, lambda: join([own_response]))
        self.workers.query(query.name, argument, lambda others: pending.resolve(lambda: join([own_response, *others])))
        return pending

    def change_users(self, change: UserChange, caller: Session, finish: Callable[[UserChangeResult], Reply]) -> Reply:
        """Change users in all processes that serve this port. `finish` turns the outcome into the reply, or raises."""
        if self.workers is None:
            outcome = self.users.change(change)
            if outcome.names and outcome.has_clients:
                self.apply_user_changes(caller.id, {each.encode("latin-1") for each in outcome.names})
            return finish(outcome)
        pending = Pending(GATHER_S_MAX, users_not_changed)
        self.workers.change_users(
            change, caller.id, lambda answer: pending.resolve(lambda: finish(UserChangeResult(**answer)))
        )
        return pending

    def apply_user_changes(self, caller_id: int = 0, names: Set[bytes] = ALL_NAMES) -> None:
        """Apply changed users to all connections at once.

        Clients of a removed user are cut, and clients with a subscription that is no longer allowed. The caller gets
        its reply first.

        Args:
            names: Those of the users. A client that has not logged in depends on the default user only.
        """
        is_all = names is ALL_NAMES or DEFAULT_USER in names
        for session in [each for each in self.sessions.values() if is_all or each.user.name in names]:
            is_removed = not self.users.is_current(session.user)
            if is_removed and session.id != caller_id:
                self.clients.cut(session.id)
            elif is_removed:
                session.log_out()
                session.close()  # it still gets its reply
            else:
                session.refresh_user()
                if session.subscriptions is not None and not may_stay_subscribed(session.user, session.subscriptions):
                    self.clients.cut(session.id)

    # -- unexpected exceptions -----------------------------------------------------------------------------------------

    def report(self, error: Exception) -> GenericError:
        """Log and count an unexpected exception; return the error reply."""
        self.stats.internal_errors += 1
        return internal_error(error)

    def attempt(self, do: Callable[..., object], *arguments: object) -> bool:
        """Call a function that no client waits for; False if it raised, which is logged."""
        try:
            do(*arguments)
        except Exception as error:
            self.report(error)
            return False
        return True

    def cut_caching_clients(self) -> None:
        """Cut all clients that track keys: they may have missed invalidations."""
        for session in list(self.sessions.values()):
            if session.tracking_state is not None or session.epoch_feed is not None:
                self.clients.cut(session.id, "its invalidations could not be made")

    def close(self) -> None:
        """Close all snapshots."""
        self.notifications.close()
        self.epochs.close()
        self.view.close()


def may_stay_subscribed(user: Account, subscriptions: Subscriptions) -> bool:
    """Return whether a user may keep all of these subscriptions."""
    return all(
        user.can_subscribe(name, is_pattern=kind is SubscriptionKind.PATTERN)
        for kind in SubscriptionKind
        for name in subscriptions.by_kind[kind]
    )


def users_not_changed() -> Reply:
    """Raise the error for users that could not be changed in time."""
    raise GenericError("the users were not changed in time; check ACL LIST before you try again")


def ok(responses: Sequence[Any]) -> Reply:
    """Return OK, however the processes responded: the end of a `ServerContext.gather`."""
    return OK


class ReadContext(Protocol):
    """The part of a `CommandContext` that commands about keys use: the view to read, and the keys that are visible."""

    @property
    def view(self) -> KeyspaceView: ...
    @property
    def now_ms(self) -> int: ...
    @property
    def visibility(self) -> Visibility: ...
    def visibility_of(self, view: KeyspaceView) -> Visibility: ...
    def at(self, key: bytes) -> Snapshot: ...
    def key_info(self, key: bytes) -> KeyInfo | None: ...
    def counted(self, found: Found) -> Found: ...
    def lazy_values(self, keys: Sequence[bytes]) -> list[Value | None]: ...
    def pin(self) -> KeyspaceView: ...
    def unpin(self, view: KeyspaceView) -> None: ...


@dataclass(slots=True)
class CommandContext:
    """The argument of every command: a connection's session and its server. Commands about keys see a `ReadContext`."""

    session: Session
    server: ServerContext

    @property
    def jobs(self) -> KeyspaceView:
        """All jobs, regardless of the selected database."""
        return self.server.view

    @property
    def view(self) -> KeyspaceView:
        """The selected database: all jobs are in database 0."""
        if self.session.db != 0:
            return self.server.empty_view
        return self.server.view.committed if self.session.reads_committed else self.server.view

    @property
    def user(self) -> Account:
        """The client's user."""
        return self.session.user

    @property
    def visibility(self) -> Visibility:
        """The keys of the selected database that the client may see."""
        return self.visibility_of(self.view)

    def visibility_of(self, view: KeyspaceView) -> Visibility:
        """Return the keys of a view that the client may see."""
        return Visibility(self.user, view)

    @property
    def now_ms(self) -> int:
        """The input buffer's clock reading."""
        return self.server.view.now_ms

    def at(self, key: bytes) -> Snapshot:
        """Return the snapshot that has a key."""
        return self.view.at(key)

    def key_info(self, key: bytes) -> KeyInfo | None:
        """Return the facts of a key, and count the look-up."""
        return self.counted(self.at(key).key_info(key))

    def counted(self, found: Found) -> Found:
        """Count a look-up as a hit, or as a miss if it found nothing (None)."""
        if found is None:
            self.server.stats.misses += 1
        else:
            self.server.stats.hits += 1
        return found

    def lazy_values(self, keys: Sequence[bytes]) -> list[Value | None]:
        """Return the values of the first keys, at least one, and count the look-ups."""
        texts = self.view.lazy_values(keys)
        misses, stats = texts.count(None), self.server.stats
        stats.misses += misses
        stats.hits += len(texts) - misses
        return texts

    def record_denial(self, reason: Reason, denied: bytes, user: bytes | None = None) -> None:
        """Record a denial for ACL LOG.

        Args:
            denied: The command, key or channel.
            user: The name of a failed login.
        """
        session, server = self.session, self.server
        server.stats.denied[reason.name.lower()] += 1
        server.users.denials.add(
            reason,
            is_queued=session.transaction is not None,
            object_name=denied,
            user=session.user.name if user is None else user,
            client=server.clients.describe(session),
            now_ms=self.now_ms,
            entries_max=server.config.acllog_max_len,
        )

    def pin(self) -> KeyspaceView:
        """Open a view that stays at its jobs and epochs between the steps of a reply; `unpin` closes it."""
        if self.session.db != 0:
            return Keyspace().view(self.now_ms)
        return self.server.pin(shows_fresh=not self.session.reads_committed)

    def unpin(self, view: KeyspaceView) -> None:
        """Close a view that `pin` returned."""
        view.close()


@dataclass(slots=True)
class PinnedContext(CommandContext):
    """The context of commands that all read one pinned view: those of an EXEC, or the chunks of a long request."""

    pinned: KeyspaceView

    @property
    def jobs(self) -> KeyspaceView:
        return self.pinned

    @property
    def view(self) -> KeyspaceView:
        return self.pinned if self.session.db == 0 else self.server.empty_view

    @property
    def now_ms(self) -> int:
        return self.pinned.now_ms

    def pin(self) -> KeyspaceView:
        return self.view

    def unpin(self, view: KeyspaceView) -> None:
        pass  # the other commands still need it
