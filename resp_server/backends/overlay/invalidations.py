"""Invalidations for clients that track keys of both backends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from resp_server.backends.overlay.long_requests import is_long
from resp_server.backends.redis.logins import Logins
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.route import AliasedRoute, PreferredRoute, Route, SplitRoute, is_in_chunks
from resp_server.backends.routing.rules import Owner
from resp_server.pipeline.context import ServerContext
from resp_server.pipeline.effects import keys_read
from resp_server.protocol.request_parser import Request
from resp_server.session.session import Session
from resp_server.session.tracking import EVERYTHING, Invalidation


class OverlayInvalidations:
    """Sends the upstream's invalidations, and those of keys that no client may cache."""

    def __init__(self, server: ServerContext, ownership: Ownership, logins: Logins) -> None:
        self._clients, self._tracking = server.clients, server.tracking
        self._ownership, self._logins = ownership, logins

    def is_dropped_notification(self, database: bytes, key: bytes) -> bool:
        """Return whether states send the notifications of a key in a database."""
        decide = self._ownership.matcher.decider(self._logins.default.number_of(database))
        return decide(key).owner is Owner.STATE

    def of_upstream(self, session: Session, keys: Sequence[bytes] | None) -> None:
        """Send an invalidation of the upstream, before any reply that arrives later.

        It comes after the replies that have arrived, and in one write with them if they came in this round: after the
        reply to its own write, a client of Redis has the invalidation at once. Without all replies, it comes later.
        """
        state = session.tracking_state
        if state is None:
            return
        enqueue = partial(self._tracking.enqueue, is_after_reply=self._clients.has_all_replies(session.id))
        if keys is None:
            enqueue(state, EVERYTHING)
        else:
            decide, user = self._ownership.matcher.decider(session.db), session.user
            of_upstream = [key for key in keys if decide(key).owner is not Owner.STATE]
            visible = [key for key in of_upstream if user.reads_all_keys or user.can_read(key)]
            if not visible:
                return
            enqueue(state, Invalidation(visible, is_one_frame=True))
        if self._clients.waits_for_reply(session.id):
            self._clients.defer(partial(self._clients.push_invalidations, state))
        else:
            self._clients.push_invalidations(state)

    def after_reply(self, session: Session, route: Route, request: Request) -> None:
        """Invalidate the keys of a read over both backends after its reply: no client may cache them."""
        state, command = session.tracking_state, route.routed.command
        if state is None or not state.records_reads or session.transaction is not None or command is None:
            return
        if is_in_chunks(route) or (type(route) is AliasedRoute and is_long(request)):
            self._tracking.enqueue_resend(state, None)  # all keys: to list so many would take too long
        elif type(route) in (SplitRoute, PreferredRoute):
            self._tracking.enqueue_resend(state, keys_read(command, request))
