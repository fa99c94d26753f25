"""Records which keys a client with CLIENT TRACKING has read, when their reply arrives.

A server reports a changed key after the replies with the old value (`STATE FOLLOW KEYS`). The keys of a reply are
recorded when it arrives, so the invalidation of a key always follows the reply with the key's old value. Reports may be
missing after a connection was lost or another server took over. Then all keys are invalidated. A reply that was
requested before then is followed by an invalidation of its keys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from resp_server.push.tracking_table import TrackingTable
from resp_server.raw_replies.answers import Answer
from resp_server.session.tracking import TrackingState


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
