"""An event loop with a simulated clock and network, which runs thousands of inputs without waiting.

When the loop is idle, its clock jumps to the next timer. So a timeout of a minute takes no time, and an input takes the
same number of turns on a busy machine. A connection is a pair of sockets, both of which belong to the loop.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Callable
from typing import Any

# A short input takes a few turns of the loop; each long reply takes one.
TURNS_MAX = 20_000


class NeverIdleError(Exception):
    """The loop does not become idle."""


class _Selector(selectors.DefaultSelector):
    """Never waits, but advances the clock by the timeout."""

    now_s = 0.0
    turns = 0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if timeout == 0 or found:
            self.turns += 1
            if self.turns > TURNS_MAX:
                self.turns = 0
                raise NeverIdleError(f"the loop is not idle after {TURNS_MAX} turns")
        else:
            self.turns = 0
            self.now_s += timeout or 0.0
        return found


class Loop(asyncio.SelectorEventLoop):
    """An event loop with a simulated clock and network."""

    def __init__(self) -> None:
        # The protocol factory for connections to an address.
        self.listening: dict[str, Callable[[], asyncio.Protocol]] = {}
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the simulated time."""
        return self._clock.now_s

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **ignored: Any) -> Any:
        """Connect to a server of this loop; ConnectionRefusedError."""
        listening = self.listening.get(f"{host}:{port}")
        if listening is None:
            raise ConnectionRefusedError(f"no server listens at {host}:{port}")
        near, far = socket.socketpair()
        await self.connect_accepted_socket(listening, far)
        return await super().create_connection(protocol_factory, sock=near)
