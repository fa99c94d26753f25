"""A request of many words at a proxy: its portions are asked one after another, and their answers joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from resp_server.errors import PlainError
from resp_server.long_requests import Cut
from resp_server.protocol.replies import Frames, Pending, Reply, encode_header
from resp_server.protocol.requests import Request

if TYPE_CHECKING:
    from resp_server.router.dispatcher import Batch

# Asks for one portion, and returns the batch that its reply comes in; it may raise.
Ask = Callable[[Request], "Batch"]


class Portions(Pending):
    """The reply to a request whose keys are asked for in portions."""

    def __init__(
        self, protocol: int, cut: Cut, portions: Iterator[Request], ask: Ask, seconds_max: float, bytes_max: int
    ) -> None:
        super().__init__(seconds_max, _too_late)
        self._protocol = protocol
        self._cut = cut
        self._portions = portions
        self._ask = ask
        self._bytes_max = bytes_max
        self._bodies: list[bytes] = []
        self._bytes = self._count = 0

    def start(self) -> None:
        """Ask for the next portion."""
        self._alone(self._ask_next)

    def _alone(self, step: Callable[[], None]) -> None:
        """Do something for this request alone: what that raises is its answer."""
        try:
            step()
        except Exception as error:
            self._end(error)

    def _ask_next(self) -> None:
        portion = next(self._portions, None)
        if portion is None:
            self.resolve(self._joined)
            return
        batch = self._ask(portion)
        if batch.missing:
            batch.when_resolved(lambda: self._alone(lambda: self._take(batch.joined())))
        else:
            self._take(batch.joined())

    def _take(self, reply: bytes) -> None:
        if reply[:1] == b"-":
            self.resolve(lambda: Frames(reply))
            return
        line, _, body = reply.partition(b"\r\n")
        self._count += int(line[1:])  # the number of items, or the number itself
        self._bodies.append(body)
        self._bytes += len(body)
        if self._bytes > self._bytes_max:
            raise PlainError(f"replies of more than {self._bytes_max} bytes were asked for at once")
        self._ask_next()

    def _end(self, error: Exception) -> None:
        def answer() -> Reply:
            raise error

        self.resolve(answer)

    def _joined(self) -> Reply:
        if self._cut.shape is int:
            return self._count
        return Frames(b"".join([encode_header(list, self._count, self._protocol), *self._bodies]))


def _too_late() -> Reply:
    raise PlainError("no server answered in time")
