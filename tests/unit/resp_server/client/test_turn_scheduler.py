"""Delayed turns leave room for clients with small requests."""

from __future__ import annotations

import asyncio

import pytest

from resp_server.client import turn_scheduler
from resp_server.client.turn_scheduler import TurnScheduler


async def rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_turns_run_in_order_with_other_callbacks_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_scheduler, "ROUND_NS_MAX", 0)  # each lasts longer

    async def run() -> list[str]:
        waiting, done = TurnScheduler(), list[str]()
        for name in "abc":
            waiting.defer(lambda name=name: done.append(name))  # type: ignore[misc]
        for _ in range(3):
            await rounds(1)
            done.append("another")
        return done

    assert asyncio.run(run()) == ["a", "another", "b", "another", "c", "another"]


def test_short_turns_run_together_and_defer_their_work() -> None:
    async def run() -> list[str]:
        waiting, done = TurnScheduler(), list[str]()
        waiting.defer(lambda: waiting.defer(lambda: done.append("rest of a")) and done.append("a"))  # type: ignore[func-returns-value,arg-type]
        waiting.defer(lambda: done.append("b"))
        cancelled = waiting.defer(lambda: done.append("cancelled"))
        cancelled.cancel()
        await rounds(1)
        done.append("another")
        await rounds(1)
        return done

    assert asyncio.run(run()) == ["a", "b", "another", "rest of a"]


def test_failing_turn_ends_no_other() -> None:
    def fails() -> None:
        raise OSError("of one client")

    async def run() -> tuple[list[str], list[str]]:
        waiting, done, logged = TurnScheduler(), list[str](), list[str]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(str(context["exception"])))
        waiting.defer(fails)
        waiting.defer(lambda: done.append("next"))
        await rounds(2)
        waiting.defer(lambda: done.append("later"))
        await rounds(1)
        return done, logged

    assert asyncio.run(run()) == (["next", "later"], ["of one client"])


def test_round_is_long_after_its_time_or_while_client_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        waiting = TurnScheduler()
        monkeypatch.setattr(turn_scheduler, "ROUND_NS_MAX", 1 << 60)
        assert [waiting.must_defer, waiting.must_defer] == [False, False]
        await rounds(1)
        monkeypatch.setattr(turn_scheduler, "ROUND_NS_MAX", 0)
        assert [waiting.must_defer, waiting.must_defer] == [False, True]
        await rounds(1)
        assert not waiting.must_defer
        await rounds(1)
        waiting.defer(lambda: None)
        assert waiting.must_defer
        await rounds(1)
        assert not waiting.must_defer

    asyncio.run(run())


def test_work_of_round_is_due_again_after_round_or_time_limit() -> None:
    async def run() -> None:
        done = list[str]()
        waiting = TurnScheduler(lambda: done.append("done"))
        assert waiting.fresh_until_ns == 0
        waiting.refresh(1)
        assert (done, waiting.fresh_until_ns) == (["done"], 1 + turn_scheduler.ROUND_NS_MAX)
        waiting.refresh(waiting.fresh_until_ns)
        assert (done, waiting.fresh_until_ns) == (["done"] * 2, 1 + 2 * turn_scheduler.ROUND_NS_MAX)
        await rounds(1)
        assert waiting.fresh_until_ns == 0

    asyncio.run(run())
