"""`sparkis ...` as a process, whose log a test reads line by line."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from compat.processes import children_of
from compat.waiting import WAIT_S_MAX


class Command:
    """A running `sparkis ...` in a process group of its own, as a shell starts one, and what it has logged."""

    def __init__(self, *arguments: object) -> None:
        self.logged = ""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sparkis", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"SPARKIS_CONTROL_TOKEN": "of-the-test"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with suppress(ValueError):  # the test has closed it
            for line in self.process.stderr:
                self._lines.put(line)

    def wait_for(self, pattern: str, seconds_max: float = WAIT_S_MAX) -> re.Match[str]:
        """Return the first match in what is logged from now on."""
        ends = monotonic() + seconds_max
        while not (found := re.search(pattern, self.logged)):
            try:
                self.logged += self._lines.get(timeout=max(0.0, ends - monotonic()))
            except queue.Empty:
                raise AssertionError(f"{pattern!r} was not logged, but:\n{self.logged}") from None
        self.logged = self.logged[found.end() :]
        return found

    def read_for(self, seconds_max: float) -> None:
        """Add the next line to `logged`, if one is logged in time."""
        with suppress(queue.Empty):
            self.logged += self._lines.get(timeout=seconds_max)

    def read_to_end(self) -> None:
        """Add the lines that an ended process has logged."""
        self._reader.join()
        while not self._lines.empty():
            self.logged += self._lines.get()

    def hang_up(self) -> None:
        """Do what a terminal does that is closed: signal all processes of the group."""
        os.killpg(self.process.pid, signal.SIGHUP)

    def children(self) -> set[int]:
        return set(children_of(self.process.pid))

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        assert self.process.wait(WAIT_S_MAX) == 0
        assert self.process.stderr is not None
        self.process.stderr.close()


Start = Callable[..., Command]
