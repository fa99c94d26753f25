"""Waits for one of our programs, its child, and restarts it if a signal ends it. This process does nothing else.

    python -I supervisor.py PID LIFELINE PORTS COMMAND ...

A server maps the files of its stores. If a mapped file is truncated, SIGBUS ends the server; the next one finds the
store damaged and rebuilds it.

The first child, PID, is a fork of a process that has imported the program and read its options (`supervise`); that
process then becomes the supervisor, so nothing is imported twice, and the supervisor stays small: it imports none of
our modules. COMMAND starts each later child. Two pipes lead to a child. `lifeline` closes when this process ends, and
the child writes its ports to `ports` (JSON, one line); LIFELINE and PORTS are this process' ends of the first child's
pipes. A later child reads the descriptors of its own ends from the variable `SUPERVISED` (JSON), and the ports to reuse
(`port`, `tls_port` and others).

Signals are forwarded. When the child exits by itself, this process exits with the same code. A child inherits the
listening sockets that systemd has passed to this process (LISTEN_FDS).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

SUPERVISED = "SPARKIS_SUPERVISED"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A child that dies is restarted at once, then after pauses that double up to the longest (guess).
PAUSE_S = 1.0
PAUSE_S_MAX = 60.0
PORTS_BYTES_MAX = 4096


class Supervisor:
    """Waits for one child, and restarts it.

    Args:
        child: The process id of the first child.
        lifeline: This process' end of the pipe that closes when this process ends.
        ports: The end of the pipe to which the child writes its ports.
        command: Starts a later child.
    """

    def __init__(self, child: int, lifeline: int, ports: int, command: Sequence[str]) -> None:
        self._child: int | None = child
        self._pipes: Sequence[int] = (lifeline, ports)
        self._command = list(command)
        self._ports: Mapping[str, int] = {}
        self._is_stopping = False
        for number in FORWARDED:
            signal.signal(number, self._forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # `supervise` has blocked them

    def run(self) -> int:
        """Wait for the child, and restart it after a crash; return its exit code when it exits or is stopped."""
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            code = self._wait()
            if code >= 0 or self._is_stopping:
                return code if code >= 0 else 128 - code
            if time.monotonic() - began_s > PAUSE_S_MAX:
                pause_s = 0.0
            name = signal.Signals(-code).name
            log(f"the server was ended by {name}; starting it again in {pause_s:g} s")
            self._pause(pause_s)
            if self._is_stopping:
                return 0
            pause_s = min(max(2 * pause_s, PAUSE_S), PAUSE_S_MAX)
            self._start()

    def _wait(self) -> int:
        """Read the ports of the child and wait for its end; return its exit code, below 0 for a signal."""
        assert self._child is not None
        line = os.read(self._pipes[1], PORTS_BYTES_MAX)  # empty if the child ends before
        self._ports = json.loads(line) if line else self._ports
        os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOWAIT)
        # A signal that comes from here on is sent to no other process with the same id.
        ended, self._child = self._child, None
        _, status = os.waitpid(ended, 0)
        for pipe in self._pipes:
            os.close(pipe)
        return os.waitstatus_to_exitcode(status)

    def _start(self) -> None:
        lifeline_end, ports_output, lifeline, ports = child_pipes()
        self._pipes = (lifeline_end, ports_output)
        for each in (lifeline, ports):
            os.set_inheritable(each, True)
        supervised = {SUPERVISED: json.dumps({"lifeline": lifeline, "ports": ports, **self._ports})}
        # The child inherits this, and takes signals once it has handlers (see `command_line.Program`).
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        was_stopping = self._is_stopping
        self._child = os.posix_spawn(self._command[0], self._command, os.environ | supervised)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if was_stopping:
            os.kill(self._child, signal.SIGTERM)
        for each in (lifeline, ports):
            os.close(each)

    def _pause(self, pause_s: float) -> None:
        deadline_s = time.monotonic() + pause_s
        while not self._is_stopping and (remaining_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(remaining_s, PAUSE_S / 10))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping |= number != signal.SIGHUP
        if self._child is not None:
            os.kill(self._child, number)


def log(message: str) -> None:
    """Log a line in the format that the server was started with (see `state_backend.log_lines`)."""
    is_json = os.environ.get("SPARKIS_CHILD_LOG", "").startswith("json ")
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    fields = {"time": at, "level": "error", "part": "sparkis.server", "pid": os.getpid(), "message": message}
    print(json.dumps(fields) if is_json else f"sparkis: {message}", file=sys.stderr)


def child_pipes() -> tuple[int, int, int, int]:
    """Return the ends of a child's two pipes: the lifeline's and the ports' of this process, and those of the child."""
    lifeline, lifeline_end = os.pipe()
    ports_output, ports_input = os.pipe()
    return lifeline_end, ports_output, lifeline, ports_input


def supervise() -> dict[str, int]:
    """Fork; this process becomes the supervisor of the fork, in which this returns what SUPERVISED has for a child."""
    sys.stdout.flush()
    sys.stderr.flush()
    *ours, lifeline, ports = child_pipes()
    # The supervisor takes signals once it has handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    if child := os.fork():
        for each in ours:
            os.set_inheritable(each, True)
        supervisor = [sys.executable, "-I", os.path.abspath(__file__), str(child), *map(str, ours)]
        os.execv(sys.executable, [*supervisor, sys.executable, *sys.orig_argv[1:]])
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for each in ours:
        os.close(each)
    return {"lifeline": lifeline, "ports": ports}


if __name__ == "__main__":
    first_child, its_lifeline, its_ports = map(int, sys.argv[1:4])
    exit_code = Supervisor(first_child, its_lifeline, its_ports, sys.argv[4:]).run()
    for each in FORWARDED:
        signal.signal(each, signal.SIG_IGN)  # in the process' last moments, one more would replace its exit code
    sys.exit(exit_code)
