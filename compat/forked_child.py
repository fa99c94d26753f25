"""A fork as a child on an event loop, of any kind: that of uvloop starts processes without `subprocess.Popen`."""

from __future__ import annotations

import asyncio
import os
import subprocess


class Child:
    """A running process with the methods of `asyncio.subprocess.Process`; `connect` gives it its streams."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._descriptor = os.pidfd_open(process.pid)
        self._loop.add_reader(self._descriptor, self._reap)

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal; None while it runs."""
        return self._process.returncode

    async def connect(self, limit: int) -> None:
        """Connect the standard streams. limit: of a line in bytes."""
        if self._process.stdin is not None:
            transport, protocol = await self._loop.connect_write_pipe(_Flow, self._process.stdin)
            self.stdin = asyncio.StreamWriter(transport, protocol, None, self._loop)
        if self._process.stdout is not None:
            self.stdout = reader = asyncio.StreamReader(limit)
            await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._ended.set_result(self._process.wait())

    async def wait(self) -> int:
        """Wait for the end; return the exit code, or minus the signal."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Send a signal; ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()


class _Flow(asyncio.streams.FlowControlMixin):
    """The protocol of a child's standard input."""

    async def _get_close_waiter(self, stream: asyncio.StreamWriter) -> None:
        return None
