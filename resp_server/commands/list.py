"""List states as Redis lists. A long range is sent in steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from resp_server.command.handler import command, integer, integer_at_least
from resp_server.commands.sliced_reply import BYTES_AT_ONCE_MAX, CHUNK_ITEMS_MAX, reply_chunks, sliced_reply
from resp_server.pipeline.context import ReadContext
from resp_server.protocol.errors import GenericError, syntax_error
from resp_server.protocol.replies import FirstOf, PackedItems, Reply
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import Snapshot


@command("llen")
def llen(context: ReadContext, key: bytes) -> int:
    """Returns the length of a list."""
    return context.counted(context.at(key).list_size(key) or None) or 0


@command("lindex")
def lindex(context: ReadContext, key: bytes, index: bytes) -> bytes | None:
    """Returns an element from a list by its index."""
    snapshot = context.at(key)
    size = context.counted(snapshot.list_size(key) or None)
    if size is None:
        return None  # also for an invalid index, as in Redis
    number = integer(index)
    at = number + size if number < 0 else number
    return next(snapshot.list_elements(key, at, at + 1)) if 0 <= at < size else None


@command("lrange")
def lrange(context: ReadContext, key: bytes, start: int, stop: int) -> Reply:
    """Returns a range of elements from a list."""
    snapshot = context.at(key)
    size = context.counted(snapshot.list_size(key) or None) or 0
    first, end = range_of(start, stop, size)
    if end - first <= CHUNK_ITEMS_MAX:
        chunks: list[bytes] = []
        size = 0
        for chunk in snapshot.list_bulk_strings(key, first, end):
            chunks.append(chunk)
            size += len(chunk)
            if size > BYTES_AT_ONCE_MAX:
                break
        else:
            return PackedItems(end - first, b"".join(chunks))

    # The view may be at a newer epoch, at which the list has another size.
    def bounds(view: KeyspaceView) -> tuple[int, int]:
        return range_of(start, stop, view.at(key).list_size(key))

    return sliced_reply(
        context,
        lambda view: reply_chunks(view.at(key).list_elements(key, *bounds(view))),
        count=lambda view: bounds(view)[1] - bounds(view)[0],
    )


def range_of(start: int, stop: int, size: int) -> tuple[int, int]:
    """Return the range as first index and end (exclusive); (0, 0) if it is empty."""
    first = max(0, start + size) if start < 0 else start
    end = min(size, (stop + size if stop < 0 else stop) + 1)
    return (first, end) if first < end else (0, 0)


@dataclass
class PositionOptions:
    """The options of LPOS. A negative rank searches from the end; length_max 0: all elements are compared."""

    rank: int = 1
    count: int | None = None
    length_max: int = 0

    @classmethod
    def parse(cls, arguments: Sequence[bytes]) -> PositionOptions:
        """Parse the options in Redis' order of checks."""
        options = cls()
        for index in range(0, len(arguments), 2):
            option = arguments[index].upper()
            if option not in (b"RANK", b"COUNT", b"MAXLEN") or index + 1 == len(arguments):
                raise syntax_error()
            if option == b"RANK":
                options.rank = _rank(integer(arguments[index + 1]))
            elif option == b"COUNT":
                options.count = _not_negative(option, arguments[index + 1])
            else:
                options.length_max = _not_negative(option, arguments[index + 1])
        return options

    def found(self, snapshot: Snapshot, key: bytes, element: bytes) -> Iterator[list[int]]:
        """Iterate over the indices of equal elements, in the order of the search, a slice of the list at a time."""
        to_skip, count_left = abs(self.rank) - 1, 1 if self.count is None else self.count
        size = snapshot.list_size(key)
        for start, stop in self._slices(size):
            positions = [
                index for index, each in enumerate(snapshot.list_elements(key, start, stop), start) if each == element
            ]
            ordered = positions if self.rank > 0 else positions[::-1]
            taken, to_skip = ordered[to_skip:], max(0, to_skip - len(ordered))
            if count_left and len(taken) >= count_left:
                yield taken[:count_left]
                return
            count_left -= len(taken) if count_left else 0
            yield taken

    def _slices(self, size: int) -> Iterator[tuple[int, int]]:
        """Iterate over the index ranges to search, from the end that the rank's sign chooses."""
        scanned = min(self.length_max or size, size)
        for done in range(0, scanned, CHUNK_ITEMS_MAX):
            width = min(CHUNK_ITEMS_MAX, scanned - done)
            yield (done, done + width) if self.rank > 0 else (size - done - width, size - done)


def _not_negative(option: bytes, argument: bytes) -> int:
    return integer_at_least(argument, 0, f"{option.decode()} can't be negative")


def _rank(number: int) -> int:
    if number == -(2**63):
        raise GenericError("value is out of range, value must between -9223372036854775807 and 9223372036854775807")
    if number == 0:
        raise GenericError(
            "RANK can't be zero: use 1 to start from the first match, 2 from the second ... or use negative to start "
            "from the end of the list"
        )
    return number


@command("lpos")
def lpos(context: ReadContext, key: bytes, element: bytes, *arguments: bytes) -> Reply:
    """Returns the index of matching elements in a list."""
    options = PositionOptions.parse(arguments)
    size = context.counted(context.at(key).list_size(key) or None) or 0
    if size <= CHUNK_ITEMS_MAX:
        found = [at for batch in options.found(context.at(key), key, element) for at in batch]
        return found if options.count is not None else next(iter(found), None)
    shape = FirstOf if options.count is None else list
    return sliced_reply(context, lambda view: options.found(view.at(key), key, element), shape)
