"""The cache of an upstream's replies, for keys whose rule has `cache`. Pure.

A reply is cached only if nothing can have changed its keys between the request and the reply. A reply about several
keys is one entry: its values are those of one read, and a change of any of its keys removes it. When a client of this
proxy sends a write, the entries of its keys are removed. Until the write has its reply, reads of these keys are not
cached: the upstream may have run another client's read before the write, and the writer must not get that reply later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.reply_splitter import pack

# The memory for all entries (guess), and the longest reply that is cached.
CACHE_BYTES_MAX = 64 << 20
REPLY_BYTES_MAX = 64 * 1024
# The overhead of an entry (measured: a tuple of four words, two rows of dictionaries, a set), and of each further key
# (guess: a row of a dictionary, a set).
ENTRY_OVERHEAD_BYTES, KEY_OVERHEAD_BYTES = 700, 350


Member = TypeVar("Member")

# The key of an entry: the database, the version of the protocol, and the request as it is sent, its name in lower case.
# The compiled forwarder makes it of a client's bytes.
CachedRead = tuple[int, int, bytes]


def read_of(request: Request, database: int, protocol: int) -> CachedRead:
    """Return the key of the entry of a read."""
    return database, protocol, pack((request[0].lower(), *request[1:]))


class _Entry(NamedTuple):
    keys: Sequence[bytes]
    reply: bytes
    ends_s: float
    size: int


class Fill:
    """A read in flight whose reply may be cached.

    Args:
        ends_s: When the entry expires.

    Attributes:
        is_valid: No key has changed.
    """

    __slots__ = ("ends_s", "is_valid", "keys", "read")

    def __init__(self, read: CachedRead, keys: Sequence[bytes], ends_s: float) -> None:
        self.read, self.keys, self.ends_s = read, keys, ends_s
        self.is_valid = True


class Write:
    """A write in flight.

    Args:
        keys: The keys that it may change; None: all keys.

    Attributes:
        is_finished: It has its reply.
    """

    __slots__ = ("is_finished", "keys")

    def __init__(self, keys: Sequence[bytes] | None) -> None:
        self.keys = keys
        self.is_finished = False


class ResultCache:
    """The cached replies of one upstream."""

    def __init__(self, clock: Callable[[], float], bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._clock, self._bytes_max = clock, bytes_max
        self._entries: dict[CachedRead, _Entry] = {}  # the least recently used one is the first
        self._reads_of: dict[bytes, set[CachedRead]] = {}
        self._fills: dict[bytes, set[Fill]] = {}
        self._writes: dict[bytes, int] = {}
        self._writes_of_any_key = 0
        self._bytes = 0
        self.hits = self.misses = self.invalidated = self.evicted = 0

    def get(self, read: CachedRead) -> bytes | None:
        """Return the reply to a read, if it is cached. On the path of each such request. The caller counts hits."""
        entry = self._entries.pop(read, None)
        if entry is None:
            return None
        if self._clock() < entry.ends_s:
            self._entries[read] = entry
            return entry.reply
        self._forget(read, entry)
        return None

    def begin_fill(self, read: CachedRead, keys: Sequence[bytes], time_s: float) -> Fill | None:
        """Begin a read that may be cached for `time_s`; None: a write of one of its keys is in flight."""
        if self._writes_of_any_key or not self._writes.keys().isdisjoint(keys):
            return None
        fill = Fill(read, keys, self._clock() + time_s)
        for key in keys:
            self._fills.setdefault(key, set()).add(fill)
        return fill

    def end_fill(self, fill: Fill, reply: bytes | None) -> None:
        """End a read, and cache its reply. None: there is no reply that can be cached."""
        for key in fill.keys:
            _discard(self._fills, key, fill)
        if not fill.is_valid or reply is None or len(reply) > REPLY_BYTES_MAX:
            return
        size = len(reply) + len(fill.read[2]) + ENTRY_OVERHEAD_BYTES
        size += KEY_OVERHEAD_BYTES * (len(fill.keys) - 1)
        before = self._entries.pop(fill.read, None)
        if before is not None:
            self._bytes -= before.size
        self._entries[fill.read] = _Entry(fill.keys, reply, fill.ends_s, size)
        for key in fill.keys:
            self._reads_of.setdefault(key, set()).add(fill.read)
        self._bytes += size
        while self._bytes > self._bytes_max:
            oldest = next(iter(self._entries))
            self._forget(oldest, self._entries.pop(oldest))
            self.evicted += 1

    def begin_write(self, keys: Sequence[bytes] | None) -> Write:
        """Remove the entries of keys that a request may change, and cache no read of them until `end_write`.

        Args:
            keys: None: all keys.
        """
        self.drop(keys)
        if keys is None:
            self._writes_of_any_key += 1
        else:
            for key in keys:
                self._writes[key] = self._writes.get(key, 0) + 1
        return Write(keys)

    def end_write(self, write: Write) -> None:
        """End a write: it has its reply, or will get none."""
        if write.is_finished:
            return
        write.is_finished = True
        if write.keys is None:
            self._writes_of_any_key -= 1
            return
        for key in write.keys:
            self._writes[key] -= 1
            if not self._writes[key]:
                del self._writes[key]

    def drop(self, keys: Iterable[bytes] | None) -> None:
        """Drop the cached replies about keys (None: about all). The replies to reads in flight are not cached."""
        if keys is None:
            self.invalidated += len(self._entries)
            self._entries, self._reads_of, self._bytes = {}, {}, 0
            fills, self._fills = self._fills, {}
            for some in fills.values():
                for fill in some:
                    fill.is_valid = False
            return
        for key in keys:
            for fill in self._fills.pop(key, ()):
                fill.is_valid = False
            for read in list(self._reads_of.get(key, ())):
                self._forget(read, self._entries.pop(read))
                self.invalidated += 1

    def info_fields(self) -> dict[str, object]:
        """Return the fields of INFO."""
        return {
            "cache_hits": self.hits,
            "cache_misses": self.misses,
            "cache_entries": len(self._entries),
            "cache_bytes": self._bytes,
            "cache_invalidated": self.invalidated,
            "cache_evicted": self.evicted,
        }

    def _forget(self, read: CachedRead, entry: _Entry) -> None:
        """Remove an entry that `_entries` no longer has from the counts and the index."""
        self._bytes -= entry.size
        for key in entry.keys:
            _discard(self._reads_of, key, read)


def _discard(sets: dict[bytes, set[Member]], key: bytes, member: Member) -> None:
    """Remove a member from a key's set, and an empty set."""
    found = sets.get(key)
    if found is not None:
        found.discard(member)
        if not found:
            del sets[key]
