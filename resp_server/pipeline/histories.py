"""STATE HISTORY: processes of their own read the values that a key had from its job's log.

Reading takes milliseconds or many seconds, and it needs Arrow, which servers do not load. So child processes do it
(`programs.history_reader`), each one history at a time. A process ends after IDLE_S without a request. It is killed
when its client leaves, or when it takes too long.

    to the process      {"log", "job", "generation", "epoch", "key", "count", "protocol", "lines"}   a line of JSON;
                        key: Latin-1; lines: how the process logs (see `log_lines.inherited`)
    from the process    {"bytes": N}, then N bytes: the encoded reply; or {"error": text}
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

from resp_server.net import children
from resp_server.protocol.errors import GenericError, TryAgainError, internal_error
from resp_server.protocol.replies import Frames, Pending, Reply
from state_backend import log_lines

Result = TypeVar("Result")

logger = logging.getLogger("sparkis.server")

# Histories that one process of a server reads at a time (guess: each takes a core, and about 100 MB).
HISTORIES_MAX = 2
# Less than half of a proxy's patience with long requests, so that one history may wait behind another.
HISTORY_S_MAX = 20.0
IDLE_S = 60.0
# A longer reply is refused. Only a single value can be so long (guess).
REPLY_BYTES_MAX = 32 << 20


@dataclass(frozen=True)
class HistoryRequest:
    """A key whose history is read, up to the epoch that the server shows."""

    log: str
    job: str
    generation: str
    epoch: int
    key: bytes
    count: int
    protocol: int

    def line(self) -> bytes:
        """Return the request as a line for the process."""
        fields = {**asdict(self), "key": self.key.decode("latin-1"), "lines": log_lines.inherited()}
        return json.dumps(fields).encode() + b"\n"


class Histories:
    """The processes of one server that read histories. Runs on the event loop's thread."""

    def __init__(self) -> None:
        self._idle: list[_Reader] = []
        self._reading: set[asyncio.Task[Callable[[], Reply]]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    def read(self, request: HistoryRequest) -> Pending:
        """Read a key's history; TryAgainError if the limit of simultaneous histories is reached."""
        if len(self._reading) >= HISTORIES_MAX:
            raise TryAgainError(f"{HISTORIES_MAX} histories are being read here already; retry in a moment")
        reply = Pending(2 * HISTORY_S_MAX, _too_late)  # `_read` gives up earlier
        reply.is_blocking = True  # the client's input is read meanwhile, to notice that the client leaves
        reading = _start(self._read(request), self._reading)
        reply.on_abandon = reading.cancel
        # Called once the task has left `_reading`, because the client's next request may be a history, too.
        reading.add_done_callback(lambda done: None if done.cancelled() else reply.resolve(done.result()))
        return reply

    async def stop(self) -> None:
        """Kill all processes."""
        for task in self._reading:
            task.cancel()
        while self._idle:
            self._end(self._idle.pop())
        await asyncio.gather(*self._reading, *self._ending, return_exceptions=True)

    async def _read(self, request: HistoryRequest) -> Callable[[], Reply]:
        """Return a function that returns the reply, or raises."""
        reader, is_done = self._idle_reader() or _Reader(), False
        try:
            async with asyncio.timeout(HISTORY_S_MAX):
                make = await reader.read(request)
            is_done = True
        except TimeoutError:
            make = _too_late
        except (OSError, EOFError) as error:
            logger.warning("the process that read a history ended: %s", error)
            make = _ended
        except Exception as error:
            make = _raising(internal_error(error))
        finally:
            if is_done:
                self._keep(reader)
            else:
                await reader.end()
        return make

    def _keep(self, reader: _Reader) -> None:
        self._idle.append(reader)
        reader.idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle, reader)

    def _idle_reader(self) -> _Reader | None:
        """Return a process that waits for a request; None if there is none."""
        while self._idle:
            reader = self._idle.pop()
            reader.idle_timer.cancel()
            if reader.is_running:
                return reader
            self._end(reader)
        return None

    def _end_idle(self, reader: _Reader) -> None:
        self._idle.remove(reader)
        self._end(reader)

    def _end(self, reader: _Reader) -> None:
        reader.idle_timer.cancel()
        _start(reader.end(), self._ending)


def _start(work: Coroutine[None, None, Result], tasks: set[asyncio.Task[Result]]) -> asyncio.Task[Result]:
    """Start a task that belongs to a set until it ends."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


class _Reader:
    """One process; the first request starts it."""

    idle_timer: asyncio.TimerHandle

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def read(self, request: HistoryRequest) -> Callable[[], Reply]:
        """Return a function that returns the reply, or raises; OSError or EOFError if the process ends."""
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "resp_server.programs.history_reader"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=children.environment(),
                start_new_session=True,  # signals to all processes of a shell are for the server, which ends this one
            )
        source, target = self._process.stdout, self._process.stdin
        assert source is not None and target is not None
        target.write(request.line())
        line = await source.readline()
        if not line:
            raise EOFError("no reply")
        header = json.loads(line)
        if "error" in header:
            return _raising(GenericError(header["error"]))
        frames = Frames(await source.readexactly(header["bytes"]))
        return lambda: frames

    async def end(self) -> None:
        """Kill the process, and wait for its end."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def _raising(error: Exception) -> Callable[[], Reply]:
    def make() -> Reply:
        raise error

    return make


def _too_late() -> Reply:
    raise GenericError(
        f"the history was not read in {HISTORY_S_MAX:.0f} s; a smaller COUNT may need fewer files, and "
        "`sparkis history` has no time limit"
    )


def _ended() -> Reply:
    raise GenericError("the process that reads histories ended; retry, or see the server's log")
