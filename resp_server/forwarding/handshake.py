"""The requests with which a connection to a server begins; until they are answered, no client's request is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from resp_server.forwarding.reply_splitter import FrameError, pack
from resp_server.protocol.request_parser import Request


class HandshakeError(Exception):
    """A server refused the connection, or closed it before all was answered."""


class Handshake:
    """Requests that a server has to accept. optional: the name of a command that it may refuse."""

    def __init__(self, requests: Sequence[Request], optional: bytes) -> None:
        self._requests = requests
        self._optional = optional
        self._unanswered = [request[0] for request in requests]
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, transport: asyncio.WriteTransport) -> None:
        """Send the requests, and wait until all are answered; HandshakeError if one is refused."""
        transport.write(b"".join(map(pack, self._requests)))
        await self._accepted

    def take(self, reply: bytes) -> None:
        """Take the next reply; FrameError if there are more replies than requests."""
        if not self._unanswered:
            raise FrameError("more replies than requests")
        if self._unanswered.pop(0) != self._optional and reply[:1] == b"-":
            self.fail(reply[1:-2].decode("utf-8", "replace"))
        if not self._unanswered and not self._accepted.done():
            self._accepted.set_result(None)

    def fail(self, reason: str) -> None:
        """End the handshake."""
        if not self._accepted.done():
            self._accepted.set_exception(HandshakeError(reason))
