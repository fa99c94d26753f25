"""Find classes and functions that are too large. Exit code 1 if there are any.

    python scripts/lint_sizes.py

A class has at most METHODS_MAX methods, and at most ATTRIBUTES_MAX attributes: those that its methods set, and the
fields of a dataclass or of a compiled class. A larger one is split along its nouns. A function has at most LINES_MAX
lines without its docstring. `make check` runs it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("state_backend", "resp_server", "spark_hooks", "sparkis", "sparkis_ui")
METHODS_MAX = 40
ATTRIBUTES_MAX = 25
LINES_MAX = 60
# The public interface of all kinds of state, which one page documents, and its model in memory; one object for each
# client, whose fields the compiled core reads.
INTENDED = ("Snapshot", "MemorySnapshot", "Session")
# Compiled ones that are still too large, each with its attributes, methods or lines: they may not grow.
COMPILED_MAX = {
    "Core": 28,
    "ForwardableRequests": 34,
    "Packing": 33,
    "Poller": 32,
    "Transport": 42,
    "packed_maps": 77,
}

# A class of Cython, or a function of one, and what ends them: a line with less indentation, or with the same.
COMPILED_CLASS = re.compile(r"(?P<indent> *)(?:cdef )?class (?P<name>\w+)")
COMPILED_FUNCTION = re.compile(r"(?P<indent> *)(?:def |cp?def [^=(]*?)\b(?P<name>\w+)\((.*:( *#.*)?|.*,|)$")
COMPILED_FIELD = re.compile(r" {4}cdef (?:readonly |public )*(?!inline\b)[\w.]+[ *]+(?P<names>\w[^(:#]*?)(?: *#.*)?$")


def too_large(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the name, and what is too large, of classes and functions in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
            attributes = {name for method in methods for name in attributes_set_in(method)} | fields_of(node)
            yield from too_large_class(node.lineno, node.name, len(methods), len(attributes))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
            yield from too_large_function(node.lineno, node.name, lines)


def too_large_class(line: int, name: str, methods: int, attributes: int) -> Iterator[tuple[int, str, str]]:
    """Yield what of a class is too large."""
    for count, most, noun in ((methods, METHODS_MAX, "methods"), (attributes, ATTRIBUTES_MAX, "attributes")):
        most = max(most, COMPILED_MAX.get(name, 0))
        if count > most:
            yield line, name, f"{count} {noun}, and at most {most} are allowed"


def too_large_function(line: int, name: str, lines: int) -> Iterator[tuple[int, str, str]]:
    """Yield what of a function is too large."""
    most = COMPILED_MAX.get(name, LINES_MAX)
    if lines > most:
        yield line, name, f"{lines} lines, and at most {most} are allowed"


def attributes_set_in(method: ast.AST) -> Iterator[str]:
    """Yield the names of the attributes of `self` that a method sets."""
    for node in ast.walk(method):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def fields_of(node: ast.ClassDef) -> set[str]:
    """Return the names of a dataclass' fields that can change; a frozen one is a row of a table."""
    decorators = {ast.unparse(each).partition("(")[0]: ast.unparse(each) for each in node.decorator_list}
    if "dataclass" not in decorators or "frozen=True" in decorators["dataclass"]:
        return set()
    targets = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
    return {each.id for each in targets if isinstance(each, ast.Name)}


def too_large_compiled(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the same for a file of Cython."""
    lines = path.read_text().splitlines()
    fields = compiled_fields(lines)
    declared = path.with_suffix(".pxd")
    if declared.exists():
        for name, names in compiled_fields(declared.read_text().splitlines()).items():
            fields.setdefault(name, set()).update(names)
    for index, line in enumerate(lines):
        if found := COMPILED_CLASS.match(line):
            body = body_of(lines, index, len(found["indent"]))
            methods = sum(COMPILED_FUNCTION.match(each) is not None for each in body)
            yield from too_large_class(index + 1, found["name"], methods, len(fields.get(found["name"], ())))
        elif found := COMPILED_FUNCTION.match(line):
            signature_end = next(at for at in range(index, len(lines)) if is_end_of_signature(lines[at]))
            body = body_of(lines, signature_end, len(found["indent"]))
            yield from too_large_function(index + 1, found["name"], len(without_docstring(body)))


def compiled_fields(lines: Sequence[str]) -> dict[str, set[str]]:
    """Return the names of the fields of each class of a file of Cython."""
    fields: dict[str, set[str]] = {}
    for index, line in enumerate(lines):
        if found := COMPILED_CLASS.match(line):
            declared = [each["names"] for row in body_of(lines, index, 0) if (each := COMPILED_FIELD.match(row))]
            names = (name.strip(" *").partition("[")[0] for row in declared for name in row.split(","))
            fields[found["name"]] = set(names)
    return fields


def body_of(lines: Sequence[str], index: int, indent: int) -> list[str]:
    """Return the lines that belong to the class or function at a line, without those that end it."""
    body: list[str] = []
    for line in lines[index + 1 :]:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        body.append(line)
    while body and not body[-1].strip():
        body.pop()
    return body


def is_end_of_signature(line: str) -> bool:
    """Return whether a line ends with a colon, but for a comment."""
    return line.partition("#")[0].rstrip().endswith(":")


def without_docstring(body: Sequence[str]) -> Iterable[str]:
    """Return the lines of a function after its docstring."""
    if not body or not body[0].lstrip().startswith('"""'):
        return body
    ends = (index for index, line in enumerate(body) if line.count('"""') == 2 or (index and '"""' in line))
    return body[next(ends) + 1 :]


def main() -> int:
    found, large = 0, set()
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py*")):
        rows = {".py": too_large, ".pyx": too_large_compiled}.get(path.suffix)
        for line, name, reason in () if rows is None else rows(path):
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
