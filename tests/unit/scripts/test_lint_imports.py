"""`scripts/lint_imports.py` checks the imports of Cython modules, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "lint_imports.py"
PROJECT = """
[tool.importlinter]
root_packages = ["house"]

[[tool.importlinter.contracts]]
id = "layers"
name = "Layers"
type = "layers"
layers = ["house.upper", "house.lower"]
"""


@pytest.mark.parametrize("suffix", ["pyx", "pxd", "pyi"])
@pytest.mark.parametrize(
    ("importer", "line", "code"),
    [
        ("lower", "from house.upper.other cimport thing", 1),
        ("lower", "from house.upper import (\n    other,  # why\n)", 1),
        ("lower", "cimport house.upper.other", 1),
        ("upper", "from house.lower.other import thing", 0),
        ("lower", "# from house.upper.other import thing", 0),
    ],
)
def test_cython_module_imports_downwards_only(tmp_path: Path, suffix: str, importer: str, line: str, code: int) -> None:
    for layer in ("", "upper", "lower"):
        folder = tmp_path / "house" / layer
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "other.py").touch()
    (tmp_path / "house" / importer / f"fast.{suffix}").write_text(f"{line}\n")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("house.lower.fast" in done.stdout) is bool(code)
