"""Long replies: each is received over a socket of its own, which the connection to its server leaves to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resp_server.backends.servers.requests import ServerRequest
from resp_server.backends.servers.server_connection import REPLY_BYTES_MAX, ServerProtocol
from resp_server.protocol.errors import GenericError
from resp_server.raw_replies.raw_reply import RawReply
from resp_server.session.epochs import ReplyEpochs


class LongReply:
    """A long reply with a socket of its own, buffered until it is complete."""

    def __init__(
        self,
        others: LongReplies,
        link: ServerProtocol,
        request: ServerRequest,
        epochs: ReplyEpochs,
        deadline_s: float,
    ) -> None:
        self.link = link
        self._epochs = epochs
        self.deadline_s = deadline_s
        self.buffered_bytes = 0
        self._others = others
        self._request = request

    def receive_replies(self, replies: Sequence[RawReply]) -> None:
        """Pass the reply to the sink, and close the socket: the requests after it were sent again over another one."""
        self._others.remove(self)
        self.link.forget()
        try:
            self._request.sink.put(self._request.index, replies[0], self._epochs)
        except Exception as error:
            self._request.fail_all(error)

    def disconnected(self, reason: str) -> None:
        """Reply with an error."""
        self._others.remove(self)
        self._request.refuse(GenericError(reason))


class LongReplies:
    """The long replies that are being received. Together they buffer at most `REPLY_BYTES_MAX`.

    Args:
        deadline_s: Returns the deadline of a long reply that begins now.
    """

    def __init__(self, deadline_s: Callable[[], float]) -> None:
        self._deadline_s = deadline_s
        self._all: list[LongReply] = []
        self._buffered_bytes = 0

    def take(self, link: ServerProtocol, request: ServerRequest, epochs: ReplyEpochs) -> None:
        """Take over a socket whose next reply is long. It is read when the buffers of all long replies have room."""
        if link.partial_bytes > REPLY_BYTES_MAX:
            link.forget()
            request.refuse(GenericError(f"a reply is larger than {REPLY_BYTES_MAX} bytes"))
            return
        reply = LongReply(self, link, request, epochs, self._deadline_s())
        self._all.append(reply)
        link.set_receiver(reply)
        link.pause(True)
        self._start_reading()

    def remove(self, reply: LongReply) -> None:
        """Remove a reply that is complete or lost."""
        self._all.remove(reply)
        self._buffered_bytes -= reply.buffered_bytes
        self._start_reading()

    def check(self, now_s: float) -> None:
        """Close the sockets of replies that take too long, or exceed the room in the buffers."""
        for reply in list(self._all):
            if now_s > reply.deadline_s:
                reply.link.cut("a long reply was not complete in time")
            elif reply.buffered_bytes and reply.link.partial_bytes > reply.buffered_bytes:
                grown = reply.link.partial_bytes - reply.buffered_bytes
                if self._buffered_bytes + grown > REPLY_BYTES_MAX:
                    reply.link.cut("too many long replies were requested at once")
                else:
                    self._buffered_bytes += grown
                    reply.buffered_bytes += grown

    def stop(self) -> None:
        """Close the sockets of all long replies."""
        for reply in list(self._all):
            reply.link.cut("the proxy stops")

    def _start_reading(self) -> None:
        for reply in self._all:
            if not reply.buffered_bytes and self._buffered_bytes + reply.link.partial_bytes <= REPLY_BYTES_MAX:
                reply.buffered_bytes = reply.link.partial_bytes
                self._buffered_bytes += reply.buffered_bytes
                reply.link.pause(False)
