"""Answers reads of the upstream's keys from the proxy's cache, for keys whose rule has `cache`.

A client with a pinned connection gets no cached replies: it may watch or track keys, and the upstream must see its
reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from resp_server.forwarding.raw_replies import RawReply, is_error
from resp_server.forwarding.reply_stages import ReplySink
from resp_server.protocol.request_parser import Request
from resp_server.session.epoch_feed import NO_EPOCHS, Epochs, ReplyEpochs
from resp_server.session.session import Session
from resp_server.upstream.result_cache import CachedRead, Fill, ResultCache, Write
from resp_server.upstream.routing import Route


class CachedReads:
    """Answers reads from a cache, and invalidates it by clients' writes."""

    def __init__(self, cache: ResultCache) -> None:
        self._cache = cache
        # The writes in flight, by client.
        self._writes: dict[int, dict[Write, None]] = {}

    def read_of(self, route: Route, request: Request, session: Session) -> CachedRead:
        """Return the cache key of a request."""
        return CachedRead(session.db, session.protocol, route.routed.name, tuple(request[1:]))

    def reply_to(self, read: CachedRead) -> bytes | None:
        """Return the reply to a read, if it is cached."""
        return self._cache.get(read)

    def filling(self, route: Route, read: CachedRead, request: Request, sink: ReplySink) -> ReplySink:
        """Return a sink that caches the reply to a read, and passes it on."""
        fill = self._cache.begin_fill(read, request[route.key_at], route.cache_s)
        return sink if fill is None else _FillSink(self._cache, fill, sink)

    def changing(self, keys: Sequence[bytes] | None, session: Session, sink: ReplySink) -> ReplySink:
        """Begin a request that may change keys, None: any key; return the sink for its reply."""
        if keys is not None and not keys:
            return sink
        write = self._cache.begin_write(keys)
        self._writes.setdefault(session.id, {})[write] = None
        return _WriteSink(self, session.id, write, sink)

    @contextmanager
    def sending(self, sink: ReplySink) -> Iterator[None]:
        """End the sink if the block, which sends its request, raises: there will be no reply."""
        try:
            yield
        except Exception:
            if isinstance(sink, _WriteSink | _FillSink):
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
