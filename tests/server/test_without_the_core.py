"""The marked part of the suite passes without the compiled core as well: `make test-pure` runs all of it so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resp_server.native import CORE

# They hold no marked file, and take longer to be read than the marked ones take to run.
LEFT_OUT = (
    "adversity",
    "clients",
    "differential",
    "examples",
    "large",
    "object_store",
    "spark",
    "unit/spark_hooks",
    "unit/state_backend",
)


@pytest.mark.skipif(CORE != "compiled", reason="this run is without the compiled core")
def test_the_marked_part_passes_in_python_alone() -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "pure", "tests"]
    command += [f"--ignore=tests/{folder}" for folder in LEFT_OUT]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"SPARKIS_PURE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
