"""The fields of a connection that the compiled core reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resp_server import native
from resp_server.session.session import Session

if TYPE_CHECKING or native.client_fields is None:

    class ConnectionFields:
        """The fields of a connection that compiled code uses with each request; C fields, if the core is built.

        Args:
            is_idle: The client is admitted, no output is unsent, and all input was answered or waits for the round's
                end.
            _next_turn: The client's next turn. None: none is scheduled.
            _is_ending: The client has sent its end of stream.
            _is_finishing: This server ends.
        """

        __slots__ = (
            "_is_ending",
            "_is_finishing",
            "_next_turn",
            "_transport",
            "input",
            "is_idle",
            "output",
            "reply",
            "session",
        )
        is_idle: bool
        session: Session
        input: Any
        output: Any
        reply: Any
        _transport: Any
        _next_turn: Any
        _is_ending: bool
        _is_finishing: bool

else:
    ConnectionFields = native.client_fields.ConnectionFields
