"""Commands about keys of any type: existence, expiry, iteration."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, TypeVar

from resp_server.acl.visibility import Visibility
from resp_server.command.handler import OneOrMore, command, integer, is_integer
from resp_server.commands.sliced_reply import CHUNK_ITEMS_MAX, batched, sliced_reply
from resp_server.pipeline.context import ReadContext
from resp_server.protocol.errors import GenericError, syntax_error
from resp_server.protocol.glob import Matches, matcher
from resp_server.protocol.replies import FirstOf, Reply, Sliced
from state_backend.model.descriptor import Kind

Item = TypeVar("Item")

# Redis' type names.
TYPE_NAMES = {
    Kind.VALUE: "string",
    Kind.MAP: "hash",
    Kind.LIST: "list",
    Kind.SET: "set",
    Kind.SORTED_SET: "zset",
}

# Keys of one SCAN step. COUNT is a hint; a step of the maximum takes a few milliseconds (measured: 0.7 us a key, and
# three times that where many processes share a processor's cache).
SCAN_COUNT_DEFAULT = 10
SCAN_COUNT_MAX = 2048

# Bytes of names that are matched with a pattern at once (measured: up to 150 ns a byte, 2 ns for a usual pattern).
MATCHED_BYTES_MAX = 32 << 10

# Our cursors have 46 or 48 bits. Redis accepts any 64-bit number; a larger one is the end of the scan here.
CURSOR_MAX = 2**48 - 1
CURSOR = re.compile(rb"[\t-\r ]*([+-]?)([0-9]+)")


def cursor(argument: bytes) -> int:
    """Parse a cursor of states. A number that is too large for one of our cursors becomes `CURSOR_MAX`."""
    return min(cursor_number(argument), CURSOR_MAX)


def cursor_number(argument: bytes) -> int:
    """Parse a cursor as Redis' string2ull does: a 64-bit number that is not negative, else what strtoull makes of it.

    So ` 0` and `-01` are cursors, and `-1` is not. A zero byte ends the text.
    """
    text = argument.partition(b"\0")[0]
    found = CURSOR.fullmatch(text)
    if found is None or (text[:1] == b"-" and is_integer(text)):
        raise GenericError("invalid cursor")
    sign, digits = found[1], found[2].lstrip(b"0") or b"0"
    if len(digits) > 20 or int(digits) >= 2**64:
        raise GenericError("invalid cursor")
    return int(sign + digits) % 2**64


Cursor = Annotated[int, cursor]


@dataclass
class ScanOptions:
    """The options of SCAN, HSCAN, SSCAN and ZSCAN."""

    count: int = SCAN_COUNT_DEFAULT
    matches: Matches | None = None
    kinds: Collection[Kind] | None = None
    has_values: bool = True

    @classmethod
    def parse(cls, arguments: Sequence[bytes], name: str) -> ScanOptions:
        """Parse the options of a command in Redis' order of checks; only SCAN has TYPE, only HSCAN has NOVALUES."""
        options = cls()
        at = 0
        while at < len(arguments):
            option, has_value = arguments[at].upper(), at + 1 < len(arguments)
            if option == b"NOVALUES":
                if name != "hscan":
                    raise GenericError("NOVALUES option can only be used in HSCAN")
                options.has_values = False
                at += 1
                continue
            if not has_value or option not in (b"COUNT", b"MATCH", b"TYPE") or (option == b"TYPE" and name != "scan"):
                raise syntax_error()
            options._read_option(option, arguments[at + 1])
            at += 2
        return options

    def _read_option(self, option: bytes, value: bytes) -> None:
        if option == b"COUNT":
            count = integer(value)
            if count < 1:
                raise syntax_error()
            self.count = min(count, SCAN_COUNT_MAX)
        elif option == b"MATCH":
            self.matches = None if value == b"*" else matcher(value)
        else:
            type_name = value.decode("utf-8", "replace").lower()
            self.kinds = [kind for kind, name in TYPE_NAMES.items() if name == type_name]


@command("exists")
def exists(context: ReadContext, *keys: OneOrMore) -> Reply:
    """Determines whether one or more keys exist."""
    return _count(context, keys)


@command("touch")
def touch(context: ReadContext, *keys: OneOrMore) -> Reply:
    """Returns the number of existing keys out of those specified after updating the time they were last accessed."""
    return _count(context, keys)


def _count(context: ReadContext, keys: Sequence[bytes]) -> Reply:
    if len(keys) <= CHUNK_ITEMS_MAX:
        return sum(context.key_info(key) is not None for key in keys)
    return sliced_reply(
        context,
        lambda view: (
            [context.counted(view.at(key).key_info(key)) is not None for key in batch] for batch in batched(keys)
        ),
        int,
    )


@command("type")
def type_(context: ReadContext, key: bytes) -> str:
    """Determines the type of value stored at a key."""
    info = context.key_info(key)
    return "none" if info is None else TYPE_NAMES[info.kind]


NO_KEY = -2
NO_EXPIRY = -1


@command("pexpiretime")
def pexpiretime(context: ReadContext, key: bytes) -> int:
    """Returns the expiration time of a key as a Unix milliseconds timestamp."""
    info = context.key_info(key)
    if info is None:
        return NO_KEY
    return NO_EXPIRY if info.expire_at_ms is None else info.expire_at_ms


@command("expiretime")
def expiretime(context: ReadContext, key: bytes) -> int:
    """Returns the expiration time of a key as a Unix timestamp."""
    return _seconds(pexpiretime(context, key))


@command("pttl")
def pttl(context: ReadContext, key: bytes) -> int:
    """Returns the expiration time in milliseconds of a key."""
    expire_at_ms: int = pexpiretime(context, key)
    return expire_at_ms if expire_at_ms < 0 else expire_at_ms - context.at(key).now_ms


@command("ttl")
def ttl(context: ReadContext, key: bytes) -> int:
    """Returns the expiration time in seconds of a key."""
    return _seconds(pttl(context, key))


def _seconds(milliseconds: int) -> int:
    """Round to seconds as Redis does for keys; -1 and -2 are returned unchanged."""
    return milliseconds if milliseconds < 0 else (milliseconds + 500) // 1000


@command("randomkey")
def randomkey(context: ReadContext) -> Reply:
    """Returns a random key name from the database."""
    for key in islice(context.visibility.random_keys(), 2):
        if key is not None:
            return key
    # Many keys have expired, so the search may take long.
    return sliced_reply(context, lambda view: _random_key(context.visibility_of(view)), FirstOf)


def _random_key(visibility: Visibility) -> Iterator[Sequence[Reply]]:
    return ([] if key is None else [key] for key in visibility.random_keys())


@command("scan")
def scan(context: ReadContext, cursor: Cursor, *arguments: bytes) -> Reply:
    """Iterates over the key names in the database."""
    options = ScanOptions.parse(arguments, "scan")
    next_cursor, found = context.visibility.scan(cursor, options.count, options.kinds)
    return scan_reply(next_cursor, found, options.matches)


def scan_reply(
    next_cursor: int,
    found: Sequence[Item],
    matches: Matches | None,
    name_of: Callable[[Any], bytes] = lambda name: name,
    render: Callable[[list[Item]], list[Any]] = list,
) -> Reply:
    """Return a SCAN reply with the items whose names match; long names are matched in steps.

    Args:
        name_of: Returns an item's name.
    """
    if matches is None:
        return [b"%d" % next_cursor, render(list(found))]
    chunks = matching(found, matches, name_of)
    if sum(len(name_of(each)) for each in found) <= MATCHED_BYTES_MAX:
        return [b"%d" % next_cursor, render([each for chunk in chunks for each in chunk])]
    return Sliced(_filtered_scan(next_cursor, chunks, render), lambda: None, FirstOf)


def _filtered_scan(
    next_cursor: int, chunks: Iterator[list[Item]], render: Callable[[list[Item]], list[Any]]
) -> Iterator[Sequence[Reply]]:
    matched: list[Item] = []
    for chunk in chunks:
        matched += chunk
        yield []
    yield [[b"%d" % next_cursor, render(matched)]]


def matching(
    found: Iterable[Item], matches: Matches, name_of: Callable[[Any], bytes] = lambda name: name
) -> Iterator[list[Item]]:
    """Iterate over the items whose names match, in chunks of bounded time."""
    chunk: list[Item] = []
    size = 0
    for each in found:
        name = name_of(each)
        if matches(name):
            chunk.append(each)
        size += len(name)
        if size > MATCHED_BYTES_MAX:
            yield chunk
            chunk, size = [], 0
    yield chunk


@command("keys")
def keys(context: ReadContext, pattern: bytes) -> Reply:
    """Returns all key names that match a pattern."""
    matches = matcher(pattern)
    return sliced_reply(context, lambda view: _keys(context.visibility_of(view), matches))


def _keys(visibility: Visibility, matches: Matches) -> Iterator[list[bytes]]:
    cursor = 0
    while True:
        cursor, found = visibility.scan(cursor, CHUNK_ITEMS_MAX)
        yield from matching(found, matches)
        if not cursor:
            return
