"""DBSIZE, KEYS, RANDOMKEY and SCAN within MULTI: the upstream's part is in its transaction, the states' part after it.

Such a command is sent as outside of MULTI, but through `QueuedSides`. What it sends to a single Redis joins the
upstream's MULTI ... EXEC. A Redis Cluster has no transaction over its nodes, so what it sends to them waits, as what it
sends to the states does, until the EXEC of the upstream's part has been answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from resp_server.forwarding.raw_replies import RawReply
from resp_server.forwarding.reply_stages import ReplySink
from resp_server.protocol.request_parser import Request
from resp_server.swap.keyspace import KeyspaceSides
from resp_server.upstream.connection import UpstreamSink


class QueuedSides:
    """The sides of one such command. queue: adds a request to the upstream's transaction; returns its place there."""

    def __init__(self, sides: KeyspaceSides, queue: Callable[[Request], int]) -> None:
        self._sides, self._queue = sides, queue
        self.node_count, self.defer, self.send_to_owner = sides.node_count, sides.defer, sides.send_to_owner
        self._queued: list[tuple[int, UpstreamSink, int]] = []
        self._later: list[tuple[Callable[[], None], UpstreamSink, int]] = []

    def send_to_node(self, node: int, request: Request, sink: UpstreamSink, index: int) -> None:
        """Queue a read of the upstream."""
        if self.node_count == 1:
            self._queued.append((self._queue(request), sink, index))
        else:
            self._later.append((partial(self._sides.send_to_node, node, request, sink, index), sink, index))

    def send_to_states(self, request: Request, sink: ReplySink, index: int) -> None:
        """Keep a request until the EXEC is answered."""
        self._later.append((partial(self._sides.send_to_states, request, sink, index), sink, index))

    def start(self, items: Sequence[RawReply]) -> None:
        """Pass on the upstream's replies, and send the other requests. items: the replies of the upstream's part."""
        for at, sink, index in self._queued:
            sink.put(index, items[at])
        for send, sink, index in self._later:
            try:
                send()
            except Exception as error:
                sink.fail(index, error)
