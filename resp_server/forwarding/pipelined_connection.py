"""The base of connections to servers: their requests in flight, and their output of this round of the event loop.

The requests of a round are sent in one write at its end. Replies arrive in the order of the requests. An entry in
flight is a request of the general path, or a batch of the compiled forwarder. The forwarder adds requests to its open
batch until the end of the round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from resp_server.forwarding.packing import Packed
from resp_server.forwarding.raw_replies import RawReply
from resp_server.limits import PARTIAL_REPLY_BYTES_MAX, SERVER_REQUESTS_BYTES_MAX
from resp_server.protocol.errors import internal_error

# Requests without a reply at one connection (guess: 100 clients with two transactions of 1,000 commands).
REQUESTS_MAX = 250_000


class Sent(Protocol):
    """An entry in flight: one request or several. remaining: missing replies. is_batch: of the forwarder."""

    @property
    def is_batch(self) -> bool: ...
    @property
    def remaining(self) -> int: ...


InFlight = TypeVar("InFlight", bound=Sent)


class Link(ABC):
    """The socket of a connection."""

    @property
    @abstractmethod
    def output_bytes(self) -> int:
        """How many bytes wait to be sent."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Send bytes."""

    @abstractmethod
    def cut(self, reason: str) -> None:
        """Close the connection now; `reason` is logged."""


class PipelinedConnection(Generic[InFlight]):
    """A connection to a server. batch: the forwarder's open batch."""

    def __init__(self) -> None:
        self.batch: Any = None
        self._in_flight: deque[InFlight] = deque()
        self._awaited_replies = 0  # to all requests in flight
        self._out: list[bytes] = []  # sent at the end of the round
        self._partial_reply = b""  # the start of a reply to a batch of the forwarder

    @property
    def _open_link(self) -> Link | None:
        """The socket, if requests may be sent over it."""
        raise NotImplementedError

    def _write(self, out: Sequence[bytes]) -> None:
        """Send the requests of a round."""
        if self._open_link is not None:
            self._open_link.write(b"".join(out))

    def _at_end_of_round(self, then: Callable[[], None]) -> None:
        """Call back at the end of this round of the event loop."""
        raise NotImplementedError

    # -- called by the socket -----------------------------------------------------------------------------------------

    def receive_batch_replies(self, data: bytes) -> bytes:
        """Pass the replies at the front of received data to the forwarder's batches; return the rest of the data."""
        raise NotImplementedError

    def receive_replies(self, replies: Sequence[RawReply]) -> None:
        """Take replies, in the order of the requests."""
        raise NotImplementedError

    def has_progress(self) -> None:
        """Handle that a part of a long request was sent, or of a long reply received."""

    def disconnected(self, reason: str) -> None:
        """Handle the loss of the connection."""
        raise NotImplementedError

    # -- requests and replies -----------------------------------------------------------------------------------------

    @property
    def has_unsent(self) -> bool:
        """Return whether requests wait for the end of the round."""
        return bool(self._out)

    def has_room(self, count: int) -> bool:
        """Return whether this number of short requests may be sent."""
        link = self._open_link
        return (
            link is not None
            and link.output_bytes <= SERVER_REQUESTS_BYTES_MAX
            and self._awaited_replies + count <= REQUESTS_MAX
        )

    def send(self, packed: Packed, in_flight: InFlight) -> None:
        """Send an encoded request at the end of the round. The connection has to be open."""
        self._close_batch()
        if not self._out:
            self._at_end_of_round(self._flush)
        if isinstance(packed, bytes):
            self._out.append(packed)
        else:
            self._out += packed
        self._in_flight.append(in_flight)
        self._awaited_replies += in_flight.remaining

    def begin_batch(self, batch: Any) -> None:
        """Open a batch of the forwarder, which is sent at the end of the round, in order. The connection is open."""
        if self.batch is not None:
            self._close_batch()
        if not self._out:
            self._at_end_of_round(self._flush)
        self._in_flight.append(batch)
        self.batch = batch

    def take_batch_replies(self, data: bytes, epochs: Any) -> bytes:
        """Pass the replies at the front of received data to the forwarder's batches; return the rest of the data."""
        if self._partial_reply:
            data, self._partial_reply = self._partial_reply + data, b""
        at, in_flight = 0, self._in_flight
        batch: Any = None
        while in_flight and in_flight[0].is_batch and at < len(data):
            batch = in_flight[0]
            if batch is self.batch:
                self._close_batch()
            before = batch.remaining
            at = batch.feed(data, at, epochs)
            if not in_flight or in_flight[0] is not batch:
                break  # this connection was closed while a client handled its reply
            self._awaited_replies -= before - batch.remaining
            if batch.remaining:
                break
            in_flight.popleft()
        rest = data[at:] if at else data
        is_first = bool(in_flight) and in_flight[0] is batch
        if len(rest) > PARTIAL_REPLY_BYTES_MAX or not is_first or not batch.has_partial:
            return rest
        self._partial_reply = rest
        return b""

    def _close_batch(self) -> None:
        """Close the forwarder's open batch to further requests."""
        batch, self.batch = self.batch, None
        if batch is None:
            return
        if not batch.remaining:  # it is empty
            self._in_flight.pop()
            return
        self._awaited_replies += batch.remaining
        self._out.append(batch.close())

    def _clear(self) -> list[InFlight]:
        """Remove and return all entries in flight, after the connection was lost."""
        self._close_batch()
        in_flight = list(self._in_flight)
        self._in_flight.clear()
        self._awaited_replies = 0
        self._out, self._partial_reply = [], b""
        return in_flight

    def _flush(self) -> None:
        link = self._open_link
        try:
            self._close_batch()
            out, self._out = self._out, []
            if out and link is not None:
                self._write(out)
        except Exception as error:
            internal_error(error)
            if link is not None:
                link.cut("it could not be written to")
