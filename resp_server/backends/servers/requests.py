"""Requests to servers, and the sinks of their replies. Connections are elsewhere.

A `ReplyBatch` is the sink of a client's requests; each request has an index in it. A `ReplyFuture` is the sink of a
request that a coroutine waits for (`raw_replies/answers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

from resp_server.protocol.errors import ReplyError, internal_error
from resp_server.raw_replies.answers import Replies, run_into
from resp_server.raw_replies.raw_reply import RawReply
from resp_server.raw_replies.reply_sinks import Defer, ReplySink
from resp_server.raw_replies.reply_splitter import array_in_order, pack
from resp_server.session.epochs import NO_EPOCHS, Epochs, ReplyEpochs, epoch_words
from state_backend.model.slots import slot_of


class ConnectionKey(NamedTuple):
    """Identifies a connection to a server.

    Args:
        is_long: For requests that may take long.
        is_history: For histories.
        is_committed: Its reads take committed values only.
    """

    address: str
    protocol: int
    is_long: bool
    is_history: bool = False
    is_committed: bool = False


class InFlightRequest(Protocol):
    """One request, or several that were sent to a server together. They wait for their replies.

    Args:
        deadline_s: The time by which the replies have to arrive.

    Attributes:
        is_batch: It is a batch of the compiled forwarder.
    """

    @property
    def is_batch(self) -> bool: ...

    deadline_s: float
    remaining: int

    def take(self, replies: Sequence[RawReply], epochs: ReplyEpochs) -> None:
        """Take the next replies, at most `remaining`."""

    def fail_all(self, error: Exception) -> None:
        """Take an exception in place of all remaining replies."""

    def next_request(self) -> ServerRequest:
        """Return the next request without a reply as a separate request, whose sink gets that reply."""


@dataclass(slots=True)
class ServerRequest:
    """A request to a slot's active server; with `master`, to that shard's; with `address`, to the server there.

    Args:
        min_epochs: The epochs that the server must have reached; set when the server is chosen.
        queued_until_s: The time until which the request waits for these epochs and for a connection.
        redirects: The number of MOVED errors so far.
        is_history: STATE HISTORY. It has a connection of its own, so that no other long request waits for it.
        is_committed: It reads committed values only.
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
    is_history: bool = False
    is_committed: bool = False
    sends: int = 0
    redirects: int = 0
    min_epochs: Epochs | None = None
    queued_until_s: float | None = None
    remaining: int = 1
    is_batch: ClassVar[bool] = False

    def take(self, replies: Sequence[RawReply], epochs: ReplyEpochs) -> None:
        """Pass the reply to the sink."""
        self.sink.put(self.index, replies[0], epochs)

    def fail_all(self, error: Exception) -> None:
        """Pass the exception to the sink."""
        self.sink.fail(self.index, error)

    def next_request(self) -> ServerRequest:
        """Return the request itself."""
        return self

    def refuse(self, error: ReplyError) -> None:
        """Reply with an error that the proxy itself makes."""
        self.sink.put(self.index, b"-%b\r\n" % error.line)


class DiscardSink(ReplySink):
    """Ignores the replies to requests that the proxy sends for itself. Exceptions are logged."""

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Ignore a reply."""

    def fail(self, index: int, error: Exception) -> None:
        internal_error(error)


def read_point(epochs: Epochs, clock_ms: int) -> bytes:
    """Return the encoded request after which a server reads the next transaction at these epochs and clock reading."""
    return pack((b"STATE", b"AT", *epoch_words(epochs), b"%d" % clock_ms))


def send_mget_by_slots(
    send: Callable[[ServerRequest], None],
    keys: Sequence[bytes],
    deadline_s: float,
    defer: Defer,
    sink: ReplySink,
    index: int,
) -> None:
    """Request the values of keys by one MGET for each slot; the sink gets one array of all values, in order."""
    places: dict[int, list[int]] = {}
    for at, key in enumerate(keys):
        places.setdefault(slot_of(key), []).append(at)
    replies = Replies(partial(sink.seen_epochs, index))
    for slot, some in places.items():
        packed = pack((b"MGET", *(keys[at] for at in some)))
        send(ServerRequest(packed, slot, 2, deadline_s, replies, replies.expect()))
    run_into(replies.merge(partial(array_in_order, places=list(places.values())), defer), sink, index)
