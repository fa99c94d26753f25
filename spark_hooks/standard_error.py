"""Standard error of a program that starts others: what they write there goes to a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def standard_error_in(file: Path) -> Iterator[TextIO]:
    """Send what this process and its children write to standard error into a file; yield the former standard error.

    The file is truncated first. OSError if it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    sys.stderr.flush()
    former = os.dup(2)
    os.dup2(target, 2)
    os.close(target)
    try:
        with open(former, "w", buffering=1, closefd=False) as terminal:
            yield terminal
    finally:
        sys.stderr.flush()
        os.dup2(former, 2)
        os.close(former)
