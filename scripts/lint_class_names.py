"""Find class names that one package uses twice. Exit code 1 if there are any.

    python scripts/lint_class_names.py

A class has one name in its package, so that a search for the name finds one class. `make check` runs it.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("state_backend", "resp_server", "spark_hooks", "sparkis", "sparkis_ui")
# `sparkis.Upstream`, a group of settings, has the word of the interface `redis.upstream.Upstream`; `KeyNumbers` is in
# Python and compiled.
INTENDED = {("resp_server", "Upstream"), ("state_backend", "KeyNumbers")}
CLASS = re.compile(r"^(?:cdef )?class (\w+)", re.MULTILINE)


def classes_of(paths: Iterable[Path]) -> Mapping[str, list[Path]]:
    """Return the files of each class, by its name."""
    found = defaultdict(list)
    for path in sorted(paths):
        for name in CLASS.findall(path.read_text()):
            found[name].append(path)
    return found


def main() -> int:
    """Print each name that is used twice; return the exit code."""
    count = 0
    for package in PACKAGES:
        folder = ROOT / package
        for name, paths in classes_of([*folder.rglob("*.py"), *folder.rglob("*.pyx")]).items():
            if len(paths) > 1 and (package, name) not in INTENDED:
                count += 1
                print(f"class {name} is in {', '.join(str(path.relative_to(ROOT)) for path in paths)}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
