"""A clock for the timeouts of peers, which counts only the time in which this process was running.

While a process is stopped, or its machine sleeps, it reads no messages. With the system's clock all its peers would
time out when it resumes, because a timer may run before the process reads the messages that have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


class AwakeClock:
    """Call it for the time in seconds. Call `tick` often: between two ticks it advances by at most `step_s_max`."""

    def __init__(self, step_s_max: float, time: Callable[[], float] = monotonic) -> None:
        self._time = time
        self._step_s_max = step_s_max
        self._ticked_s = self._time_s = time()

    def __call__(self) -> float:
        return self._time_s + min(self._time() - self._ticked_s, self._step_s_max)

    def tick(self) -> float:
        """Advance the clock, and return the time."""
        now_s = self._time()
        self._time_s += min(now_s - self._ticked_s, self._step_s_max)
        self._ticked_s = now_s
        return self._time_s
