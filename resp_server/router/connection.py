"""A client's connection to a proxy: GETs go the short way, all else as at any server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from resp_server.connection import Connection
from resp_server.guarded import alone
from resp_server.protocol.following import NOT_TOLD, Epochs, Told
from resp_server.protocol.replies import Pending
from resp_server.router.asks import TakesReplies
from resp_server.router.gets import NIL_2, NIL_3, STARTS, is_part

if TYPE_CHECKING:
    from resp_server.router.dispatcher import ProxyDispatcher
    from resp_server.server import Server


class NoTurn(asyncio.Handle):
    """Stands where the next turn would: what is waited for comes, or is refused, in its own time."""

    def __init__(self) -> None:
        pass

    def cancel(self) -> None:
        """Nothing is to be done."""


NO_TURN = NoTurn()


class Unanswered(Pending):
    """Stands for the replies of the short way while they are waited for."""

    def __init__(self) -> None:
        super().__init__(0.0, lambda: None)


UNANSWERED = Unanswered()


class ProxyConnection(Connection, TakesReplies):
    """A client's connection to a proxy."""

    def __init__(self, server: Server, session_id: int | None = None) -> None:
        super().__init__(server, session_id)
        dispatcher = cast("ProxyDispatcher", self._dispatcher)
        self._gets, self._mgets = dispatcher.gets, dispatcher.mgets
        # Of what begins with a GET: what is to be asked next, or has come in part.
        self.begun = b""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop."""
        return self._loop

    def _take(self, data: bytes) -> None:
        if self.is_calm:
            if self.begun:
                data, self.begun = self.begun + data, b""
            if self._gets is not None and self.session.is_plain:
                if data.startswith(STARTS):
                    self._ask(data)
                    return
                if self._ask_for_many(data):
                    self._wait("mget")
                    return
        super()._take(data)

    def _ask_for_many(self, data: bytes) -> bool:
        try:
            return self._mgets.ask_for(data, self.session.protocol, self)  # type: ignore[union-attr]
        except Exception as error:  # nothing was asked so far: the general way meets it again, and answers it
            self._instance.report(error)
            return False

    def _ask(self, data: bytes) -> None:
        self._wait("get")
        self._gets.add(self, data)  # type: ignore[union-attr]

    def _wait(self, command: str) -> None:
        self.session.last_command = command
        self.is_calm = False
        self._pending, self._next_turn = UNANSWERED, NO_TURN

    def seen_by(self, index: int) -> Epochs:
        return self.session.seen.epochs

    def put(self, index: int, reply: bytes, told: Told = NOT_TOLD) -> None:
        """Take the reply to an MGET."""
        self.answered(reply, told)

    def fail(self, index: int, error: Exception) -> None:
        """Take what was raised instead of the reply to a GET, or an MGET."""
        self.answered(self._dispatcher.error_reply(error), NOT_TOLD)

    @property
    def seen(self) -> Epochs:
        """What this client has seen."""
        return self.session.seen.epochs

    @alone
    def leave_to_others(self, data: bytes) -> None:
        """Answer what is no GET, or cannot be asked now, the general way."""
        self._pending = self._next_turn = None
        if self._transport.is_closing():
            return
        if self._pushed:
            self._send(self._take_pushed())
        data, self._input = data + self._input, b""
        self.is_calm = self._is_writable
        super()._take(data)

    def in_its_protocol(self, replies: Sequence[bytes]) -> bytes:
        """Return replies to GETs as they are sent to this client."""
        if self.session.protocol != 2 and NIL_2 in replies:
            replies = [NIL_3 if each == NIL_2 else each for each in replies]
        return b"".join(replies)

    @alone
    def answered_unevenly(self, data: bytes, count: int, told: Told) -> None:
        """Have it asked again, the general way, of servers that have reached all of it."""
        self.session.seen.add(told)
        stats = self._instance.stats  # it was counted when it was asked first
        stats.input_bytes -= len(data)
        stats.tally("get").calls -= count
        data, self.begun = data + self.begun, b""
        self.leave_to_others(data)

    def answered(self, reply: bytes, told: Told) -> None:
        """Send what was waited for, and go on with what came meanwhile."""
        try:
            self._take_answer(reply, told)
        except Exception as error:
            self.break_off(error)

    def _take_answer(self, reply: bytes, told: Told) -> None:
        self._pending = self._next_turn = None
        if self._transport.is_closing():
            return
        session = self.session
        session.seen.add(told)
        session.active_ms = self._instance.view.now_ms
        if reply == NIL_2 and session.protocol != 2:
            reply = NIL_3
        self._write(reply)
        if self._pushed:
            self._send(self._take_pushed())
        if self._input or self.begun or not self._is_reading or not self._is_writable or self._is_ending:
            self._go_on_with_input()
        else:
            self.is_calm = True

    def _go_on_with_input(self) -> None:
        data, self.begun, self._input = self.begun + self._input, b"", b""
        if self._is_writable and is_part(data) and not self._is_ending:
            self.is_calm, self.begun = True, data
            self._set_reading(True)
        elif self._is_writable and data.startswith(STARTS) and self.session.is_plain:
            self._set_reading(not self._is_ending)
            self._ask(data)
        else:
            self._input = data
            if self._is_writable:
                self._next_turn = self._loop.call_soon(self._turn)
