"""Answers requests by coroutines, which wait for the replies of other processes.

A coroutine runs at once, up to the first reply that has not arrived. It continues while that reply is received. It is
no task of the event loop: so it costs no turn of the loop, and its requests are sent in the client's order.

    async def value_or_type(ask, key):
        value, type_name = ask((b"GET", key)), ask((b"TYPE", key))  # both are sent
        answer = await value
        return await type_name if is_error(answer.reply) else answer
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from time import perf_counter_ns
from typing import NamedTuple, cast

from resp_server.limits import STEP_NS_MAX
from resp_server.protocol.errors import internal_error
from resp_server.raw_replies.raw_reply import RawReply, Result, Steps, is_error
from resp_server.raw_replies.reply_sinks import (
    MALFORMED_REPLY_ERRORS,
    Defer,
    Merge,
    ReplySink,
    malformed_reply,
    steps_or_error,
)
from resp_server.session.epochs import EMPTY_EPOCHS, NO_EPOCHS, Epochs, ReplyEpochs, union_of

# Returns the epochs that a request's client has seen.
ReadSeenEpochs = Callable[[], Epochs]


class Answer(NamedTuple):
    """A reply, and the epochs that it is from; a reply of the proxy itself has none."""

    reply: RawReply
    epochs: ReplyEpochs = NO_EPOCHS


NO_ANSWER = Answer(b"")


class Wait:
    """The end of a wait of a coroutine."""

    __slots__ = ()

    def when_finished(self, then: Callable[[], None]) -> None:
        """Call back once, later, when the wait is over."""
        raise NotImplementedError


# Answers a request. An exception becomes an error reply.
Answering = Coroutine[Wait, None, Answer]


def no_epochs() -> Epochs:
    """Return the epochs that the proxy's own requests have seen."""
    return EMPTY_EPOCHS


class ReplyFuture(ReplySink, Wait):
    """The answer to one request, or its exception. `await` returns the answer, or raises the exception."""

    __slots__ = ("_answer", "_error", "_failed", "_seen", "_then", "is_finished")

    def __init__(self, seen: ReadSeenEpochs = no_epochs) -> None:
        self._seen = seen
        self.is_finished = False
        self._answer = NO_ANSWER
        self._error: Exception | None = None
        self._then: Callable[[], None] | None = None
        self._failed: Callable[[], None] | None = None

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        if not self.is_finished:
            self._answer, self.is_finished = Answer(reply, epochs), True
            if self._then is not None:
                try:
                    self._then()
                except Exception as error:  # the wait is not over, so it ends by this exception
                    self._error = error
                    self._call_failed()

    def fail(self, index: int, error: Exception) -> None:
        if not self.is_finished:
            self._error, self.is_finished = error, True
            self._call_failed()

    def _call_failed(self) -> None:
        if self._failed is not None:
            self._failed()

    def seen_epochs(self, index: int) -> Epochs:
        return self._seen()

    def when_finished(self, then: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """Call back when the answer or the exception arrives.

        Args:
            failed: Is called in place of `then` by an exception.
        """
        self._then, self._failed = then, failed or then

    @property
    def has_failed(self) -> bool:
        """Whether the exception has arrived."""
        return self._error is not None

    def result(self) -> Answer:
        """Return the answer that has arrived, or raise the exception."""
        if self._error is not None:
            raise self._error
        return self._answer

    def __await__(self) -> Generator[Wait, None, Answer]:
        if not self.is_finished:
            yield self
        return self.result()


async def await_in_task(future: ReplyFuture) -> Answer:
    """Return an answer, in a task of the event loop."""
    is_finished = asyncio.Event()
    if not future.is_finished:
        future.when_finished(is_finished.set)
        await is_finished.wait()
    return await future


def ask(send: Callable[[ReplySink, int], object], seen: ReadSeenEpochs = no_epochs) -> ReplyFuture:
    """Send a request.

    Args:
        send: Takes the sink of the reply and its index. What it raises is the future's exception.
    """
    future = ReplyFuture(seen)
    try:
        send(future, 0)
    except Exception as error:
        future.fail(0, error)
    return future


class Replies(ReplySink, Wait):
    """The replies to several requests. `await` returns them in order, or raises the first exception once it arrives.

    It costs less than a `ReplyFuture` for each request.

    Args:
        count: The number of replies that will arrive, with indexes from 0.

    Attributes:
        epochs: The epochs that any of the replies is from.
    """

    __slots__ = ("_error", "_missing", "_replies", "_seen", "_then", "epochs")

    def __init__(self, seen: ReadSeenEpochs = no_epochs, count: int = 0) -> None:
        self.epochs = NO_EPOCHS
        self._seen = seen
        self._replies: list[RawReply | None] = [None] * count
        self._missing = count
        self._error: Exception | None = None
        self._then: Callable[[], None] | None = None

    def expect(self) -> int:
        """Add another reply that will arrive; return its index."""
        self._missing += 1
        self._replies.append(None)
        return len(self._replies) - 1

    def ask(self, send: Callable[[ReplySink, int], object]) -> None:
        """Send another request.

        Args:
            send: Takes the sink of the reply and its index. What it raises is an exception in place of the reply.
        """
        index = self.expect()
        try:
            send(self, index)
        except Exception as error:
            self.fail(index, error)

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        if self._replies[index] is None and self._error is None:
            self._replies[index] = reply
            if epochs is not self.epochs:
                self.epochs = union_of(self.epochs, epochs)
            self._missing -= 1
            if not self._missing:
                self._end()

    def fail(self, index: int, error: Exception) -> None:
        if self._error is None and self._missing:
            self._error = error
            self._end()

    def _end(self) -> None:
        then, self._then = self._then, None
        if then is None:
            return
        try:
            then()
        except Exception as error:  # the coroutine was not continued, so it continues with this exception
            self._error = error
            then()

    def seen_epochs(self, index: int) -> Epochs:
        return self._seen()

    def when_finished(self, then: Callable[[], None]) -> None:
        """Call back when all replies, or an exception, have arrived."""
        self._then = then

    def __await__(self) -> Generator[Wait, None, list[RawReply]]:
        if self._missing and self._error is None:
            yield self
        if self._error is not None:
            raise self._error
        return cast("list[RawReply]", self._replies)

    async def merge(self, merge: Merge, defer: Defer) -> Answer:
        """Merge the replies into one. The first error among them is the reply."""
        return Answer(await merge_replies(merge, await self, defer), self.epochs)


async def merge_replies(merge: Merge, replies: Sequence[RawReply], defer: Defer) -> RawReply:
    """Merge replies, in steps if `merge` returns steps. The first error among them is the reply."""
    for reply in replies:
        if is_error(reply):
            return reply
    try:
        found = merge(replies)
    except MALFORMED_REPLY_ERRORS as error:
        return malformed_reply(error)
    return await run_in_steps(steps_or_error(found), defer) if isinstance(found, Generator) else found


class _AllFinished(Wait):
    """Waits until all futures have an answer, or one has failed."""

    __slots__ = ("_awaited", "_missing", "_then")

    def __init__(self, futures: Sequence[ReplyFuture]) -> None:
        self._awaited = [future for future in futures if not future.is_finished]
        self._missing = 0 if any(future.has_failed for future in futures) else len(self._awaited)
        self._then: Callable[[], None] | None = None

    def when_finished(self, then: Callable[[], None]) -> None:
        """Call back when the wait is over."""
        self._then = then
        take_answer, end = self._take_answer, self._end
        for each in self._awaited:
            each.when_finished(take_answer, end)

    def _take_answer(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._end()

    def _end(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()

    def __await__(self) -> Generator[Wait, None, None]:
        if self._missing:
            yield self


async def all_of(futures: Sequence[ReplyFuture]) -> list[Answer]:
    """Return all answers, or raise the first exception as soon as it arrives."""
    await _AllFinished(futures)
    for future in futures:
        if future.has_failed:
            future.result()  # raises
    return [future.result() for future in futures]


def epochs_of(answers: Sequence[Answer]) -> ReplyEpochs:
    """Return the epochs that any of several replies is from."""
    epochs = NO_EPOCHS
    for answer in answers:
        epochs = union_of(epochs, answer.epochs)
    return epochs


async def merge_answers(futures: Sequence[ReplyFuture], merge: Merge, defer: Defer) -> Answer:
    """Merge the replies to several requests into one. The first error among them is the reply."""
    answers = await all_of(futures)
    return Answer(await merge_replies(merge, [answer.reply for answer in answers], defer), epochs_of(answers))


class CallbackWait(Wait):
    """Waits until a function calls back, now or later."""

    def __init__(self, register: Callable[[Callable[[], None]], object]) -> None:
        self._is_finished = False
        self._then: Callable[[], None] | None = None
        register(self._end)

    def _end(self) -> None:
        self._is_finished = True
        if self._then is not None:
            self._then()

    def when_finished(self, then: Callable[[], None]) -> None:
        """Call back when the function has called back."""
        self._then = then

    def __await__(self) -> Generator[Wait, None, None]:
        if not self._is_finished:
            yield self


class StepPauses:
    """Divides a coroutine's work among turns of the event loop: it awaits this between two steps of its work."""

    __slots__ = ("_defer", "_ends_ns")

    def __init__(self, defer: Defer) -> None:
        self._defer = defer
        self._ends_ns = perf_counter_ns() + STEP_NS_MAX

    def __await__(self) -> Generator[Wait, None, None]:
        if perf_counter_ns() >= self._ends_ns:
            yield from CallbackWait(self._defer).__await__()
            self._ends_ns = perf_counter_ns() + STEP_NS_MAX


async def run_in_steps(steps: Steps[Result], defer: Defer) -> Result:
    """Run steps for `STEP_NS_MAX` in each turn of the event loop; return their result."""
    while True:
        ends_ns = perf_counter_ns() + STEP_NS_MAX
        try:
            while perf_counter_ns() < ends_ns:
                next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        await CallbackWait(defer)


class _Run:
    """A coroutine that runs; its answer goes to a sink."""

    __slots__ = ("_coroutine", "_index", "_sink")

    def __init__(self, coroutine: Answering, sink: ReplySink, index: int) -> None:
        self._coroutine, self._sink, self._index = coroutine, sink, index

    def resume(self) -> None:
        """Run until the next wait, or to the end."""
        try:
            wait = self._coroutine.send(None)
            wait.when_finished(self.resume)
        except StopIteration as end:
            try:
                self._sink.put(self._index, *end.value)
            except Exception as error:
                self._sink.fail(self._index, error)
        except Exception as error:
            self._sink.fail(self._index, error)


def run_into(coroutine: Answering, sink: ReplySink, index: int) -> None:
    """Run a coroutine. A sink gets its answer, or the exception that it raises."""
    _Run(coroutine, sink, index).resume()


def start(coroutine: Answering, seen: ReadSeenEpochs = no_epochs) -> ReplyFuture:
    """Run a coroutine beside the caller; return its answer."""
    future = ReplyFuture(seen)
    run_into(coroutine, future, 0)
    return future


class _Log(ReplySink):
    """Logs exceptions."""

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Ignore the end of a coroutine."""

    def fail(self, index: int, error: Exception) -> None:
        internal_error(error)


def in_background(coroutine: Coroutine[Wait, None, None]) -> None:
    """Run a coroutine of the proxy itself beside the caller. An exception is logged."""

    async def run() -> Answer:
        await coroutine
        return Answer(b"")

    run_into(run(), _Log(), 0)
