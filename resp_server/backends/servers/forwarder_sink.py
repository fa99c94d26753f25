"""The reply to an MGET, or to an EXEC, that the compiled forwarder sends for the general path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from resp_server.backends.servers.transaction_plan import PACKED_EXEC, PACKED_MULTI
from resp_server.pipeline.batch import ReplyBatch
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.raw_replies.raw_reply import RawReplySender, ReplyChunks
from resp_server.raw_replies.reply_sinks import UnansweredError
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.epochs import Epochs, ReplyEpochs
from resp_server.session.session import Session


class BatchForwarderSink:
    """Receives one reply of a batch from the compiled forwarder.

    Args:
        send: Sends the request by the general path.
    """

    def __init__(self, batch: ReplyBatch, index: int, send: Callable[[], None]) -> None:
        self._batch, self._index, self._send = batch, index, send

    @property
    def seen(self) -> Epochs:
        """The epochs that the client has seen."""
        return self._batch.seen_epochs(self._index)

    def deliver(self, reply: bytes | RawReplySender, epochs: ReplyEpochs) -> None:
        """Store the reply, which has at most a megabyte of each server."""
        self._batch.put(self._index, reply if isinstance(reply, bytes) else ReplyChunks(list(reply.texts)), epochs)

    def resend(self, data: bytes, epochs: ReplyEpochs) -> None:
        """Send the request again by the general path."""
        self._send()

    def fail(self, error: Exception) -> None:
        """Store an exception as the reply."""
        self._batch.fail(self._index, error)


class ExecForwarderSink(BatchForwarderSink):
    """Receives the replies to MULTI, to the queued commands, and to EXEC; the batch gets the last one.

    Args:
        count: The number of replies before the last one.
    """

    watches_states = False

    def __init__(self, batch: ReplyBatch, index: int, run: Callable[[], None], client_id: int, count: int) -> None:
        super().__init__(batch, index, run)
        self.client_id, self._count = client_id, count

    def deliver(self, reply: bytes | RawReplySender, epochs: ReplyEpochs) -> None:
        if isinstance(reply, bytes):  # those before the last one are lines
            self._batch.put(self._index, reply.split(b"\r\n", self._count)[-1], epochs)
        else:
            self._batch.put(self._index, ReplyChunks(list(islice(reply.texts, self._count, None))), epochs)

    def error_reply(self, error: Exception) -> bytes:
        """Return the error reply for an exception."""
        return self._batch.error_reply(error)

    def end(self, replies: bytes | RawReplySender) -> None:
        """End the client's connection: the transaction may have run, or not."""
        self.fail(UnansweredError("the connection to the upstream was lost"))


def forward_exec(
    forwarder: Any,
    session: Session,
    requests: Sequence[Request],
    batch: ReplyBatch,
    index: int,
    run: Callable[[], None],
) -> bool:
    """Forward a transaction; see `pipeline.transactions.TransactionBackend`."""
    if forwarder is None or any(type(request) is LongRequest for request in requests):
        return False
    packed = b"".join((PACKED_MULTI, *map(pack, requests), PACKED_EXEC))
    sink = ExecForwarderSink(batch, index, run, session.id, len(requests) + 1)
    batch.set_retry(index, run)
    return bool(forwarder.forward(sink, packed, session.protocol, session.db))
