"""The turns of connections that have to wait, so that a thousand of them that ask for much at once hold nobody else up.

The event loop looks at what has come from all clients, then answers all of it, then looks again: who asks for little in
between would wait for all. So what asks for much is put off once a round of the loop has lasted, and then a few
milliseconds of it are done in each round.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns

# Of a round, and of what was put off in each (guess: as long as a turn).
ROUND_NS_MAX = 5_000_000
# What is longer is worth being put off (guess: some 30 GETs, which take longer than to look at the queue).
MUCH_BYTES = 1024


class ScheduledTurn:
    """A turn that is to come, unless it is cancelled."""

    __slots__ = ("is_cancelled", "run")

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class TurnScheduler:
    """The turns that wait, in their order.

    on_round: called before the first turn of a round of the loop, and again when that round has lasted.
    """

    def __init__(self, on_round: Callable[[], None] = lambda: None) -> None:
        self._on_round = on_round
        self.fresh_until_ns = 0  # a turn that begins later begins a round, or what stands for one
        self._waiting: deque[ScheduledTurn] = deque()
        self._is_due = False  # `_step` comes with the next round
        self._is_in_round = False
        self._ends_ns = 0

    @property
    def is_long(self) -> bool:
        """Tell whether what asks for much has to wait: others do, or this round of the loop has lasted."""
        if self._waiting:
            return True
        now_ns = perf_counter_ns()
        return not self._enter_round(now_ns) and now_ns >= self._ends_ns

    def refresh(self, now_ns: int) -> None:
        """Do what is done once for all turns of a round."""
        self._enter_round(now_ns)
        self._on_round()
        self.fresh_until_ns = now_ns + ROUND_NS_MAX

    def _enter_round(self, now_ns: int) -> bool:
        """Have the round's end noted; tell whether this is the first that was heard of it."""
        if self._is_in_round:
            return False
        self._is_in_round = True
        self._ends_ns = now_ns + ROUND_NS_MAX
        asyncio.get_running_loop().call_soon(self._end_round)
        return True

    def defer(self, run: Callable[[], None]) -> ScheduledTurn:
        """Have a turn come when those before it are done."""
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
            # Those that are put off meanwhile come in the next round, so that clients are heard in between.
            for _ in range(len(self._waiting)):
                turn = self._waiting.popleft()
                if not turn.is_cancelled:
                    turn.run()
                    if perf_counter_ns() >= ends_ns:
                        break
        finally:
            self._go_on()  # also behind a turn that failed, which the event loop logs: it is one client's
