"""Each file of tests/unit is beside its subject: in a folder of the same path, with a module, package or page there."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "tests" / "unit"
SUFFIXES = ("", ".py", ".pyx", ".md")  # "" is a folder


def subjects_of(folder: Path) -> set[str]:
    """Return the names that files of tests in a folder of tests/unit may begin with."""
    source = ROOT / folder.relative_to(UNIT)
    names = {path.stem for path in source.glob("*") if path.suffix in SUFFIXES} | {source.name}
    return {name.strip("_.").replace("-", "_") for name in names}


def test_files_are_named_test_subject_or_test_subject_aspect() -> None:
    misplaced = [
        str(path.relative_to(ROOT))
        for path in sorted(UNIT.rglob("test_*.py"))
        if not any(f"{path.stem}_".startswith(f"test_{subject}_") for subject in subjects_of(path.parent))
    ]
    assert misplaced == []
