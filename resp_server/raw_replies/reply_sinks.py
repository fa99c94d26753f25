"""The sinks of servers' replies, and the merging of several replies into one.

Servers' replies arrive outside of their client's turn. So an exception while a reply is handled is not raised to the
caller. It goes to the reply's sink (`fail`), and the client's sink turns it into an error reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import hiredis

from resp_server.protocol.errors import GenericError, ReplyError
from resp_server.raw_replies.raw_reply import RawReply, Steps, result_of
from resp_server.raw_replies.reply_splitter import FrameError
from resp_server.session.epochs import EMPTY_EPOCHS, NO_EPOCHS, Epochs, ReplyEpochs
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.proxy")

# Merges several replies into one, at once or in steps.
Merge = Callable[[Sequence[RawReply]], "RawReply | Steps[RawReply]"]
# Calls back in a later turn of the event loop.
Defer = Callable[[Callable[[], None]], object]

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


def steps_or_error(steps: Steps[RawReply]) -> Steps[RawReply]:
    """Run steps that merge servers' replies; if one is malformed, return an error reply."""
    try:
        found: RawReply = yield from steps
    except MALFORMED_REPLY_ERRORS as error:
        return malformed_reply(error)
    return found


def malformed_reply(error: Exception) -> bytes:
    """Log a reply of an unexpected form; return the error reply for it."""
    logger.warning("a server's reply has an unexpected form: %s", error, exc_info=error)
    return b"-%b\r\n" % GenericError("a server's reply has an unexpected form").line


class UnansweredError(Exception):
    """The upstream did not answer a request, which may have run. The client's connection has to be closed."""


class ReplySink:
    """Receives replies. Its methods do not raise: replies for other sinks come next."""

    __slots__ = ()

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Take the reply to the request with this index.

        Args:
            epochs: The reply's; a reply of the proxy has none.
        """

    def fail(self, index: int, error: Exception) -> None:
        """Take an exception in place of the reply to the request with this index."""

    def seen_epochs(self, index: int) -> Epochs:
        """Return the epochs that the request's client has seen. Its reply must not be from earlier epochs."""
        return EMPTY_EPOCHS
