"""The series of graphs: points at equal distances, with gaps."""

from __future__ import annotations

from sparkis_ui.polling import Series


def test_a_number_that_appears_later_has_gaps_before() -> None:
    series = Series(points=3)
    series.add({"a": 1})
    series.add({"a": 2, "b": 5})
    assert series.of("a") == [1, 2]
    assert series.of("b") == [None, 5]


def test_only_the_last_points_stay() -> None:
    series = Series(points=3)
    for value in range(5):
        series.add({"a": value})
    assert series.of("a") == [2, 3, 4]


def test_a_turn_without_a_reply_is_a_gap() -> None:
    series = Series(points=3)
    series.add({"a": 1})
    series.add({})
    assert series.of("a") == [1, None]


def test_a_number_that_is_gone_is_forgotten() -> None:
    series = Series(points=2)
    series.add({"job": 1, "other": 1})
    series.add({"other": 2})
    series.add({"other": 3})
    assert series.of("job") == []
    assert series.of("other") == [2, 3]
