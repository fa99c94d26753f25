"""Stages between servers' replies and a client's sink. Each stage makes one reply of one or more replies.

Servers' replies arrive outside of their client's turn. So an exception while a reply is handled is not raised to the
caller. A stage passes it to its sink (`fail`), and the client's sink turns it into an error reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import ParamSpec, Protocol

import hiredis

from resp_server.forwarding.raw_replies import RawReply, Result, Steps, is_error, result_of
from resp_server.forwarding.reply_splitter import FrameError
from resp_server.protocol.errors import PlainError, ReplyError
from resp_server.session.epoch_feed import EMPTY_EPOCHS, NO_EPOCHS, Epochs, ReplyEpochs, union_of
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.proxy")

Arguments = ParamSpec("Arguments")

# Merges several replies into one, at once or in steps.
Merge = Callable[[Sequence[RawReply]], "RawReply | Steps[RawReply]"]
# Calls back in a later turn of the event loop.
Defer = Callable[[Callable[[], None]], object]
# The time for steps before the rest is deferred (guess: a fifth of a turn).
STEPS_NS_MAX = 1_000_000


# Exceptions raised by parsing a complete reply that does not have the expected form.
MALFORMED_REPLY_ERRORS = (
    *(FrameError, hiredis.HiredisError, SparkisError, ReplyError),
    *(ValueError, TypeError, LookupError, AttributeError),
)


def merge_or_error(merge: Merge, replies: Sequence[RawReply]) -> Steps[RawReply]:
    """Merge servers' replies; if one is malformed, return an error reply."""
    try:
        found: RawReply = yield from result_of(merge(replies))
    except MALFORMED_REPLY_ERRORS as error:
        return malformed_reply(error)
    return found


def malformed_reply(error: Exception) -> bytes:
    """Log a reply of an unexpected form; return the error reply for it."""
    logger.warning("a server's reply has an unexpected form: %s", error, exc_info=error)
    return b"-%b\r\n" % PlainError("a server's reply has an unexpected form").line


class ReplySink(Protocol):
    """Receives replies. Its methods do not raise: replies for other sinks come next."""

    __slots__ = ()

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Take the reply to the request with this index. epochs: the reply's; a reply of the proxy has none."""

    def fail(self, index: int, error: Exception) -> None:
        """Take an exception in place of the reply to the request with this index."""

    def seen_epochs(self, index: int) -> Epochs:
        """Return the epochs that the request's client has seen. Its reply must not be from earlier epochs."""
        return EMPTY_EPOCHS


class ReplyStage(ReplySink):
    """Makes one reply of the replies that it receives. Its sink gets one reply or one exception, then nothing more."""

    def __init__(self, sink: ReplySink, index: int) -> None:
        self._sink, self._index = sink, index
        self._is_over = False

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        self.attempt(self.receive, index, reply, epochs)

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        """Take one of the replies."""
        raise NotImplementedError

    def attempt(self, do: Callable[Arguments, None], *arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        """Call a function; an exception goes to the sink."""
        if self._is_over:
            return
        try:
            do(*arguments, **named)
        except Exception as error:
            self.fail(0, error)

    def run_steps(self, steps: Steps[Result], then: Callable[[Result], None], defer: Defer) -> None:
        """Run steps for `STEPS_NS_MAX`, and defer the others; call `then` with the result."""
        ends_ns = perf_counter_ns() + STEPS_NS_MAX
        try:
            while perf_counter_ns() < ends_ns:
                next(steps)
        except StopIteration as end:
            then(end.value)
        else:
            defer(partial(self.attempt, self.run_steps, steps, then, defer))

    def finish(self, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Pass the reply to the sink."""
        if self._is_over:
            return
        self._is_over = True
        try:
            self._sink.put(self._index, reply, epochs)
        except Exception as error:
            self._sink.fail(self._index, error)

    def reopen(self) -> None:
        """Accept replies again after `finish`."""
        self._is_over = False

    def fail(self, index: int, error: Exception) -> None:
        if not self._is_over:
            self._is_over = True
            self._sink.fail(self._index, error)

    def seen_epochs(self, index: int) -> Epochs:
        return self._sink.seen_epochs(self._index)


class ReplyAggregator(ReplyStage):
    """Merges the replies of several servers. The first error among them is the reply, unless `takes_errors`."""

    def __init__(
        self, count: int, merge: Merge, sink: ReplySink, index: int, defer: Defer, *, takes_errors: bool = False
    ) -> None:
        super().__init__(sink, index)
        self._takes_errors = takes_errors
        self._replies: list[RawReply | None] = [None] * count
        self._missing = count
        self._merge = merge
        self._defer = defer
        self._epochs = NO_EPOCHS

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        self._replies[index] = reply
        self._epochs = union_of(self._epochs, epochs)
        self._missing -= 1
        if self._missing:
            return
        replies = [each for each in self._replies if each is not None]
        error = None if self._takes_errors else next(filter(is_error, replies), None)
        if error is None:
            self.run_steps(
                merge_or_error(self._merge, replies), lambda reply: self.finish(reply, self._epochs), self._defer
            )
        else:
            self.finish(error, self._epochs)
