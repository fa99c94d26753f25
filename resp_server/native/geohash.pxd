"""Points of the map as scores of a sorted set, like those of GEOADD: their distances, and the cells that cover an area.

The arithmetic of doubles is that of `state_backend.codec.geohash`, in the same order, so that rounding errors are the same.
"""

from libc.math cimport asin, cos, fabs, sin, sqrt
from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #define LATITUDE_MAX 85.05112878
    #define EARTH_RADIUS 6372797.560856
    #define MERCATOR_MAX 20037726.37
    #define RADIANS (3.14159265358979323846 / 180.0)
    """
    const double LATITUDE_MAX, EARTH_RADIUS, MERCATOR_MAX, RADIANS

cdef enum:
    STEP_MAX = 26  # bits of each coordinate in a score
    CELLS_MAX = 9

cdef struct Point:
    double longitude, latitude

cdef struct Cell:  # a rectangle of the map; step: the bits of each coordinate
    uint64_t bits
    int step

cdef struct Area:  # in degrees
    double west, south, east, north

cdef struct Shape:  # a circle, whose radius is its width, or a box
    Point center
    bint is_box
    double width, height
    double unit  # of these, in meters


cdef inline bint is_place(double score) noexcept nogil:
    """Return whether a score is converted to an integer here; the general path converts any other."""
    return 0.0 <= score < 9223372036854775808.0


cdef inline uint64_t spread(uint64_t bits) noexcept nogil:
    """Put a zero before each of 32 bits."""
    bits = (bits | bits << 16) & 0x0000FFFF0000FFFFULL
    bits = (bits | bits << 8) & 0x00FF00FF00FF00FFULL
    bits = (bits | bits << 4) & 0x0F0F0F0F0F0F0F0FULL
    bits = (bits | bits << 2) & 0x3333333333333333ULL
    return (bits | bits << 1) & 0x5555555555555555ULL


cdef inline uint64_t gathered(uint64_t bits) noexcept nogil:
    """Return every second bit, from the lowest on."""
    bits &= 0x5555555555555555ULL
    bits = (bits | bits >> 1) & 0x3333333333333333ULL
    bits = (bits | bits >> 2) & 0x0F0F0F0F0F0F0F0FULL
    bits = (bits | bits >> 4) & 0x00FF00FF00FF00FFULL
    bits = (bits | bits >> 8) & 0x0000FFFF0000FFFFULL
    return (bits | bits >> 16) & 0xFFFFFFFFULL


cdef inline Cell cell_of(Point point, int step, double latitude_max) noexcept nogil:
    cdef double north = (point.latitude + latitude_max) / (latitude_max + latitude_max) * <double>(1 << step)
    cdef double east = (point.longitude + 180.0) / 360.0 * <double>(1 << step)
    return Cell(spread(<uint64_t>north) | spread(<uint64_t>east) << 1, step)


cdef inline Area area_of(Cell cell) noexcept nogil:
    cdef uint64_t north = gathered(cell.bits), east = gathered(cell.bits >> 1)
    cdef double size = <double>(1 << cell.step), height = LATITUDE_MAX + LATITUDE_MAX
    return Area(
        -180.0 + <double>east / size * 360.0,
        -LATITUDE_MAX + <double>north / size * height,
        -180.0 + <double>(east + 1 & 0xFFFFFFFFULL) / size * 360.0,
        -LATITUDE_MAX + <double>(north + 1 & 0xFFFFFFFFULL) / size * height,
    )


cdef inline Point point_of(double score) noexcept nogil:
    """Return the center of a score's cell."""
    cdef Area area = area_of(Cell(<uint64_t>score, STEP_MAX))
    return Point(
        min(max((area.west + area.east) / 2, -180.0), 180.0),
        min(max((area.south + area.north) / 2, -LATITUDE_MAX), LATITUDE_MAX),
    )


cdef inline double distance(Point one, Point other) noexcept nogil:
    """Return the distance of two points on a sphere, in meters; not a number if rounding exceeds asin's domain."""
    cdef double sin_longitude = sin((other.longitude * RADIANS - one.longitude * RADIANS) / 2), here, there, sin_latitude
    if sin_longitude == 0.0:
        return EARTH_RADIUS * fabs(other.latitude * RADIANS - one.latitude * RADIANS)
    here, there = one.latitude * RADIANS, other.latitude * RADIANS
    sin_latitude = sin((there - here) / 2)
    return 2.0 * EARTH_RADIUS * asin(sqrt(sin_latitude * sin_latitude + cos(here) * cos(there) * sin_longitude * sin_longitude))


cdef inline double distance_within(const Shape* shape, Point point) noexcept nogil:
    """Return the distance of a point from the center; negative for one outside of the area."""
    cdef Point aside = Point(shape.center.longitude, point.latitude)
    cdef double found
    if shape.is_box:
        if EARTH_RADIUS * fabs(shape.center.latitude * RADIANS - point.latitude * RADIANS) > shape.height * shape.unit / 2:
            return -1.0
        if distance(point, aside) > shape.width * shape.unit / 2:
            return -1.0
        return distance(shape.center, point)
    found = distance(shape.center, point)
    return -1.0 if found > shape.width * shape.unit else found


cdef inline int step_of(double reach, double latitude) noexcept nogil:
    """Return the step at which nine cells cover most areas whose farthest point is so many meters from the center."""
    cdef int step = -1
    if reach == 0:
        return STEP_MAX
    while reach < MERCATOR_MAX:
        reach *= 2
        step += 1
    if fabs(latitude) > 66:
        step -= 2 if fabs(latitude) > 80 else 1
    return min(max(step, 1), STEP_MAX)


cdef inline Area bounds_of(const Shape* shape) noexcept nogil:
    """Return the bounding area. As in Redis, its side far from the equator decides its width in degrees."""
    cdef double longitude = shape.center.longitude, latitude = shape.center.latitude
    cdef double width = shape.width * shape.unit, height = width, up, aside
    if shape.is_box:
        width, height = shape.unit * (shape.width / 2), shape.unit * (shape.height / 2)
    up = height / EARTH_RADIUS / RADIANS
    aside = width / EARTH_RADIUS / cos((latitude - up if latitude < 0 else latitude + up) * RADIANS) / RADIANS
    return Area(longitude - aside, latitude - up, longitude + aside, latitude + up)


cdef inline Cell neighbour(Cell cell, int east, int north) noexcept nogil:
    """Return a neighbour of a cell; beyond the edge of the map it is the cell at the opposite edge."""
    cdef uint64_t odd = 0xAAAAAAAAAAAAAAAAULL, even = 0x5555555555555555ULL
    cdef uint64_t longitudes = cell.bits & odd, latitudes = cell.bits & even, filled
    cdef int unused = 64 - 2 * cell.step
    if east:
        filled = even >> unused
        longitudes = longitudes + filled + 1 if east > 0 else (longitudes | filled) - (filled + 1)
        longitudes &= odd >> unused
    if north:
        filled = odd >> unused
        latitudes = latitudes + filled + 1 if north > 0 else (latitudes | filled) - (filled + 1)
        latitudes &= even >> unused
    return Cell(longitudes | latitudes, cell.step)


cdef inline bint is_covered(Area bounds, Cell center) noexcept nogil:
    """Return whether the cells north, south, east and west of the center cell extend to the bounds."""
    return not (
        area_of(neighbour(center, 0, 1)).north < bounds.north
        or area_of(neighbour(center, 0, -1)).south > bounds.south
        or area_of(neighbour(center, 1, 0)).east < bounds.east
        or area_of(neighbour(center, -1, 0)).west > bounds.west
    )


cdef inline int cells_of(const Shape* shape, Cell* cells) noexcept nogil:
    """Find the cells that cover an area, in the order of Redis, and as often as Redis scans each; return their number."""
    # The offsets of the cells around the center, east and north.
    cdef int[2 * (CELLS_MAX - 1)] around = [0, 1, 0, -1, 1, 0, -1, 0, 1, 1, -1, 1, 1, -1, -1, -1]
    cdef double reach = shape.width * shape.unit
    cdef Area bounds = bounds_of(shape), area
    cdef Cell center, cell
    cdef int i, east, north, count = 1
    if shape.is_box:
        reach = sqrt(shape.width / 2 * (shape.width / 2) + shape.height / 2 * (shape.height / 2)) * shape.unit
    center = cell_of(shape.center, step_of(reach, shape.center.latitude), LATITUDE_MAX)
    if center.step > 1 and not is_covered(bounds, center):
        center = cell_of(shape.center, center.step - 1, LATITUDE_MAX)
    cells[0], area = center, area_of(center)
    for i in range(CELLS_MAX - 1):
        east, north = around[2 * i], around[2 * i + 1]
        if center.step >= 2 and (
            (north < 0 and area.south < bounds.south)
            or (north > 0 and area.north > bounds.north)
            or (east < 0 and area.west < bounds.west)
            or (east > 0 and area.east > bounds.east)
        ):
            continue
        cell = neighbour(center, east, north)
        # Large neighbours may be the same cell. Redis skips a cell that equals the last one scanned, except the center.
        if count == 1 or cell.bits != cells[count - 1].bits:
            cells[count] = cell
            count += 1
    return count


cdef inline double first_score(Cell cell, int more) noexcept nogil:
    """Return the lowest score of a cell, or of one behind it."""
    return <double>(cell.bits + more << 2 * (STEP_MAX - cell.step))
