"""Tells systemd how this program is doing (`sd_notify(3)`): datagrams to the socket that NOTIFY_SOCKET names.

The process whose event loop answers clients sends them. With a supervisor, that is not the unit's main process, so the
units have `NotifyAccess=all`. Processes that a program starts do not get the variables (`net.children`).

    READY=1          clients are answered; jobs may still be loading
    STATUS=...       a line for `systemctl status`
    RELOADING=1      with MONOTONIC_USEC, which `Type=notify-reload` needs; READY=1 follows
    STOPPING=1       no new clients
    WATCHDOG=1       the event loop runs, twice in each WatchdogSec
    EXTEND_TIMEOUT_USEC   the same before READY=1: a start that goes on is not ended by TimeoutStartSec
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable

logger = logging.getLogger("sparkis.server")

SOCKET_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE, WATCHDOG_PROCESS_VARIABLE = "WATCHDOG_USEC", "WATCHDOG_PID"
VARIABLES = (SOCKET_VARIABLE, WATCHDOG_VARIABLE, WATCHDOG_PROCESS_VARIABLE)

US_PER_S = 1_000_000
# Without a watchdog, a start still has to ask for more time (guess; systemd gives a start 90 s).
START_STEP_S = 10.0
# Longer than any pause of a start that goes on: a step that is late is not the end of the program.
START_EXTENSION_S = 60.0

Check = Callable[[], Awaitable[object]]


class ServiceManager:
    """Reports this program to systemd. Without NOTIFY_SOCKET it does nothing. Runs on the event loop's thread."""

    def __init__(self) -> None:
        address = os.environ.get(SOCKET_VARIABLE, "")
        self._watchdog_s = _watchdog_s()
        self._socket: socket.socket | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._check: Check | None = None
        self._serving = ""
        self._is_ready = False
        if address[:1] in ("/", "@"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._address = "\0" + address[1:] if address[0] == "@" else address
            self._feeding = asyncio.create_task(self._feed())

    def ready(self, status: str, check: Check | None = None) -> None:
        """Report that clients are answered.

        Args:
            status: What is served, and where.
            check: Returns while the processes that answer clients for this one run.
        """
        self._serving, self._check, self._is_ready = status, check, True
        self._send("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        """Report the program's status."""
        self._send(f"STATUS={status}")

    def reloading(self) -> None:
        """Report that files are read again, until `reloaded`."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=Reading its files again")

    def reloaded(self) -> None:
        """Report that all is as before, or `ready` would come too early."""
        if self._is_ready:
            self._send("READY=1", f"STATUS={self._serving}")

    def stopping(self) -> None:
        """Report that the program ends: it finishes requests."""
        self._is_ready = False
        self._send("STOPPING=1", "STATUS=Ending: requests are finished")

    async def _feed(self) -> None:
        while True:
            await asyncio.sleep(START_STEP_S if self._watchdog_s is None else self._watchdog_s / 2)
            if self._check is not None:
                await self._check()
            self._send("WATCHDOG=1", *([] if self._serving else [_extension()]))

    def _send(self, *assignments: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(assignments).encode(), self._address)
        except OSError as error:
            logger.warning("systemd was not told %s: %s", assignments[0], error)


def _extension() -> str:
    return f"EXTEND_TIMEOUT_USEC={int(START_EXTENSION_S * US_PER_S)}"


def _watchdog_s() -> float | None:
    """Return after which silence systemd restarts the unit; None: never."""
    of_process, us = os.environ.get(WATCHDOG_PROCESS_VARIABLE), os.environ.get(WATCHDOG_VARIABLE, "")
    # The main process of the unit is this one, or its supervisor.
    is_ours = of_process in (None, str(os.getpid()), str(os.getppid()))
    return int(us) / US_PER_S if is_ours and us.isdecimal() and int(us) else None
