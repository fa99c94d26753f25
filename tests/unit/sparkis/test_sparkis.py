"""The public names, as type checkers see them and as a running program finds them, are the same."""

from __future__ import annotations

import ast
from pathlib import Path

import sparkis

SOURCE = ast.parse(Path(sparkis.__file__).read_text())


def test_type_checkers_see_same_names_as_program() -> None:
    (for_checkers,) = (
        node
        for node in SOURCE.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    seen = {
        alias.name: node.module
        for node in for_checkers.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == sparkis._MODULE_OF


def test_every_name_is_offered_in_order() -> None:
    assert sparkis.__all__ == sorted(sparkis._MODULE_OF)
    assert dir(sparkis) == sorted([*sparkis.__all__, "__version__"])
