"""Records which keys a client with CLIENT TRACKING has read, when their reply arrives.

A server reports a changed key after the replies with the old value (`STATE FOLLOW KEYS`). The keys of a reply are
recorded when it arrives, so the invalidation of a key always follows the reply with the key's old value. Reports may be
missing after a connection was lost or another server took over. Then all keys are invalidated. A reply that was
requested before then is followed by an invalidation of its keys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from resp_server.forwarding.answers import Answer
from resp_server.forwarding.raw_replies import RawReply
from resp_server.forwarding.reply_stages import ReplySink, ReplyStage
from resp_server.push.tracking_table import TrackingTable
from resp_server.session.epoch_feed import ReplyEpochs
from resp_server.session.tracking import TrackingState

NEVER = -1


async def tracked(
    tracking: TrackingTable, client: TrackingState, keys: Sequence[bytes], answering: Awaitable[Answer]
) -> Answer:
    """Return the answer to a read, and record its keys for the client."""
    full_invalidations = tracking.full_invalidations
    answer = await answering
    if tracking.full_invalidations == full_invalidations:
        tracking.record_keys(client, keys)
    else:
        tracking.enqueue_resend(client, keys)
    return answer


class TrackingRecorder(ReplyStage):
    """Records a reply's keys for the client, and passes the reply on. is_cacheable: False: its keys are invalidated."""

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
        """Record the keys, and pass the reply to the sink."""
        if self._tracking.full_invalidations == self._full_invalidations:
            self._tracking.record_keys(self._client, self._keys)
        else:
            self._tracking.enqueue_resend(self._client, self._keys)
        self.finish(reply, epochs)
