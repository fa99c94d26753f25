"""DUMP: a key's value in RDB format, for RESTORE in a real Redis. A large value is streamed in steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import assert_never

from resp_server.command.handler import command
from resp_server.commands.sliced_reply import batched, sliced_reply
from resp_server.pipeline.context import ReadContext
from resp_server.protocol import rdb_encoder as rdb
from resp_server.protocol.replies import FirstOf, LongBulk, LongItems, Reply
from state_backend.model.descriptor import Kind
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import LongValue, Snapshot, Value

# Bytes of one fragment: the checksum takes half a millisecond.
FRAGMENT_BYTES = 8 << 10
# A dump of more bytes or items is made in steps.
AT_ONCE_BYTES_MAX = 32 << 10
AT_ONCE_ITEMS_MAX = 256

Fragments = Iterator[bytes]


def _text(value: Value) -> Fragments:
    """Return an encoded text; a long one as its length and its pieces."""
    if isinstance(value, LongValue):
        return chain((rdb.length(value.length),), value.chunks(0, value.length))
    return iter((rdb.text(value),))


def _header(kind: int, count: int) -> Fragments:
    return iter((bytes((kind,)) + rdb.length(count),))


def _string(snapshot: Snapshot, key: bytes) -> Fragments:
    value = snapshot.lazy_value(key)
    return chain((bytes((rdb.STRING,)),), _text(b"" if value is None else value))


def _list(snapshot: Snapshot, key: bytes) -> Fragments:
    size = snapshot.list_size(key)
    return chain(_header(rdb.LIST, size), map(rdb.text, snapshot.list_elements(key, 0, size)))


def _set(snapshot: Snapshot, key: bytes) -> Fragments:
    return chain(_header(rdb.SET, snapshot.set_size(key)), map(rdb.text, snapshot.members(key)))


def _sorted_set(snapshot: Snapshot, key: bytes) -> Fragments:
    size = snapshot.sorted_size(key)
    pairs = snapshot.sorted_members(key, 0, size)
    return chain(_header(rdb.ZSET, size), (rdb.text(member) + rdb.SCORE.pack(score) for member, score in pairs))


def _hash(snapshot: Snapshot, key: bytes) -> Fragments:
    texts = (fragment for pair in snapshot.lazy_map_pairs(key) for text in pair for fragment in _text(text))
    return chain(_header(rdb.HASH, snapshot.map_size(key)), texts)


def _expiring_hash(snapshot: Snapshot, key: bytes, earliest: int) -> Fragments:
    yield bytes((rdb.HASH_EX,)) + earliest.to_bytes(8, "little") + rdb.length(snapshot.map_size(key))
    for batch in batched(snapshot.lazy_map_pairs(key)):
        times = snapshot.field_expiries(key, [field for field, _ in batch])
        for (field, value), at_ms in zip(batch, times, strict=True):
            yield rdb.length(at_ms - earliest + 1 if at_ms else 0) + rdb.text(field)
            yield from _text(value)


def _earliest_expiries(snapshot: Snapshot, key: bytes) -> Iterator[int | None]:
    """Iterate over batches of a hash's fields: the earliest expiry of each batch, None if no field of it expires."""
    if snapshot.packed_map(key) is None:
        for batch in batched(field for field, _ in snapshot.lazy_map_pairs(key)):
            yield min((at_ms for at_ms in snapshot.field_expiries(key, batch) if at_ms), default=None)


ENCODERS = {
    Kind.VALUE: _string,
    Kind.LIST: _list,
    Kind.SET: _set,
    Kind.SORTED_SET: _sorted_set,
    Kind.MAP: _hash,
}


@command("dump")
def dump(context: ReadContext, key: bytes) -> Reply:
    """Returns a serialized representation of the value stored at a key."""
    info = context.key_info(key)
    if info is None:
        return None
    if _size(context.at(key), key, info.kind) <= AT_ONCE_ITEMS_MAX:
        (bulk,) = [each for fragment in _chunks(context.view, key) for each in fragment]
        if bulk.length <= AT_ONCE_BYTES_MAX:
            return b"".join(bulk.parts)
    return sliced_reply(context, lambda view: _chunks(view, key), FirstOf)


def _size(snapshot: Snapshot, key: bytes, kind: Kind) -> int:
    match kind:
        case Kind.VALUE:
            return 1
        case Kind.MAP:
            return next(snapshot.map_sizes(key), 0)
        case Kind.LIST:
            return snapshot.list_size(key)
        case Kind.SET:
            return snapshot.set_size(key)
        case Kind.SORTED_SET:
            return snapshot.sorted_size(key)
        case never:
            assert_never(never)


def _chunks(view: KeyspaceView, key: bytes) -> Iterator[Sequence[LongBulk]]:
    """Compute the dump's length in steps, then yield it as one long bulk string; nothing if the key does not exist."""
    snapshot = view.at(key)
    info = snapshot.key_info(key)
    if info is None:
        return
    encode, version = partial(ENCODERS[info.kind], snapshot, key), rdb.VERSION
    if info.kind is Kind.MAP:
        earliest: int | None = None
        for at_ms in _earliest_expiries(snapshot, key):
            earliest = min(filter(None, (earliest, at_ms)), default=None)
            yield []
        if earliest is not None:
            encode, version = partial(_expiring_hash, snapshot, key, earliest), rdb.VERSION_EX
    length = rdb.FOOTER_BYTES
    for batch in batched(encode()):
        length += sum(map(len, batch))
        yield []
    yield LongItems([LongBulk(length, rdb.with_footer(_rechunked(encode()), version))])


def _rechunked(fragments: Fragments) -> Fragments:
    """Join short fragments and split long ones."""
    buffer: list[bytes] = []
    size = 0
    for fragment in fragments:
        buffer.append(fragment)
        size += len(fragment)
        if size >= FRAGMENT_BYTES:
            joined = b"".join(buffer)
            yield from (joined[index : index + FRAGMENT_BYTES] for index in range(0, size, FRAGMENT_BYTES))
            buffer, size = [], 0
    yield b"".join(buffer)
