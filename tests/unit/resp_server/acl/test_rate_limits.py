"""Rate limits: their text, the token bucket, and how long a connection pauses."""

from __future__ import annotations

import pytest

from resp_server.acl.rate_limits import BURST_S, PAUSE_S_MAX, PAUSE_S_MIN, RateLimit, RateLimiter, TokenBucket
from tests.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("u=10", RateLimit("u", 10)),
        ("u=1", RateLimit("u", 1)),
        ("u=10,20", RateLimit("u", 10, 20)),
        ("u=,20", RateLimit("u", None, 20)),
        ("a=b=5", RateLimit("a=b", 5)),
    ],
)
def test_limits_are_parsed(text: str, limit: RateLimit) -> None:
    assert RateLimit.parse(text) == limit


@pytest.mark.parametrize("text", ["", "u", "u=", "=5", "5", "u=5,", "u=,", "=,5"])
def test_text_without_user_or_rate_is_not_limit(text: str) -> None:
    with pytest.raises(ValueError, match=f"^'{text}' is not a limit: write USER=COMMANDS, USER=COMMANDS,BYTES or "):
        RateLimit.parse(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("u=0", "0"),
        ("u=-1", "-1"),
        ("u=1.5", "1.5"),
        ("u=5,x", "x"),
        ("u=1,2,3", "2,3"),
        ("u=5,0", "0"),
        ("u=٣", "٣"),  # a digit, but not one of ASCII
    ],
)
def test_rate_that_is_not_whole_number_above_0_is_named(text: str, rate: str) -> None:
    with pytest.raises(ValueError, match=f"^'{rate}' in the limit '{text}' is not a whole number above 0$"):
        RateLimit.parse(text)


def test_several_processes_share_limit() -> None:
    assert RateLimit("u", 100, 50).shared_by(4) == RateLimit("u", 25, 12.5)
    assert RateLimit("u", 100).shared_by(4) == RateLimit("u", 25)
    assert RateLimit("u", None, 50).shared_by(4) == RateLimit("u", None, 12.5)


def test_bucket_fills_up_to_its_burst_and_no_further() -> None:
    bucket = TokenBucket(10)
    assert bucket.tokens(5.0) == 10 * BURST_S
    bucket.consume(25)
    assert bucket.tokens(5.0) == -15
    assert bucket.wait_s(1.0, 5.0) == pytest.approx(1.6)
    assert bucket.tokens(6.0) == -5
    assert bucket.tokens(60.0) == 10 * BURST_S
    bucket.consume(4)
    assert bucket.tokens(50.0) == 6  # a clock that goes back takes nothing
    assert bucket.tokens(50.1) == pytest.approx(7)
    assert bucket.wait_s(1.0, 50.1) == 0


def test_bucket_of_less_than_one_token_per_second_fills_up_to_one() -> None:
    bucket = TokenBucket(0.25)
    assert bucket.tokens(0.0) == 1
    bucket.consume(1)
    assert bucket.tokens(2.0) == 0.5
    assert bucket.wait_s(1.0, 2.0) == 2
    assert bucket.tokens(100.0) == 1


def test_commands_are_allowed_up_to_tokens_of_bucket(clock: ManualClock) -> None:
    limiter = RateLimiter(RateLimit("u", commands_per_s=10), clock)
    assert limiter.allowed_requests(4) == 4
    assert limiter.allowed_requests(100) == 10
    limiter.consume(12, 10**9)  # bytes are not limited
    assert limiter.allowed_requests(100) == 0
    assert limiter.pause_s() == pytest.approx(0.3)
    clock.now_s += 0.35
    assert limiter.allowed_requests(100) == 1
    assert limiter.pause_s() == PAUSE_S_MIN


def test_requests_are_allowed_while_bytes_are_left(clock: ManualClock) -> None:
    limiter = RateLimiter(RateLimit("u", bytes_per_s=1000), clock)
    limiter.consume(10**9, 999)  # commands are not limited
    assert limiter.allowed_requests(100) == 100
    limiter.consume(0, 1)
    assert limiter.allowed_requests(100) == 0
    limiter.consume(0, 499)
    assert limiter.pause_s() == pytest.approx(0.5)
    clock.now_s += 0.5
    assert limiter.allowed_requests(100) == 100


def test_longer_wait_of_two_limits_counts(clock: ManualClock) -> None:
    limiter = RateLimiter(RateLimit("u", commands_per_s=10, bytes_per_s=1000), clock)
    limiter.consume(14, 1099)
    assert limiter.pause_s() == pytest.approx(0.5)
    limiter.consume(0, 700)
    assert limiter.pause_s() == pytest.approx(0.8)
    clock.now_s += 0.6  # there are commands, but no bytes
    assert limiter.allowed_requests(100) == 0


def test_connection_pauses_neither_too_short_nor_too_long(clock: ManualClock) -> None:
    fast = RateLimiter(RateLimit("a", commands_per_s=1e6), clock)
    slow = RateLimiter(RateLimit("a", commands_per_s=0.01), clock)
    for limiter in (fast, slow):
        limiter.consume(10**6, 0)
    assert fast.pause_s() == PAUSE_S_MIN
    assert slow.pause_s() == PAUSE_S_MAX
