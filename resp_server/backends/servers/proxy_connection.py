"""A client's connection to a proxy.

The compiled forwarder forwards plain reads, and plain writes to the upstream; the pipeline handles all else.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from resp_server.backends.servers.forwarder_replies import FORWARDER_REPLIES
from resp_server.backends.servers.native import client_forwarder
from resp_server.client.connection import Connection, ConnectionHost
from resp_server.net.transports import isolated
from resp_server.pipeline.batched import BatchedPipeline
from resp_server.protocol.replies import ReplyStream
from resp_server.session.epochs import ReplyEpochs


class ProxyConnection(Connection):
    """A client's connection to a proxy."""

    __slots__ = ("_forwarder", "_proxy_pipeline", "_stats")

    def __init__(self, server: ConnectionHost, session_id: int | None = None) -> None:
        super().__init__(server, session_id)
        self._stats = server.context.stats
        self._proxy_pipeline = cast(BatchedPipeline, server.pipeline)
        self._forwarder: Any = None  # None: the forwarder is not built, or the client may not use it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        forwarder = self._proxy_pipeline.backend.forwarder
        if forwarder is None or client_forwarder is None or not self.is_idle:
            return
        self._forwarder = client_forwarder.ClientForwarder(forwarder, self, self.output.transmit)
        if self.input.is_polled:
            cast(Any, transport).set_interceptor(self._forwarder)

    def data_received(self, data: bytes) -> None:
        rest = data
        if self._forwarder is not None:
            try:
                rest = self._forwarder.forward_input(data)
            except Exception as error:
                self.close_on_error(error)
                return
            self._stats.input_bytes += len(data) - len(rest)
            self.session.input_bytes += len(data) - len(rest)
        if rest:
            super().data_received(rest)

    def error_reply(self, error: Exception) -> bytes:
        """Return the error reply for an exception."""
        return self._proxy_pipeline.error_reply(error)

    # -- called by the forwarder ---------------------------------------------------------------------------------------

    @property
    def is_forwarder_replying(self) -> bool:
        """Return whether the forwarder sends the replies now."""
        return self.reply.pending is FORWARDER_REPLIES

    def send_stream(self, reply: ReplyStream) -> None:
        """Send a streamed reply, in turns of this client."""
        self.reply.stream = reply
        self._next_turn = asyncio.get_running_loop().call_soon(self._scheduled_turn)

    @isolated
    def resend(self, data: bytes, epochs: ReplyEpochs) -> None:
        """Answer forwarded requests on the general path, from servers that have reached each epoch of the client."""
        self.session.seen.add(epochs)
        if not self._transport.is_closing():
            self.output.send_delayed_pushes()
            self._answer_soon(data)

    def continue_after_reply(self) -> None:
        """Send pushes, and handle the input that arrived while the client waited for a reply."""
        self.output.send_delayed_pushes()
        data = self.input.take_data()
        takes_requests = self.output.is_writable and not (self._is_ending or self._is_finishing)
        if takes_requests and self.session.can_be_forwarded:
            data = self._forwarder.forward(data)
            if self._forwarder.deliver_complete():
                return
            if self.is_forwarder_replying or not data:
                self.is_idle = not self.is_forwarder_replying
                self.input.set_reading(not self.input.data)  # buffered input is answered first
                return
        self._answer_soon(data)

    def _answer_soon(self, data: bytes) -> None:
        """Answer this input, and then the buffered input, in the client's next turn."""
        self.input.data = data + self.input.data
        if self.output.is_writable:
            self._next_turn = asyncio.get_running_loop().call_soon(self._scheduled_turn)
