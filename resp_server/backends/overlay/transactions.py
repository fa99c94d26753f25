"""Transactions over both backends: what may be queued, which backend runs it, and what is watched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

from resp_server.backends.overlay.client_logins import NOT_BY_SUBSCRIBERS
from resp_server.backends.overlay.dedicated_requests import DedicatedRequests
from resp_server.backends.overlay.long_requests import chunks_of, is_long
from resp_server.backends.overlay.overlay_exec import OverlayExec
from resp_server.backends.overlay.route_sender import RouteSender
from resp_server.backends.overlay.watch import watch_both
from resp_server.backends.routing.route import (
    PARTLY_OF_STATES,
    WITHOUT_UPSTREAM,
    AliasedRoute,
    Route,
    SelectRoute,
    SplitRoute,
    StatesRoute,
    UpstreamRoute,
)
from resp_server.backends.servers.servers_backend import ServersBackend
from resp_server.command.policy import SpecialCommand
from resp_server.command.table import Command, CommandTable
from resp_server.pipeline.admission import check_routed_user
from resp_server.pipeline.batch import ReplyBatch
from resp_server.pipeline.context import CommandContext
from resp_server.pipeline.long_requests import UNSPLIT_ARGUMENTS_MAX
from resp_server.pipeline.outcome import RequestOutcome
from resp_server.pipeline.transactions import BackendExec, Watched
from resp_server.protocol.errors import GenericError, wrong_arity
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.raw_replies.answers import ReadSeenEpochs
from resp_server.session.session import Session
from resp_server.session.transaction import QUEUED, Transaction


class OverlayTransactions:
    """Queues, watches and runs the transactions of clients."""

    def __init__(
        self, table: CommandTable, servers: ServersBackend, sender: RouteSender, dedicated: DedicatedRequests
    ) -> None:
        self._table, self._servers, self._sender, self._dedicated = table, servers, sender, dedicated

    def queue(
        self, context: CommandContext, transaction: Transaction, route: Route, request: Request, batch: ReplyBatch
    ) -> RequestOutcome:
        """Queue a request for EXEC that is not, or not only, about states."""
        routed, session = route.routed, context.session
        if routed.policy.special is SpecialCommand.WATCH:
            return RequestOutcome.REFUSED
        self._sender.router.commands.check_form(routed, request)
        if routed.is_subscription:
            raise GenericError(f"command '{routed.name}' of a module, which may subscribe, cannot be in a transaction")
        if not is_long(request):
            check_routed_user(context, routed, request)
        if type(route) is SelectRoute and self._dedicated.listens(session):
            raise GenericError(NOT_BY_SUBSCRIBERS)
        session.last_command = routed.name
        transaction.queue(request)
        if type(route) is SelectRoute:
            transaction.db = self._queued_database(request[1], session)
        batch.add(b"" if session.replies_suppressed else QUEUED)
        return RequestOutcome.ANSWERED

    def _queued_database(self, word: bytes, session: Session) -> int:
        """Return the database after a queued SELECT: the same if its number is invalid."""
        try:
            return self._sender.databases_of(session).number_of(word)
        except GenericError:
            return session.next_db

    def watch(self, context: CommandContext, route: Route, request: Request, batch: ReplyBatch) -> None:
        """Add the pending reply to a WATCH whose keys are not all states' keys under their own names."""
        session = context.session
        if not route.routed.facts.has_arity_of(request):
            raise wrong_arity(route.routed.name)
        batch.is_last = True
        if type(route) is AliasedRoute:
            self._servers.watch(context, route.request, batch)
            return
        split = route if type(route) is SplitRoute else SplitRoute(route.routed)  # all keys are the upstream's
        sent, upstream = split.request or request, self._sender.upstream_of(session)
        cluster_of, defer = self._servers.sender.cluster_of, self._sender.defer
        batch.answer(partial(watch_both, upstream, cluster_of, split, sent, session, defer), session.replies_suppressed)

    def begin_exec(
        self, context: CommandContext, requests: Sequence[Request], watched: Watched, seen: ReadSeenEpochs
    ) -> BackendExec:
        """Begin the EXEC of queued requests."""
        begin_states = partial(self._servers.begin_exec, context)
        return OverlayExec(self._sender, context.session, requests, watched, seen, begin_states)

    def chunks_of(self, request: Request) -> Iterable[Request]:
        """Split a queued request into chunks, to check the rights to all of its keys."""
        routed = self._sender.router.commands.of(request) if isinstance(request, LongRequest) else None
        return (request,) if routed is None else chunks_of(routed, cast(LongRequest, request))

    def recorded(self, session: Session, requests: Sequence[Request]) -> Iterable[tuple[Request, bool]]:
        """Return the queued requests that states answer; the upstream tells monitors and tracking clients of others."""
        database = session.db
        for request in requests:
            kind = self._kind_of_route(request, database)
            if kind in WITHOUT_UPSTREAM or kind in PARTLY_OF_STATES:
                yield request, kind in WITHOUT_UPSTREAM
            if len(request) == 2 and self._table.special_of(request) is SpecialCommand.SELECT:
                with suppress(GenericError):
                    database = self._sender.databases_of(session).number_of(request[1])

    def _kind_of_route(self, request: Request, database: int) -> type[Route]:
        if len(request) > UNSPLIT_ARGUMENTS_MAX:
            return UpstreamRoute  # a transaction of states refuses such a request when it is queued
        route = self._sender.router.route(request, database)
        return StatesRoute if route is None else type(route)


def check_replies_of_exec(session: Session, command: Command, request: Request) -> bool:
    """Check a queued command that changes how replies look; False: it is another command.

    GenericError if the reply to EXEC could not be made of both backends' replies.
    """
    if command.policy.special is SpecialCommand.HELLO:
        if len(request) > 1 and request[1] in (b"2", b"3") and int(request[1]) != session.protocol:
            raise GenericError(
                "HELLO with another version of the protocol cannot be in a transaction through --upstream: "
                "the reply to EXEC would be in two versions"
            )
        return True
    if command.policy.special is SpecialCommand.CLIENT_REPLY:
        if len(request) == 3 and request[2].upper() != b"ON":
            raise GenericError(
                "CLIENT REPLY OFF and SKIP cannot be in a transaction through --upstream: "
                "the reply to EXEC would have too few items"
            )
        return True
    return False
