"""Searches the upstream for keys of new key formats. If it has such keys, a user must confirm the job.

A search reads a limited number of keys by SCAN, which returns keys in the order of their hashes. So they are a random
sample. If a format has a hundred keys among ten million, a sample of a million contains one of them with a probability
above 99.99 %.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from resp_server.backends.routing.format_patterns import glob_of
from resp_server.backends.routing.ownership import EXAMPLES_MAX, NewFormat, Ownership
from resp_server.protocol.errors import internal_error
from resp_server.raw_replies.answers import CallbackWait, ask, in_background, run_in_steps
from resp_server.raw_replies.raw_reply import as_bytes, is_error, text_of
from resp_server.raw_replies.reply_sinks import MALFORMED_REPLY_ERRORS, Defer, ReplySink
from resp_server.raw_replies.reply_splitter import items_of, pack
from state_backend.model.descriptor import KeyFormat

logger = logging.getLogger("sparkis.proxy")

# One SCAN occupies the upstream for about a millisecond (guess). A search reads at most a million keys of each node.
COUNT = 1000
STEPS_MAX = 1000
# The pause after an error of the upstream.
RETRY_S = 1.0


class NodeSender(Protocol):
    """The part of `Upstream` that sends reads to its nodes."""

    @property
    def node_count(self) -> int: ...
    def send_to_node(self, node: int, client: int, protocol: int, packed: bytes, sink: ReplySink, index: int) -> None:
        """Send a read to a node.

        Args:
            client: 0: the proxy itself.
        """


class SearchError(Exception):
    """The upstream has refused a search."""


class KeyConflictScans:
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
            in_background(self._check())

    def stop(self) -> None:
        """Stop checking."""
        self._queue.clear()
        if self._retry is not None:
            self._retry.cancel()

    async def _check(self) -> None:
        """Check the formats in the queue. If a search fails, it is repeated; its keys stay the upstream's meanwhile."""
        self._is_running = True
        try:
            while self._queue:
                try:
                    keys = await self._search(self._queue[0])
                except Exception as error:
                    await self._failed(error)
                else:
                    if self._queue:  # not stopped
                        self._ownership.settle(self._queue.popleft(), keys)
        finally:
            self._is_running = False

    async def _failed(self, error: Exception) -> None:
        """Report that a search has failed, and pause."""
        if not isinstance(error, (SearchError, *MALFORMED_REPLY_ERRORS)):
            internal_error(error)
        if self._queue:
            logger.info(
                "the search of the upstream for keys %s failed, and is repeated: %s", self._queue[0].text, error
            )
            await CallbackWait(self._call_later)

    def _call_later(self, then: Callable[[], None]) -> None:
        self._retry = asyncio.get_running_loop().call_later(RETRY_S, then)

    async def _search(self, new: NewFormat) -> Sequence[bytes]:
        """Return some of the upstream's keys that have a format, from the first node that has such keys."""
        pattern, is_in_question = glob_of(KeyFormat.parse(new.text)), self._ownership.is_in_question(new)
        node = 0
        while node < self._nodes.node_count:
            cursor = b"0"
            for _ in range(STEPS_MAX):
                cursor, keys = await self._page(node, cursor, pattern)
                found = [key for key in keys if is_in_question(key)]
                if found:
                    return found[:EXAMPLES_MAX]
                if cursor == b"0":
                    break
            node += 1
        return ()

    async def _page(self, node: int, cursor: bytes, pattern: bytes) -> tuple[bytes, Sequence[bytes]]:
        """Return the next cursor and the keys of one step of a scan."""
        packed = pack((b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % COUNT))
        reply = (await ask(partial(self._nodes.send_to_node, node, 0, 2, packed))).reply
        if is_error(reply):
            raise SearchError(as_bytes(reply)[1:200].decode("utf-8", "replace").strip())
        following, keys = await run_in_steps(items_of(reply), self._defer)
        return text_of(following), [text_of(key) for key in await run_in_steps(items_of(keys), self._defer)]
