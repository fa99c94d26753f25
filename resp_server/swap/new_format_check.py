"""Searches the upstream for keys of new key formats. If it has such keys, a user must confirm the job.

A search reads a limited number of keys by SCAN, which returns keys in the order of their hashes. So they are a random
sample. If a format has a hundred keys among ten million, a sample of a million contains one of them with a probability
above 99.99 %.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from resp_server.forwarding.raw_replies import RawReply, as_bytes, is_error, text_of
from resp_server.forwarding.reply_splitter import items_of, pack
from resp_server.forwarding.reply_stages import MALFORMED_REPLY_ERRORS, Defer, ReplyStage
from resp_server.protocol.errors import internal_error
from resp_server.session.epoch_feed import ReplyEpochs
from resp_server.upstream.connection import UpstreamSink
from resp_server.upstream.key_patterns import glob_of
from resp_server.upstream.ownership import EXAMPLES_MAX, NewFormat, Ownership
from state_backend.model.descriptor import KeyFormat

logger = logging.getLogger("sparkis.proxy")

# One SCAN occupies the upstream for about a millisecond (guess). A search reads at most a million keys of each node.
COUNT = 1000
STEPS_MAX = 1000
# The pause after an error of the upstream.
RETRY_S = 1.0


class NodeSender(Protocol):
    """Sends reads of the proxy itself to the nodes of an upstream."""

    @property
    def node_count(self) -> int: ...
    def send_to_node(self, node: int, packed: bytes, sink: UpstreamSink, index: int) -> None:
        """Send a read to a node."""


class NewFormatChecks:
    """Checks new formats one after the other, and reports the keys to `Ownership`. Runs on the event loop's thread."""

    def __init__(self, ownership: Ownership, nodes: NodeSender, defer: Defer) -> None:
        self._ownership, self._nodes, self._defer = ownership, nodes, defer
        self._queue: deque[NewFormat] = deque()
        self._is_running = False
        self._retry: asyncio.TimerHandle | None = None

    def add(self, formats: Sequence[NewFormat]) -> None:
        """Check these formats."""
        self._queue += formats
        if not self._is_running:
            self._begin()

    def stop(self) -> None:
        """Stop checking."""
        self._queue.clear()
        if self._retry is not None:
            self._retry.cancel()

    def _begin(self) -> None:
        self._is_running = bool(self._queue)
        if self._queue:
            _Search(self, self._queue[0], self._nodes, self._ownership, self._defer).send()

    def found(self, keys: Sequence[bytes]) -> None:
        """End the check of the first format with the keys that the upstream has, and begin the next one."""
        if self._queue:  # not stopped
            self._ownership.settle(self._queue.popleft(), keys)
            self._begin()

    def failed(self, reason: str) -> None:
        """Check the first format again after a pause. Its keys stay the upstream's meanwhile."""
        if self._queue:
            logger.info(
                "the search of the upstream for keys %s failed, and is repeated: %s", self._queue[0].text, reason
            )
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._begin)


class _Search(ReplyStage):
    """The search for the keys of one format, node by node."""

    def __init__(
        self, checks: NewFormatChecks, new: NewFormat, nodes: NodeSender, ownership: Ownership, defer: Defer
    ) -> None:
        super().__init__(self, 0)
        self._checks, self._nodes, self._ownership, self._defer = checks, nodes, ownership, defer
        self._glob = glob_of(KeyFormat.parse(new.text))
        self._is_in_question = ownership.is_in_question(new)
        self._node, self._cursor, self._steps = 0, b"0", 0

    def send(self) -> None:
        """Send the next step of the scan."""
        words = (b"SCAN", self._cursor, b"MATCH", self._glob, b"COUNT", b"%d" % COUNT)
        self._nodes.send_to_node(self._node, pack(words), self, 0)

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        if is_error(reply):
            self.fail(0, RuntimeError(as_bytes(reply)[1:200].decode("utf-8", "replace").strip()))
            return
        self.run_steps(items_of(reply), self._take, self._defer)

    def _take(self, items: Sequence[RawReply]) -> None:
        cursor, page = items
        self._cursor = text_of(cursor)
        self.run_steps(items_of(page), self._take_keys, self._defer)

    def _take_keys(self, items: Sequence[RawReply]) -> None:
        found = [key for key in map(text_of, items) if self._is_in_question(key)]
        self._steps += 1
        if found:
            self._end(found[:EXAMPLES_MAX])
            return
        if self._cursor == b"0" or self._steps >= STEPS_MAX:
            self._node, self._cursor, self._steps = self._node + 1, b"0", 0
        if self._node < self._nodes.node_count:
            self.send()
        else:
            self._end(())

    def _end(self, found: Sequence[bytes]) -> None:
        self._is_over = True
        self._checks.found(found)

    def fail(self, index: int, error: Exception) -> None:
        if self._is_over:
            return
        self._is_over = True
        if not isinstance(error, (RuntimeError, *MALFORMED_REPLY_ERRORS)):
            internal_error(error)
        self._checks.failed(str(error))
