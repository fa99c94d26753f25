"""GEO's reads on sorted-set states whose scores are places (`state_backend.codec.geohash` says how).

A search looks through the ranges of scores of the nine squares of the map that cover what is asked for, as Redis does:
what it costs depends on what is there, not on the size of the set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from operator import itemgetter
from sys import maxsize
from typing import NamedTuple

from resp_server.command_table.declaration import NameAsTyped, OneOrMore, command, integer
from resp_server.commands.generic import in_slices
from resp_server.commands.steps import Held, answered, in_order
from resp_server.execution.context import CommandContext
from resp_server.protocol.doubles import exact_double
from resp_server.protocol.errors import PlainError, syntax_error, typed
from resp_server.protocol.replies import NO_ARRAY, DoubleText, Reply
from state_backend.codec.geohash import (
    Box,
    Circle,
    Place,
    Shape,
    as_signed,
    cells_of,
    degrees_text,
    distance,
    distance_text,
    geohash_text,
    is_place,
    place_of,
)
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import Snapshot

# Meters of a unit.
UNITS = {b"m": 1.0, b"km": 1000.0, b"ft": 0.3048, b"mi": 1609.34}

# Members that are looked at in one step: 3 us each (measured).
STEP_MEMBERS = 128
# Of so few wanted results only the best so far are held.
NEAREST_MAX = 512


def _number(word: bytes, error: str = "value is not a valid float") -> float:
    found = exact_double(word)
    if found is None:
        raise PlainError(error)
    return found


def _unit(word: bytes) -> float:
    unit = UNITS.get(word.lower())
    if unit is None:
        raise PlainError("unsupported unit provided. please use M, KM, FT, MI")
    return unit


def _place(words: Sequence[bytes]) -> Place:
    longitude, latitude = _number(words[0]), _number(words[1])
    if not is_place(longitude, latitude):
        raise PlainError(f"invalid longitude,latitude pair {longitude:f},{latitude:f}")
    return longitude, latitude


def _degrees(place: Place) -> Reply:
    return [DoubleText(degrees_text(each)) for each in place]


@command("geopos")
def geopos(context: CommandContext, key: bytes, *members: bytes) -> Reply:
    """Returns the longitude and latitude of members from a geospatial index."""
    return _of_members(context, key, members, lambda score: NO_ARRAY if score is None else _degrees(place_of(score)))


@command("geohash")
def geohash(context: CommandContext, key: bytes, *members: bytes) -> Reply:
    """Returns members from a geospatial index as geohash strings."""
    return _of_members(context, key, members, lambda score: None if score is None else geohash_text(score))


def _of_members(
    context: CommandContext, key: bytes, members: Sequence[bytes], shown: Callable[[float | None], Reply]
) -> Reply:
    """Answer something for each member's score, or for None."""
    context.counted(context.at(key).sorted_size(key) or None)

    def steps(view: KeyspaceView) -> Iterator[Sequence[Reply]]:
        return (list(map(shown, view.at(key).scores(key, some))) for some in in_slices(members, STEP_MEMBERS))

    return answered(context, steps, len(members) <= STEP_MEMBERS)


@command("geodist")
def geodist(context: CommandContext, key: bytes, one: bytes, other: bytes, *unit: bytes) -> Reply:
    """Returns the distance between two members of a geospatial index."""
    if len(unit) > 1:
        raise syntax_error()
    meters = _unit(unit[0]) if unit else 1.0
    snapshot = context.at(key)
    if context.counted(snapshot.sorted_size(key) or None) is None:
        return None
    first, second = snapshot.scores(key, (one, other))
    if first is None or second is None:
        return None
    return distance_text(distance(place_of(first), place_of(second)), meters)


class Order(Enum):
    """How the results of a search are ordered: by their distance, or as they are found."""

    NEAREST_FIRST = auto()
    FARTHEST_FIRST = auto()


class Found(NamedTuple):
    """A member that a search has found. meters: from the middle of what is searched."""

    meters: float
    member: bytes
    score: float


@dataclass
class Search:
    """What a search asks for, as far as it was read. member: the middle, where it is one; count: 0 for all.

    box: width and height; both, and the radius, are in units of so many meters.
    """

    place: Place | None = None
    member: bytes | None = None
    radius: float | None = None
    box: tuple[float, float] | None = None
    unit: float = 1.0
    has_distance: bool = False
    has_hash: bool = False
    has_place: bool = False
    is_any: bool = False
    order: Order | None = None
    count: int = 0

    def read_radius(self, words: Sequence[bytes]) -> None:
        """Read `radius unit`."""
        radius = _number(words[0], "need numeric radius")
        if radius < 0:
            raise PlainError("radius cannot be negative")
        self.radius, self.unit = radius, _unit(words[1])

    def _read_box(self, words: Sequence[bytes]) -> None:
        width = _number(words[0], "need numeric width")
        height = _number(words[1], "need numeric height")
        if width < 0 or height < 0:
            raise PlainError("height or width cannot be negative")
        self.box, self.unit = (width, height), _unit(words[2])

    def read_options(self, words: Sequence[bytes], take_own: Callable[[bytes, Sequence[bytes]], int]) -> None:
        """Read all options in Redis' order of checks.

        take_own: reads an option that not all searches have, given the words behind it; returns how many were its.
        """
        at = 0
        while at < len(words):
            option, behind = words[at].upper(), words[at + 1 :]
            at += 1
            if option == b"WITHDIST":
                self.has_distance = True
            elif option == b"WITHHASH":
                self.has_hash = True
            elif option == b"WITHCOORD":
                self.has_place = True
            elif option == b"ANY":
                self.is_any = True
            elif option in (b"ASC", b"DESC"):
                self.order = Order.NEAREST_FIRST if option == b"ASC" else Order.FARTHEST_FIRST
            elif option == b"COUNT" and behind:
                self.count = integer(behind[0])
                if self.count <= 0:
                    raise PlainError("COUNT must be > 0")
                at += 1
            else:
                at += take_own(option, behind)

    def check(self) -> None:
        """Refuse what makes no sense, and order what has a count: the nearest are wanted, unless any will do."""
        if self.is_any and not self.count:
            raise PlainError("the ANY argument requires COUNT argument")
        if self.count and self.order is None and not self.is_any:
            self.order = Order.NEAREST_FIRST

    def take_middle_or_shape(
        self, option: bytes, behind: Sequence[bytes], check_member: Callable[[bytes], None]
    ) -> int:
        """Read an option of GEOSEARCH alone; return how many words behind it were its."""
        if option == b"FROMMEMBER" and behind and self.place is None:
            check_member(behind[0])
            self.member = behind[0]
            return 1
        if option == b"FROMLONLAT" and len(behind) >= 2 and self.member is None:
            self.place = _place(behind)
            return 2
        if option == b"BYRADIUS" and len(behind) >= 2 and self.box is None:
            self.read_radius(behind)
            return 2
        if option == b"BYBOX" and len(behind) >= 3 and self.radius is None:
            self._read_box(behind)
            return 3
        raise syntax_error()

    def shape(self, snapshot: Snapshot, key: bytes) -> Shape:
        """Return where to look; PlainError if the member in its middle is not there."""
        place = self.place if self.member is None else _place_of_member(snapshot, key, self.member)
        assert place is not None  # one of both was asked for
        if self.box is not None:
            return Box(place, *self.box, self.unit)
        assert self.radius is not None
        return Circle(place, self.radius * self.unit)

    def row(self, found: Found) -> Reply:
        """Return what is answered of a member."""
        row: list[Reply] = [found.member]
        if self.has_distance:
            row.append(distance_text(found.meters, self.unit))
        if self.has_hash:
            row.append(as_signed(found.score))
        if self.has_place:
            row.append(_degrees(place_of(found.score)))
        return row if len(row) > 1 else found.member


def _place_of_member(snapshot: Snapshot, key: bytes, member: bytes) -> Place:
    score = snapshot.scores(key, (member,))[0]
    if score is None:
        raise PlainError("could not decode requested zset member")
    return place_of(score)


def _refuse(option: bytes, behind: Sequence[bytes]) -> int:
    raise syntax_error()


def _is_there(context: CommandContext, key: bytes) -> bool:
    return context.counted(context.at(key).sorted_size(key) or None) is not None


@command("geosearch")
def geosearch(
    context: CommandContext,
    name: NameAsTyped,
    key: bytes,
    one: bytes,
    two: bytes,
    three: bytes,
    four: bytes,
    *rest: OneOrMore,
) -> Reply:
    """Queries a geospatial index for members inside an area of a box or a circle."""
    is_there, search, words = _is_there(context, key), Search(), (one, two, three, four, *rest)

    def check_member(member: bytes) -> None:
        if is_there:
            _place_of_member(context.at(key), key, member)

    search.read_options(words, lambda option, behind: search.take_middle_or_shape(option, behind, check_member))
    if search.place is None and search.member is None:
        raise PlainError(f"exactly one of FROMMEMBER or FROMLONLAT can be specified for {typed(name)}")
    if search.radius is None and search.box is None:
        raise PlainError(f"exactly one of BYRADIUS and BYBOX can be specified for {typed(name)}")
    search.check()
    return _searched(context, key, search) if is_there else []


@command("georadius_ro")
def georadius_ro(
    context: CommandContext, key: bytes, longitude: bytes, latitude: bytes, radius: bytes, unit: bytes, *words: bytes
) -> Reply:
    """Returns members from a geospatial index that are within a distance from a coordinate."""
    is_there = _is_there(context, key)
    search = Search(place=_place((longitude, latitude)))
    search.read_radius((radius, unit))
    search.read_options(words, _refuse)
    search.check()
    return _searched(context, key, search) if is_there else []


@command("georadiusbymember_ro")
def georadiusbymember_ro(
    context: CommandContext, key: bytes, member: bytes, radius: bytes, unit: bytes, *words: bytes
) -> Reply:
    """Returns members from a geospatial index that are within a distance from a member."""
    is_there, search = _is_there(context, key), Search(member=member)
    if is_there:
        _place_of_member(context.at(key), key, member)
        search.read_radius((radius, unit))
    search.read_options(words, _refuse)
    search.check()
    return _searched(context, key, search) if is_there else []


class Area(NamedTuple):
    """Where to look: a shape, and the ranks of the members in the squares that cover it."""

    shape: Shape
    ranges: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, snapshot: Snapshot, key: bytes, search: Search) -> Area:
        """Find out; PlainError if the member in the middle is not there."""
        shape = search.shape(snapshot, key)
        ends = [[snapshot.rank_of_score(key, score, False) for score in cell.scores] for cell in cells_of(shape)]
        return cls(shape, [(start, max(start, stop)) for start, stop in ends])


def _searched(context: CommandContext, key: bytes, search: Search) -> Reply:
    """Answer a search that was read and makes sense."""
    now = context.view
    area = Area.of(now.at(key), key, search)

    def steps(view: KeyspaceView) -> Iterator[Sequence[Reply]]:
        snapshot = view.at(key)
        found = _found(snapshot, key, search, area if view is now else Area.of(snapshot, key, search))
        for some in _chosen(found, search):
            yield list(map(search.row, some))

    return answered(context, steps, sum(stop - start for start, stop in area.ranges) <= STEP_MEMBERS)


def _chosen(found: Iterator[Sequence[Found]], search: Search) -> Iterator[Sequence[Found]]:
    """Iterate over parts of what is wanted of what was found, in order; empty ones are steps that only worked."""
    if search.order is None:
        yield from found
        return
    is_reversed = search.order is Order.FARTHEST_FIRST
    if 0 < search.count <= NEAREST_MAX and not search.is_any:
        yield from _nearest(found, search.count, is_reversed)
        return
    for some in in_order(_held(found), 0, search.count or maxsize, is_reversed, is_whole=False):
        yield [Found(*each) for each in some]


def _nearest(parts: Iterable[Sequence[Found]], count: int, is_reversed: bool) -> Iterator[Sequence[Found]]:
    """Hold the best of what is found, and return them in order."""
    best: list[Found] = []
    for part in parts:
        if part:
            best = sorted([*best, *part], key=itemgetter(0), reverse=is_reversed)[:count]
        yield []
    yield best


def _held(parts: Iterable[Sequence[Found]]) -> Iterator[Sequence[Found]]:
    """Count what is held until it is ordered."""
    held = Held()
    for part in parts:
        held.add(each.member for each in part)
        yield part


def _found(snapshot: Snapshot, key: bytes, search: Search, area: Area) -> Iterator[Sequence[Found]]:
    """Iterate over parts of what lies in the shape, in Redis' order; with ANY, over as many as are wanted."""
    wanted = search.count if search.is_any else 0
    count = 0
    for start, stop in area.ranges:
        for some in in_slices(snapshot.sorted_members(key, start, stop), STEP_MEMBERS):
            part = []
            for member, score in some:
                meters = area.shape.distance(place_of(score))
                if meters is not None:
                    part.append(Found(meters, member, score))
            if wanted and count + len(part) >= wanted:
                yield part[: wanted - count]
                return
            count += len(part)
            yield part
