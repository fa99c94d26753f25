"""The environment of child processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resp_server.net import children


def test_child_finds_packages_of_source_tree(tmp_path: Path) -> None:
    # -S: without the folder that this checkout is installed in.
    command = [sys.executable, "-S", "-c", "import resp_server.net.children, state_backend"]
    done = subprocess.run(
        command, env=children.environment(), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_own_source_precedes_pythonpath_of_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere:{children.SOURCE}")
    assert children.environment()["PYTHONPATH"] == f"{children.SOURCE}:/elsewhere"
