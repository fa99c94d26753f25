"""Delivers messages to this process's subscribers in order, for a bounded time in each turn of the event loop.

A message is matched with all patterns and sent to each subscriber, and there may be many. A longer delivery continues
in later turns. Later messages wait for it, so that no client gets them first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import NamedTuple

from resp_server.limits import STEP_NS_MAX
from resp_server.raw_replies.reply_sinks import Defer


class _Delivery(NamedTuple):
    """The steps of one delivery.

    Args:
        flush: Called after each turn.
        done: Called after the last step.
    """

    steps: Iterator[None]
    flush: Callable[[], None]
    done: Callable[[], None]


class Deliveries:
    """The unfinished deliveries, in order.

    Attributes:
        waiting: Those that have not ended; empty: the next one begins at once.
    """

    def __init__(self, defer: Defer) -> None:
        self._defer = defer
        self.waiting: deque[_Delivery] = deque()

    def add(self, steps: Iterator[None], flush: Callable[[], None], done: Callable[[], None]) -> None:
        """Start a delivery now if no other waits, for at most one turn's time; else enqueue it."""
        delivery = _Delivery(steps, flush, done)
        if self.waiting:
            self.waiting.append(delivery)
        elif not _is_done(delivery, perf_counter_ns() + STEP_NS_MAX):
            self.waiting.append(delivery)
            self._defer(self._continue)

    def _continue(self) -> None:
        ends_ns = perf_counter_ns() + STEP_NS_MAX
        try:
            while self.waiting and _is_done(self.waiting[0], ends_ns):
                self.waiting.popleft()
                if perf_counter_ns() >= ends_ns:
                    break
        except BaseException:
            self.waiting.popleft()  # the exception fails this message only
            raise
        finally:
            if self.waiting:
                self._defer(self._continue)


def _is_done(delivery: _Delivery, ends_ns: int) -> bool:
    """Continue a delivery; return whether it is done."""
    for _ in delivery.steps:
        if perf_counter_ns() >= ends_ns:
            delivery.flush()
            return False
    delivery.flush()
    delivery.done()
    return True
