"""Find classes and functions that are too large. Exit code 1 if there are any.

    python scripts/lint_sizes.py

A class has at most METHODS_MAX methods, and its methods set at most ATTRIBUTES_MAX attributes: a larger one is split
along its nouns. A function has at most LINES_MAX lines without its docstring. `make check` runs it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("state_backend", "resp_server", "spark_hooks", "sparkis", "sparkis_ui")
METHODS_MAX = 40
ATTRIBUTES_MAX = 25
LINES_MAX = 60
# The public interface of all kinds of state, which one page documents, and its model in memory; one object for each
# client, whose fields the compiled core reads.
INTENDED = ("Snapshot", "MemorySnapshot", "Session")


def too_large(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the name, and what is too large, of classes and functions in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
            if len(methods) > METHODS_MAX:
                yield node.lineno, node.name, f"{len(methods)} methods, and at most {METHODS_MAX} are allowed"
            attributes = {name for method in methods for name in attributes_set_in(method)}
            if len(attributes) > ATTRIBUTES_MAX:
                yield node.lineno, node.name, f"{len(attributes)} attributes, and at most {ATTRIBUTES_MAX} are allowed"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
            if lines > LINES_MAX:
                yield node.lineno, node.name, f"{lines} lines, and at most {LINES_MAX} are allowed"


def attributes_set_in(method: ast.AST) -> Iterator[str]:
    """Yield the names of the attributes of `self` that a method sets."""
    for node in ast.walk(method):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def main() -> int:
    found, large = 0, set()
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for line, name, reason in too_large(path):
            large.add(name)
            if name not in INTENDED:
                found += 1
                print(f"{path.relative_to(ROOT)}:{line}: {name} has {reason}")
    for name in sorted(set(INTENDED) - large):
        found += 1
        print(f"scripts/lint_sizes.py: {name} is no longer too large: remove it from the list")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
