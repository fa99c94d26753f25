"""What the readers of `make chaos` take for a wrong answer."""

from __future__ import annotations

import pytest

from benchmarks.chaos.judge import GROUPS, Judge, ReaderPosition, key
from state_backend.model.slots import slot_of


def judged(*answers: list[bytes | None]) -> dict[str, int]:
    judge, seen = Judge(0.0), ReaderPosition()
    for values in answers:
        judge.record_reply(1, values, seen, 1.0)
    return dict(judge.begin(2.0).wrong)


def test_both_keys_of_a_group_are_in_one_slot() -> None:
    assert all(slot_of(key(group, "a")) == slot_of(key(group, "b")) for group in range(GROUPS))


def test_answers_whose_epochs_grow_or_stay_are_right() -> None:
    assert judged([b"1", b"1"], [b"1", b"1"], [b"3", b"3"]) == {}


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ([[b"1", None]], "missing"),
        ([[b"1", b"2"]], "torn"),
        ([[b"2", b"2"], [b"1", b"1"]], "backward"),
    ],
)
def test_a_wrong_answer_is_counted_under_its_name(answers: list[list[bytes | None]], wrong: str) -> None:
    assert judged(*answers) == {wrong: 1}


def test_the_longest_time_without_an_answer_is_that_of_the_key_that_waited_longest() -> None:
    judge, seen = Judge(0.0), ReaderPosition()
    for group in range(GROUPS):
        judge.record_reply(group, [b"1", b"1"], seen, 1.0)
    judge.begin(1.0)
    for group in range(GROUPS):
        judge.record_reply(group, [b"2", b"2"], seen, 4.0 if group == 7 else 2.0)
    assert judge.begin(4.0).longest_s == 3.0


def test_a_key_that_is_not_answered_any_more_has_waited_until_the_end() -> None:
    judge = Judge(0.0)
    assert judge.begin(5.0).longest_s == 5.0


def test_a_connection_that_is_new_may_see_an_older_epoch() -> None:
    judge = Judge(0.0)
    judge.record_reply(1, [b"2", b"2"], ReaderPosition(), 1.0)
    judge.record_reply(1, [b"1", b"1"], ReaderPosition(), 1.0)
    assert not judge.begin(2.0).wrong
