"""`make setup` takes the Python that it is given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("is_option", [pytest.param(False, marks=pytest.mark.slow), True])
def test_given_python_makes_environment(tmp_path: Path, is_option: bool) -> None:
    for name in ("Makefile", "scripts"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    given, asked = tmp_path / "given", tmp_path / "asked"
    given.write_text(f'#!/bin/sh\necho "$1" >> {asked}\nexec {sys.base_prefix}/bin/python3 "$@"\n')
    given.chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHON"))}
    command = ["make", ".venv/bin/python"]
    if is_option:
        command.append(f"PYTHON={given}")
    else:
        outside["PYTHON"] = str(given)
    subprocess.run(command, cwd=tmp_path, env=outside, check=True, capture_output=True)
    assert asked.read_text().split()[-2:] == ["--version", "-m"]
    assert (tmp_path / ".venv/bin/python").exists()


@pytest.mark.parametrize("goal", ["demo", pytest.param("test", marks=pytest.mark.slow)])
def test_demo_installs_only_its_requirements(tmp_path: Path, goal: str) -> None:
    for name in ("Makefile", "scripts", "pyproject.toml", "requirements.lock", "setup.py"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHON"))}
    planned = subprocess.run(
        ["make", "--dry-run", goal], cwd=tmp_path, env=outside, check=True, capture_output=True, text=True
    ).stdout
    assert ("-c requirements.lock -e '.[demo]'" in planned) == (goal == "demo")
    assert ("-r requirements.lock" in planned) == (goal == "test")
