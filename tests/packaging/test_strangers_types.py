"""A stranger's script is checked against the types that the wheel brings: nothing is missing, nothing is Any."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sparkis

HERE = Path(__file__).parent
# pyarrow ships no types, so its classes are Any to mypy.
RETURNS_ARROW = {"read_table"}


MISTAKES = {
    "sparkis.no_such_name": "has no attribute",
    "sparkis.serve(1)": "incompatible type",
    "sparkis.LogWriter('/log', 'job', ['price'])": "incompatible type",
    "sparkis.read_snapshot('/log', 'job').value('a text')": "incompatible type",
}


@pytest.fixture(scope="module")
def said(stranger: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines of `mypy --strict` in an empty folder, with nothing configured, by the script that each is about."""
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copy(HERE / "stranger.py", folder / "script.py")
    (folder / "mistaken.py").write_text("\n".join(["import sparkis", *MISTAKES, ""]))
    revealed = (f"reveal_type(sparkis.{name})\n" for name in sparkis.__all__)
    (folder / "revealed.py").write_text("import sparkis\n" + "".join(revealed))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "--python-executable", str(stranger), "."]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env={})
    assert not done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == f"Found {len(MISTAKES)} errors in 1 file (checked 3 source files)"
    return {name: [line for line in lines if line.startswith(f"{name}.py:")] for name in ("mistaken", "revealed")}


def test_mistake_is_found_and_strangers_script_passes(said: dict[str, list[str]]) -> None:
    assert [text in line for text, line in zip(MISTAKES.values(), said["mistaken"], strict=True)] == [True] * 4


def test_no_public_name_is_any(said: dict[str, list[str]]) -> None:
    revealed = dict(zip(sparkis.__all__, said["revealed"], strict=True))
    for name in RETURNS_ARROW:
        revealed[name] = revealed[name].removesuffix(' -> Any"')
    assert [line for line in revealed.values() if "Revealed type" not in line or re.search(r"\bAny\b", line)] == []
