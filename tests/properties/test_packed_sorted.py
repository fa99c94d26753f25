"""A packed sorted set is its members in order, whatever their bytes and scores are."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_backend.codec import packed_list, packed_sorted
from state_backend.model.errors import ChangeError

MEMBERS = st.binary(max_size=6) | st.lists(st.sampled_from((b"a", b"ab", b"", b"\x00", b"\xff")), max_size=4).map(
    b"".join
)
SCORES = st.sampled_from((-1.0, 0.0, -0.0, 1.0, 1e300, float("inf"), float("-inf"))) | st.floats(allow_nan=False)
SETS = st.dictionaries(MEMBERS, SCORES, max_size=30)


@settings(deadline=None)
@given(SETS, st.lists(MEMBERS, max_size=10), st.integers(0, 30), st.integers(0, 30))
def test_members_are_ordered_and_found(scores: dict[bytes, float], others: list[bytes], start: int, stop: int) -> None:
    run = packed_sorted.pack_members(scores.items())
    ranking = sorted((score, member) for member, score in scores.items())
    assert packed_sorted.count(run) == len(scores)
    assert packed_sorted.pairs(run) == ranking
    stop = min(stop, len(ranking))
    assert packed_sorted.pairs(run, start, stop) == ranking[start:stop]
    for member in [*scores, *others]:
        at = packed_sorted.index(run, member)
        assert at == (ranking.index((scores[member], member)) if member in scores else -1)
        if at >= 0:
            assert packed_sorted.score(run, at) == scores[member]
            assert packed_sorted.rank(run, scores[member], member) == at
        for score in {*scores.values(), 0.5}:
            assert packed_sorted.count_before(run, (score, member)) == bisect_left(ranking, (score, member))


@settings(deadline=None)
@given(SETS)
def test_bytes_after_packed_members_are_ignored(scores: dict[bytes, float]) -> None:
    run = packed_sorted.pack_members(scores.items())
    assert packed_sorted.pairs(run + b"more") == packed_sorted.pairs(run)


@settings(deadline=None)
@given(SETS, SETS, st.data())
def test_packed_members_are_inserted_and_removed_in_place(
    scores: dict[bytes, float], others: dict[bytes, float], data: st.DataObject
) -> None:
    ranking = sorted((score + 0.0, member) for member, score in scores.items())
    gone = data.draw(st.lists(st.sampled_from(ranking), unique=True)) if ranking else []
    more = [(score + 0.0, member) for member, score in others.items() if member not in scores]
    steps = sorted([(pair, False) for pair in gone] + [(pair, True) for pair in more])
    edited = packed_sorted.edit(packed_sorted.pack_members(scores.items()), steps)
    assert edited == packed_sorted.pack(sorted((set(ranking) - set(gone)) | set(more)))
    for score, member in more:
        with pytest.raises(KeyError):
            packed_sorted.edit(packed_sorted.pack_members(scores.items()), [((score, member), False)])


@settings(deadline=None)
@given(st.floats(allow_nan=False))
def test_score_is_read_back_from_its_text_and_no_zero_has_sign(score: float) -> None:
    read = packed_sorted.score_of(packed_sorted.score_text(score))
    assert repr(read) == repr(score + 0.0)


@pytest.mark.parametrize("text", [b"nan", b"", b"one", b"0x1", b"1,5"])
def test_text_that_is_no_number_is_no_score(text: bytes) -> None:
    with pytest.raises(ChangeError, match="is no score"):
        packed_sorted.score_of(text)


@settings(deadline=None)
@given(st.lists(MEMBERS, max_size=20), st.lists(MEMBERS | st.just(b"$1\r\na\r\n"), max_size=20))
def test_elements_of_packed_list_are_found(elements: list[bytes], others: list[bytes]) -> None:
    packed = packed_list.pack(elements)
    for each in [*elements, *others]:
        assert packed_list.has(packed, each) == (each in elements)
