"""A clock for judging the silence of others: it counts only the time in which this process was awake itself.

A process that gets no processor, is stopped, or sleeps with its machine hears nobody meanwhile. By the wall's clock
everybody would be silent when it goes on, and a timer of its event loop may run before what came is read.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


class AwakeClock:
    """Shows seconds when called. Whoever judges calls `tick` often; between two ticks at most `step_s_max` pass."""

    def __init__(self, step_s_max: float, time: Callable[[], float] = monotonic) -> None:
        self._time = time
        self._step_s_max = step_s_max
        self._ticked_s = self._shown_s = time()

    def __call__(self) -> float:
        return self._shown_s + min(self._time() - self._ticked_s, self._step_s_max)

    def tick(self) -> float:
        """Take in that this process is awake, and return the time."""
        now_s = self._time()
        self._shown_s += min(now_s - self._ticked_s, self._step_s_max)
        self._ticked_s = now_s
        return self._shown_s
