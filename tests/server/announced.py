"""A listener of announcements in a thread, and what it received."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from resp_server.net.tls import Certificates
from resp_server.serving.announcement_port import AnnouncementListener

TOKEN = "a secret"


class Receiver:
    """The appliers of a server, as a listener of announcements sees them."""

    def __init__(self) -> None:
        self.noticed: list[tuple[str, int, int]] = []

    async def notice(self, job: str, epoch: int = -1, term: int = 0) -> None:
        self.noticed.append((job, term, epoch))


@contextmanager
def listening(
    port: int = 0, receiver: Receiver | None = None, certificates: Certificates | None = None
) -> Iterator[tuple[int, Receiver]]:
    """Run a listener of announcements in a thread; yield its port and what it received."""
    receiver = receiver or Receiver()
    loop = asyncio.new_event_loop()
    listener = AnnouncementListener(receiver, TOKEN, certificates)  # type: ignore[arg-type]

    async def begin() -> int:
        return listener.start("127.0.0.1", port)

    async def end() -> None:
        listener.stop()
        await asyncio.sleep(0)
        loop.stop()

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(begin(), loop).result(), receiver
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop)
        thread.join()
        loop.close()
