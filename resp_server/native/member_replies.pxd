"""Replies about members of sets and sorted sets, and about fields of hashes, that a request names."""

from libc.stdint cimport int64_t, uint8_t

from resp_server.native.arguments cimport integer, is_word
from resp_server.native.encoding cimport put_double
from resp_server.native.geo cimport put_distance, put_place, unit_of
from resp_server.native.geohash cimport distance, is_place, point_of
from resp_server.native.lookup_batch cimport ENTRIES_MAX, LookupBatch, Request, count_lookup, read
from resp_server.native.records cimport (
    ABSENT, ANSWERED, GENERAL, LIVE, SMALL_MAP, SMALL_SET, SMALL_SORTED_SET, VALUE, ByteRange, Record, index_of, map_value,
    size_of
)
from resp_server.native.rows cimport *
from resp_server.native.wire cimport Output, Word, number_line, put, put_bulk, put_line, put_nil
from state_backend.native.little_endian cimport f64

cdef struct Member:  # of a hash, a set or a sorted set
    const uint8_t* at  # its value
    size_t size
    bint is_encoded  # for a reply
    int64_t expire_at_ms  # 0: never
    double score
    int64_t rank  # -1: not computed


cdef inline int find_member(
    LookupBatch batch, Request* request, size_t index, int found, const Record* record, Member* member
) except -2:
    """Find a member: LIVE, ABSENT or GENERAL."""
    cdef const Word* word = &batch.words[request.first_word + rows[request.command].first_member + index]
    cdef int kind = rows[request.command].kind
    cdef Record row
    cdef ByteRange value
    cdef int has
    member.at, member.size, member.is_encoded, member.expire_at_ms = NULL, 0, False, 0
    member.score, member.rank = 0, -1
    if found != LIVE:
        return ABSENT
    if record.form == SMALL_MAP:
        has = map_value(record, word, &value)
        if has == LIVE:
            member.at, member.size, member.is_encoded = value.at, value.size, True
        return has
    if record.form in (SMALL_SET, SMALL_SORTED_SET):
        member.rank = index_of(record, size_of(record), word, &member.score)
        return LIVE if member.rank >= 0 else ABSENT if member.rank == -1 else GENERAL
    if index >= request.members:
        return GENERAL
    has = read(batch, request.first_member + index, word, &row)
    if has != LIVE:
        return has
    if kind == SORTED_SET:
        if row.size != 8:
            return GENERAL
        member.score, member.rank = f64(row.payload), request.rank
    elif kind == HASH:
        if row.form != VALUE:
            return GENERAL
        member.at, member.size, member.expire_at_ms = row.payload, row.size, row.expire_at_ms
    return LIVE


cdef inline int put_member(LookupBatch batch, Request* request, int has, const Record* record, const Member* member) except -2:
    """Write what the reply has of a member."""
    cdef Output* out = batch.out
    cdef int reply = rows[request.command].reply
    cdef size_t size = 0
    cdef int64_t count
    if reply == FLAGS:
        return put_line(out, c":", has == LIVE) + ANSWERED
    if reply == LENGTHS:
        size = member.size
        if has == LIVE and member.is_encoded and number_line(member.at + 1, member.at + member.size, &size) <= 0:
            return GENERAL
        return put_line(out, c":", size if has == LIVE else 0) + ANSWERED
    if reply in (SECONDS, MILLISECONDS, SECONDS_AT, MILLISECONDS_AT):
        if has != LIVE or not member.expire_at_ms:
            return put_line(out, c":", -1 if has == LIVE else -2) + ANSWERED
        count = member.expire_at_ms
        if reply in (SECONDS, MILLISECONDS):
            count -= batch.clock_of[request.first_lookup]
        return put_line(out, c":", (count + 999) // 1000 if reply in (SECONDS, SECONDS_AT) else count) + ANSWERED
    if has != LIVE:
        return (put(out, b"*-1\r\n", 5) if reply == POINTS and not batch.is_resp3 else put_nil(out, batch.is_resp3)) + ANSWERED
    if reply in (POINTS, GEOHASHES):
        return put_place(out, reply, member.score, batch.is_resp3)
    if reply == TEXTS:
        return (put(out, member.at, member.size) if member.is_encoded else put_bulk(out, member.at, member.size)) + ANSWERED
    if reply == SCORES_OF:
        return put_double(out, member.score, batch.is_resp3) + ANSWERED
    if member.rank < 0:
        return GENERAL
    if reply == RANKS_OF:
        return put_line(out, c":", member.rank) + ANSWERED
    count = size_of(record)
    if member.rank >= count:
        return GENERAL
    return put_line(out, c":", count - 1 - member.rank) + ANSWERED


cdef inline int reply_of_members(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with values, scores, ranks or expiries of members or fields, or whether they exist."""
    cdef const Row* row = &rows[request.command]
    cdef size_t i, members = request.words - row.first_member
    cdef Word* options = &batch.words[request.first_word + 1]
    cdef int has
    cdef int64_t number = 0
    cdef Member member
    if row.first_member == 3:  # FIELDS, their number, fields
        if not is_word(options, b"fields", 6) or not integer(options + 1, &number) or number != <int64_t>members:
            return GENERAL
    if members > ENTRIES_MAX:
        return GENERAL
    if row.kind == SET or (row.is_array and row.kind == SORTED_SET):
        count_lookup(batch, found == LIVE)
    if row.is_array:
        put_line(batch.out, c"*", members)
    for i in range(members):
        has = find_member(batch, request, i, found, record, &member)
        if has == GENERAL:
            return GENERAL
        if row.kind != SET and not row.is_array:
            count_lookup(batch, has == LIVE)
        if put_member(batch, request, has, record, &member) == GENERAL:
            return GENERAL
    return ANSWERED


cdef inline int reply_of_distance(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with the distance of two members."""
    cdef Member one, other
    cdef const Word* words = &batch.words[request.first_word]
    cdef double unit = unit_of(&words[3]) if request.words == 4 else 1.0, meters
    cdef int has_one = find_member(batch, request, 0, found, record, &one)
    cdef int has_other = find_member(batch, request, 1, found, record, &other)
    if not unit or has_one == GENERAL or has_other == GENERAL:
        return GENERAL
    if has_one != LIVE or has_other != LIVE:
        return put_nil(batch.out, batch.is_resp3) + ANSWERED
    meters = distance(point_of(one.score), point_of(other.score))
    if not (is_place(one.score) and is_place(other.score) and meters >= 0):
        return GENERAL
    return put_distance(batch.out, meters, unit) + ANSWERED
