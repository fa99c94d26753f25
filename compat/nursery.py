"""The children of a forked program are forks, too: a server's appliers and workers, and the server behind a proxy.

A program may have threads and open stores when it starts a child, so it cannot be forked then. Before it begins, it
forks a process that waits, its nursery. The nursery forks a child twice, and the process between the two ends. The
program asks the kernel for its orphans, so it is the child's parent: it waits for it and signals it as usual.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from ctypes import CDLL
from typing import Any

from compat.forked_program import IMPORTED, run_to_end, show_arguments

PR_SET_CHILD_SUBREAPER = 36
# The arguments and the environment of a child, which the kernel passes as one message (guess).
REQUEST_BYTES_MAX = 1 << 17
# A child's descriptors get their numbers from numbers that none of them has.
ASIDE = 512
# In the environment of a program whose children are started, not forked: a test reads their own environment.
STARTS_CHILDREN = "TESTS_OF_SPARKIS_START_CHILDREN"
PARENTS = ("serve", "state_server", "worker", "proxy")

_started_by_asyncio = asyncio.create_subprocess_exec


def begin(arguments: Sequence[str]) -> None:
    """Fork the nursery of this process, if it runs a program that starts children."""
    is_parent = arguments[0] == "-m" and arguments[1].rpartition(".")[2] in PARENTS
    if sys.platform != "linux" or not is_parent or STARTS_CHILDREN in os.environ:
        return
    CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # they are for the program, whose end ends this process
        show_arguments(["-m", __name__])
        _fork_children(theirs)
    theirs.close()
    _requests.append(ours)
    asyncio.create_subprocess_exec = _started  # type: ignore[assignment]


# The socket to this process's nursery.
_requests: list[socket.socket] = []


def _fork_children(requests: socket.socket) -> None:
    """Fork a child for each request until the program has ended. Returns never: it ends, or runs a child's program."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 64)
        if not request:
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            if child := os.fork():
                os.write(writing, b"%d" % child)
                os._exit(0)
            for each in (reading, writing):
                os.close(each)
            requests.close()
            _become_child(json.loads(request), descriptors)
        os.close(writing)
        os.waitpid(between, 0)  # from now on the child is the program's
        pid = os.read(reading, 64)
        for each in (reading, *descriptors):
            os.close(each)
        requests.send(pid)


def _become_child(told: dict[str, Any], descriptors: list[int]) -> None:
    """Run a child's program in this process. Returns never."""
    if told["is_new_session"]:
        os.setsid()
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        signal.signal(number, handler)
    aside = [fcntl.fcntl(each, fcntl.F_DUPFD, ASIDE) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(aside, told["descriptors"], strict=True):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(told["environment"])
    show_arguments(told["arguments"])
    _requests.clear()
    asyncio.create_subprocess_exec = _started_by_asyncio
    begin(told["arguments"])
    run_to_end(told["arguments"])


async def _started(
    *command: str,
    stdin: int | None = None,
    stdout: int | None = None,
    env: dict[str, str] | None = None,
    start_new_session: bool = False,
    pass_fds: Sequence[int] = (),
    limit: int = 1 << 16,
    **others: Any,
) -> Any:
    """Start a child as `asyncio.create_subprocess_exec` does: one of our programs by the nursery."""
    is_ours = command[0] == sys.executable and command[1] == "-m" and command[2] in IMPORTED and not others
    if not is_ours:
        given = {"stdin": stdin, "stdout": stdout, "env": env, "pass_fds": pass_fds, "limit": limit, **others}
        return await _started_by_asyncio(*command, start_new_session=start_new_session, **given)
    ends: list[int] = []
    theirs_in, ours_in = _pipe(stdin, 0)
    theirs_out, ours_out = _pipe(stdout, 1)
    passed = {number: end for number, end in ((0, theirs_in), (1, theirs_out)) if end is not None}
    ends += passed.values()
    passed |= {number: number for number in pass_fds}
    told = {
        "arguments": command[1:],
        "environment": dict(os.environ if env is None else env),
        "is_new_session": start_new_session,
        "descriptors": [*passed],
    }
    socket.send_fds(_requests[0], [json.dumps(told).encode()], [*passed.values()])
    pid = int(_requests[0].recv(64))
    for each in ends:
        os.close(each)
    child = Child(pid)
    await child.connect(ours_in, ours_out, limit)
    return child


def _pipe(given: int | None, number: int) -> tuple[int | None, int | None]:
    """Return the child's end and this process's end of a standard stream."""
    if given is None:
        return None, None
    if given == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDWR), None
    reading, writing = os.pipe()
    return (reading, writing) if number == 0 else (writing, reading)


class Child:
    """A running child, with the methods of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._descriptor = os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._reap)

    async def connect(self, stdin: int | None, stdout: int | None, limit: int) -> None:
        """Connect the standard streams."""
        if stdin is not None:
            pipe = os.fdopen(stdin, "wb", 0)
            transport, protocol = await self._loop.connect_write_pipe(_Flow, pipe)
            self.stdin = asyncio.StreamWriter(transport, protocol, None, self._loop)
        if stdout is not None:
            self.stdout = reader = asyncio.StreamReader(limit)
            await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stdout, "rb", 0))

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if not self._ended.done():
            self._ended.set_result(None)

    async def wait(self) -> int:
        """Wait for the end; return the exit code, or minus the signal."""
        await asyncio.shield(self._ended)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Flow(asyncio.streams.FlowControlMixin):
    """The protocol of a child's standard input."""

    async def _get_close_waiter(self, stream: asyncio.StreamWriter) -> None:
        return None
