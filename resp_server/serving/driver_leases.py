"""The leases of the drivers that use a server. Without a lease, the server ends after a linger time.

A lease is a connection to the control port. When a driver dies, its connection closes; a restarted driver takes a new
lease. So clients can read while the driver restarts, and a server that no driver needs any more ends.
"""

from __future__ import annotations

import asyncio
import math

# A server that has just been started or restarted waits at least this long for its driver (guess).
FIRST_WAIT_S = 30.0
# The exit code of a state server behind a proxy that ends because no driver needs it: the proxy then ends, too.
UNUSED_CODE = 4


class DriverLeases:
    """The leases of one server. Runs on the event loop's thread."""

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s
        self._leases: set[object] = set()
        self._has_ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._wait_for_drivers(max(linger_s, FIRST_WAIT_S))

    def _wait_for_drivers(self, seconds: float) -> None:
        if seconds < math.inf:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def take(self, connection: object, linger_s: float) -> bool:
        """Give a connection a lease, and set the linger time after it; False if the server already ends."""
        if self._has_ended.is_set():
            return False
        self._linger_s = linger_s
        self._leases.add(connection)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return True

    def release(self, connection: object) -> None:
        """End a connection's lease, if it has one. After the last lease, the linger time begins."""
        if connection in self._leases:
            self._leases.discard(connection)
            if not self._leases:
                self._wait_for_drivers(self._linger_s)

    @property
    def has_ended(self) -> bool:
        """Whether the server is to end."""
        return self._has_ended.is_set()

    @property
    def count(self) -> int:
        """The number of leases."""
        return len(self._leases)

    def end(self) -> None:
        """End the server now."""
        self._has_ended.set()

    async def wait_for_end(self) -> None:
        """Return when the server is to end."""
        await self._has_ended.wait()
