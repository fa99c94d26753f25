"""Operations on several sorted sets or sets: ZUNION, ZINTER, ZDIFF, ZINTERCARD. A set's members have the score 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import NamedTuple

from resp_server.command.handler import OneOrMore, command, integer
from resp_server.commands.set import limit_of
from resp_server.commands.sliced_reply import (
    CHUNK_ITEMS_MAX,
    WorkingMemory,
    batched,
    partitions_for,
    reply_of_chunks,
    sorted_chunks,
)
from resp_server.limits import LOOKUPS_PER_STEP
from resp_server.pipeline.context import ReadContext
from resp_server.protocol.doubles import strict_double
from resp_server.protocol.errors import GenericError, WrongTypeError, syntax_error
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


class WeightedSet(NamedTuple):
    """A sorted set, a set (is_plain_set) or a missing key (size 0), and the weight of its scores."""

    key: bytes
    size: int
    is_plain_set: bool
    weight: float

    def members(self, view: KeyspaceView) -> Iterator[list[tuple[bytes, float]]]:
        """Iterate over chunks of (member, score)."""
        if not self.size:
            return
        snapshot = view.at(self.key)
        if self.is_plain_set:
            for batch in batched(snapshot.members(self.key), LOOKUPS_PER_STEP):
                yield [(member, 1.0) for member in batch]
        else:
            yield from batched(snapshot.sorted_members(self.key, 0, self.size), LOOKUPS_PER_STEP)

    def scores(self, view: KeyspaceView, members: Sequence[bytes]) -> list[float | None]:
        """Return the scores of members; None for a member that the set lacks."""
        snapshot = view.at(self.key)
        if self.is_plain_set:
            return [1.0 if is_in else None for is_in in snapshot.are_members(self.key, members)]
        return snapshot.scores(self.key, members)

    def weighted_score(self, score: float) -> float:
        """Return a score times the weight."""
        score *= self.weight
        return 0.0 if isnan(score) else score


@dataclass
class AlgebraQuery:
    """The keys and options of a request."""

    keys: Sequence[bytes]
    weights: list[float] = field(default_factory=list)
    aggregate: Callable[[float, float], float] = _sum
    has_scores: bool = False

    def parse(self, arguments: Sequence[bytes], *, takes_weights: bool) -> None:
        """Parse the options in Redis' order of checks."""
        at = 0
        while at < len(arguments):
            option, remaining = arguments[at].upper(), len(arguments) - at
            if option == b"WEIGHTS" and takes_weights and remaining > len(self.keys):
                self.weights = list(map(_weight, arguments[at + 1 : at + 1 + len(self.keys)]))
                at += len(self.keys)
            elif option == b"AGGREGATE" and takes_weights and remaining >= 2:
                at += 1
                if arguments[at].upper() not in AGGREGATES:
                    raise syntax_error()
                self.aggregate = AGGREGATES[arguments[at].upper()]
            elif option == b"WITHSCORES":
                self.has_scores = True
            else:
                raise syntax_error()
            at += 1


def _weight(argument: bytes) -> float:
    weight = strict_double(argument)
    if weight is None:
        raise GenericError("weight value is not a float")
    return weight


def _keys(name: str, number: bytes, arguments: Sequence[bytes]) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """Parse `numkeys key ...`; return the keys and the arguments after them."""
    count = integer(number)
    if count < 1:
        raise GenericError(f"at least 1 input key is needed for '{name}' command")
    if count > len(arguments):
        raise syntax_error()
    return arguments[:count], arguments[count:]


def _kind(view: KeyspaceView, key: bytes) -> Kind | None:
    """Return a key's kind, SET or SORTED_SET; None for a missing key."""
    info = view.at(key).key_info(key)
    if info is not None and info.kind not in (Kind.SET, Kind.SORTED_SET):
        raise WrongTypeError
    return None if info is None else info.kind


def _operand(view: KeyspaceView, key: bytes, weight: float) -> WeightedSet:
    kind = _kind(view, key)
    snapshot = view.at(key)
    if kind is None:
        return WeightedSet(key, 0, False, weight)
    size = snapshot.set_size(key) if kind is Kind.SET else snapshot.sorted_size(key)
    return WeightedSet(key, size, kind is Kind.SET, weight)


CombineWeightedSets = Callable[[KeyspaceView, Sequence[WeightedSet], AlgebraQuery], Iterator[Sequence[Scored]]]


@command("zunion")
def zunion(context: ReadContext, number: bytes, *arguments: OneOrMore) -> Reply:
    """Returns the union of multiple sorted sets."""
    return _combined(context, "zunion", number, arguments, _union)


@command("zinter")
def zinter(context: ReadContext, number: bytes, *arguments: OneOrMore) -> Reply:
    """Returns the intersect of multiple sorted sets."""
    return _combined(context, "zinter", number, arguments, _intersection)


@command("zdiff")
def zdiff(context: ReadContext, number: bytes, *arguments: OneOrMore) -> Reply:
    """Returns the difference between multiple sorted sets."""
    return _combined(context, "zdiff", number, arguments, _difference)


def _combined(
    context: ReadContext, name: str, number: bytes, arguments: Sequence[bytes], combine: CombineWeightedSets
) -> Reply:
    """Return the reply of an operation on several sets, ordered by score."""
    query = AlgebraQuery(*_keys(name, number, arguments)[:1])
    is_small = _are_small(context, query.keys)
    query.parse(arguments[len(query.keys) :], takes_weights=combine is not _difference)

    def chunks(view: KeyspaceView) -> Iterator[Sequence[Reply]]:
        operands: list[WeightedSet] = []
        for batch in batched(zip(query.keys, query.weights or [1.0] * len(query.keys), strict=True)):
            operands += [_operand(view, key, weight) for key, weight in batch]
            yield []
        for batch in sorted_chunks(combine(view, operands, query), 0, sum(operand.size for operand in operands)):
            yield [(member, score) if query.has_scores else member for score, member in batch]

    return reply_of_chunks(context, chunks, is_small, Pairs if query.has_scores else list)


def _are_small(context: ReadContext, keys: Sequence[bytes]) -> bool:
    """Return whether the sets are small in total. A wrong type is reported here, before options are parsed."""
    if len(keys) > CHUNK_ITEMS_MAX:
        return False
    operands = [_operand(context.view, key, 1.0) for key in keys]
    return sum(context.counted(operand.size or None) or 0 for operand in operands) <= CHUNK_ITEMS_MAX


@command("zintercard")
def zintercard(context: ReadContext, number: bytes, *arguments: OneOrMore) -> Reply:
    """Returns the number of members of the intersect of multiple sorted sets."""
    keys, rest = _keys("zintercard", number, arguments)
    is_small = _are_small(context, keys)
    limit = limit_of(rest)

    def chunks(view: KeyspaceView) -> Iterator[Sequence[int]]:
        found = 0
        for batch in _intersection(view, [_operand(view, key, 1.0) for key in keys], AlgebraQuery(keys)):
            yield [min(len(batch), limit - found) if limit else len(batch)]
            found += len(batch)
            if 0 < limit <= found:
                return

    return reply_of_chunks(context, chunks, is_small, int)


def _union(view: KeyspaceView, operands: Sequence[WeightedSet], query: AlgebraQuery) -> Iterator[Sequence[Scored]]:
    """Aggregate scores from the smallest set on, as Redis does: a sum of doubles depends on the order."""
    count = partitions_for(sum(operand.size for operand in operands))
    partitions: list[dict[bytes, float]] = [{} for _ in range(count)]
    memory = WorkingMemory()
    for operand in sorted(operands, key=lambda each: each.size):
        for batch in operand.members(view):
            new = []
            for member, score in batch:
                partition, weighted_score = partitions[hash(member) % count], operand.weighted_score(score)
                previous = partition.get(member)
                partition[member] = weighted_score if previous is None else query.aggregate(previous, weighted_score)
                if previous is None:
                    new.append(member)
            memory.add(new)
            yield []
    while partitions:
        for pairs in batched(partitions.pop().items()):
            yield [(score, member) for member, score in pairs]


def _intersection(
    view: KeyspaceView, operands: Sequence[WeightedSet], query: AlgebraQuery
) -> Iterator[Sequence[Scored]]:
    """Look the smallest set's members up in all others, smaller ones first."""
    first, *others = sorted(operands, key=lambda each: each.size)
    memory = WorkingMemory()
    for batch in first.members(view):
        remaining = [(member, first.weighted_score(score)) for member, score in batch]
        for other in others:
            found = other.scores(view, [member for member, _ in remaining])
            remaining = [
                (member, query.aggregate(score, other_score * other.weight))
                for (member, score), other_score in zip(remaining, found, strict=True)
                if other_score is not None
            ]
            yield []
        memory.add(member for member, _ in remaining)
        yield [(score, member) for member, score in remaining]


def _difference(view: KeyspaceView, operands: Sequence[WeightedSet], query: AlgebraQuery) -> Iterator[Sequence[Scored]]:
    """Look the first set's members up in all others."""
    first, *others = operands
    memory = WorkingMemory()
    for remaining in first.members(view):
        for other in others:
            if other.size:
                found = other.scores(view, [member for member, _ in remaining])
                remaining = [pair for pair, score in zip(remaining, found, strict=True) if score is None]
            yield []
        memory.add(member for member, _ in remaining)
        yield [(score, member) for member, score in remaining]
