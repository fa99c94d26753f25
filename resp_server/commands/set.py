"""Set states as Redis sets. Long replies and operations on several sets are computed in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from resp_server.command.handler import OneOrMore, command, integer_at_least
from resp_server.commands.generic import Cursor, ScanOptions, scan_reply
from resp_server.commands.random_items import ItemSource, count_of, draws_from, random_item, random_items
from resp_server.commands.sliced_reply import (
    CHUNK_ITEMS_MAX,
    WorkingMemory,
    batched,
    items_reply,
    partitions_for,
    reply_of_chunks,
)
from resp_server.limits import LOOKUPS_PER_STEP
from resp_server.pipeline.context import ReadContext
from resp_server.protocol.errors import GenericError, WrongTypeError, syntax_error
from resp_server.protocol.replies import PackedItems, Reply, ReplySet
from state_backend.codec import packed_list
from state_backend.model.descriptor import Kind
from state_backend.store.keyspace import KeyspaceView


@command("scard")
def scard(context: ReadContext, key: bytes) -> int:
    """Returns the number of members in a set."""
    return context.counted(context.at(key).set_size(key) or None) or 0


@command("smembers")
def smembers(context: ReadContext, key: bytes) -> Reply:
    """Returns all members of a set."""
    packed = context.at(key).packed_set(key)
    if packed is not None:
        context.counted(packed)
        count = packed_list.count(packed)
        return PackedItems(count, packed_list.bulk_strings(packed, 0, count), ReplySet)
    context.counted(context.at(key).set_size(key) or None)
    return items_reply(
        context, lambda view: view.at(key).members(key), lambda view: view.at(key).set_size(key), ReplySet
    )


@command("sismember")
def sismember(context: ReadContext, key: bytes, member: bytes) -> int:
    """Determines whether a member belongs to a set."""
    context.counted(context.at(key).set_size(key) or None)
    return int(context.at(key).are_members(key, (member,))[0])


@command("smismember")
def smismember(context: ReadContext, key: bytes, *members: OneOrMore) -> Reply:
    """Determines whether multiple members belong to a set."""
    context.counted(context.at(key).set_size(key) or None)

    def chunks(view: KeyspaceView) -> Iterator[Sequence[int]]:
        for batch in batched(members):
            yield list(map(int, view.at(key).are_members(key, batch)))

    return reply_of_chunks(context, chunks, len(members) <= CHUNK_ITEMS_MAX)


@command("srandmember")
def srandmember(context: ReadContext, key: bytes, *arguments: bytes) -> Reply:
    """Get one or multiple random members from a set"""
    if len(arguments) > 1:
        raise syntax_error()
    count = count_of(arguments[0]) if arguments else None
    context.counted(context.at(key).set_size(key) or None)
    item_source = ItemSource(
        lambda view: view.at(key).set_size(key),
        lambda view: view.at(key).members(key),
        lambda view: draws_from(view.at(key).scan_set, key),
    )
    return random_item(context, item_source) if count is None else random_items(context, item_source, count)


@command("sscan")
def sscan(context: ReadContext, key: bytes, cursor: Cursor, *arguments: bytes) -> Reply:
    """Iterates over members of a set."""
    info = context.key_info(key)
    if info is None:
        return [b"0", []]
    if info.kind is not Kind.SET:
        raise WrongTypeError
    options = ScanOptions.parse(arguments, "sscan")
    next_cursor, members = context.at(key).scan_set(key, cursor, options.count)
    return scan_reply(next_cursor, members, options.matches)


@command("sinter")
def sinter(context: ReadContext, *keys: OneOrMore) -> Reply:
    """Returns the intersect of multiple sets."""
    return _combined(context, keys, _intersection, ReplySet)


@command("sunion")
def sunion(context: ReadContext, *keys: OneOrMore) -> Reply:
    """Returns the union of multiple sets."""
    return _combined(context, keys, _union, ReplySet)


@command("sdiff")
def sdiff(context: ReadContext, *keys: OneOrMore) -> Reply:
    """Returns the difference of multiple sets."""
    return _combined(context, keys, _difference, ReplySet)


@command("sintercard")
def sintercard(context: ReadContext, number: bytes, *arguments: OneOrMore) -> Reply:
    """Returns the number of members of the intersect of multiple sets."""
    keys, rest = numbered_keys(number, arguments)
    limit = limit_of(rest)

    def counts(view: KeyspaceView, sets: InputSets) -> Iterator[Sequence[int]]:
        remaining = limit
        for batch in _intersection(view, sets):
            yield [len(batch) if not limit else min(remaining, len(batch))]
            remaining -= len(batch)
            if limit and remaining <= 0:
                return

    return _combined(context, keys, counts, int)


def numbered_keys(number: bytes, arguments: Sequence[bytes]) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """Parse `numkeys key ...` as SINTERCARD does; return the keys and the arguments after them."""
    count = integer_at_least(number, 1, "numkeys should be greater than 0")
    if count > len(arguments):
        raise GenericError("Number of keys can't be greater than number of args")
    return arguments[:count], arguments[count:]


def limit_of(arguments: Sequence[bytes]) -> int:
    """Parse `[LIMIT number]`, the last one of several; 0: no limit."""
    limit = 0
    for index in range(0, len(arguments), 2):
        if arguments[index].upper() != b"LIMIT" or index + 1 == len(arguments):
            raise syntax_error()
        limit = integer_at_least(arguments[index + 1], 0, "LIMIT can't be negative")
    return limit


class InputSets(NamedTuple):
    """The keys of several sets and their sizes in a view; a missing set has size 0."""

    keys: Sequence[bytes]
    sizes: Sequence[int]


CombineSets = Callable[[KeyspaceView, InputSets], Iterator[Sequence[Reply]]]


def _combined(context: ReadContext, keys: Sequence[bytes], combine: CombineSets, shape: type) -> Reply:
    """Return the reply of an operation on several sets. A key of another type is always an error."""
    total = CHUNK_ITEMS_MAX + 1
    if len(keys) <= CHUNK_ITEMS_MAX:
        total = sum(context.counted(context.at(key).set_size(key) or None) or 0 for key in keys)

    def chunks(view: KeyspaceView) -> Iterator[Sequence[Reply]]:
        sizes: list[int] = []
        for batch in batched(keys):
            sizes += [view.at(key).set_size(key) for key in batch]
            yield []
        yield from combine(view, InputSets(keys, sizes))

    return reply_of_chunks(context, chunks, total <= CHUNK_ITEMS_MAX, shape)


def _union(view: KeyspaceView, sets: InputSets) -> Iterator[Sequence[bytes]]:
    """Iterate over the members of all sets, each member once. The last steps free the memory."""
    partitions: list[set[bytes]] = [set() for _ in range(partitions_for(sum(sets.sizes)))]
    count = len(partitions)
    memory = WorkingMemory()
    for key in dict.fromkeys(sets.keys):
        for batch in batched(view.at(key).members(key)):
            new = []
            for member in batch:
                partition = partitions[hash(member) % count]
                if member not in partition:
                    partition.add(member)
                    new.append(member)
            memory.add(new)
            yield new
    while partitions:
        partitions.pop()
        yield []


def _intersection(view: KeyspaceView, sets: InputSets) -> Iterator[Sequence[bytes]]:
    """Look the smallest set's members up in all others, smaller ones first."""
    if 0 in sets.sizes:
        return
    keys = [key for _, key in sorted(zip(sets.sizes, sets.keys, strict=True), key=itemgetter(0))]
    yield from _filtered(view, keys[0], dict.fromkeys(keys[1:]), is_member=True)


def _difference(view: KeyspaceView, sets: InputSets) -> Iterator[Sequence[bytes]]:
    """Look the first set's members up in all others."""
    others = {key: None for key, size in zip(sets.keys[1:], sets.sizes[1:], strict=True) if size}
    yield from _filtered(view, sets.keys[0], others, is_member=False)


def _filtered(view: KeyspaceView, key: bytes, others: Iterable[bytes], *, is_member: bool) -> Iterator[Sequence[bytes]]:
    """Iterate over a set's members that are in all other sets (is_member), or in none. A step reads one other set."""
    for batch in batched(view.at(key).members(key), LOOKUPS_PER_STEP):
        remaining = batch
        for other in others:
            if not remaining:
                break
            found = view.at(other).are_members(other, remaining)
            remaining = [member for member, is_in in zip(remaining, found, strict=True) if is_in is is_member]
            yield []
        yield remaining
