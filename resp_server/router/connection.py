"""A client's connection to a proxy: the compiled hop asks for plain reads; all else goes as at any server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from resp_server.connection import Connection
from resp_server.guarded import alone
from resp_server.protocol.following import NOT_TOLD, Epochs, Told
from resp_server.protocol.replies import Pending
from resp_server.router.answers import Sent

if TYPE_CHECKING:
    from resp_server.router.dispatcher import ProxyDispatcher
    from resp_server.server import Server

# Of a request that is not all here, what is looked at again with what comes next (guess).
BEGUN_BYTES_MAX = 32 << 10


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

    def __init__(self, server: Server, session_id: int | None = None) -> None:
        super().__init__(server, session_id)
        self._hop = cast("ProxyDispatcher", self._dispatcher).hop
        self._begun = b""  # of a request: it may be one that the hop asks for

    def data_received(self, data: bytes) -> None:
        try:
            if self._begun:
                data, self._begun = self._begun + data, b""
            if self.is_calm and self.session.is_plain:
                if self._ask(data):
                    self._instance.stats.input_bytes += len(data)
                    return
                if self._keeps_begun(data):
                    return
            self._take(data)
        except Exception as error:
            self.break_off(error)

    def _ask(self, data: bytes) -> bool:
        """Have the hop ask for what is plain reads at the front of what came; tell whether there is something."""
        hop, session = self._hop, self.session
        if hop is None:
            return False
        try:
            took = hop.ask(self, data, session.protocol)
        except Exception as error:  # nothing was asked so far: the general path meets it again, and answers it
            self._instance.report(error)
            return False
        if not took:
            return False
        session.last_command = hop.last_command
        self._input = data[took:] if took < len(data) else b""
        self.is_calm = False
        self._pending, self._next_turn = UNANSWERED, NO_TURN
        return True

    def _keeps_begun(self, data: bytes) -> bool:
        """Keep the beginning of a request; tell whether it is no more than that."""
        hop = self._hop
        if hop is None or not hop.is_begun or len(data) > BEGUN_BYTES_MAX:
            return False
        self._begun = data
        return True

    @property
    def seen(self) -> Epochs:
        """What this client has seen."""
        return self.session.seen.epochs

    def fail(self, index: int, error: Exception) -> None:
        """Take what was raised instead of the replies."""
        self.answered(self._dispatcher.error_reply(error), NOT_TOLD)

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

    def answered(self, reply: bytes | Sent, told: Told) -> None:
        """Send what was waited for, and go on with what came meanwhile."""
        try:
            self._pending = self._next_turn = None
            if self._transport.is_closing():
                return
            session = self.session
            session.seen.add(told)
            session.active_ms = self._instance.view.now_ms
            if isinstance(reply, Sent):
                self._sliced = reply
                self._next_turn = self._loop.call_soon(self._turn)
                return
            self._write(reply)
            if self._pushed:
                self._send(self._take_pushed())
            if self._input or not self._is_reading or not self._is_writable or self._is_ending:
                self._go_on_with_input()
            else:
                self.is_calm = True
        except Exception as error:
            self.break_off(error)

    def _go_on_with_input(self) -> None:
        data, self._input = self._input, b""
        if self._is_writable and not self._is_ending and self.session.is_plain:
            if not data or (not self._ask(data) and self._keeps_begun(data)):
                self.is_calm = True
            if self.is_calm or self._pending is UNANSWERED:
                self._set_reading(not self._input)  # what is held of it is bounded
                return
        self._input = data
        if self._is_writable:
            self._next_turn = self._loop.call_soon(self._turn)
