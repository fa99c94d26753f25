"""The series of graphs: points at equal distances, with gaps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sparkis_ui.polling import Series


@pytest.mark.parametrize(
    ("points", "added", "series"),
    [
        pytest.param(
            3, [{"a": 1}, {"a": 2, "b": 5}], {"a": [1, 2], "b": [None, 5]}, id="a later number has gaps before"
        ),
        pytest.param(3, [{"a": value} for value in range(5)], {"a": [2, 3, 4]}, id="only the last points stay"),
        pytest.param(3, [{"a": 1}, {}], {"a": [1, None]}, id="a turn without a reply is a gap"),
        pytest.param(
            2, [{"a": 1, "b": 1}, {"b": 2}, {"b": 3}], {"a": [], "b": [2, 3]}, id="an old number is forgotten"
        ),
    ],
)
def test_series_have_points_of_each_turn(
    points: int, added: Sequence[dict[str, float]], series: dict[str, list[float | None]]
) -> None:
    found = Series(points=points)
    for numbers in added:
        found.add(numbers)
    assert {name: found.of(name) for name in series} == series
