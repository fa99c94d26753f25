"""Replies about all keys, or about those of a slot: a walk over the keys of a view's only job."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from resp_server.native.arguments cimport integer, is_word
from resp_server.native.glob cimport GLOB_STEPS_MAX, glob
from resp_server.native.jobs cimport JobPages
from resp_server.native.lookup_batch cimport ENTRIES_MAX, LookupBatch, Request, random_below
from resp_server.native.records cimport ABSENT, ANSWERED, GENERAL, LARGE_MAP, LIVE
from resp_server.native.rows cimport ALL_TEXTS, ONE_TEXT, TEXTS, rows
from resp_server.native.permissions cimport PATTERN_BYTES_MAX
from resp_server.native.wire cimport NUMBER_LINE_BYTES, Output, Word, insert, insert_scan_head, put_bulk, put_line, write_line
from state_backend.native.little_endian cimport u32, u64
from state_backend.native.lookup cimport EXPIRY_AT, FORM_AT, FOUND, HEADER_BYTES, MISSING, Pages, Walk

cdef enum:
    SCAN_COUNT = 10  # elements of a scan without COUNT, as in Redis
    SCAN_VISITS_MAX = 1024  # more rows that it visits than elements
    KEYS_MAX = 16384  # that KEYS walks, some 2 ms; the general path walks more of them, in steps
    VISITED_BYTES_MAX = 4 << 20  # of their records
    KEY_POSITION_BITS = 46


cdef inline int has_key(const Walk* walk, int64_t now_ms) noexcept nogil:
    """Return LIVE if the record at a walk's place has a key at this clock reading, ABSENT if it expired; GENERAL: undecided."""
    cdef const uint8_t* record = walk.lookup.record
    cdef size_t size = walk.lookup.size
    if size < HEADER_BYTES or u32(record) > size - HEADER_BYTES:
        return GENERAL
    size -= HEADER_BYTES + u32(record)
    if record[FORM_AT] == LARGE_MAP and (size < 32 or 0 < <int64_t>u64(record + HEADER_BYTES + u32(record) + 24) <= now_ms):
        return GENERAL  # some fields have expired, perhaps all
    return ABSENT if 0 < <int64_t>u64(record + EXPIRY_AT) <= now_ms else LIVE


cdef inline int reply_of_keys(LookupBatch batch, Request* request) except -2:
    """Reply with keys of the only job from a cursor on, which is a position (see `Snapshot.scan`), with all, or with any."""
    cdef Output* out = batch.out
    cdef int reply = rows[request.command].reply
    cdef Word* words = &batch.words[request.first_word]
    cdef const Word* pattern = NULL
    cdef int64_t cursor = 0, wanted = SCAN_COUNT, left, visits = 0, count = 0, now_ms
    cdef uint64_t last = 0, next_cursor = 0, steps = 0
    cdef size_t before = out.used, visited = 0, at = 1
    cdef Pages pages
    cdef Walk walk
    cdef const uint8_t* record
    cdef int found, has
    cdef char head[NUMBER_LINE_BYTES]
    while at < request.words:
        if at + 1 == request.words:
            return GENERAL
        if is_word(&words[at], b"match", 5):
            pattern = &words[at + 1]
        elif not is_word(&words[at], b"count", 5) or not integer(&words[at + 1], &wanted):
            return GENERAL
        at += 2
    if reply == ALL_TEXTS:
        pattern, wanted = words, KEYS_MAX
    elif reply == ONE_TEXT:
        cursor, wanted = random_below(batch, 1 << 23) << 23 | random_below(batch, 1 << 23), 1
    elif not integer(words, &cursor) or cursor < 0 or cursor >> KEY_POSITION_BITS or not 0 < wanted <= ENTRIES_MAX:
        return GENERAL
    if pattern != NULL and pattern.size > PATTERN_BYTES_MAX:
        return GENERAL
    if batch.jobs.only_job < 0 or batch.jobs.owned_slots != NULL or not batch.jobs.refresh_job(batch.jobs.only_job):
        return GENERAL
    if (<JobPages>batch.jobs.pages[batch.jobs.only_job]).missing_slots is not None or not batch.jobs.is_listed():
        return GENERAL
    pages, now_ms, left = (<JobPages>batch.jobs.pages[batch.jobs.only_job]).pages, (<JobPages>batch.jobs.pages[batch.jobs.only_job]).now_ms, wanted
    found = pages.first_row(&pages.keys, &walk, <uint64_t>cursor << 16, 0, False)
    if found == MISSING and reply == ONE_TEXT:  # after the last key comes the first one
        found = pages.first_row(&pages.keys, &walk, 0, 0, False)
    while found == FOUND and not (reply == ONE_TEXT and count):
        if (left <= 0 or visits >= SCAN_VISITS_MAX + wanted) and walk.lookup.high >> 16 != last >> 16:
            next_cursor = walk.lookup.high >> 16
            break
        if visits and walk.lookup.high <= last:
            return GENERAL  # damaged
        record = walk.lookup.record
        last, visits, visited = walk.lookup.high, visits + 1, visited + walk.lookup.size
        has = has_key(&walk, now_ms)
        if visited > VISITED_BYTES_MAX or has == GENERAL:
            return GENERAL
        if has == LIVE:
            left -= 1
            if pattern == NULL or glob(pattern.at, pattern.size, record + HEADER_BYTES, u32(record), &steps):
                put_bulk(out, record + HEADER_BYTES, u32(record))
                count += 1
            if steps > GLOB_STEPS_MAX:
                return GENERAL
        found = pages.next_row(&pages.keys, &walk)
    if found != FOUND and found != MISSING:
        return GENERAL
    if reply == TEXTS:
        return insert_scan_head(out, before, next_cursor, count) + ANSWERED
    if reply == ONE_TEXT:
        return ANSWERED if count else GENERAL
    if next_cursor or not batch.limit:  # or a second one in a transaction
        return GENERAL
    batch.limit = 0  # it took long: the next request has another turn
    return insert(out, before, head, write_line(head, c"*", count)) + ANSWERED


cdef inline int reply_of_slot(LookupBatch batch, Request* request) except -2:
    """Reply with the number of a slot's keys, or with some of them."""
    cdef Word* words = &batch.words[request.first_word]
    cdef int64_t slot = 0, wanted = ENTRIES_MAX + 1, visits = 0, count = 0
    cdef bint has_texts = rows[request.command].is_array
    cdef size_t before = batch.out.used
    cdef JobPages job
    cdef Walk walk
    cdef int found, has
    cdef char head[NUMBER_LINE_BYTES]
    if not batch.jobs.is_node or not integer(&words[0], &slot) or not 0 <= slot < 1 << 14:
        return GENERAL
    if has_texts and (not integer(&words[1], &wanted) or wanted < 0):
        return GENERAL
    if batch.jobs.only_job < 0 or (batch.jobs.owned_slots != NULL and not batch.jobs.owned_slots[slot]) or not batch.jobs.refresh_job(batch.jobs.only_job):
        return GENERAL
    job = <JobPages>batch.jobs.pages[batch.jobs.only_job]
    if job.missing_slots is not None or not batch.jobs.is_listed():
        return GENERAL
    found = job.pages.first_row(&job.pages.keys, &walk, <uint64_t>slot << 48, 0, False)
    while found == FOUND and walk.lookup.high >> 48 == <uint64_t>slot and count < wanted:
        has, visits = has_key(&walk, job.now_ms), visits + 1
        if has == GENERAL or visits > ENTRIES_MAX:
            return GENERAL
        if has == LIVE:
            count += 1
            if has_texts:
                put_bulk(batch.out, walk.lookup.record + HEADER_BYTES, u32(walk.lookup.record))
        found = job.pages.next_row(&job.pages.keys, &walk)
    if found != FOUND and found != MISSING:
        return GENERAL
    if has_texts:
        return insert(batch.out, before, head, write_line(head, c"*", count)) + ANSWERED
    return put_line(batch.out, c":", count) + ANSWERED
