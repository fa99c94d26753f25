"""Several sorted sets and sets together: ZUNION, ZINTER, ZDIFF, ZINTERCARD. A set's members have the score 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import NamedTuple

from resp_server.command_table.declaration import OneOrMore, command, integer
from resp_server.commands.generic import SLICE_ENTRIES, in_slices
from resp_server.commands.set import STEP_LOOKUPS, limit_of
from resp_server.commands.steps import PARTS, Held, answered, in_order
from resp_server.execution.context import CommandContext
from resp_server.protocol.doubles import exact_double
from resp_server.protocol.errors import PlainError, WrongTypeError, syntax_error
from resp_server.protocol.replies import Pairs, Reply
from state_backend.model.descriptor import Kind
from state_backend.store.keyspace import KeyspaceView

Scored = tuple[float, bytes]


def _sum(one: float, other: float) -> float:
    total = one + other
    return 0.0 if isnan(total) else total  # infinities that cancel each other out


def _min(one: float, other: float) -> float:
    return other if other < one else one


def _max(one: float, other: float) -> float:
    return other if other > one else one


AGGREGATES: dict[bytes, Callable[[float, float], float]] = {b"SUM": _sum, b"MIN": _min, b"MAX": _max}


class Source(NamedTuple):
    """A sorted set, a set (is_plain), or a missing key (of size 0), and what its scores are multiplied by."""

    key: bytes
    size: int
    is_plain: bool
    weight: float

    def members(self, view: KeyspaceView) -> Iterator[list[tuple[bytes, float]]]:
        """Iterate over slices of (member, score)."""
        if not self.size:
            return
        snapshot = view.at(self.key)
        if self.is_plain:
            for some in in_slices(snapshot.members(self.key), STEP_LOOKUPS):
                yield [(member, 1.0) for member in some]
        else:
            yield from in_slices(snapshot.sorted_members(self.key, 0, self.size), STEP_LOOKUPS)

    def scores(self, view: KeyspaceView, members: Sequence[bytes]) -> list[float | None]:
        """Return the scores of some members; None for one that it has not."""
        snapshot = view.at(self.key)
        if self.is_plain:
            return [1.0 if is_in else None for is_in in snapshot.are_members(self.key, members)]
        return snapshot.scores(self.key, members)

    def weighed(self, score: float) -> float:
        """Return a member's score as it counts."""
        score *= self.weight
        return 0.0 if isnan(score) else score


@dataclass
class Asked:
    """What stands behind the keys."""

    keys: Sequence[bytes]
    weights: list[float] = field(default_factory=list)
    aggregate: Callable[[float, float], float] = _sum
    has_scores: bool = False

    def parse(self, words: Sequence[bytes], *, is_weighed: bool) -> None:
        """Read the options in Redis' order of checks."""
        at = 0
        while at < len(words):
            option, left = words[at].upper(), len(words) - at
            if option == b"WEIGHTS" and is_weighed and left > len(self.keys):
                self.weights = list(map(_weight, words[at + 1 : at + 1 + len(self.keys)]))
                at += len(self.keys)
            elif option == b"AGGREGATE" and is_weighed and left >= 2:
                at += 1
                if words[at].upper() not in AGGREGATES:
                    raise syntax_error()
                self.aggregate = AGGREGATES[words[at].upper()]
            elif option == b"WITHSCORES":
                self.has_scores = True
            else:
                raise syntax_error()
            at += 1


def _weight(word: bytes) -> float:
    weight = exact_double(word)
    if weight is None:
        raise PlainError("weight value is not a float")
    return weight


def _keys(name: str, number: bytes, words: Sequence[bytes]) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """Read `numkeys key ...`; return the keys and what is behind them."""
    count = integer(number)
    if count < 1:
        raise PlainError(f"at least 1 input key is needed for '{name}' command")
    if count > len(words):
        raise syntax_error()
    return words[:count], words[count:]


def _kind(view: KeyspaceView, key: bytes) -> Kind | None:
    """Return which kind of a set a key has; None for a missing one."""
    entry = view.at(key).entry(key)
    if entry is not None and entry.kind not in (Kind.SET, Kind.SORTED_SET):
        raise WrongTypeError
    return None if entry is None else entry.kind


def _source(view: KeyspaceView, key: bytes, weight: float) -> Source:
    kind = _kind(view, key)
    snapshot = view.at(key)
    if kind is None:
        return Source(key, 0, False, weight)
    size = snapshot.set_size(key) if kind is Kind.SET else snapshot.sorted_size(key)
    return Source(key, size, kind is Kind.SET, weight)


Join = Callable[[KeyspaceView, Sequence[Source], Asked], Iterator[Sequence[Scored]]]


@command("zunion")
def zunion(context: CommandContext, number: bytes, *words: OneOrMore) -> Reply:
    """Returns the union of multiple sorted sets."""
    return _joined(context, "zunion", number, words, _union)


@command("zinter")
def zinter(context: CommandContext, number: bytes, *words: OneOrMore) -> Reply:
    """Returns the intersect of multiple sorted sets."""
    return _joined(context, "zinter", number, words, _common)


@command("zdiff")
def zdiff(context: CommandContext, number: bytes, *words: OneOrMore) -> Reply:
    """Returns the difference between multiple sorted sets."""
    return _joined(context, "zdiff", number, words, _difference)


def _joined(context: CommandContext, name: str, number: bytes, words: Sequence[bytes], join: Join) -> Reply:
    """Answer what several sets make together, by score."""
    asked = Asked(*_keys(name, number, words)[:1])
    is_little = _look(context, asked.keys)
    asked.parse(words[len(asked.keys) :], is_weighed=join is not _difference)

    def steps(view: KeyspaceView) -> Iterator[Sequence[Reply]]:
        sources: list[Source] = []
        for some in in_slices(zip(asked.keys, asked.weights or [1.0] * len(asked.keys), strict=True)):
            sources += [_source(view, key, weight) for key, weight in some]
            yield []
        for some in in_order(join(view, sources, asked), 0, sum(source.size for source in sources)):
            yield [(member, score) if asked.has_scores else member for score, member in some]

    return answered(context, steps, is_little, Pairs if asked.has_scores else list)


def _look(context: CommandContext, keys: Sequence[bytes]) -> bool:
    """Tell whether sets are small, all together. A key of another kind is said before a wrong option."""
    if len(keys) > SLICE_ENTRIES:
        return False
    sources = [_source(context.view, key, 1.0) for key in keys]
    return sum(context.counted(source.size or None) or 0 for source in sources) <= SLICE_ENTRIES


@command("zintercard")
def zintercard(context: CommandContext, number: bytes, *words: OneOrMore) -> Reply:
    """Returns the number of members of the intersect of multiple sorted sets."""
    keys, rest = _keys("zintercard", number, words)
    is_little = _look(context, keys)
    limit = limit_of(rest)

    def steps(view: KeyspaceView) -> Iterator[Sequence[int]]:
        found = 0
        for some in _common(view, [_source(view, key, 1.0) for key in keys], Asked(keys)):
            yield [min(len(some), limit - found) if limit else len(some)]
            found += len(some)
            if 0 < limit <= found:
                return

    return answered(context, steps, is_little, int)


def _union(view: KeyspaceView, sources: Sequence[Source], asked: Asked) -> Iterator[Sequence[Scored]]:
    """Add up scores, smaller sets first, as Redis does: sums of doubles depend on the order."""
    parts: list[dict[bytes, float]] = [{} for _ in range(PARTS)]
    held = Held()
    for source in sorted(sources, key=lambda each: each.size):
        for some in source.members(view):
            new = []
            for member, score in some:
                part, weighed = parts[hash(member) % PARTS], source.weighed(score)
                before = part.get(member)
                part[member] = weighed if before is None else asked.aggregate(before, weighed)
                if before is None:
                    new.append(member)
            held.add(new)
            yield []
    while parts:
        for pairs in in_slices(parts.pop().items()):
            yield [(score, member) for member, score in pairs]


def _common(view: KeyspaceView, sources: Sequence[Source], asked: Asked) -> Iterator[Sequence[Scored]]:
    """Look which members of the smallest set are in all others, smaller ones first."""
    first, *others = sorted(sources, key=lambda each: each.size)
    held = Held()
    for some in first.members(view):
        left = [(member, first.weighed(score)) for member, score in some]
        for other in others:
            found = other.scores(view, [member for member, _ in left])
            left = [
                (member, asked.aggregate(score, more * other.weight))
                for (member, score), more in zip(left, found, strict=True)
                if more is not None
            ]
            yield []
        held.add(member for member, _ in left)
        yield [(score, member) for member, score in left]


def _difference(view: KeyspaceView, sources: Sequence[Source], asked: Asked) -> Iterator[Sequence[Scored]]:
    """Look which members of the first set are in none of the others."""
    first, *others = sources
    held = Held()
    for left in first.members(view):
        for other in others:
            if other.size:
                found = other.scores(view, [member for member, _ in left])
                left = [pair for pair, score in zip(left, found, strict=True) if score is None]
            yield []
        held.add(member for member, _ in left)
        yield [(score, member) for member, score in left]
