"""Requests of a program to an upstream: one after the other, or many at once, with decoded replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import hiredis

from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.key_patterns_found import FoundKey
from resp_server.raw_replies.raw_reply import RawReply, as_bytes
from resp_server.raw_replies.reply_sinks import ReplySink
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.epochs import NO_EPOCHS, ReplyEpochs
from state_backend.model.errors import SparkisError

# RESP2, which every Redis has, and the client number of this program at the upstream's connections.
PROTOCOL = 2
CLIENT = 0
RETRY_S = 0.05
# A step of SCAN holds the upstream for about a millisecond (guess).
COUNT = 1000


class UpstreamError(SparkisError):
    """The upstream cannot be reached, or its reply is an error."""


class UpstreamCalls:
    """Sends requests to an upstream of any kind. For one task."""

    def __init__(self, upstream: Upstream, timeout_s: float) -> None:
        self._upstream, self._timeout_s = upstream, timeout_s
        upstream.defer = asyncio.get_running_loop().call_soon

    async def __aenter__(self) -> UpstreamCalls:
        """Connect; UpstreamError if there is no reply in time."""
        self._upstream.start()
        try:
            await self._until_reached()
        except BaseException:
            self._upstream.stop()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._upstream.stop()

    async def _until_reached(self) -> None:
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._timeout_s
        while True:
            try:
                await self.call(0, b"PING")
                return
            except UpstreamError:
                if loop.time() >= ends_s:
                    raise
            await asyncio.sleep(RETRY_S)  # the slot table is not read yet, or a connection is being opened again

    @property
    def address(self) -> str:
        """The upstream's address, without user and password."""
        return self._upstream.url.address

    @property
    def database(self) -> int:
        """The number of the database in the upstream's URL."""
        return self._upstream.url.database

    @property
    def node_count(self) -> int:
        """The number of nodes, each with keys of its own."""
        return self._upstream.node_count

    async def call(self, node: int, *arguments: bytes) -> Any:
        """Return a node's reply; UpstreamError if it is an error. The request may be sent twice."""
        (reply,) = await self.call_all([(node, arguments)])
        if isinstance(reply, hiredis.ReplyError):
            raise UpstreamError(f"the upstream {self.address}: {reply}")
        if isinstance(reply, Exception):  # its text names the upstream
            raise UpstreamError(str(reply))
        return reply

    async def call_all(self, requests: Sequence[tuple[int, Sequence[bytes]]]) -> Sequence[Any]:
        """Return the replies to requests to nodes, which are sent together. Errors are among them."""
        replies = _Replies(len(requests))
        for index, (node, arguments) in enumerate(requests):
            self._upstream.send_to_node(node, CLIENT, PROTOCOL, pack(tuple(arguments)), replies, index)
        return await replies.all

    async def scan(self, node: int) -> AsyncIterator[Sequence[FoundKey]]:
        """Iterate over a node's keys, in batches. SCAN's order is that of hashes: the first ones are a sample."""
        cursor = b"0"
        while True:
            cursor, names = await self.call(node, b"SCAN", cursor, b"COUNT", b"%d" % COUNT)
            yield [FoundKey(node, name) for name in names]
            if cursor == b"0":
                return

    async def key_count(self) -> int:
        """Return the number of keys of all nodes."""
        counts: list[int] = [await self.call(node, b"DBSIZE") for node in range(self.node_count)]
        return sum(counts)


class _Replies(ReplySink):
    """Collects the replies to some requests. all: a future of the complete list."""

    def __init__(self, count: int) -> None:
        self.all: asyncio.Future[Sequence[Any]] = asyncio.get_running_loop().create_future()
        self._replies: list[Any] = [None] * count
        self._missing = count
        if not count:
            self.all.set_result(())

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Take a reply."""
        reader = hiredis.Reader()
        reader.feed(as_bytes(reply))
        self._take(index, reader.gets())

    def fail(self, index: int, error: Exception) -> None:
        """Take an exception in place of a reply."""
        self._take(index, error)

    def _take(self, index: int, reply: object) -> None:
        self._replies[index] = reply
        self._missing -= 1
        if not self._missing and not self.all.done():
            self.all.set_result(self._replies)
