"""Run our programs as forks of a process that has imported them: an eighth of the processor time of a new Python.

    process = forked(["-m", "resp_server.programs.serve", "--port", "0"], environment)

The tests start a thousand servers, and each server starts appliers and workers. Half of the processor time of a test of
a server was Python's start and its imports. A fork runs what a new Python with the same arguments would: a module, a
script or code, with the caller's environment, folder and stderr. So do the children of a fork (see `compat.nursery`).
What a start itself does is tested where tests run the commands of users.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from threading import Lock

from compat import nursery
from compat.forked_program import ARGUMENT_BYTES_MAX, IMPORTED, run_to_end, show_arguments

# The arguments and the environment of a program, which the kernel passes as one message (guess).
REQUEST_BYTES_MAX = 1 << 17


class ForkedProcess:
    """A running fork, with the methods of `subprocess.Popen`; stdin and stdout are pipes."""

    def __init__(self, pid: int, status: int, stdin: int, stdout: int, arguments: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = open(stdin, "wb")  # noqa: SIM115  # its user closes it
        self.stdout = open(stdout, "rb")  # noqa: SIM115
        self._status = open(status, "rb")  # noqa: SIM115
        self._arguments = arguments

    def __repr__(self) -> str:
        return f"<forked: {' '.join(self._arguments[:2])}, process {self.pid}, exit code {self.returncode}>"

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self.returncode if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code, or minus the signal. TimeoutExpired after `timeout` seconds."""
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(list(self._arguments), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(self._status.read())
            self._status.close()
        return self.returncode is not None

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that forks. It ends when the process that started it does."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = Lock()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            # The last argument is room for the arguments of forks (see `show_arguments`).
            command = [sys.executable, "-m", "compat.fork_server", str(other.fileno()), " " * ARGUMENT_BYTES_MAX]
            # Not waited for: it ends with this process.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], env=dict(environment)
            )

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        """Run a program."""
        request = json.dumps({"arguments": arguments, "environment": dict(environment), "folder": os.getcwd()})
        (stdin, ours_in), (ours_out, stdout), (ours_status, status) = os.pipe(), os.pipe(), os.pipe()
        theirs = [stdin, stdout, 2, status]
        with self._lock:
            socket.send_fds(self._socket, [request.encode()], theirs)
            pid = int(self._socket.recv(64))
        for descriptor in (stdin, stdout, status):
            os.close(descriptor)
        return ForkedProcess(pid, ours_status, ours_in, ours_out, arguments)


@cache
def _fork_server(is_pure: bool) -> ForkServer:
    """Return this process's fork server. is_pure: it has not imported the compiled core."""
    environment = dict(os.environ)
    environment.pop("SPARKIS_PURE", None)
    return ForkServer(environment | ({"SPARKIS_PURE": "1"} if is_pure else {}))


_lock = Lock()


def forked(arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
    """Run a program with the arguments that a Python takes: `-m` and a module, `-c` and code, or a file."""
    with _lock:
        server = _fork_server("SPARKIS_PURE" in environment)
    return server.start(arguments, environment)


class _Children:
    """The running forks of a fork server, whose ends it reports."""

    def __init__(self) -> None:
        self._status: dict[int, int] = {}
        self.woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *ignored: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def add(self, pid: int, status: int) -> None:
        self._status[pid] = status

    def reap(self) -> None:
        """Report the exit codes of all that have ended."""
        self.woken.recv(4096)
        while self._status:
            pid, waited = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            status = self._status.pop(pid)
            try:
                os.write(status, b"%d" % os.waitstatus_to_exitcode(waited))
            except BrokenPipeError:  # nobody wants to know
                pass
            os.close(status)

    def leave(self) -> None:
        """Forget all of it, in a fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (self.woken, self._waker):
            each.close()
        for status in self._status.values():
            os.close(status)


def _fork_on_request(requests: socket.socket) -> bytes:
    """Fork for each request until the other side is closed. Return the request in the fork, and nothing at the end."""
    children = _Children()
    while True:
        ready, _, _ = select.select([requests, children.woken], [], [])
        if children.woken in ready:
            children.reap()
        if requests not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 4)
        if not request:
            return b""
        pid = os.fork()
        if not pid:
            children.leave()
            os.close(descriptors.pop())
            for standard, descriptor in enumerate(descriptors):
                os.dup2(descriptor, standard)
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        if not pid:
            return request
        children.add(pid, descriptors[3])
        requests.send(b"%d" % pid)


def main() -> None:
    """Import all programs, and run each request in a fork."""
    for name in IMPORTED:
        import_module(name)
    for name in IMPORTED:
        del sys.modules[name]  # what it imports stays; `runpy` runs it as `__main__`, and warns if it is imported
    gc.collect()
    gc.freeze()  # a collection in a fork would write to all pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        request = _fork_on_request(requests)
    if request:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        told = json.loads(request)
        os.environ.clear()
        os.environ.update(told["environment"])
        os.chdir(told["folder"])
        show_arguments(told["arguments"])
        nursery.begin(told["arguments"])
        run_to_end(told["arguments"])


if __name__ == "__main__":
    main()
