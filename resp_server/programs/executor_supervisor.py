"""Keeps one state server beside an executor: a process between Spark's Python worker, which starts it, and the server.

    python -m resp_server.programs.executor_supervisor --lock FD --watch PID:START --folder FOLDER -- COMMAND ...

The lock file's descriptor is inherited and never closed, so the lock lasts as long as this process: whoever finds it
taken knows that there is a server, or one about to be started. The process PID (an executor's JVM) is watched. COMMAND
is started in a session of its own, and started again when it dies; when PID ends it is told to end (SIGTERM), gets a
while to hand over what it has, and is killed then. It reads its input: should this process be killed, that ends, and so
does the server.

The server prints a line of JSON when it listens. That, and what it writes to standard error, goes on to standard error
here, which is the executor's log; no more than some lines a minute, and never so that anybody waits for it. In FOLDER
are the server's store, which is removed with the executor, and two notes for later tasks: `failed`, why no server could
be started, and `ended`, that it was told to end for good.
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

DRAIN_S_MAX = 5.0
# A server that dies is started again at once, then after pauses that double up to the longest (guess).
PAUSE_S = 1.0
PAUSE_S_MAX = 60.0
# Where the system has no pidfd, the processes are looked at this often.
POLL_S = 0.25
READ_BYTES = 65_536
LAST_READS_MAX = 16
LINE_BYTES_MAX = 2_000
LINES_A_MINUTE_MAX = 60


def start_of(pid: int) -> str | None:
    """Return what tells a process from a later one of the same id: when it was started. None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # a name may have spaces and brackets
    return None if fields[0] in "ZX" else fields[19]


class Watched:
    """A process, of which it can be seen when it ends. `descriptor` is readable then, if the system has that."""

    def __init__(self, pid: int, start: str | None) -> None:
        self._pid = pid
        self._start = start
        self.descriptor: int | None = None
        with suppress(OSError, AttributeError):  # an older kernel, or a container that forbids it
            self.descriptor = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Tell whether it has ended, or is another process by now."""
        return self._start is None or start_of(self._pid) != self._start

    def close(self) -> None:
        """Watch no longer."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Log:
    """Standard error, where nobody waits: what does not fit in there now, or is too much, is left out and counted."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        # Opened anew: not to wait is a property that would else be shared with everybody who has this pipe.
        with suppress(OSError):
            self._descriptor = os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND | os.O_CLOEXEC)
        self._minute = 0.0
        self._lines = 0
        self._left_out = 0

    def write(self, line: bytes) -> None:
        """Write a line, without its end; cut where it is too long."""
        now = time.monotonic()
        if now - self._minute >= 60:
            self._minute, self._lines = now, 0
        if self._lines >= LINES_A_MINUTE_MAX or self._descriptor is None:
            self._left_out += 1
            return
        self._lines += 1
        told = f" ({self._left_out} lines before this were left out)".encode() if self._left_out else b""
        try:
            os.write(self._descriptor, line[:LINE_BYTES_MAX] + told + b"\n")
            self._left_out = 0
        except OSError:  # nobody reads it now, or nobody ever will
            self._left_out += 1


class Lines:
    """Cuts what comes from a pipe into lines; a longer one than is ever shown is cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Return the lines that are complete."""
        *lines, rest = (self._rest + received).split(b"\n")
        self._rest = rest[:LINE_BYTES_MAX]
        return lines


class Keeper:
    """Runs the server until the executor, or what keeps it, ends."""

    def __init__(self, command: Sequence[str], executor: Watched, folder: Path) -> None:
        self._command = list(command)
        self._executor = executor
        self._folder = folder
        self._log = Log()
        self._selector = selectors.DefaultSelector()
        self._process: subprocess.Popen[bytes] | None = None
        self._watched: Watched | None = None
        self._lines: dict[int, Lines] = {}
        self._last_error = b""
        self._was_heard = False
        self._wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self._is_told = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._take_signal)
        self._selector.register(self._wake, selectors.EVENT_READ)
        if executor.descriptor is not None:
            self._selector.register(executor.descriptor, selectors.EVENT_READ)

    def run(self) -> None:
        """Keep a server running to the end."""
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            self._start()
            while not self._has_ended():
                if self._is_over():
                    self._end()
                    return
                self._attend(None)
            code = self._collect()
            if code == 0 and not self._is_over():
                (self._folder / ENDED).touch()
                self._say("the state server was told to end")
                return
            if time.monotonic() - began_s > PAUSE_S_MAX:
                pause_s = 0.0
            if not self._was_heard:
                self._note(f"the state server ended with code {code}: {self._last_error.decode(errors='replace')}")
            self._say(f"the state server ended with code {code}; starting another in {pause_s:g} s")
            if self._rest(pause_s):
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
        self._was_heard = False
        self._watched = Watched(process.pid, start_of(process.pid))
        if self._watched.descriptor is not None:
            self._selector.register(self._watched.descriptor, selectors.EVENT_READ)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._lines[pipe.fileno()] = Lines()
            self._selector.register(pipe, selectors.EVENT_READ, pipe)

    def _has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _is_over(self) -> bool:
        return self._is_told or self._executor.has_ended()

    def _attend(self, timeout_s: float | None) -> None:
        """Wait until something happens, and read what the server says."""
        if any(each.descriptor is None for each in (self._executor, self._watched) if each is not None):
            timeout_s = POLL_S if timeout_s is None else min(POLL_S, timeout_s)
        for key, _ in self._selector.select(timeout_s):
            if key.data is not None:
                self._read(key.data)
            elif key.fd == self._wake:
                os.read(self._wake, READ_BYTES)

    def _read(self, pipe: IO[bytes]) -> bool:
        """Take what the server has said; False if that is nothing, now or for ever."""
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
                self._hear(line)
            elif line.strip():
                self._last_error = line
                self._log.write(line)
        return True

    def _hear(self, line: bytes) -> None:
        """Take the line that says where the server listens."""
        try:
            where = json.loads(line)
            address = f"{where['host']}:{where['port']}"
        except (ValueError, KeyError, TypeError):
            return
        self._was_heard = True
        with suppress(OSError):
            (self._folder / FAILED).unlink(missing_ok=True)
        self._say(f"state server started @ {address}")

    def _collect(self) -> int:
        """Take leave of a server that has ended; return its exit code."""
        process, watched = self._process, self._watched
        assert process is not None and watched is not None
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            for _ in range(LAST_READS_MAX):  # its appliers may write on for a moment
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
        self._process = self._watched = None
        return process.wait()

    def _end(self) -> None:
        """End the server; it may hand over what it has, for a while."""
        process = self._process
        assert process is not None
        process.terminate()
        ends_s = time.monotonic() + DRAIN_S_MAX
        while not self._has_ended() and (left_s := ends_s - time.monotonic()) > 0:
            self._attend(min(left_s, POLL_S))
        if not self._has_ended():
            process.kill()
            process.wait()
        self._collect()

    def _rest(self, pause_s: float) -> bool:
        """Wait; return whether it is over."""
        ends_s = time.monotonic() + pause_s
        while not self._is_over() and (left_s := ends_s - time.monotonic()) > 0:
            self._attend(left_s)
        return self._is_over()

    def _note(self, text: str) -> None:
        with suppress(OSError):
            (self._folder / FAILED).write_text(text)

    def _say(self, text: str) -> None:
        self._log.write(f"sparkis: {text}".encode())

    def _take_signal(self, number: int, frame: object) -> None:
        self._is_told = True


def main(arguments: list[str] | None = None) -> int:
    """Start a keeper, and return as soon as it is there: it is nobody's child, so that nobody has to wait for it."""
    parser = argparse.ArgumentParser(prog="resp_server.programs.executor_supervisor")
    parser.add_argument("--lock", type=int, required=True)
    parser.add_argument("--watch", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    pid, _, start = options.watch.partition(":")
    executor = Watched(int(pid), start)
    if os.fork():
        os._exit(0)
    os.setsid()
    try:
        Keeper(options.command, executor, options.folder).run()
    finally:
        if executor.has_ended():
            shutil.rmtree(options.folder, ignore_errors=True)
        else:
            shutil.rmtree(options.folder / STORE, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
