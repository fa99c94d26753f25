"""The latest values of a watched key."""

from __future__ import annotations

from sparkis_ui.watching import NUMBERS_MAX, POINTS, Watched


def test_each_number_of_hash_has_series() -> None:
    watched = Watched(b"k")
    watched.take("hash", 2, [(b"temp", b"1.5"), (b"name", b"x")])
    watched.take("hash", 2, [(b"temp", b"2.5"), (b"name", b"y")])
    assert list(watched.numbers[b"temp"]) == [1.5, 2.5]
    assert b"name" not in watched.numbers
    assert watched.changes == 1


def test_leaderboard_remembers_ranks_before() -> None:
    watched = Watched(b"k")
    watched.take("zset", 2, [(b"ada", 9.0), (b"alan", 8.0)])
    watched.take("zset", 2, [(b"alan", 10.0), (b"ada", 9.0)])
    assert (watched.ranks_before[b"alan"], watched.ranks[b"alan"]) == (1, 0)


def test_list_has_series_of_its_length() -> None:
    watched = Watched(b"k")
    watched.take("list", 3, [(b"", b"x")])
    watched.take("list", 4, [(b"", b"y")])
    assert list(watched.numbers[b""]) == [3.0, 4.0]


def test_series_have_limits() -> None:
    watched = Watched(b"k")
    for number in range(POINTS + 5):
        watched.take("hash", 99, [(b"%d" % at, b"%d" % number) for at in range(NUMBERS_MAX + 5)])
    assert len(watched.numbers) == NUMBERS_MAX
    assert {len(each) for each in watched.numbers.values()} == {POINTS}


def test_read_value_clears_error() -> None:
    watched = Watched(b"k", error="LOADING")
    watched.take("none", 0, [])
    assert watched.error == ""
