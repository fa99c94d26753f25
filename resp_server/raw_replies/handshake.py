"""The first requests over a connection to a server. No client's request is sent before they are accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.reply_splitter import FrameError, pack

BUSY = b"-BUSY "


class HandshakeError(Exception):
    """A server refused a request of the handshake, or closed the connection before it replied to all of them."""


class Handshake:
    """Requests that a server has to accept.

    Args:
        is_optional: Returns whether the server may refuse a request.
        refusal: A function of a command's name and its reply. It returns why the reply is not acceptable, or an empty
            text.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        is_optional: Callable[[Request], bool],
        refusal: Callable[[bytes, bytes], str] = lambda name, reply: "",
    ) -> None:
        self._refusal = refusal
        self._requests = requests
        self._is_optional = is_optional
        self._unanswered = list(requests)
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, transport: asyncio.WriteTransport) -> None:
        """Send the requests, and wait until all are answered; HandshakeError if one is refused."""
        transport.write(b"".join(map(pack, self._requests)))
        await self._accepted

    def take(self, reply: bytes) -> None:
        """Take the next reply; FrameError if there are more replies than requests."""
        if not self._unanswered:
            raise FrameError("more replies than requests")
        request = self._unanswered.pop(0)
        name = request[0]
        reason = self._refusal(name, reply)
        # A Redis that runs a long script replies BUSY to PING. It still runs SCRIPT KILL.
        is_busy = name == b"PING" and reply.startswith(BUSY)
        if reply[:1] == b"-" and not (is_busy or self._is_optional(request)):
            reason = reply[1:-2].decode("utf-8", "replace")
        if reason:
            self.fail(reason)
        if not self._unanswered and not self._accepted.done():
            self._accepted.set_result(None)

    def fail(self, reason: str) -> None:
        """End the handshake with a HandshakeError."""
        if not self._accepted.done():
            self._accepted.set_exception(HandshakeError(reason))
