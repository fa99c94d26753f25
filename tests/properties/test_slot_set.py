"""Operations on slot sets equal those on Python sets of numbers."""

from __future__ import annotations

from unittest.mock import call, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_backend.model.errors import SlotSetError
from state_backend.model.slot_set import ALL, NONE, SlotSet
from state_backend.model.slots import HASH_BITS, SLOTS

# Few and narrow, so that they often touch or overlap; and some of any width.
EDGES = st.one_of(st.integers(0, 40), st.integers(SLOTS - 20, SLOTS - 1), st.integers(0, SLOTS - 1))
RANGES = st.lists(st.tuples(EDGES, EDGES).map(lambda pair: (min(pair), max(pair))), max_size=6)
GROUPS = RANGES.map(SlotSet.of)


@given(RANGES)
def test_ranges_in_any_order_become_sorted_ranges_that_do_not_touch(ranges: list[tuple[int, int]]) -> None:
    groups = SlotSet.of(ranges)
    slots = {slot for first, last in ranges for slot in range(first, last + 1)}
    assert list(groups) == sorted(slots)
    assert len(groups) == len(slots)
    assert all(last + 1 < first for (_, last), (first, _) in zip(groups.ranges, groups.ranges[1:], strict=False))
    assert groups == SlotSet.of((slot, slot) for slot in slots)


@given(GROUPS, GROUPS)
def test_union_intersection_and_difference_are_those_of_sets(one: SlotSet, other: SlotSet) -> None:
    assert set(one | other) == set(one) | set(other)
    assert set(one & other) == set(one) & set(other)
    assert set(one - other) == set(one) - set(other)
    for made in (one | other, one & other, one - other):
        assert made == SlotSet.of(made.ranges)


@given(GROUPS, st.lists(EDGES, min_size=1, max_size=20))
def test_slot_is_among_them_if_one_of_ranges_has_it(groups: SlotSet, slots: list[int]) -> None:
    numbers = set(groups)
    first, last = min(slots), max(slots)
    assert [slot in groups for slot in slots] == [slot in numbers for slot in slots]
    assert groups.intersects(first, last) == bool(numbers & set(range(first, last + 1)))
    assert groups.covers(first, last) == (numbers >= set(range(first, last + 1)))


@given(GROUPS.filter(bool), st.data())
def test_each_slot_is_one_that_random_position_may_be_in(groups: SlotSet, data: st.DataObject) -> None:
    nth, place = data.draw(st.integers(0, len(groups) - 1)), data.draw(st.integers(0, (1 << HASH_BITS) - 1))
    with patch("state_backend.model.slot_set.randrange", side_effect=[nth, place]) as drawn:
        assert groups.random_position() == list(groups)[nth] << HASH_BITS | place
    assert drawn.call_args_list == [call(len(groups)), call(1 << HASH_BITS)]


@given(GROUPS)
def test_written_text_is_read_back(groups: SlotSet) -> None:
    assert SlotSet.parse(str(groups)) == groups


@given(st.text(alphabet="0123456789-, x", max_size=12))
def test_any_text_is_slots_or_sparkis_error(text: str) -> None:
    try:
        groups = SlotSet.parse(text)
    except SlotSetError:
        return
    assert SlotSet.parse(str(groups)) == groups


def test_slot_sets_of_all_and_of_no_slots() -> None:
    assert (str(ALL), len(ALL), str(NONE), len(NONE)) == ("0-16383", SLOTS, "", 0)
    assert SlotSet.parse("") == SlotSet.parse(" ") == NONE
    assert ALL - ALL == NONE
    assert not NONE
    assert SlotSet.parse("9000-9010, 0-5460,5461") == SlotSet(((0, 5461), (9000, 9010)))


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1--2", "1-2-3", "1,,2", ",", "+1", "1_0", "٣"])
def test_text_that_is_no_range_is_named(text: str) -> None:
    with pytest.raises(SlotSetError, match="is no range of slots"):
        SlotSet.parse(text)


@pytest.mark.parametrize("text", ["16384", "0-16384", "5-4"])
def test_range_that_cannot_be_is_named(text: str) -> None:
    with pytest.raises(SlotSetError, match=r"\d+-\d+ is no range of slots: slots are"):
        SlotSet.parse(text)
