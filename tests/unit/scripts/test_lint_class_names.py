"""`scripts/lint_class_names.py` finds classes of Python and of compiled modules."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[3] / "scripts" / "lint_class_names.py"))


def test_class_in_two_files_is_found_and_indented_class_is_not(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Row:\n    class Inner:\n        pass\n\n\nclass Other(Row):\n    pass\n")
    (tmp_path / "two.pyx").write_text("cdef class Row:\n    pass\n")
    assert SCRIPT["classes_of"](tmp_path.iterdir()) == {
        "Row": [tmp_path / "one.py", tmp_path / "two.pyx"],
        "Other": [tmp_path / "one.py"],
    }
