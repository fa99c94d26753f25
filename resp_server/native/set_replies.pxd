"""Replies with unions, intersections and differences of small sets."""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport qsort
from libc.string cimport memset

from resp_server.native.combined_sets cimport Combination, ScoredMember, WeightedSet, combine, parse_combination
from resp_server.native.lookup_batch cimport ENTRIES_MAX, LookupBatch, Request, count_lookup, put_item, read_key
from resp_server.native.records cimport ANSWERED, GENERAL, LIVE, SMALL_SET, by_score, size_of
from resp_server.native.rows cimport *
from resp_server.native.wire cimport put_line, reserve


cdef inline int64_t read_sets(LookupBatch batch, Request* request, Combination* wanted) except -2:
    """Read the sets of all keys, in the order in which they are combined; return the number of members, -1 for the general path."""
    cdef const Row* row = &rows[request.command]
    cdef bint is_ordered = row.reply in (IN_ALL, COUNT_IN_ALL) or (row.reply == IN_ANY and row.kind == SORTED_SET)
    cdef WeightedSet one
    cdef WeightedSet* sets = wanted.sets
    cdef int64_t total = 0
    cdef size_t i, j
    cdef int found
    for i in range(request.keys):
        found = read_key(batch, request.first_lookup + i, &batch.words[request.first_word + i], &one.record)
        if found == GENERAL or (found == LIVE and one.record.form not in (SMALL_SET, SMALL_FORMS[row.kind])):
            return -1
        count_lookup(batch, found == LIVE)
        one.count, one.weight = size_of(&one.record), wanted.weights[i]
        if one.count < 0:
            return -1
        total += one.count
        j = i
        while is_ordered and j and sets[j - 1].count > one.count:  # smaller ones come first
            sets[j] = sets[j - 1]
            j -= 1
        sets[j] = one
    return total


cdef inline int reply_of_sets(LookupBatch batch, Request* request) except -2:
    """Reply with members of small sets: those in all of them, in any, or in the first one only; or with their number."""
    cdef const Row* row = &rows[request.command]
    cdef Combination wanted
    cdef int64_t total, count, i, kept = 0
    cdef uint32_t buckets = 16
    cdef ScoredMember* members
    total = read_sets(batch, request, &wanted) if parse_combination(&batch.words[request.first_word], request.words, request.keys, row, &wanted) else -1
    if not 0 <= total <= ENTRIES_MAX:
        return GENERAL
    while buckets < total:
        buckets *= 2
    batch.scratch.used = 0
    reserve(&batch.scratch, (total + 1) * sizeof(ScoredMember) + buckets * sizeof(uint32_t))
    members = <ScoredMember*>batch.scratch.data
    memset(&members[total + 1], 0, buckets * sizeof(uint32_t))
    count = combine(&wanted, request.keys, row.reply == IN_ANY, members, <uint32_t*>&members[total + 1], buckets - 1)
    for i in range(count):
        if row.reply == IN_ANY or members[i].sets == (1 if row.reply == IN_FIRST else request.keys):
            members[kept] = members[i]
            kept += 1
    if count < 0 or row.reply == COUNT_IN_ALL:
        kept = min(kept, wanted.limit) if wanted.limit else kept
        return put_line(batch.out, c":", kept) + ANSWERED if count >= 0 else GENERAL
    if row.kind == SORTED_SET:
        qsort(members, kept, sizeof(ScoredMember), by_score)
    count = 2 * kept if wanted.has_scores and not batch.is_resp3 else kept
    put_line(batch.out, c"~" if batch.is_resp3 and row.kind == SET else c"*", count)
    for i in range(kept):
        put_item(batch, &members[i].item, wanted.has_scores)
    return ANSWERED
