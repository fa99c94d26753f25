"""Schedules the turns of connections with long input, so that they do not delay clients with short requests.

In one round the event loop polls all sockets and answers all their input before it polls again, so a short request
would wait for all long ones. Once a round has lasted a few milliseconds, connections with long input are deferred: each
further round runs a few milliseconds of deferred turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns

# The length of a round, and of the deferred turns in it (guess: as long as one turn).
ROUND_NS_MAX = 5_000_000
# Longer input is deferred (guess: some 30 GETs, which take longer than the queue costs).
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
    """The turns that wait, in their order.

    on_round: called before the first turn of a round of the loop, and again if the round lasts longer than
    `ROUND_NS_MAX`. With peer processes (see `Server`) it is called before each turn.
    """

    def __init__(self, on_round: Callable[[], None] = lambda: None, *, has_peer_processes: bool = False) -> None:
        self._on_round = on_round
        self._fresh_ns = 0 if has_peer_processes else ROUND_NS_MAX
        # A turn that begins later calls `on_round` again.
        self.fresh_until_ns = 0
        self._waiting: deque[ScheduledTurn] = deque()
        # Whether `_step` is scheduled for the next round.
        self._is_due = False
        self._is_in_round = False
        self._ends_ns = 0

    @property
    def is_long(self) -> bool:
        """Tell whether long input has to be deferred: turns wait already, or this round has lasted."""
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
        """Enqueue a turn."""
        turn = ScheduledTurn(run)
        self._waiting.append(turn)
        self._go_on()
        return turn

    def _go_on(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._step)

    def _end_round(self) -> None:
        self._is_in_round = False
        self.fresh_until_ns = 0

    def _step(self) -> None:
        self._is_due = False
        ends_ns = perf_counter_ns() + ROUND_NS_MAX
        try:
            # Turns that are deferred meanwhile run in the next round, after sockets were polled.
            for _ in range(len(self._waiting)):
                turn = self._waiting.popleft()
                if not turn.is_cancelled:
                    turn.run()
                    if perf_counter_ns() >= ends_ns:
                        break
        finally:
            self._go_on()  # also after an exception in one client's turn, which the event loop logs
