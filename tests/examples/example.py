"""Runs an example as a user does, as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from compat.waiting import WAIT_S_MAX

ROOT = Path(__file__).parents[2]


def command(name: str, *arguments: str) -> list[str]:
    """Return the command line of an example."""
    return [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, with this checkout on the import path."""
    return os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable} | more


def run(name: str, *arguments: str, **more: str) -> list[str]:
    """Run an example to its end and return its output lines. more: environment variables."""
    done = subprocess.run(
        command(name, *arguments),
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
        env=environment(**more),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
