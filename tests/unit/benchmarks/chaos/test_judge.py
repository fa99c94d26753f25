"""What the readers of `make chaos` take for a wrong answer."""

from __future__ import annotations

import pytest

from benchmarks.chaos.judge import GROUPS, Judge, ReaderPosition, key, text
from state_backend.model.slots import slot_of

Value = int | bytes | None


def read_pairs(*values: Value, group: int = 1) -> list[tuple[bytes, bytes | None]]:
    """Return the keys of a group with values; a number is that of the value's epoch."""
    names = [key(group, member) for member in "ab"]
    return [
        (name, text(value, name) if isinstance(value, int) else value)
        for name, value in zip(names, values, strict=True)
    ]


def judged(*answers: list[Value], is_one_epoch: bool = True) -> dict[str, int]:
    judge, seen = Judge(0.0), ReaderPosition()
    for values in answers:
        judge.record_reply(1, read_pairs(*values), seen, 1.0, is_one_epoch=is_one_epoch)
    return dict(judge.begin(2.0).wrong)


def test_both_keys_of_group_are_in_one_slot() -> None:
    assert all(slot_of(key(group, "a")) == slot_of(key(group, "b")) for group in range(GROUPS))


def test_answers_with_growing_or_equal_epochs_are_right() -> None:
    assert judged([1, 1], [1, 1], [3, 3]) == {}


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ([[1, None]], "missing"),
        ([[1, 2]], "torn"),
        ([[2, 2], [1, 1]], "backward"),
        ([[1, text(1, key(2, "b"))]], "foreign"),
        ([[1, b"x"]], "foreign"),
    ],
)
def test_wrong_answer_is_counted_under_its_name(answers: list[list[Value]], wrong: str) -> None:
    assert judged(*answers) == {wrong: 1}


def test_longest_time_without_answer_is_that_of_key_that_waited_longest() -> None:
    judge, seen = Judge(0.0), ReaderPosition()
    for group in range(GROUPS):
        judge.record_reply(group, read_pairs(1, 1, group=group), seen, 1.0)
    judge.begin(1.0)
    for group in range(GROUPS):
        judge.record_reply(group, read_pairs(2, 2, group=group), seen, 4.0 if group == 7 else 2.0)
    assert judge.begin(4.0).longest_s == 3.0


def test_key_that_is_not_answered_any_more_has_waited_until_end() -> None:
    judge = Judge(0.0)
    assert judge.begin(5.0).longest_s == 5.0


def test_new_connection_may_see_older_epoch() -> None:
    judge = Judge(0.0)
    judge.record_reply(1, read_pairs(2, 2), ReaderPosition(), 1.0)
    judge.record_reply(1, read_pairs(1, 1), ReaderPosition(), 1.0)
    assert not judge.begin(2.0).wrong


def test_keys_of_several_slots_may_have_several_epochs_outside_of_transaction() -> None:
    assert judged([1, 2], is_one_epoch=False) == {}
    assert judged([2, 2], [1, 3], is_one_epoch=False) == {"backward": 1}


def test_connection_may_go_back_once_if_allowed() -> None:
    judge, seen = Judge(0.0), ReaderPosition()
    judge.record_reply(1, read_pairs(4, 4), seen, 1.0)
    judge.allow_step_back()
    for epoch in (3, 4, 3):
        judge.record_reply(1, read_pairs(epoch, epoch), seen, 1.0)
    window = judge.begin(2.0)
    assert (window.went_back, dict(window.wrong)) == (1, {"backward": 1})
