"""The paths of graphs, and the squares of slots."""

from __future__ import annotations

import re

import pytest

from sparkis_ui import charts


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", path)]


def test_line_of_graph_has_highest_value_at_top() -> None:
    made = charts.graph([0, 10, 5])
    line = points(made.line)
    assert [x for x, _ in line] == [0, charts.WIDTH / 2, charts.WIDTH]
    assert min(y for _, y in line) == line[1][1] == charts.PADDING
    assert line[0][1] == charts.HEIGHT - charts.PADDING
    assert (made.last, made.lowest, made.highest) == (5, 0, 10)


def test_series_that_is_shorter_than_its_width_is_at_right() -> None:
    line = points(charts.graph([1, 2], slots=5).line)
    assert [x for x, _ in line] == [charts.WIDTH * 3 / 4, charts.WIDTH]


def test_missing_value_interrupts_line_of_graph() -> None:
    made = charts.graph([1, 2, None, 3, 4])
    assert made.line.count("M") == 2
    assert len(points(made.line)) == 4


def test_single_value_is_dot() -> None:
    assert charts.graph([7]).line.endswith("h0.1")


def test_series_without_values_has_no_line() -> None:
    assert charts.graph([None, None]) == charts.Graph("", "", None, 0.0, 0.0)
    assert charts.graph([]).line == ""


def slots_in(path: str) -> set[int]:
    """Return the slots that a path covers; AssertionError if it covers one twice."""
    found: set[int] = set()
    for left, top, right, bottom in re.findall(r"M(\d+),(\d+)H(\d+)V(\d+)H\d+Z", path):
        for row in range(int(top), int(bottom)):
            slots = range(row * charts.GRID_COLUMNS + int(left), row * charts.GRID_COLUMNS + int(right))
            assert found.isdisjoint(slots)
            found.update(slots)
    return found


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 16383)],
        [(0, 0)],
        [(255, 256)],
        [(10, 20), (30, 700)],
        [(256, 511)],
        [(100, 1023)],
        [(5461, 10922)],
        [(16383, 16383)],
        [],
    ],
)
def test_squares_of_range_are_its_slots(ranges: list[tuple[int, int]]) -> None:
    expected = {slot for first, last in ranges for slot in range(first, last + 1)}
    assert slots_in(charts.slot_squares(ranges)) == expected
