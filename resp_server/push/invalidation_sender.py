"""Sends pending invalidations to clients that track keys, or to the clients that they redirect to.

Sending goes in short steps, so that a thousand tracking clients do not delay other clients. If the redirect target is
connected to another process of this server, that process sends them. The amount relayed at a time is limited; the rest
stays pending.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

from resp_server.limits import STEP_NS_MAX
from resp_server.push.clients import Clients, OtherWorkers
from resp_server.push.tracking_table import TrackingTable
from resp_server.session.session import RESP2, Session
from resp_server.session.tracking import MESSAGE, PUSH, Invalidation, TrackingState

# The bytes that are relayed to other processes at a time. One client's pending invalidations may be more.
RELAYED_BYTES_MAX = 1 << 20
RELAYED_MAX = 64

RELAY = "send invalidations to a client"


class InvalidationHost(Protocol):
    """The process whose clients track keys."""

    clients: Clients
    workers: OtherWorkers | None
    tracking: TrackingTable

    def attempt(self, do: Callable[..., object], *arguments: object) -> bool:
        """Call a function; False if it raised, which is logged."""


class TrackingConnection(Protocol):
    """The connection of a client that tracks keys, or that others redirect to."""

    session: Session

    @property
    def is_writable(self) -> bool: ...

    def send_invalidations(self) -> None:
        """Send the client's own pending invalidations."""

    def push(self, frame: bytes) -> None:
        """Send frames between two replies."""


class InvalidationSender:
    """Sends the invalidations of one process's clients."""

    def __init__(self, host: InvalidationHost, connections: Mapping[int, TrackingConnection]) -> None:
        self._host = host
        self._tracking = host.tracking
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
            if not self._host.attempt(self.send_to, client) and client.session_id in self._connections:
                self._host.clients.cut(client.session_id, "its invalidations could not be sent")
        self._next = asyncio.get_running_loop().call_soon(self._step, clients) if clients else None

    def send_to(self, client: TrackingState) -> None:
        """Send a client's pending invalidations to it or to its redirect target, unless that has too much output."""
        own = self._connections.get(client.session_id)
        if own is None or not client.has_pending:
            return
        if not client.redirect:
            own.send_invalidations()
            return
        target = self._connections.get(client.redirect)
        if target is None:
            self._relay(client)
        elif target.is_writable:
            frames = frames_for(target.session, client.take(is_within=False))
            if frames:
                target.push(frames)

    def _relay(self, client: TrackingState) -> None:
        """Relay a client's invalidations to the process that its redirect target is connected to."""
        if self._host.workers is None:
            client.take(is_within=False)
            self._break(client)
            return
        if client.is_relayed or self._relayed == RELAYED_MAX or self._relayed_bytes > RELAYED_BYTES_MAX:
            return
        pending = client.take(is_within=False)
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
        argument = {"id": client.redirect, "invalidations": [_to_json(each) for each in pending]}
        self._host.workers.query(RELAY, argument, on_responses)

    def _break(self, client: TrackingState) -> None:
        """Notify a RESP3 client that its redirect target has disconnected, as Redis does."""
        own = self._connections.get(client.session_id)
        if own is None or not client.is_on:
            return
        client.is_broken = True
        if own.session.protocol > RESP2:
            own.push(b">2\r\n$21\r\ntracking-redir-broken\r\n:%d\r\n" % client.redirect)


def frames_for(target: Session, invalidations: Sequence[Invalidation]) -> bytes:
    """Return the frames for a redirect target; none for a client of RESP2 without subscriptions."""
    if target.protocol == RESP2 and target.subscriptions is None:
        return b""
    prefix = MESSAGE if target.protocol == RESP2 else PUSH
    return b"".join([each.frames(prefix) for each in invalidations])


def relayed(sessions: Mapping[int, Session], clients: Clients, argument: Mapping[str, Any]) -> bool:
    """Send another process's invalidations to a client of this process; False if the client is not here."""
    target = sessions.get(argument["id"])
    if target is None:
        return False
    frames = frames_for(target, [_of_json(each) for each in argument["invalidations"]])
    if frames:
        clients.push(target.id, frames)
    return True


def _to_json(invalidation: Invalidation) -> dict[str, Any]:
    keys = None if invalidation.keys is None else [b64encode(key).decode() for key in invalidation.keys]
    return {"keys": keys, "is_one_frame": invalidation.is_one_frame}


def _of_json(row: Mapping[str, Any]) -> Invalidation:
    keys = None if row["keys"] is None else [b64decode(key) for key in row["keys"]]
    return Invalidation(keys, is_one_frame=row["is_one_frame"])
