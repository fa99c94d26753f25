"""Map states as Redis hashes. A large hash is sent in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter

from resp_server.command.handler import OneOrMore, command, is_integer
from resp_server.commands.generic import Cursor, ScanOptions, matching
from resp_server.commands.random_items import ItemSource, count_and_option, draws_from, random_item, random_items
from resp_server.commands.sliced_reply import (
    BYTES_AT_ONCE_MAX,
    CHUNK_ITEMS_MAX,
    batched,
    items_reply,
    reply_chunks,
    reply_item,
    reply_of_chunks,
    size_of,
    sliced_reply,
    value_reply,
)
from resp_server.pipeline.context import ReadContext
from resp_server.protocol.errors import GenericError, WrongTypeError
from resp_server.protocol.replies import LongItems, PackedPairs, Pairs, Reply
from state_backend.codec import packed_map
from state_backend.model.descriptor import Kind
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import LongValue, Snapshot, Value, as_bytes

Pair = tuple[bytes, Value]

# Fields that are looked up together. A value of more than 64 KiB is a LongValue, which is read later, in pieces.
FIELDS_PER_READ = 64
# `map_sizes` yields the stored size first, then corrections for expired fields; more than these are summed in steps.
COUNTS_AT_ONCE_MAX = 3


@command("hget")
def hget(context: ReadContext, key: bytes, field: bytes) -> Reply:
    """Returns the value of a field in a hash."""
    text = context.counted(_text(context.view, key, field))
    return text if type(text) is bytes else value_reply(context, text, lambda view: _text(view, key, field))


def _text(view: KeyspaceView, key: bytes, field: bytes) -> Value | None:
    return view.at(key).lazy_fields(key, (field,))[0]


@command("hmget")
def hmget(context: ReadContext, key: bytes, *fields: OneOrMore) -> Reply:
    """Returns the values of all fields in a hash."""
    if len(fields) <= FIELDS_PER_READ:
        texts = context.at(key).lazy_fields(key, fields)
        if LongValue not in map(type, texts):
            return texts
    return items_reply(context, lambda view: _texts(view, key, fields), lambda view: len(fields))


def _texts(view: KeyspaceView, key: bytes, fields: Sequence[bytes]) -> Iterator[Value | None]:
    """Iterate over the fields' values, read in batches of bounded size."""
    return chain.from_iterable(view.at(key).lazy_fields(key, names) for names in batched(fields, FIELDS_PER_READ))


@command("hexists")
def hexists(context: ReadContext, key: bytes, field: bytes) -> int:
    """Determines whether a field exists in a hash."""
    return int(context.counted(_text(context.view, key, field)) is not None)


@command("hstrlen")
def hstrlen(context: ReadContext, key: bytes, field: bytes) -> int:
    """Returns the length of the value of a field."""
    return size_of(context.counted(_text(context.view, key, field)))


@command("hlen")
def hlen(context: ReadContext, key: bytes) -> Reply:
    """Returns the number of fields in a hash."""
    numbers = list(islice(context.at(key).map_sizes(key), COUNTS_AT_ONCE_MAX))
    if len(numbers) < COUNTS_AT_ONCE_MAX:
        return context.counted(sum(numbers) or None) or 0
    # Many expired fields are not removed yet, so they are counted in steps.
    return sliced_reply(context, lambda view: ([number] for number in view.at(key).map_sizes(key)), int)


def _fields_of(arguments: Sequence[bytes]) -> Sequence[bytes]:
    """Parse `FIELDS numfields field ...` in Redis' order of checks."""
    if arguments[0].upper() != b"FIELDS":
        raise GenericError("Mandatory argument FIELDS is missing or not at the right position")
    if not is_integer(arguments[1]) or int(arguments[1]) < 1:
        raise GenericError("Number of fields must be a positive integer")
    if int(arguments[1]) != len(arguments) - 2:
        raise GenericError("The `numfields` parameter must match the number of arguments")
    return arguments[2:]


def _expiries(context: ReadContext, key: bytes, arguments: Sequence[bytes], render: Callable[[int], int]) -> Reply:
    """Return when fields expire: -1 for never, -2 for a missing field."""
    next(context.at(key).map_sizes(key), None)  # a wrong type is reported before a wrong argument
    fields = _fields_of(arguments)

    def chunks(view: KeyspaceView) -> Iterator[Sequence[int]]:
        for batch in batched(fields):
            times = view.at(key).field_expiries(key, batch)
            yield [-2 if at_ms is None else render(at_ms) if at_ms else -1 for at_ms in times]

    return reply_of_chunks(context, chunks, len(fields) <= CHUNK_ITEMS_MAX)


def _seconds(milliseconds: int) -> int:
    """Round up to seconds, as Redis does for hash fields."""
    return (milliseconds + 999) // 1000


@command("hpexpiretime")
def hpexpiretime(context: ReadContext, key: bytes, fields: bytes, count: bytes, *arguments: OneOrMore) -> Reply:
    """Returns the Unix time, in milliseconds, at which hash fields expire."""
    return _expiries(context, key, (fields, count, *arguments), lambda at_ms: at_ms)


@command("hexpiretime")
def hexpiretime(context: ReadContext, key: bytes, fields: bytes, count: bytes, *arguments: OneOrMore) -> Reply:
    """Returns the Unix time, in seconds, at which hash fields expire."""
    return _expiries(context, key, (fields, count, *arguments), _seconds)


@command("hpttl")
def hpttl(context: ReadContext, key: bytes, fields: bytes, count: bytes, *arguments: OneOrMore) -> Reply:
    """Returns the remaining time to live of hash fields, in milliseconds."""
    now_ms = context.at(key).now_ms
    return _expiries(context, key, (fields, count, *arguments), lambda at_ms: at_ms - now_ms)


@command("httl")
def httl(context: ReadContext, key: bytes, fields: bytes, count: bytes, *arguments: OneOrMore) -> Reply:
    """Returns the remaining time to live of hash fields, in seconds."""
    now_ms = context.at(key).now_ms
    return _expiries(context, key, (fields, count, *arguments), lambda at_ms: _seconds(at_ms - now_ms))


@command("hgetall")
def hgetall(context: ReadContext, key: bytes) -> Reply:
    """Returns all fields and values in a hash."""
    packed = context.at(key).packed_map(key)
    if packed is not None:
        context.counted(packed)
        return PackedPairs(packed_map.count(packed), packed_map.body(packed))
    return _all_pairs(context, key, lambda pair: pair, dict)


@command("hkeys")
def hkeys(context: ReadContext, key: bytes) -> Reply:
    """Returns all fields in a hash."""
    return _all_pairs(context, key, itemgetter(slice(0, 1)))


@command("hvals")
def hvals(context: ReadContext, key: bytes) -> Reply:
    """Returns all values in a hash."""
    return _all_pairs(context, key, itemgetter(slice(1, 2)))


def _all_pairs(
    context: ReadContext, key: bytes, project: Callable[[Pair], Sequence[Value]], shape: type = list
) -> Reply:
    """Return all pairs of a map of any size; `project` picks the field, the value or both of a pair."""
    context.counted(next(context.at(key).map_sizes(key), None) or None)
    cursor, pairs = context.at(key).scan_map(key, 0, CHUNK_ITEMS_MAX)
    items = [each for pair in pairs for each in project(pair)]
    if cursor or sum(map(size_of, items)) > BYTES_AT_ONCE_MAX:
        return sliced_reply(
            context, lambda view: _chunks(view, key, project), shape, lambda view: view.at(key).map_sizes(key)
        )
    texts = list(map(as_bytes, items))
    return dict(zip(texts[::2], texts[1::2], strict=True)) if shape is dict else texts


def _chunks(view: KeyspaceView, key: bytes, project: Callable[[Pair], Sequence[Value]]) -> Iterator[Sequence[Reply]]:
    """Iterate over all pairs by a scan, whose steps are bounded even if many fields have expired."""
    cursor, pairs = view.at(key).scan_map(key, 0, CHUNK_ITEMS_MAX)
    while True:
        yield []
        yield from reply_chunks(each for pair in pairs for each in project(pair))
        if not cursor:
            return
        cursor, pairs = view.at(key).scan_map(key, cursor, CHUNK_ITEMS_MAX)


@command("hrandfield")
def hrandfield(context: ReadContext, key: bytes, *arguments: bytes) -> Reply:
    """Returns one or more random fields from a hash."""
    count, has_values = count_and_option(arguments, b"WITHVALUES") if arguments else (None, False)
    context.counted(next(context.at(key).map_sizes(key), None) or None)

    def projected(pairs: Iterable[Pair]) -> Iterator[bytes | Pair]:
        return iter(pairs) if has_values else (field for field, _ in pairs)

    def scan(snapshot: Snapshot) -> Callable[[bytes, int, int], tuple[int, list[bytes | Pair]]]:
        def step(key: bytes, cursor: int, count: int) -> tuple[int, list[bytes | Pair]]:
            next_cursor, pairs = snapshot.scan_map(key, cursor, count)
            return next_cursor, list(projected(pairs))

        return step

    item_source = ItemSource(
        lambda view: view.at(key).map_size(key),
        lambda view: projected(view.at(key).lazy_map_pairs(key)),
        lambda view: draws_from(scan(view.at(key)), key),
    )
    if count is None:
        return random_item(context, item_source)
    return random_items(context, item_source, count, Pairs if has_values else list)


@command("hscan")
def hscan(context: ReadContext, key: bytes, cursor: Cursor, *arguments: bytes) -> Reply:
    """Iterates over fields and values of a hash."""
    info = context.key_info(key)
    if info is None:
        return [b"0", []]
    if info.kind is not Kind.MAP:
        raise WrongTypeError
    options = ScanOptions.parse(arguments, "hscan")
    found = next(_scan_result(context.view, key, cursor, options))
    if found and sum(map(size_of, found)) <= BYTES_AT_ONCE_MAX:
        return [found[0], list(map(as_bytes, found[1:]))]
    return sliced_reply(
        context, lambda view: _scan_chunks(_scan_result(view, key, cursor, options)), count=lambda view: 2
    )


def _scan_chunks(chunks: Iterator[Sequence[Value]]) -> Iterator[Sequence[Reply]]:
    """Turn the chunks of `_scan_result` into those of a sliced reply."""
    for found in chunks:
        if found:
            cursor, *pairs = map(reply_item, found)
            yield LongItems([cursor, LongItems(pairs)])
        else:
            yield []


def _scan_result(view: KeyspaceView, key: bytes, cursor: int, options: ScanOptions) -> Iterator[list[Value]]:
    """Scan in steps; the last chunk has the next cursor and the matching items, earlier ones are empty."""
    next_cursor, pairs = view.at(key).scan_map(key, cursor, options.count)
    found: list[Value] = [b"%d" % next_cursor]
    chunks = iter([pairs]) if options.matches is None else matching(pairs, options.matches, itemgetter(0))
    chunk = next(chunks, None)
    while chunk is not None:
        for field, value in chunk:
            found += (field, value) if options.has_values else (field,)
        chunk = next(chunks, None)
        if chunk is not None:
            yield []
    yield found
