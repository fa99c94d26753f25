"""Replies with the members of a sorted set in a range, or in an area."""

from libc.math cimport INFINITY, nextafter
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport qsort

from resp_server.native.geo cimport Match, Search, by_order, parse_search, put_match
from resp_server.native.geohash cimport CELLS_MAX, Cell, cells_of, distance_within, first_score, is_place, point_of
from resp_server.native.lookup_batch cimport ENTRIES_MAX, LookupBatch, Request, pages_of, put_item, random_below
from resp_server.native.ranges cimport RankRange, parse_range, text_ranks
from resp_server.native.records cimport (
    ABSENT, ANSWERED, GENERAL, LARGE_SORTED_SET, LIVE, SMALL_SORTED_SET, Item, Record, index_of, members_in_run,
    name_member, rank_in_run, read_record, read_run, size_of
)
from resp_server.native.rows cimport LENGTHS, rows
from resp_server.native.trees cimport find_leaf, rank_in_tree
from resp_server.native.wire cimport Output, Word, put, put_line, reserve
from state_backend.native.little_endian cimport f64, u64
from state_backend.native.lookup cimport Lookup, Pages


cdef inline int64_t rank_of_score(Pages pages, const Record* record, double score, bint is_after) except -2:
    """Return how many members have a lower score; -1 if the set is damaged. is_after: those with this score, too."""
    cdef Word no_member = Word(<const uint8_t*>b"", 0)
    if is_after:
        if score == INFINITY:
            return size_of(record)
        score = nextafter(score, INFINITY)
    if record.form == SMALL_SORTED_SET:
        return rank_in_run(record.payload, record.size, score, &no_member, False)
    return rank_in_tree(pages, u64(record.payload), score, &no_member)


cdef inline bint range_in(Pages pages, const Record* record, RankRange* wanted) except -1:
    """Turn a range into ranks from the lowest, the last one exclusive; False if the set is damaged."""
    cdef int64_t count = size_of(record), length
    if count < 0:
        return False
    if wanted.is_by_text:
        if record.form != SMALL_SORTED_SET or not text_ranks(record, count, wanted):
            return False
    elif not wanted.is_by_score:
        wanted.first = wanted.first + count if wanted.first < 0 else wanted.first
        wanted.last = (wanted.last + count if wanted.last < 0 else wanted.last) + 1
        wanted.first, wanted.last = max(wanted.first, 0), min(wanted.last, count)
        if wanted.is_reversed:
            wanted.first, wanted.last = count - wanted.last, count - wanted.first
        return True
    else:
        wanted.first = rank_of_score(pages, record, wanted.low, wanted.excludes_low)
        wanted.last = rank_of_score(pages, record, wanted.high, not wanted.excludes_high)
    if wanted.first < 0 or wanted.last < 0:
        return False
    length = max(0, wanted.last - wanted.first - wanted.offset) if wanted.last > wanted.first else 0
    if 0 <= wanted.count < length:
        length = wanted.count
    if wanted.is_reversed:
        wanted.last -= wanted.offset
        wanted.first = wanted.last - length
    else:
        wanted.first += wanted.offset
        wanted.last = wanted.first + length
    return True


cdef inline int read_members(Pages pages, const Record* record, int64_t first, int64_t last, Item* items) except -2:
    """Read the members of a sorted set from rank `first` up to `last` (exclusive)."""
    cdef int64_t at = first, start, stop
    cdef Lookup leaf
    if record.form == SMALL_SORTED_SET:
        return read_run(record.payload, record.size, first, last, items)
    while at < last:
        start = find_leaf(pages, u64(record.payload), at, 0.0, NULL, &leaf)
        if start < 0:
            return GENERAL
        stop = min(last, start + members_in_run(leaf.record, leaf.size - 1))
        if not start <= at < stop or read_run(leaf.record, leaf.size - 1, at - start, stop - start, items + (at - first)) == GENERAL:
            return GENERAL
        at = stop
    return LIVE


cdef inline int reply_of_range(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with the members of a range by rank or by score, or with their number."""
    cdef Output* out = batch.out
    cdef Pages pages = None
    cdef int64_t first = 0, last = 0, i
    cdef RankRange wanted
    cdef Item* items
    if not parse_range(&batch.words[request.first_word], request.words, &rows[request.command], &wanted):
        return GENERAL
    if found == LIVE and record.form == LARGE_SORTED_SET and record.size < 24:
        return GENERAL
    if found == LIVE:
        pages = pages_of(batch, request)
        if not range_in(pages, record, &wanted):
            return GENERAL
        first, last = wanted.first, wanted.last
    if rows[request.command].reply == LENGTHS:
        return put_line(out, c":", max(0, last - first)) + ANSWERED
    if first >= last:
        return put(out, b"*0\r\n", 4) + ANSWERED
    if last - first > ENTRIES_MAX:
        return GENERAL
    put_line(out, c"*", (last - first) * (2 if wanted.has_scores and not batch.is_resp3 else 1))
    batch.scratch.used = 0
    reserve(&batch.scratch, (last - first) * sizeof(Item))
    items = <Item*>batch.scratch.data
    if read_members(pages, record, first, last, items) == GENERAL:
        return GENERAL
    for i in range(last - first):
        put_item(batch, &items[last - first - 1 - i if wanted.is_reversed else i], wanted.has_scores)
    return ANSWERED


cdef inline int find_score(LookupBatch batch, const Request* request, const Record* record, const Word* member, double* score) except -2:
    """Find the score of a member that was not looked up with the others: LIVE, ABSENT or GENERAL."""
    cdef Pages pages
    cdef Lookup lookup
    cdef Lookup* lookups = &lookup
    cdef Record row
    cdef int64_t rank
    cdef int found
    if record.form == SMALL_SORTED_SET:
        rank = index_of(record, size_of(record), member, score)
        return LIVE if rank >= 0 else ABSENT if rank == -1 else GENERAL
    if record.size < 24:
        return GENERAL
    pages = pages_of(batch, request)
    name_member(record, member, &lookup)
    pages.find(&pages.fields, &lookups, 1)
    found = read_record(&lookup, member, batch.clock_of[request.first_lookup], &row)
    if found == LIVE and row.size != 8:
        return GENERAL
    score[0] = f64(row.payload) if found == LIVE else 0
    return found


cdef inline int64_t matches_of(
    LookupBatch batch, Request* request, const Record* record, const Search* wanted, Match** matches
) except -2:
    """Find the members in an area, with ANY up to COUNT; return their number, -1 for the general path."""
    cdef Cell cells[CELLS_MAX]
    cdef int64_t first[CELLS_MAX]
    cdef int64_t last[CELLS_MAX]
    cdef int64_t total = 0, found = 0, i
    cdef Pages pages = pages_of(batch, request)
    cdef int cell_count = cells_of(&wanted.shape, cells), cell
    cdef Item* items
    cdef double meters
    for cell in range(cell_count):
        first[cell] = rank_of_score(pages, record, first_score(cells[cell], 0), False)
        last[cell] = rank_of_score(pages, record, first_score(cells[cell], 1), False)
        if first[cell] < 0 or last[cell] < 0:
            return -1
        total += max(0, last[cell] - first[cell])
    if total > ENTRIES_MAX:
        return -1
    batch.scratch.used = 0
    reserve(&batch.scratch, (total + 1) * (sizeof(Match) + sizeof(Item)))
    matches[0], items = <Match*>batch.scratch.data, <Item*>(batch.scratch.data + (total + 1) * sizeof(Match))
    for cell in range(cell_count):
        if first[cell] >= last[cell]:
            continue
        if read_members(pages, record, first[cell], last[cell], items) == GENERAL:
            return -1
        for i in range(last[cell] - first[cell]):
            meters = distance_within(&wanted.shape, point_of(items[i].score))
            if meters != meters or not is_place(items[i].score):
                return -1
            if meters < 0:
                continue
            matches[0][found] = Match(items[i], -meters if wanted.is_descending else meters, found)
            found += 1
            if wanted.is_any and found == wanted.count:
                return found
    return found


cdef inline int reply_of_area(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with the members in an area, in the order of Redis."""
    cdef int reply = rows[request.command].reply
    cdef Search wanted
    cdef Match* matches
    cdef double score = 0
    cdef int64_t count, i
    if not parse_search(&batch.words[request.first_word + 1], request.words - 1, reply, &wanted):
        return GENERAL
    if found != LIVE:
        return put(batch.out, b"*0\r\n", 4) + ANSWERED
    if wanted.member != NULL:
        if find_score(batch, request, record, wanted.member, &score) != LIVE or not is_place(score):
            return GENERAL
        wanted.shape.center = point_of(score)
    count = matches_of(batch, request, record, &wanted, &matches)
    if count < 0:
        return GENERAL
    if wanted.is_ordered:
        qsort(matches, count, sizeof(Match), by_order)
    count = min(count, wanted.count) if wanted.count else count
    put_line(batch.out, c"*", count)
    for i in range(count):
        put_match(batch.out, &matches[i], &wanted, batch.is_resp3)
    return ANSWERED
