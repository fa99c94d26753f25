"""The wheel as it would be released, and a user's environment with it installed."""

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
FILES = ("MANIFEST.in", "pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE")
FOLDERS = ("sparkis", "state_backend", "resp_server", "spark_hooks", "sparkis_ui")


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run this environment's Python without building compiled modules and without a network."""
    environment = os.environ | {"SPARKIS_PURE": "1", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, env=environment, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    run("setup.py", "--quiet", "sdist", "--dist-dir", made, cwd=source)
    (found,) = made.glob("sparkis-*.tar.gz")
    return found


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the source distribution makes, without the compiled core."""
    made = tmp_path_factory.mktemp("wheel")
    run("-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", made, sdist)
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
    run("-m", "pip", "--quiet", "--python", python, "install", "--no-deps", "--no-index", wheel)
    return python
