"""The circuit breaker of an upstream: after a failure, requests fail at once until the proxy has reconnected. Pure."""

from __future__ import annotations

from collections.abc import Callable
from random import random

# The pause before reconnecting; it is doubled after each failure (guess: Redis restarts in a fraction of a second).
PAUSE_S = 0.05
PAUSE_S_MAX = 2.0


class Breaker:
    """Open after a failure. The pauses have jitter, so that many proxies do not reconnect at the same time."""

    def __init__(self, random_part: Callable[[], float] = random) -> None:
        self._random_part = random_part
        self._pause_s = PAUSE_S
        self.reason = ""
        self.times_opened = 0

    @property
    def is_open(self) -> bool:
        """Return whether requests that need a new connection have to fail at once."""
        return bool(self.reason)

    def failed(self, reason: str) -> float:
        """Open the breaker; return the pause before the next attempt to connect, in seconds."""
        self.times_opened += not self.reason
        self.reason = reason
        pause_s = self._pause_s * (0.5 + self._random_part() / 2)
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        return pause_s

    def succeeded(self) -> None:
        """Close the breaker."""
        self.reason, self._pause_s = "", PAUSE_S
