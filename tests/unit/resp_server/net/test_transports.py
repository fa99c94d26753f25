"""The clock for the silence of others stops while this process is stopped, and never goes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resp_server.net.transports import AwakeClock
from tests.clock import ManualClock

STEP_S_MAX = 0.25


def test_frequently_ticked_clock_shows_time() -> None:
    wall = ManualClock()
    clock = AwakeClock(STEP_S_MAX, wall)
    began_s = clock()
    for _ in range(8):
        wall.now_s += STEP_S_MAX
        assert clock.tick() == clock()
    assert clock() - began_s == 8 * STEP_S_MAX


def test_pause_of_this_process_is_one_step() -> None:
    wall = ManualClock()
    clock = AwakeClock(STEP_S_MAX, wall)
    began_s = clock()
    wall.now_s += 3600
    assert clock() - began_s == STEP_S_MAX
    assert clock.tick() - began_s == STEP_S_MAX
    wall.now_s += 0.125
    assert clock() - began_s == STEP_S_MAX + 0.125


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans())))
def test_clock_never_goes_back_or_runs_fast(steps: list[tuple[float, bool]]) -> None:
    wall = ManualClock()
    clock = AwakeClock(STEP_S_MAX, wall)
    shown_s, ticks = clock(), 0
    for passed_s, is_tick in steps:
        wall.now_s += passed_s
        before_s, shown_s = shown_s, clock.tick() if is_tick else clock()
        ticks += is_tick
        assert before_s <= shown_s <= wall.now_s
    assert shown_s - 100.0 <= (ticks + 1) * STEP_S_MAX + 1e-6
