"""The channel between the master and a worker: JSON objects, one per line, some with a client's socket.

It is a Unix socket pair. Only `block_until` blocks.
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
# Handles a line and the file descriptor sent with it, which the handler closes. None: no descriptor was sent, or the
# system could not give it to this process.
OnLine = Callable[[dict[str, Any], "int | None"], None]

READ_BYTES = 256 << 10
# Sockets in one read. Each line has at most one socket, so there is rarely more than one.
SOCKETS_PER_READ_MAX = 32
# More than any line: the longest, with a job's descriptors, has at most 16 MiB.
UNSENT_BYTES_MAX = 64 << 20
# The field of a line that is sent with a socket.
HAS_SOCKET = "has_socket"


class Channel:
    """One end of a channel. `take` gets each line, on the loop's thread; `ended` is called once, at its end."""

    def __init__(self, end: socket.socket, take: OnLine, ended: Callable[[], None]) -> None:
        end.setblocking(False)
        self._socket = end
        self._take = take
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._lines: deque[bytes] = deque()
        self._unfinished = b""
        self._received_sockets: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, socket.socket | None]] = deque()
        self._unsent_bytes = 0
        self.is_open = True
        self._loop.add_reader(end, self._receive)

    def send(self, line: Line, passed_socket: socket.socket | None = None) -> None:
        """Send a line, queued if the pipe is full, optionally with a socket, which is closed here after sending."""
        if not self.is_open:
            if passed_socket is not None:
                passed_socket.close()
            return
        text = json.dumps({**line, HAS_SOCKET: True} if passed_socket is not None else line).encode() + b"\n"
        self._unsent.append((memoryview(text), passed_socket))
        self._unsent_bytes += len(text)
        if len(self._unsent) == 1:
            self._flush()
        if self._unsent_bytes > UNSENT_BYTES_MAX:
            logger.error("a process does not read %d queued bytes; its channel is closed", self._unsent_bytes)
            self.close()

    def block_until(self, is_finished: Callable[[], bool], seconds_max: float) -> bool:
        """Block the whole process, except for lines, until `is_finished` is true; False after `seconds_max`."""
        poll = select.poll()
        ends = self._loop.time() + seconds_max
        while self.is_open and not is_finished():
            remaining_s = ends - self._loop.time()
            if remaining_s <= 0:
                return False
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poll.poll(remaining_s * 1000)
            self._flush()
            self._receive()
        return True

    def close(self) -> None:
        """Close this end; the other end is notified."""
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for _, passed_socket in self._unsent:
            if passed_socket is not None:
                passed_socket.close()
        self._unsent.clear()
        for descriptor in self._received_sockets:
            os.close(descriptor)
        self._received_sockets.clear()
        self._ended()

    def _flush(self) -> None:
        while self._unsent:
            text, passed_socket = self._unsent[0]
            try:
                sent = socket.send_fds(self._socket, [text], [] if passed_socket is None else [passed_socket.fileno()])
            except BlockingIOError:
                break
            except OSError:
                self.close()
                return
            if passed_socket is not None:
                passed_socket.close()  # it was sent with the first byte
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
            data, descriptors, _, _ = socket.recv_fds(self._socket, READ_BYTES, SOCKETS_PER_READ_MAX)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        self._received_sockets.extend(descriptors)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        self._lines.extend(lines)
        while self._lines:  # handling a line may call `block_until`, which handles the next lines
            self._take_line(self._lines.popleft())
        if not data:
            self.close()

    def _take_line(self, text: bytes) -> None:
        line = json.loads(text)
        try:
            has_socket = line.pop(HAS_SOCKET, False)
            self._take(line, self._received_sockets.popleft() if has_socket and self._received_sockets else None)
        except Exception:
            logger.exception("a line between the server's processes could not be handled: %s", line.get("event"))
