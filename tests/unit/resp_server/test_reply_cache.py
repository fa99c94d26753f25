"""Ready replies are those that were added and not dropped, stay within their bytes, and rest when they are a loss."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from resp_server import reply_cache
from resp_server.protocol.wholes import head
from resp_server.reply_cache import ENTRY_BYTES_MAX, ENTRY_OVERHEAD_BYTES, REQUESTS_PER_SUBJECT_MAX, ReplyCache

GET, LRANGE = head(2, b"GET"), head(4, b"LRANGE")

keys = st.sampled_from([b"%d" % number for number in range(30)])
steps = st.one_of(
    st.tuples(st.sampled_from((GET, LRANGE)), st.lists(keys, max_size=10)),
    st.tuples(st.just(b"drop"), st.none() | st.lists(keys, max_size=10)),
)


def request(of: bytes, key: bytes, stop: int = 0) -> bytes:
    asked = b"%b%d\r\n%b\r\n" % (of, len(key), key)
    return asked if of == GET else b"%b$1\r\n0\r\n$%d\r\n%d\r\n" % (asked, len(b"%d" % stop), stop)


@given(st.lists(steps), st.sampled_from((0, 150, 1_000, 3_000, 1 << 20)))
@settings(deadline=None)
def test_what_is_found_is_what_was_added_last_and_not_dropped(
    steps: list[tuple[bytes, list[bytes] | None]], room: int
) -> None:
    cache = ReplyCache(room)
    truth: dict[bytes, bytes] = {}
    for turn, (step, some) in enumerate(steps):
        if step == b"drop" or some is None:
            cache.drop(some)
            for key in truth if some is None else some:
                truth[key] = b"reply %d" % turn
            continue
        asked = {request(step, key, int(key) % 3): truth.setdefault(key, b"first") for key in some}
        assert all(cache.held.get(each, reply) == reply for each, reply in asked.items())
        missed = {each: reply for each, reply in asked.items() if each not in cache.held}
        cache.add(step, missed, len(missed))
        assert cache.used_bytes <= room
        assert cache.used_bytes >= sum(len(reply) + ENTRY_OVERHEAD_BYTES for reply in cache.held.values())
    cache.drop(list(truth))
    assert (len(cache), cache._bytes, cache._by_subject) == (0, 0, {})


def fill(cache: ReplyCache, count: int) -> int:
    """Ask for that many different keys, one after the other; return how many were found."""
    found = 0
    for number in range(count):
        asked = request(GET, b"%d" % number)
        cache.looks += 1
        if asked in cache.held:
            found += 1
        else:
            cache.add(GET, {asked: b"reply"}, 1)
    return found


def test_the_oldest_make_room() -> None:
    cache = ReplyCache(100 * (ENTRY_OVERHEAD_BYTES + 30))
    fill(cache, 150)
    assert request(GET, b"0") not in cache.held
    assert request(GET, b"149") in cache.held
    assert 85 <= len(cache) <= 105


def test_what_is_dropped_as_a_whole_is_freed_as_others_are_added() -> None:
    cache = ReplyCache(1 << 20)
    fill(cache, 1000)
    cache.add(LRANGE, {request(LRANGE, b"a"): b"reply"}, 1)
    before = cache.used_bytes
    cache.drop(None)
    assert (len(cache), cache.used_bytes) == (0, before)
    left = [sum(map(len, cache._aside))]
    while left[-1]:
        fill(cache, 1)
        cache.drop([b"0"])
        assert cache.used_bytes <= before
        left.append(sum(map(len, cache._aside)))
    assert all(0 < earlier - later <= 3 for earlier, later in pairwise(left))
    cache.drop(None)
    assert cache.used_bytes == 0
    assert len(cache._aside) <= 1


def test_long_replies_are_left_out() -> None:
    cache = ReplyCache(1 << 20)
    short, long = request(GET, b"a"), request(GET, b"b")
    cache.add(GET, {short: b"x" * (ENTRY_BYTES_MAX - len(short)), long: b"x" * (ENTRY_BYTES_MAX - len(long) + 1)}, 2)
    assert list(cache.held) == [short]


def test_of_a_subject_not_more_requests_are_held_than_can_be_dropped_at_once() -> None:
    cache = ReplyCache(1 << 20)
    many = {request(LRANGE, b"a", stop): b"reply" for stop in range(100)}
    cache.add(LRANGE, many | {request(LRANGE, b"b"): b"reply"}, 101)
    assert len(cache) == REQUESTS_PER_SUBJECT_MAX + 1
    cache.drop([b"a"])
    assert list(cache.held) == [request(LRANGE, b"b")]


def test_a_cache_that_finds_nothing_rests_for_a_while_and_then_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_cache, "JUDGED_AFTER_LOOKS", 100)
    monkeypatch.setattr(reply_cache, "REST_LOOKS", 50)
    cache = ReplyCache(20 * (ENTRY_OVERHEAD_BYTES + 30))
    assert fill(cache, 100) == 0
    assert len(cache) == 0
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
