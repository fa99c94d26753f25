"""Pauses before retries. They end early when the proxy stops, so that nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from resp_server.forwarding.answers import Called


class RetryPauses:
    """The pauses of one state cluster's requests. Runs on the event loop's thread."""

    def __init__(self) -> None:
        self._ends: dict[Callable[[], None], None] = {}
        self._is_stopped = False

    async def pause(self, seconds: float) -> bool:
        """Pause; return False if the proxy stops, maybe early."""
        if not self._is_stopped:
            await Called(partial(self._begin, seconds))
        return not self._is_stopped

    def _begin(self, seconds: float, then: Callable[[], None]) -> None:
        def end() -> None:
            timer.cancel()
            del self._ends[end]
            then()

        timer = asyncio.get_running_loop().call_later(seconds, end)
        self._ends[end] = None

    def stop(self) -> None:
        """End all pauses now, and all later ones at once."""
        self._is_stopped = True
        for end in list(self._ends):
            end()
