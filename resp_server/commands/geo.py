"""GEO reads on sorted-set states whose scores are geohashes (encoded by `state_backend.codec.geohash`).

A search reads the score ranges of the nine map cells that cover the area, as Redis does. Its cost depends on the
members in these cells, not on the size of the set.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from operator import itemgetter
from sys import maxsize
from typing import NamedTuple

from resp_server.command.handler import NameAsTyped, OneOrMore, command, integer
from resp_server.commands.sliced_reply import WorkingMemory, batched, reply_of_chunks, sorted_chunks
from resp_server.pipeline.context import ReadContext
from resp_server.protocol.doubles import strict_double
from resp_server.protocol.errors import GenericError, client_text, syntax_error
from resp_server.protocol.replies import NULL_ARRAY, DoubleText, Reply
from state_backend.codec.geohash import (
    Box,
    Circle,
    Point,
    Shape,
    as_signed,
    degrees_text,
    distance,
    distance_text,
    geohash_text,
    is_point,
    point_of,
    score_ranges,
)
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import Snapshot

# Meters per unit.
UNITS = {b"m": 1.0, b"km": 1000.0, b"ft": 0.3048, b"mi": 1609.34}

# Members of one step: 3 us each (measured).
CHUNK_MEMBERS = 128
# Up to this COUNT a search keeps only the best results so far; above, it sorts all.
NEAREST_MAX = 512


def _float(argument: bytes, error: str = "value is not a valid float") -> float:
    found = strict_double(argument)
    if found is None:
        raise GenericError(error)
    return found


def _unit(argument: bytes) -> float:
    unit = UNITS.get(argument.lower())
    if unit is None:
        raise GenericError("unsupported unit provided. please use M, KM, FT, MI")
    return unit


def _point(arguments: Sequence[bytes]) -> Point:
    longitude, latitude = _float(arguments[0]), _float(arguments[1])
    if not is_point(longitude, latitude):
        raise GenericError(f"invalid longitude,latitude pair {longitude:f},{latitude:f}")
    return longitude, latitude


def _degrees(point: Point) -> Reply:
    return [DoubleText(degrees_text(each)) for each in point]


@command("geopos")
def geopos(context: ReadContext, key: bytes, *members: bytes) -> Reply:
    """Returns the longitude and latitude of members from a geospatial index."""
    return _per_member(context, key, members, lambda score: NULL_ARRAY if score is None else _degrees(point_of(score)))


@command("geohash")
def geohash(context: ReadContext, key: bytes, *members: bytes) -> Reply:
    """Returns members from a geospatial index as geohash strings."""
    return _per_member(context, key, members, lambda score: None if score is None else geohash_text(score))


def _per_member(
    context: ReadContext, key: bytes, members: Sequence[bytes], render: Callable[[float | None], Reply]
) -> Reply:
    """Return an array with one item per member; `render` makes it from the member's score, None for a missing one."""
    context.counted(context.at(key).sorted_size(key) or None)

    def chunks(view: KeyspaceView) -> Iterator[Sequence[Reply]]:
        return (list(map(render, view.at(key).scores(key, batch))) for batch in batched(members, CHUNK_MEMBERS))

    return reply_of_chunks(context, chunks, len(members) <= CHUNK_MEMBERS)


@command("geodist")
def geodist(context: ReadContext, key: bytes, one: bytes, other: bytes, *unit: bytes) -> Reply:
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
    return distance_text(distance(point_of(first), point_of(second)), meters)


class DistanceOrder(Enum):
    """The order of a search's results."""

    NEAREST_FIRST = auto()
    FARTHEST_FIRST = auto()


class GeoMatch(NamedTuple):
    """A member inside the searched area.

    Args:
        meters: Its distance from the center.
    """

    meters: float
    member: bytes
    score: float


@dataclass
class GeoSearch:
    """The options of a search. The center is a point or a member; the shape is a circle or a box.

    radius, box (width, height): in units of `unit` meters.

    Args:
        count: 0 for all.
    """

    point: Point | None = None
    member: bytes | None = None
    radius: float | None = None
    box: tuple[float, float] | None = None
    unit: float = 1.0
    has_distance: bool = False
    has_hash: bool = False
    has_coordinates: bool = False
    is_any: bool = False
    order: DistanceOrder | None = None
    count: int = 0

    def read_radius(self, arguments: Sequence[bytes]) -> None:
        """Parse `radius unit`."""
        radius = _float(arguments[0], "need numeric radius")
        if radius < 0:
            raise GenericError("radius cannot be negative")
        self.radius, self.unit = radius, _unit(arguments[1])

    def _read_box(self, arguments: Sequence[bytes]) -> None:
        width = _float(arguments[0], "need numeric width")
        height = _float(arguments[1], "need numeric height")
        if width < 0 or height < 0:
            raise GenericError("height or width cannot be negative")
        self.box, self.unit = (width, height), _unit(arguments[2])

    def read_options(self, arguments: Sequence[bytes], read_other: Callable[[bytes, Sequence[bytes]], int]) -> None:
        """Parse all options in Redis' order of checks.

        Args:
            read_other: Parses an option that not all commands have, given the arguments after it; returns how many of
                these it used.
        """
        at = 0
        while at < len(arguments):
            option, rest = arguments[at].upper(), arguments[at + 1 :]
            at += 1
            if option == b"WITHDIST":
                self.has_distance = True
            elif option == b"WITHHASH":
                self.has_hash = True
            elif option == b"WITHCOORD":
                self.has_coordinates = True
            elif option == b"ANY":
                self.is_any = True
            elif option in (b"ASC", b"DESC"):
                self.order = DistanceOrder.NEAREST_FIRST if option == b"ASC" else DistanceOrder.FARTHEST_FIRST
            elif option == b"COUNT" and rest:
                self.count = integer(rest[0])
                if self.count <= 0:
                    raise GenericError("COUNT must be > 0")
                at += 1
            else:
                at += read_other(option, rest)

    def check(self) -> None:
        """Check that options fit together; with COUNT and without ANY, results are ordered from the nearest on."""
        if self.is_any and not self.count:
            raise GenericError("the ANY argument requires COUNT argument")
        if self.count and self.order is None and not self.is_any:
            self.order = DistanceOrder.NEAREST_FIRST

    def read_center_or_shape(self, option: bytes, rest: Sequence[bytes], check_member: Callable[[bytes], None]) -> int:
        """Parse an option that only GEOSEARCH has; return how many arguments after it were used."""
        if option == b"FROMMEMBER" and rest and self.point is None:
            check_member(rest[0])
            self.member = rest[0]
            return 1
        if option == b"FROMLONLAT" and len(rest) >= 2 and self.member is None:
            self.point = _point(rest)
            return 2
        if option == b"BYRADIUS" and len(rest) >= 2 and self.box is None:
            self.read_radius(rest)
            return 2
        if option == b"BYBOX" and len(rest) >= 3 and self.radius is None:
            self._read_box(rest)
            return 3
        raise syntax_error()

    def shape(self, snapshot: Snapshot, key: bytes) -> Shape:
        """Return the searched shape; GenericError if the member in its center does not exist."""
        point = self.point if self.member is None else _point_of_member(snapshot, key, self.member)
        assert point is not None  # a search has a point or a member
        if self.box is not None:
            return Box(point, *self.box, self.unit)
        assert self.radius is not None
        return Circle(point, self.radius * self.unit)

    def row(self, found: GeoMatch) -> Reply:
        """Return a member's item of the reply."""
        row: list[Reply] = [found.member]
        if self.has_distance:
            row.append(distance_text(found.meters, self.unit))
        if self.has_hash:
            row.append(as_signed(found.score))
        if self.has_coordinates:
            row.append(_degrees(point_of(found.score)))
        return row if len(row) > 1 else found.member


def _point_of_member(snapshot: Snapshot, key: bytes, member: bytes) -> Point:
    score = snapshot.scores(key, (member,))[0]
    if score is None:
        raise GenericError("could not decode requested zset member")
    return point_of(score)


def _refuse(option: bytes, rest: Sequence[bytes]) -> int:
    raise syntax_error()


def _exists(context: ReadContext, key: bytes) -> bool:
    return context.counted(context.at(key).sorted_size(key) or None) is not None


@command("geosearch")
def geosearch(
    context: ReadContext,
    name: NameAsTyped,
    key: bytes,
    one: bytes,
    two: bytes,
    three: bytes,
    four: bytes,
    *rest: OneOrMore,
) -> Reply:
    """Queries a geospatial index for members inside an area of a box or a circle."""
    exists, search, arguments = _exists(context, key), GeoSearch(), (one, two, three, four, *rest)

    def check_member(member: bytes) -> None:
        if exists:
            _point_of_member(context.at(key), key, member)

    search.read_options(arguments, lambda option, rest: search.read_center_or_shape(option, rest, check_member))
    if search.point is None and search.member is None:
        raise GenericError(f"exactly one of FROMMEMBER or FROMLONLAT can be specified for {client_text(name)}")
    if search.radius is None and search.box is None:
        raise GenericError(f"exactly one of BYRADIUS and BYBOX can be specified for {client_text(name)}")
    search.check()
    return _search_reply(context, key, search) if exists else []


@command("georadius_ro")
def georadius_ro(
    context: ReadContext, key: bytes, longitude: bytes, latitude: bytes, radius: bytes, unit: bytes, *arguments: bytes
) -> Reply:
    """Returns members from a geospatial index that are within a distance from a coordinate."""
    exists = _exists(context, key)
    search = GeoSearch(point=_point((longitude, latitude)))
    search.read_radius((radius, unit))
    search.read_options(arguments, _refuse)
    search.check()
    return _search_reply(context, key, search) if exists else []


@command("georadiusbymember_ro")
def georadiusbymember_ro(
    context: ReadContext, key: bytes, member: bytes, radius: bytes, unit: bytes, *arguments: bytes
) -> Reply:
    """Returns members from a geospatial index that are within a distance from a member."""
    exists, search = _exists(context, key), GeoSearch(member=member)
    if exists:
        _point_of_member(context.at(key), key, member)
        search.read_radius((radius, unit))
    search.read_options(arguments, _refuse)
    search.check()
    return _search_reply(context, key, search) if exists else []


class SearchedRanks(NamedTuple):
    """A shape, and the rank ranges of the members in the map cells that cover it."""

    shape: Shape
    ranges: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, snapshot: Snapshot, key: bytes, search: GeoSearch) -> SearchedRanks:
        """Compute the ranges of a search; GenericError if the member in its center does not exist."""
        shape = search.shape(snapshot, key)
        size = snapshot.sorted_size(key)
        rank_of: Callable[[float], int] = partial(snapshot.rank_of_score, key, is_after=False)
        if size <= CHUNK_MEMBERS:  # it is read once
            rank_of = partial(bisect_left, [score for _, score in snapshot.sorted_members(key, 0, size)])
        ends = [(rank_of(low), rank_of(high)) for low, high in score_ranges(shape)]
        return cls(shape, [(start, stop) for start, stop in ends if start < stop])


def _search_reply(context: ReadContext, key: bytes, search: GeoSearch) -> Reply:
    """Return the reply of a checked search."""
    current_view = context.view
    ranks = SearchedRanks.of(current_view.at(key), key, search)

    def chunks(view: KeyspaceView) -> Iterator[Sequence[Reply]]:
        snapshot = view.at(key)
        ranks_here = ranks if view is current_view else SearchedRanks.of(snapshot, key, search)
        for batch in _selected(_matches(snapshot, key, search, ranks_here), search):
            yield list(map(search.row, batch))

    return reply_of_chunks(context, chunks, sum(stop - start for start, stop in ranks.ranges) <= CHUNK_MEMBERS)


def _selected(found: Iterator[Sequence[GeoMatch]], search: GeoSearch) -> Iterator[Sequence[GeoMatch]]:
    """Iterate over chunks of the results in their order, up to COUNT."""
    if search.order is None:
        yield from found
        return
    is_reversed = search.order is DistanceOrder.FARTHEST_FIRST
    if 0 < search.count <= NEAREST_MAX and not search.is_any:
        yield from _nearest(found, search.count, is_reversed)
        return
    for batch in sorted_chunks(_within_memory(found), 0, search.count or maxsize, is_reversed, by_full_tuple=False):
        yield [GeoMatch(*each) for each in batch]


def _nearest(chunks: Iterable[Sequence[GeoMatch]], count: int, is_reversed: bool) -> Iterator[Sequence[GeoMatch]]:
    """Keep the `count` best matches; the last chunk has them in order."""
    best: list[GeoMatch] = []
    for chunk in chunks:
        if chunk:
            best = sorted([*best, *chunk], key=itemgetter(0), reverse=is_reversed)[:count]
        yield []
    yield best


def _within_memory(chunks: Iterable[Sequence[GeoMatch]]) -> Iterator[Sequence[GeoMatch]]:
    """Pass chunks on; GenericError if their members exceed the limit of `WorkingMemory`."""
    memory = WorkingMemory()
    for chunk in chunks:
        memory.add(each.member for each in chunk)
        yield chunk


def _matches(snapshot: Snapshot, key: bytes, search: GeoSearch, ranks: SearchedRanks) -> Iterator[Sequence[GeoMatch]]:
    """Iterate over chunks of the members inside the shape, in Redis' order; with ANY, only up to COUNT."""
    limit = search.count if search.is_any else 0
    count = 0
    for start, stop in ranks.ranges:
        for batch in batched(snapshot.sorted_members(key, start, stop), CHUNK_MEMBERS):
            chunk = []
            for member, score in batch:
                meters = ranks.shape.distance(point_of(score))
                if meters is not None:
                    chunk.append(GeoMatch(meters, member, score))
            if limit and count + len(chunk) >= limit:
                yield chunk[: limit - count]
                return
            count += len(chunk)
            yield chunk
