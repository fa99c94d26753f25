"""`scripts/lint_sizes.py` counts dataclasses and compiled classes, too."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[3] / "scripts" / "lint_sizes.py"))
FIELDS = "".join(f"    field_{number}: int = 0\n" for number in range(26))
LINES = "".join(f"        value = {number}\n" for number in range(61))


def reasons(name: str, path: Path, text: str) -> list[str]:
    """Return the names and reasons that a function of the script yields for a file."""
    path.write_text(text)
    rows: Iterator[Any] = SCRIPT[name](path)
    return [f"{name}: {reason}" for _, name, reason in rows]


@pytest.mark.parametrize(("decorator", "is_counted"), [("@dataclass\n", True), ("@dataclass(frozen=True)\n", False)])
def test_fields_of_dataclass_that_can_change_are_attributes(tmp_path: Path, decorator: str, is_counted: bool) -> None:
    expected = ["Wide: 26 attributes, and at most 25 are allowed"] if is_counted else []
    assert reasons("too_large", tmp_path / "wide.py", f"{decorator}class Wide:\n{FIELDS}") == expected


def test_fields_methods_and_lines_of_compiled_class(tmp_path: Path) -> None:
    fields = "".join(f"    cdef int first_{number}, second_{number}  # a pair\n" for number in range(13))
    (tmp_path / "wide.pxd").write_text(f"cdef class Wide:\n{fields}")
    methods = "".join(f"    cdef int method_{number}(self) except -1:\n        return 0\n\n" for number in range(41))
    long = f'    def long(\n        self, more,\n    ):  # of two\n        """One.\n\n        Two."""\n{LINES}'
    text = f"cdef class Wide:\n{methods}{long}"
    assert reasons("too_large_compiled", tmp_path / "wide.pyx", text) == [
        "Wide: 42 methods, and at most 40 are allowed",
        "Wide: 26 attributes, and at most 25 are allowed",
        "long: 61 lines, and at most 60 are allowed",
    ]
