"""Replies of the upstream that are kept for a time, for keys whose rule has `cache`. Pure.

A reply is taken only if nothing may have changed its key between the request and the reply. A write of the proxy's own
clients ends what is cached when it is sent, and until it is answered nothing of its keys is answered or taken: another
client's read could be from before the write, and the writer must not get it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

# The memory for all entries (guess), and the longest reply that is kept.
CACHE_BYTES_MAX = 64 << 20
REPLY_BYTES_MAX = 64 * 1024
# The overhead of an entry (measured: a tuple of four words, two rows of dictionaries, a set).
ENTRY_OVERHEAD_BYTES = 700


class CachedRead(NamedTuple):
    """What an entry answers: a read of one key, in one database and version of the protocol."""

    database: int
    protocol: int
    name: str
    words: tuple[bytes, ...]


class _Entry(NamedTuple):
    key: bytes
    reply: bytes
    ends_s: float
    size: int


class Fill:
    """A read whose reply may be taken. ends_s: it is kept until then. is_valid: nothing may have changed the key."""

    __slots__ = ("ends_s", "is_valid", "key", "read")

    def __init__(self, read: CachedRead, key: bytes, ends_s: float) -> None:
        self.read, self.key, self.ends_s = read, key, ends_s
        self.is_valid = True


class Write:
    """A write that was sent and not answered. keys: None: any key may change."""

    __slots__ = ("is_over", "keys")

    def __init__(self, keys: Sequence[bytes] | None) -> None:
        self.keys = keys
        self.is_over = False


class ResultCache:
    """The cached replies of one upstream. clock: monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float], bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._clock, self._bytes_max = clock, bytes_max
        self._entries: dict[CachedRead, _Entry] = {}  # the one used last at the end
        self._reads_of: dict[bytes, set[CachedRead]] = {}
        self._fills: dict[bytes, set[Fill]] = {}
        self._writes: dict[bytes, int] = {}
        self._writes_of_any_key = 0
        self._bytes = 0
        self.hits = self.misses = self.invalidated = self.evicted = 0

    def get(self, read: CachedRead) -> bytes | None:
        """Return the reply to a read, if it is cached."""
        entry = self._entries.pop(read, None)
        if entry is not None:
            if self._clock() < entry.ends_s:
                self._entries[read] = entry
                self.hits += 1
                return entry.reply
            self._forget(read, entry)
        self.misses += 1
        return None

    def begin_fill(self, read: CachedRead, key: bytes, time_s: float) -> Fill | None:
        """Return what takes the reply to a read that is sent now; None: it may not be taken. time_s: to keep it."""
        if self._writes_of_any_key or key in self._writes:
            return None
        fill = Fill(read, key, self._clock() + time_s)
        self._fills.setdefault(key, set()).add(fill)
        return fill

    def end_fill(self, fill: Fill, reply: bytes | None) -> None:
        """Take the reply to a read; None: it had no reply that can be kept."""
        fills = self._fills.get(fill.key)
        if fills is not None:
            fills.discard(fill)
            if not fills:
                del self._fills[fill.key]
        if not fill.is_valid or reply is None or len(reply) > REPLY_BYTES_MAX:
            return
        size = len(reply) + sum(map(len, fill.read.words)) + ENTRY_OVERHEAD_BYTES
        before = self._entries.pop(fill.read, None)
        if before is not None:
            self._bytes -= before.size
        self._entries[fill.read] = _Entry(fill.key, reply, fill.ends_s, size)
        self._reads_of.setdefault(fill.key, set()).add(fill.read)
        self._bytes += size
        while self._bytes > self._bytes_max:
            oldest = next(iter(self._entries))
            self._forget(oldest, self._entries.pop(oldest))
            self.evicted += 1

    def begin_write(self, keys: Sequence[bytes] | None) -> Write:
        """End what is cached of keys that a request may change; None: of all keys."""
        self.drop(keys)
        if keys is None:
            self._writes_of_any_key += 1
        else:
            for key in keys:
                self._writes[key] = self._writes.get(key, 0) + 1
        return Write(keys)

    def end_write(self, write: Write) -> None:
        """Handle the reply to such a request, or that there will be none."""
        if write.is_over:
            return
        write.is_over = True
        if write.keys is None:
            self._writes_of_any_key -= 1
            return
        for key in write.keys:
            self._writes[key] -= 1
            if not self._writes[key]:
                del self._writes[key]

    def drop(self, keys: Iterable[bytes] | None) -> None:
        """Forget what is cached, or being read, of keys that have changed; None: of all keys."""
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
            for read in self._reads_of.pop(key, ()):
                self._bytes -= self._entries.pop(read).size
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
        """Forget an entry that was removed."""
        self._bytes -= entry.size
        reads = self._reads_of[entry.key]
        reads.discard(read)
        if not reads:
            del self._reads_of[entry.key]
