"""OBJECT and MEMORY USAGE: properties of one key.

OBJECT ENCODING replies with the encoding that Redis 7.4 with default settings would choose for the value, because
clients and tools recognize small values by it. The stores' real layout is in `state_backend.lmdb.record_format`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from resp_server.command.handler import INTEGER_MAX, command, integer, is_integer
from resp_server.commands.sliced_reply import size_of, sliced_reply
from resp_server.pipeline.context import CommandContext
from resp_server.protocol.errors import no_frequency, syntax_error
from resp_server.protocol.replies import Reply
from state_backend.model.descriptor import Kind
from state_backend.store.store import Snapshot

# Redis' default limits: bytes of an embedded string; items, hash fields, bytes of an item and bytes of a list in a
# compact encoding; members of an intset.
EMBEDDED_BYTES_MAX = 44
COMPACT_ITEMS_MAX = 128
COMPACT_FIELDS_MAX = 512
COMPACT_ITEM_BYTES_MAX = 64
COMPACT_LIST_BYTES_MAX = 8192
NUMBERS_MAX = 512

# Items that MEMORY USAGE measures by default: those of one step (see `state_backend.lmdb.sizes`). If there are more
# than these few steps, the reply is a sliced one.
SAMPLES_DEFAULT = 256
STEPS_AT_ONCE_MAX = 10


@command("object|encoding")
def object_encoding(context: CommandContext, key: bytes) -> Reply:
    """Returns the internal encoding of a Redis object."""
    info = context.key_info(key)
    return None if info is None else _encoding(context.at(key), key, info.kind)


def _encoding(snapshot: Snapshot, key: bytes, kind: Kind) -> bytes:
    match kind:
        case Kind.VALUE:
            text = snapshot.lazy_value(key)
            if isinstance(text, bytes) and is_integer(text):
                return b"int"
            return b"embstr" if size_of(text) <= EMBEDDED_BYTES_MAX else b"raw"
        case Kind.MAP:
            return _map_encoding(snapshot, key)
        case Kind.LIST:
            size = snapshot.list_size(key)
            is_compact = size <= COMPACT_LIST_BYTES_MAX // 2 and (
                sum(len(element) + 2 for element in snapshot.list_elements(key, 0, size)) < COMPACT_LIST_BYTES_MAX
            )
            return b"listpack" if is_compact else b"quicklist"
        case Kind.SET:
            size = snapshot.set_size(key)
            members = list(snapshot.members(key)) if size <= NUMBERS_MAX else []
            if members and all(map(is_integer, members)):
                return b"intset"
            return b"listpack" if 0 < len(members) <= COMPACT_ITEMS_MAX and _are_short(members) else b"hashtable"
        case Kind.SORTED_SET:
            size = snapshot.sorted_size(key)
            is_compact = size <= COMPACT_ITEMS_MAX and _are_short(
                member for member, _ in snapshot.sorted_members(key, 0, size)
            )
            return b"listpack" if is_compact else b"skiplist"


def _map_encoding(snapshot: Snapshot, key: bytes) -> bytes:
    if next(snapshot.map_sizes(key), 0) > COMPACT_FIELDS_MAX:
        return b"hashtable"
    pairs = list(snapshot.lazy_map_pairs(key))
    if not all(size_of(text) <= COMPACT_ITEM_BYTES_MAX for pair in pairs for text in pair):
        return b"hashtable"
    return b"listpackex" if any(snapshot.field_expiries(key, [field for field, _ in pairs])) else b"listpack"


def _are_short(texts: Iterable[bytes]) -> bool:
    return all(len(text) <= COMPACT_ITEM_BYTES_MAX for text in texts)


@command("object|refcount")
def object_refcount(context: CommandContext, key: bytes) -> int | None:
    """Returns the reference count of a value of a key."""
    return None if context.key_info(key) is None else 1  # values are never shared


@command("object|idletime")
def object_idletime(context: CommandContext, key: bytes) -> int | None:
    """Returns the time since the last access to a Redis object."""
    return None if context.key_info(key) is None else 0  # access times are not recorded, as no key is evicted


@command("object|freq")
def object_freq(context: CommandContext, key: bytes) -> None:
    """Returns the logarithmic access frequency counter of a Redis object."""
    if context.key_info(key) is not None:
        raise no_frequency()


@command("memory|usage")
def memory_usage(context: CommandContext, key: bytes, *arguments: bytes) -> Reply:
    """Estimates the memory usage of a key."""
    items_max = SAMPLES_DEFAULT
    for index in range(0, len(arguments), 2):
        if arguments[index].upper() != b"SAMPLES" or index + 1 == len(arguments):
            raise syntax_error()
        items_max = integer(arguments[index + 1])
        if items_max < 0:
            raise syntax_error()
        items_max = max(items_max, SAMPLES_DEFAULT) if items_max else INTEGER_MAX  # 0: all
    numbers = list(islice(context.at(key).stored_sizes(key, items_max), STEPS_AT_ONCE_MAX))
    if len(numbers) < STEPS_AT_ONCE_MAX:
        return sum(numbers) if numbers else None
    return sliced_reply(context, lambda view: ([number] for number in view.at(key).stored_sizes(key, items_max)), int)


@command("object|help")
def object_help(context: CommandContext) -> Reply:
    """Returns helpful text about the different subcommands."""
    return context.server.table.help("object")
