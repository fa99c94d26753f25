"""Coroutines that answer requests: when they run, what their sinks get, and how their work is divided among turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter_ns

import pytest

from resp_server.limits import STEP_NS_MAX
from resp_server.protocol.errors import GenericError
from resp_server.raw_replies.answers import (
    Answer,
    CallbackWait,
    ReplyFuture,
    StepPauses,
    all_of,
    ask,
    merge_answers,
    run_in_steps,
    run_into,
    start,
)
from resp_server.raw_replies.raw_reply import RawReply, Steps, as_bytes
from resp_server.raw_replies.reply_sinks import ReplySink
from resp_server.session.epochs import NO_EPOCHS, ReplyEpochs


class Sink(ReplySink):
    """Keeps what it gets. refuses: `put` raises."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.found: list[tuple[int, RawReply | Exception]] = []
        self._refuses = refuses

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        if self._refuses:
            raise ValueError("refused")
        self.found.append((index, reply))

    def fail(self, index: int, error: Exception) -> None:
        self.found.append((index, error))


class Later:
    """The later turns of an event loop."""

    def __init__(self) -> None:
        self.turns: list[Callable[[], None]] = []

    def __call__(self, then: Callable[[], None]) -> None:
        self.turns.append(then)

    def run(self) -> int:
        """Run all turns; return their number."""
        count = 0
        while self.turns:
            self.turns.pop(0)()
            count += 1
        return count


def spend(nanoseconds: int) -> None:
    """Use up a part of a turn."""
    ends_ns = perf_counter_ns() + nanoseconds
    while perf_counter_ns() < ends_ns:
        pass


def test_coroutine_runs_to_missing_reply_and_ends_with_it() -> None:
    reply, sink, began = ReplyFuture(), Sink(), list[str]()

    async def answer() -> Answer:
        began.append("sent")
        return await reply

    run_into(answer(), sink, 3)
    assert (began, sink.found) == (["sent"], [])
    reply.put(0, b"+OK\r\n")
    assert sink.found == [(3, b"+OK\r\n")]


def test_only_first_reply_or_exception_of_request_counts() -> None:
    reply, sink = ReplyFuture(), Sink()
    reply.put(0, b"+first\r\n")
    reply.put(0, b"+second\r\n")
    reply.fail(0, GenericError("late"))

    async def answer() -> Answer:
        return await reply

    run_into(answer(), sink, 0)
    assert sink.found == [(0, b"+first\r\n")]


def test_exception_of_coroutine_reaches_its_sink() -> None:
    sink, error = Sink(), GenericError("no")

    async def answer() -> Answer:
        raise error

    run_into(answer(), sink, 1)
    assert sink.found == [(1, error)]


def test_exception_of_sink_reaches_same_sink() -> None:
    sink = Sink(refuses=True)

    async def answer() -> Answer:
        return Answer(b"+OK\r\n")

    run_into(answer(), sink, 1)
    assert [(index, str(error)) for index, error in sink.found] == [(1, "refused")]


def test_unsent_request_raises_when_reply_is_awaited() -> None:
    sink, error = Sink(), GenericError("no server")

    def send(reply: ReplySink, index: int) -> None:
        raise error

    async def answer() -> Answer:
        return await ask(send)

    run_into(answer(), sink, 0)
    assert sink.found == [(0, error)]


def test_all_replies_are_awaited_in_any_order_of_their_arrival() -> None:
    replies, sink = [ReplyFuture() for _ in range(3)], Sink()

    async def answer() -> Answer:
        return Answer(b"".join([as_bytes(each.reply) for each in await all_of(replies)]))

    run_into(answer(), sink, 0)
    for at in (2, 0, 1):
        assert not sink.found
        replies[at].put(0, b"%d" % at)
    assert sink.found == [(0, b"012")]


def test_first_exception_does_not_wait_for_other_replies() -> None:
    replies, sink, error = [ReplyFuture() for _ in range(3)], Sink(), GenericError("lost")

    async def answer() -> Answer:
        await all_of(replies)
        raise AssertionError

    run_into(answer(), sink, 0)
    replies[1].fail(0, error)
    assert sink.found == [(0, error)]
    replies[0].put(0, b"+late\r\n")
    assert len(sink.found) == 1


def test_first_error_among_joined_replies_is_reply() -> None:
    sink, later = Sink(), Later()
    replies = [start(answer_of(each)) for each in (b":1\r\n", b"-ERR a\r\n", b"-ERR b\r\n")]
    run_into(merge_answers(replies, lambda found: b"".join(map(as_bytes, found)), later), sink, 0)
    assert sink.found == [(0, b"-ERR a\r\n")]


async def answer_of(reply: bytes) -> Answer:
    """Answer at once."""
    return Answer(reply)


@pytest.mark.parametrize("is_later", [False, True])
def test_coroutine_waits_for_immediate_or_later_call(is_later: bool) -> None:
    sink, later = Sink(), Later()

    async def answer() -> Answer:
        await CallbackWait(later if is_later else lambda then: then())
        return Answer(b"+OK\r\n")

    run_into(answer(), sink, 0)
    assert bool(sink.found) is not is_later
    assert later.run() == is_later
    assert sink.found == [(0, b"+OK\r\n")]


def long_steps() -> Steps[bytes]:
    for _ in range(4):
        spend(STEP_NS_MAX)
        yield
    return b"+done\r\n"


async def long_coroutine(later: Later) -> bytes:
    pauses = StepPauses(later)
    for _ in range(4):
        spend(STEP_NS_MAX)
        await pauses
    return b"+done\r\n"


@pytest.mark.parametrize(
    "work", [lambda later: run_in_steps(long_steps(), later), long_coroutine], ids=["steps", "turns"]
)
def test_long_work_leaves_turns_to_others(work: Callable[[Later], Awaitable[bytes]]) -> None:
    sink, later = Sink(), Later()

    async def answer() -> Answer:
        return Answer(await work(later))

    run_into(answer(), sink, 0)
    assert not sink.found
    assert later.run() >= 4  # more on a busy machine
    assert sink.found == [(0, b"+done\r\n")]
