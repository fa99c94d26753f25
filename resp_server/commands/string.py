"""Value states as Redis strings."""

from __future__ import annotations

from collections.abc import Sequence

from resp_server.commands.generic import SLICE_ENTRIES, slices
from resp_server.commands.spec import OneOrMore, command
from resp_server.instance import Call
from resp_server.protocol.replies import Reply, Sliced
from state_backend.errors import WrongKindError
from state_backend.keyspace import KeyspaceView


@command("get")
def get(call: Call, key: bytes) -> bytes | None:
    """Returns the string value of a key."""
    return call.counted(call.at(key).value(key))


@command("mget")
def mget(call: Call, *keys: OneOrMore) -> Reply:
    """Atomically returns the string values of one or more keys."""
    if len(keys) <= SLICE_ENTRIES:
        return _values(call, call.view, keys)
    view = call.pin()
    return Sliced((_values(call, view, some) for some in slices(keys)), view.close, count=len(keys))


def _values(call: Call, view: KeyspaceView, keys: Sequence[bytes]) -> list[bytes | None]:
    """Read several keys. Unlike GET's, a key of another kind is nil."""
    values: list[bytes | None] = []
    for key in keys:
        try:
            values.append(call.counted(view.at(key).value(key)))
        except WrongKindError:
            values.append(None)
    return values


@command("strlen")
def strlen(call: Call, key: bytes) -> int:
    """Returns the length of a string value."""
    return len(call.counted(call.at(key).value(key)) or b"")


@command("getrange")
def getrange(call: Call, key: bytes, start: int, end: int) -> bytes:
    """Returns a substring of the string stored at a key."""
    return _part(call.counted(call.at(key).value(key)) or b"", start, end)


@command("substr")
def substr(call: Call, key: bytes, start: int, end: int) -> bytes:
    """Returns a substring from a string value."""
    return _part(call.counted(call.at(key).value(key)) or b"", start, end)


def _part(value: bytes, start: int, end: int) -> bytes:
    """Return bytes `start` to `end`, both included; negative ones count from the end."""
    if start < 0 and end < 0 and start > end:
        return b""
    first = max(0, start + len(value)) if start < 0 else start
    last = max(0, end + len(value)) if end < 0 else end
    return value[first : last + 1]
