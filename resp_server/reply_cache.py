"""Ready replies by key: what was sent for a key is sent again while it holds.

Knows nothing of commands, epochs or sockets. Its owner adds only what holds until the key is changed, and drops what
was changed before it looks at anything; a reply that depends on the clock or on the connection has no place here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

# What an entry costs beside its bytes (CPython 3.11: two object headers with malloc's rounding, and the dictionary's
# row at its usual filling).
ENTRY_OVERHEAD_BYTES = 150
# A longer reply is copied longer than it is looked up, and would push out many short ones (guess).
ENTRY_BYTES_MAX = 2048
# The part of a full cache that makes room, the oldest first, and how many of them at once at most: 1.5 us each
# (measured; mostly waiting for memory), and nobody is to wait for that.
ROOM_SHARE = 16
ROOM_ENTRIES_MAX = 1024
# Of a cache that was dropped as a whole, so many entries are freed for each key that is looked up afterwards, at least
# this many at a time: to free 300,000 takes 15 ms at once (measured).
FREED_PER_LOOK = 4
FREED_MIN = 64

# A look that finds nothing costs about a third of what one that finds something saves (measured), so that a cache that
# hits less than this is a loss. It is judged when it has been asked this often, and often enough to have been filled.
HIT_SHARE_MIN = 0.25
JUDGED_AFTER_LOOKS = 1 << 16
JUDGED_AFTER_LOOKS_PER_ENTRY = 4
# A cache that is a loss is emptied and not asked, for a time that doubles with each try in vain.
REST_LOOKS = 1 << 20
REST_LOOKS_MAX = 1 << 26


class ReplyCache:
    """Replies by key, bounded in bytes. `bytes_max` 0: it holds nothing."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._replies: dict[bytes, bytes] = {}
        self._dropped: list[dict[bytes, bytes]] = []
        self._looks = 0
        self._misses = 0
        self._rest_looks = REST_LOOKS
        self._is_resting = not bytes_max

    def __len__(self) -> int:
        return len(self._replies)

    @property
    def used_bytes(self) -> int:
        """About how much memory the replies and their keys take."""
        return self._bytes

    def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the replies of several keys, None for those that it does not hold."""
        self._looks += len(keys)
        if self._dropped:
            self._free(max(FREED_MIN, FREED_PER_LOOK * len(keys)))
        if self._is_resting:
            self._rest()
            return [None] * len(keys)
        return list(map(self._replies.get, keys))

    def add(self, replies: Mapping[bytes, bytes], missed: int) -> None:
        """Hold replies of the keys, `missed` in number, that `find` has just not found; long ones are left out."""
        self._misses += missed
        if self._is_resting:
            return
        held = self._replies
        for key, reply in replies.items():
            size = len(key) + len(reply)
            if size <= ENTRY_BYTES_MAX and key not in held:
                held[key] = reply
                self._bytes += size + ENTRY_OVERHEAD_BYTES
        if self._bytes > self._bytes_max:
            self._make_room()
        if self._looks >= JUDGED_AFTER_LOOKS:
            self._judge()

    def drop(self, keys: Sequence[bytes] | None) -> None:
        """Let go of the replies of these keys; None: of all."""
        if keys is None:
            if self._replies:
                self._dropped.append(self._replies)
                self._replies = {}
            self._bytes = 0
            return
        for key in self._replies.keys() & keys:
            self._bytes -= len(key) + len(self._replies.pop(key)) + ENTRY_OVERHEAD_BYTES

    def _free(self, count: int) -> None:
        """Free some of what was dropped as a whole."""
        while count and self._dropped:
            dropped = self._dropped[-1]
            some = min(count, len(dropped))
            for _ in range(some):
                dropped.popitem()
            count -= some
            if not dropped:
                self._dropped.pop()

    def _make_room(self) -> None:
        while self._bytes > self._bytes_max:
            self.drop(list(islice(self._replies, min(1 + len(self._replies) // ROOM_SHARE, ROOM_ENTRIES_MAX))))

    def _judge(self) -> None:
        """Look back once in a while at how often something was found, and go to rest if that was too seldom."""
        if self._looks < JUDGED_AFTER_LOOKS_PER_ENTRY * len(self._replies):
            return
        if self._looks - self._misses < HIT_SHARE_MIN * self._looks:
            self.drop(None)
            self._is_resting = True
        else:
            self._rest_looks = REST_LOOKS
        self._looks = self._misses = 0

    def _rest(self) -> None:
        if self._bytes_max and self._looks >= self._rest_looks:
            self._is_resting = False
            self._rest_looks = min(2 * self._rest_looks, REST_LOOKS_MAX)
            self._looks = self._misses = 0
