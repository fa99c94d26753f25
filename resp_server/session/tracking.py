"""The CLIENT TRACKING state of one client: its options, its pending invalidations, and their frames.

    >2 invalidate [<key>]                       RESP3: to the client, or to its redirect target
    *3 message __redis__:invalidate [<key>]     RESP2: to a redirect target that has a subscription

Nil in place of keys invalidates everything. An invalidation is sent between two replies, before the first reply from
the epoch in which the keys changed. If a reply with older values is being sent then, the invalidation is sent once more
after that reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resp_server.session.account import Account

PUSH = b">2\r\n$10\r\ninvalidate\r\n"
MESSAGE = b"*3\r\n$7\r\nmessage\r\n$20\r\n__redis__:invalidate\r\n"

# The limit of a client's pending invalidations, mostly shared with other clients (guess). Beyond it, everything is
# invalidated.
PENDING_BYTES_MAX = 1 << 20


class Invalidation:
    """Invalid keys, each in its own frame or all in one frame. Clients share the object."""

    __slots__ = ("_frames", "bytes", "is_one_frame", "keys")

    def __init__(self, keys: Sequence[bytes] | None, *, is_one_frame: bool = False) -> None:
        self.keys = keys
        self.is_one_frame = is_one_frame
        self.bytes = 0 if keys is None else sum(map(len, keys)) + len(keys) * len(MESSAGE)
        self._frames: dict[bytes, bytes] = {}

    def frames(self, prefix: bytes) -> bytes:
        """Return the frames; `prefix` is PUSH or MESSAGE."""
        found = self._frames.get(prefix)
        if found is None:
            found = self._frames[prefix] = prefix + prefix.join(self._payloads(prefix))
        return found

    def _payloads(self, prefix: bytes) -> list[bytes]:
        if self.keys is None:
            return [b"_\r\n" if prefix is PUSH else b"$-1\r\n"]
        bulks = [b"$%d\r\n%b\r\n" % (len(key), key) for key in self.keys]
        if self.is_one_frame:
            return [b"*%d\r\n%b" % (len(bulks), b"".join(bulks))]
        return [b"*1\r\n%b" % bulk for bulk in bulks]


EVERYTHING = Invalidation(None)


class TrackingState:
    """One client's tracking options, and its pending invalidations.

    Args:
        user: Returns the client's user; None may read all keys.

    Attributes:
        redirect: The session id of the redirect target; 0: none.
        is_caching_set: The last command was CLIENT CACHING.
        is_broken: The redirect target has disconnected.
        is_relayed: Invalidations are being relayed to a redirect target at another process.
        pending: Not sent yet.
        resend: Sent once, and sent again after the current reply.
        as_tuple: A tuple of this object alone, which all keys of the tracking table share that only this client caches.
    """

    def __init__(self, session_id: int = 0, user: Callable[[], Account | None] = lambda: None) -> None:
        self.session_id = session_id
        self.user = user
        self.as_tuple = (self,)
        self.is_on = False
        self.is_bcast = self.is_optin = self.is_optout = self.is_noloop = False
        self.is_caching_set = False
        self.is_broken = False
        self.is_relayed = False
        self.redirect = 0
        self.prefixes: set[bytes] = set()
        self.pending: list[Invalidation] = []
        self.resend: list[Invalidation] = []
        self._pending_bytes = 0

    @property
    def records_reads(self) -> bool:
        """Return whether keys that the client reads now are recorded."""
        if not self.is_on or self.is_bcast:
            return False
        return self.is_caching_set if self.is_optin else not (self.is_optout and self.is_caching_set)

    @property
    def has_pending(self) -> bool:
        """Return whether invalidations are pending."""
        return bool(self.pending or self.resend)

    def enqueue(self, invalidation: Invalidation) -> None:
        """Add an invalidation; too many are replaced by EVERYTHING."""
        self._pending_bytes += invalidation.bytes
        if invalidation is EVERYTHING or self._pending_bytes > PENDING_BYTES_MAX:
            self._pending_bytes = 0
            self.pending = [EVERYTHING]
        else:
            self.pending.append(invalidation)

    def take(self, *, is_reply_pending: bool) -> Sequence[Invalidation]:
        """Remove and return the invalidations to send now.

        Args:
            is_reply_pending: A reply to the client is not complete; the invalidations are sent again after it.
        """
        if not is_reply_pending:
            taken, self.pending, self.resend, self._pending_bytes = self.resend + self.pending, [], [], 0
            return taken
        taken, self.pending = self.pending, []
        if EVERYTHING in taken:
            self.resend = [EVERYTHING]
        elif EVERYTHING not in self.resend:
            self.resend += taken
        return taken

    def end(self) -> None:
        """Turn tracking off."""
        self.is_on = self.is_bcast = self.is_optin = self.is_optout = self.is_noloop = False
        self.is_caching_set = self.is_broken = False
        self.prefixes = set()
        self.pending, self.resend, self._pending_bytes = [], [], 0
