"""The wheel as it would be released, and an environment of a stranger who installed it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE")
FOLDERS = ("sparkis", "state_backend", "resp_server", "spark_hooks")


def pip(*arguments: str | Path) -> None:
    """Run this environment's pip, which needs no network for what it is asked here."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        *map(str, arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"SPARKIS_PURE": "1"}, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, without the compiled core."""
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    made = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", made, source)
    (found,) = made.glob("sparkis-*.whl")
    return found


@pytest.fixture(scope="session")
def stranger(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel installed, and the dependencies of this environment, but not this checkout."""
    folder = tmp_path_factory.mktemp("stranger")
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    # A folder that a .pth file names has no .pth files of its own: that of this checkout does not count.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", python, "install", "--no-deps", "--no-index", "--force-reinstall", wheel)
    return python
