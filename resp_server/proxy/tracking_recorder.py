"""What a proxy remembers of clients that track: the keys of an answer, when that comes.

Not sooner: each connection to a server tells which keys changed behind the answers from before (`STATE FOLLOW KEYS`),
so that whatever voids an answer is heard after it. Where that cannot be said, because a connection was lost or another
server answers now, everything became invalid; an answer that was asked for before then is told to be invalid behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from resp_server.proxy.raw_replies import RawReply
from resp_server.proxy.requests import ReplySink, ReplyStage
from resp_server.push.tracking_table import TrackingTable
from resp_server.session.epoch_feed import ReplyEpochs
from resp_server.session.tracking import TrackingState

NEVER = -1


class TrackingRecorder(ReplyStage):
    """Passes an answer on, and has it remembered whose it is. is_kept: False has it told to be invalid behind it."""

    def __init__(
        self,
        sink: ReplySink,
        index: int,
        tracking: TrackingTable,
        client: TrackingState,
        keys: Sequence[bytes],
        *,
        is_kept: bool = True,
    ) -> None:
        super().__init__(sink, index)
        self._tracking = tracking
        self._client = client
        self._keys = keys
        self._full_invalidations = tracking.full_invalidations if is_kept else NEVER

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        """Take the answer."""
        if self._tracking.full_invalidations == self._full_invalidations:
            self._tracking.remember(self._client, self._keys)
        else:
            self._tracking.enqueue_resend(self._client, self._keys)
        self.finish(reply, epochs)
