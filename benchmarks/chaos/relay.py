"""A relay between a client and a server, which can cut a connection within a reply."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

READ_BYTES = 1 << 16


class Relay:
    """Forwards bytes in its own thread, until `cut`. Listens on a free port of this machine.

    network: what the thread enters before it connects to the server, such as another host's network.
    """

    def __init__(self, network: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._network = network
        self._loop = asyncio.new_event_loop()
        self._target: tuple[str, int] | None = None
        self._cuts = 0
        self.made_cuts = 0
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def route_to(self, host: str, port: int) -> None:
        """Set the target of connections."""
        self._target = (host, port)

    def cut(self, count: int) -> None:
        """Cut the connections within the next `count` replies."""
        self._loop.call_soon_threadsafe(self._add_cuts, count)

    def stop(self) -> None:
        """Stop the relay."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        with self._network():
            self._loop.run_forever()

    def _add_cuts(self, count: int) -> None:
        self._cuts += count

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._target is None:
            writer.close()
            return
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        there = asyncio.create_task(self._pass(reader, target_writer, may_cut=False))
        await self._pass(target_reader, writer, may_cut=True)
        there.cancel()
        target_writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, may_cut: bool) -> None:
        try:
            while data := await reader.read(READ_BYTES):
                is_cut = may_cut and self._cuts > 0 and len(data) > 1
                if is_cut:
                    self._cuts -= 1
                    self.made_cuts += 1
                    data = data[: len(data) // 2]
                writer.write(data)
                await writer.drain()
                if is_cut:
                    break
        except OSError:
            pass
        finally:
            writer.close()
