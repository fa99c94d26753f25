"""The fields of a connection that the compiled core reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resp_server import native
from resp_server.session.session import Session

if TYPE_CHECKING or native.core is None:

    class ConnectionFields:
        """The fields of a connection that its transport reads with each request; C fields, if the core is built.

        Args:
            is_idle: The client is admitted, no output is unsent, and all input was answered or waits for the round's
                end.
        """

        __slots__ = ("is_idle", "session")
        is_idle: bool
        session: Session

else:
    ConnectionFields = native.core.ConnectionFields
