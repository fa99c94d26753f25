"""Sorted-set states as Redis sorted sets: members, scores, ranks, ranges. Set operations: `sorted_set_algebra`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from random import randrange

from resp_server.command.handler import OneOrMore, command, integer
from resp_server.commands.generic import Cursor, ScanOptions, scan_reply
from resp_server.commands.list import range_of
from resp_server.commands.random_items import ItemSource, count_and_option, random_item, random_items
from resp_server.commands.sliced_reply import BYTES_AT_ONCE_MAX, CHUNK_ITEMS_MAX, batched, reply_of_chunks, sliced_reply
from resp_server.pipeline.context import ReadContext
from resp_server.protocol.doubles import double_text, read_double
from resp_server.protocol.errors import GenericError, WrongTypeError, syntax_error, wrong_arity
from resp_server.protocol.replies import NULL_ARRAY, Pairs, Reply
from state_backend.codec.packed_sorted import MEMBERS_MAX
from state_backend.model.descriptor import Kind
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import Snapshot


@command("zcard")
def zcard(context: ReadContext, key: bytes) -> int:
    """Returns the number of members in a sorted set."""
    return context.counted(context.at(key).sorted_size(key) or None) or 0


@command("zscore")
def zscore(context: ReadContext, key: bytes, member: bytes) -> float | None:
    """Returns the score of a member in a sorted set."""
    return context.counted(context.at(key).scores(key, (member,))[0])


@command("zmscore")
def zmscore(context: ReadContext, key: bytes, *members: OneOrMore) -> Reply:
    """Returns the score of one or more members in a sorted set."""
    context.counted(context.at(key).sorted_size(key) or None)

    def chunks(view: KeyspaceView) -> Iterator[Sequence[float | None]]:
        return (view.at(key).scores(key, batch) for batch in batched(members))

    return reply_of_chunks(context, chunks, len(members) <= CHUNK_ITEMS_MAX)


@command("zrank")
def zrank(context: ReadContext, key: bytes, member: bytes, *arguments: bytes) -> Reply:
    """Returns the index of a member in a sorted set ordered by ascending scores."""
    return _rank(context, "zrank", key, member, arguments)


@command("zrevrank")
def zrevrank(context: ReadContext, key: bytes, member: bytes, *arguments: bytes) -> Reply:
    """Returns the index of a member in a sorted set ordered by descending scores."""
    return _rank(context, "zrevrank", key, member, arguments)


def _rank(context: ReadContext, name: str, key: bytes, member: bytes, arguments: Sequence[bytes]) -> Reply:
    if len(arguments) > 1:
        raise wrong_arity(name)
    if arguments and arguments[0].upper() != b"WITHSCORE":
        raise syntax_error()
    snapshot = context.at(key)
    rank = context.counted(snapshot.ranks(key, (member,))[0])
    if rank is None:
        return NULL_ARRAY if arguments else None
    if name == "zrevrank":
        rank = snapshot.sorted_size(key) - 1 - rank
    return [rank, snapshot.scores(key, (member,))[0]] if arguments else rank


@dataclass(frozen=True)
class RankRange:
    """Ranks `start` to `stop`, both inclusive; negative ranks count from the end."""

    start: int
    stop: int
    is_reversed: bool = False

    def ranks(self, snapshot: Snapshot, key: bytes, size: int) -> tuple[int, int]:
        first, end = range_of(self.start, self.stop, size)
        return (size - end, size - first) if self.is_reversed and end else (first, end)


@dataclass(frozen=True)
class ScoreRange:
    """Members whose scores are in a range."""

    low: float
    high: float
    excludes_low: bool
    excludes_high: bool

    @classmethod
    def parse(cls, low: bytes, high: bytes) -> ScoreRange:
        """Parse both ends: `1.5`, `(1.5` (exclusive), `-inf`."""
        ends = [read_double(argument[1:] if argument[:1] == b"(" else argument) for argument in (low, high)]
        if ends[0] is None or ends[1] is None:
            raise GenericError("min or max is not a float")
        return cls(ends[0].value, ends[1].value, low[:1] == b"(", high[:1] == b"(")

    def ranks(self, snapshot: Snapshot, key: bytes, size: int) -> tuple[int, int]:
        first = snapshot.rank_of_score(key, self.low, self.excludes_low)
        return first, max(first, snapshot.rank_of_score(key, self.high, not self.excludes_high))


@dataclass(frozen=True)
class TextRange:
    """Members in a lexicographical range of a set in which all members have the same score.

    Args:
        low, high: None for `-`, `+`.
        is_reversed: The search begins at the highest member; if scores differ, it finds another range.
    """

    low: bytes | None
    high: bytes | None
    excludes_low: bool = False
    excludes_high: bool = False
    is_empty: bool = False
    is_reversed: bool = False

    @classmethod
    def parse(cls, low: bytes, high: bytes, is_reversed: bool = False) -> TextRange:
        """Parse both ends: `[a`, `(a` (exclusive), `-`, `+`."""
        for argument in (low, high):
            if argument[:1] not in (b"[", b"(") and argument.partition(b"\0")[0] not in (b"-", b"+"):
                raise GenericError("min or max not valid string range item")
        is_empty = low[:1] == b"+" or high[:1] == b"-"
        texts = [None if argument[:1] in (b"-", b"+") else argument[1:] for argument in (low, high)]
        return cls(texts[0], texts[1], low[:1] == b"(", high[:1] == b"(", is_empty, is_reversed)

    def ranks(self, snapshot: Snapshot, key: bytes, size: int) -> tuple[int, int]:
        if self.is_empty:
            return 0, 0
        if size <= MEMBERS_MAX:
            return self._ranks_of([member for member, _ in snapshot.sorted_members(key, 0, size)])
        first = 0 if self.low is None else snapshot.rank_of_member(key, self.low, self.excludes_low)
        end = size if self.high is None else snapshot.rank_of_member(key, self.high, not self.excludes_high)
        return first, max(first, end)

    def _ranks_of(self, members: Sequence[bytes]) -> tuple[int, int]:
        """Compare members one by one, as Redis does in a small set, so that results are equal even if scores differ."""
        if not members or not self._is_above_low(members[-1]) or not self._is_below_high(members[0]):
            return 0, 0
        if self.is_reversed:
            end = next(index for index in range(len(members), 0, -1) if self._is_below_high(members[index - 1]))
            return next((index for index in range(end, 0, -1) if not self._is_above_low(members[index - 1])), 0), end
        first = next(index for index, member in enumerate(members) if self._is_above_low(member))
        return first, next(
            (index for index in range(first, len(members)) if not self._is_below_high(members[index])), len(members)
        )

    def _is_above_low(self, member: bytes) -> bool:
        return self.low is None or (member > self.low if self.excludes_low else member >= self.low)

    def _is_below_high(self, member: bytes) -> bool:
        return self.high is None or (member < self.high if self.excludes_high else member <= self.high)


# A range of members. `ranks` returns it as ranks from the lowest score, first and end (exclusive), in a set of `size`
# members.
MemberRange = RankRange | ScoreRange | TextRange


@dataclass
class RangeQuery:
    """A range with its direction, LIMIT (offset, count: negative for all) and WITHSCORES."""

    member_range: MemberRange
    is_reversed: bool
    has_scores: bool
    offset: int = 0
    count: int = -1

    @classmethod
    def parse(
        cls,
        low: bytes,
        high: bytes,
        arguments: Sequence[bytes],
        range_type: type[RankRange] | type[ScoreRange] | type[TextRange] | None,
        is_reversed: bool | None,
    ) -> RangeQuery:
        """Parse the arguments after the key in Redis' order of checks.

        Args:
            range_type, is_reversed: Fixed by the command; None where options choose (ZRANGE).
        """
        has_scores, offset, count = False, 0, -1
        at = 0
        while at < len(arguments):
            option, remaining = arguments[at].upper(), len(arguments) - at - 1
            if option == b"WITHSCORES":
                has_scores = True
            elif option == b"LIMIT" and remaining >= 2:
                offset, count = integer(arguments[at + 1]), integer(arguments[at + 2])
                at += 2
            elif option == b"REV" and is_reversed is None:
                is_reversed = True
            elif option in (b"BYLEX", b"BYSCORE") and range_type is None:
                range_type = TextRange if option == b"BYLEX" else ScoreRange
            else:
                raise syntax_error()
            at += 1
        if count != -1 and range_type in (None, RankRange):
            raise GenericError("syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX")
        if has_scores and range_type is TextRange:
            raise GenericError("syntax error, WITHSCORES not supported in combination with BYLEX")
        if is_reversed and range_type in (ScoreRange, TextRange):
            low, high = high, low
        found: MemberRange
        if range_type is ScoreRange:
            found = ScoreRange.parse(low, high)
        elif range_type is TextRange:
            found = TextRange.parse(low, high, bool(is_reversed))
        else:
            found = RankRange(integer(low), integer(high), bool(is_reversed))
            offset = 0  # Redis ignores `LIMIT offset -1` here
        return cls(found, bool(is_reversed), has_scores, offset, count)

    def ranks(self, snapshot: Snapshot, key: bytes, size: int) -> tuple[int, int]:
        """Return the limited range as ranks from the lowest score, first and end (exclusive)."""
        first, end = self.member_range.ranks(snapshot, key, size)
        if self.offset < 0:
            return 0, 0
        remaining = max(0, end - first - self.offset)
        length = remaining if self.count < 0 else min(remaining, self.count)
        if self.is_reversed:
            return end - self.offset - length, end - self.offset
        return first + self.offset, first + self.offset + length


def _range(context: ReadContext, key: bytes, query: RangeQuery) -> Reply:
    snapshot = context.at(key)
    size = context.counted(snapshot.sorted_size(key) or None)
    if size is None:
        return []
    first, end = query.ranks(snapshot, key, size)
    if end - first <= CHUNK_ITEMS_MAX:
        pairs = list(snapshot.sorted_members(key, first, end, query.is_reversed))
        if sum(len(member) for member, _ in pairs) <= BYTES_AT_ONCE_MAX:
            return Pairs(pairs) if query.has_scores else [member for member, _ in pairs]

    # The reply may be computed again from a newer view, in which the set has another size.
    def ranks(view: KeyspaceView) -> tuple[int, int]:
        return query.ranks(view.at(key), key, view.at(key).sorted_size(key))

    def chunks(view: KeyspaceView) -> Iterator[Sequence[Reply]]:
        found = view.at(key).sorted_members(key, *ranks(view), query.is_reversed)
        return (Pairs(batch) if query.has_scores else [member for member, _ in batch] for batch in batched(found))

    def count(view: KeyspaceView) -> int:
        first, end = ranks(view)
        return end - first

    return sliced_reply(context, chunks, Pairs if query.has_scores else list, count)


@command("zrange")
def zrange(context: ReadContext, key: bytes, start: bytes, stop: bytes, *arguments: bytes) -> Reply:
    """Returns members in a sorted set within a range of indexes."""
    return _range(context, key, RangeQuery.parse(start, stop, arguments, None, None))


@command("zrevrange")
def zrevrange(context: ReadContext, key: bytes, start: bytes, stop: bytes, *arguments: bytes) -> Reply:
    """Returns members in a sorted set within a range of indexes in reverse order."""
    return _range(context, key, RangeQuery.parse(start, stop, arguments, RankRange, True))


@command("zrangebyscore")
def zrangebyscore(context: ReadContext, key: bytes, low: bytes, high: bytes, *arguments: bytes) -> Reply:
    """Returns members in a sorted set within a range of scores."""
    return _range(context, key, RangeQuery.parse(low, high, arguments, ScoreRange, False))


@command("zrevrangebyscore")
def zrevrangebyscore(context: ReadContext, key: bytes, high: bytes, low: bytes, *arguments: bytes) -> Reply:
    """Returns members in a sorted set within a range of scores in reverse order."""
    return _range(context, key, RangeQuery.parse(high, low, arguments, ScoreRange, True))


@command("zrangebylex")
def zrangebylex(context: ReadContext, key: bytes, low: bytes, high: bytes, *arguments: bytes) -> Reply:
    """Returns members in a sorted set within a lexicographical range."""
    return _range(context, key, RangeQuery.parse(low, high, arguments, TextRange, False))


@command("zrevrangebylex")
def zrevrangebylex(context: ReadContext, key: bytes, high: bytes, low: bytes, *arguments: bytes) -> Reply:
    """Returns members in a sorted set within a lexicographical range in reverse order."""
    return _range(context, key, RangeQuery.parse(high, low, arguments, TextRange, True))


@command("zcount")
def zcount(context: ReadContext, key: bytes, low: bytes, high: bytes) -> int:
    """Returns the count of members in a sorted set that have scores within a range."""
    return _count(context, key, ScoreRange.parse(low, high))


@command("zlexcount")
def zlexcount(context: ReadContext, key: bytes, low: bytes, high: bytes) -> int:
    """Returns the number of members in a sorted set within a lexicographical range."""
    return _count(context, key, TextRange.parse(low, high))


def _count(context: ReadContext, key: bytes, member_range: MemberRange) -> int:
    size = context.counted(context.at(key).sorted_size(key) or None)
    if size is None:
        return 0
    first, end = member_range.ranks(context.at(key), key, size)
    return end - first


@command("zrandmember")
def zrandmember(context: ReadContext, key: bytes, *arguments: bytes) -> Reply:
    """Returns one or more random members from a sorted set."""
    count, has_scores = count_and_option(arguments, b"WITHSCORES") if arguments else (None, False)
    context.counted(context.at(key).sorted_size(key) or None)

    def members(view: KeyspaceView, start: int, stop: int) -> Iterator[bytes | tuple[bytes, float]]:
        found = view.at(key).sorted_members(key, start, stop)
        return found if has_scores else (member for member, _ in found)

    def draw(view: KeyspaceView) -> Iterator[bytes | tuple[bytes, float]]:
        rank = randrange(size(view))
        return members(view, rank, rank + 1)

    def size(view: KeyspaceView) -> int:
        return view.at(key).sorted_size(key)

    item_source = ItemSource(size, lambda view: members(view, 0, size(view)), draw)
    if count is None:
        return random_item(context, item_source)
    return random_items(context, item_source, count, Pairs if has_scores else list)


@command("zscan")
def zscan(context: ReadContext, key: bytes, cursor: Cursor, *arguments: bytes) -> Reply:
    """Iterates over members and scores of a sorted set."""
    info = context.key_info(key)
    if info is None:
        return [b"0", []]
    if info.kind is not Kind.SORTED_SET:
        raise WrongTypeError
    options = ScanOptions.parse(arguments, "zscan")
    next_cursor, members = context.at(key).scan_sorted(key, cursor, options.count)
    return scan_reply(
        next_cursor,
        members,
        options.matches,
        itemgetter(0),
        lambda found: [text for member, score in found for text in (member, double_text(score))],
    )
