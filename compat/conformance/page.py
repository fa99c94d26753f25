"""The tables of docs/clients.md, from the outcomes of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from compat.conformance.matrix import CLIENTS, Cell
from compat.conformance.transcripts import Replay

BEGIN, END = "<!-- conformance: begin -->", "<!-- conformance: end -->"
SIGNS = {True: "✓", False: "✗", None: "·"}
CLI = "redis-cli"

Name = TypeVar("Name")


def tables(cells: Sequence[Cell], versions: Mapping[str, str], replayed: Sequence[Replay]) -> str:
    """Return all tables as Markdown."""
    libraries = [each.name for each in CLIENTS if each.name in versions and each.name != CLI]
    heads = [f"{name.rsplit(' ', 1)[0]} {versions[name]}" for name in libraries]
    rows = [
        [
            feature,
            *(_signs([cell for cell in cells if (cell.client, cell.feature) == (name, feature)]) for name in libraries),
        ]
        for feature in _in_order(cell.feature for cell in cells if cell.client != CLI)
    ]
    text = _table(["feature", *heads], rows)
    cli = [cell for cell in cells if cell.client == CLI]
    if cli:
        modes = [
            [mode, _signs([cell for cell in cli if cell.feature == mode])] for mode in _in_order(c.feature for c in cli)
        ]
        text += f"\n{_table([f'{CLI} {versions[CLI]}', 'tested'], modes)}"
    pairs = _in_order((each.client, each.what) for each in replayed)
    rows = [
        [
            *pair,
            ", ".join(f"{each.target} {SIGNS[each.is_right]}" for each in replayed if (each.client, each.what) == pair),
        ]
        for pair in pairs
    ]
    return text + "\n" + _table(["client (not run)", "first requests", "replayed"], rows)


def put_into(path: Path, text: str, marks: tuple[str, str] = (BEGIN, END)) -> None:
    """Write tables between the marks of a page; ValueError if the marks are missing."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{path} lacks the marks {marks[0]} and {marks[1]}")
    path.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")


def _signs(cells: Sequence[Cell]) -> str:
    """Return the signs of one feature of one client: server, cluster node, proxy."""
    return " ".join(SIGNS[cell.is_right] for cell in cells) or " ".join([SIGNS[None]] * 3)


def _in_order(names: Iterable[Name]) -> list[Name]:
    return list(dict.fromkeys(names))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
