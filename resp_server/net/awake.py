"""A clock for timeouts of other processes: it counts only the time in which this process was running.

A process that is stopped, or whose machine sleeps, reads no messages meanwhile. With the system's clock all peers
would be timed out when it resumes, because a timer may run before the received messages are read.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


class AwakeClock:
    """Returns seconds when called. Call `tick` often: at most `step_s_max` seconds pass between two ticks."""

    def __init__(self, step_s_max: float, time: Callable[[], float] = monotonic) -> None:
        self._time = time
        self._step_s_max = step_s_max
        self._ticked_s = self._shown_s = time()

    def __call__(self) -> float:
        return self._shown_s + min(self._time() - self._ticked_s, self._step_s_max)

    def tick(self) -> float:
        """Advance the clock, and return the time."""
        now_s = self._time()
        self._shown_s += min(now_s - self._ticked_s, self._step_s_max)
        self._ticked_s = now_s
        return self._shown_s
