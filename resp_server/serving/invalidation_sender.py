"""Sends pending invalidations to clients that track keys, or to the clients that they redirect to.

Sending goes in short steps, so that a thousand tracking clients do not delay other clients. If the redirect target is
connected to another process of this server, that process sends them. The amount relayed at a time is limited; the rest
stays pending.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter_ns

from resp_server.client.connection import Connection
from resp_server.limits import STEP_NS_MAX
from resp_server.pipeline.context import ServerContext
from resp_server.push.invalidation_relay import RELAY, frames_for, invalidation_to_json
from resp_server.session.session import RESP2
from resp_server.session.tracking import TrackingState

# The bytes that are relayed to other processes at a time. One client's pending invalidations may be more.
RELAYED_BYTES_MAX = 1 << 20
RELAYED_MAX = 64


class InvalidationSender:
    """Sends the invalidations of one process's clients."""

    def __init__(self, context: ServerContext, connections: Mapping[int, Connection]) -> None:
        self._context = context
        self._tracking = context.tracking
        self._connections = connections
        self._next: asyncio.Handle | None = None
        self._relayed = 0
        self._relayed_bytes = 0

    def send(self) -> None:
        """Send all clients' pending invalidations."""
        if self._next is None and self._tracking.pending_clients:
            self._step(deque(self._tracking.pending_clients))

    def stop(self) -> None:
        """Send nothing more."""
        if self._next is not None:
            self._next.cancel()

    def _step(self, clients: deque[TrackingState]) -> None:
        ends_ns = perf_counter_ns() + STEP_NS_MAX
        while clients and perf_counter_ns() < ends_ns:
            client = clients.popleft()
            if not self._context.attempt(self.send_to, client) and client.session_id in self._connections:
                self._context.clients.cut(client.session_id, "its invalidations could not be sent")
        self._next = asyncio.get_running_loop().call_soon(self._step, clients) if clients else None

    def send_to(self, client: TrackingState) -> None:
        """Send a client's pending invalidations to it or to its redirect target, unless that has too much output."""
        own = self._connections.get(client.session_id)
        if own is None or not client.has_pending:
            return
        if not client.redirect:
            own.send_invalidations()
            return
        is_reply_pending, target = own.reply.pending is not None, self._connections.get(client.redirect)
        if target is None:
            self._relay(client, is_reply_pending=is_reply_pending)
        elif target.output.is_writable:
            frames = frames_for(target.session, client.take(is_reply_pending=is_reply_pending))
            if frames:
                target.push(frames)

    def _relay(self, client: TrackingState, *, is_reply_pending: bool) -> None:
        """Relay a client's invalidations to the process that its redirect target is connected to."""
        if self._context.workers is None:
            client.take(is_reply_pending=False)
            self._break(client)
            return
        if client.is_relayed or self._relayed == RELAYED_MAX or self._relayed_bytes > RELAYED_BYTES_MAX:
            return
        pending = client.take(is_reply_pending=is_reply_pending)
        if not pending:
            return
        size = sum(each.bytes for each in pending)

        def on_responses(responses: Sequence[bool]) -> None:
            client.is_relayed = False
            self._relayed -= 1
            self._relayed_bytes -= size
            if not any(responses):
                self._break(client)

        client.is_relayed = True
        self._relayed += 1
        self._relayed_bytes += size
        argument = {"id": client.redirect, "invalidations": [invalidation_to_json(each) for each in pending]}
        self._context.workers.query(RELAY, argument, on_responses)

    def _break(self, client: TrackingState) -> None:
        """Notify a RESP3 client that its redirect target has disconnected, as Redis does."""
        own = self._connections.get(client.session_id)
        if own is None or not client.is_on:
            return
        client.is_broken = True
        if own.session.protocol > RESP2:
            own.push(b">2\r\n$21\r\ntracking-redir-broken\r\n:%d\r\n" % client.redirect)
