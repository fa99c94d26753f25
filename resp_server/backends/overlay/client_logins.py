"""A client's state at the upstream: its login, its database, and what ends when it leaves."""

from __future__ import annotations

from functools import partial

from resp_server.backends.overlay.cached_reads import CachedReads
from resp_server.backends.overlay.client_login import LoginRequest
from resp_server.backends.overlay.dedicated_requests import DedicatedRequests
from resp_server.backends.overlay.route_sender import OK
from resp_server.backends.overlay.subscriptions import OverlaySubscriptions
from resp_server.backends.redis.databases import Databases
from resp_server.backends.redis.logins import Logins
from resp_server.backends.routing.ownership import Ownership
from resp_server.pipeline.admission import check
from resp_server.pipeline.batch import ReplyBatch
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.immediate import ImmediateBackend, ImmediatePipeline
from resp_server.protocol.errors import GenericError
from resp_server.raw_replies.answers import Answer
from resp_server.raw_replies.raw_reply import is_error
from resp_server.session.session import Session

NOT_WHILE_WATCHING = "another database cannot be selected between WATCH and EXEC"
NOT_BY_SUBSCRIBERS = "another database cannot be selected by a subscriber, or a client that tracks keys"
AUTH, HELLO, SELECT = (b"AUTH",), (b"HELLO",), (b"SELECT",)


class ClientLogins:
    """Logs clients in at the upstream, selects their databases, and ends both.

    Args:
        local: Runs HELLO after a login.
    """

    def __init__(
        self,
        server: ServerContext,
        local: ImmediateBackend,
        logins: Logins,
        dedicated: DedicatedRequests,
        ownership: Ownership,
        cached: CachedReads,
        subscriptions: OverlaySubscriptions,
    ) -> None:
        self._server, self._local = server, ImmediatePipeline(server, local, check)
        self._logins, self._dedicated, self._ownership = logins, dedicated, ownership
        self._cached, self._subscriptions = cached, subscriptions

    def log_in(self, context: CommandContext, request: LoginRequest, batch: ReplyBatch) -> None:
        """Log a client in as a user of the upstream. The proxy has no users then; the upstream checks all rights."""
        session = context.session

        async def answering() -> Answer:
            answer = await self._logins.open(session.id, request.login)
            if is_error(answer.reply):
                return answer
            if session.id not in self._server.sessions:
                self.leave(session)  # the client has left meanwhile
                return Answer(b"")
            self._dedicated.leave(session)  # its connection is logged in as the previous user
            session.authenticate(self._server.users.default)
            reply = OK if request.rest is None else self._local.reply_to(context, request.rest)
            assert isinstance(reply, bytes)  # HELLO replies at once
            return Answer(reply)

        if self._dedicated.holds_state(session):
            raise GenericError("another user cannot log in between WATCH and EXEC, or as a subscriber")
        session.last_command = self._server.table.find(AUTH if request.rest is None else HELLO).name
        self._server.stats.command_stats(session.last_command).calls += 1
        batch.answer(answering, session.replies_suppressed)

    def knows(self, session: Session) -> bool:
        """Return whether a client has a login or a connection at the upstream, so that RESET ends something there."""
        has_login = session.id in self._logins.by_client
        return has_login or self._dedicated.has_connection(session.id, self._logins.pools)

    def leave(self, session: Session) -> None:
        """End a client's connections, login and subscriptions at the upstream."""
        for each in self._logins.of(session.id):
            each.end_tracking(session.id)
        self._dedicated.leave(session)
        self._cached.leave(session)
        self._logins.leave(session.id)
        self._subscriptions.leave(session)

    def select(self, word: bytes, session: Session, batch: ReplyBatch) -> None:
        """Select a database. Each has connections of its own, so all earlier requests have their replies."""
        databases = self._logins.of(session.id)
        number = databases.number_of(word)
        if number != session.db and self._dedicated.holds_state(session):
            raise GenericError(NOT_BY_SUBSCRIBERS if self._dedicated.listens(session) else NOT_WHILE_WATCHING)
        session.last_command = self._server.table.find(SELECT).name
        self._server.stats.command_stats(session.last_command).calls += 1
        if databases.is_open(number) or number in self._ownership.matcher.databases:
            session.select(number)
            batch.add(b"" if session.replies_suppressed else OK)
        else:
            batch.is_last = True
            batch.answer(partial(_select_new, databases, number, session), session.replies_suppressed)


async def _select_new(databases: Databases, number: int, session: Session) -> Answer:
    """Select a database of which it is not known whether the upstream has it."""
    await databases.open(number)
    session.select(number)
    return Answer(OK)
