"""Points as scores of a sorted set, like those of GEOADD: 52 bits, longitude and latitude interleaved.

Pure arithmetic of doubles. The order of operations is that of Redis (`geohash.c` and `geohash_helper.c` of 7.0 to 7.4),
so that rounding errors are the same. A score that GEOADD never makes (negative, infinite or of more bits) is converted
to an integer as on x86, and then to a point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import asin, cos, inf, isinf, nan, pi, sin, sqrt
from typing import NamedTuple

# Standard: the limits of EPSG:3857, the earth's radius and half the width of its map in meters, as in Redis.
LONGITUDE_MAX = 180.0
LATITUDE_MAX = 85.05112878
EARTH_RADIUS = 6372797.560856
MERCATOR_MAX = 20037726.37
RADIANS = pi / 180.0

# Bits of each coordinate in a score.
STEP_MAX = 26
LONG_BITS = 64
LONG_MIN = -(2**63)

# Points and searched areas that are kept, as clients ask for the same ones again: some megabytes at most (guess).
POINTS_KEPT, SHAPES_KEPT = 16_384, 1024

ALPHABET = b"0123456789bcdefghjkmnpqrstuvwxyz"
TEXT_LENGTH = 11

# Masks of every second bit, every second pair of bits, and so on, for two 64-bit numbers side by side in 128 bits.
SPREAD = [
    part << LONG_BITS | part
    for part in (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F, 0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF)
]
WORDS = 0xFFFFFFFF << LONG_BITS | 0xFFFFFFFF
LONG = 0xFFFFFFFFFFFFFFFF
EVEN, ODD = 0x5555555555555555, 0xAAAAAAAAAAAAAAAA

Point = tuple[float, float]


class Cell(NamedTuple):
    """A rectangle of the map.

    Args:
        bits: Its geohash.
        step: The number of bits of each coordinate, as Redis calls it.
    """

    bits: int
    step: int

    @property
    def scores(self) -> tuple[float, float]:
        """The range of scores of points in the cell: first, and end (exclusive)."""
        shift = 2 * (STEP_MAX - self.step)
        return float(self.bits << shift), float(self.bits + 1 << shift)


class Area(NamedTuple):
    """A rectangle of the map, in degrees."""

    west: float
    south: float
    east: float
    north: float


def as_unsigned(score: float) -> int:
    """Convert a score to an unsigned 64-bit integer as C does on x86."""
    if score >= 2.0**63:
        return int(score) if score < 2.0**64 else 0
    return as_signed(score) % 2**64


def as_signed(score: float) -> int:
    """Convert a score to a signed 64-bit integer as C does on x86."""
    return int(score) if LONG_MIN <= score < 2.0**63 else LONG_MIN


def _interleave(even: int, odd: int) -> int:
    both = odd << LONG_BITS | even
    for shift, mask in ((16, 4), (8, 3), (4, 2), (2, 1), (1, 0)):
        both = (both | both << shift) & SPREAD[mask]
    return (both & LONG) | (both >> LONG_BITS << 1)


def _deinterleave(bits: int) -> tuple[int, int]:
    both = (bits >> 1 << LONG_BITS | bits) & SPREAD[0]
    both = (both | both >> 1) & SPREAD[1]
    both = (both | both >> 2) & SPREAD[2]
    both = (both | both >> 4) & SPREAD[3]
    both = (both | both >> 8) & SPREAD[4]
    both = (both | both >> 16) & WORDS
    return both & 0xFFFFFFFF, both >> LONG_BITS


def cell_of(longitude: float, latitude: float, step: int, latitude_max: float = LATITUDE_MAX) -> Cell:
    """Return the cell of a point."""
    north = (latitude + latitude_max) / (latitude_max + latitude_max) * (1 << step)
    east = (longitude + LONGITUDE_MAX) / (LONGITUDE_MAX + LONGITUDE_MAX) * (1 << step)
    return Cell(_interleave(int(north), int(east)), step)


def is_point(longitude: float, latitude: float) -> bool:
    """Return whether a point has a score: the map ends before the poles."""
    return -LONGITUDE_MAX <= longitude <= LONGITUDE_MAX and -LATITUDE_MAX <= latitude <= LATITUDE_MAX


def score_of(longitude: float, latitude: float) -> float:
    """Return the score that GEOADD gives a member at a point; ValueError for one that is not on the map."""
    if not is_point(longitude, latitude):
        raise ValueError(f"longitude {longitude}, latitude {latitude} is no point on the map of Redis")
    return cell_of(longitude, latitude, STEP_MAX).scores[0]


def _area(cell: Cell) -> Area:
    north, east = _deinterleave(cell.bits)
    size = 1 << cell.step
    return Area(
        -LONGITUDE_MAX + (east / size) * (LONGITUDE_MAX + LONGITUDE_MAX),
        -LATITUDE_MAX + (north / size) * (LATITUDE_MAX + LATITUDE_MAX),
        -LONGITUDE_MAX + ((east + 1 & 0xFFFFFFFF) / size) * (LONGITUDE_MAX + LONGITUDE_MAX),
        -LATITUDE_MAX + ((north + 1 & 0xFFFFFFFF) / size) * (LATITUDE_MAX + LATITUDE_MAX),
    )


@lru_cache(POINTS_KEPT)
def point_of(score: float) -> Point:
    """Return the longitude and latitude of a score: the center of its cell."""
    west, south, east, north = _area(Cell(as_unsigned(score), STEP_MAX))
    longitude, latitude = (west + east) / 2, (south + north) / 2
    return (
        min(max(longitude, -LONGITUDE_MAX), LONGITUDE_MAX),
        min(max(latitude, -LATITUDE_MAX), LATITUDE_MAX),
    )


@lru_cache(POINTS_KEPT)
def geohash_text(score: float) -> bytes:
    """Return the standard geohash of 11 characters, whose map extends to the poles."""
    bits = cell_of(*point_of(score), STEP_MAX, latitude_max=90.0).bits
    digits = [bits >> 2 * STEP_MAX - 5 * (index + 1) & 31 for index in range(TEXT_LENGTH - 1)]
    return bytes(ALPHABET[digit] for digit in (*digits, 0))


def distance(one: Point, other: Point) -> float:
    """Return the distance of two points on a sphere, in meters (haversine); NaN if rounding exceeds asin's domain."""
    sin_longitude = sin((other[0] * RADIANS - one[0] * RADIANS) / 2)
    if sin_longitude == 0.0:
        return EARTH_RADIUS * abs(other[1] * RADIANS - one[1] * RADIANS)
    here, there = one[1] * RADIANS, other[1] * RADIANS
    sin_latitude = sin((there - here) / 2)
    root = sqrt(sin_latitude * sin_latitude + cos(here) * cos(there) * sin_longitude * sin_longitude)
    return 2.0 * EARTH_RADIUS * asin(root) if root <= 1.0 else nan


@dataclass(frozen=True)
class Circle:
    """All points within a radius of the center; in meters."""

    center: Point
    radius: float

    @property
    def size(self) -> tuple[float, float]:
        """The extent from the center to the east and to the north, in meters."""
        return self.radius, self.radius

    @property
    def reach(self) -> float:
        """The largest distance of a point in the shape from the center, in meters."""
        return self.radius

    def distance(self, point: Point) -> float | None:
        """Return the distance of a point from the center; None for a point outside of the shape."""
        found = distance(self.center, point)
        return None if found > self.radius else found


@dataclass(frozen=True)
class Box:
    """A box around its center.

    Args:
        width, height: The sides, in units.
        unit: Meters per unit.
    """

    center: Point
    width: float
    height: float
    unit: float

    @property
    def size(self) -> tuple[float, float]:
        """The extent from the center to the east and to the north, in meters."""
        return self.unit * (self.width / 2), self.unit * (self.height / 2)

    @property
    def reach(self) -> float:
        """The largest distance of a point in the shape from the center, in meters."""
        return sqrt((self.width / 2) * (self.width / 2) + (self.height / 2) * (self.height / 2)) * self.unit

    def distance(self, point: Point) -> float | None:
        """Return the distance of a point from the center; None for a point outside of the shape."""
        longitude, latitude = self.center
        if EARTH_RADIUS * abs(latitude * RADIANS - point[1] * RADIANS) > self.height * self.unit / 2:
            return None
        if distance(point, (longitude, point[1])) > self.width * self.unit / 2:
            return None
        return distance(self.center, point)


Shape = Circle | Box


def _step_of(reach: float, latitude: float) -> int:
    """Return the step at which nine cells cover most shapes of this reach."""
    if reach == 0:
        return STEP_MAX
    step = 1
    while reach < MERCATOR_MAX:
        reach *= 2
        step += 1
    step -= 2
    if abs(latitude) > 66:
        step -= 2 if abs(latitude) > 80 else 1
    return min(max(step, 1), STEP_MAX)


def _bounds(shape: Shape) -> Area:
    """Return the bounding area of a shape. As in Redis, its side far from the equator decides its width in degrees."""
    (longitude, latitude), (width, height) = shape.center, shape.size
    up = height / EARTH_RADIUS / RADIANS
    side = latitude - up if latitude < 0 else latitude + up
    aside = width / EARTH_RADIUS / (nan if isinf(side) else cos(side * RADIANS)) / RADIANS
    return Area(longitude - aside, latitude - up, longitude + aside, latitude + up)


def _neighbour(cell: Cell, east: int, north: int) -> Cell:
    """Return a neighbour of a cell; beyond the edge of the map it is the cell at the opposite edge."""
    unused = LONG_BITS - 2 * cell.step
    longitudes, latitudes = cell.bits & ODD, cell.bits & EVEN
    if east:
        filled = EVEN >> unused
        longitudes = longitudes + filled + 1 if east > 0 else (longitudes | filled) - (filled + 1)
        longitudes &= ODD >> unused
    if north:
        filled = ODD >> unused
        latitudes = latitudes + filled + 1 if north > 0 else (latitudes | filled) - (filled + 1)
        latitudes &= EVEN >> unused
    return Cell(longitudes | latitudes, cell.step)


# Offsets (east, north) of the cells around a cell, in the order in which Redis scans them.
AROUND = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))


def cells_of(shape: Shape) -> Iterator[Cell]:
    """Iterate over the cells that cover a shape, in the order of Redis, and as often as Redis scans each."""
    found = list(_covering(shape))
    last = 0
    for index, cell in enumerate(found):
        # Large neighbours may be the same cell. Redis skips a cell that equals the last one scanned, except the center.
        if cell is not None and (not last or cell != found[last]):
            yield cell
            last = index


@lru_cache(SHAPES_KEPT)
def score_ranges(shape: Shape) -> Sequence[tuple[float, float]]:
    """Return the ranges of scores of the cells that cover a shape: first, and end (exclusive)."""
    return [cell.scores for cell in cells_of(shape)]


def _covering(shape: Shape) -> Iterator[Cell | None]:
    """Iterate over the center cell and the cells around it; None for a cell outside of the shape."""
    bounds = _bounds(shape)
    center = cell_of(*shape.center, _step_of(shape.reach, shape.center[1]))
    if center.step > 1 and not _is_covered(bounds, center):
        center = cell_of(*shape.center, center.step - 1)
    yield center
    area = _area(center)
    is_fine = center.step >= 2
    for east, north in AROUND:
        is_beyond = (
            (north < 0 and area.south < bounds.south)
            or (north > 0 and area.north > bounds.north)
            or (east < 0 and area.west < bounds.west)
            or (east > 0 and area.east > bounds.east)
        )
        yield None if is_fine and is_beyond else _neighbour(center, east, north)


def _is_covered(bounds: Area, center: Cell) -> bool:
    """Return whether the cells north, south, east and west of the center cell extend to the bounds."""
    return not (
        _area(_neighbour(center, 0, 1)).north < bounds.north
        or _area(_neighbour(center, 0, -1)).south > bounds.south
        or _area(_neighbour(center, 1, 0)).east < bounds.east
        or _area(_neighbour(center, -1, 0)).west > bounds.west
    )


def distance_text(meters: float, unit: float) -> bytes:
    """Return a distance with four decimals, rounded like in Redis.

    Args:
        unit: Meters per unit.
    """
    scaled = meters / unit * 10000.0
    number = round(scaled) if -inf < scaled < inf else LONG_MIN
    sign, number = ("-", -number) if number < 0 else ("", number)
    return f"{sign}{number // 10000}.{number % 10000:04d}".encode()


def degrees_text(degrees: float) -> bytes:
    """Return a coordinate with 17 decimals, like Redis, without trailing zeros."""
    text = f"{degrees:.17f}".rstrip("0").rstrip(".")
    return b"0" if text == "-0" else text.encode()
