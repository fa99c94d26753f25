"""A TCP relay whose network can be taken away: it then passes no byte either way, and closes nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from compat.waiting import WAIT_S_MAX


class Relay:
    """Passes the bytes of each connection on to a port of this machine.

    Attributes:
        accepted: Connections so far.
        held: Requests with these bytes wait until it is None.
        is_holding: Whether a request waits.

    After `drop` nothing passes, as if each packet were dropped: a peer sees neither an end nor an error. After
    `restore` new connections work. Those from before stay silent for ever: their other end has forgotten them.
    """

    def __init__(self, to_port: int) -> None:
        self.accepted = 0
        self.held: bytes | None = None
        self.is_holding = False
        self._to_port = to_port
        self._is_dropping = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[Any] | None] = set()
        self._lost: set[asyncio.Task[Any] | None] = set()
        self._server = self._run(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def _run(self, awaitable: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result(WAIT_S_MAX)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        self._tasks.add(task)
        if self._is_dropping:
            self._lost.add(task)
            await asyncio.Event().wait()
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        try:
            await asyncio.gather(self._pass_on(reader, to_writer, task), self._pass_on(to_reader, writer, task))
        except OSError:
            pass
        finally:
            writer.close()
            to_writer.close()
            self._tasks.discard(task)

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[Any] | None
    ) -> None:
        while data := await reader.read(65536):
            if task in self._lost:
                await asyncio.Event().wait()
            while self.held is not None and self.held in data:
                self.is_holding = True
                await asyncio.sleep(0.001)
            writer.write(data)
            await writer.drain()
        if task in self._lost:
            await asyncio.Event().wait()
        writer.close()

    def drop(self) -> None:
        """Let nothing pass any more."""

        async def drop() -> None:
            self._is_dropping = True
            self._lost |= self._tasks

        self._run(drop())

    def restore(self) -> None:
        """Let new connections pass."""
        self._is_dropping = False

    def stop(self) -> None:
        """Close everything."""

        async def stop() -> None:
            self._server.close()
            for task in list(self._tasks):
                if task is not None:
                    task.cancel()
            await asyncio.sleep(0.01)

        self._run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
