"""Commands about keys of any kind: existence, expiry, iteration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

from resp_server.commands.spec import OneOrMore, command, integer
from resp_server.errors import PlainError, syntax_error
from resp_server.glob import Matches, matcher
from resp_server.instance import Call
from resp_server.protocol.replies import FirstOf, Reply, Sliced
from state_backend.descriptor import Kind
from state_backend.keyspace import KeyspaceView
from state_backend.store import Entry

# In Redis' words.
TYPE_NAMES = {Kind.VALUE: "string", Kind.MAP: "hash", Kind.LIST: "list"}

# One step's entries: COUNT is a hint, and a step of this many stays within a few milliseconds (guess).
SCAN_COUNT_DEFAULT = 10
SCAN_COUNT_MAX = 4096

# Entries, or keys, of one step of a sliced reply: well below a millisecond (guess).
SLICE_ENTRIES = 512

# Cursors are positions of 46 or 48 bits. Redis takes any 64 bits; there is nothing behind ours.
CURSOR_MAX = 2**48 - 1
CURSOR = re.compile(rb"([+-]?)([0-9]+)")


def cursor(word: bytes) -> int:
    """Read a cursor as Redis does, by strtoul, which ends at a zero byte; one that we never gave is behind the end."""
    found = CURSOR.fullmatch(word.partition(b"\0")[0] or b"0")
    if found is None:
        raise PlainError("invalid cursor")
    sign, digits = found[1], found[2].lstrip(b"0") or b"0"
    if len(digits) > 20 or int(digits) >= 2**64:
        raise PlainError("invalid cursor")
    return min(int(sign + digits) % 2**64, CURSOR_MAX)


Cursor = Annotated[int, cursor]


@dataclass
class ScanOptions:
    """What SCAN and HSCAN may be given behind the cursor."""

    count: int = SCAN_COUNT_DEFAULT
    matches: Matches | None = None
    type_name: str | None = None
    has_values: bool = True

    @classmethod
    def parse(cls, words: Sequence[bytes], is_hash: bool) -> ScanOptions:
        """Read the options in Redis' order of checks; TYPE is SCAN's alone, NOVALUES HSCAN's."""
        options = cls()
        at = 0
        while at < len(words):
            option, has_value = words[at].upper(), at + 1 < len(words)
            if option == b"NOVALUES":
                if not is_hash:
                    raise PlainError("NOVALUES option can only be used in HSCAN")
                options.has_values = False
                at += 1
                continue
            if not has_value or option not in (b"COUNT", b"MATCH", b"TYPE") or (option == b"TYPE" and is_hash):
                raise syntax_error()
            options._take(option, words[at + 1])
            at += 2
        return options

    def _take(self, option: bytes, value: bytes) -> None:
        if option == b"COUNT":
            count = integer(value)
            if count < 1:
                raise syntax_error()
            self.count = min(count, SCAN_COUNT_MAX)
        elif option == b"MATCH":
            self.matches = None if value == b"*" else matcher(value)
        else:
            self.type_name = value.decode("utf-8", "replace").lower()

    def takes(self, entry: Entry) -> bool:
        """Tell whether MATCH and TYPE let an entry through."""
        if self.type_name is not None and TYPE_NAMES[entry.kind] != self.type_name:
            return False
        return self.matches is None or bool(self.matches(entry.key))


@command("exists")
def exists(call: Call, *keys: OneOrMore) -> Reply:
    """Determines whether one or more keys exist."""
    return _count(call, keys)


@command("touch")
def touch(call: Call, *keys: OneOrMore) -> Reply:
    """Returns the number of existing keys out of those specified after updating the time they were last accessed."""
    return _count(call, keys)


def _count(call: Call, keys: Sequence[bytes]) -> Reply:
    if len(keys) <= SLICE_ENTRIES:
        return sum(call.entry(key) is not None for key in keys)
    view = call.pin()
    counts = ([call.counted(view.at(key).entry(key)) is not None for key in some] for some in slices(keys))
    return Sliced(counts, view.close, int)


def slices(words: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Cut a request's many arguments into as many as one step takes."""
    return (words[start : start + SLICE_ENTRIES] for start in range(0, len(words), SLICE_ENTRIES))


@command("type")
def type_(call: Call, key: bytes) -> str:
    """Determines the type of value stored at a key."""
    entry = call.entry(key)
    return "none" if entry is None else TYPE_NAMES[entry.kind]


NO_KEY = -2
NO_EXPIRY = -1


@command("pexpiretime")
def pexpiretime(call: Call, key: bytes) -> int:
    """Returns the expiration time of a key as a Unix milliseconds timestamp."""
    entry = call.entry(key)
    if entry is None:
        return NO_KEY
    return NO_EXPIRY if entry.expire_at_ms is None else entry.expire_at_ms


@command("expiretime")
def expiretime(call: Call, key: bytes) -> int:
    """Returns the expiration time of a key as a Unix timestamp."""
    return _seconds(pexpiretime(call, key))


@command("pttl")
def pttl(call: Call, key: bytes) -> int:
    """Returns the expiration time in milliseconds of a key."""
    expire_at_ms: int = pexpiretime(call, key)
    return expire_at_ms if expire_at_ms < 0 else expire_at_ms - call.now_ms


@command("ttl")
def ttl(call: Call, key: bytes) -> int:
    """Returns the expiration time in seconds of a key."""
    return _seconds(pttl(call, key))


def _seconds(milliseconds: int) -> int:
    """Round to seconds as Redis does; -1 and -2 stay."""
    return milliseconds if milliseconds < 0 else (milliseconds + 500) // 1000


@command("randomkey")
def randomkey(call: Call) -> Reply:
    """Returns a random key name from the database."""
    for entry in islice(call.view.random_entries(), 2):
        if entry is not None:
            return entry.key
    view = call.pin()  # much has expired: it may take long
    return Sliced(([] if entry is None else [entry.key] for entry in view.random_entries()), view.close, FirstOf)


@command("scan")
def scan(call: Call, cursor: Cursor, *words: bytes) -> Reply:
    """Iterates over the key names in the database."""
    options = ScanOptions.parse(words, is_hash=False)
    next_cursor, entries = call.view.scan(cursor, options.count)
    return [b"%d" % next_cursor, [entry.key for entry in entries if options.takes(entry)]]


@command("keys")
def keys(call: Call, pattern: bytes) -> Reply:
    """Returns all key names that match a pattern."""
    matches = matcher(pattern)
    view = call.pin()
    return Sliced(_keys(view, matches), view.close)


def _keys(view: KeyspaceView, matches: Matches) -> Iterator[list[bytes]]:
    cursor = 0
    while True:
        cursor, entries = view.scan(cursor, SLICE_ENTRIES)
        yield [entry.key for entry in entries if matches(entry.key)]
        if not cursor:
            return
