"""A client's connection to a proxy: the compiled forwarder forwards plain reads; the dispatcher handles all else."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from resp_server.backends.servers.compiled import ClientForwarder
from resp_server.backends.servers.dispatcher import ProxyDispatcher
from resp_server.client.connection import Connection, ConnectionHost
from resp_server.net.transports import isolated
from resp_server.session.epoch_feed import ReplyEpochs


class ProxyConnection(Connection):
    """A client's connection to a proxy."""

    __slots__ = ("_forwarder", "_proxy_dispatcher", "_stats")

    def __init__(self, server: ConnectionHost, session_id: int | None = None) -> None:
        super().__init__(server, session_id)
        self._stats = server.context.stats
        self._proxy_dispatcher = cast(ProxyDispatcher, server.dispatcher)
        self._forwarder: Any = None  # None: the forwarder is not built, or the client may not use it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        forwarder = self._proxy_dispatcher.forwarder
        if forwarder is None or ClientForwarder is None or not self.is_idle:
            return
        self._forwarder = ClientForwarder(forwarder, self, self.transmit)
        if self.is_polled:
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
        return self._proxy_dispatcher.error_reply(error)

    @isolated
    def resend(self, data: bytes, epochs: ReplyEpochs) -> None:
        """Answer requests by the general path, from servers that have reached the epochs of all replies so far."""
        self.session.seen.add(epochs)
        if self.end_delegation():
            self.send_delayed_pushes()
            self.answer_soon(data)

    def continue_after_reply(self) -> None:
        """Send pushes, and handle the input that arrived while the client waited for a reply."""
        self.send_delayed_pushes()
        data = self.take_input()
        if self.takes_requests and self.session.can_be_forwarded:
            if not data or (not self._forwarder.forward(data) and self._forwarder.store_partial(data)):
                self.is_idle = True
            if self._forwarder.deliver_complete():
                return
            if self.is_idle or self.is_delegated:
                self.await_input()
                return
        self.answer_soon(data)
