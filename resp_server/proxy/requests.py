"""Requests to servers, and the sinks of their replies. Knows no connection.

A client's request waits as one index of a `ReplyBatch`, which is a `ReplySink`. Stages (`ReplyStage`) may stand between
that sink and the servers; each merges several replies into one. Replies arrive in the turn of another client, or of a
timer. An exception raised there is passed on (`fail`) to the sink that waits, which alone turns it into an error reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import ParamSpec, Protocol

import hiredis

from resp_server.forwarding.raw_replies import RawReply, Result, Steps, as_bytes, is_error, result_of
from resp_server.forwarding.reply_splitter import FrameError, array_in_order, pack
from resp_server.protocol.errors import PlainError, ReplyError, internal_error
from resp_server.proxy.epoch_floors import union_of
from resp_server.session.epoch_feed import EMPTY_EPOCHS, NO_EPOCHS, Epochs, ReplyEpochs
from state_backend.model.errors import SparkisError
from state_backend.model.slots import slot_of

logger = logging.getLogger("sparkis.proxy")

# Requests that may wait at one connection (guess).
REQUESTS_MAX = 100_000
# A request is sent at most twice: again when its connection was lost.
SENDS_MAX = 2
PING = pack((b"PING",))

Arguments = ParamSpec("Arguments")

# Merges several replies into one, at once or in steps.
Merge = Callable[[Sequence[RawReply]], "RawReply | Steps[RawReply]"]
# Calls back in a later turn of the event loop.
Defer = Callable[[Callable[[], None]], object]
# Time for work in steps within one turn (guess: a fifth of a turn).
STEPS_NS_MAX = 1_000_000


# Exceptions of parsing a reply that is complete but not of the expected form.
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
    """Receives replies. Nothing here raises: replies for other sinks come next."""

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Take the reply to the request with this index, and its epochs; none for a reply of the proxy."""

    def fail(self, index: int, error: Exception) -> None:
        """Take an exception in place of the reply to the request with this index."""

    def seen_epochs(self, index: int) -> Epochs:
        """Return the epochs that the request's client has seen: the reply must not be from earlier ones."""
        return EMPTY_EPOCHS


class InFlightRequest(Protocol):
    """Requests that were sent to a server together, one or several, and wait for their replies.

    remaining: the number of missing replies. deadline_s: the time by which they have to arrive.
    """

    deadline_s: float
    remaining: int

    def take(self, replies: Sequence[RawReply], epochs: ReplyEpochs) -> None:
        """Take the next replies, at most `remaining`, and the epochs that they are from."""

    def fail_all(self, error: Exception) -> None:
        """Take an exception in place of all remaining replies."""

    def next_request(self) -> ServerRequest:
        """Return the next request without a reply as a single request, which takes over waiting for the reply."""


@dataclass(slots=True)
class ServerRequest:
    """A request to the active server of a slot, or of a master's shard, or to the server with an address.

    floor: the epochs that the server must have reached; set when the server is chosen. queued_until_s: the time until
    which the request waits for these epochs, and for a connection. redirects: the number of MOVED errors so far.
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
    redirects: int = 0
    floor: Epochs | None = None
    queued_until_s: float | None = None
    remaining: int = 1

    def take(self, replies: Sequence[RawReply], epochs: ReplyEpochs) -> None:
        """Pass the reply on."""
        self.sink.put(self.index, replies[0], epochs)

    def fail_all(self, error: Exception) -> None:
        """Pass the exception on."""
        self.sink.fail(self.index, error)

    def next_request(self) -> ServerRequest:
        """Return the request itself."""
        return self

    def refuse(self, error: ReplyError) -> None:
        """Reply with an error of the proxy."""
        self.sink.put(self.index, b"-%b\r\n" % error.line)


class BackgroundSink(ReplySink):
    """Takes replies that no client waits for. Exceptions are logged."""

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        try:
            self.receive(as_bytes(reply))
        except Exception as error:
            self.fail(index, error)

    def fail(self, index: int, error: Exception) -> None:
        internal_error(error)

    def receive(self, reply: bytes) -> None:
        """Take the reply."""


class DiscardSink(BackgroundSink):
    """Ignores replies."""


class ReplyStage(ReplySink):
    """Makes one reply of others for its sink. The sink gets one reply or one exception, then nothing more."""

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
        """Run steps for some time, the others in later turns; `then` takes their result."""
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
    """Merges the replies of several servers. The first error among them is the reply."""

    def __init__(self, count: int, merge: Merge, sink: ReplySink, index: int, defer: Defer) -> None:
        super().__init__(sink, index)
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
        error = next(filter(is_error, replies), None)
        if error is None:
            self.run_steps(
                merge_or_error(self._merge, replies), lambda reply: self.finish(reply, self._epochs), self._defer
            )
        else:
            self.finish(error, self._epochs)


class RequestSender(Protocol):
    """Sends requests to servers. defer: calls back in a later turn."""

    defer: Defer

    def send(self, request: ServerRequest) -> None:
        """Send a request; its sink gets the reply later, or an error at once or later."""


def send_mget_by_slots(
    sender: RequestSender, keys: Sequence[bytes], deadline_s: float, sink: ReplySink, index: int
) -> None:
    """Request the values of keys, one MGET for each slot; the sink gets one array."""
    places: dict[int, list[int]] = {}
    for at, key in enumerate(keys):
        places.setdefault(slot_of(key), []).append(at)
    aggregator = ReplyAggregator(
        len(places), partial(array_in_order, places=list(places.values())), sink, index, sender.defer
    )
    for number, (slot, some) in enumerate(places.items()):
        packed = pack((b"MGET", *(keys[at] for at in some)))
        sender.send(ServerRequest(packed, slot, 2, deadline_s, aggregator, number, sends=1))
