"""Runs one of our programs as a child process, and restarts it if a signal ends it. This process does nothing else.

    python -I supervisor.py COMMAND ...

A server maps the files of its stores. If a mapped file is truncated, SIGBUS ends the server; the next one finds the
store damaged and rebuilds it. The variable `SUPERVISED` in COMMAND's environment is JSON: `lifeline` is the descriptor
that closes when this process ends, `ports` the one to which the child writes its ports (JSON, one line), and `port`,
`tls_port` and others are the ports to reuse after a restart. Signals are forwarded. When the child exits by itself,
this process exits with the same code. Listening sockets that systemd has passed to this process (LISTEN_FDS) are passed
on to the child.

It imports none of our modules, so it stays small.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
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
    """Runs and restarts one child."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: Mapping[str, int] = {}
        self._is_stopping = False
        for number in FORWARDED:
            signal.signal(number, self._forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # `supervise` has blocked them

    def run(self) -> int:
        """Run the child, and restart it after a crash; return its exit code when it exits or is stopped."""
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            code = self._run_child()
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

    def _run_child(self) -> int:
        lifeline, lifeline_end = os.pipe()
        ports_output, ports_input = os.pipe()
        environment = os.environ | {SUPERVISED: json.dumps({"lifeline": lifeline, "ports": ports_input, **self._ports})}
        try:
            passed = (lifeline, ports_input, *listening_sockets())
            # The child inherits this, and takes signals once it has handlers (see `command_line.Program`).
            signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
            self._process = subprocess.Popen(self._command, env=environment, pass_fds=passed)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            if self._is_stopping:
                self._process.terminate()
            os.close(ports_input)
            ports_input = -1
            line = os.read(ports_output, PORTS_BYTES_MAX)  # empty if the child ends before
            self._ports = json.loads(line) if line else self._ports
            return self._process.wait()
        finally:
            for descriptor in (lifeline, lifeline_end, ports_output, ports_input):
                if descriptor >= 0:
                    os.close(descriptor)

    def _pause(self, pause_s: float) -> None:
        deadline_s = time.monotonic() + pause_s
        while not self._is_stopping and (remaining_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(remaining_s, PAUSE_S / 10))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping |= number != signal.SIGHUP
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def log(message: str) -> None:
    """Log a line in the format that the server was started with (see `state_backend.log_lines`)."""
    is_json = os.environ.get("SPARKIS_CHILD_LOG", "").startswith("json ")
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    fields = {"time": at, "level": "error", "part": "sparkis.server", "pid": os.getpid(), "message": message}
    print(json.dumps(fields) if is_json else f"sparkis: {message}", file=sys.stderr)


def listening_sockets() -> range:
    """Return the descriptors of the sockets that systemd has passed (see `net.passed_sockets`)."""
    is_ours = os.environ.get("LISTEN_PID") == str(os.getpid())
    return range(3, 3 + int(os.environ.get("LISTEN_FDS", "0"))) if is_ours else range(0)


def supervise() -> None:
    """Replace this process by a supervisor that runs this same program as its child; never returns."""
    command = [sys.executable, "-I", os.path.abspath(__file__), sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until the new program has handlers
    os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(Supervisor(sys.argv[1:]).run())
