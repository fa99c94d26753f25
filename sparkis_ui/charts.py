"""The geometry of graphs: series of numbers as paths of SVG, slots as squares. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 240, 60
PADDING = 3
GRID_COLUMNS = 256  # of 16,384 slots: 64 rows
SLOTS = 16_384


class Graph(NamedTuple):
    """A line, the area below it, and the numbers for the texts beside it."""

    line: str
    area: str
    last: float | None
    lowest: float
    highest: float


def graph(values: Sequence[float | None], *, slots: int = 0, from_zero: bool = True) -> Graph:
    """Return the graph of values at equal distances, the newest at the right; None is a gap.

    Args:
        slots: The number of values that fill the width; fewer values begin further right.
        from_zero: Zero is the bottom.
    """
    known = [value for value in values if value is not None]
    if not known:
        return Graph("", "", None, 0.0, 0.0)
    lowest, highest = min(known), max(known)
    low = min(0.0, lowest) if from_zero else lowest
    spread = (highest - low) or 1.0
    step = WIDTH / max(1, max(slots, len(values)) - 1)
    first = WIDTH - step * (len(values) - 1)
    points = [
        None
        if value is None
        else (round(first + step * at, 1), round(HEIGHT - PADDING - (value - low) / spread * (HEIGHT - 2 * PADDING), 1))
        for at, value in enumerate(values)
    ]
    line, area = "", ""
    for part in _unbroken(points):
        text = " ".join(f"{x},{y}" for x, y in part)
        line += f"M{text}" if len(part) > 1 else f"M{text} h0.1"
        area += f"M{part[0][0]},{HEIGHT} L{text} L{part[-1][0]},{HEIGHT} Z"
    return Graph(line, area, values[-1], lowest, highest)


def _unbroken(points: Iterable[tuple[float, float] | None]) -> list[list[tuple[float, float]]]:
    parts: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is not None:
            parts[-1].append(point)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def slot_squares(ranges: Iterable[tuple[int, int]]) -> str:
    """Return slots as squares of a grid of GRID_COLUMNS columns: each range is at most three rectangles of a path."""
    path = ""
    for first, last in ranges:
        for row, left, right, rows in _rectangles(first, last):
            path += f"M{left},{row}H{right + 1}V{row + rows}H{left}Z"
    return path


def _rectangles(first: int, last: int) -> list[tuple[int, int, int, int]]:
    """Return (row, first column, last column, number of rows) of a range of slots."""
    (top, left), (bottom, right) = divmod(first, GRID_COLUMNS), divmod(last, GRID_COLUMNS)
    if top == bottom:
        return [(top, left, right, 1)]
    found = []
    if left:
        found.append((top, left, GRID_COLUMNS - 1, 1))
        top += 1
    below = bottom if right < GRID_COLUMNS - 1 else bottom + 1
    if below > top:
        found.append((top, 0, GRID_COLUMNS - 1, below - top))
    if below == bottom:
        found.append((bottom, 0, right, 1))
    return found
