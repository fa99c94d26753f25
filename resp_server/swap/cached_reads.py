"""Answers reads of the upstream's keys from the proxy's cache, for keys whose rule has `cache`.

A client with a pinned connection gets no cached replies: it may watch or track keys, and the upstream must see its
reads.

With `cache = "tracking"` a client never reads an older value after a newer one. So each reply about such keys that is
not from the cache waits behind a fence, until the cache knows all changes that were made before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from resp_server.forwarding.answers import Answer, Answering
from resp_server.forwarding.raw_replies import RawReply, is_error
from resp_server.forwarding.reply_stages import ReplySink
from resp_server.session.epoch_feed import NO_EPOCHS, Epochs, ReplyEpochs
from resp_server.session.session import Session
from resp_server.upstream.key_changes import KeyChanges
from resp_server.upstream.result_cache import CachedRead, Fill, ResultCache, Write
from resp_server.upstream.routing import Route


class CachedReads:
    """Answers reads from a cache, and invalidates it by clients' writes. changes: invalidate it by others' writes."""

    def __init__(self, cache: ResultCache, changes: KeyChanges) -> None:
        self._cache, self._changes = cache, changes
        self._reading = ReadsInFlight()
        # The writes in flight, by client.
        self._writes: dict[int, dict[Write, None]] = {}

    def for_hop(self, has_exact: bool) -> ResultCache | None:
        """Return the cache for a client of the hop, which waits for no reply; None: its replies may be old now.

        has_exact: some replies are cached exactly.
        """
        return None if has_exact and not self._changes.is_current else self._cache

    def reply_to(self, route: Route, read: CachedRead, session: Session) -> bytes | None:
        """Return the reply to a read, if it is cached, and not older than a reply that the client gets before it."""
        if route.is_fenced and not self._changes.is_current:
            return None
        if route.is_fenced and any(self._reading.has(session.id, key) for key in route.cached_keys):
            return None
        reply = self._cache.get(read)
        self._cache.hits += reply is not None
        return reply

    def filling(self, route: Route, read: CachedRead, session: Session, sink: ReplySink) -> ReplySink:
        """Return a sink that caches the reply to a read, and passes it on."""
        self._cache.misses += 1
        if route.is_fenced and not self._changes.is_current:
            return sink
        fill = self._cache.begin_fill(read, route.cached_keys, route.cache_s)
        return self.fenced(route, session, sink if fill is None else _FillSink(self._cache, fill, sink))

    def fenced(self, route: Route, session: Session, sink: ReplySink) -> ReplySink:
        """Return a sink that passes the reply to a read on when the cache is not older than the reply."""
        if not route.is_fenced or not self._changes.is_current:
            return sink
        return _FenceSink(self._changes, self._reading.begin(session.id, route.changed or None), sink)

    async def changed(self, keys: Sequence[bytes] | None, session: Session, answering: Answering) -> Answer:
        """Return the answer to a request that may change keys, None: any key. Until then no reply is cached."""
        if keys is not None and not keys:
            return await answering
        write = self._begin_write(keys, session)
        try:
            return await answering
        finally:
            self.end_write(session.id, write)

    def changing(self, keys: Sequence[bytes] | None, session: Session, sink: ReplySink) -> ReplySink:
        """Begin a request that may change keys, None: any key; return the sink for its reply."""
        if keys is not None and not keys:
            return sink
        return _WriteSink(self, session.id, self._begin_write(keys, session), sink)

    def _begin_write(self, keys: Sequence[bytes] | None, session: Session) -> Write:
        write = self._cache.begin_write(keys)
        self._writes.setdefault(session.id, {})[write] = None
        return write

    @contextmanager
    def sending(self, sink: ReplySink) -> Iterator[None]:
        """End the sink if the block, which sends its request, raises: there will be no reply."""
        try:
            yield
        except Exception:
            if isinstance(sink, _WriteSink | _FillSink | _FenceSink):
                sink.end()
            raise

    def end_write(self, client: int, write: Write) -> None:
        """Handle the reply to a write."""
        if write.is_over:  # its client has left, and other clients may have read since then
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
    """The keys of clients' fenced reads without a reply; None stands for any key."""

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
        """Tell whether a client reads a key."""
        counts = self._counts.get(client)
        return counts is not None and (key in counts or None in counts)


def _ended() -> None:
    """Do nothing: the read was ended before."""


class _FillSink(ReplySink):
    """Caches a reply, and passes it on."""

    def __init__(self, cache: ResultCache, fill: Fill, sink: ReplySink) -> None:
        self._cache, self._fill, self._sink = cache, fill, sink

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        is_kept = isinstance(reply, bytes) and not is_error(reply)
        self._cache.end_fill(self._fill, reply if is_kept and isinstance(reply, bytes) else None)
        self._sink.put(index, reply, epochs)

    def fail(self, index: int, error: Exception) -> None:
        self.end()
        self._sink.fail(index, error)

    def end(self) -> None:
        """Handle that there is no reply."""
        self._cache.end_fill(self._fill, None)

    def seen_epochs(self, index: int) -> Epochs:
        return self._sink.seen_epochs(index)


class _FenceSink(ReplySink):
    """Passes a reply on when all changes that were made before it are known. end_read: called with the first one."""

    def __init__(self, changes: KeyChanges, end_read: Callable[[], None], sink: ReplySink) -> None:
        self._changes, self._end_read, self._sink = changes, end_read, sink

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        self._changes.fence(partial(self._pass_on, index, reply, epochs))

    def _pass_on(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        self._end()
        self._sink.put(index, reply, epochs)

    def fail(self, index: int, error: Exception) -> None:
        self._end()
        self._sink.fail(index, error)

    def _end(self) -> None:
        end, self._end_read = self._end_read, _ended  # a read of states may be sent again
        end()

    def end(self) -> None:
        """Handle that there is no reply."""
        self._end()
        if isinstance(self._sink, _FillSink):
            self._sink.end()

    def seen_epochs(self, index: int) -> Epochs:
        return self._sink.seen_epochs(index)


class _WriteSink(ReplySink):
    """Passes the reply to a write on; from then on its keys may be cached again."""

    def __init__(self, reads: CachedReads, client: int, write: Write, sink: ReplySink) -> None:
        self._reads, self._client, self._write, self._sink = reads, client, write, sink

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        self.end()
        self._sink.put(index, reply, epochs)

    def fail(self, index: int, error: Exception) -> None:
        self.end()
        self._sink.fail(index, error)

    def end(self) -> None:
        """Handle that the write is over."""
        self._reads.end_write(self._client, self._write)

    def seen_epochs(self, index: int) -> Epochs:
        return self._sink.seen_epochs(index)
