"""CLIENT PAUSE of one process: which requests of all clients are delayed, and until when."""

from __future__ import annotations

from collections.abc import Callable

from state_backend.model.clock import Clock


class ClientPause:
    """The pause of all clients.

    Args:
        on_change: Called when a pause begins and when it ends.
        resume: Called when a pause ends, after `on_change`.

    Attributes:
        until_ms: 0: there is no pause.
        is_for_writes: Only writes are delayed.
    """

    def __init__(self, clock: Clock, on_change: Callable[[], None], resume: Callable[[], None]) -> None:
        self._clock = clock
        self._on_change = on_change
        self._resume = resume
        self.until_ms = 0
        self.is_for_writes = False

    @property
    def delays_all(self) -> bool:
        """Return whether all requests are delayed, not only writes."""
        return self.until_ms > 0 and not self.is_for_writes

    def begin(self, until_ms: int, *, is_for_writes: bool = False) -> None:
        """Pause all clients until this time, or their writes only. As in Redis, an earlier pause is never shortened."""
        if not self.until_ms and until_ms <= self._clock():
            return  # it is over
        self.is_for_writes = is_for_writes and (self.is_for_writes or not self.remaining_ms())
        self.until_ms = max(self.until_ms, until_ms)
        self._on_change()

    def end(self) -> None:
        """End the pause, if there is one."""
        if not self.until_ms:
            return
        self.until_ms, self.is_for_writes = 0, False
        self._on_change()
        self._resume()

    def remaining_ms(self) -> int:
        """Return how long the pause lasts; 0: there is none."""
        remaining_ms = max(0, self.until_ms - self._clock())
        if self.until_ms and not remaining_ms:
            self.end()
        return remaining_ms
