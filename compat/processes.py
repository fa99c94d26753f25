"""Child processes of tests, comparisons and benchmarks that end with the block that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def killed_at_end(command: list[Any], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a process, and kill it at the end of the block. `Popen` alone would wait for ever if the block fails."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def end_in_order() -> None:
    """Turn SIGTERM into an exception, so that processes are stopped and files removed, as with Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def children_of(pid: int) -> dict[int, bytes]:
    """Return the command lines of a process's children, but its `compat.fork_server`, by their process ids."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):  # it may just have ended
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes()
    return {child: line for child, line in found.items() if b"compat.fork_server" not in line}
