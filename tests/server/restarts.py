"""Clients that read all the time while a server is replaced, and what systemd does for a socket unit."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from compat.conformance.wire import request
from compat.waiting import READ_PAUSE_S

GET = request("GET", "job:s:a")
VALUE = b"$1\r\n1\r\n"
# Every second client makes a new connection after so many reads, as short-lived programs do; the others keep theirs.
READS_PER_CONNECTION = 20
# What systemd does for a service: pass the socket as descriptor 3, and name the process, which is not forked again.
ACTIVATED = 'LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"'


class Readers:
    """Reading clients. They behave as client libraries do: a connection that the server has closed is made anew.

    counts: `read`, the right values; `reconnected`, reads on a new connection because the server had closed the old one
    before any byte of a reply; everything else is a failure, by its text.
    """

    def __init__(self, port: int, clients: int = 4) -> None:
        self._port = port
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run, args=[i % 2], daemon=True) for i in range(clients)]
        for each in self._threads:
            each.start()

    @property
    def read(self) -> int:
        """How many values were read."""
        return self.counts["read"]

    def end(self) -> dict[str, int]:
        """Stop reading; return the counts of what failed."""
        self._is_over.set()
        for each in self._threads:
            each.join()
        return {what: count for what, count in self.counts.items() if what not in ("read", "reconnected")}

    def _run(self, is_brief: bool) -> None:
        connection: socket.socket | None = None
        done = 0
        while not self._is_over.wait(READ_PAUSE_S):
            is_new = connection is None
            try:
                connection = connection or socket.create_connection(("127.0.0.1", self._port), 30)
                what = "reconnected" if not is_new and _is_closed(connection) else _read(connection)
            except OSError as error:
                what = f"no connection: {error!r}"
            if what == "closed":
                what = "reconnected" if not is_new else "closed before the first reply"
            with self._lock:
                self.counts[what] += 1
            done += 1
            is_done = what != "read" or (is_brief and done % READS_PER_CONNECTION == 0)
            if connection is not None and is_done:
                connection.close()
                connection = None


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the server has closed an idle connection, as client libraries find out before they send."""
    return bool(select.select([connection], [], [], 0)[0])


def _read(connection: socket.socket) -> str:
    data = b""
    try:
        connection.sendall(GET)
        while len(data) < len(VALUE):
            some = connection.recv(64)
            if not some:
                break
            data += some
    except OSError as error:
        return f"in the middle of a reply: {error!r}" if data else "closed"
    if not data:
        return "closed"
    return "read" if data == VALUE else f"wrong reply {data!r}"


@contextmanager
def socket_unit() -> Iterator[socket.socket]:
    """Open a listening socket as systemd does for a socket unit."""
    with socket.create_server(("127.0.0.1", 0), backlog=511) as listener:
        yield listener


def activated(listener: socket.socket, arguments: Sequence[str]) -> int:
    """Start `sparkis ARGUMENTS` with the socket as systemd does; return the process id."""
    words = ["/bin/sh", "-c", ACTIVATED, "sh", sys.executable, "-m", "sparkis", *arguments]
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.dup2(listener.fileno(), 3)
            os.closerange(4, 64)
            os.execv(words[0], words)
        os._exit(127)
    return pid
