"""The line between the master and a worker: JSON objects, one a line, and with some of them a client's socket.

A socket pair of the Unix kind. Nothing here blocks, except `stand_still`, which is meant to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("sparkis.server")

Line = Mapping[str, Any]
# Takes a line, and the file descriptor that came with it, if one did: it is the taker's to close. None also stands for
# one that the system could not give to this process.
Take = Callable[[dict[str, Any], "int | None"], None]

READ_BYTES = 256 << 10
# Of one read; each socket is sent by itself, so that there is hardly ever more than one.
SOCKETS_PER_READ_MAX = 32
# More than any line: that of a job's descriptors has 16 MiB at most.
UNSENT_BYTES_MAX = 64 << 20
# Says that a socket comes with the line.
HANDS_OVER = "hands_over"


class Channel:
    """One end. `take` gets each line, on the loop's thread; `ended` is called once, when the other end is gone."""

    def __init__(self, end: socket.socket, take: Take, ended: Callable[[], None]) -> None:
        end.setblocking(False)
        self._socket = end
        self._take = take
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._lines: deque[bytes] = deque()
        self._unfinished = b""
        self._handed: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, socket.socket | None]] = deque()
        self._unsent_bytes = 0
        self.is_open = True
        self._loop.add_reader(end, self._receive)

    def send(self, line: Line, handed: socket.socket | None = None) -> None:
        """Send a line, now or as soon as there is room; with it a socket, which is closed here once it is sent."""
        if not self.is_open:
            if handed is not None:
                handed.close()
            return
        text = json.dumps({**line, HANDS_OVER: True} if handed is not None else line).encode() + b"\n"
        self._unsent.append((memoryview(text), handed))
        self._unsent_bytes += len(text)
        if len(self._unsent) == 1:
            self._flush()
        if self._unsent_bytes > UNSENT_BYTES_MAX:
            logger.error("%d bytes wait for a process that does not read them; it is given up", self._unsent_bytes)
            self.close()

    def stand_still(self, is_over: Callable[[], bool], seconds_max: float) -> bool:
        """Hold the whole process up, but for lines, until something is over; return whether it was in time."""
        poll = select.poll()
        ends = self._loop.time() + seconds_max
        while self.is_open and not is_over():
            left_s = ends - self._loop.time()
            if left_s <= 0:
                return False
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poll.poll(left_s * 1000)
            self._flush()
            self._receive()
        return True

    def close(self) -> None:
        """Let go of this end; the other one sees it."""
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for _, handed in self._unsent:
            if handed is not None:
                handed.close()
        self._unsent.clear()
        for descriptor in self._handed:
            os.close(descriptor)
        self._handed.clear()
        self._ended()

    def _flush(self) -> None:
        while self._unsent:
            text, handed = self._unsent[0]
            try:
                sent = socket.send_fds(self._socket, [text], [] if handed is None else [handed.fileno()])
            except BlockingIOError:
                break
            except OSError:
                self.close()
                return
            if handed is not None:
                handed.close()  # it went with the first byte
            self._unsent_bytes -= sent
            self._unsent[0] = text[sent:], None
            if sent == len(text):
                self._unsent.popleft()
        if self._unsent:
            self._loop.add_writer(self._socket, self._flush)
        else:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        if not self.is_open:
            return
        try:
            data, handed, _, _ = socket.recv_fds(self._socket, READ_BYTES, SOCKETS_PER_READ_MAX)
        except BlockingIOError:
            return
        except OSError:
            data, handed = b"", []
        self._handed.extend(handed)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        self._lines.extend(lines)
        while self._lines:  # taking a line may stand still, and take the next ones there
            self._take_line(self._lines.popleft())
        if not data:
            self.close()

    def _take_line(self, text: bytes) -> None:
        line = json.loads(text)
        try:
            self._take(line, self._handed.popleft() if line.pop(HANDS_OVER, False) and self._handed else None)
        except Exception:
            logger.exception("a line between the server's processes was not understood: %s", line.get("event"))
