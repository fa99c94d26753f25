"""`scripts/lint_command_names.py` finds names of commands outside of their rows."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "lint_command_names.py"


NAMES = frozenset(["exec", "watch", "client|reply"])


def names_in(module: Path, code: str) -> list[tuple[int, str]]:
    module.write_text(code)
    found: Iterator[tuple[int, str]] = runpy.run_path(str(SCRIPT))["names_in"](module, NAMES)
    return list(found)


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
    assert sorted(names_in(tmp_path / "module.py", code)) == sorted(found)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('cdef int i = at(b"exec", <int>size)', [(1, "exec")]),
        ("\ncdef int reply(Output* out) except -2:\n    put('x')  # \"watch\"", []),
        ('"""Runs exec."""\nput(out, b"+EXEC", 5)', []),
    ],
)
def test_command_names_are_found_in_cython(tmp_path: Path, code: str, found: list[tuple[int, str]]) -> None:
    assert sorted(names_in(tmp_path / "module.pyx", code)) == sorted(found)
