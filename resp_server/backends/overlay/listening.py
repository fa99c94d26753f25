"""Commands that the upstream confirms before the proxy runs them, too: SUBSCRIBE, UNSUBSCRIBE, MONITOR, tracking.

Requests of other clients that could send something to a client wait until its SUBSCRIBE is confirmed
(`subscription_order`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from resp_server.backends.overlay.invalidations import OverlayInvalidations
from resp_server.backends.overlay.long_requests import is_long
from resp_server.backends.overlay.route_sender import RouteSender
from resp_server.backends.overlay.subscription_order import SubscriptionOrder
from resp_server.backends.overlay.subscriptions import OverlaySubscriptions, is_about_keys
from resp_server.backends.overlay.upstream_events import UpstreamEvents
from resp_server.backends.redis.pool import UpstreamPool
from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.route import WITHOUT_UPSTREAM, AliasedRoute, DroppedRoute, PreferredRoute
from resp_server.backends.routing.router import Router
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.command.policy import SpecialCommand, Verb
from resp_server.command.table import Command
from resp_server.pipeline.admission import check_routed_user
from resp_server.pipeline.batch import ReplyBatch, between_batches
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.keyless_commands import LocalRequests
from resp_server.protocol.errors import GenericError
from resp_server.protocol.replies import Retry
from resp_server.protocol.request_parser import Request
from resp_server.session.session import Session
from resp_server.session.subscriptions import SubscriptionKind

# Requests that do not wait for the upstream, or may not have to.
NOT_FOR_UPSTREAM = (*WITHOUT_UPSTREAM, AliasedRoute, PreferredRoute, DroppedRoute)


class Listening:
    """Sends such commands to the upstream, and holds the requests that wait for their confirmation.

    Args:
        on_held: Called with whether all requests to the upstream are held, and whether those that send messages are,
            when it may have changed.
    """

    def __init__(
        self,
        server: ServerContext,
        upstream: Upstream,
        sender: RouteSender,
        invalidations: OverlayInvalidations,
        on_held: Callable[[bool, bool], None],
    ) -> None:
        self._table, self._sender = server.table, sender
        self._events = UpstreamEvents(server, upstream)
        self._order = SubscriptionOrder(time.monotonic, lambda: on_held(self._order.holds_requests, bool(self._order)))
        self.subscriptions = OverlaySubscriptions(
            sender.upstream_of,
            self._own_pool,
            upstream.url,
            server.sessions,
            server.clients,
            invalidations.is_dropped_notification,
            invalidations.of_upstream,
            self._order,
        )

    def _own_pool(self, session: Session) -> UpstreamPool | None:
        """Return the pool of the node that sends a client the messages of channels; None: no node is known."""
        upstream = self._sender.upstream_of(session)
        for pool in upstream.pools:
            connection = pool.dedicated.get(session.id)
            if connection is not None and connection.is_listening and connection.is_for_messages:
                return pool
        return upstream.message_pool

    async def confirm(
        self, context: CommandContext, routed: OverlayCommand, request: Request, batch: ReplyBatch
    ) -> tuple[bool, ReplyBatch]:
        """Have the upstream confirm a command, if it has to; see `OverlaySubscriptions.confirm`."""
        session = context.session
        if session.transaction is not None and routed.policy.special is SpecialCommand.MONITOR:
            return True, batch  # EXEC replies Redis' error
        if self._needs_confirmation(context, routed, request):
            if is_about_keys(routed.name, request):
                # Read first: the states' servers get the setting with the subscription, and confirm both.
                self.subscriptions.keep_order(routed.name, request, session)
                _, batch = await between_batches(self._events.read(), batch)
            return await self.subscriptions.confirm(routed.name, request, session, batch)
        return True, batch

    def local_requests(self, command: Command, is_connected: Callable[[Session], bool]) -> LocalRequests | None:
        """Return for which requests outside of MULTI the upstream has nothing to do; None: for none, as MONITOR."""
        channels, subscriptions = command.policy.channels, self.subscriptions
        if channels is not None:
            is_unchanged = partial(subscriptions.is_unchanged, channels.verb, SubscriptionKind(channels.kind))
            return LocalRequests(is_unchanged, is_connected if channels.verb is Verb.UNSUBSCRIBE else None)
        if command.policy.special is SpecialCommand.CLIENT_TRACKING:
            return LocalRequests(subscriptions.is_without_tracking)
        return None

    def keep_order(self, context: CommandContext, routed: OverlayCommand, request: Request) -> None:
        """Have other clients' requests wait for a command that itself waits for its client's next batch."""
        if self._needs_confirmation(context, routed, request):
            self.subscriptions.keep_order(routed.name, request, context.session)

    def _needs_confirmation(self, context: CommandContext, routed: OverlayCommand, request: Request) -> bool:
        """Return whether the upstream has to confirm a command that `listens`; ReplyError if it is refused."""
        command = routed.command
        assert command is not None
        if context.session.transaction is not None:
            raise GenericError(
                f"command '{routed.name}' cannot be in a transaction through --upstream: the reply to EXEC would have "
                "several replies to it, or pushes"
            )
        command.check_arity(request)
        check_routed_user(context, routed, request)
        if context.session.gets_messages_as_replies and not routed.policy.runs_while_subscribed:
            return False  # the proxy refuses it: not all nodes of a Redis Cluster would, which have no subscription
        return self.subscriptions.needs_upstream(routed.name, request, context.session)

    # -- requests of other clients ------------------------------------------------------------------------------------

    def delayed(self, session: Session, request: Request) -> Retry | None:
        """Return what a request waits for that could send a message: an unconfirmed SUBSCRIBE. None: handle it now."""
        if not self._order or not session.is_authenticated:
            return None
        requests: Sequence[Request] = (request,)
        if session.transaction is not None:
            requests = session.transaction.requests if self._table.special_of(request) is SpecialCommand.EXEC else ()
        publishes = any(map(self._publishes, requests))
        if not publishes and not any(self._is_for_upstream(each, session.db) for each in requests):
            return None
        return self._order.delay(session.id, publishes=publishes)

    def _publishes(self, request: Request) -> bool:
        routed = self._sender.router.commands.of(request)
        return routed is not None and routed.policy.publishes

    def _is_for_upstream(self, request: Request, database: int) -> bool:
        """Return whether the upstream may get a request."""
        router = self._sender.router
        if is_long(request):
            return may_replicate(router, request)  # a request of states only reads
        try:
            route = router.route(request, database)
        except GenericError:
            return router.needs_getkeys(request)  # otherwise it is refused
        return route is not None and type(route) not in NOT_FOR_UPSTREAM


def may_replicate(router: Router, request: Request) -> bool:
    """Return whether a request is well-formed, and CLIENT PAUSE ... WRITE delays its command."""
    routed = router.commands.of(request)
    if routed is None:
        return False
    return routed.facts.has_arity_of(request) and (routed.facts.is_write or routed.policy.may_replicate)
