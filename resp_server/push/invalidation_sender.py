"""Brings what clients that track are owed to their connections, or to those that they redirect to, wherever these are.

In short steps, so that nobody waits long for a thousand clients. A client of another process of this server is told by
that one, which says whether it has such a client; little is on its way there at a time, the rest is owed until then.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

from resp_server.push.clients import Clients, PeerProcesses
from resp_server.push.tracking_table import TrackingTable
from resp_server.session.session import RESP2, Session
from resp_server.session.tracking import MESSAGE, PUSH, Invalidation, TrackingState

# A step of telling ends with the client during which this is over (guess: as long as a step of a reply).
STEP_NS_MAX = 1_000_000
# What is on its way to the other processes of a server at a time: one message may be as long as what a client is owed.
PASSED_ON_BYTES_MAX = 1 << 20
PASSED_ON_MAX = 64

PASS_ON = "tell a client what is invalid"


class InvalidationHost(Protocol):
    """The process whose clients track keys."""

    clients: Clients
    peers: PeerProcesses | None
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
    """Tells the clients of one process."""

    def __init__(self, host: InvalidationHost, connections: Mapping[int, TrackingConnection]) -> None:
        self._host = host
        self._tracking = host.tracking
        self._connections = connections
        self._next: asyncio.Handle | None = None
        self._passed_on = 0
        self._passed_on_bytes = 0

    def tell(self) -> None:
        """Tell everybody what it is owed, as soon as that may be."""
        if self._next is None and self._tracking.pending_clients:
            self._step(deque(self._tracking.pending_clients))

    def stop(self) -> None:
        """Tell nobody any more."""
        if self._next is not None:
            self._next.cancel()

    def _step(self, clients: deque[TrackingState]) -> None:
        ends_ns = perf_counter_ns() + STEP_NS_MAX
        while clients and perf_counter_ns() < ends_ns:
            client = clients.popleft()
            if not self._host.attempt(self.send_to, client) and client.session_id in self._connections:
                self._host.clients.cut(client.session_id, "which keys changed could not be told")
        self._next = asyncio.get_running_loop().call_soon(self._step, clients) if clients else None

    def send_to(self, client: TrackingState) -> None:
        """Tell one client, or the one that it redirects to, what it is owed, if that may be now."""
        own = self._connections.get(client.session_id)
        if own is None or not client.has_pending:
            return
        if not client.redirect:
            own.send_invalidations()
            return
        target = self._connections.get(client.redirect)
        if target is None:
            self._pass_on(client)
        elif target.is_writable:
            frames = frames_for(target.session, client.take(is_within=False))
            if frames:
                target.push(frames)

    def _pass_on(self, client: TrackingState) -> None:
        """Have the process tell it that has the client to redirect to."""
        if self._host.peers is None:
            client.take(is_within=False)
            self._break(client)
            return
        if client.is_relayed or self._passed_on == PASSED_ON_MAX or self._passed_on_bytes > PASSED_ON_BYTES_MAX:
            return
        told = client.take(is_within=False)
        size = sum(each.bytes for each in told)

        def answered(answers: Sequence[bool]) -> None:
            client.is_relayed = False
            self._passed_on -= 1
            self._passed_on_bytes -= size
            if not any(answers):
                self._break(client)

        client.is_relayed = True
        self._passed_on += 1
        self._passed_on_bytes += size
        argument = {"id": client.redirect, "told": [_to_json(each) for each in told]}
        self._host.peers.query(PASS_ON, argument, answered)

    def _break(self, client: TrackingState) -> None:
        """Tell a client that the one that it redirects to is gone."""
        own = self._connections.get(client.session_id)
        if own is None or not client.is_on:
            return
        client.is_broken = True
        if own.session.protocol > RESP2:
            own.push(b">2\r\n$21\r\ntracking-redir-broken\r\n:%d\r\n" % client.redirect)


def frames_for(target: Session, told: Sequence[Invalidation]) -> bytes:
    """Return what is sent to a client that another one redirects to; nothing if it cannot be told."""
    if target.protocol == RESP2 and target.subscriptions is None:
        return b""
    head = MESSAGE if target.protocol == RESP2 else PUSH
    return b"".join([each.frames(head) for each in told])


def pass_on(sessions: Mapping[int, Session], clients: Clients, argument: Mapping[str, Any]) -> bool:
    """Tell a client of this process; False if it is not here."""
    target = sessions.get(argument["id"])
    if target is None:
        return False
    frames = frames_for(target, [_of_json(each) for each in argument["told"]])
    if frames:
        clients.push(target.id, frames)
    return True


def _to_json(invalid: Invalidation) -> dict[str, Any]:
    keys = None if invalid.keys is None else [b64encode(key).decode() for key in invalid.keys]
    return {"keys": keys, "is_one_frame": invalid.is_one_frame}


def _of_json(told: Mapping[str, Any]) -> Invalidation:
    keys = None if told["keys"] is None else [b64decode(key) for key in told["keys"]]
    return Invalidation(keys, is_one_frame=told["is_one_frame"])
