"""A pipeline takes a client's requests in their order, and returns the replies. It does not know its backend's kind."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

from resp_server.pipeline.context import CommandContext
from resp_server.pipeline.error_replies import error_reply
from resp_server.pipeline.slow_requests import NEVER_NS
from resp_server.protocol.replies import IncompleteReply, Pending, ReplyStream, Sliced, encode
from resp_server.protocol.request_parser import Request

if TYPE_CHECKING:
    from resp_server.native.fast_path import FastPath


class Pipeline(Protocol):
    """Answers the requests of one server's clients.

    Attributes:
        compiled: The compiled core, which gets all input first; None: it is not built, or the backend has no stores.
    """

    compiled: FastPath | None

    def answer(
        self,
        context: CommandContext,
        requests: list[Request],
        out: list[bytes],
        ends_ns: int = NEVER_NS,
        requests_max: int = sys.maxsize,
    ) -> IncompleteReply | None:
        """Answer requests in order, until all are answered, a reply is large or incomplete, or time or session end.

        Replies are added to `out`, and answered requests are removed from `requests`. Returns the incomplete reply.
        """

    def later_reply(self, context: CommandContext, pending: Pending) -> bytes | ReplyStream:
        """Return a resolved reply, encoded at once or in steps."""

    def error_reply(self, error: Exception) -> bytes:
        """Return an encoded error reply, and count it."""

    def poll(self, poller: Any) -> None:
        """Use the compiled core's epoll for connections to other servers."""

    def stop(self) -> None:
        """Close connections to other servers."""


def pending_reply(context: CommandContext, pending: Pending) -> bytes:
    """Return a resolved reply, or its error, encoded; empty if replies are suppressed."""
    try:
        reply = encode(pending.make(), context.session.protocol)
    except Exception as error:
        reply = error_reply(context.server, error)
    return b"" if context.session.replies_suppressed else reply


def release_reply(reply: bytes | IncompleteReply | None) -> None:
    """Release the view of a reply that will not be sent."""
    if isinstance(reply, Sliced):
        reply.release()
    elif reply is not None and not isinstance(reply, bytes | Pending):
        reply.close()
