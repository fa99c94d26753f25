"""The records of a store as the core reads them: small ones have their elements, packed; large ones lead to rows of a table."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from resp_server.native.wire cimport NUMBER_LINE_BYTES, Word, number_line, write_line
from state_backend.native.little_endian cimport f64, u16, u32, u64
from state_backend.native.lookup cimport EXPIRY_AT, FORM_AT, FOUND, HEADER_BYTES, MISSING, Lookup, crc16_of, crc32_of

# The records of `state_backend.lmdb.record_format`.
cdef enum:
    VALUE = 0
    SMALL_MAP = 1
    SHORT_LIST = 2
    SMALL_SET = 3
    SMALL_SORTED_SET = 4
    LARGE_MAP = 5
    LONG_LIST = 6
    LONG_VALUE = 7
    LARGE_SET = 8
    LARGE_SORTED_SET = 9

# Whether a key, field or member exists and has not expired, or whether a request was answered. GENERAL: the general path has to
# find out, or to answer.
cdef enum:
    GENERAL = -1
    ABSENT = 0
    LIVE = 1
    ANSWERED = 1

cdef enum:
    RANK_BITS = 53  # no sorted set has more members

cdef struct Record:  # a record with its header parsed
    int form
    int64_t expire_at_ms
    const uint8_t* payload
    size_t size

cdef struct ByteRange:  # of a record
    const uint8_t* at
    size_t size

cdef struct Item:  # a text of a record, and its score
    const uint8_t* at
    size_t size
    double score

# Packed maps: count u16 | offsets u32... | body. Packed lists and sets: count u32 | ends u32... | body.
# Packed sorted sets: count u32 | scores f64... | lengths u32... | members.
# Tree nodes: a packed sorted set, called a run | of an inner node: child numbers u64..., then counts u64... | level u8.
# (See `state_backend.lmdb.ranks`. A count is the members in a child and in those before it.)


cdef inline int read_record(const Lookup* lookup, const Word* name, int64_t now_ms, Record* record) noexcept nogil:
    """Parse a record: LIVE, ABSENT, or GENERAL if another name has the same hash, or the record is damaged."""
    cdef uint32_t name_size
    record.form, record.expire_at_ms, record.payload, record.size = -1, 0, NULL, 0
    if lookup.outcome == MISSING:
        return ABSENT
    if lookup.outcome != FOUND or lookup.size < HEADER_BYTES:
        return GENERAL
    name_size = u32(lookup.record)
    if name_size != name.size or lookup.size - HEADER_BYTES < name_size:
        return GENERAL
    if memcmp(lookup.record + HEADER_BYTES, name.at, name_size) != 0:
        return GENERAL
    record.expire_at_ms = <int64_t>u64(lookup.record + EXPIRY_AT)
    if record.expire_at_ms < 0:
        return GENERAL
    if 0 < record.expire_at_ms <= now_ms:
        return ABSENT
    record.form = lookup.record[FORM_AT]
    record.payload = lookup.record + HEADER_BYTES + name_size
    record.size = lookup.size - HEADER_BYTES - name_size
    if record.form == LARGE_MAP and (record.size < 32 or 0 < <int64_t>u64(record.payload + 24) <= now_ms):
        return GENERAL  # some fields have expired, perhaps all
    return LIVE


cdef inline size_t items_start(const Record* record) noexcept nogil:
    """Return where the first text of a small record begins."""
    if record.form == SMALL_MAP:
        return 2 + 4 * <size_t>u16(record.payload)
    return 4 + (12 if record.form == SMALL_SORTED_SET else 4) * <size_t>u32(record.payload)


cdef inline int next_item(const Record* record, int64_t i, size_t* at, Item* item) noexcept nogil:
    """Read text number `i` of a small record, and move `at` from its start to the next one's: LIVE, or GENERAL if it is damaged.

    Fields and values of a map take turns. A text without a score has the score 1.
    """
    cdef const uint8_t* text = record.payload + at[0]
    cdef Py_ssize_t took = 0
    if at[0] > record.size or (at[0] == record.size and record.form != SMALL_SORTED_SET):
        return GENERAL
    item.score = 1.0
    if record.form == SMALL_SORTED_SET:
        item.score = f64(record.payload + 4 + 8 * i)
        item.size = u32(record.payload + 4 + 8 * <size_t>u32(record.payload) + 4 * i)
    else:  # encoded for a reply
        took = number_line(text + 1, record.payload + record.size, &item.size) + 1
        if took <= 1:
            return GENERAL
    item.at = text + took
    at[0] += took + item.size + (2 if took else 0)
    return LIVE if at[0] <= record.size else GENERAL


cdef inline bint is_same_text(const Item* one, const Item* other) noexcept nogil:
    return one.size == other.size and memcmp(one.at, other.at, one.size) == 0


cdef inline int by_score(const void* one, const void* other) noexcept nogil:
    """Compare items by their scores, then by their texts, for `qsort`."""
    cdef const Item* a = <const Item*>one
    cdef const Item* b = <const Item*>other
    cdef int order
    if a.score != b.score:
        return -1 if a.score < b.score else 1
    order = memcmp(a.at, b.at, min(a.size, b.size))
    return order if order else -1 if a.size < b.size else a.size > b.size


cdef inline int map_value(const Record* record, const Word* field, ByteRange* value) noexcept nogil:
    """Find a field's value in a packed map, encoded for a reply: LIVE, ABSENT, or GENERAL if the map is damaged."""
    cdef char line[NUMBER_LINE_BYTES]
    cdef size_t line_size = write_line(line, c"$", field.size)
    cdef size_t count, start, i, at, end, wanted = line_size + field.size + 2
    if record.size < 2:
        return GENERAL
    count = u16(record.payload)
    start = 2 + 4 * count
    if start > record.size:
        return GENERAL
    for i in range(count):
        at = start + u32(record.payload + 2 + 4 * i)
        end = start + u32(record.payload + 6 + 4 * i) if i + 1 < count else record.size
        if end > record.size or at > end:
            return GENERAL
        if end - at < wanted or memcmp(record.payload + at, line, line_size) != 0:
            continue
        if memcmp(record.payload + at + line_size, field.at, field.size) == 0:
            value.at, value.size = record.payload + at + wanted, end - at - wanted
            return LIVE
    return ABSENT


cdef inline int list_range(const Record* record, size_t first, size_t end, ByteRange* part) noexcept nogil:
    """Find a range of a packed list, encoded for a reply."""
    cdef size_t count = u32(record.payload), body = 4 + 4 * count, start, stop
    start = u32(record.payload + 4 * first) if first else 0
    stop = u32(record.payload + 4 * end) if end else 0
    if stop < start or body + stop > record.size:
        return GENERAL
    part.at, part.size = record.payload + body + start, stop - start
    return LIVE


cdef inline int64_t list_count(const Record* record) noexcept nogil:
    """Return the number of elements of a packed list or set; -1 if it is damaged."""
    if record.size < 4 or record.size < 4 + 4 * <size_t>u32(record.payload):
        return -1
    return u32(record.payload)


cdef inline int64_t index_of(const Record* record, int64_t count, const Word* text, double* score) noexcept nogil:
    """Return the index of a text, and its score, in a small list, set or sorted set; -1: absent, -2: it is damaged."""
    cdef Item item
    cdef int64_t i
    cdef size_t at = items_start(record) if count > 0 else 0
    for i in range(count):
        if next_item(record, i, &at, &item) == GENERAL:
            return -2
        if item.size == text.size and memcmp(item.at, text.at, item.size) == 0:
            score[0] = item.score
            return i
    return -1 if count >= 0 else -2


cdef inline int64_t members_in_run(const uint8_t* run, size_t size) noexcept nogil:
    """Return the number of members of a packed sorted set (a run); -1 if it is damaged."""
    if size < 4 or size < 4 + 12 * <size_t>u32(run):
        return -1
    return u32(run)


cdef inline int64_t rank_in_run(
    const uint8_t* run, size_t size, double score, const Word* member, bint is_after
) noexcept nogil:
    """Return how many members of a run are before (score, member); -1 if the run is damaged.

    is_after: an equal member counts, too.
    """
    cdef int64_t count = members_in_run(run, size), low = 0, high, middle, i
    cdef const uint8_t* scores = run + 4
    cdef size_t at, length
    cdef int order
    if count < 0:
        return -1
    high = count
    while low < high:
        middle = (low + high) >> 1
        if f64(scores + 8 * middle) < score:
            low = middle + 1
        else:
            high = middle
    if low == count or f64(scores + 8 * low) != score:
        return low
    at = 4 + 12 * <size_t>count
    for i in range(low):
        at += u32(run + 4 + 8 * count + 4 * i)
    for i in range(low, count):
        if f64(scores + 8 * i) != score:
            return i
        length = u32(run + 4 + 8 * count + 4 * i)
        if at > size or length > size - at:
            return -1
        order = memcmp(run + at, member.at, min(length, member.size))
        if order == 0:
            order = -1 if length < member.size else 1 if length > member.size else 0
        if order > 0 or (order == 0 and not is_after):
            return i
        at += length
    return count


cdef inline int read_run(const uint8_t* run, size_t size, int64_t first, int64_t last, Item* items) noexcept nogil:
    """Read the members of a run from `first` up to `last` (exclusive)."""
    cdef int64_t count = members_in_run(run, size), i
    cdef size_t at = 4 + 12 * <size_t>count, length
    if not 0 <= first <= last <= count:
        return GENERAL
    for i in range(last):
        length = u32(run + 4 + 8 * count + 4 * i)
        if i >= first:
            if at > size or length > size - at:
                return GENERAL
            items[i - first].at, items[i - first].size, items[i - first].score = run + at, length, f64(run + 4 + 8 * i)
        at += length
    return LIVE


cdef inline int name_member(const Record* record, const Word* member, Lookup* lookup) noexcept nogil:
    """Prepare the look-up of a member, or of a field, of a large record."""
    lookup.high = u64(record.payload)
    lookup.low = <uint64_t>crc32_of(member.at, member.size) << 32 | <uint64_t>crc16_of(member.at, member.size) << 16
    lookup.bytes_, lookup.outcome = 14, MISSING
    return 0


cdef inline int64_t size_of(const Record* record) noexcept nogil:
    """Return the number of elements of a record, or of a value's bytes, 0 for a missing key; -1 if it is damaged."""
    cdef uint64_t count
    if record.form < 0:
        return 0
    if record.form == VALUE:
        return record.size
    if record.form == SMALL_MAP:
        return u16(record.payload) if record.size >= 2 else -1
    if record.form in (SHORT_LIST, SMALL_SET):
        return list_count(record)
    if record.form == SMALL_SORTED_SET:
        return members_in_run(record.payload, record.size)
    if record.size < 16 or (record.form == LONG_LIST and record.size < 24):
        return -1
    count = u64(record.payload + 8)
    if record.form == LONG_LIST:  # its first index, and the one after its last
        count = u64(record.payload + 16) - count
    return <int64_t>count if count <= <uint64_t>1 << RANK_BITS else -1
