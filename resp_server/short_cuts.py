"""Short cuts: the commands that are asked most, a column at a time, and from ready replies where they still hold.

A short cut answers what its command's body would answer, and counts the same; where it cannot (another kind of state, a
large value, an error) it answers None and has counted nothing, and the general way is taken. Tests hold both equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from resp_server.commands.generic import SLICE_ENTRIES
from resp_server.instance import Call, Instance
from resp_server.protocol.requests import Request

# Answers all requests of a column, given their second words.
ColumnCut = Callable[[Call, Sequence[bytes]], "list[bytes] | None"]
# Answers one request.
RequestCut = Callable[[Call, Request], "bytes | None"]

# What stands for a missing key among replies, and is sent in RESP2.
NIL = b"$-1\r\n"
NIL_OF_RESP3 = b"_\r\n"
# Larger values are read one by one, so that what is held of replies stays small.
VALUE_BYTES_MAX = 16_384


def get(call: Call, keys: Sequence[bytes]) -> list[bytes] | None:
    """GET: the replies of a column."""
    replies = value_replies(call.instance, keys)
    return None if replies is None else _counted(call, replies)


def mget(call: Call, request: Request) -> bytes | None:
    """MGET: an array of what GET answers."""
    keys = request[1:]
    if not 0 < len(keys) <= SLICE_ENTRIES:
        return None
    replies = value_replies(call.instance, keys)
    return None if replies is None else b"*%d\r\n%b" % (len(keys), b"".join(_counted(call, replies)))


def value_replies(instance: Instance, keys: Sequence[bytes]) -> list[bytes] | None:
    """Return what GET answers in RESP2 for each of the keys; None if one of them has to be asked by itself."""
    ready = instance.get_replies
    instance.view.freshen(keys)  # what an epoch changed leaves the ready replies before they are looked at
    replies = ready.find(keys)
    missed = replies.count(None)
    if not missed:
        return replies  # type: ignore[return-value]  # there is no None in it
    asked = keys if missed == len(keys) else [key for key, reply in zip(keys, replies, strict=True) if reply is None]
    values, expiring, left = instance.view.values(asked, VALUE_BYTES_MAX)
    found = [NIL if value is None else b"$%d\r\n%b\r\n" % (len(value), value) for value in values]
    lasting = dict(zip(asked, found, strict=True))
    for key in expiring | left:
        lasting.pop(key, None)
    ready.add(lasting, missed)
    if left:
        return None
    rest = iter(found)
    return found if asked is keys else [next(rest) if reply is None else reply for reply in replies]


def _counted(call: Call, replies: list[bytes]) -> list[bytes]:
    """Count hits and misses of a run at once, and write what is missing as the connection's protocol has it."""
    misses = replies.count(NIL)
    call.instance.stats.hits += len(replies) - misses
    call.instance.stats.misses += misses
    if misses and call.session.protocol != 2:
        return [NIL_OF_RESP3 if reply == NIL else reply for reply in replies]
    return replies


COLUMN_CUTS: Mapping[str, ColumnCut] = {"get": get}
REQUEST_CUTS: Mapping[str, RequestCut] = {"mget": mget}
