"""The drivers that a server serves: without any of them it ends, after a linger time.

A driver attends by a connection to the control port. If the driver dies, the connection closes; a restarted driver
attends again. So clients read while the driver restarts, and a server that nobody needs any more ends.
"""

from __future__ import annotations

import asyncio
import math

# A server that was just started, or started again, waits at least so long for its driver (guess).
FIRST_WAIT_S = 30.0


class Attendance:
    """Counts the attending connections. Runs on the event loop's thread."""

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s
        self._attending: set[object] = set()
        self._has_ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._wait_for_drivers(max(linger_s, FIRST_WAIT_S))

    def _wait_for_drivers(self, seconds: float) -> None:
        if seconds < math.inf:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def attend(self, connection: object, linger_s: float) -> bool:
        """Serve until this connection leaves, and then for a linger time; False if the server ends already."""
        if self._has_ended.is_set():
            return False
        self._linger_s = linger_s
        self._attending.add(connection)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return True

    def leave(self, connection: object) -> None:
        """Begin the linger time if this was the last attending connection."""
        if connection in self._attending:
            self._attending.discard(connection)
            if not self._attending:
                self._wait_for_drivers(self._linger_s)

    @property
    def count(self) -> int:
        """The number of attending connections."""
        return len(self._attending)

    def end(self) -> None:
        """End the server now."""
        self._has_ended.set()

    async def wait_for_end(self) -> None:
        """Return when the server is to end."""
        await self._has_ended.wait()
