"""The base of connections to servers: their requests in flight, and their output of this round of the event loop.

The requests of a round are sent in one write at its end. Replies arrive in the order of the requests. An entry in
flight is a request of the general path, or a batch of the compiled forwarder. The forwarder adds requests to its open
batch until the end of the round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from resp_server import native
from resp_server.limits import SERVER_REQUESTS_BYTES_MAX
from resp_server.limits import SERVER_REQUESTS_MAX as REQUESTS_MAX  # `servers/native/forwarder.pyx` imports this name
from resp_server.protocol.errors import internal_error
from resp_server.raw_replies.packing import Packed
from resp_server.raw_replies.raw_reply import RawReply


class Sent(Protocol):
    """An entry in flight: one request or several.

    Attributes:
        is_batch: It is a `PipelineBatch` of the compiled forwarder.
        remaining: The number of missing replies.
    """

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


if TYPE_CHECKING or native.pipelines is None:

    class PipelineFields:
        """The fields of a connection that the forwarder uses with each request; C fields, if the core is built.

        Attributes:
            link: The socket, if requests may be sent over it.
            at_end_of_round: Calls a function back at the end of this round of the event loop.
            batch: The forwarder's open batch.
            in_flight: Requests and batches without all of their replies, in order.
            awaited_replies: The number of replies to them, without those to the open batch.
            out: The requests that are sent at the end of the round.
            has_received: Something came since this was cleared.
            takes_batches: What comes next is a reply to the first request in flight.
        """

        link: Any = None
        at_end_of_round: Callable[[Callable[[], None]], None]
        batch: Any = None
        awaited_replies = 0
        has_received = takes_batches = False

        def __init__(self) -> None:
            self.in_flight: deque[Any] = deque()
            self.out: list[bytes] = []
            self.partial_reply = b""  # the start of a reply to a batch

        def close_batch(self) -> None:
            """Close the open batch to further requests. Without the forwarder there is none."""

        def take_batch_replies(self, data: bytes, epochs: Any) -> bytes:
            """Pass the replies at the front of received data to the batches; return the rest of the data."""
            return data

else:
    PipelineFields = native.pipelines.PipelineFields


class PipelinedConnection(PipelineFields, Generic[InFlight]):
    """A connection to a server."""

    in_flight: deque[InFlight]

    def _write(self, link: Any, out: Sequence[bytes]) -> None:
        """Send several requests."""
        link.write(b"".join(out))

    # -- called by the socket -----------------------------------------------------------------------------------------

    def receive_batch_replies(self, data: bytes) -> bytes:
        """Pass the replies at the front of received data to the forwarder's batches; return the rest of the data."""
        raise NotImplementedError

    def receive_replies(self, replies: Sequence[RawReply]) -> None:
        """Take replies, in the order of the requests."""
        raise NotImplementedError

    def note_progress(self) -> None:
        """Handle that a part of a long request was sent, or of a long reply received."""

    def disconnected(self, reason: str) -> None:
        """Handle the loss of the connection."""
        raise NotImplementedError

    # -- requests and replies -----------------------------------------------------------------------------------------

    @property
    def has_unsent(self) -> bool:
        """Return whether requests wait for the end of the round."""
        return bool(self.out)

    def has_room(self, count: int) -> bool:
        """Return whether this number of short requests may be sent."""
        link = self.link
        return (
            link is not None
            and link.output_bytes <= SERVER_REQUESTS_BYTES_MAX
            and self.awaited_replies + count <= REQUESTS_MAX
        )

    def send(self, packed: Packed, in_flight: InFlight) -> None:
        """Send an encoded request at the end of the round. The connection has to be open."""
        self.close_batch()
        if not self.out:
            self.at_end_of_round(self.flush)
        if isinstance(packed, bytes):
            self.out.append(packed)
        else:
            self.out += packed
        self.in_flight.append(in_flight)
        self.awaited_replies += in_flight.remaining

    def _clear(self) -> list[InFlight]:
        """Remove and return all entries in flight, after the connection was lost."""
        self.close_batch()
        in_flight = list(self.in_flight)
        self.in_flight.clear()
        self.awaited_replies = 0
        self.out, self.partial_reply = [], b""
        return in_flight

    def flush(self) -> None:
        """Send the requests of a round."""
        link = self.link
        try:
            self.close_batch()
            out, self.out = self.out, []
            if link is None or not out:
                return
            if len(out) == 1:
                link.write(out[0])
            else:
                self._write(link, out)
        except Exception as error:
            internal_error(error)
            if link is not None:
                link.cut("it could not be written to")
