"""Ranges of sorted sets: by rank, by score, or by the members' texts."""

from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcmp

from resp_server.native.arguments cimport integer, is_word, score_of, text_end
from resp_server.native.records cimport GENERAL, Item, Record, items_start, next_item
from resp_server.native.rows cimport FROM_HIGHEST, FROM_LOWEST, RANKS, SCORES, TEXT_RANGE, Row
from resp_server.native.wire cimport Word

cdef enum:
    TEXTS_MAX = 512  # of a set in which a range by text is searched

cdef struct RankRange:
    bint is_by_score, is_by_text, is_reversed, has_scores
    int64_t first, last  # as in the request, or ranks from the lowest (last: exclusive)
    double low, high
    const Word* low_text  # NULL: no end
    const Word* high_text
    bint excludes_low, excludes_high
    int64_t offset, count  # of LIMIT; count: negative for all


cdef inline bint parse_range(const Word* words, size_t count, const Row* row, RankRange* wanted) except -1:
    """Parse a range of a sorted set and its options; False: the general path parses it."""
    cdef size_t at = 3, low = 1, high = 2
    cdef bint has_options = row.reads == RANKS and row.reply == FROM_LOWEST, has_limit = False
    wanted.is_by_score, wanted.is_reversed, wanted.has_scores = row.reads == SCORES, row.reply == FROM_HIGHEST, False
    wanted.is_by_text = row.reads == TEXT_RANGE
    wanted.offset, wanted.count = 0, -1
    while at < count:
        if is_word(&words[at], b"withscores", 10):
            wanted.has_scores = True
        elif has_options and not wanted.is_reversed and is_word(&words[at], b"rev", 3):
            wanted.is_reversed = True
        elif has_options and not wanted.is_by_score and is_word(&words[at], b"byscore", 7):
            wanted.is_by_score = True
        elif count - at > 2 and is_word(&words[at], b"limit", 5):
            if not integer(&words[at + 1], &wanted.offset) or not integer(&words[at + 2], &wanted.count):
                return False
            has_limit = True
            at += 2
        else:
            return False
        at += 1
    if wanted.is_by_text:
        if wanted.is_reversed:
            low, high = high, low
        return (
            wanted.offset >= 0 and not wanted.has_scores
            and text_end(&words[low], c"-", &wanted.low_text, &wanted.excludes_low)
            and text_end(&words[high], c"+", &wanted.high_text, &wanted.excludes_high)
        )
    if not wanted.is_by_score:
        return not has_limit and integer(&words[1], &wanted.first) and integer(&words[2], &wanted.last)
    if wanted.is_reversed:
        low, high = high, low
    return (
        wanted.offset >= 0
        and score_of(&words[low], &wanted.low, &wanted.excludes_low)
        and score_of(&words[high], &wanted.high, &wanted.excludes_high)
    )


cdef inline int order_of(const uint8_t* text, size_t size, const Word* end) noexcept nogil:
    """Compare a text with the end of a range, whose first byte is its kind."""
    cdef int order = memcmp(text, end.at + 1, min(size, end.size - 1))
    return order if order else -1 if size < end.size - 1 else size > end.size - 1


cdef inline bint text_ranks(const Record* record, int64_t count, RankRange* wanted) noexcept nogil:
    """Find the ranks of a range by text in a packed sorted set, the last one exclusive; False if the set is damaged.

    Members are compared one by one, as Redis does in a small set, so that the range is equal even if scores differ.
    """
    cdef bint is_above[TEXTS_MAX]
    cdef bint is_below[TEXTS_MAX]
    cdef size_t at = items_start(record)
    cdef int64_t i, first = 0, last = count
    cdef Item item
    cdef int order
    wanted.first = wanted.last = 0
    if count > TEXTS_MAX:
        return False
    for i in range(count):
        if next_item(record, i, &at, &item) == GENERAL:
            return False
        is_above[i] = is_below[i] = True
        if wanted.low_text != NULL:
            order = order_of(item.at, item.size, wanted.low_text)
            is_above[i] = order > 0 or (order == 0 and not wanted.excludes_low)
        if wanted.high_text != NULL:
            order = order_of(item.at, item.size, wanted.high_text)
            is_below[i] = order < 0 or (order == 0 and not wanted.excludes_high)
    if not count or not is_above[count - 1] or not is_below[0]:
        return True
    if wanted.is_reversed:  # down from the last member below the high end
        while not is_below[last - 1]:
            last -= 1
        first = last
        while first and is_above[first - 1]:
            first -= 1
    else:
        while not is_above[first]:
            first += 1
        last = first
        while last < count and is_below[last]:
            last += 1
    wanted.first, wanted.last = first, last
    return True
