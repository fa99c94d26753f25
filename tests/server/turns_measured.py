"""An event loop that measures its turns: how much processor time each takes, and how many there were."""

from __future__ import annotations

import asyncio
from time import thread_time_ns


class MeasuredLoop(asyncio.SelectorEventLoop):
    """Counts its turns, and knows the longest one by the processor time of its thread.

    That time does not depend on how many other processes want the processor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self._longest_ns = 0

    def _run_once(self) -> None:
        began_ns = thread_time_ns()
        super()._run_once()  # type: ignore[misc]
        self.turns += 1
        self._longest_ns = max(self._longest_ns, thread_time_ns() - began_ns)

    def take_longest_ms(self) -> float:
        """Return how long the longest turn was since this was asked last."""
        longest_ns, self._longest_ns = self._longest_ns, 0
        return longest_ns / 1e6


class Bystander(asyncio.Protocol):
    """A client on the server's own loop, which sends PING for ever, and counts the turns that each answer takes."""

    def __init__(self, loop: MeasuredLoop) -> None:
        self._loop = loop
        self._sent_at = 0
        self.answers = 0
        self.longest_wait = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        assert data == b"+PONG\r\n"
        self.answers += 1
        self.longest_wait = max(self.longest_wait, self._loop.turns - self._sent_at)
        self._ask()

    def _ask(self) -> None:
        self._sent_at = self._loop.turns
        self._transport.write(b"*1\r\n$4\r\nPING\r\n")
