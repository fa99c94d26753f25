"""The end of a program: its steps, how long they may take, and what a second signal does."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from resp_server.programs import draining
from resp_server.programs.draining import Drain
from resp_server.settings.programs import add_settings
from resp_server.settings.setting import PROXY


def drain_of(*words: str) -> Drain:
    parser = argparse.ArgumentParser()
    add_settings(parser, PROXY, "drain")
    return Drain(parser.parse_args(words))


def test_no_step_runs_without_signal() -> None:
    drain = drain_of()

    async def step(seconds_max: float) -> None:
        raise AssertionError

    asyncio.run(drain.run(step))
    assert not drain.is_urgent


def test_steps_share_time() -> None:
    drain = drain_of("--drain-timeout", "7")
    drain.signalled()
    given: list[float] = []

    async def step(seconds_max: float) -> None:
        given.append(seconds_max)

    asyncio.run(drain.run(step, step))
    assert 0 < given[1] <= given[0] <= 7
    assert not drain.is_urgent


def test_second_signal_ends_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "SAME_SIGNAL_S", -1.0)
    drain = drain_of()
    drain.signalled()
    was_cancelled: list[bool] = []

    async def step(seconds_max: float) -> None:
        drain.signalled()
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.append(True)

    asyncio.run(drain.run(step))
    assert drain.is_urgent and was_cancelled == [True]


def test_signals_at_same_time_count_as_one() -> None:
    drain = drain_of()
    drain.signalled()
    drain.signalled()
    assert not drain.is_urgent


def test_error_of_step_is_raised() -> None:
    drain = drain_of()
    drain.signalled()

    async def step(seconds_max: float) -> None:
        raise OSError("of a step")

    with pytest.raises(OSError, match="of a step"):
        asyncio.run(drain.run(step))
