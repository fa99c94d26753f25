"""Records the keys of a reply for a client that tracks (CLIENT TRACKING), when the reply arrives.

A server reports changed keys after the replies from before the change (`STATE FOLLOW KEYS`). So the keys are recorded
when the reply arrives, and an invalidation always follows the reply that it concerns. When a connection is lost or
another server takes over, reports may be missing. Then all keys are invalidated, and a reply that was requested before
is followed by an invalidation of its own keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from resp_server.forwarding.raw_replies import RawReply
from resp_server.forwarding.reply_stages import ReplySink, ReplyStage
from resp_server.push.tracking_table import TrackingTable
from resp_server.session.epoch_feed import ReplyEpochs
from resp_server.session.tracking import TrackingState

NEVER = -1


class TrackingRecorder(ReplyStage):
    """Passes a reply on and records its keys for the client. is_cacheable: False: the keys are invalidated after it."""

    def __init__(
        self,
        sink: ReplySink,
        index: int,
        tracking: TrackingTable,
        client: TrackingState,
        keys: Sequence[bytes],
        *,
        is_cacheable: bool = True,
    ) -> None:
        super().__init__(sink, index)
        self._tracking = tracking
        self._client = client
        self._keys = keys
        self._full_invalidations = tracking.full_invalidations if is_cacheable else NEVER

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        """Take the reply."""
        if self._tracking.full_invalidations == self._full_invalidations:
            self._tracking.record_keys(self._client, self._keys)
        else:
            self._tracking.enqueue_resend(self._client, self._keys)
        self.finish(reply, epochs)
