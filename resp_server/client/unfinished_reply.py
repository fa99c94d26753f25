"""The reply of a client that is not complete: it waits for something, or it is sent in steps."""

from __future__ import annotations

from resp_server.protocol.replies import Pending, ReplyStream, Retry


class UnfinishedReply:
    """The unfinished reply of one client, if it has one.

    Attributes:
        pending: What the next turn waits for. None: nothing.
        stream: The reply that is sent in steps. None: no reply is.
    """

    __slots__ = ("_since_ms", "pending", "stream")

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.stream: ReplyStream | None = None
        self._since_ms = 0

    @property
    def exists(self) -> bool:
        """Return whether there is one."""
        return self.pending is not None or self.stream is not None

    @property
    def is_blocking(self) -> bool:
        """Return whether a blocking command of the client waits; all replies before it are sent."""
        return self.pending is not None and self.pending.is_blocking

    @property
    def has_arrived(self) -> bool:
        """Return whether all replies that the client waits for have arrived, and are sent in the next turn."""
        pending = self.pending
        return pending is not None and pending.is_resolved and not isinstance(pending, Retry)

    @property
    def allows_pause(self) -> bool:
        """Return whether CLIENT PAUSE may stop the client here: no request has begun whose reply it waits for."""
        return self.stream is None and (self.pending is None or isinstance(self.pending, Retry))

    @property
    def allows_push(self) -> bool:
        """Return whether a push may be sent now: between two replies, or while a blocking command waits."""
        return self.allows_pause or (self.stream is None and self.is_blocking)

    def begin_stream(self, stream: ReplyStream, now_ms: int) -> None:
        """Send a reply in steps from now on."""
        self.stream, self._since_ms = stream, now_ms

    def pinned_ms(self, now_ms: int) -> int:
        """Return how long the reply has pinned its epoch; 0 if it pins none."""
        return 0 if self.stream is None or not self.stream.pins_epoch else now_ms - self._since_ms

    def end_stream(self) -> None:
        """Release the epochs that the reply has pinned."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None
