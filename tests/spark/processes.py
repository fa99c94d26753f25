"""The command `sparkis` as a process, which is ended by signals as by a service manager."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

import redis

from compat.waiting import WAIT_S_MAX, eventually


class Command:
    """A running `sparkis ...`, and its output so far (stdout and stderr)."""

    def __init__(self, *arguments: object) -> None:
        self.printed = ""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sparkis", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            process_group=0,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait for a match in the output and return it; fails with the output, at once if the process ends."""
        ends = monotonic() + WAIT_S_MAX
        while not (found := re.search(pattern, self.printed)):
            try:
                line = self._lines.get(timeout=max(0.0, ends - monotonic()))
            except queue.Empty:
                raise AssertionError(f"{pattern!r} was not printed in {WAIT_S_MAX} s, but:\n{self.printed}") from None
            if line is None:
                code = self.process.wait(WAIT_S_MAX)
                raise AssertionError(f"ended with exit code {code} without printing {pattern!r}:\n{self.printed}")
            self.printed += line
        return found

    def rest(self) -> str:
        """Wait until the outputs are closed, and return the output that `wait_for` has not read."""
        rest = ""
        while (line := self._lines.get(timeout=WAIT_S_MAX)) is not None:
            rest += line
        return rest

    def end(self, number: signal.Signals = signal.SIGTERM, *, has_children: bool = False) -> int:
        """Send a signal, also to the process's children if `has_children`; return the exit code."""
        if has_children:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        return self.process.wait(WAIT_S_MAX)


@contextmanager
def sparkis(*arguments: object) -> Iterator[Command]:
    """Run a command while the block runs."""
    command = Command(*arguments)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.terminate()
            try:
                command.process.wait(WAIT_S_MAX)
            except subprocess.TimeoutExpired:
                command.process.kill()
                command.process.wait()


@contextmanager
def served(*arguments: object) -> Iterator[str]:
    """Run `sparkis serve` on a free port to the end of a block; it has loaded its logs. The URL is for its clients."""
    with sparkis("serve", "--port", 0, "--bind", "127.0.0.1", *arguments) as server:
        url = f"redis://127.0.0.1:{server.wait_for(r'started @ [0-9.]+:([0-9]+)')[1]}"
        eventually(lambda: not _is_loading(url), processes=[server.process])
        yield url


def _is_loading(url: str) -> bool:
    """Return whether a server is loading; False for a client that may not use INFO."""
    with suppress(redis.RedisError), redis.Redis.from_url(url) as client:
        return bool(client.info("persistence")["loading"])
    return False


def status(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `sparkis status`."""
    command = [sys.executable, "-m", "sparkis", "status", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S_MAX, check=False)
