"""A client's connection to a proxy: the compiled hop asks for plain reads; all else goes as at any server."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from resp_server.client.connection import Connection, ConnectionHost
from resp_server.net.guarded import alone
from resp_server.protocol.replies import Pending
from resp_server.proxy.compiled import Asker
from resp_server.proxy.dispatcher import ProxyDispatcher
from resp_server.proxy.raw_replies import Sent
from resp_server.session.epoch_feed import Told


class NoTurn(asyncio.Handle):
    """Stands where the next turn would: what is waited for comes, or is refused, in its own time."""

    def __init__(self) -> None:
        pass

    def cancel(self) -> None:
        """Nothing is to be done."""


NO_TURN = NoTurn()


class Unanswered(Pending):
    """Stands for the replies to what the hop asks for while they are waited for."""

    def __init__(self) -> None:
        super().__init__(0.0, lambda: None)


UNANSWERED = Unanswered()


class ProxyConnection(Connection):
    """A client's connection to a proxy."""

    def __init__(self, server: ConnectionHost, session_id: int | None = None) -> None:
        super().__init__(server, session_id)
        self._asker: Any = None  # where the hop is built, for a client that is let in

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        hop = cast(ProxyDispatcher, self._dispatcher).hop
        if hop is None or Asker is None or not self.is_calm:
            return
        self._asker = Asker(hop, self, self._transport, self._put, UNANSWERED, NO_TURN)
        if self._is_polled:
            cast(Any, transport).hear_first(self._asker)

    def data_received(self, data: bytes) -> None:
        try:
            self._server_context.stats.input_bytes += len(data)
            if self._asker is not None:
                data = self._asker.left_of(data)
            if data:
                self._take(data)
        except Exception as error:
            self.break_off(error)

    def error_reply(self, error: Exception) -> bytes:
        """Return the reply for what was raised."""
        return self._dispatcher.error_reply(error)

    @alone
    def ask_again(self, data: bytes, told: Told) -> None:
        """Have it asked again, the general way, of servers that have reached all of it."""
        self.session.seen.add(told)
        self._pending = self._next_turn = None
        if self._transport.is_closing():
            return
        if self._pushed:
            self._send(self._take_pushed())
        self._input = data + self._input
        if self._is_writable:
            self._next_turn = self._loop.call_soon(self._turn)

    def send_in_steps(self, reply: Sent) -> None:
        """Send a long answer in turns of its own."""
        self._sliced = reply
        self._next_turn = self._loop.call_soon(self._turn)

    def go_on(self) -> None:
        """Go on behind an answer with what came meanwhile: pushes, input, room for output."""
        if self._pushed:
            self._send(self._take_pushed())
        data, self._input = self._input, b""
        if self._is_writable and not self._is_ending and self.session.is_plain:
            if not data or (not self._asker.ask(data) and self._asker.keeps_begun(data)):
                self.is_calm = True
            if self.is_calm or self._pending is UNANSWERED:
                self._set_reading(not self._input)  # what is held of it is bounded
                return
        self._input = data
        if self._is_writable:
            self._next_turn = self._loop.call_soon(self._turn)
