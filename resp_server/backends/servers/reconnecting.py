"""The pauses between attempts to connect to a server, and the time for which the server has been unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

# Pauses between attempts to connect. Several attempts a second cost little. The pause also grows if a server accepts
# connections and closes them; it starts again at `PAUSE_S` after a connection that lasted for `PAUSE_S_MAX`.
PAUSE_S = 0.02
PAUSE_S_MAX = 0.25


class Reconnecting:
    """The attempts to connect to one server.

    Attributes:
        reason: Why the server cannot be reached; empty: the server is reachable.
        down_since_s: Since when the server is unreachable; None: it is reachable.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.reason = ""
        self.down_since_s: float | None = None
        self._pause_s = 0.0
        self._not_before_s = 0.0
        self._connect_now = asyncio.Event()  # ends the pause before an attempt to connect
        self._was_reached = False  # the last failure was the loss of a connection, not a failed attempt to connect

    async def pause(self) -> None:
        """Wait for the end of the pause before the next attempt to connect."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._not_before_s - self._clock())):
                await self._connect_now.wait()

    def failed(self, reason: str, *, was_reached: bool) -> None:
        """Begin a pause after a failed attempt to connect, or after the loss of a connection (`was_reached`)."""
        now_s = self._clock()
        self._connect_now.clear()
        if self.down_since_s is None:
            self.down_since_s = now_s
        self.reason, self._was_reached = reason, was_reached
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(max(2 * self._pause_s, PAUSE_S), PAUSE_S_MAX)

    def succeeded(self) -> None:
        """Record that the server can be reached."""
        self.down_since_s, self.reason = None, ""

    def check(self, now_s: float, connected_s: float) -> None:
        """Begin again with short pauses, if the connection that was opened at `connected_s` has lasted long enough."""
        if now_s > connected_s + PAUSE_S_MAX:
            self._pause_s = 0.0

    def wake(self) -> None:
        """Try to connect at once, because another connection to the server was opened."""
        self.succeeded()
        if not self._was_reached:
            self._not_before_s = 0.0
            self._connect_now.set()
