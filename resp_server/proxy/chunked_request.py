"""Long requests at a proxy. A request with many keys is sent in portions, one after another; their replies are merged.

A long request about a single key is encoded in steps, and sent whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from resp_server.command.policy import Joined, Split
from resp_server.execution.long_requests import of_bounded_size
from resp_server.forwarding.raw_replies import RawReply, Steps, is_error, raw_reply_of, split_header
from resp_server.forwarding.reply_splitter import pack
from resp_server.protocol.errors import PlainError
from resp_server.protocol.replies import Pending, encode, encode_header
from resp_server.protocol.request_parser import PORTION_WORDS, LongRequest, Request
from resp_server.proxy.batch import ReplyBatch

# The longest request that is sent whole (guess: encoding it takes a few milliseconds).
PACKED_BYTES_MAX = 32 << 20

# Sends one portion, and returns the batch that gets its reply. The function may raise.
SendPortion = Callable[[Request], ReplyBatch]


def pack_in_steps(request: LongRequest) -> Steps[bytes]:
    """Encode a long request in steps. To free memory, its words are cleared, except those of the first portion."""
    texts = [b"*%d\r\n" % len(request)]
    size = 0
    for at in range(0, len(request), PORTION_WORDS):
        words = request[at : at + PORTION_WORDS]
        for some in of_bounded_size(words):
            texts.append(pack(some).partition(b"\r\n")[2])
            size += len(texts[-1])
            if size > PACKED_BYTES_MAX:
                raise PlainError(f"a request may have {PACKED_BYTES_MAX >> 20} MiB through a proxy; split it")
            yield
        if at:
            request[at : at + len(words)] = [b""] * len(words)
    return b"".join(texts)


class ChunkedRequest(Pending):
    """The reply to a request that is sent in portions."""

    def __init__(
        self,
        protocol: int,
        split: Split,
        portions: Iterator[Request],
        send_portion: SendPortion,
        seconds_max: float,
        bytes_max: int,
    ) -> None:
        super().__init__(seconds_max, _too_late)
        self._protocol = protocol
        self._split = split
        self._portions = portions
        self._send_portion = send_portion
        self._bytes_max = bytes_max
        self._texts: list[bytes] = []
        self._bytes = self._count = 0

    def start(self) -> None:
        """Send the first portion."""
        self._attempt(self._send_next)

    def _attempt(self, step: Callable[[], None]) -> None:
        """Run a step; an exception that it raises becomes this request's reply."""
        try:
            step()
        except Exception as error:
            self._fail(error)

    def _send_next(self) -> None:
        portion = next(self._portions, None)
        if portion is None:
            self.resolve(self._merged)
            return
        batch = self._send_portion(portion)
        if batch.missing:
            batch.when_resolved(lambda: self._attempt(lambda: self._receive(*batch.replies())))
        else:
            self._receive(*batch.replies())

    def _receive(self, reply: RawReply) -> None:
        if is_error(reply):
            self.resolve(lambda: reply)
            return
        line, texts = split_header(reply)
        self._count += int(line[1:])  # of an array, the number of items; of an integer, its value
        self._texts += texts
        self._bytes += len(reply)
        if self._bytes > self._bytes_max:
            raise PlainError(f"replies of more than {self._bytes_max} bytes were requested at once")
        self._send_next()

    def _fail(self, error: Exception) -> None:
        def raise_error() -> RawReply:
            raise error

        self.resolve(raise_error)

    def _merged(self) -> RawReply:
        if self._split.joined is Joined.SUM:
            return encode(self._count, self._protocol)
        return raw_reply_of([encode_header(list, self._count, self._protocol), *self._texts])


def _too_late() -> RawReply:
    raise PlainError("no server answered in time")
