"""Value states as Redis strings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from resp_server.command.handler import BatchArgument, OneOrMore, command
from resp_server.commands.sliced_reply import items_reply, size_of, value_reply
from resp_server.pipeline.context import ReadContext
from resp_server.protocol.replies import Reply, Sliced
from state_backend.model.errors import WrongKindError
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import LongValue, Value

# Keys of MGET that are looked up together (guess: 40 us).
KEYS_PER_READ = 32


@command("get")
def get(context: ReadContext, keys: BatchArgument) -> list[Reply]:
    """Returns the string value of a key."""
    texts = context.lazy_values(keys)
    if type(texts[0]) is LongValue:
        return [value_reply(context, texts[0], lambda view: view.at(keys[0]).lazy_value(keys[0]))]
    return texts


@command("mget")
def mget(context: ReadContext, *keys: OneOrMore) -> Reply:
    """Atomically returns the string values of one or more keys."""
    return values_reply(context, keys)


def values_reply(context: ReadContext, keys: Sequence[bytes]) -> Reply:
    """Return the reply of MGET."""
    reply = items_reply(context, lambda view: _texts(view, keys), lambda view: len(keys))
    if isinstance(reply, Sliced):
        reply.chunks = _counted(context, reply.chunks)
        return reply
    for value in reply:
        context.counted(value)
    return reply


def _texts(view: KeyspaceView, keys: Sequence[bytes]) -> Iterator[Value | None]:
    """Iterate over the keys' values; a key of another type yields None, as in MGET."""
    for index in range(0, len(keys), KEYS_PER_READ):
        some = keys[index : index + KEYS_PER_READ]
        while some:
            try:
                texts = view.lazy_values(some)
            except WrongKindError:  # of the first key
                texts = [None]
            yield from texts
            some = some[len(texts) :]


def _counted(context: ReadContext, chunks: Iterator[Reply]) -> Iterator[Reply]:
    """Count the look-ups of a sliced reply's values."""
    for chunk in chunks:
        for value in chunk:
            context.counted(value)
        yield chunk


@command("strlen")
def strlen(context: ReadContext, keys: BatchArgument) -> list[Reply]:
    """Returns the length of a string value."""
    return [size_of(text) for text in context.lazy_values(keys)]


@command("getrange")
def getrange(context: ReadContext, key: bytes, start: int, end: int) -> Reply:
    """Returns a substring of the string stored at a key."""
    text = _substring(context.counted(context.at(key).lazy_value(key)), start, end)
    return value_reply(context, text, lambda view: _substring(view.at(key).lazy_value(key), start, end))


@command("substr")
def substr(context: ReadContext, key: bytes, start: int, end: int) -> Reply:
    """Returns a substring from a string value."""
    reply: Reply = getrange(context, key, start, end)
    return reply


def _substring(text: Value | None, start: int, end: int) -> Value:
    """Return bytes `start` to `end`, both inclusive; negative positions count from the end."""
    length = size_of(text)
    if text is None or (start < 0 and end < 0 and start > end):
        return b""
    first = max(0, start + length) if start < 0 else start
    stop = min(length, 1 + (max(0, end + length) if end < 0 else end))
    if isinstance(text, bytes):
        return text[first:stop]
    chunks = text.chunks
    return LongValue(stop - first, lambda at, to: chunks(first + at, first + to)) if first < stop else b""
