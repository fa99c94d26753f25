"""Requests to servers, and the sinks of their replies. Knows no connection.

A client's request waits as one index of a `ReplyBatch`, which is a `ReplySink`. Stages (`ReplyStage`) may stand between
that sink and the servers; each makes one reply of several. Replies arrive in the turn of another client, or of a timer.
An exception raised there is passed on (`fail`) to the sink that waits, which alone turns it into an error reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import ParamSpec, Protocol

import hiredis

from resp_server.protocol.errors import PlainError, ReplyError, internal_error
from resp_server.proxy.epoch_floors import together
from resp_server.proxy.raw_replies import RawReply, Result, Steps, as_bytes, done, is_error
from resp_server.proxy.reply_splitter import FrameError, array_in_order, pack
from resp_server.session.epoch_feed import NO_EPOCHS, NOTHING, Epochs, ReplyEpochs
from state_backend.model.errors import SparkisError
from state_backend.model.slots import slot_of

logger = logging.getLogger("sparkis.proxy")

# What may wait at one connection (guess).
REQUESTS_MAX = 100_000
# How often a question is sent: once more where a connection was lost under it.
SENDS_MAX = 2
PING = pack((b"PING",))

Arguments = ParamSpec("Arguments")

# Makes one answer of several, at once or in steps.
Merge = Callable[[Sequence[RawReply]], "RawReply | Steps[RawReply]"]
# Has something be called in a turn to come.
Defer = Callable[[Callable[[], None]], object]
# What is done at once of what takes steps (guess: a fifth of a turn).
STEPS_NS_MAX = 1_000_000


# What comes of reading an answer that is whole, and not what was asked for.
MALFORMED_REPLY_ERRORS = (
    *(FrameError, hiredis.HiredisError, SparkisError, ReplyError),
    *(ValueError, TypeError, LookupError, AttributeError),
)


def merge_or_error(merge: Merge, answers: Sequence[RawReply]) -> Steps[RawReply]:
    """Return the reply that is made of servers' answers, or an error: whoever waits for it gets one."""
    try:
        found: RawReply = yield from done(merge(answers))
    except MALFORMED_REPLY_ERRORS as error:
        return malformed_reply(error)
    return found


def malformed_reply(error: Exception) -> bytes:
    """Return the reply where servers' answers are not what was asked for."""
    logger.warning("what a server answered is not understood: %s", error, exc_info=error)
    return b"-%b\r\n" % PlainError("what a server answered is not understood").line


class ReplySink(Protocol):
    """Whoever waits for an answer. None of this raises: others' answers come behind."""

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Take the answer to the question of a number, and what it is from: nothing where the proxy itself answers."""

    def fail(self, index: int, error: Exception) -> None:
        """Take what was raised instead of the answer to the question of a number."""

    def seen_epochs(self, index: int) -> Epochs:
        """Return what a client has seen for whom a question is asked: nothing before that will do."""
        return NOTHING


class InFlightRequest(Protocol):
    """What waits for answers at a connection to a server: one question, or several that were sent together.

    wants: how many answers are still to come. deadline_s: until when they may.
    """

    deadline_s: float
    remaining: int

    def take(self, replies: Sequence[RawReply], epochs: ReplyEpochs) -> None:
        """Take the next answers, no more than are wanted, and what they are from."""

    def fail_all(self, error: Exception) -> None:
        """Take what was raised when answers were taken: whoever waits for these gets no others."""

    def next_request(self) -> UpstreamRequest:
        """Return the next question to be answered as one of its own; it is wanted here no more."""


@dataclass(slots=True)
class UpstreamRequest:
    """One question: for whoever answers a slot, or the shard of a master, or for a server by its address.

    floor: what whoever is asked has to have reached; set where it is known who that is. held_until_s: how long it waits
    for that, and for a connection.
    """

    packed: bytes
    slot: int
    protocol: int
    deadline_s: float
    sink: ReplySink
    index: int
    address: str | None = None
    master: str | None = None
    is_long: bool = False
    sends: int = 0
    moves: int = 0
    floor: Epochs | None = None
    queued_until_s: float | None = None
    remaining: int = 1

    def take(self, replies: Sequence[RawReply], epochs: ReplyEpochs) -> None:
        """Pass the answer on."""
        self.sink.put(self.index, replies[0], epochs)

    def fail_all(self, error: Exception) -> None:
        """Pass on what was raised."""
        self.sink.fail(self.index, error)

    def next_request(self) -> UpstreamRequest:
        """Return itself."""
        return self

    def refuse(self, error: ReplyError) -> None:
        """Answer with an error of the proxy's own."""
        self.sink.put(self.index, b"-%b\r\n" % error.line)


class BackgroundSink(ReplySink):
    """Takes answers that no client waits for. What is raised is logged."""

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        try:
            self.receive(as_bytes(reply))
        except Exception as error:
            self.fail(index, error)

    def fail(self, index: int, error: Exception) -> None:
        internal_error(error)

    def receive(self, reply: bytes) -> None:
        """Take the answer."""


class DiscardSink(BackgroundSink):
    """Takes answers that nobody needs."""


class ReplyStage(ReplySink):
    """Makes one answer of others. Whoever waits for it gets one, or what was raised instead, and nothing after that."""

    def __init__(self, sink: ReplySink, index: int) -> None:
        self._sink, self._index = sink, index
        self._is_over = False

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        self.attempt(self.receive, index, reply, epochs)

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        """Take one of the answers."""
        raise NotImplementedError

    def attempt(self, do: Callable[Arguments, None], *arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        """Do something for whoever waits."""
        if self._is_over:
            return
        try:
            do(*arguments, **named)
        except Exception as error:
            self.fail(0, error)

    def run_steps(self, steps: Steps[Result], then: Callable[[Result], None], defer: Defer) -> None:
        """Work for some time, and in turns to come until it is done; `then` takes what comes of it."""
        ends_ns = perf_counter_ns() + STEPS_NS_MAX
        try:
            while perf_counter_ns() < ends_ns:
                next(steps)
        except StopIteration as end:
            then(end.value)
        else:
            defer(partial(self.attempt, self.run_steps, steps, then, defer))

    def finish(self, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Pass the answer on."""
        if self._is_over:
            return
        self._is_over = True
        try:
            self._sink.put(self._index, reply, epochs)
        except Exception as error:
            self._sink.fail(self._index, error)

    def reopen(self) -> None:
        """Wait for answers once more."""
        self._is_over = False

    def fail(self, index: int, error: Exception) -> None:
        if not self._is_over:
            self._is_over = True
            self._sink.fail(self._index, error)

    def seen_epochs(self, index: int) -> Epochs:
        return self._sink.seen_epochs(self._index)


class ReplyAggregator(ReplyStage):
    """Answers of several servers that make one reply. The first error among them is the reply."""

    def __init__(self, count: int, merge: Merge, sink: ReplySink, index: int, defer: Defer) -> None:
        super().__init__(sink, index)
        self._replies: list[RawReply | None] = [None] * count
        self._missing = count
        self._merge = merge
        self._defer = defer
        self._epochs = NO_EPOCHS

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        self._replies[index] = reply
        self._epochs = together(self._epochs, epochs)
        self._missing -= 1
        if self._missing:
            return
        replies = [each for each in self._replies if each is not None]
        error = next(filter(is_error, replies), None)
        if error is None:
            self.run_steps(
                merge_or_error(self._merge, replies), lambda reply: self.finish(reply, self._epochs), self._defer
            )
        else:
            self.finish(error, self._epochs)


class Asker(Protocol):
    """Whoever asks servers. put_off: has something be called in a turn to come."""

    defer: Defer

    def send(self, request: UpstreamRequest) -> None:
        """Ask; the answer comes later, or an error, at once or later."""


def send_mget_by_slots(asker: Asker, keys: Sequence[bytes], deadline_s: float, sink: ReplySink, index: int) -> None:
    """Ask for the values of keys, those of each slot of whoever answers it; the answer is one array."""
    places: dict[int, list[int]] = {}
    for at, key in enumerate(keys):
        places.setdefault(slot_of(key), []).append(at)
    joined = ReplyAggregator(
        len(places), partial(array_in_order, places=list(places.values())), sink, index, asker.defer
    )
    for number, (slot, some) in enumerate(places.items()):
        packed = pack((b"MGET", *(keys[at] for at in some)))
        asker.send(UpstreamRequest(packed, slot, 2, deadline_s, joined, number, sends=1))
