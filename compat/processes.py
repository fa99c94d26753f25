"""Child processes of tests, comparisons and benchmarks that end with the block that started them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def killed_at_end(command: list[Any], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a process, and kill it at the end of the block. `Popen` alone would wait for ever if the block fails."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()
