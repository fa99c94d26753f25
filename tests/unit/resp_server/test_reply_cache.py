"""Ready replies are those that were added and not dropped, stay within their bytes, and rest when they are a loss."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from resp_server import reply_cache
from resp_server.reply_cache import ENTRY_BYTES_MAX, ENTRY_OVERHEAD_BYTES, FREED_MIN, ReplyCache

keys = st.sampled_from([b"%d" % number for number in range(30)])
steps = st.one_of(
    st.tuples(st.just("ask"), st.lists(keys, max_size=10)),
    st.tuples(st.just("drop"), st.none() | st.lists(keys, max_size=10)),
)


@given(st.lists(steps), st.sampled_from((0, 150, 1_000, 1 << 20)))
@settings(deadline=None)
def test_what_is_found_is_what_was_added_last_and_not_dropped(steps: list[tuple[str, list[bytes]]], room: int) -> None:
    cache = ReplyCache(room)
    truth: dict[bytes, bytes] = {}
    for turn, (step, some) in enumerate(steps):
        if step == "drop":
            cache.drop(some)
            for key in truth if some is None else some:
                truth[key] = b"reply %d" % turn
            continue
        found = cache.find(some)
        assert all(reply in (None, truth.get(key, b"first")) for key, reply in zip(some, found, strict=True))
        missed = {key: truth.get(key, b"first") for key, reply in zip(some, found, strict=True) if reply is None}
        cache.add(missed, found.count(None))
        assert cache.used_bytes <= room
        held = cache.find(list(truth))
        assert cache.used_bytes >= sum(len(reply) + ENTRY_OVERHEAD_BYTES for reply in held if reply is not None)
    cache.drop(None)
    assert (len(cache), cache.used_bytes) == (0, 0)


def fill(cache: ReplyCache, count: int) -> int:
    """Ask for that many different keys, one after the other; return how many were found."""
    found = 0
    for number in range(count):
        key = b"%d" % number
        if cache.find([key]) == [None]:
            cache.add({key: b"reply"}, 1)
        else:
            found += 1
    return found


def test_the_oldest_make_room() -> None:
    cache = ReplyCache(100 * (ENTRY_OVERHEAD_BYTES + 8))
    fill(cache, 150)
    assert cache.find([b"0", b"149"]) == [None, b"reply"]
    assert 90 <= len(cache) <= 100


def test_what_is_dropped_as_a_whole_is_freed_bit_by_bit() -> None:
    cache = ReplyCache(1 << 20)
    fill(cache, 1000)
    cache.drop(None)
    fill(cache, 10)
    cache.drop(None)
    assert (len(cache), cache.used_bytes) == (0, 0)
    left = [sum(map(len, cache._dropped))]
    while left[-1]:
        assert cache.find([b"0"]) == [None]
        left.append(sum(map(len, cache._dropped)))
    assert len(left) > 300 // FREED_MIN
    assert all(0 < before - after <= FREED_MIN for before, after in pairwise(left))


def test_long_replies_are_left_out() -> None:
    cache = ReplyCache(1 << 20)
    cache.add({b"a": b"x" * ENTRY_BYTES_MAX, b"b": b"x" * (ENTRY_BYTES_MAX - 1)}, 2)
    assert [reply is None for reply in cache.find([b"a", b"b"])] == [True, False]


def test_a_cache_that_finds_nothing_rests_for_a_while_and_then_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_cache, "JUDGED_AFTER_LOOKS", 100)
    monkeypatch.setattr(reply_cache, "REST_LOOKS", 50)
    cache = ReplyCache(20 * (ENTRY_OVERHEAD_BYTES + 8))
    assert fill(cache, 100) == 0
    assert (len(cache), cache.used_bytes) == (0, 0)
    assert fill(cache, 49) == 0
    assert len(cache) == 0
    fill(cache, 10)
    assert fill(cache, 9) == 9
    # The next rest is twice as long.
    fill(cache, 100)
    assert len(cache) == 0
    fill(cache, 70)
    assert len(cache) == 0
    fill(cache, 30)
    assert len(cache) > 0


def test_a_cache_that_hits_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_cache, "JUDGED_AFTER_LOOKS", 100)
    cache = ReplyCache(1 << 20)
    for _ in range(50):
        fill(cache, 10)
        cache.drop([b"1", b"2"])
    assert len(cache) == 8
