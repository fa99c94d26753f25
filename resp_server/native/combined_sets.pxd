"""Unions, intersections and differences of small sets and sorted sets. Members of a set have the score 1.

A sum of doubles depends on the order. It is that of the sets' sizes, as in Redis (see `commands.sorted_set_algebra`).
"""

from libc.stdint cimport int64_t, uint32_t

from resp_server.native.arguments cimport exact_double, integer, is_word
from resp_server.native.records cimport GENERAL, Item, Record, is_same_text, items_start, next_item
from resp_server.native.rows cimport COUNT_IN_ALL, IN_ALL, IN_ANY, SET, Row
from resp_server.native.wire cimport Word
from state_backend.native.lookup cimport crc32_of

cdef enum:
    SETS_MAX = 32

cdef enum Aggregate:
    SUM
    LOWEST
    HIGHEST

cdef struct WeightedSet:
    Record record
    int64_t count  # of its members; 0: the key is missing
    double weight

cdef struct Combination:  # what a request asks for
    WeightedSet sets[SETS_MAX]
    double weights[SETS_MAX]  # of the keys in their order
    int aggregate
    bint has_scores
    int64_t limit  # of the number of members; 0: none

cdef struct ScoredMember:
    Item item  # the first field, so that members are sorted as items are
    uint32_t sets  # those that have it
    uint32_t next  # the number of another member in the same bucket, from 1 on; 0: none


cdef inline double aggregated(double one, double other, int aggregate) noexcept nogil:
    cdef double total = one + other
    if aggregate == SUM:
        return 0.0 if total != total else total  # infinities that cancel each other out
    return other if (other < one if aggregate == LOWEST else other > one) else one


cdef inline int64_t combine(
    const Combination* wanted, size_t count, bint is_union, ScoredMember* members, uint32_t* buckets, uint32_t mask
) noexcept nogil:
    """Read the members of all sets for a union, else those of the first one; return their number, -1 if a set is damaged.

    Each has the number of its sets, and the aggregate of its scores in them.

    Args:
        members: Room for all that are read, and one more.
        buckets: The number of a member for each hash; zeros.
    """
    cdef const WeightedSet* sets = wanted.sets
    cdef size_t j, at
    cdef int64_t i, found = 0
    cdef uint32_t number
    cdef uint32_t* bucket
    cdef ScoredMember* member
    for j in range(count):
        at = items_start(&sets[j].record) if sets[j].count else 0
        for i in range(sets[j].count):
            member = &members[found]
            if next_item(&sets[j].record, i, &at, &member.item) == GENERAL:
                return -1
            member.item.score *= sets[j].weight
            if (is_union or j == 0) and member.item.score != member.item.score:
                member.item.score = 0.0  # an infinite score, times zero
            bucket = &buckets[crc32_of(member.item.at, member.item.size) & mask]
            number = bucket[0]
            while number and not is_same_text(&members[number - 1].item, &member.item):
                number = members[number - 1].next
            if number:
                members[number - 1].sets += 1
                members[number - 1].item.score = aggregated(members[number - 1].item.score, member.item.score, wanted.aggregate)
            elif is_union or j == 0:
                member.sets, member.next = 1, bucket[0]
                found += 1
                bucket[0] = <uint32_t>found
    return found


cdef inline bint parse_combination(const Word* words, size_t count, size_t keys, const Row* row, Combination* wanted) except -1:
    """Parse the options after the keys; False: the general path parses them."""
    cdef size_t at = keys, i
    cdef bint has_weights = row.reply in (IN_ANY, IN_ALL), is_counted = row.reply == COUNT_IN_ALL
    wanted.aggregate, wanted.has_scores, wanted.limit = SUM, False, 0
    if keys > SETS_MAX or (keys < count and row.kind == SET and not is_counted):
        return False
    for i in range(keys):
        wanted.weights[i] = 1.0
    while at < count:
        if has_weights and count - at > keys and is_word(&words[at], b"weights", 7):
            for i in range(keys):
                if not exact_double(&words[at + 1 + i], &wanted.weights[i]):
                    return False
            at += keys
        elif has_weights and count - at > 1 and is_word(&words[at], b"aggregate", 9):
            at += 1
            wanted.aggregate = LOWEST if is_word(&words[at], b"min", 3) else HIGHEST if is_word(&words[at], b"max", 3) else SUM
            if wanted.aggregate == SUM and not is_word(&words[at], b"sum", 3):
                return False
        elif is_counted and count - at > 1 and is_word(&words[at], b"limit", 5):
            at += 1
            if not integer(&words[at], &wanted.limit) or wanted.limit < 0:
                return False
        elif not is_counted and is_word(&words[at], b"withscores", 10):
            wanted.has_scores = True
        else:
            return False
        at += 1
    return True
