"""`scripts/lint_command_names.py` finds names of commands outside of their rows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "lint_command_names.py"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('if name == "exec":\n    pass', [(1, "exec")]),
        ('\nNAMES = (b"watch", "client|reply")', [(2, "watch"), (2, "client|reply")]),
        ('REQUEST = (b"EXEC",)  # exec', []),
        ('"""Runs exec."""\nname = "executive"', []),
    ],
)
def test_command_names_are_found_in_any_text(tmp_path: Path, code: str, found: list[tuple[int, str]]) -> None:
    module = tmp_path / "module.py"
    module.write_text(code)
    names_in = runpy.run_path(str(SCRIPT))["names_in"]
    assert sorted(names_in(module, frozenset(["exec", "watch", "client|reply"]))) == sorted(found)
