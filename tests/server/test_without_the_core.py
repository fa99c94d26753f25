"""The marked part of the suite passes without the compiled core as well: `make test-pure` runs all of it so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resp_server.native import CORE

# Where the marked files are: the others would take longer to be read than the marked ones take to run.
FOLDERS = ("tests/unit/resp_server", "tests/server", "tests/differential", "tests/properties")


@pytest.mark.skipif(CORE != "compiled", reason="this run is without the compiled core")
def test_the_marked_part_passes_in_python_alone() -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "pure", *FOLDERS]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"SPARKIS_PURE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
