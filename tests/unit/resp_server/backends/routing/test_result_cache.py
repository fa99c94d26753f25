"""Which replies of the upstream are cached, and for how long."""

from __future__ import annotations

import pytest

from resp_server.backends.routing.result_cache import (
    ENTRY_OVERHEAD_BYTES,
    REPLY_BYTES_MAX,
    CachedRead,
    ResultCache,
    read_of,
)
from tests.clock import ManualClock


def get(key: bytes, protocol: int = 2, database: int = 0) -> CachedRead:
    return read_of((b"GET", key), database, protocol)


def fill(cache: ResultCache, key: bytes, reply: bytes | None, time_s: float = 5.0) -> None:
    read = get(key)
    begun = cache.begin_fill(read, [key], time_s)
    assert begun is not None
    cache.end_fill(begun, reply)


def test_reply_is_kept_for_time_since_request() -> None:
    clock = ManualClock()
    cache = ResultCache(clock)
    begun = cache.begin_fill(get(b"a"), [b"a"], 5.0)
    assert begun is not None and cache.get(get(b"a")) is None
    clock.now_s += 2
    cache.end_fill(begun, b"+1\r\n")
    clock.now_s += 2.9
    assert cache.get(get(b"a")) == b"+1\r\n"
    assert cache.get(get(b"a", protocol=3)) is cache.get(get(b"a", database=1)) is cache.get(get(b"b")) is None
    clock.now_s += 0.2
    assert cache.get(get(b"a")) is None
    assert cache.info_fields()["cache_entries"] == cache.info_fields()["cache_bytes"] == 0


@pytest.mark.parametrize("reply", [None, b"x" * (REPLY_BYTES_MAX + 1)])
def test_errors_and_long_replies_are_not_kept(reply: bytes | None) -> None:
    cache = ResultCache(ManualClock())
    fill(cache, b"a", reply)
    assert cache.get(get(b"a")) is None


@pytest.mark.parametrize("changed", [[b"a"], None])
def test_change_invalidates_cached_and_pending_reads(changed: list[bytes] | None) -> None:
    cache = ResultCache(ManualClock())
    fill(cache, b"a", b"+1\r\n")
    begun = cache.begin_fill(get(b"a", protocol=3), [b"a"], 5.0)
    assert begun is not None
    cache.drop(changed)
    cache.end_fill(begun, b"+1\r\n")
    assert cache.get(get(b"a")) is cache.get(get(b"a", protocol=3)) is None
    fill(cache, b"a", b"+2\r\n")
    assert cache.get(get(b"a")) == b"+2\r\n"


@pytest.mark.parametrize("changed", [[b"a", b"a"], None])
def test_keys_of_unanswered_write_are_not_cached(changed: list[bytes] | None) -> None:
    cache = ResultCache(ManualClock())
    before = cache.begin_fill(get(b"a"), [b"a"], 5.0)
    writes = [cache.begin_write(changed), cache.begin_write(changed)]
    assert before is not None
    cache.end_fill(before, b"+old\r\n")
    assert cache.get(get(b"a")) is None and cache.begin_fill(get(b"a"), [b"a"], 5.0) is None
    cache.end_write(writes[0])
    cache.end_write(writes[0])  # once is enough
    assert cache.begin_fill(get(b"a"), [b"a"], 5.0) is None
    cache.end_write(writes[1])
    fill(cache, b"a", b"+new\r\n")
    assert cache.get(get(b"a")) == b"+new\r\n"


def mget(*keys: bytes) -> CachedRead:
    return read_of((b"mGet", *keys), 0, 2)


def test_reply_about_several_keys_ends_with_change_of_any_of_them() -> None:
    cache = ResultCache(ManualClock())
    for changed in (b"a", b"b"):
        for both in ([b"a", b"b"], [b"b", b"a"]):
            begun = cache.begin_fill(mget(*both), both, 5.0)
            assert begun is not None
            cache.end_fill(begun, b"*2\r\n+1\r\n+2\r\n")
        fill(cache, b"a", b"+1\r\n")
        begun = cache.begin_fill(mget(b"b", b"c"), [b"b", b"c"], 5.0)
        assert begun is not None
        assert cache.get(mget(b"a", b"b")) == cache.get(mget(b"b", b"a")) == b"*2\r\n+1\r\n+2\r\n"
        cache.drop([changed])
        cache.end_fill(begun, b"*2\r\n+2\r\n+3\r\n")
        assert cache.get(mget(b"a", b"b")) is cache.get(mget(b"b", b"a")) is None
        assert (cache.get(mget(b"b", b"c")) is None) is (changed == b"b")
        assert (cache.get(get(b"a")) is None) is (changed == b"a")
    cache.drop(None)
    assert cache.info_fields()["cache_bytes"] == cache.info_fields()["cache_entries"] == 0


def test_nothing_about_several_keys_is_cached_while_one_of_them_is_written() -> None:
    cache = ResultCache(ManualClock())
    before = cache.begin_fill(mget(b"a", b"b"), [b"a", b"b"], 5.0)
    write = cache.begin_write([b"b"])
    assert before is not None and cache.begin_fill(mget(b"a", b"b"), [b"a", b"b"], 5.0) is None
    cache.end_fill(before, b"*2\r\n+1\r\n+2\r\n")
    assert cache.get(mget(b"a", b"b")) is None
    cache.end_write(write)
    assert cache.begin_fill(mget(b"a", b"b"), [b"a", b"b"], 5.0) is not None


def test_least_recently_used_entry_is_evicted() -> None:
    cache = ResultCache(ManualClock(), bytes_max=2 * (ENTRY_OVERHEAD_BYTES + 30))
    for key in (b"a", b"b"):
        fill(cache, key, b"+%b\r\n" % key)
    assert cache.get(get(b"a")) == b"+a\r\n"
    fill(cache, b"c", b"+c\r\n")
    assert [cache.get(get(key)) for key in (b"a", b"b", b"c")] == [b"+a\r\n", None, b"+c\r\n"]
    assert cache.info_fields()["cache_evicted"] == 1
