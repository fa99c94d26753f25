"""The reply to an MGET that the compiled forwarder sends for the general path."""

from __future__ import annotations

from collections.abc import Callable

from resp_server.forwarding.raw_replies import RawReplySender, ReplyChunks
from resp_server.pipeline.batch import ReplyBatch
from resp_server.session.epoch_feed import Epochs, ReplyEpochs


class BatchForwarderSink:
    """Receives one reply of a batch from the compiled forwarder.

    Args:
        send_by_slots: Sends the request by the general path.
    """

    def __init__(self, batch: ReplyBatch, index: int, send_by_slots: Callable[[], None]) -> None:
        self._batch, self._index = batch, index
        self._send_by_slots = send_by_slots

    @property
    def seen(self) -> Epochs:
        """The epochs that the client has seen."""
        return self._batch.seen_epochs(self._index)

    def deliver(self, reply: bytes | RawReplySender, epochs: ReplyEpochs) -> None:
        """Store the reply, which has at most a megabyte of each server."""
        self._batch.put(self._index, reply if isinstance(reply, bytes) else ReplyChunks(list(reply.texts)), epochs)

    def resend(self, data: bytes, epochs: ReplyEpochs) -> None:
        """Send the request again by the general path."""
        self._send_by_slots()

    def fail(self, error: Exception) -> None:
        """Store an exception as the reply."""
        self._batch.fail(self._index, error)
