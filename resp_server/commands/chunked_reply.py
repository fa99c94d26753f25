"""Replies whose items are computed in steps, so that one long command does not delay other clients.

A command passes an iterator of chunks; a chunk is a list of reply items, made in one step of bounded time. An empty
chunk is a step without a result yet. Unlike in a `Sliced`, an item may be a `LongValue`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from operator import itemgetter
from typing import Any

from resp_server.commands.generic import BYTES_AT_ONCE_MAX, batched, reply_chunks, reply_item, size_of, sliced
from resp_server.execution.context import ReadContext
from resp_server.protocol.errors import PlainError
from resp_server.protocol.replies import FirstOf, LongItems, LongPair, Pairs, Reply
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import LongValue, as_bytes

Chunks = Callable[[KeyspaceView], Iterator[Sequence[Any]]]

# Intermediate results of one command: their bytes, and what Python adds to each text (guess).
WORKING_BYTES_MAX = 256 << 20
TEXT_OVERHEAD_BYTES = 100

# Hash tables of intermediate results are split into so many: one table of a million items takes 50 ms to grow or free.
PARTITIONS = 256

# Items of one sorted run: half a millisecond (guess).
SORTED_RUN_ITEMS = 1024


def chunked_reply(
    context: ReadContext,
    chunks: Chunks,
    is_small: bool,
    shape: type = list,
    count: Callable[[KeyspaceView], int] | None = None,
) -> Reply:
    """Return the reply of some chunks: at once if it is small, else in steps, from a pinned view.

    count: returns the number of items for a view; with it items are sent as they are made, long values in pieces.
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
        return sliced(context, lambda view: _rendered(chunks(view), shape), shape)
    return sliced(context, lambda view: _rendered_with_long_texts(chunks(view), shape), shape, count)


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


class WorkingMemory:
    """Counts the bytes of a command's intermediate results, up to `WORKING_BYTES_MAX`."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, texts: Iterable[bytes]) -> None:
        """Count texts; PlainError above the limit."""
        self._bytes += sum(len(each) + TEXT_OVERHEAD_BYTES for each in texts)
        if self._bytes > WORKING_BYTES_MAX:
            raise PlainError(f"the command's intermediate results exceed {WORKING_BYTES_MAX} bytes; use smaller keys")


def sorted_chunks(
    chunks: Iterable[Sequence[tuple[Any, ...]]],
    start: int,
    stop: int,
    is_reversed: bool = False,
    by_full_tuple: bool = True,
) -> Iterator[list[tuple[Any, ...]]]:
    """Sort tuples in steps; iterate over those from rank `start` up to `stop` (exclusive), with empty chunks between.

    by_full_tuple: else tuples are sorted by their first item alone, and equal ones keep their order, also if reversed.
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
