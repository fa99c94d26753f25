"""DBSIZE, KEYS, RANDOMKEY and SCAN within MULTI: the upstream's part is in its transaction, the states' part after it.

These commands are answered as outside of MULTI, but through `QueuedBackends`. Requests to a single Redis join the
upstream's MULTI ... EXEC. A Redis Cluster has no transaction over its nodes. So requests to its nodes wait for the
reply to the upstream's EXEC, and so do requests to the states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from resp_server.backends.overlay.keyspace import KeyspaceBackends
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import Answer, ReplyFuture, ask, run_into
from resp_server.raw_replies.raw_reply import RawReply
from resp_server.raw_replies.reply_sinks import ReplySink


class QueuedBackends:
    """The backends of one such command.

    Args:
        queue: Adds a request to the upstream's transaction; returns its place there.
    """

    def __init__(self, backends: KeyspaceBackends, queue: Callable[[Request], int]) -> None:
        self._backends, self._queue = backends, queue
        self.node_count, self.defer, self.to_owner = backends.node_count, backends.defer, backends.to_owner
        self._queued: list[tuple[ReplySink, int, int]] = []
        self._waiting: list[ReplyFuture] = []

    def to_node(self, node: int, request: Request, sink: ReplySink, index: int) -> None:
        """Queue a read of the upstream."""
        if self.node_count > 1:
            run_into(self._after_exec(partial(self._backends.to_node, node, request)), sink, index)
        else:
            self._queued.append((sink, index, self._queue(request)))

    def to_states(self, request: Request, sink: ReplySink, index: int) -> None:
        """Send a request to the state servers after the EXEC is answered."""
        run_into(self._after_exec(partial(self._backends.to_states, request)), sink, index)

    async def _after_exec(self, send: Callable[[ReplySink, int], None]) -> Answer:
        exec_answered = ReplyFuture()
        self._waiting.append(exec_answered)
        await exec_answered
        return await ask(send)

    def start(self, items: Sequence[RawReply]) -> None:
        """Pass on the upstream's replies, and send the other requests.

        Args:
            items: The replies of the upstream's part.
        """
        for sink, index, place in self._queued:
            sink.put(index, items[place])
        for each in self._waiting:
            each.put(0, b"")
