"""Whether a job's writer is alive, by its heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from state_backend.log.takeover import HEARTBEATS_MISSED_MAX


class HeartbeatWatch:
    """Watches a writer's heartbeats by this process's own clock, because clocks of machines differ.

    was_alive: another process saw a heartbeat just now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, was_alive: bool = False) -> None:
        self._clock = clock
        self._last: tuple[object, object] = (None, None)
        self._changed_at_s = clock() if was_alive else float("-inf")

    def is_stale(self, heartbeat: dict[str, Any]) -> bool:
        """Tell, given the last heartbeat, whether the writer has stopped, or has sent no heartbeat for too long."""
        count = (heartbeat.get("writer"), heartbeat.get("count"))
        if count != self._last and heartbeat:
            is_first = self._last == (None, None)
            self._last = count
            if not is_first:  # the first heartbeat may be as old as the log: wait for the next
                self._changed_at_s = self._clock()
        if heartbeat.get("is_final"):
            return False
        silent_s_max = HEARTBEATS_MISSED_MAX * heartbeat.get("interval_s", 1.0)
        return not heartbeat.get("is_running") or self._clock() - self._changed_at_s > silent_s_max
