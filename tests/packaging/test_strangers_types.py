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


def mypy(stranger: Path, script: Path) -> list[str]:
    """Run `mypy --strict` in an empty folder, with nothing configured; return its lines."""
    cache = stranger.parent.parent / "mypy"
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty"]
    done = subprocess.run(
        [*command, "--python-executable", str(stranger), "--cache-dir", str(cache), script.name],
        capture_output=True,
        text=True,
        check=False,
        cwd=script.parent,
        env={},
    )
    assert not done.stderr
    return done.stdout.splitlines()


def test_a_strangers_script_passes(stranger: Path, tmp_path: Path) -> None:
    script = Path(shutil.copy(HERE / "stranger.py", tmp_path / "script.py"))
    assert mypy(stranger, script) == ["Success: no issues found in 1 source file"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sparkis.no_such_name", "has no attribute"),
        ("sparkis.serve(1)", "incompatible type"),
        ("sparkis.LogWriter('/log', 'job', ['price'])", "incompatible type"),
        ("sparkis.read_snapshot('/log', 'job').value('a text')", "incompatible type"),
    ],
)
def test_a_mistake_is_found(stranger: Path, tmp_path: Path, line: str, said: str) -> None:
    script = tmp_path / "mistaken.py"
    script.write_text(f"import sparkis\n\n{line}\n")
    found = mypy(stranger, script)
    assert said in found[0]
    assert found[-1] == "Found 1 error in 1 file (checked 1 source file)"


def test_no_public_name_is_any(stranger: Path, tmp_path: Path) -> None:
    script = tmp_path / "revealed.py"
    script.write_text("import sparkis\n" + "".join(f"reveal_type(sparkis.{name})\n" for name in sparkis.__all__))
    lines = [line for line in mypy(stranger, script) if "Revealed type" in line]
    assert len(lines) == len(sparkis.__all__)
    revealed = dict(zip(sparkis.__all__, lines, strict=True))
    for name in RETURNS_ARROW:
        revealed[name] = revealed[name].removesuffix(' -> Any"')
    assert [line for line in revealed.values() if re.search(r"\bAny\b", line)] == []
