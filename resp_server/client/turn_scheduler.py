"""Schedules the turns of connections with long input, so that they do not delay clients with short requests.

A round is one iteration of the event loop: it polls all sockets, and answers all their input before it polls again. So
a short request would wait for all long ones. After a few milliseconds of a round, the turns of connections with long
input are deferred. Each later round runs deferred turns for a few milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns

# Long input is deferred once a round has lasted this long; a round runs deferred turns for as long (guess: one turn).
ROUND_NS_MAX = 5_000_000
# Input of more bytes is long (guess: some 30 GETs, which cost more than to defer them).
LONG_INPUT_BYTES = 1024


class ScheduledTurn:
    """A deferred turn, which can be cancelled."""

    __slots__ = ("is_cancelled", "run")

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class TurnScheduler:
    """The deferred turns, in order.

    Args:
        on_round: Called before the first turn of a round, and again if the round lasts longer than `ROUND_NS_MAX`. With
            peer processes (see `Server`) it is called before each turn.
    """

    def __init__(self, on_round: Callable[[], None] = lambda: None, *, has_peer_processes: bool = False) -> None:
        self._on_round = on_round
        self._fresh_ns = 0 if has_peer_processes else ROUND_NS_MAX
        # A turn that starts after this time calls `on_round` again.
        self.fresh_until_ns = 0
        self._waiting: deque[ScheduledTurn] = deque()
        # `_step` runs in the next round.
        self._is_scheduled = False
        self._is_in_round = False
        self._ends_ns = 0

    @property
    def must_defer(self) -> bool:
        """Return whether long input has to be deferred: turns wait already, or this round exceeds `ROUND_NS_MAX`."""
        if self._waiting:
            return True
        now_ns = perf_counter_ns()
        return not self._enter_round(now_ns) and now_ns >= self._ends_ns

    def refresh(self, now_ns: int) -> None:
        """Call `on_round`, for all turns that begin in this round."""
        self._enter_round(now_ns)
        self._on_round()
        self.fresh_until_ns = now_ns + self._fresh_ns

    def _enter_round(self, now_ns: int) -> bool:
        """Enter the current round, unless it was entered before; return whether this call entered it."""
        if self._is_in_round:
            return False
        self._is_in_round = True
        self._ends_ns = now_ns + ROUND_NS_MAX
        asyncio.get_running_loop().call_soon(self._end_round)
        return True

    def defer(self, run: Callable[[], None]) -> ScheduledTurn:
        """Enqueue a turn, and return it."""
        turn = ScheduledTurn(run)
        self._waiting.append(turn)
        self._schedule()
        return turn

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._step)

    def _end_round(self) -> None:
        self._is_in_round = False
        self.fresh_until_ns = 0

    def _step(self) -> None:
        self._is_scheduled = False
        ends_ns = perf_counter_ns() + ROUND_NS_MAX
        try:
            # Turns that are deferred during this loop run in the next round, after the sockets were polled.
            for _ in range(len(self._waiting)):
                turn = self._waiting.popleft()
                if not turn.is_cancelled:
                    turn.run()
                    if perf_counter_ns() >= ends_ns:
                        break
        finally:
            self._schedule()  # also after an exception in one client's turn, which the event loop logs
