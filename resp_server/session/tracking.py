"""What one client asked for with CLIENT TRACKING, what it is owed, and the frames in which it is told.

    >2 invalidate [<key>]                       RESP3: to the client, or to the one that it redirects to
    *3 message __redis__:invalidate [<key>]     RESP2: to one that it redirects to, and that is subscribed to something

Nil instead of keys: everything is invalid. What is owed is told before any reply of the epoch in which the keys
changed, between two replies. Where a reply is under way then whose values may be older, it is told again behind that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

PUSH = b">2\r\n$10\r\ninvalidate\r\n"
MESSAGE = b"*3\r\n$7\r\nmessage\r\n$20\r\n__redis__:invalidate\r\n"

# What may be owed to a client, most of it shared with others (guess). Beyond, everything is invalid.
PENDING_BYTES_MAX = 1 << 20


class Invalidation:
    """Keys that are invalid, each in a frame of its own, or all in one. Shared by the clients that are told."""

    __slots__ = ("_frames", "bytes", "is_one_frame", "keys")

    def __init__(self, keys: Sequence[bytes] | None, *, is_one_frame: bool = False) -> None:
        self.keys = keys
        self.is_one_frame = is_one_frame
        self.bytes = 0 if keys is None else sum(map(len, keys)) + len(keys) * len(MESSAGE)
        self._frames: dict[bytes, bytes] = {}

    def frames(self, head: bytes) -> bytes:
        """Return what is sent; `head` is PUSH or MESSAGE."""
        found = self._frames.get(head)
        if found is None:
            found = self._frames[head] = head + head.join(self._payloads(head))
        return found

    def _payloads(self, head: bytes) -> list[bytes]:
        if self.keys is None:
            return [b"_\r\n" if head is PUSH else b"$-1\r\n"]
        bulks = [b"$%d\r\n%b\r\n" % (len(key), key) for key in self.keys]
        if self.is_one_frame:
            return [b"*%d\r\n%b" % (len(bulks), b"".join(bulks))]
        return [b"*1\r\n%b" % bulk for bulk in bulks]


EVERYTHING = Invalidation(None)


class Reader(Protocol):
    """A user, as far as it may be told of keys."""

    @property
    def reads_all_keys(self) -> bool: ...
    def can_read(self, key: bytes) -> bool:
        """Tell whether it may be told of a key."""


class TrackingState:
    """How one client tracks, and what it is owed.

    user: who it is now; None: somebody who may read everything. redirect: the client that is told instead; 0: itself.
    is_caching_given: CLIENT CACHING was just called. is_broken: the one it redirects to is gone. is_passed_on:
    something is on its way to that one, at another process.
    """

    def __init__(self, session_id: int = 0, user: Callable[[], Reader | None] = lambda: None) -> None:
        self.session_id = session_id
        self.user = user
        self.as_holder = (self,)
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
    def remembers(self) -> bool:
        """Tell whether what the client reads now is to be remembered."""
        if not self.is_on or self.is_bcast:
            return False
        return self.is_caching_set if self.is_optin else not (self.is_optout and self.is_caching_set)

    @property
    def has_pending(self) -> bool:
        """Tell whether there is anything to be told."""
        return bool(self.pending or self.resend)

    def enqueue(self, what: Invalidation) -> None:
        """Have the client told."""
        self._pending_bytes += what.bytes
        if what is EVERYTHING or self._pending_bytes > PENDING_BYTES_MAX:
            self._pending_bytes = 0
            self.pending = [EVERYTHING]
        else:
            self.pending.append(what)

    def take(self, *, is_within: bool) -> Sequence[Invalidation]:
        """Return what the client is to be told now. is_within: a reply is under way, behind which it is told again."""
        if not is_within:
            told, self.pending, self.resend, self._pending_bytes = self.resend + self.pending, [], [], 0
            return told
        told, self.pending = self.pending, []
        if EVERYTHING in told:
            self.resend = [EVERYTHING]
        elif EVERYTHING not in self.resend:
            self.resend += told
        return told

    def end(self) -> None:
        """Track no more."""
        self.is_on = self.is_bcast = self.is_optin = self.is_optout = self.is_noloop = False
        self.is_caching_set = self.is_broken = False
        self.prefixes = set()
        self.pending, self.resend, self._pending_bytes = [], [], 0
