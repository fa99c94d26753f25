"""The circuit breaker."""

from __future__ import annotations

import pytest

from resp_server.backends.redis.breaker import PAUSE_S, PAUSE_S_MAX, Breaker


def test_breaker_opens_at_failure_and_closes_at_success() -> None:
    breaker = Breaker()
    assert not breaker.is_open
    breaker.failed("refused")
    breaker.failed("refused again")
    assert breaker.is_open and breaker.reason == "refused again" and breaker.times_opened == 1
    breaker.succeeded()
    assert not breaker.is_open
    breaker.failed("once more")
    assert breaker.times_opened == 2


def test_pauses_double_up_to_limit_and_start_again_after_success() -> None:
    breaker = Breaker(lambda: 1.0)
    pauses = [breaker.failed("refused") for _ in range(10)]
    assert pauses[:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S] and pauses[-1] == PAUSE_S_MAX
    breaker.succeeded()
    assert breaker.failed("refused") == PAUSE_S


@pytest.mark.parametrize(("part", "share"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_pause_has_jitter_of_half_its_length(part: float, share: float) -> None:
    assert Breaker(lambda: part).failed("refused") == pytest.approx(PAUSE_S * share)
