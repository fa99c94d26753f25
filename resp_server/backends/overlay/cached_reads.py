"""Answers reads of the upstream's keys from the proxy's cache, for keys whose rule has `cache`.

A client with a dedicated connection gets no cached replies: it may watch or track keys, and the upstream must see its
reads.

With `cache = "tracking"` a client never reads an older value after a newer one. So each reply about such keys that is
not from the cache waits behind a fence, until the cache knows all changes that were made before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from resp_server.backends.redis.key_changes import KeyChanges
from resp_server.backends.routing.result_cache import CachedRead, ResultCache, Write
from resp_server.backends.routing.route import CacheableRead
from resp_server.raw_replies.answers import Answer, Answering, CallbackWait
from resp_server.raw_replies.raw_reply import is_error
from resp_server.session.session import Session


class CachedReads:
    """Answers reads from a cache, and invalidates it by clients' writes.

    Args:
        changes: Invalidate it by others' writes.
    """

    def __init__(self, cache: ResultCache, changes: KeyChanges) -> None:
        self._cache, self._changes = cache, changes
        self._reading = ReadsInFlight()
        # The writes in flight, by client.
        self._writes: dict[int, dict[Write, None]] = {}

    def for_forwarder(self, has_exact: bool) -> ResultCache | None:
        """Return the cache for a client of the forwarder, which waits for no reply; None: its replies may be old now.

        Args:
            has_exact: Some replies are cached exactly.
        """
        return None if has_exact and not self._changes.is_current else self._cache

    def reply_to(self, use: CacheableRead, read: CachedRead, session: Session) -> bytes | None:
        """Return the reply to a read, if it is cached, and not older than a reply that the client gets before it."""
        if use.exact and not self._changes.is_current:
            return None
        if use.exact and any(self._reading.has(session.id, key) for key in use.keys):
            return None
        reply = self._cache.get(read)
        self._cache.hits += reply is not None
        return reply

    async def filled(self, use: CacheableRead, read: CachedRead, session: Session, answering: Answering) -> Answer:
        """Return the answer to a read, and cache it."""
        self._cache.misses += 1
        fill = None
        if not use.exact or self._changes.is_current:
            fill = self._cache.begin_fill(read, use.keys, use.cache_s)
        kept = None
        try:
            answer = await self.once_cache_is_current(use.exact, session, answering)
            kept = answer.reply if isinstance(answer.reply, bytes) and not is_error(answer.reply) else None
            return answer
        finally:
            if fill is not None:
                self._cache.end_fill(fill, kept)

    async def once_cache_is_current(
        self, exact: Sequence[bytes] | None, session: Session, answering: Answering
    ) -> Answer:
        """Return the answer to a read when the cache is not older than the answer.

        Args:
            exact: The keys of the read that are cached exactly; None: maybe any key.
        """
        if (exact is not None and not exact) or not self._changes.is_current:
            return await answering
        end_read = self._reading.begin(session.id, exact)
        try:
            answer = await answering
            await CallbackWait(self._changes.fence)
            return answer
        finally:
            end_read()

    async def changed(self, keys: Sequence[bytes] | None, session: Session, answering: Answering) -> Answer:
        """Return the answer to a request that may change keys, None: any key. Until then no reply is cached."""
        if keys is not None and not keys:
            return await answering
        write = self._begin_write(keys, session)
        try:
            return await answering
        finally:
            self.end_write(session.id, write)

    def _begin_write(self, keys: Sequence[bytes] | None, session: Session) -> Write:
        write = self._cache.begin_write(keys)
        self._writes.setdefault(session.id, {})[write] = None
        return write

    def end_write(self, client: int, write: Write) -> None:
        """Handle the reply to a write."""
        if write.is_finished:  # its client has left, and other clients may have read since then
            self._cache.drop(write.keys)
            return
        self._cache.end_write(write)
        writes = self._writes[client]
        del writes[write]
        if not writes:
            del self._writes[client]

    def leave(self, session: Session) -> None:
        """Handle that a client has left: its writes may get no reply."""
        for write in self._writes.pop(session.id, ()):
            self._cache.end_write(write)


class ReadsInFlight:
    """The keys of clients' reads that have no reply and can overtake the cache; None stands for any key."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[bytes | None]] = {}

    def begin(self, client: int, keys: Sequence[bytes] | None) -> Callable[[], None]:
        """Add a read; return the function that removes it."""
        some: Sequence[bytes | None] = (None,) if keys is None else keys
        self._counts.setdefault(client, Counter()).update(some)
        return partial(self._end, client, some)

    def _end(self, client: int, keys: Sequence[bytes | None]) -> None:
        counts = self._counts[client]
        counts.subtract(keys)
        left = self._counts[client] = +counts
        if not left:
            del self._counts[client]

    def has(self, client: int, key: bytes) -> bool:
        """Return whether a client reads a key."""
        counts = self._counts.get(client)
        return counts is not None and (key in counts or None in counts)
