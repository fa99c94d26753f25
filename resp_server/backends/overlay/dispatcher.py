"""Dispatches the requests of a proxy with an upstream: each goes to the backend that owns its keys, or to both.

Requests of one batch are sent to both backends at once. Each backend answers a client's requests in their order, and
the client gets all replies in its order. The backends have no common order (see `docs/design/0008-swap.md`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, cast

from resp_server.backends.overlay.cached_reads import CachedReads
from resp_server.backends.overlay.client_login import LoginRequest, login_in
from resp_server.backends.overlay.control import OwnershipControl
from resp_server.backends.overlay.dedicated_requests import DedicatedRequests
from resp_server.backends.overlay.exec_plan import OverlayExec
from resp_server.backends.overlay.key_conflict_scan import KeyConflictScans
from resp_server.backends.overlay.legacy_writers import LegacyWriterDetector
from resp_server.backends.overlay.long_requests import LongRequests, chunks_of, is_long
from resp_server.backends.overlay.overlay_backend import OK, OverlayBackend
from resp_server.backends.overlay.rules_reload import RulesReload
from resp_server.backends.overlay.sentinel_replies import sentinel_reply
from resp_server.backends.overlay.shadow import Shadow
from resp_server.backends.overlay.subscription_order import SubscriptionOrder
from resp_server.backends.overlay.subscriptions import OverlaySubscriptions, is_about_keys, listens
from resp_server.backends.overlay.upstream_events import UpstreamEvents
from resp_server.backends.overlay.watch import watch_both
from resp_server.backends.redis.cluster import NodeConnections
from resp_server.backends.redis.connection import UpstreamConnection
from resp_server.backends.redis.databases import Databases
from resp_server.backends.redis.key_changes import KeyChanges
from resp_server.backends.redis.logins import Logins
from resp_server.backends.redis.pool import UpstreamPool
from resp_server.backends.redis.routed_commands import RoutedCommand
from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.key_matcher import ForwardedKeys
from resp_server.backends.routing.long_arguments import VALUE_BYTES_MAX
from resp_server.backends.routing.ownership import Ownership, OwnershipChange
from resp_server.backends.routing.result_cache import ResultCache
from resp_server.backends.routing.router import Route, Router
from resp_server.backends.routing.rules import Owner, Rules
from resp_server.backends.servers.aliased_keys import AliasedKeys
from resp_server.backends.servers.batch import ReplyBatch
from resp_server.backends.servers.dispatcher import (
    HOP_NAME_BYTES_MAX,
    CommandRoute,
    ProxyDispatcher,
    between_batches,
    next_batch,
)
from resp_server.backends.servers.getkeys import GetkeysLookup
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.backends.servers.transactions import BackendExec, Watched
from resp_server.command.policy import WITHOUT_UPSTREAM, Destination, Role
from resp_server.command.spec import CommandSpec
from resp_server.command.table import Command
from resp_server.forwarding.answers import Answer, ReplyFuture, SeenEpochs, ask
from resp_server.forwarding.raw_replies import is_error
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.dispatcher import QUEUED, keys_read
from resp_server.pipeline.long_requests import UNSPLIT_WORDS_MAX
from resp_server.protocol.errors import GenericError, NoPermError, not_for_subscribers
from resp_server.protocol.replies import Reply, Retry, Sliced, encode
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.session.session import RESP2, Session
from resp_server.session.tracking import EVERYTHING, Invalidation, TrackingState
from resp_server.session.transaction import Transaction, WatchedVersion
from state_backend import VERSION

# Requests that states answer, or may answer, together with the upstream or under other names.
PARTLY_OF_STATES = (Destination.BOTH, Destination.PREFERRED, Destination.ALIASED)
# Requests that do not wait for the upstream, or may not have to.
NOT_FOR_UPSTREAM = WITHOUT_UPSTREAM | {
    Destination.ALIASED,
    Destination.PREFERRED,
    Destination.DROPPED,
    Destination.DENIED,
}
NOT_WHILE_WATCHING = "another database cannot be selected between WATCH and EXEC"
ACL_LOAD, AUTH, HELLO, SELECT = (b"ACL", b"LOAD"), (b"AUTH",), (b"HELLO",), (b"SELECT",)
NOT_BY_SUBSCRIBERS = "another database cannot be selected by a subscriber, or a client that tracks keys"
# Takes the place of a watched key's mark when the key gets another owner: no digest equals it, so EXEC replies nil.
CHANGED = WatchedVersion("", -1, "owner", covers_value=False)


class OverlayDispatcher(ProxyDispatcher):
    """Answers the requests of a proxy in front of an upstream and of state servers."""

    has_upstream = True
    # Redis has no such limit. A client may have as many bytes in requests (guess: enough for any program).
    batch_bytes_max = 2 * VALUE_BYTES_MAX

    def __init__(
        self,
        server: ServerContext,
        clusters: StateClusters,
        upstream: Upstream,
        ownership: Ownership,
        *,
        is_strict: bool = False,
        has_client_logins: bool = False,
        allowed: Collection[str] = (),
    ) -> None:
        super().__init__(server, clusters)
        self._has_client_logins = has_client_logins
        self._logins = Logins(Databases(upstream))
        self._sentinel_master = upstream.url.master.encode()
        self._ownership = ownership
        self.aliases = AliasedKeys(ownership)
        # Without a file of users at the proxy, ACL LOAD can only be meant for the upstream's.
        own = (self._table.find(ACL_LOAD).name,) if server.config.aclfile else ()
        self.router = Router(self._table, ownership, allowed, own, upstream.url.database)
        self._dedicated = DedicatedRequests(self._logins)
        self._getkeys = GetkeysLookup(upstream, self.router.getkeys_cache)
        self._cache = ResultCache(time.monotonic)
        self._key_changes = KeyChanges(upstream, self._upstream_changed)
        self.cached = CachedReads(self._cache, self._key_changes)
        # The owners are known from logs, and not all servers have reported their jobs.
        self._is_ahead_of_servers = False
        self._candidates: Sequence[Rules] = ()  # rules that a reload is about to use
        self._events = UpstreamEvents(server, upstream)
        self._order = SubscriptionOrder(time.monotonic, self._hold_requests)
        self._checks = KeyConflictScans(ownership, upstream, server.clients.defer)
        self.shadow = self._make_shadow()
        self.legacy_writers = LegacyWriterDetector(
            lambda request: ask(partial(self.shadow.send_to_states, request[1], request, 2)),
            self.check_upstream,
            time.monotonic,
        )
        reload = RulesReload(
            ownership, self.legacy_writers, self.watch_legacy_writers, self._key_changes, lambda: upstream.is_down
        )
        self.control = server.overlay_control = OwnershipControl(
            ownership, self.shadow, reload, lambda: self.is_loading
        )
        self.backend = OverlayBackend(
            server,
            clusters,
            self.servers,
            self._logins,
            self.router,
            self.aliases,
            self.cached,
            self.shadow,
            self._dedicated,
            self.error_reply,
            is_strict=is_strict,
            has_client_logins=has_client_logins,
        )
        self._subscriptions = self._make_subscriptions(upstream)
        self._long = LongRequests(self.backend, clusters, self.check_rights)
        self._follow_events(upstream)
        self._set_forwarder_commands()
        self._set_forwarder_patterns()

    def _make_subscriptions(self, upstream: Upstream) -> OverlaySubscriptions:
        return OverlaySubscriptions(
            self.backend.upstream_of,
            self._own_pool,
            upstream.url,
            self._server.sessions,
            self._server.clients,
            self._is_dropped_notification,
            self._invalidate,
            self._order,
        )

    def _make_shadow(self) -> Shadow:
        ownership, defer = self._ownership, self._server.clients.defer
        return Shadow(
            self._clusters,
            self.servers.target_of,
            lambda key: ownership.matcher.job_of(key),
            ownership.rules,
            defer,
        )

    def _follow_events(self, upstream: Upstream) -> None:
        """Have the upstream, the states' servers, the owners of keys and the clients report their changes."""
        server = self._server
        self.defer = upstream.defer = server.clients.defer
        upstream.on_state_lost = server.clients.cut
        upstream.on_facts, upstream.on_hello = self._take_facts, self._take_hello
        server.is_single_node = upstream.url.is_cluster  # its clients may be cluster clients
        server.leave_upstream = self._leave
        for cluster in self._clusters:
            cluster.on_changed = self._states_changed
        self._clusters.on_key_formats = self._learn
        self._ownership.on_new = self._checks.add
        self._ownership.on_changed = self._owners_changed

    def _take_facts(self, facts: Mapping[str, CommandSpec]) -> None:
        self.router.commands.take_facts(facts)
        self._set_forwarder_commands()

    def _take_hello(self, fields: Mapping[bytes, Reply]) -> None:
        self._server.hello_fields = fields

    def _set_forwarder_commands(self) -> None:
        """Have the forwarder forward the commands that may be forwarded to the upstream."""
        if self.forwarder is not None:
            plain = [
                each for each in self.router.commands.forwardable_commands() if len(each.name) <= HOP_NAME_BYTES_MAX
            ]
            rows = [(*each, self._stats.command_stats(each.name)) for each in plain]
            self.forwarder.set_upstream(self._shared_connection, self._cache_of, rows)

    def _hold_requests(self) -> None:
        """Have the forwarder leave the upstream's requests to the general path while these wait for a subscription."""
        if self.forwarder is not None:
            self.forwarder.holds_upstream = self._order.holds_requests

    def _set_forwarder_patterns(self) -> None:
        """Give the forwarder the owners of keys. Before all owners are known, it forwards nothing."""
        if self.forwarder is None:
            return
        if self._ownership.is_known:
            self.forwarder.set_patterns(self._ownership.matcher.forwarded_by_database)
        else:
            self.forwarder.set_patterns({}, [ForwardedKeys(b"*", Destination.BY_KEYS)])

    def poll(self, poller: Any) -> None:
        super().poll(poller)
        for each in (*self._logins.own, *self._logins.own.pools):
            each.poller = poller

    def _owners_changed(self, change: OwnershipChange) -> None:
        """Fail the EXEC of clients that watch a key with a new owner, and invalidate all cached keys."""
        self._set_forwarder_patterns()
        self.shadow.take_rules(self._ownership.rules)
        self.aliases.forget_read()
        self._follow_changes()
        for session in self._server.sessions.values():
            for at in session.watched:
                if change.affects(at[1]):
                    session.watched[at] = CHANGED
        for dedicated in chain.from_iterable(pool.dedicated for pool in self._logins.pools):
            dedicated.is_dirty |= any(map(change.affects, dedicated.watched))
        self._tracking.changed(None)

    def _states_changed(self, keys: Sequence[bytes] | None) -> None:
        """Invalidate keys of states, also by their other names; None: all keys."""
        self._tracking.changed(None if keys is None or self._tracking.is_idle else self.aliases.with_aliases(keys))

    def start(self) -> None:
        """Follow changes of the upstream's keys, if a rule needs them."""
        self._follow_changes()

    async def check_tracking(self) -> None:
        """Wait until the upstream reports changes of keys that are cached exactly; RulesError if it cannot.

        An upstream that is down may be able to: then nothing is cached until it is up.
        """
        await self.control.check_tracking()

    def _follow_changes(self) -> None:
        """Clear the cache, and follow the changes of keys that may be cached or that a legacy writer may write."""
        self._cache.drop(None)
        self.watch_legacy_writers(*self._candidates)

    def watch_legacy_writers(self, *candidates: Rules) -> None:
        """Follow keys that may be cached or written by a legacy writer, of the current and of other lists of rules."""
        self._candidates = candidates
        rules = chain(self._ownership.rules, *candidates)
        cached = [rule.keys.literals[0].encode() for rule in rules if rule.cache_s]
        self._key_changes.follow([*cached, *self.legacy_writers.watch(self._ownership.rules, *candidates)])

    def check_upstream(self, key: bytes, database: int) -> ReplyFuture:
        """Send EXISTS for a key to the upstream, over the proxy's own connections."""
        request: Request = (b"EXISTS", key)
        route = self.router.route(request, database)
        assert route is not None  # a command of Redis
        return ask(partial(self._logins.own.of(database).send_request, 0, 2, route.routed, request))

    def _upstream_changed(self, keys: Sequence[bytes] | None) -> None:
        """Handle changes of keys at the upstream; None: all keys may have changed."""
        self._cache.drop(keys)
        self.legacy_writers.changed(keys)

    def _is_dropped_notification(self, database: bytes, key: bytes) -> bool:
        decide = self._ownership.matcher.decider(self._logins.own.number_of(database))
        return decide(key).owner is Owner.STATE

    def _invalidate(self, session: Session, keys: Sequence[bytes] | None) -> None:
        """Send an invalidation of the upstream at the end of the round, before any reply that arrives later.

        It comes after the replies that have arrived, such as that to the client's own write, as at the upstream.
        """
        state = session.tracking_state
        if state is None:
            return
        enqueue = partial(self._tracking.enqueue, is_after_reply=self._server.clients.has_all_replies(session.id))
        if keys is None:
            enqueue(state, EVERYTHING)
        else:
            decide, user = self._ownership.matcher.decider(session.db), session.user
            of_upstream = [key for key in keys if decide(key).owner is not Owner.STATE]
            visible = [key for key in of_upstream if user.reads_all_keys or user.can_read(key)]
            if not visible:
                return
            enqueue(state, Invalidation(visible, is_one_frame=True))
        self.defer(partial(self._server.clients.push_invalidations, state))

    def _invalidate_after_reply(self, state: TrackingState, session: Session, route: Route, request: Request) -> None:
        """Invalidate the keys of a read over both backends after its reply: no client may cache them."""
        command = route.routed.command
        if not state.records_reads or session.transaction is not None or command is None:
            return
        if route.is_in_chunks or (route.destination is Destination.ALIASED and is_long(request)):
            self._tracking.enqueue_resend(state, None)  # all keys: to list so many would take too long
        elif route.destination in (Destination.BOTH, Destination.PREFERRED):
            self._tracking.enqueue_resend(state, keys_read(command, request))

    def _own_pool(self, session: Session) -> UpstreamPool | None:
        """Return the pool of the node that sends a client the messages of channels; None: no node is known."""
        upstream = self.backend.upstream_of(session)
        for pool in upstream.pools:
            own = pool.dedicated.get(session.id)
            if own is not None and own.is_listening and own.is_for_messages:
                return pool
        return upstream.message_pool

    def _learn(self, formats: Mapping[str, Mapping[str, str]]) -> None:
        self._ownership.learn(formats)
        if self._clusters.has_key_formats:
            self._is_ahead_of_servers = False
            self._ownership.complete()
            self._set_forwarder_patterns()

    def learn_from_logs(self, formats: Sequence[Mapping[str, Mapping[str, str]]]) -> None:
        """Take the key formats of all jobs of each log at a first start: other keys are the upstream's from now on.

        The jobs need not be served yet, or ever. Their keys are states' keys, and wait for a server.
        """
        if self._ownership.is_known:
            return
        self._is_ahead_of_servers = True
        for each in formats:
            self._ownership.learn(each)
        self._ownership.complete()
        self._set_forwarder_patterns()

    @property
    def is_loading(self) -> bool:
        """Whether some requests with keys get LOADING because servers have not reported their jobs yet."""
        return self._is_ahead_of_servers or not self._ownership.is_known

    def info_fields(self) -> Mapping[str, object]:
        """Return the fields of INFO: those of the servers, of the upstream, and of the owners of keys."""
        return {
            "sparkis_version": VERSION,  # INFO's section about the server is the upstream's
            **self._clusters.info_fields(),
            **self._logins.info_fields(),
            **self._ownership.info_fields(),
            "dropped_writes": self.backend.dropped_writes,
            "upstream_key_changes": self._key_changes.status,
            **self._cache.info_fields(),
            **self.legacy_writers.info_fields(),
            **self.shadow.info_fields(),
        }

    async def handle(
        self, context: CommandContext, route: CommandRoute | None, request: Request, batch: ReplyBatch
    ) -> Sliced | None:
        """Answer a request by the backends that have its keys; ReplyError if no backend may answer it."""
        session = context.session
        if self._has_client_logins and session.transaction is None and not is_long(request):
            login = login_in(request)
            if login is not None:
                self._log_in(context, login, batch)
                batch.is_last = True
                return None
        if not session.is_authenticated:  # the error is a server's: it does not reveal the owner of a key
            return await super().handle(context, route, request, batch)
        found, batch = await self._found_route(context, request, batch)
        while found is not None and len(batch) and self._is_first_of_batch(found, request, session):
            if listens(found.routed.policy) and self._needs_confirmation(context, found.routed, request):
                self._subscriptions.keep_order(found.routed.name, request, session)
            batch = await next_batch()
            found, batch = await self._found_route(context, request, batch)
        if found is None:
            is_answered = self._answer_sentinel(request, session, batch)
        elif found.destination is Destination.LOCAL:
            unanswered = await self._answer_local(context, found.routed, request, batch)
            is_answered = unanswered is None
            batch = batch if unanswered is None else unanswered  # a batch without replies yet is false
        elif found.destination in WITHOUT_UPSTREAM:
            is_history = found.routed.policy.role is Role.STATE_HISTORY
            is_answered = is_history and self._answer_history(context, found.routed, request, batch)
        else:
            is_answered = self._answer_beyond_states(context, found, request, batch)
        return None if is_answered else await super().handle(context, route, request, batch)

    async def _found_route(
        self, context: CommandContext, request: Request, batch: ReplyBatch
    ) -> tuple[Route | None, ReplyBatch]:
        """Return a request's route, and the batch for its reply: the next one if it took long to find the route."""
        session = context.session
        if isinstance(request, LongRequest):
            return await between_batches(self._long.route_of(context, request), batch)
        try:
            return self.router.route(request, session.next_db), batch
        except GenericError as error:
            if not self.router.needs_getkeys(request):
                raise
            unknown = error
        reason, batch = await between_batches(self._getkeys.look_up(request), batch)
        if reason:
            raise GenericError(f"{unknown}: {reason}")
        return self.router.route(request, session.next_db), batch

    def _is_first_of_batch(self, route: Route, request: Request, session: Session) -> bool:
        """Return whether a request waits for earlier replies: it may take long, or takes another connection."""
        policy = route.routed.policy
        if policy.role is None and not (
            route.is_blocking or policy.channels or policy.kills_a_script or policy.changes_role
        ):
            return False  # as most requests
        if route.destination is Destination.LOCAL:
            if policy.role is Role.RESET:  # it closes the client's connection
                return self._dedicated.has_own(session.id, self._logins.pools)
            return listens(policy) and session.transaction is None
        if session.transaction is not None:
            return False
        if route.destination is Destination.SELECT and len(request) == 2:
            return self._logins.of(session.id).number_of(request[1]) != session.db
        needs_own = policy.role is Role.WATCH or policy.kills_a_script
        is_first = needs_own and not self._dedicated.has_own(session.id, self.backend.upstream_of(session).pools)
        return route.is_blocking or is_first or policy.changes_role

    def _answer_sentinel(self, request: Request, session: Session, batch: ReplyBatch) -> bool:
        """Answer SENTINEL, with this proxy as the master; False: it is another command, or no sentinel is known."""
        if not self._sentinel_master or request[0].lower() != b"sentinel":
            return False
        host, _, port = session.local_address.rpartition(":")
        reply = sentinel_reply(request, self._sentinel_master, host.strip("[]").encode(), port.encode())
        batch.add(b"" if session.replies_suppressed else encode(reply, session.protocol))
        return True

    def _answer_beyond_states(self, context: CommandContext, route: Route, request: Request, batch: ReplyBatch) -> bool:
        """Answer a request that is not, or not only, about states; False: the proxy refuses it."""
        session = context.session
        if session.tracking_state is not None:
            self._invalidate_after_reply(session.tracking_state, session, route, request)
        if session.transaction is not None:
            return self._queue_routed(context, session.transaction, route, request, batch)
        return self._answer_alone(context, route, request, batch)

    def _answer_alone(self, context: CommandContext, route: Route, request: Request, batch: ReplyBatch) -> bool:
        """Answer such a request outside of MULTI."""
        session, routed, role = context.session, route.routed, route.routed.policy.role
        if not is_long(request):  # the rights to a long one were checked in steps
            self.check_rights(context, routed, request)
        if routed.policy.kills_a_script:
            for pool in self.backend.upstream_of(session).masters:
                pool.dedicated.open(session.id, session.protocol)
        is_subscriber = session.subscriptions is not None and session.protocol == RESP2
        # The upstream refuses what it gets from a subscriber; what it does not get is refused here.
        if is_subscriber and not routed.policy.runs_while_subscribed:
            if route.destination is not Destination.UPSTREAM:
                return False
            if self.backend.upstream_of(session).node_count > 1:  # maybe it is no subscriber of the key's node
                self.router.commands.check_form(routed, request)
                raise not_for_subscribers(routed.name)
        if route.destination is Destination.SELECT and len(request) == 2:
            self._select(request[1], session, batch)
            return True
        session.last_command = routed.name
        self._stats.command_stats(routed.name).calls += 1
        if routed.is_subscription:
            self._subscriptions.begin_module_subscription(routed.name, session)
        if role is Role.WATCH:
            self._watch_routed(context, route, request, batch)
        elif route.destination is Destination.ALL_KEYS:
            self.backend.query_keyspace(role, request, session, batch)
        elif route.is_blocking:
            batch.block()
            batch.is_last = True
            blocking = partial(self._dedicated.block, routed, request, session)
            batch.answer(lambda: self.cached.changed(route.changed, session, blocking()), session.replies_suppressed)
        elif self._is_long_read_of_states(route, request, session):
            batch.is_last = True
            return self._forward_long(context, cast(Request, route.request), batch)
        elif route.is_in_chunks:
            batch.is_last = True
            batch.answer(
                partial(self._long.answer_in_chunks, context, route, request, batch), session.replies_suppressed
            )
        else:
            self.backend.send(route, request, session, batch)
        return True

    def _watch_routed(self, context: CommandContext, route: Route, request: Request, batch: ReplyBatch) -> None:
        session = context.session
        batch.is_last = True
        if route.destination is Destination.ALIASED and route.request is not None:
            self._watch(context, route.request, batch)
            return
        sent, upstream = route.request or request, self.backend.upstream_of(session)
        watching = partial(watch_both, upstream, self.servers.cluster_of, route, sent, session, self.defer)
        batch.answer(watching, session.replies_suppressed)

    @staticmethod
    def _is_long_read_of_states(route: Route, request: Request, session: Session) -> bool:
        """Return whether the states get a long request under their names, to which rules of users do not apply."""
        is_complete = route.destination is Destination.ALIASED and route.convert is None
        return is_complete and is_long(request) and session.user.is_unrestricted

    def _log_in(self, context: CommandContext, request: LoginRequest, batch: ReplyBatch) -> None:
        """Log a client in as a user of the upstream. The proxy has no users then; the upstream checks all rights."""
        session = context.session

        async def answering() -> Answer:
            answer = await self._logins.open(session.id, request.login)
            if is_error(answer.reply):
                return answer
            if session.id not in self._server.sessions:
                self._leave(session)  # the client has left meanwhile
                return Answer(b"")
            self._dedicated.leave(session)  # its connection is logged in as the previous user
            session.authenticate(self._server.users.default)
            reply = OK if request.rest is None else self.reply_to(context, request.rest)
            assert isinstance(reply, bytes)  # HELLO replies at once
            return Answer(reply)

        if self._dedicated.holds_state(session):
            raise GenericError("another user cannot log in between WATCH and EXEC, or as a subscriber")
        session.last_command = self._table.find(AUTH if request.rest is None else HELLO).name
        self._stats.command_stats(session.last_command).calls += 1
        batch.answer(answering, session.replies_suppressed)

    def _leave(self, session: Session) -> None:
        """End a client's connections, login and subscriptions at the upstream."""
        for each in self._logins.of(session.id):
            each.end_tracking(session.id)
        self._dedicated.leave(session)
        self.cached.leave(session)
        self._logins.leave(session.id)
        self._waiting.pop(session.id, None)
        self._subscriptions.leave(session)

    def _shared_connection(
        self, client: int, protocol: int, database: int
    ) -> UpstreamConnection | NodeConnections | None:
        """Return a client's shared connection to a database; None: the general path opens one, or replies an error."""
        databases = self._logins.of(client)
        return databases.of(database).shared_connection(client, protocol) if databases.is_open(database) else None

    def _cache_of(self, client: int, database: int) -> ResultCache | None:
        """Return the cache for a client of the forwarder; None: the client gets no cached replies."""
        databases = self._logins.own
        if self._has_client_logins or not databases.is_open(database):
            return None
        if self._dedicated.has_own(client, databases.of(database).pools):
            return None
        return self.cached.for_forwarder(self._ownership.matcher.has_exactly_cached)

    def _queue_routed(
        self, context: CommandContext, transaction: Transaction, route: Route, request: Request, batch: ReplyBatch
    ) -> bool:
        """Queue a request for EXEC that is not, or not only, about states; False: the proxy refuses it."""
        routed = route.routed
        if routed.policy.role is Role.WATCH:
            return False  # the general path refuses it
        self.router.commands.check_form(routed, request)
        if routed.is_subscription:
            raise GenericError(f"command '{routed.name}' of a module, which may subscribe, cannot be in a transaction")
        if not is_long(request):
            self.check_rights(context, routed, request)
        if route.destination is Destination.SELECT and self._dedicated.listens(context.session):
            raise GenericError(NOT_BY_SUBSCRIBERS)
        context.session.last_command = routed.name
        if not transaction.is_aborted:
            transaction.add(request)
        if route.destination is Destination.SELECT:
            transaction.db = self._queued_database(request[1], context.session)
        batch.add(b"" if context.session.replies_suppressed else QUEUED)
        return True

    def begin_exec(
        self, context: CommandContext, requests: Sequence[Request], watched: Watched, seen: SeenEpochs
    ) -> BackendExec:
        return OverlayExec(self.backend, context.session, requests, watched, seen, partial(super().begin_exec, context))

    def chunks_of(self, request: Request) -> Iterable[Request]:
        routed = self.router.commands.of(request) if isinstance(request, LongRequest) else None
        return (request,) if routed is None else chunks_of(routed, cast(LongRequest, request))

    def _queued_database(self, word: bytes, session: Session) -> int:
        """Return the database after a queued SELECT: the same if its number is invalid."""
        try:
            return self._logins.of(session.id).number_of(word)
        except GenericError:
            return session.next_db

    def of_states(self, session: Session, requests: Sequence[Request]) -> Iterable[Request]:
        database = session.db
        for request in requests:
            if self._is_of_states(request, database):
                yield request
            if len(request) == 2 and self._table.role_of(request) is Role.SELECT:
                with suppress(GenericError):
                    database = self._logins.of(session.id).number_of(request[1])

    def _is_of_states(self, request: Request, database: int) -> bool:
        if len(request) > UNSPLIT_WORDS_MAX:
            return False  # a transaction of states refuses such a request when it is queued
        route = self.router.route(request, database)
        return route is None or route.destination in WITHOUT_UPSTREAM or route.destination in PARTLY_OF_STATES

    def has_keys(self, session: Session) -> bool:
        return True  # the router has decided

    def _select(self, word: bytes, session: Session, batch: ReplyBatch) -> None:
        """Select a database. Each has connections of its own, so all earlier requests have their replies."""
        databases = self._logins.of(session.id)
        number = databases.number_of(word)
        if number != session.db and self._dedicated.holds_state(session):
            raise GenericError(NOT_BY_SUBSCRIBERS if self._dedicated.listens(session) else NOT_WHILE_WATCHING)
        session.last_command = self._table.find(SELECT).name
        self._stats.command_stats(session.last_command).calls += 1
        if databases.is_open(number) or number in self._ownership.matcher.databases:
            session.select(number)
            batch.add(b"" if session.replies_suppressed else OK)
        else:
            batch.is_last = True
            batch.answer(partial(self._select_new, databases, number, session), session.replies_suppressed)

    @staticmethod
    async def _select_new(databases: Databases, number: int, session: Session) -> Answer:
        """Select a database of which it is not known whether the upstream has it."""
        await databases.open(number)
        session.select(number)
        return Answer(OK)

    async def _answer_local(
        self, context: CommandContext, routed: RoutedCommand, request: Request, batch: ReplyBatch
    ) -> ReplyBatch | None:
        """Handle what a command of the proxy changes at the upstream; return the batch for the proxy's reply."""
        session, role = context.session, routed.policy.role
        if role is Role.RESET and len(request) == 1 and self._subscriptions.end(request, session, batch):
            batch = await next_batch()
        transaction = session.transaction
        is_end = transaction is not None and (role is Role.DISCARD or (role is Role.EXEC and transaction.is_aborted))
        if len(request) == 1 and (is_end or (role is Role.UNWATCH and transaction is None)):
            self._dedicated.unwatch(session)
        if listens(routed.policy):
            return await self._listen(context, routed, request, batch)
        if role is Role.CLIENT_UNBLOCK and transaction is None:
            self.check_rights(context, routed, request)
            if self._dedicated.unblock(request, session, batch):
                return None
        return batch

    def _answer_history(
        self, context: CommandContext, routed: RoutedCommand, request: Request, batch: ReplyBatch
    ) -> bool:
        """Request the history of a state's key from its server; GenericError for a key that is not a state's.

        False: the proxy queues or refuses the request.
        """
        session, command = context.session, routed.command
        if session.transaction is not None:
            return False
        assert command is not None
        command.check_arity(request)
        if not self._may_forward(context, command, request):
            return False
        named = self.router.of_states(request, command.facts.first_key, session.db)
        session.last_command = command.name
        self._stats.command_stats(command.name).calls += 1
        self._monitor(session, command, request)
        self.servers.answer_history(named, session, batch, request[command.facts.first_key])
        return True

    async def _listen(
        self, context: CommandContext, routed: RoutedCommand, request: Request, batch: ReplyBatch
    ) -> ReplyBatch | None:
        """Have the upstream confirm SUBSCRIBE, UNSUBSCRIBE or MONITOR before the proxy runs it, too."""
        session = context.session
        if session.transaction is not None and routed.policy.role is Role.MONITOR:
            return batch  # EXEC replies Redis' error
        if self._needs_confirmation(context, routed, request):
            if is_about_keys(routed.name, request):
                self._events.read()
            self._subscriptions.send(routed.name, request, session, batch)
            batch = await next_batch()
            if not self._subscriptions.was_confirmed(routed.name, request, session):
                return None
        return batch

    def _needs_confirmation(self, context: CommandContext, routed: RoutedCommand, request: Request) -> bool:
        """Return whether the upstream has to confirm a command that `listens`; ReplyError if it is refused."""
        command = routed.command
        assert command is not None
        if context.session.transaction is not None:
            raise GenericError(
                f"command '{routed.name}' cannot be in a transaction through --upstream: the reply to EXEC would have "
                "several replies to it, or pushes"
            )
        command.check_arity(request)
        self.check_rights(context, routed, request)
        return self._subscriptions.needs_upstream(routed.name, request, context.session)

    def _rejected(self, context: CommandContext, command: Command | None, request: Request, error: Exception) -> bytes:
        if command is not None and command.policy.role is Role.EXEC:
            self._dedicated.unwatch(context.session)  # Redis drops watched keys also when it rejects an EXEC
        return super()._rejected(context, command, request, error)

    def delayed(self, session: Session, request: Request) -> Retry | None:
        return super().delayed(session, request) or (self._delayed_by_order(session, request) if self._order else None)

    def _delayed_by_order(self, session: Session, request: Request) -> Retry | None:
        """Return what a request waits for that could send something to a client whose SUBSCRIBE is not confirmed."""
        if not session.is_authenticated:
            return None
        requests: Sequence[Request] = (request,)
        if session.transaction is not None:
            requests = session.transaction.requests if self._table.role_of(request) is Role.EXEC else ()
        publishes = any(map(self._publishes, requests))
        if not publishes and not any(self._is_for_upstream(each, session.db) for each in requests):
            return None
        return self._order.delay(session.id, publishes=publishes)

    def _publishes(self, request: Request) -> bool:
        routed = self.router.commands.of(request)
        return routed is not None and routed.policy.publishes

    def _is_for_upstream(self, request: Request, database: int) -> bool:
        """Return whether the upstream may get a request."""
        if is_long(request):
            return self.may_replicate(request)  # a request of states only reads
        try:
            route = self.router.route(request, database)
        except GenericError:
            return self.router.needs_getkeys(request)  # otherwise it is refused
        return route is not None and route.destination not in NOT_FOR_UPSTREAM

    def may_replicate(self, request: Request) -> bool:
        routed = self.router.commands.of(request)
        if routed is None:
            return False
        arity = routed.facts.arity
        is_well_formed = len(request) == arity if arity > 0 else len(request) >= -arity
        return is_well_formed and (routed.facts.is_write or routed.policy.may_replicate)

    def _check_queued(self, session: Session, command: Command, request: Request) -> None:
        if command.policy.role is Role.HELLO:
            if len(request) > 1 and request[1] in (b"2", b"3") and int(request[1]) != session.protocol:
                raise GenericError(
                    "HELLO with another version of the protocol cannot be in a transaction through --upstream: "
                    "the reply to EXEC would be in two versions"
                )
        elif command.policy.role is Role.CLIENT_REPLY:
            if len(request) == 3 and request[2].upper() != b"ON":
                raise GenericError(
                    "CLIENT REPLY OFF and SKIP cannot be in a transaction through --upstream: "
                    "the reply to EXEC would have too few items"
                )
        else:
            super()._check_queued(session, command, request)

    def check_rights(self, context: CommandContext, routed: RoutedCommand, request: Request) -> None:
        """Raise NoPermError if the user may not run a request. Commands of modules are for unrestricted users."""
        if context.session.user.is_unrestricted:
            return
        if routed.command is None:
            name = context.session.user.name.decode("utf-8", "surrogateescape")
            raise NoPermError(f"User {name} has no permissions to run the '{routed.name}' command")
        self._check_user(context, routed.command, request)

    def stop(self) -> None:
        super().stop()
        self._checks.stop()
        self._key_changes.stop()
        self.shadow.stop()
        self._logins.stop()
