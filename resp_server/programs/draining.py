"""How a program ends after SIGTERM or SIGINT: it drains, in a bounded time.

    signal ── --drain-delay: /readyz says no, new clients are still served ── --drain-timeout: no new clients; slots are
    handed over, requests are answered, clients closed ── the rest is cut

A second signal ends this at once. When the parent process has ended instead, there is no drain: a server then only
sends the replies that it has.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic

logger = logging.getLogger("sparkis.server")

# A shell sends SIGINT to all processes of a group, and the supervisor forwards its own: that is one signal (guess).
SAME_SIGNAL_S = 0.5

Step = Callable[[float], Awaitable[None]]


class Drain:
    """The end of one program. `listening.Shutdown` reports signals to it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._delay_s: float = options.drain_delay
        self._seconds_max: float = options.drain_timeout
        self._signalled_s: float | None = None
        self._urgent = asyncio.Event()

    @property
    def is_urgent(self) -> bool:
        """Return whether a second signal came."""
        return self._urgent.is_set()

    def signalled(self) -> None:
        """Note a signal."""
        now_s = monotonic()
        if self._signalled_s is None:
            self._signalled_s = now_s
        elif now_s - self._signalled_s > SAME_SIGNAL_S:
            self._urgent.set()

    async def run(self, *steps: Step) -> None:
        """Wait for the delay, and run the steps, each with the seconds that are left; none if there was no signal."""
        if self._signalled_s is None:
            return
        running = asyncio.create_task(self._run(steps))
        urgent = asyncio.create_task(self._urgent.wait())
        try:
            await asyncio.wait([running, urgent], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            else:
                logger.warning("a second signal came: this process ends at once, and cuts its clients")
        finally:
            running.cancel()
            urgent.cancel()

    async def _run(self, steps: tuple[Step, ...]) -> None:
        if self._delay_s:
            logger.info("ending in %g s; until then new clients are served", self._delay_s)
            await asyncio.sleep(self._delay_s)
        logger.info("draining for at most %g s: there are no new clients, and requests are finished", self._seconds_max)
        ends_s = monotonic() + self._seconds_max
        for step in steps:
            await step(max(0.0, ends_s - monotonic()))
