"""Follows the changes of keys at an upstream, by CLIENT TRACKING with BCAST over one connection to each node.

The upstream pushes the names of changed keys that begin with given prefixes, whichever client changed them. This needs
Redis 6 or later, and the right to CLIENT TRACKING. No setting of the upstream is changed.

These pushes have no order with the replies over other connections. A fence makes one: a PING is sent after a reply has
arrived, and PONG comes after the pushes of all changes that were made before that reply.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence

from resp_server.backends.redis.connection import UpstreamRequest
from resp_server.backends.redis.dedicated_connection import DedicatedConnection, DedicatedConnections
from resp_server.backends.redis.pool import UpstreamPool
from resp_server.backends.redis.pushed_frames import INVALIDATE, first_word, invalidated_keys
from resp_server.backends.redis.upstream import Upstream
from resp_server.protocol.errors import ReplyError, internal_error
from resp_server.raw_replies.raw_reply import RawReply, as_bytes, is_error
from resp_server.raw_replies.reply_sinks import ReplySink
from resp_server.raw_replies.reply_splitter import PING, pack
from resp_server.session.epochs import NO_EPOCHS, ReplyEpochs

logger = logging.getLogger("sparkis.proxy")

# The interval of the check that all nodes are followed (guess), and the pause after a refusal.
CHECK_S = 0.5
REFUSED_PAUSE_S = 60.0
ON, CONNECTING = "on", "connecting"
OWN = 0  # the only client of these connections
PROTOCOL = 3

# The keys that have changed; None: any key may have.
OnChanged = Callable[[Sequence[bytes] | None], None]


class KeyChanges:
    """Follows the keys of some prefixes. on_changed is also called whenever changes may have been missed."""

    def __init__(self, upstream: Upstream, on_changed: OnChanged) -> None:
        self._upstream, self._on_changed = upstream, on_changed
        self._prefixes: Sequence[bytes] = ()
        self._nodes: dict[UpstreamPool, _Node] = {}
        self._checking: asyncio.TimerHandle | None = None
        self._refused = self._failure = ""
        self._not_before_s = 0.0

    @property
    def status(self) -> str:
        """`off`, `on` (at all nodes), `connecting`, or the upstream's refusal."""
        if not self._prefixes:
            return "off"
        if self._refused:
            return self._refused
        return ON if self._nodes and all(node.is_on for node in self._nodes.values()) else CONNECTING

    @property
    def reason(self) -> str:
        """Why changes are not followed now."""
        failures = [node.failure for node in self._nodes.values() if not node.is_on]
        return self._refused or next(filter(None, failures), self._failure or "it has not replied")

    @property
    def is_current(self) -> bool:
        """Return whether the changes at all nodes that have keys are reported now."""
        return bool(self._nodes) and all(
            (node := self._nodes.get(pool)) is not None and node.is_on and not node.is_finished
            for pool in self._upstream.masters
        )

    def fence(self, then: Callable[[], None]) -> None:
        """Call back when all changes are known that were made before now, or it is known that some may be missing."""
        nodes = list(self._nodes.values())
        if not nodes:
            then()
            return
        waiting = len(nodes)

        def passed() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                then()

        for node in nodes:
            node.fence(passed)

    def follow(self, prefixes: Collection[bytes]) -> None:
        """Follow the keys that begin with these prefixes, and no others."""
        # Redis refuses prefixes that overlap.
        shortest = [
            prefix for prefix in prefixes if not any(prefix != other and prefix.startswith(other) for other in prefixes)
        ]
        wanted = sorted(set(shortest))
        if wanted == self._prefixes:
            return
        self._prefixes, self._refused, self._not_before_s = wanted, "", 0.0
        self._close()
        if wanted:
            self._upstream.notice_moves()
        self._check()

    def stop(self) -> None:
        """Close all connections."""
        self._prefixes = ()
        self._close()

    def _close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            self._checking = None
        nodes, self._nodes = self._nodes, {}
        for node in nodes.values():
            node.stop()

    def _check(self) -> None:
        """Follow all nodes that have keys, and no others."""
        if not self._prefixes:
            return
        loop = asyncio.get_running_loop()
        self._checking = loop.call_later(CHECK_S, self._check)
        if loop.time() < self._not_before_s:
            return
        pools = self._upstream.masters
        for node in list(self._nodes.values()):
            node.end_if_late()
        for pool, node in list(self._nodes.items()):
            if pool not in pools or node.is_finished:
                self._failure = node.failure or self._failure
                del self._nodes[pool]
                node.stop()
                self._on_changed(None)
        for pool in pools:
            if pool not in self._nodes:
                self._nodes[pool] = _Node(pool, self._prefixes, self)

    def begun(self) -> None:
        """Handle that a node is followed from now on."""
        self._refused = ""
        self._on_changed(None)

    def refused(self, reason: str) -> None:
        """Handle that a node cannot be followed."""
        if not self._refused:
            logger.warning("changes of the upstream's keys cannot be followed: %s", reason)
        self._refused = reason
        self._not_before_s = asyncio.get_running_loop().time() + REFUSED_PAUSE_S

    def changed(self, keys: Sequence[bytes] | None) -> None:
        """Take changed keys of a node; None: any key."""
        self._on_changed(keys)


class _Node(ReplySink):
    """The connection to one node."""

    def __init__(self, pool: UpstreamPool, prefixes: Sequence[bytes], changes: KeyChanges) -> None:
        self._pool, self._url, self._changes = pool, pool.url, changes
        self._is_lost = self.is_on = False
        self._dedicated: DedicatedConnection | None = None
        self._fences: deque[list[Callable[[], None]]] = deque()  # one for each PING in flight
        self._connections = DedicatedConnections(pool, 1)
        self._connections.on_push = self._push
        self._connections.on_state_lost = self._lost
        options = [option for prefix in prefixes for option in (b"PREFIX", prefix)]
        packed = pack((b"CLIENT", b"TRACKING", b"ON", b"BCAST", *options))
        try:
            self._dedicated = self._connections.open(OWN, PROTOCOL)
        except ReplyError:  # the node is down
            self._is_lost = True
            return
        self._dedicated.is_tracking = True
        self._dedicated.add(UpstreamRequest(packed, self, 0, is_read=False))

    @property
    def failure(self) -> str:
        """The error that kept the connection from opening; empty if there was none."""
        return self._connections.failure

    def fence(self, then: Callable[[], None]) -> None:
        """Call back when all changes are known that the node made before now. Fences of one round share a PING."""
        if not self.is_on or self._dedicated is None:
            then()
        elif self._fences and self._dedicated.has_unsent:
            self._fences[-1].append(then)
        else:
            self._fences.append([then])
            self._dedicated.add(UpstreamRequest(PING, _PongSink(self), 0, is_read=False))

    def passed(self) -> None:
        """Handle PONG: end the oldest fence."""
        for then in self._fences.popleft() if self._fences else ():
            then()

    def end(self) -> None:
        """Handle that changes may be missed from now on."""
        was_on, self._is_lost, self.is_on = self.is_on, True, False
        if was_on:
            self._changes.changed(None)
        while self._fences:
            self.passed()

    def end_if_late(self) -> None:
        """Close the connection if the upstream has not replied in time."""
        if self._dedicated is not None and self._dedicated.is_late(self._pool.clock(), self._pool.timeout_s):
            self._dedicated.cut(f"it did not reply within {self._pool.timeout_s:g} s")

    @property
    def is_finished(self) -> bool:
        """Whether the connection was lost, or the pool has another server now."""
        return self._is_lost or self._pool.url is not self._url

    def stop(self) -> None:
        """Close the connection."""
        self.end()
        self._connections.stop()

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Take the reply to CLIENT TRACKING."""
        try:
            if is_error(reply):
                self._is_lost = True
                self._changes.refused(as_bytes(reply)[1:-2].decode("utf-8", "replace"))
            else:
                self.is_on = True
                self._changes.begun()
        except Exception as error:
            internal_error(error)

    def fail(self, index: int, error: Exception) -> None:
        """Connect again at the next check."""
        self.end()

    def _lost(self, client: int, reason: str) -> None:
        self.end()
        self._changes.changed(None)

    def _push(self, client: int, frame: RawReply) -> None:
        if first_word(frame) == INVALIDATE:
            self._changes.changed(invalidated_keys(frame))


class _PongSink(ReplySink):
    """Takes the reply to the PING of a fence."""

    def __init__(self, node: _Node) -> None:
        self._node = node

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        try:
            self._node.passed()
        except Exception as error:
            internal_error(error)

    def fail(self, index: int, error: Exception) -> None:
        self._node.end()
