"""Additions to asyncio's transports and sockets: immediate end, unread input, keepalive, isolated errors, timeouts."""

from __future__ import annotations

import array
import asyncio
import fcntl
import socket
import termios
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from time import monotonic
from typing import Concatenate, ParamSpec, Protocol, TypeVar

# Linux refuses a longer pause before the probes of keepalive (MAX_TCP_KEEPIDLE).
KEEPALIVE_S_MAX = 32_767


class Breakable(Protocol):
    """A connection that can be closed because of an exception."""

    def close_on_error(self, error: Exception) -> None:
        """Close the connection because of an exception outside of a request. Never raises."""


ConnectionT = TypeVar("ConnectionT", bound=Breakable)
Arguments = ParamSpec("Arguments")


def isolated(
    method: Callable[Concatenate[ConnectionT, Arguments], None],
) -> Callable[Concatenate[ConnectionT, Arguments], None]:
    """Decorate a connection's method: an exception closes this connection only, and never reaches the caller."""

    @wraps(method)
    def run(self: ConnectionT, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        try:
            method(self, *arguments, **named)
        except Exception as error:
            self.close_on_error(error)

    return run


def end_now(transport: asyncio.BaseTransport) -> None:
    """Let the peer see the end now, before anything that other connections send later in this turn."""
    sock = transport.get_extra_info("socket")
    if sock is None or transport.is_closing():  # None: of a closed transport with TLS
        return  # its descriptor may be that of another connection already
    # uvloop's sockets have no `shutdown`, so a second descriptor is used. OSError: the connection has ended already.
    with suppress(OSError), socket.fromfd(sock.fileno(), sock.family, sock.type) as same:
        same.shutdown(socket.SHUT_RDWR)


def unread_bytes(transport: asyncio.BaseTransport) -> int:
    """Return how many bytes have arrived at a transport's socket that nobody has read; 0 if it is closed."""
    size = array.array("i", [0])
    try:
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, size)
    except (OSError, ValueError):
        return 0
    return size[0]


def keep_alive(sock: socket.socket, seconds: int) -> None:
    """Turn TCP keepalive on: the first probe after `seconds`, then up to three probes at a third of that interval."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        pause_s = min(seconds, KEEPALIVE_S_MAX)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, pause_s // 3))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class AwakeClock:
    """A clock for the timeouts of peers, which counts only the time in which this process was running.

    While a process is stopped, or its machine sleeps, it reads no messages. With the system's clock all its peers would
    time out when it resumes, because a timer may run before the process reads the messages that have arrived.

    Call it for the time in seconds. Call `tick` often: between two ticks it advances by at most `step_s_max`.
    """

    def __init__(self, step_s_max: float, time: Callable[[], float] = monotonic) -> None:
        self._time = time
        self._step_s_max = step_s_max
        self._ticked_s = self._time_s = time()

    def __call__(self) -> float:
        return self._time_s + min(self._time() - self._ticked_s, self._step_s_max)

    def tick(self) -> float:
        """Advance the clock, and return the time."""
        now_s = self._time()
        self._time_s += min(now_s - self._ticked_s, self._step_s_max)
        self._ticked_s = now_s
        return self._time_s
