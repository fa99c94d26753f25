"""Names of keys are grouped as a person would write their patterns."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from resp_server.backends.routing.format_patterns import key_pattern
from resp_server.backends.routing.key_patterns_found import FIRST_PARTS_MAX, LEVELS_MAX, FoundKey, NameGroups
from state_backend.model.descriptor import KeyFormat

WORDS = ["amber", "birch", "cedar", "dune", "elm", "fern", "grove", "heath", "iris", "jade", "kelp", "lily", "moss"]


def groups_of(names: Iterable[str | bytes]) -> list[tuple[str, int]]:
    made = NameGroups()
    for name in names:
        made.add(FoundKey(0, name.encode() if isinstance(name, str) else name))
    return [(group.pattern, group.key_count) for group in made.groups()]


def test_numbers_and_ids_vary() -> None:
    ids = ["3e2c0f5e-0b1d-4c6f-9f5e-0123456789ab", "0f5e3e2c-0b1d-4c6f-9f5e-ba9876543210"]
    names = [*(f"user:{n}:cart" for n in range(100)), *(f"celery-task-meta-{each}" for each in ids)]
    assert groups_of(names) == [("user:<a>:cart", 100), ("celery-task-meta-<a>", 2)]


def test_number_that_all_names_have_is_part_of_their_pattern() -> None:
    assert groups_of(f"api:v2:user:{n}" for n in range(5)) == [("api:v2:user:<a>", 5)]
    assert groups_of([f"api:v{v}:user:{n}" for v in (1, 2) for n in range(5)]) == [("api:v<a>:user:<b>", 10)]


def test_many_words_in_one_place_vary_and_few_do_not() -> None:
    assert groups_of(f"session:{word}:cart" for word in WORDS) == [("session:<a>:cart", 13)]
    assert groups_of(f"queue:{word}:{n}" for word in ("high", "low") for n in range(9)) == [
        ("queue:high:<a>", 9),
        ("queue:low:<a>", 9),
    ]


def test_single_names_are_one_group_if_they_are_many() -> None:
    assert groups_of(["flags", "limits", "lock"]) == [("flags", 1), ("limits", 1), ("lock", 1)]
    assert groups_of(f"session:{word}" for word in WORDS[:4]) == [("session:<a>", 4)]


def test_varying_words_join_following_words() -> None:
    names = [f"app:{word}:{kind}:{n}" for word in WORDS for kind in ("get", "set") for n in range(3)]
    assert groups_of(names) == [("app:<a>:get:<b>", 39), ("app:<a>:set:<b>", 39)]


def test_names_that_no_rule_can_have_as_they_are_vary() -> None:
    assert groups_of([b"\xff\xfe:name", "a*b:name", "a<b>:name", "", "é:name"]) == [
        ("<a>:name", 4),
        ("", 1),
    ]


def test_examples_are_first_names_and_their_nodes() -> None:
    made = NameGroups()
    for number in range(5):
        made.add(FoundKey(number, b"k:%d" % number))
    assert made.groups()[0].examples == [FoundKey(0, b"k:0"), FoundKey(1, b"k:1"), FoundKey(2, b"k:2")]


@given(st.lists(st.text("ab1:/*<>é", max_size=12) | st.binary(max_size=8)))
def test_each_name_matches_pattern_of_its_group(names: list[str | bytes]) -> None:
    found = groups_of(names)
    assert sum(count for _, count in found) == len(names)
    for pattern, _ in found:
        assert "*" not in pattern and key_pattern(KeyFormat.parse(pattern))


def test_tree_of_patterns_is_bounded() -> None:
    many = [f"{word}-{other}:x" for word in WORDS for other in WORDS[: FIRST_PARTS_MAX // 8]]
    deep = ["a:" * 500, "b:" * 500]
    found = groups_of(many + deep)
    assert ("<a>:x", len(many)) in found and len(found) <= FIRST_PARTS_MAX
    assert all(pattern.count(":") <= LEVELS_MAX for pattern, _ in found)
