"""Supervises one state server beside an executor. Spark's Python worker starts this process, which starts the server.

    python -m resp_server.programs.executor_supervisor --lock FD --watch PID:START --folder FOLDER -- COMMAND ...

This process inherits the lock file's descriptor and never closes it, so the lock lasts as long as this process. A task
that finds the lock taken knows that a server runs or is being started. PID is the executor's JVM. COMMAND runs in its
own session and is restarted when it dies. When PID ends, the server gets SIGTERM, some seconds to hand over its slots,
and SIGKILL. The server's stdin is a pipe from this process: if this process is killed, the pipe closes and the server
ends.

The server prints a line of JSON when it listens. That line and the server's stderr are copied to this process' stderr,
which is the executor's log: a limited number of lines a minute, and never blocking. FOLDER has the server's store,
which is removed with the executor, and two files for later tasks: `failed`, the error of the last start, and `ended`,
if the server was shut down for good.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

FAILED = "failed"
ENDED = "ended"
STORE = "store"

# The time that a server has for handing over its slots; longer than `registry.report.DRAIN_S_MAX`.
STOP_S_MAX = 5.0
# A server that dies is restarted at once, then after pauses that double up to a maximum (guess).
PAUSE_S = 1.0
PAUSE_S_MAX = 60.0
# Where the system has no pidfd, processes are polled this often.
POLL_S = 0.25
READ_BYTES = 65_536
LAST_READS_MAX = 16
LINE_BYTES_MAX = 2_000
LINES_A_MINUTE_MAX = 60


# Fields of /proc/<pid>/stat (`man 5 proc`), counted from the one after the process's name.
STATE_FIELD, START_TIME_FIELD = 0, 19
ENDED_STATES = "ZX"  # a zombie, and a process that is being removed


def start_of(pid: int) -> str | None:
    """Return the start time of a process, which no later process with the same id has; None if there is no process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # a name may have spaces and brackets
    return None if fields[STATE_FIELD] in ENDED_STATES else fields[START_TIME_FIELD]


class WatchedProcess:
    """A process whose end is detected. `descriptor`: a pidfd, readable at the end; None if the system has none."""

    def __init__(self, pid: int, start: str | None) -> None:
        self._pid = pid
        self._start = start
        self.descriptor: int | None = None
        with suppress(OSError, AttributeError):  # an older kernel, or a container that forbids it
            self.descriptor = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Return whether the process has ended; a new process with the same id does not count."""
        return self._start is None or start_of(self._pid) != self._start

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class StderrLog:
    """Non-blocking writes to stderr. Lines that do not fit, or exceed the rate, are dropped and counted."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        # The pipe is opened again, because O_NONBLOCK on the inherited descriptor would change it for all its writers.
        with suppress(OSError):
            self._descriptor = os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND | os.O_CLOEXEC)
        self._minute = 0.0
        self._lines = 0
        self._dropped = 0

    def write(self, line: bytes) -> None:
        """Write a line, given without its line end; long lines are cut."""
        now = time.monotonic()
        if now - self._minute >= 60:
            self._minute, self._lines = now, 0
        if self._lines >= LINES_A_MINUTE_MAX or self._descriptor is None:
            self._dropped += 1
            return
        self._lines += 1
        dropped_text = f" ({self._dropped} earlier lines were dropped)".encode() if self._dropped else b""
        try:
            os.write(self._descriptor, line[:LINE_BYTES_MAX] + dropped_text + b"\n")
            self._dropped = 0
        except OSError:  # the pipe is full or closed
            self._dropped += 1


class LineSplitter:
    """Splits the bytes of a pipe into lines; long lines are cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Return the completed lines."""
        *lines, rest = (self._rest + received).split(b"\n")
        self._rest = rest[:LINE_BYTES_MAX]
        return lines


class ExecutorSupervisor:
    """Runs the server until the executor ends, a signal comes, or the server ends with code 0."""

    def __init__(self, command: Sequence[str], executor: WatchedProcess, folder: Path) -> None:
        self._command = list(command)
        self._executor = executor
        self._folder = folder
        self._log = StderrLog()
        self._selector = selectors.DefaultSelector()
        self._process: subprocess.Popen[bytes] | None = None
        self._server_process: WatchedProcess | None = None
        self._lines: dict[int, LineSplitter] = {}
        self._last_error = b""
        self._has_started = False
        self._wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self._is_stopping = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._selector.register(self._wake, selectors.EVENT_READ)
        if executor.descriptor is not None:
            self._selector.register(executor.descriptor, selectors.EVENT_READ)

    def run(self) -> None:
        """Run and restart the server until the end."""
        pause_s = 0.0
        while True:
            started_s = time.monotonic()
            self._start()
            while not self._has_ended():
                if self._should_stop():
                    self._stop_server()
                    return
                self._wait_for_events(None)
            code = self._reap()
            if code == 0 and not self._should_stop():
                (self._folder / ENDED).touch()
                self._log_line("the state server was requested to end")
                return
            if time.monotonic() - started_s > PAUSE_S_MAX:
                pause_s = 0.0
            if not self._has_started:
                self._write_failure(
                    f"the state server ended with code {code}: {self._last_error.decode(errors='replace')}"
                )
            self._log_line(f"the state server ended with code {code}; starting another in {pause_s:g} s")
            if self._pause(pause_s):
                return
            pause_s = min(max(2 * pause_s, PAUSE_S), PAUSE_S_MAX)

    def _start(self) -> None:
        process = self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._has_started = False
        self._server_process = WatchedProcess(process.pid, start_of(process.pid))
        if self._server_process.descriptor is not None:
            self._selector.register(self._server_process.descriptor, selectors.EVENT_READ)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._lines[pipe.fileno()] = LineSplitter()
            self._selector.register(pipe, selectors.EVENT_READ, pipe)

    def _has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _should_stop(self) -> bool:
        return self._is_stopping or self._executor.has_ended()

    def _wait_for_events(self, timeout_s: float | None) -> None:
        """Wait for events, and read the server's output."""
        if any(each.descriptor is None for each in (self._executor, self._server_process) if each is not None):
            timeout_s = POLL_S if timeout_s is None else min(POLL_S, timeout_s)
        for key, _ in self._selector.select(timeout_s):
            if key.data is not None:
                self._read(key.data)
            elif key.fd == self._wake:
                os.read(self._wake, READ_BYTES)

    def _read(self, pipe: IO[bytes]) -> bool:
        """Read the server's output; False if there is none."""
        try:
            received = os.read(pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return False
        if not received:
            with suppress(KeyError):
                self._selector.unregister(pipe)
            return False
        assert self._process is not None
        for line in self._lines[pipe.fileno()].feed(received):
            if pipe is self._process.stdout:
                self._on_ready_line(line)
            elif line.strip():
                self._last_error = line
                self._log.write(line)
        return True

    def _on_ready_line(self, line: bytes) -> None:
        """Handle the JSON line that the server prints when it listens."""
        try:
            where = json.loads(line)
            address = f"{where['host']}:{where['port']}"
        except (ValueError, KeyError, TypeError):
            return
        self._has_started = True
        with suppress(OSError):
            (self._folder / FAILED).unlink(missing_ok=True)
        self._log_line(f"state server started @ {address}")

    def _reap(self) -> int:
        """Read the last output of a server that has ended, close its pipes, and return its exit code."""
        process, watched = self._process, self._server_process
        assert process is not None and watched is not None
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            for _ in range(LAST_READS_MAX):  # its appliers may still write for a moment
                if not self._read(pipe):
                    break
            with suppress(KeyError):
                self._selector.unregister(pipe)
            del self._lines[pipe.fileno()]
            pipe.close()
        assert process.stdin is not None
        process.stdin.close()
        if watched.descriptor is not None:
            self._selector.unregister(watched.descriptor)
        watched.close()
        self._process = self._server_process = None
        return process.wait()

    def _stop_server(self) -> None:
        """Stop the server; it has `STOP_S_MAX` to hand over its slots."""
        process = self._process
        assert process is not None
        process.terminate()
        deadline_s = time.monotonic() + STOP_S_MAX
        while not self._has_ended() and (remaining_s := deadline_s - time.monotonic()) > 0:
            self._wait_for_events(min(remaining_s, POLL_S))
        if not self._has_ended():
            process.kill()
            process.wait()
        self._reap()

    def _pause(self, pause_s: float) -> bool:
        """Wait; return whether to stop."""
        deadline_s = time.monotonic() + pause_s
        while not self._should_stop() and (remaining_s := deadline_s - time.monotonic()) > 0:
            self._wait_for_events(remaining_s)
        return self._should_stop()

    def _write_failure(self, text: str) -> None:
        with suppress(OSError):
            (self._folder / FAILED).write_text(text)

    def _log_line(self, text: str) -> None:
        self._log.write(f"sparkis: {text}".encode())

    def _on_signal(self, number: int, frame: object) -> None:
        self._is_stopping = True


def main(arguments: list[str] | None = None) -> int:
    """Start a detached supervisor and return at once."""
    parser = argparse.ArgumentParser(prog="resp_server.programs.executor_supervisor")
    parser.add_argument("--lock", type=int, required=True)
    parser.add_argument("--watch", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    pid, _, start = options.watch.partition(":")
    executor = WatchedProcess(int(pid), start)
    if os.fork():
        os._exit(0)
    os.setsid()
    try:
        ExecutorSupervisor(options.command, executor, options.folder).run()
    finally:
        if executor.has_ended():
            shutil.rmtree(options.folder, ignore_errors=True)
        else:
            shutil.rmtree(options.folder / STORE, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
