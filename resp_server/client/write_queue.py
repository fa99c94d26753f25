"""Collects the replies of one round of the event loop, and sends them at its end.

Waking a sleeping client costs more processor time than the write itself. So a client process with many connections
wakes once for the replies on all of them. redis-server does the same before it polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from resp_server.limits import ROUND_REPLIES_BYTES_MAX


class WriteQueue:
    """The replies that wait to be sent, in order."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[bytes], None], bytes]] = []
        self._waiting_bytes = 0

    def add(self, send: Callable[[bytes], None], reply: bytes) -> None:
        """Queue bytes that `send` gets at the end of the round. It must not raise: other clients' replies come next."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((send, reply))
        self._waiting_bytes += len(reply)
        if self._waiting_bytes > ROUND_REPLIES_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Send everything now."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for send, reply in waiting:
            send(reply)
