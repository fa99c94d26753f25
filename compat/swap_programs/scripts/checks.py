"""What the scripts share: run checks in order, and print each outcome as a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Longer than a check ever waits on a busy machine; it ends a hang.
CHECK_S_MAX = 120.0

Check = Callable[[str], Any]


def main(checks: Mapping[str, Check]) -> None:
    """Run checks at the address that is the first argument. The outcome of a check that raises is the error."""
    (url,) = sys.argv[1:]
    for name, check in checks.items():
        print(json.dumps({"check": name, "outcome": outcome_of(check, url)}), flush=True)


def outcome_of(check: Check, url: str) -> Any:
    """Return what a check returns, or its error."""
    try:
        return check(url)
    except Exception as error:
        return {"error": error_text(error)}


def error_text(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@contextmanager
def process(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of this environment's programs until the block ends. What it prints goes to standard error."""
    given = {**os.environ, "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"], **environment}
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=given)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(CHECK_S_MAX)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
