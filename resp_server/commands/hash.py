"""Map states as Redis hashes. A large one is sent in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from resp_server.commands.generic import SLICE_ENTRIES, Cursor, ScanOptions, slices
from resp_server.commands.spec import OneOrMore, command
from resp_server.errors import PlainError, WrongTypeError
from resp_server.instance import Call
from resp_server.protocol.replies import PackedPairs, Reply, Sliced
from state_backend import packed_map
from state_backend.descriptor import Kind
from state_backend.store import whole

Pair = tuple[bytes, bytes]


@command("hget")
def hget(call: Call, key: bytes, field: bytes) -> bytes | None:
    """Returns the value of a field in a hash."""
    return call.counted(call.at(key).field(key, field))


@command("hmget")
def hmget(call: Call, key: bytes, *fields: OneOrMore) -> Reply:
    """Returns the values of all fields in a hash."""
    if len(fields) <= SLICE_ENTRIES:
        return call.at(key).fields(key, fields)
    call.at(key).map_size(key)  # a wrong kind is said before the first step
    view = call.pin()
    return Sliced((view.at(key).fields(key, some) for some in slices(fields)), view.close, count=len(fields))


@command("hexists")
def hexists(call: Call, key: bytes, field: bytes) -> int:
    """Determines whether a field exists in a hash."""
    return int(call.counted(call.at(key).field(key, field)) is not None)


@command("hstrlen")
def hstrlen(call: Call, key: bytes, field: bytes) -> int:
    """Returns the length of the value of a field."""
    return len(call.counted(call.at(key).field(key, field)) or b"")


@command("hlen")
def hlen(call: Call, key: bytes) -> int:
    """Returns the number of fields in a hash."""
    return call.at(key).map_size(key)


def _fields_of(words: Sequence[bytes]) -> Sequence[bytes]:
    """Read `FIELDS numfields field ...` in Redis' order of checks."""
    if words[0].upper() != b"FIELDS":
        raise PlainError("Mandatory argument FIELDS is missing or not at the right position")
    if not words[1].isdigit() or not 0 < int(words[1]) < 2**63:
        raise PlainError("Number of fields must be a positive integer")
    if int(words[1]) != len(words) - 2:
        raise PlainError("The `numfields` parameter must match the number of arguments")
    return words[2:]


def _expiries(call: Call, key: bytes, words: Sequence[bytes]) -> list[int]:
    """Return when fields expire, in milliseconds: -1 for never, -2 for a missing field."""
    snapshot = call.at(key)
    snapshot.map_size(key)  # a wrong kind is said before a wrong argument
    return [-2 if at_ms is None else at_ms or -1 for at_ms in snapshot.field_expiries(key, _fields_of(words))]


def _seconds(milliseconds: int) -> int:
    """Round up to seconds, as Redis does for fields; -1 and -2 stay."""
    return milliseconds if milliseconds < 0 else (milliseconds + 999) // 1000


@command("hpexpiretime")
def hpexpiretime(call: Call, key: bytes, fields: bytes, count: bytes, *words: OneOrMore) -> Reply:
    """Returns the Unix time, in milliseconds, at which hash fields expire."""
    return _expiries(call, key, (fields, count, *words))


@command("hexpiretime")
def hexpiretime(call: Call, key: bytes, fields: bytes, count: bytes, *words: OneOrMore) -> Reply:
    """Returns the Unix time, in seconds, at which hash fields expire."""
    return [_seconds(at_ms) for at_ms in _expiries(call, key, (fields, count, *words))]


@command("hpttl")
def hpttl(call: Call, key: bytes, fields: bytes, count: bytes, *words: OneOrMore) -> Reply:
    """Returns the remaining time to live of hash fields, in milliseconds."""
    return [_left(call, at_ms) for at_ms in _expiries(call, key, (fields, count, *words))]


@command("httl")
def httl(call: Call, key: bytes, fields: bytes, count: bytes, *words: OneOrMore) -> Reply:
    """Returns the remaining time to live of hash fields, in seconds."""
    return [_seconds(_left(call, at_ms)) for at_ms in _expiries(call, key, (fields, count, *words))]


def _left(call: Call, at_ms: int) -> int:
    return at_ms if at_ms < 0 else at_ms - call.now_ms


@command("hgetall")
def hgetall(call: Call, key: bytes) -> Reply:
    """Returns all fields and values in a hash."""
    packed = call.at(key).packed_map(key)
    if packed is not None:
        call.instance.stats.hits += 1
        return PackedPairs(packed_map.count(packed), packed_map.body(packed))
    return _whole(call, key, dict, lambda pairs: list(chain.from_iterable(pairs)))


@command("hkeys")
def hkeys(call: Call, key: bytes) -> Reply:
    """Returns all fields in a hash."""
    return _whole(call, key, list, lambda pairs: [field for field, _ in pairs])


@command("hvals")
def hvals(call: Call, key: bytes) -> Reply:
    """Returns all values in a hash."""
    return _whole(call, key, list, lambda pairs: [value for _, value in pairs])


def _whole(call: Call, key: bytes, shape: type, items: Callable[[Sequence[Pair]], list[bytes]]) -> Reply:
    """Return all of a map, of no matter how many fields; `items` makes of some pairs what is sent of them."""
    snapshot = call.at(key)
    count = call.counted(snapshot.map_size(key) or None) or 0
    if count <= SLICE_ENTRIES:
        pairs = list(snapshot.map_pairs(key))
        return dict(pairs) if shape is dict else items(pairs)
    view = call.pin()  # its epoch may be a newer one than the count above
    pinned = view.at(key)
    return Sliced(_in_steps(pinned.map_pairs(key), items), view.close, shape, pinned.map_size(key))


def _in_steps(pairs: Iterator[Pair], items: Callable[[Sequence[Pair]], list[bytes]]) -> Iterator[list[bytes]]:
    while some := list(islice(pairs, SLICE_ENTRIES)):
        yield items(some)


@command("hscan")
def hscan(call: Call, key: bytes, cursor: Cursor, *words: bytes) -> Reply:
    """Iterates over fields and values of a hash."""
    entry = call.entry(key)
    if entry is None:
        return [b"0", []]
    if entry.kind is not Kind.MAP:
        raise WrongTypeError
    options = ScanOptions.parse(words, is_hash=True)
    next_cursor, pairs = call.at(key).scan_map(key, cursor, options.count)
    found: list[bytes] = []
    for field, value in pairs:
        if options.matches is None or options.matches(field):
            found += (field, whole(value)) if options.has_values else (field,)
    return [b"%d" % next_cursor, found]
