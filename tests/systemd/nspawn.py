"""A container of `systemd-nspawn`: a process 1 of its own in a folder with a system, with a network of its own."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from compat.processes import children_of
from compat.waiting import eventually

NSPAWN = ("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network")
CLONE_NEWNET = 0x40000000
# A container starts in seconds, but may share its processors with much else.
START_S_MAX = 180.0
COMMAND_S_MAX = 300.0


class Container:
    """A running container.

    Attributes:
        process: systemd-nspawn. It ends with the container, with the exit code of its process 1.
        first: The process id, here, of its process 1.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        (self.first,) = eventually(
            self._found, processes=[process], awaited="the container has a process 1", timeout_s=START_S_MAX
        )

    def _found(self) -> list[int]:
        """Return the child of nspawn that is process 1 of the container, once nspawn has started its program."""
        found = []
        for each, words in children_of(self.process.pid).items():
            with suppress(OSError):  # nspawn's first child ends at once
                status = Path(f"/proc/{each}/status").read_text()
                if re.search(r"^NSpid:.*\t1$", status, re.MULTILINE) and b"nspawn" not in words:
                    found.append(each)
        return found

    def run(self, command: str) -> str:
        """Run a command of a shell as root in the container; return its output. AssertionError if it fails."""
        entering = ["nsenter", "--target", str(self.first), "--mount", "--uts", "--ipc", "--net", "--pid"]
        done = subprocess.run(
            [*entering, "/bin/sh", "-euc", command],
            env={"PATH": "/opt/sparkis/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def network(self) -> Iterator[None]:
        """Make this thread's connections, and those of threads that it starts, in the container's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as own, open(f"/proc/{self.first}/ns/net") as containers:
            assert libc.setns(containers.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(own.fileno(), CLONE_NEWNET) == 0


@contextmanager
def started(words: Sequence[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start systemd-nspawn with these further words, and stop it at the end of the block."""
    with (
        output.open("wb") as file,
        subprocess.Popen([*NSPAWN, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()  # a machine shuts down, and any other process 1 is killed
            try:
                process.wait(START_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
