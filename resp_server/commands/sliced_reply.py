"""Replies that are computed in steps, so that one long command does not delay other clients.

A command passes an iterator of chunks: a chunk has the reply items of one step, which takes a bounded time. An empty
chunk is a step without a result. A small reply is made at once, from the current view. A larger one becomes a `Sliced`,
from a view that stays pinned until the reply is sent, and its long values are sent in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Any, TypeVar

from resp_server.pipeline.context import ReadContext
from resp_server.protocol.errors import GenericError
from resp_server.protocol.replies import FirstOf, LongBulk, LongItems, LongPair, Pairs, Reply, Sliced
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import LongValue, Value, as_bytes

Item = TypeVar("Item")

# Items of one chunk: well below a millisecond (guess).
CHUNK_ITEMS_MAX = 512
# Bytes of the values in one chunk (guess).
CHUNK_BYTES_MAX = 256 << 10

# Bytes of values in a reply that is made at once; a larger reply is made in steps (guess: a quarter of a millisecond).
# A sliced reply occupies one of the store's reader slots until it is sent.
BYTES_AT_ONCE_MAX = 1 << 20

# Returns the chunks of a reply for a view.
Chunks = Callable[[KeyspaceView], Iterator[Sequence[Any]]]

# Intermediate results of one command: their bytes, and what Python adds to each text (guess).
WORKING_BYTES_MAX = 256 << 20
TEXT_OVERHEAD_BYTES = 100

# A large hash table of intermediate results is split into this many: one of a million items takes 50 ms to grow.
PARTITIONS_MAX = 256

# Items of one sorted run: half a millisecond (guess).
SORTED_RUN_ITEMS = 1024


def size_of(item: Value | None) -> int:
    """Return the number of bytes of a reply item."""
    return 0 if item is None else item.length if isinstance(item, LongValue) else len(item)


def reply_item(item: Value | None) -> Reply:
    """Return an item for a sliced reply: a long text is sent in pieces."""
    return LongBulk(item.length, item.chunks(0, item.length)) if isinstance(item, LongValue) else item


def sliced_reply(
    context: ReadContext,
    chunks: Callable[[KeyspaceView], Iterator[Sequence[Reply]]],
    shape: type = list,
    count: Callable[[KeyspaceView], int | Iterator[int] | None] = lambda view: None,
) -> Sliced:
    """Return a reply that is made in steps, from a view that stays pinned until the reply is sent."""
    view = context.pin()
    try:
        return Sliced(chunks(view), partial(context.unpin, view), shape, count(view))
    except BaseException:
        context.unpin(view)
        raise


def value_reply(context: ReadContext, text: Value | None, read: Callable[[KeyspaceView], Value | None]) -> Reply:
    """Return a value as a reply. A very long value is read again, in steps, from a pinned view: it may have changed."""
    if not isinstance(text, LongValue):
        return text
    if text.length <= BYTES_AT_ONCE_MAX:
        return as_bytes(text)
    return sliced_reply(context, lambda view: iter([LongItems([reply_item(read(view))])]), FirstOf)


def items_reply(
    context: ReadContext,
    read: Callable[[KeyspaceView], Iterator[Value | None]],
    count: Callable[[KeyspaceView], int | Iterator[int]],
    shape: type = list,
) -> Reply:
    """Return the items that `read` yields: at once if they are small, else in steps from a pinned view.

    For a dict, `read` yields keys and values in turn.

    Args:
        count: Returns the number of items, or pairs, for a view.
    """
    items: list[bytes | None] = []
    size = 0
    for item in read(context.view):
        size += size_of(item)
        if len(items) >= CHUNK_ITEMS_MAX or size > BYTES_AT_ONCE_MAX:
            return sliced_reply(context, lambda view: reply_chunks(read(view)), shape, count)
        items.append(item if item is None else as_bytes(item))
    if shape is dict:
        return dict(zip(items[::2], items[1::2], strict=True))
    return items if shape is list else shape(items)


def reply_chunks(items: Iterator[Value | None]) -> Iterator[Sequence[Reply]]:
    """Group items into chunks of a sliced reply, each of a bounded number and size."""
    chunk: list[Reply] = []
    size = 0
    for item in items:
        if isinstance(item, LongValue):
            yield LongItems([*chunk, reply_item(item)])
            chunk, size = [], 0
            continue
        chunk.append(item)
        size += 0 if item is None else len(item)
        if len(chunk) >= CHUNK_ITEMS_MAX or size >= CHUNK_BYTES_MAX:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def batched(items: Iterable[Item], count: int = CHUNK_ITEMS_MAX) -> Iterator[list[Item]]:
    """Iterate over lists of `count` items; the last one may be shorter."""
    rest = iter(items)
    while batch := list(islice(rest, count)):
        yield batch


def reply_of_chunks(
    context: ReadContext,
    chunks: Chunks,
    is_small: bool,
    shape: type = list,
    count: Callable[[KeyspaceView], int] | None = None,
) -> Reply:
    """Return the reply of some chunks: at once if it is small, else in steps from a pinned view.

    Args:
        count: Returns the number of items for a view. With it, items are sent while they are computed, and long values
            in pieces.
    """
    if is_small:
        items: list[Any] = []
        size = 0
        for chunk in chunks(context.view):
            items += chunk
            size += sum(map(_size_of, chunk))
            if size > BYTES_AT_ONCE_MAX:
                break
        else:
            return _shaped(list(map(_whole, items)), shape)
    if count is None:
        return sliced_reply(context, lambda view: _rendered(chunks(view), shape), shape)
    return sliced_reply(context, lambda view: _rendered_with_long_texts(chunks(view), shape), shape, count)


def _size_of(item: Any) -> int:
    if isinstance(item, bytes | LongValue):
        return size_of(item)
    return sum(map(_size_of, item)) if isinstance(item, tuple | list) else 0


def _shaped(items: list[Any], shape: type) -> Reply:
    if shape is int:
        return sum(items)
    if shape is FirstOf:
        return items[0] if items else None
    return items if shape is list else shape(items)


def _whole(item: Any) -> Any:
    """Return an item with its long texts read."""
    if type(item) is LongValue:
        return as_bytes(item)
    return tuple(map(_whole, item)) if type(item) is tuple else item


def _rendered(chunks: Iterator[Sequence[Any]], shape: type) -> Iterator[Sequence[Reply]]:
    for chunk in chunks:
        items = map(_whole, chunk)
        yield Pairs(items) if shape is Pairs else list(items)


def _rendered_with_long_texts(chunks: Iterator[Sequence[Any]], shape: type) -> Iterator[Sequence[Reply]]:
    """Iterate over chunks in which long texts are sent in pieces."""
    for chunk in chunks:
        if shape is not Pairs:
            yield from reply_chunks(iter(chunk))
        elif any(type(text) is LongValue for pair in chunk for text in pair):
            yield LongItems(LongPair(map(reply_item, pair)) for pair in chunk)
        else:
            yield Pairs(chunk)
        if not chunk:
            yield []


def partitions_for(items: int) -> int:
    """Return the number of hash tables for at most so many intermediate results."""
    return min(1 + items // CHUNK_ITEMS_MAX, PARTITIONS_MAX)


class WorkingMemory:
    """Counts the bytes of a command's intermediate results, up to `WORKING_BYTES_MAX`."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, texts: Iterable[bytes]) -> None:
        """Count texts; GenericError above the limit."""
        self._bytes += sum(len(text) + TEXT_OVERHEAD_BYTES for text in texts)
        if self._bytes > WORKING_BYTES_MAX:
            raise GenericError(f"the command's intermediate results exceed {WORKING_BYTES_MAX} bytes; use smaller keys")


def sorted_chunks(
    chunks: Iterable[Sequence[tuple[Any, ...]]],
    start: int,
    stop: int,
    is_reversed: bool = False,
    by_full_tuple: bool = True,
) -> Iterator[list[tuple[Any, ...]]]:
    """Sort tuples in steps; iterate over those from rank `start` up to `stop` (exclusive), with empty chunks between.

    Args:
        by_full_tuple: False: sort by the first items alone; tuples with equal first items keep their order, also
            reversed.
    """
    by = None if by_full_tuple else itemgetter(0)
    runs: list[list[tuple[Any, ...]]] = []
    run: list[tuple[Any, ...]] = []
    for chunk in chunks:
        run += chunk
        if len(run) >= SORTED_RUN_ITEMS:
            runs.append(sorted(run, key=by, reverse=is_reversed))
            run = []
        yield []
    runs.append(sorted(run, key=by, reverse=is_reversed))
    position = 0
    merged = batched(merge(*runs, key=by, reverse=is_reversed))
    for batch in merged:
        yield batch[max(0, start - position) : max(0, stop - position)]
        position += len(batch)
        if position >= stop:
            break
    del merged
    while runs:  # to free a million tuples at once would take too long
        runs.pop()
        yield []
