"""Random items of a key, for SRANDMEMBER, HRANDFIELD and ZRANDMEMBER."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from random import choice, choices, random, randrange, sample
from typing import Any

from resp_server.command.handler import INTEGER_MAX, integer
from resp_server.commands.sliced_reply import CHUNK_ITEMS_MAX, batched, reply_of_chunks, sliced_reply
from resp_server.pipeline.context import ReadContext
from resp_server.protocol.errors import GenericError, syntax_error
from resp_server.protocol.replies import FirstOf, Reply
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import FIELD_POSITIONS

# A draw scans this many items from a random position and chooses one of them. Always taking the first one would favour
# items after large gaps.
SCANNED_PER_DRAW = 12
# Draws of one step (guess: half a millisecond).
CHUNK_DRAWS = 32
# If more than one in this many items is requested, one pass over all items is faster than drawing (guess).
DRAWN_SHARE_MAX = 32
# Items of one reply with repetition: Redis would continue until its memory is exhausted.
REPEATED_MAX = 10_000_000

Scan = Callable[[bytes, int, int], tuple[int, list[Any]]]


def count_of(argument: bytes) -> int:
    """Parse the count; negative: items may repeat."""
    number = integer(argument)
    if number < -INTEGER_MAX:  # its absolute value would overflow
        raise GenericError(f"value is out of range, value must between {-INTEGER_MAX} and {INTEGER_MAX}")
    return number


def count_and_option(arguments: Sequence[bytes], option: bytes) -> tuple[int, bool]:
    """Parse `count [WITHVALUES]` (or WITHSCORES) in Redis' order of checks."""
    count = count_of(arguments[0])
    if len(arguments) > 2 or (len(arguments) == 2 and arguments[1].upper() != option):
        raise syntax_error()
    if len(arguments) == 2 and not -(INTEGER_MAX // 2) <= count <= INTEGER_MAX // 2:
        raise GenericError("value is out of range")
    return count, len(arguments) == 2


def draws_from(scan: Scan, key: bytes) -> Iterator[Any | None]:
    """Iterate over scan steps from a random position, then from the beginning: a random item of each step, or None."""
    cursor = randrange(FIELD_POSITIONS)
    for _ in range(2):
        at_end = False
        while not at_end:
            cursor, found = scan(key, cursor, SCANNED_PER_DRAW)
            yield choice(found) if found else None
            at_end = not cursor


class ItemSource:
    """A collection to choose from; each function takes a view.

    Args:
        draw: Steps that search for one random item; a step that found none yields None.
    """

    def __init__(
        self,
        size: Callable[[KeyspaceView], int],
        items: Callable[[KeyspaceView], Iterator[Any]],
        draw: Callable[[KeyspaceView], Iterator[Any | None]],
    ) -> None:
        self.size = size
        self.items = items
        self.draw = draw


def random_item(context: ReadContext, source: ItemSource) -> Reply:
    """Return one random item; nil if there is none."""
    if not source.size(context.view):
        return None
    for item in islice(source.draw(context.view), 2):
        if item is not None:
            return item
    # Many items have expired, so the search may take long.
    return sliced_reply(context, lambda view: ([] if item is None else [item] for item in source.draw(view)), FirstOf)


def random_items(context: ReadContext, source: ItemSource, count: int, shape: type = list) -> Reply:
    """Return `count` distinct random items; for a negative count, as many with repetition."""
    size = source.size(context.view)
    if count < -REPEATED_MAX and size:
        raise GenericError(f"value is out of range, at most {REPEATED_MAX} items are given with repetition")
    target = min(count, size) if count >= 0 else -count
    if not target or not size:
        return shape()

    # The view may be at a newer epoch, at which the collection has another size.
    def exact_count(view: KeyspaceView) -> int:
        return min(count, source.size(view)) if count >= 0 else -count if source.size(view) else 0

    choose = _distinct if count > 0 else _with_repetition
    is_small = target <= (CHUNK_ITEMS_MAX if size <= CHUNK_ITEMS_MAX else CHUNK_DRAWS)
    return reply_of_chunks(context, lambda view: choose(source, view, abs(count)), is_small, shape, exact_count)


def _with_repetition(source: ItemSource, view: KeyspaceView, count: int) -> Iterator[Sequence[Any]]:
    size = source.size(view)
    items = list(source.items(view)) if size <= CHUNK_ITEMS_MAX else []
    step = CHUNK_ITEMS_MAX if items else CHUNK_DRAWS
    for done in range(0, count if size else 0, step):
        drawn = min(step, count - done)
        yield choices(items, k=drawn) if items else [item for _ in range(drawn) for item in _draw_one(source, view)]


def _draw_one(source: ItemSource, view: KeyspaceView) -> Iterator[Any]:
    return islice((item for item in source.draw(view) if item is not None), 1)


def _distinct(source: ItemSource, view: KeyspaceView, count: int) -> Iterator[Sequence[Any]]:
    size = source.size(view)
    count = min(count, size)
    if size <= CHUNK_ITEMS_MAX:
        yield sample(list(source.items(view)), count)
    elif count * DRAWN_SHARE_MAX < size:
        yield from _draw_distinct(source, view, count)
    else:
        yield from _selection_sample(source.items(view), size, count)


def _draw_distinct(source: ItemSource, view: KeyspaceView, count: int) -> Iterator[Sequence[Any]]:
    """Draw until there are `count` distinct items; `count` is a small share of all items."""
    seen: set[Any] = set()
    while len(seen) < count:
        found = {item for _ in range(CHUNK_DRAWS) for item in _draw_one(source, view)} - seen
        new = list(found)[: count - len(seen)]
        seen.update(new)
        yield new


def _selection_sample(items: Iterator[Any], remaining: int, target: int) -> Iterator[Sequence[Any]]:
    """Choose `target` items in one pass (Knuth's algorithm S)."""
    for batch in batched(items):
        chosen = []
        for item in batch:
            if random() * remaining < target:
                chosen.append(item)
                target -= 1
            remaining -= 1
        yield chosen
