"""Collects the replies of one round of the event loop, and sends them at its end.

Waking a sleeping client costs more processor time than the write itself. So a client process with many connections
wakes once for the replies on all of them. redis-server does the same before it polls.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from resp_server.limits import ROUND_REPLIES_BYTES_MAX


class Sender(Protocol):
    """A connection.

    Args:
        unsent_bytes: Its bytes in the queue.
    """

    unsent_bytes: int

    def send_now(self, reply: bytes) -> None:
        """Send bytes. Must not raise: the replies of other clients come next."""


class WriteQueue:
    """The replies that wait to be sent, in order."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Sender, bytes]] = []
        self._waiting_bytes = 0

    def add(self, sender: Sender, reply: bytes) -> None:
        """Queue bytes that a connection sends at the end of the round."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((sender, reply))
        sender.unsent_bytes += len(reply)
        self._waiting_bytes += len(reply)
        if self._waiting_bytes > ROUND_REPLIES_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Send everything now."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for sender, reply in waiting:
            sender.send_now(reply)
