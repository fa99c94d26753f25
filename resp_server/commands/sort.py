"""SORT_RO: the items of a list, set or sorted set, sorted by themselves or by other keys' values (BY, GET)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from resp_server.command.handler import command, integer
from resp_server.commands.sliced_reply import CHUNK_ITEMS_MAX, WorkingMemory, batched, reply_of_chunks, sorted_chunks
from resp_server.limits import LOOKUPS_PER_STEP
from resp_server.pipeline.context import CommandContext
from resp_server.protocol.doubles import read_double
from resp_server.protocol.errors import GenericError, WrongTypeError, c_text, syntax_error
from resp_server.protocol.replies import Reply
from resp_server.session.account import Account
from state_backend.model.descriptor import Kind
from state_backend.model.errors import WrongKindError
from state_backend.model.slots import slot_of
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import LongValue, Snapshot, Value, as_bytes

# A pattern with one of these may match keys of several slots, unless it begins with a hash tag.
WILD = frozenset(b"*?[\\")

SORTED_KINDS = (Kind.LIST, Kind.SET, Kind.SORTED_SET)


@dataclass
class SortOptions:
    """The options of SORT_RO.

    Args:
        count: The count of items; negative for all.
        by_pattern: None to sort by the items themselves.
        is_unsorted: BY was given without a `*`, so items are not sorted.
    """

    start: int = 0
    count: int = -1
    is_descending: bool = False
    is_alpha: bool = False
    by_pattern: bytes | None = None
    is_unsorted: bool = False
    get_patterns: list[bytes] = field(default_factory=list)

    @classmethod
    def parse(cls, arguments: Sequence[bytes], check: Callable[[str, bytes], None]) -> SortOptions:
        """Parse the options in Redis' order of checks.

        Args:
            check: Raises for a pattern whose keys may not be read.
        """
        options = cls()
        at = 0
        while at < len(arguments):
            option, remaining = arguments[at].upper(), len(arguments) - at - 1
            if option in (b"ASC", b"DESC"):
                options.is_descending = option == b"DESC"
            elif option == b"ALPHA":
                options.is_alpha = True
            elif option == b"LIMIT" and remaining >= 2:
                options.start, options.count = integer(arguments[at + 1]), integer(arguments[at + 2])
                at += 2
            elif option == b"BY" and remaining >= 1:
                at += 1
                options.by_pattern = arguments[at]
                if b"*" in c_text(arguments[at]):
                    check("BY", arguments[at])
                else:
                    options.is_unsorted = True
            elif option == b"GET" and remaining >= 1:
                at += 1
                check("GET", arguments[at])
                options.get_patterns.append(arguments[at])
            else:
                raise syntax_error()
            at += 1
        return options

    def bounds(self, size: int) -> tuple[int, int]:
        """Return LIMIT's range of items: first and end (exclusive)."""
        start = min(max(self.start, 0), size)
        return start, size if self.count < 0 else min(start + self.count, size)


@command("sort_ro")
def sort_ro(context: CommandContext, key: bytes, *arguments: bytes) -> Reply:
    """Returns the sorted elements of a list, a set, or a sorted set."""
    options = SortOptions.parse(arguments, lambda option, pattern: _check_pattern(context, key, option, pattern))
    info = context.key_info(key)
    if info is None:
        return []
    if info.kind not in SORTED_KINDS:
        raise WrongTypeError
    is_small = _size(context.at(key), key, info.kind) * (1 + len(options.get_patterns)) <= CHUNK_ITEMS_MAX
    return reply_of_chunks(
        context, lambda view: _chunks(view, key, options), is_small, list, lambda view: _count(view, key, options)
    )


def _count(view: KeyspaceView, key: bytes, options: SortOptions) -> int:
    """Return the number of items of the reply."""
    info = view.at(key).key_info(key)
    if info is None or info.kind not in SORTED_KINDS:
        return 0
    start, stop = options.bounds(_size(view.at(key), key, info.kind))
    return max(0, stop - start) * max(1, len(options.get_patterns))


def _check_pattern(context: CommandContext, key: bytes, option: str, pattern: bytes) -> None:
    """Raise GenericError for a pattern whose keys may be on another node, or may be forbidden to the user."""
    if context.server.cluster is not None and pattern != b"#" and _slot_of(pattern) != slot_of(key):
        raise GenericError(
            f"{option} option of SORT denied in Cluster mode when keys formed by the pattern may be in different slots."
        )
    check_user(context.user, option)


def check_user(user: Account, option: str) -> None:
    """Raise GenericError for any pattern of a user that may not read all keys."""
    if not user.reads_all_keys:
        raise GenericError(f"{option} option of SORT denied due to insufficient ACL permissions.")


def check_request(user: Account, request: Sequence[bytes]) -> None:
    """Check a request's patterns for its user. A proxy calls this, because its servers do not know the user."""
    SortOptions.parse(request[2:], lambda option, pattern: check_user(user, option))


def _slot_of(pattern: bytes) -> int | None:
    """Return the slot of all keys that match a pattern; None if they may be in several slots."""
    for index, byte in enumerate(pattern):
        if byte in WILD:
            return None
        if byte == ord("{"):
            end = pattern.find(b"}", index)
            if end > index + 1 and not WILD.intersection(pattern[index:end]):
                return slot_of(pattern[index : end + 1])
            return slot_of(pattern) if not WILD.intersection(pattern) else None
    return slot_of(pattern)


def _size(snapshot: Snapshot, key: bytes, kind: Kind) -> int:
    if kind is Kind.LIST:
        return snapshot.list_size(key)
    return snapshot.set_size(key) if kind is Kind.SET else snapshot.sorted_size(key)


def _chunks(view: KeyspaceView, key: bytes, options: SortOptions) -> Iterator[Sequence[Value | None]]:
    """Iterate over chunks of the reply."""
    snapshot = view.at(key)
    info = snapshot.key_info(key)
    if info is None or info.kind not in SORTED_KINDS:
        return
    start, stop = options.bounds(_size(snapshot, key, info.kind))
    if options.is_unsorted:
        items = _in_stored_order(snapshot, key, info.kind, options.is_descending, start, stop)
    else:
        items = _sorted(view, _all_items(snapshot, key, info.kind), options, start, stop)
    for batch in items:
        if options.get_patterns:
            yield from batched(
                (_look_up(view, get, item) for item in batch for get in options.get_patterns), LOOKUPS_PER_STEP
            )
        else:
            yield batch
        yield []


def _all_items(snapshot: Snapshot, key: bytes, kind: Kind) -> Iterator[bytes]:
    if kind is Kind.LIST:
        return snapshot.list_elements(key, 0, snapshot.list_size(key))
    if kind is Kind.SET:
        return snapshot.members(key)
    return (member for member, _ in snapshot.sorted_members(key, 0, snapshot.sorted_size(key)))


def _in_stored_order(
    snapshot: Snapshot, key: bytes, kind: Kind, is_descending: bool, start: int, stop: int
) -> Iterator[list[bytes]]:
    """Iterate over items `start` up to `stop` (exclusive) in the stored order."""
    size = _size(snapshot, key, kind)
    for first in range(start, stop, CHUNK_ITEMS_MAX):
        last = min(stop, first + CHUNK_ITEMS_MAX)
        ends = (size - last, size - first) if is_descending else (first, last)
        if kind is Kind.LIST:
            yield list(snapshot.list_elements(key, *ends))[:: -1 if is_descending else 1]
        elif kind is Kind.SORTED_SET:
            yield [member for member, _ in snapshot.sorted_members(key, *ends, is_descending)]
    if kind is Kind.SET:
        for index, batch in enumerate(batched(snapshot.members(key))):
            yield batch[max(0, start - index * CHUNK_ITEMS_MAX) : max(0, stop - index * CHUNK_ITEMS_MAX)]


def _sorted(
    view: KeyspaceView, items: Iterator[bytes], options: SortOptions, start: int, stop: int
) -> Iterator[list[bytes]]:
    """Sort items in steps. Items with equal numbers are sorted by their bytes; with ALPHA the sort is stable."""
    keyed_items = _with_sort_keys(view, items, options, WorkingMemory())
    for batch in sorted_chunks(keyed_items, start, stop, options.is_descending, not options.is_alpha):
        yield [item for _, item in batch]


def _with_sort_keys(
    view: KeyspaceView, items: Iterator[bytes], options: SortOptions, memory: WorkingMemory
) -> Iterator[list[tuple[Any, bytes]]]:
    """Iterate over (sort key, item). If a sort key is no number, GenericError once all items have been read."""
    are_numbers = True
    for batch in batched(items, LOOKUPS_PER_STEP):
        memory.add(batch)
        sort_keys: list[Value | None] = list(batch)
        if options.by_pattern is not None:
            sort_keys = [_look_up(view, options.by_pattern, item) for item in batch]
        if options.is_alpha:
            texts = [(False, b"") if key is None else (True, c_text(as_bytes(key))) for key in sort_keys]
            memory.add(text for _, text in texts)
            yield list(zip(texts, batch, strict=True))
        else:
            numbers = [_number(key) for key in sort_keys]
            are_numbers = are_numbers and None not in numbers
            yield [] if None in numbers else list(zip(numbers, batch, strict=True))
    if not are_numbers:
        raise GenericError("One or more scores can't be converted into double")


def _number(text: Value | None) -> float | None:
    """Return a text's numeric sort key: 0 for a missing text, None if it is no number; a LongValue never is."""
    if text is None:
        return 0.0
    found = None if isinstance(text, LongValue) else read_double(text)
    return None if found is None or found.is_out_of_range else found.value


def _look_up(view: KeyspaceView, pattern: bytes, item: bytes) -> Value | None:
    """Return the value of the key, or hash field, that a pattern names when `item` replaces its first `*`."""
    if pattern == b"#":
        return item
    before, star, after = pattern.partition(b"*")
    if not star or b"\0" in before:
        return None
    name, arrow, of_field = after.partition(b"->")
    if b"\0" in name or not arrow or of_field[:1] in (b"", b"\0"):
        name, arrow = after, b""
    key = before + item + name
    try:
        return view.at(key).lazy_fields(key, (of_field,))[0] if arrow else view.at(key).lazy_value(key)
    except WrongKindError:
        return None
