"""What is answered in a round of the event loop, sent at its end.

A client that sleeps is woken by what it is sent, which takes the processor longer than all else about a write: one with
many connections is woken once for what all of them are sent. redis-server does the same before it sleeps.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

# With more than this nothing waits for the end of the round (guess: a few writes that fill a socket's buffer).
WAITING_BYTES_MAX = 256 * 1024


class Sender(Protocol):
    """A connection. unsent_bytes: what of it waits here."""

    unsent_bytes: int

    def send_now(self, reply: bytes) -> None:
        """Send. It does not raise: others' replies wait behind."""


class WriteQueue:
    """What waits to be sent, in the order in which it was answered."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Sender, bytes]] = []
        self._waiting_bytes = 0

    def add(self, sender: Sender, reply: bytes) -> None:
        """Have a connection send something at the end of the round."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((sender, reply))
        sender.unsent_bytes += len(reply)
        self._waiting_bytes += len(reply)
        if self._waiting_bytes > WAITING_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Have everything sent now."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for sender, reply in waiting:
            sender.send_now(reply)
