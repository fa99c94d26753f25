"""Messages that are on their way to this process's clients: in their order, and for a bounded time in each turn.

A message is held against all patterns and sent to each of its subscribers, of which there may be many. What is not done
at once goes on in later turns, and what comes meanwhile waits behind it: no client gets a later message first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import NamedTuple

# Of a turn, and of what is done at once (guess: the writes to the sockets come on top, some five times as long).
PORTION_NS = 1_000_000

# Has something be called in a turn to come.
Defer = Callable[[Callable[[], None]], object]


class _Delivery(NamedTuple):
    """What is to be done for a message, step by step, and who is told when it is."""

    steps: Iterator[None]
    flush: Callable[[], None]
    done: Callable[[], None]


class Deliveries:
    """The messages that are under way."""

    def __init__(self, defer: Defer) -> None:
        self._defer = defer
        self._waiting: deque[_Delivery] = deque()

    def add(self, steps: Iterator[None], flush: Callable[[], None], done: Callable[[], None]) -> None:
        """Do some steps: now, unless there are many or others wait. flush: called behind each portion of them."""
        delivery = _Delivery(steps, flush, done)
        if self._waiting:
            self._waiting.append(delivery)
        elif not _is_done(delivery, perf_counter_ns() + PORTION_NS):
            self._waiting.append(delivery)
            self._defer(self._go_on)

    def _go_on(self) -> None:
        ends_ns = perf_counter_ns() + PORTION_NS
        try:
            while self._waiting and _is_done(self._waiting[0], ends_ns):
                self._waiting.popleft()
                if perf_counter_ns() >= ends_ns:
                    break
        except BaseException:
            self._waiting.popleft()  # it is one message's
            raise
        finally:
            if self._waiting:
                self._defer(self._go_on)


def _is_done(delivery: _Delivery, ends_ns: int) -> bool:
    """Go on with a delivery; return whether it is done."""
    for _ in delivery.steps:
        if perf_counter_ns() >= ends_ns:
            delivery.flush()
            return False
    delivery.flush()
    delivery.done()
    return True
