"""Searches of places, and what commands about places reply (see `commands.geo`).

A score that GEOADD never makes, a distance that is no number, and options in other forms are left to the general path.
"""

from cpython.conversion cimport PyOS_double_to_string
from cpython.mem cimport PyMem_Free
from libc.math cimport fabs, rint
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset, strlen

from resp_server.native.arguments cimport exact_double, integer, is_word
from resp_server.native.geohash cimport LATITUDE_MAX, STEP_MAX, Point, Shape, cell_of, is_place, point_of
from resp_server.native.records cimport ANSWERED, GENERAL, Item
from resp_server.native.rows cimport AROUND_MEMBER, AROUND_POINT, GEOHASHES, WITHIN
from resp_server.native.wire cimport NUMBER_LINE_BYTES, Output, Word, put_bulk, put_double_text, put_line, write_line

cdef enum:
    GEOHASH_BYTES = 11
    METERS_MAX = 1000000000  # a search of a larger area is left to the general path

cdef struct Search:  # what a request asks for
    Shape shape
    const Word* member  # in the center; NULL: none
    bint has_point, has_shape, is_any, is_ordered, is_descending, has_distance, has_hash, has_coordinates
    int64_t count  # 0: all

cdef struct Match:  # a member in the area
    Item item
    double order  # its distance in meters, negative if the farthest come first
    int64_t number  # among all matches


cdef inline int by_order(const void* one, const void* other) noexcept nogil:
    """Compare matches for `qsort`; equal ones stay in their order."""
    cdef const Match* a = <const Match*>one
    cdef const Match* b = <const Match*>other
    if a.order != b.order:
        return -1 if a.order < b.order else 1
    return -1 if a.number < b.number else a.number > b.number


cdef inline double unit_of(const Word* word) noexcept nogil:
    """Return the meters of a unit; 0: it is none."""
    if is_word(word, b"m", 1):
        return 1.0
    if is_word(word, b"km", 2):
        return 1000.0
    return 0.3048 if is_word(word, b"ft", 2) else 1609.34 if is_word(word, b"mi", 2) else 0.0


cdef inline bint parse_point(const Word* words, Search* wanted) except -1:
    cdef Point* point = &wanted.shape.center
    wanted.has_point = True
    if not exact_double(words, &point.longitude) or not exact_double(words + 1, &point.latitude):
        return False
    return -180.0 <= point.longitude <= 180.0 and -LATITUDE_MAX <= point.latitude <= LATITUDE_MAX


cdef inline bint parse_shape(const Word* words, bint is_box, Search* wanted) except -1:
    """Parse a radius, or the two sides of a box, and the unit."""
    cdef Shape* shape = &wanted.shape
    wanted.has_shape, shape.is_box, shape.unit = True, is_box, unit_of(words + 1 + is_box)
    if not shape.unit or not exact_double(words, &shape.width) or not exact_double(words + is_box, &shape.height):
        return False
    return 0 <= shape.width * shape.unit <= METERS_MAX and 0 <= shape.height * shape.unit <= METERS_MAX


cdef inline bint parse_search(const Word* words, size_t count, int reply, Search* wanted) except -1:
    """Parse the arguments after the key; False: the general path parses them. reply: the row's, which says what they begin with."""
    cdef size_t at = 0, left
    cdef const Word* word
    memset(wanted, 0, sizeof(Search))
    if reply != WITHIN:
        at = 2 if reply == AROUND_POINT else 1
        if reply == AROUND_MEMBER:
            wanted.member = words
        elif not parse_point(words, wanted):
            return False
        if not parse_shape(words + at, False, wanted):
            return False
        at += 2
    while at < count:
        word, left = &words[at], count - at - 1
        at += 1
        if is_word(word, b"withdist", 8):
            wanted.has_distance = True
        elif is_word(word, b"withhash", 8):
            wanted.has_hash = True
        elif is_word(word, b"withcoord", 9):
            wanted.has_coordinates = True
        elif is_word(word, b"any", 3):
            wanted.is_any = True
        elif is_word(word, b"asc", 3) or is_word(word, b"desc", 4):
            wanted.is_ordered, wanted.is_descending = True, word.size == 4
        elif left and is_word(word, b"count", 5):
            if not integer(&words[at], &wanted.count) or wanted.count <= 0:
                return False
            at += 1
        elif reply != WITHIN:
            return False
        elif left and not wanted.has_point and wanted.member == NULL and is_word(word, b"frommember", 10):
            wanted.member = &words[at]
            at += 1
        elif left > 1 and wanted.member == NULL and is_word(word, b"fromlonlat", 10):
            if not parse_point(&words[at], wanted):
                return False
            at += 2
        elif left > 1 and not wanted.has_shape and (is_word(word, b"byradius", 8) or (left > 2 and is_word(word, b"bybox", 5))):
            if not parse_shape(&words[at], word.size == 5, wanted):
                return False
            at += 2 if word.size == 8 else 3
        else:
            return False
    wanted.is_ordered = wanted.is_ordered or (wanted.count > 0 and not wanted.is_any)
    return (wanted.has_point or wanted.member != NULL) and wanted.has_shape and (wanted.count > 0 or not wanted.is_any)


cdef inline int put_distance(Output* out, double meters, double unit) except -1:
    """Write a distance in units, with four decimals."""
    cdef char text[NUMBER_LINE_BYTES + 4]
    cdef int64_t number = <int64_t>rint(meters / unit * 10000.0)
    cdef int size = write_line(text, c"$", number // 10000) - 2, i
    text[size] = c"."
    for i in range(4, 0, -1):
        text[size + i] = <char>(c"0" + number % 10)
        number //= 10
    return put_bulk(out, text + 1, size + 4)


cdef inline int put_degrees(Output* out, double degrees, bint is_resp3) except -1:
    """Write a coordinate with 17 decimals, without zeros at its end."""
    cdef char* text = PyOS_double_to_string(degrees, c"f", 17, 0, NULL)
    cdef size_t size = strlen(text)
    try:
        while text[size - 1] == c"0":
            size -= 1
        if text[size - 1] == c".":
            size -= 1
        if size == 2 and text[0] == c"-" and text[1] == c"0":
            return put_double_text(out, b"0", 1, is_resp3)
        return put_double_text(out, text, size, is_resp3)
    finally:
        PyMem_Free(text)


cdef inline int put_geohash(Output* out, double score) except -1:
    """Write the standard geohash, whose map extends to the poles."""
    cdef const char* alphabet = b"0123456789bcdefghjkmnpqrstuvwxyz"
    cdef char text[GEOHASH_BYTES]
    cdef uint64_t bits = cell_of(point_of(score), STEP_MAX, 90.0).bits
    cdef int i
    for i in range(GEOHASH_BYTES - 1):
        text[i] = alphabet[bits >> (2 * STEP_MAX - 5 * (i + 1)) & 31]
    text[GEOHASH_BYTES - 1] = c"0"
    return put_bulk(out, text, GEOHASH_BYTES)


cdef inline int put_point(Output* out, double score, bint is_resp3) except -1:
    cdef Point point = point_of(score)
    put_line(out, c"*", 2)
    put_degrees(out, point.longitude, is_resp3)
    return put_degrees(out, point.latitude, is_resp3)


cdef inline int put_place(Output* out, int reply, double score, bint is_resp3) except -2:
    """Write the point, or the geohash, of a member."""
    if not is_place(score):
        return GENERAL
    return (put_geohash(out, score) if reply == GEOHASHES else put_point(out, score, is_resp3)) + ANSWERED


cdef inline int put_match(Output* out, const Match* match, const Search* wanted, bint is_resp3) except -1:
    cdef int parts = 1 + wanted.has_distance + wanted.has_hash + wanted.has_coordinates
    if parts > 1:
        put_line(out, c"*", parts)
    put_bulk(out, match.item.at, match.item.size)
    if wanted.has_distance:
        put_distance(out, fabs(match.order), wanted.shape.unit)
    if wanted.has_hash:
        put_line(out, c":", <int64_t>match.item.score)
    return put_point(out, match.item.score, is_resp3) if wanted.has_coordinates else 0
