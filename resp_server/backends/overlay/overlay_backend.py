"""State servers over an upstream, as a backend: each request goes to the owner of its keys, or to both.

Requests of one batch are sent to both backends at once. Each answers a client's requests in their order, and the client
gets all replies in its order. The backends have no common order (see `docs/design/0008-swap.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, assert_never, cast

from resp_server.backends.overlay.client_login import login_in
from resp_server.backends.overlay.client_logins import ClientLogins
from resp_server.backends.overlay.control import OverlayBackendControl
from resp_server.backends.overlay.dedicated_requests import DedicatedRequests
from resp_server.backends.overlay.forwarder_rules import ForwarderRules
from resp_server.backends.overlay.invalidations import OverlayInvalidations
from resp_server.backends.overlay.listening import Listening, may_replicate
from resp_server.backends.overlay.long_requests import OverlayLongRequests, is_long
from resp_server.backends.overlay.owner_changes import OwnerChanges
from resp_server.backends.overlay.route_sender import RouteSender
from resp_server.backends.overlay.sentinel_replies import sentinel_reply
from resp_server.backends.overlay.shadow import Shadow
from resp_server.backends.overlay.subscriptions import listens
from resp_server.backends.overlay.transactions import OverlayTransactions, check_replies_of_exec
from resp_server.backends.overlay.upstream_changes import UpstreamChanges
from resp_server.backends.redis.databases import Databases
from resp_server.backends.redis.logins import Logins
from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.long_arguments import VALUE_BYTES_MAX
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.route import (
    AliasedRoute,
    AllKeysRoute,
    DroppedRoute,
    LocalRoute,
    PreferredRoute,
    Route,
    SelectRoute,
    SplitRoute,
    StatesRoute,
    UpstreamRoute,
    changed_keys,
)
from resp_server.backends.routing.router import Router
from resp_server.backends.routing.upstream_settings import AskedEvents, not_passed_on
from resp_server.backends.servers.aliased_keys import AliasedKeys
from resp_server.backends.servers.getkeys import GetkeysLookup
from resp_server.backends.servers.servers_backend import ServersBackend
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.command.policy import AnsweredBy, SpecialCommand
from resp_server.command.spec import CommandSpec
from resp_server.command.table import Command
from resp_server.pipeline.admission import check_routed_user, may_leave
from resp_server.pipeline.batch import ReplyBatch, between_batches, next_batch
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.effects import count_forwarded
from resp_server.pipeline.keyless_commands import LocalRequests
from resp_server.pipeline.outcome import RequestOutcome
from resp_server.pipeline.transactions import BackendExec, Watched
from resp_server.protocol.errors import GenericError, not_for_subscribers
from resp_server.protocol.replies import Reply, Retry, encode
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.raw_replies.answers import ReadSeenEpochs
from resp_server.session.session import Session
from state_backend import VERSION

ACL_LOAD = (b"ACL", b"LOAD")
# Redis has no limit of a batch's replies. A client may have as many bytes in requests (guess: enough for any program).
REPLIES_BYTES_MAX = 2 * VALUE_BYTES_MAX


class OverlayBackend:
    """State servers over an upstream.

    Args:
        is_strict: A transaction over both backends is refused.
        has_client_logins: Clients log in at the upstream.
        allowed: Commands that are sent to the upstream although they could harm it.

    Attributes:
        aliases: The states' names of keys that clients know by other names.
    """

    orders_by_protocol = True

    def __init__(
        self,
        server: ServerContext,
        servers: ServersBackend,
        upstream: Upstream,
        ownership: Ownership,
        *,
        is_strict: bool = False,
        has_client_logins: bool = False,
        allowed: Collection[str] = (),
    ) -> None:
        self._server, self._servers = server, servers
        self.local, self.forwarder = servers.local, servers.forwarder
        self._has_client_logins, self._sentinel_master = has_client_logins, upstream.url.master.encode()
        self._logins = Logins(Databases(upstream))
        self._dedicated = DedicatedRequests(self._logins)
        self.aliases = AliasedKeys(ownership)
        self.router = _router_of(server, upstream, ownership, allowed)
        self._getkeys = GetkeysLookup(upstream, self.router.getkeys_cache)
        self._shadow = _shadow_of(server, servers, ownership)
        self._changes = UpstreamChanges(upstream, ownership, self.router, self._logins, self._shadow)
        self._sender = RouteSender(
            server,
            servers,
            self._logins,
            self.router,
            self.aliases,
            self._changes.cached,
            self._shadow,
            self._dedicated,
            is_strict=is_strict,
            has_client_logins=has_client_logins,
        )
        self._forwarder_rules = ForwarderRules(
            self.forwarder,
            self.router,
            self._logins,
            self._dedicated,
            self._changes.cached,
            server.stats,
            has_client_logins=has_client_logins,
        )
        self._invalidations = OverlayInvalidations(server, ownership, self._logins)
        self._listening = Listening(
            server, upstream, self._sender, self._invalidations, self._forwarder_rules.hold_requests
        )
        self.owners = OwnerChanges(
            server,
            servers.clusters,
            ownership,
            upstream,
            self._logins,
            self.aliases,
            self._shadow,
            self._changes,
            self._forwarder_rules,
        )
        self.control = server.proxy.overlay_control = OverlayBackendControl(
            ownership, self._shadow, self._changes.reload(upstream), lambda: self.owners.is_loading
        )
        cached, subscriptions = self._changes.cached, self._listening.subscriptions
        self._clients = ClientLogins(
            server, self.local, self._logins, self._dedicated, ownership, cached, subscriptions
        )
        self._transactions = OverlayTransactions(server.table, servers, self._sender, self._dedicated)
        self._long = OverlayLongRequests(self._sender)
        servers.call_commands(self.may_call)
        self._follow(upstream)

    def may_call(self, command: Command) -> bool | LocalRequests:
        """Return whether the proxy runs a command itself, and the upstream has nothing to do for it, or a request."""
        routed, special = self.router.commands.of(command.name.encode().split(b"|")), command.policy.special
        is_login = self._has_client_logins and special in (SpecialCommand.AUTH, SpecialCommand.HELLO)
        is_local = (
            routed is not None and routed.answered_by_row is AnsweredBy.LOCAL and special is not SpecialCommand.SELECT
        )
        if is_local and listens(command.policy):
            return self._listening.local_requests(command, self._clients.knows) or False
        if not is_local or is_login or not self._servers.may_call(command):
            return False
        if special is SpecialCommand.RESET:  # it closes the client's connection
            return LocalRequests(lambda session, request: False, self._clients.knows)
        if special is SpecialCommand.UNWATCH:
            return LocalRequests(lambda session, request: not self._dedicated.has_watched(session), self._clients.knows)
        if special is SpecialCommand.CLIENT_UNBLOCK:
            return LocalRequests(lambda session, request: not self._dedicated.blocked(request))
        return True

    def _follow(self, upstream: Upstream) -> None:
        """Have the upstream report its kind, and the state that is lost with a connection."""
        server = self._server
        upstream.defer, upstream.on_state_lost = server.clients.defer, server.clients.cut
        upstream.on_facts, upstream.on_hello = self._facts_arrived, self._hello_arrived
        server.proxy.is_single_node = upstream.url.is_cluster  # its clients may be cluster clients

    def _facts_arrived(self, facts: Mapping[str, CommandSpec]) -> None:
        self.router.commands.take_facts(facts)
        self._forwarder_rules.set_commands()

    def _hello_arrived(self, fields: Mapping[bytes, Reply]) -> None:
        self._server.proxy.hello_fields = fields

    def start(self) -> None:
        """Follow changes of the upstream's keys, if a rule needs them."""
        self._changes.follow()

    def poll(self, poller: Any) -> None:
        """Use the compiled core's epoll for the connections to servers and to the upstream."""
        self._servers.poll(poller)
        for each in (*self._logins.default, *self._logins.default.pools):
            each.poller = poller

    def stop(self) -> None:
        """Close the connections of both backends."""
        self._servers.stop()
        self.owners.stop()
        self._changes.events.stop()
        self._shadow.stop()
        self._logins.stop()

    def info_fields(self) -> Mapping[str, object]:
        """Return the fields of INFO: those of the servers, of the upstream, and of the owners of keys."""
        return {
            "sparkis_version": VERSION,  # INFO's section about the server is the upstream's
            **self._servers.clusters.info_fields(),
            **self._logins.info_fields(),
            **self.router.ownership.info_fields(),
            "dropped_writes": self._sender.dropped_writes,
            **self._changes.info_fields(),
            **self._shadow.info_fields(),
        }

    # -- requests -----------------------------------------------------------------------------------------------------

    def new_batch(self, session: Session) -> ReplyBatch:
        """Return a batch for the replies to a client's requests."""
        return self._servers.new_batch(session, REPLIES_BYTES_MAX)

    def send_at_once(self, session: Session, request: Request, batch: ReplyBatch) -> bool:
        """Return False: each key's owner must be found."""
        return False

    async def answer(self, context: CommandContext, request: Request, batch: ReplyBatch) -> RequestOutcome:
        """Answer a request by the backends that have its keys; ReplyError if none may answer it."""
        session = context.session
        if self._has_client_logins and session.transaction is None and not is_long(request):
            login = login_in(request)
            if login is not None:
                self._clients.log_in(context, login, batch)
                batch.is_last = True
                return RequestOutcome.ANSWERED
        if not session.is_authenticated:  # the error is a server's: it does not reveal the owner of a key
            return await self._servers.answer(context, request, batch)
        route, batch = await self._found_route(context, request, batch)
        while route is not None and len(batch) and self._is_first_of_batch(route, request, session):
            if listens(route.routed.policy):
                self._listening.keep_order(context, route.routed, request)
            batch = await next_batch()
            route, batch = await self._found_route(context, request, batch)
        match route:
            case None:
                return self._answer_sentinel(request, session, batch)
            case LocalRoute():
                return await self._answer_local(context, route.routed, request, batch)
            case StatesRoute():
                if route.routed.policy.special is SpecialCommand.STATE_HISTORY and session.transaction is None:
                    return self._answer_history(context, route.routed, request, batch)
                return await self._servers.answer(context, request, batch)
            case (
                UpstreamRoute()
                | SplitRoute()
                | AliasedRoute()
                | PreferredRoute()
                | AllKeysRoute()
                | SelectRoute()
                | DroppedRoute()
            ):
                return self._answer_beyond_states(context, route, request, batch)
            case never:
                assert_never(never)

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
        is_blocking = type(route) is UpstreamRoute and route.is_blocking
        if policy.special is None and not (
            is_blocking or policy.channels or policy.kills_a_script or policy.changes_replication
        ):
            return False  # as most requests
        if type(route) is LocalRoute:
            if policy.special is SpecialCommand.RESET:  # it closes the client's connection
                return self._dedicated.has_connection(session.id, self._logins.pools)
            return listens(policy) and session.transaction is None
        if session.transaction is not None:
            return False
        if type(route) is SelectRoute and len(request) == 2:
            return self._logins.of(session.id).number_of(request[1]) != session.db
        needs_dedicated = policy.special is SpecialCommand.WATCH or policy.kills_a_script
        is_first = needs_dedicated and not self._dedicated.has_connection(
            session.id, self._sender.upstream_of(session).pools
        )
        return is_blocking or is_first or policy.changes_replication

    def _answer_sentinel(self, request: Request, session: Session, batch: ReplyBatch) -> RequestOutcome:
        """Answer SENTINEL, with this proxy as the master. Refuse other commands that are unknown."""
        if not self._sentinel_master or request[0].lower() != b"sentinel":
            return RequestOutcome.REFUSED
        host, _, port = session.local_address.rpartition(":")
        reply = sentinel_reply(request, self._sentinel_master, host.strip("[]").encode(), port.encode())
        batch.add(b"" if session.replies_suppressed else encode(reply, session.protocol))
        return RequestOutcome.ANSWERED

    def _answer_beyond_states(
        self, context: CommandContext, route: Route, request: Request, batch: ReplyBatch
    ) -> RequestOutcome:
        """Answer or queue a request that is not, or not only, about states."""
        session = context.session
        if session.tracking_state is not None:
            self._invalidations.after_reply(session, route, request)
        if session.transaction is not None:
            if (
                type(route) is UpstreamRoute and type(route.use) is AskedEvents
            ):  # its reply is known only when the upstream has answered
                raise not_passed_on(route.routed.name)
            return self._transactions.queue(context, session.transaction, route, request, batch)
        return self._answer_alone(context, route, request, batch)

    def _answer_alone(
        self, context: CommandContext, route: Route, request: Request, batch: ReplyBatch
    ) -> RequestOutcome:
        """Answer a request for the upstream, or for both backends, outside of MULTI."""
        session, routed, special = context.session, route.routed, route.routed.policy.special
        if not is_long(request):  # the rights to a long one were checked in steps
            check_routed_user(context, routed, request)
        if routed.policy.kills_a_script:
            for pool in self._sender.upstream_of(session).masters:
                pool.dedicated.open(session.id, session.protocol)
        # A RESP2 subscriber may send few commands. The upstream refuses the others that it receives; those that never
        # reach it are refused here.
        if session.gets_messages_as_replies and not routed.policy.runs_while_subscribed:
            if type(route) is not UpstreamRoute:
                return RequestOutcome.REFUSED
            # Maybe it is no subscriber of the key's node; and WAIT is sent behind a write, which would be refused.
            if self._sender.upstream_of(session).node_count > 1 or routed.policy.waits_for_writes:
                self.router.commands.check_form(routed, request)
                raise not_for_subscribers(routed.name)
        if type(route) is SelectRoute and len(request) == 2:
            self._clients.select(request[1], session, batch)
            return RequestOutcome.ANSWERED
        session.last_command = routed.name
        self._server.stats.command_stats(routed.name).calls += 1
        if routed.is_subscription:
            self._listening.subscriptions.begin_module_subscription(routed.name, session)
        if special is SpecialCommand.WATCH:
            self._transactions.watch(context, route, request, batch)
        elif type(route) is AllKeysRoute:
            self._sender.query_keyspace(special, request, session, batch)
        elif type(route) is UpstreamRoute and route.is_blocking:
            self._answer_blocking(route, request, session, batch)
        elif self._is_long_read_of_states(route, request, session):
            batch.is_last = True
            return self._servers.long.answer(context, cast(LongRequest, cast(AliasedRoute, route).request), batch)
        elif type(route) is SplitRoute and route.is_in_chunks:
            batch.is_last = True
            start_answer = partial(self._long.answer_in_chunks, context, route, request, batch)
            batch.answer(start_answer, session.replies_suppressed)
        else:
            self._sender.send(route, request, session, batch)
        return RequestOutcome.ANSWERED

    def _answer_blocking(self, route: UpstreamRoute, request: Request, session: Session, batch: ReplyBatch) -> None:
        batch.block()
        batch.is_last = True
        block, changed = partial(self._dedicated.block, route.routed, request, session), self._changes.cached.changed
        batch.answer(lambda: changed(changed_keys(route), session, block()), session.replies_suppressed)

    @staticmethod
    def _is_long_read_of_states(route: Route, request: Request, session: Session) -> bool:
        """Return whether the states get a long request under their names, to which rules of users do not apply."""
        is_complete = type(route) is AliasedRoute and route.convert is None
        return is_complete and is_long(request) and session.user.is_unrestricted

    async def _answer_local(
        self, context: CommandContext, routed: OverlayCommand, request: Request, batch: ReplyBatch
    ) -> RequestOutcome:
        """End at the upstream what RESET, DISCARD, EXEC, UNWATCH or CLIENT UNBLOCK end here; confirm subscriptions."""
        session, special = context.session, routed.policy.special
        if special is SpecialCommand.RESET and len(request) == 1:
            if self._listening.subscriptions.end(session, batch):
                batch = await next_batch()
            self.leave(session)  # so the handler of RESET finds nothing to do
        transaction = session.transaction
        is_end = transaction is not None and (
            special is SpecialCommand.DISCARD or (special is SpecialCommand.EXEC and transaction.is_aborted)
        )
        if len(request) == 1 and (is_end or (special is SpecialCommand.UNWATCH and transaction is None)):
            self._dedicated.unwatch(session)
        if listens(routed.policy):
            is_confirmed, batch = await self._listening.confirm(context, routed, request, batch)
            if not is_confirmed:  # the reply is the upstream's error
                return RequestOutcome.ANSWERED
        if special is SpecialCommand.CLIENT_UNBLOCK and transaction is None:
            check_routed_user(context, routed, request)
            if self._dedicated.unblock(request, session, batch):
                return RequestOutcome.ANSWERED
        return await self._servers.answer(context, request, batch)

    def _answer_history(
        self, context: CommandContext, routed: OverlayCommand, request: Request, batch: ReplyBatch
    ) -> RequestOutcome:
        """Request the history of a state's key from its server; GenericError for a key that is not a state's."""
        session, command = context.session, routed.command
        assert command is not None
        command.check_arity(request)
        if not may_leave(session, command, request):
            return RequestOutcome.REFUSED
        key_index = command.facts.first_key
        named = self.router.of_states(request, key_index, session.db)
        count_forwarded(context, command, request)
        self._servers.sender.answer_history(named, session, batch, request[key_index])
        return RequestOutcome.ANSWERED

    # -- other methods of `Backend` -----------------------------------------------------------------------------------

    def has_keys(self, session: Session) -> bool:
        """Return True: the router decides which requests are about states' keys."""
        return True

    def check(self, context: CommandContext, command: Command, request: Request) -> None:
        """Raise the error of a request that can neither run nor be queued here, after the checks of `admission`."""
        is_queued = context.session.transaction is not None
        if not (is_queued and check_replies_of_exec(context.session, command, request)):
            self._servers.check(context, command, request)

    def delayed(self, session: Session, request: Request) -> Retry | None:
        """Return what a request waits for: another client's unconfirmed SUBSCRIBE. None: handle it now."""
        return self._listening.delayed(session, request)

    def may_replicate(self, request: Request) -> bool:
        """Return whether CLIENT PAUSE ... WRITE delays a request."""
        return may_replicate(self.router, request)

    def watch(self, context: CommandContext, request: Request, batch: ReplyBatch) -> None:
        """Add the pending reply to a WATCH of states' keys."""
        self._servers.watch(context, request, batch)

    def begin_exec(
        self, context: CommandContext, requests: Sequence[Request], watched: Watched, seen: ReadSeenEpochs
    ) -> BackendExec:
        """Begin the EXEC of queued requests."""
        return self._transactions.begin_exec(context, requests, watched, seen)

    def forward_exec(
        self, session: Session, requests: Sequence[Request], batch: ReplyBatch, index: int, run: Callable[[], None]
    ) -> bool:
        """Have the compiled forwarder send a transaction; False if it does not."""
        return self._servers.forward_exec(session, requests, batch, index, run)

    def exec_rejected(self, session: Session) -> None:
        """Drop the watched keys: Redis does so also when it rejects an EXEC."""
        self._dedicated.unwatch(session)

    def chunks_of(self, request: Request) -> Iterable[Request]:
        """Split a queued request into chunks, to check the rights to all of its keys."""
        return self._transactions.chunks_of(request)

    def recorded(self, session: Session, requests: Sequence[Request]) -> Iterable[tuple[Request, bool]]:
        """Return the queued requests that monitors and tracking clients here get."""
        return self._transactions.recorded(session, requests)

    def leave(self, session: Session) -> None:
        """End a client's connections, login and subscriptions at the upstream."""
        self._clients.leave(session)


def _router_of(server: ServerContext, upstream: Upstream, ownership: Ownership, allowed: Collection[str]) -> Router:
    # Without a file of users at the proxy, ACL LOAD can only be meant for the upstream's.
    answered_here = (server.table.find(ACL_LOAD).name,) if server.config.aclfile else ()
    return Router(server.table, ownership, allowed, answered_here, upstream.url.database)


def _shadow_of(server: ServerContext, servers: ServersBackend, ownership: Ownership) -> Shadow:
    def job_of(key: bytes) -> str | None:
        return ownership.matcher.job_of(key)

    return Shadow(servers.clusters, servers.target_of, job_of, ownership.rules, server.clients.defer)
