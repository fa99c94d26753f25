"""Our programs that tests start are forks of a process that has imported them.

    use_forks()
    subprocess.run([sys.executable, "-m", "sparkis", "health", "--port", "7379"])
    process = forked(["-m", "resp_server.programs.serve", "--port", "0"], environment)

The tests start thousands of processes, and each server starts appliers and workers. Half of the processor time of a
test of a server was Python's start and its imports; a fork takes an eighth of it. A fork runs what a new Python would,
with the arguments, environment, folder and descriptors that `subprocess.Popen` was given, as a child of the process
that asked for it. What a start itself does is tested where tests run an installed package or an example, and where a
program's environment has STARTS.

A fork server has no threads and no open stores. That of the tests is a new Python, and a program that starts children
forks one before it begins. A fork server forks twice, and the process between the two ends. Meanwhile the process that
asks takes orphans, so the fork becomes its child: it waits for it and signals it as usual.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from ctypes import CDLL
from functools import cache
from pathlib import Path
from threading import Lock
from typing import IO, Any, NoReturn

from compat.forked_child import Child
from compat.forked_program import (
    ARGUMENT_BYTES_MAX,
    ASIDE,
    CODE,
    PROGRAMS,
    enter_host,
    import_programs,
    place,
    run_to_end,
    show_arguments,
)

ROOT = Path(__file__).parents[1]
MODULE = "compat.fork_server"
# In the environment of a program that is started, as are its children: a test is about a start itself, or reads the
# environment that the kernel shows.
STARTS = "TESTS_OF_SPARKIS_START_PROGRAMS"
# The programs that start children.
PARENTS = ("serve", "state_server", "worker", "proxy")
# The one that forks itself, unless it is a child: its first child is the server.
SUPERVISED = "serve"
# The subcommands of `sparkis` that are started.
STARTED = frozenset({"attach", "demo", "top", "ui"})
# The arguments and the environment of a program, which the kernel passes as one message (guess).
REQUEST_BYTES_MAX = 1 << 17
DESCRIPTORS_MAX = 64
STANDARD_DESCRIPTORS = 3
PR_SET_CHILD_SUBREAPER = 36
# The arguments of `Popen._execute_child` that are the ends of pipes.
PIPE_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class Process(subprocess.Popen[Any]):
    """A process as `subprocess.Popen` starts it, or a fork if it is one of our programs.

    It overrides the method of Python 3.11 to 3.14 that starts a child. All others are right for a fork, too.
    """

    # A process that holds the namespaces of the fork; 0: they are those of this process.
    _host = 0

    def _execute_child(self, *given: Any, **more: Any) -> None:
        start = inspect.signature(super()._execute_child).bind(*given, **more).arguments  # type: ignore[misc]
        if not self._is_forked(start):
            super()._execute_child(*given, **more)  # type: ignore[misc]
            return
        environment = dict(os.environ if start["env"] is None else start["env"])
        standard = (start["p2cread"], start["c2pwrite"], start["errwrite"])
        passed = {number: end if end != -1 else number for number, end in enumerate(standard)}
        passed |= {number: number for number in start["pass_fds"]}
        request = {
            "arguments": [os.fspath(word) for word in start["args"]][1:],
            "environment": environment,
            "folder": os.path.abspath(start["cwd"] or os.curdir),
            "is_new_session": bool(start["start_new_session"]),
            "process_group": start["process_group"],
            "blocked_signals": [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))],
            "descriptors": [*passed],
            "host": self._host,
        }
        self.pid = _server_for(environment).start(request, [*passed.values()])
        self._child_created = True
        self._close_pipe_fds(*(start[name] for name in PIPE_ENDS))  # type: ignore[attr-defined]

    def _is_forked(self, start: Mapping[str, Any]) -> bool:
        return is_forked(start)


class ForkedProcess(Process):
    """A fork that runs a program of any kind: `-m` and a module, `-c` and code, or a file."""

    def __init__(self, *given: Any, host: int = 0, **more: Any) -> None:
        self._host = host
        super().__init__(*given, **more)

    def _is_forked(self, start: Mapping[str, Any]) -> bool:
        return sys.platform == "linux"


def is_forked(start: Mapping[str, Any]) -> bool:
    """Return whether the arguments of `Popen` start one of our programs, in a way that a fork can."""
    args = start["args"]
    if sys.platform != "linux" or isinstance(args, (str, bytes, os.PathLike)) or len(args) < 3:
        return False
    is_command = args[2] == "sparkis" and not STARTED & {*args[3:4]}
    is_module = args[1] == "-m" and (args[2] in PROGRAMS or is_command)
    is_ours = args[0] == sys.executable and (is_module or [*args[1:]] == ["-c", CODE])
    is_plain = not start["shell"] and start["executable"] is None and start["preexec_fn"] is None
    return is_ours and is_plain and STARTS not in (os.environ if start["env"] is None else start["env"])


def use_forks() -> None:
    """Have this process start our programs as forks from now on, whatever module of it starts them."""
    subprocess.Popen = Process  # type: ignore[misc]
    asyncio.create_subprocess_exec = _started  # type: ignore[assignment]


_started_by_asyncio = asyncio.create_subprocess_exec
# The options of `asyncio.create_subprocess_exec` that a fork can have.
PLAIN = {"shell": False, "executable": None, "preexec_fn": None, "env": None}


async def _started(*command: str, limit: int = 1 << 16, **options: Any) -> Any:
    """Start a child as `asyncio.create_subprocess_exec` does: one of our programs as a fork."""
    if not is_forked({"args": command, **PLAIN, **options}):
        return await _started_by_asyncio(*command, limit=limit, **options)
    child = Child(Process(command, bufsize=0, **options))
    await child.connect(limit)
    return child


def forked(
    arguments: Sequence[str], environment: Mapping[str, str], *, errors: IO[bytes] | None = None, host: int = 0
) -> subprocess.Popen[bytes]:
    """Run a program with the arguments that a Python takes; stdin and stdout are pipes.

    Args:
        errors: Its standard error; None: that of this process.
        host: The process that holds the namespaces in which the program runs; 0: those of this process.
    """
    pipe = subprocess.PIPE
    words = [sys.executable, *arguments]
    return ForkedProcess(words, stdin=pipe, stdout=pipe, stderr=errors, env=environment, host=host)


class ForkServer:
    """A process that forks, as the one that asks sees it. It ends when the latter does."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests, self._lock = requests, Lock()

    def start(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Run a program as a child of this process; return its process id.

        Args:
            request: What `_become` takes.
            descriptors: Those of the program, in the order of the request's numbers.
        """
        with self._lock:
            take_orphans(True)
            socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
            pid = int(self._requests.recv(64))
            take_orphans(False)
        return pid


def take_orphans(is_wanted: bool) -> None:
    """Have the kernel make the orphans among this process's descendants its children from now on, or not."""
    CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0)


# The fork server that this process, a fork, has forked before its program began.
_own: list[ForkServer] = []


def _server_for(environment: Mapping[str, str]) -> ForkServer:
    with _lock:
        return _own[0] if _own else _started_server("SPARKIS_PURE" in environment, os.getpid())


_lock = Lock()


@cache
def _started_server(is_pure: bool, pid: int) -> ForkServer:
    """Start the fork server of a process of tests. is_pure: it does not import the compiled core."""
    environment = {name: text for name, text in os.environ.items() if name != "SPARKIS_PURE"}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # The last argument is room for the arguments of forks (see `show_arguments`). Nothing waits for this process.
        command = [sys.executable, "-m", MODULE, str(theirs.fileno()), " " * ARGUMENT_BYTES_MAX]
        environment |= {"SPARKIS_PURE": "1"} if is_pure else {}
        _servers.append(
            subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
        )
    return ForkServer(ours)


_servers: list[subprocess.Popen[bytes]] = []


def begin(arguments: Sequence[str]) -> None:
    """Fork the fork server of this process, a fork itself, if it runs a program that starts children."""
    what, program, command = (*arguments, "", "")[:3]
    name = command.replace("-", "_") if program == "sparkis" else program.rpartition(".")[2]
    is_parent = what == "-m" and name in PARENTS
    if not (is_parent or (what == "-c" and "resp_server.programs" in program)) or STARTS in os.environ:
        return
    if name == SUPERVISED and "--child" not in arguments:
        _begin_in_next_fork()
    else:
        _fork_own()


def _begin_in_next_fork() -> None:
    """Fork the fork server of the process that this one forks next, in there: it is the one that starts children."""
    to_begin = [_fork_own]

    def begin_once() -> None:
        while to_begin:
            to_begin.pop()()

    os.register_at_fork(after_in_child=begin_once)


def _fork_own() -> None:
    """Fork the fork server of this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        # Another process may wait for the end of one of these.
        os.closerange(STANDARD_DESCRIPTORS, theirs.fileno())
        os.closerange(theirs.fileno() + 1, ASIDE)
        show_arguments(["-m", MODULE])
        _fork_on_request(theirs)
    theirs.close()
    _own.append(ForkServer(ours))
    use_forks()


def _fork_on_request(requests: socket.socket) -> NoReturn:
    """Fork for each request until the process that asks has ended; run the program in the fork."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the process that asks, whose end ends this one
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, DESCRIPTORS_MAX)
        if not request:
            os._exit(0)
        (reading, writing), (begun, begin_it) = os.pipe(), os.pipe()
        between = os.fork()
        if not between:
            told = json.loads(request)
            enter_host(told["host"])
            if child := os.fork():
                os.write(writing, b"%d" % child)
                os._exit(0)
            for each in (reading, writing, begin_it):
                os.close(each)
            requests.close()
            os.read(begun, 1)  # until it is a child of the process that asks
            os.close(begun)
            _become(told, descriptors)
        os.close(writing)
        os.waitpid(between, 0)
        os.close(begin_it)
        pid = os.read(reading, 64)
        for each in (reading, begun, *descriptors):
            os.close(each)
        requests.send(pid)


def _become(told: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Run a program in this process, a fork."""
    if told["is_new_session"]:
        os.setsid()
    if told["process_group"] != -1:
        os.setpgid(0, told["process_group"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, told["blocked_signals"])
    place(descriptors, told["descriptors"])
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    show_arguments(told["arguments"])
    begin(told["arguments"])
    run_to_end(told["arguments"])


def main() -> None:
    """Import all programs, and run each request in a fork."""
    import_programs()
    _fork_on_request(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    from compat import fork_server  # forks find the module by its name, and not only as `__main__`

    fork_server.main()
