"""Where unit tests are, and how tests are named."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "tests" / "unit"
SUFFIXES = ("", ".py", ".pyx", ".md")  # "" is a folder


def subjects_of(folder: Path) -> set[str]:
    """Return the names that files of tests in a folder of tests/unit may begin with."""
    source = ROOT / folder.relative_to(UNIT)
    names = {path.stem for path in source.glob("*") if path.suffix in SUFFIXES} | {source.name}
    return {name.strip("_.").replace("-", "_") for name in names}


def test_names_of_tests_have_no_articles() -> None:
    article = re.compile(r"def (test_(?:\w+_)?(?:an|the)_\w+|test_a_\w+)")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert [name for path in files for name in article.findall(path.read_text())] == []


def test_files_are_named_test_subject_or_test_subject_aspect() -> None:
    misplaced = [
        str(path.relative_to(ROOT))
        for path in sorted(UNIT.rglob("test_*.py"))
        if not any(f"{path.stem}_".startswith(f"test_{subject}_") for subject in subjects_of(path.parent))
    ]
    assert misplaced == []
