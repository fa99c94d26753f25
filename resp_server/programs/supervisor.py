"""Runs a program of ours as a child, and starts it again if a signal ends it: a process of its own that does no more.

    python -I supervisor.py COMMAND ...

A server maps its stores' files. One that is cut short under it ends it by a signal (SIGBUS), which no process survives:
the next one finds the store damaged and has it built anew. COMMAND is told by `SUPERVISED` in its environment which
descriptor it reads to see that this process ends, and which one it writes its ports to (JSON, one line); it has the
same ports after a restart. Signals are passed on. A child that ends by itself ends this one, with the same code.

Nothing of ours is imported here, so that this process stays small.
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
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A child that dies is started again at once, then after pauses that double up to the longest (guess).
PAUSE_S = 1.0
PAUSE_S_MAX = 60.0
PORTS_BYTES_MAX = 4096


class Supervisor:
    """Keeps one child."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: Mapping[str, int] = {}
        self._is_told = False
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)

    def run(self) -> int:
        """Keep a child running until one ends by itself or was told to; return its exit code."""
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            code = self._run_child()
            if code >= 0 or self._is_told:
                return code if code >= 0 else 128 - code
            if time.monotonic() - began_s > PAUSE_S_MAX:
                pause_s = 0.0
            name = signal.Signals(-code).name
            print(f"sparkis: the server was ended by {name}; starting it again in {pause_s:g} s", file=sys.stderr)
            self._rest(pause_s)
            if self._is_told:
                return 0
            pause_s = min(max(2 * pause_s, PAUSE_S), PAUSE_S_MAX)

    def _run_child(self) -> int:
        lifeline, held = os.pipe()
        ports, told = os.pipe()
        environment = os.environ | {SUPERVISED: json.dumps({"lifeline": lifeline, "told": told, **self._ports})}
        try:
            self._process = subprocess.Popen(self._command, env=environment, pass_fds=(lifeline, told))
            if self._is_told:
                self._process.terminate()
            os.close(told)
            told = -1
            line = os.read(ports, PORTS_BYTES_MAX)  # nothing if it ends before
            self._ports = json.loads(line) if line else self._ports
            return self._process.wait()
        finally:
            for descriptor in (lifeline, held, ports, told):
                if descriptor >= 0:
                    os.close(descriptor)

    def _rest(self, pause_s: float) -> None:
        ends_s = time.monotonic() + pause_s
        while not self._is_told and (left_s := ends_s - time.monotonic()) > 0:
            time.sleep(min(left_s, PAUSE_S / 10))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._is_told |= number != signal.SIGHUP
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def supervise() -> None:
    """Have this very program run as a child from now on; it does not return."""
    command = [sys.executable, "-I", os.path.abspath(__file__), sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(Supervisor(sys.argv[1:]).run())
