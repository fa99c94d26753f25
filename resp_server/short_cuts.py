"""Short cuts: what the commands that are asked most answer, many at once, given what lies at their keys.

A short cut answers what its command's body would answer. What it leaves out (None) is answered by that body. Tests hold
both equal. Commands about a member of a key are answered together for all that are asked of it. Other commands about
sets and sorted sets have no faster answer than their body's; it is kept until the key changes all the same: a
leaderboard's first ten are asked for again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from resp_server.commands.list import range_of
from resp_server.commands.spec import integer
from resp_server.errors import ReplyError
from resp_server.protocol.replies import Reply, encode_header
from state_backend import packed_list, packed_map
from state_backend.descriptor import Kind
from state_backend.store import Snapshot

Found = Sequence[bytes | None]
Arguments = Sequence[bytes]


@dataclass(frozen=True)
class ShortCut:
    """A command about one key: of which kind, of how many words, and what it answers.

    nothing: the reply if nothing is found, and that alone: it is counted as a miss. replies: those to some requests,
    given what lies at their keys, and their arguments.
    """

    name: str
    kind: Kind
    words: int
    nothing: bytes
    replies: Callable[[Found, Iterable[Arguments]], list[bytes | None]]


@dataclass(frozen=True)
class OfMembers:
    """A command about one member of a key, such as ZSCORE: what it finds of many, None where it is counted as a miss.

    nothing: what is answered for None.
    """

    name: str
    nothing: Reply
    found: Callable[[Snapshot, bytes, Sequence[bytes]], Sequence[Reply]]


def _are_members(snapshot: Snapshot, key: bytes, members: Sequence[bytes]) -> Sequence[Reply]:
    if not snapshot.set_size(key):
        return [None] * len(members)
    return list(map(int, snapshot.are_members(key, members)))


def _scores(snapshot: Snapshot, key: bytes, members: Sequence[bytes]) -> Sequence[Reply]:
    return snapshot.scores(key, members)


def _ranks(snapshot: Snapshot, key: bytes, members: Sequence[bytes]) -> Sequence[Reply]:
    return snapshot.ranks(key, members)


def _ranks_from_the_end(snapshot: Snapshot, key: bytes, members: Sequence[bytes]) -> Sequence[Reply]:
    last = snapshot.sorted_size(key) - 1
    return [None if rank is None else last - rank for rank in snapshot.ranks(key, members)]


# Their replies are not kept: of a large set another member is asked for each time.
OF_MEMBERS = (
    OfMembers("sismember", 0, _are_members),
    OfMembers("zrank", None, _ranks),
    OfMembers("zrevrank", None, _ranks_from_the_end),
    OfMembers("zscore", None, _scores),
)
# Commands whose bodies are asked, by the numbers of words that their requests have most often. The reply depends on
# nothing but the key, its second word being that.
BODIES = {
    "scard": (2,),
    "smembers": (2,),
    "zcard": (2,),
    "zcount": (4,),
    "zrange": (4, 5, 6),
    "zrangebyscore": (4, 5, 7),
    "zrevrange": (4, 5),
    "zrevrangebyscore": (4, 5, 7),
}
# What a body answers where nothing is found, but not only there: not kept, so that nobody takes one for the other.
AMBIGUOUS = (b"$-1\r\n", b"_\r\n", b"*0\r\n", b"~0\r\n", b":0\r\n")


def bodies() -> list[tuple[str, int]]:
    """Return the names of the commands whose bodies are asked, with numbers of words."""
    return [(name, words) for name, counts in BODIES.items() for words in counts]


def short_cuts(protocol: int) -> list[ShortCut]:
    """Return the short cuts of a version of the protocol."""
    nil = b"_\r\n" if protocol >= 3 else b"$-1\r\n"
    no_pairs, no_items = encode_header(dict, 0, protocol), encode_header(list, 0, protocol)

    def get(found: Found, asked: Iterable[Arguments]) -> list[bytes | None]:
        return [nil if value is None else b"$%d\r\n%b\r\n" % (len(value), value) for value in found]

    def hgetall(found: Found, asked: Iterable[Arguments]) -> list[bytes | None]:
        return [no_pairs if each is None else _pairs(each, protocol) for each in found]

    def hget(found: Found, asked: Iterable[Arguments]) -> list[bytes | None]:
        rows = zip(found, asked, strict=True)
        return get([each and packed_map.find(each, field) for each, (_, field) in rows], ())

    def lrange(found: Found, asked: Iterable[Arguments]) -> list[bytes | None]:
        rows = zip(found, asked, strict=True)
        return [_range(each, start, stop, no_items) for each, (_, start, stop) in rows]

    return [
        ShortCut("get", Kind.VALUE, 2, nil, get),
        ShortCut("hget", Kind.MAP, 3, nil, hget),
        ShortCut("hgetall", Kind.MAP, 2, no_pairs, hgetall),
        ShortCut("lrange", Kind.LIST, 4, no_items, lrange),
    ]


def _pairs(packed: bytes, protocol: int) -> bytes:
    return encode_header(dict, packed_map.count(packed), protocol) + packed_map.body(packed)


def _range(packed: bytes | None, start: bytes, stop: bytes, nothing: bytes) -> bytes | None:
    """Return a range of a list; none of a bad index, and none that is empty: it would count as a missing list."""
    try:
        asked = integer(start), integer(stop)
    except ReplyError:
        return None
    if packed is None:
        return nothing
    first, end = range_of(*asked, packed_list.count(packed))
    return b"*%d\r\n%b" % (end - first, packed_list.part(packed, first, end)) if first < end else None
