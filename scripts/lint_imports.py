"""`lint-imports` for Cython modules, too: import-linter reads only Python. Exit code 1 if a contract is broken.

The imports of `.pyx` and `.pxd` files, and of their `.pyi` stubs, are added to the graph of imports. Then the contracts
of pyproject.toml in the current folder are checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from grimp import ImportGraph
from importlinter import configuration
from importlinter.adapters.building import GraphBuilder
from importlinter.application import use_cases
from importlinter.application.app_config import settings

SUFFIXES = ("pyx", "pxd", "pyi")
FROM = re.compile(r"^\s*from\s+([\w.]+)\s+c?import\s+(\([^)]*\)|.*)", re.MULTILINE)
IMPORT = re.compile(r"^\s*c?import\s+(\w[\w.]*)", re.MULTILINE)
COMMENT = re.compile(r"#.*")


class CythonGraphBuilder(GraphBuilder):
    """Builds the graph of imports with Cython modules."""

    def build(
        self,
        root_package_names: list[str],
        cache_dir: str | None,
        include_external_packages: bool = False,
        exclude_type_checking_imports: bool = False,
    ) -> ImportGraph:
        graph = super().build(root_package_names, cache_dir, include_external_packages, exclude_type_checking_imports)
        add_cython_modules(graph, root_package_names)
        return graph


def add_cython_modules(graph: ImportGraph, root_packages: list[str]) -> None:
    """Add the Cython modules of packages in the current folder, and their imports, to a graph."""
    files = [
        path for package in root_packages for each in SUFFIXES for path in sorted(Path(package).rglob(f"*.{each}"))
    ]
    for path in files:
        graph.add_module(module_of(path))
    for path in files:
        for number, line, name in imports_of(path.read_text()):
            imported = imported_module(graph, name, root_packages)
            if imported is not None and imported != module_of(path):
                graph.add_import(
                    importer=module_of(path), imported=imported, line_number=number, line_contents=line.strip()
                )


def module_of(path: Path) -> str:
    """Return the name of a file's module."""
    return ".".join(path.with_suffix("").parts)


def imports_of(text: str) -> Iterator[tuple[int, str, str]]:
    """Iterate over the imports of a source: (line number, line, the full name of a module or of something in it)."""
    for found in FROM.finditer(text):
        number = text.count("\n", 0, found.start(1)) + 1
        for each in COMMENT.sub("", found[2]).strip("()").split(","):
            if each.strip():
                yield number, text.splitlines()[number - 1], f"{found[1]}.{each.split()[0]}"
    for found in IMPORT.finditer(text):
        number = text.count("\n", 0, found.start(1)) + 1
        yield number, text.splitlines()[number - 1], found[1]


def imported_module(graph: ImportGraph, name: str, root_packages: list[str]) -> str | None:
    """Return the module that a name is, or is in; for other packages, the package. None: it is not in the graph."""
    package = name.partition(".")[0]
    if package not in root_packages:
        if package not in graph.modules:
            graph.add_module(package, is_squashed=True)
        return package
    while name not in graph.modules and "." in name:
        name = name.rpartition(".")[0]
    return name if name in graph.modules else None


def main() -> int:
    """Check the contracts."""
    configuration.configure()
    settings.configure(GRAPH_BUILDER=CythonGraphBuilder())
    return 0 if use_cases.lint_imports(no_logo=True) == use_cases.SUCCESS else 1


if __name__ == "__main__":
    sys.exit(main())
