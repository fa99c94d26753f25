"""Replies with elements of one key: all of them, some from a cursor or an index on, or random ones."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint64_t
from libc.stdlib cimport qsort
from libc.string cimport memchr

from resp_server.native.arguments cimport exact_double, integer, is_word
from resp_server.native.encoding cimport put_double
from resp_server.native.listings cimport SCAN_COUNT, SCAN_VISITS_MAX
from resp_server.native.lookup_batch cimport ENTRIES_MAX, REPLY_BYTES_MAX, LookupBatch, Request, pages_of, put_item, random_below
from resp_server.native.records cimport (
    ABSENT, ANSWERED, GENERAL, LARGE_MAP, LARGE_SET, LIVE, LONG_LIST, SHORT_LIST, SMALL_MAP, SMALL_SET, SMALL_SORTED_SET,
    VALUE, ByteRange, Item, Record, by_score, index_of, items_start, list_count, list_range, next_item, read_run, size_of
)
from resp_server.native.rows cimport *
from resp_server.native.wire cimport (
    NUMBER_LINE_BYTES, Output, Word, insert, insert_scan_head, put, put_bulk, put_line, put_nil, reserve, write_line
)
from state_backend.native.little_endian cimport u32, u64
from state_backend.native.lookup cimport EXPIRY_AT, FORM_AT, FOUND, HEADER_BYTES, MISSING, Pages, Walk

cdef enum:
    POSITION_BITS = 48  # of a field
    RANDOM_MAX = 512  # elements of a record of which some are chosen at random


cdef inline int put_row(LookupBatch batch, int reply, const Walk* walk, int64_t now_ms) except -2:
    """Write a row's field, value or member: LIVE, ABSENT if it has expired, or GENERAL if the core cannot read it."""
    cdef const uint8_t* record = walk.lookup.record
    cdef size_t size = walk.lookup.size, name_size
    cdef int64_t expire_at_ms
    if size < HEADER_BYTES or u32(record) > size - HEADER_BYTES or record[FORM_AT] != VALUE:
        return GENERAL
    name_size, expire_at_ms = u32(record), <int64_t>u64(record + EXPIRY_AT)
    if 0 < expire_at_ms <= now_ms:
        return ABSENT
    record += HEADER_BYTES
    if reply in (MEMBERS, FIELDS, PAIRS):
        put_bulk(batch.out, record, name_size)
    if reply in (TEXTS, PAIRS):
        put_bulk(batch.out, record + name_size, size - HEADER_BYTES - name_size)
    return LIVE


cdef inline int reply_of_rows(LookupBatch batch, Request* request, const Record* record, uint64_t cursor, int64_t wanted) except -2:
    """Reply with all of a large map or set, or with elements from a cursor on, which is a field's position in the table."""
    cdef Output* out = batch.out
    cdef const Row* row = &rows[request.command]
    cdef Pages pages = pages_of(batch, request)
    cdef int64_t now_ms = batch.clock_of[request.first_lookup], count = 0, visits = 0
    cdef uint64_t row_id = u64(record.payload), last = 0, next_cursor = 0
    cdef size_t before = out.used, visited = 0
    cdef Walk walk
    cdef int has, found, reply = row.reply if record.form == LARGE_MAP else MEMBERS
    cdef char head[NUMBER_LINE_BYTES]
    cdef char type_byte = c"*"
    if not 0 <= wanted <= ENTRIES_MAX or cursor >> POSITION_BITS:
        return GENERAL
    found = pages.first_row(&pages.fields, &walk, row_id, cursor << 16, False)
    while found == FOUND and walk.lookup.high == row_id:
        if count >= wanted and walk.lookup.low >> 16 != last:
            next_cursor = walk.lookup.low >> 16
            break
        if visits >= SCAN_VISITS_MAX + wanted or visited > REPLY_BYTES_MAX:
            return GENERAL
        last = walk.lookup.low >> 16
        visited += walk.lookup.size
        has = put_row(batch, reply, &walk, now_ms)
        if has == GENERAL:
            return GENERAL
        count += has == LIVE
        visits += 1
        found = pages.next_row(&pages.fields, &walk)
    if found != FOUND and found != MISSING:
        return GENERAL
    if row.reads == SCAN:
        return insert_scan_head(out, before, next_cursor, 2 * count if reply == PAIRS else count) + ANSWERED
    if next_cursor or count != wanted:
        return GENERAL
    if batch.is_resp3 and (row.kind == SET or row.reply == PAIRS):
        type_byte = c"~" if row.kind == SET else c"%"
    return insert(out, before, head, write_line(head, type_byte, 2 * count if reply == PAIRS and not batch.is_resp3 else count)) + ANSWERED


cdef inline int reply_of_whole(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with all of a record."""
    cdef Output* out = batch.out
    cdef const Row* row = &rows[request.command]
    cdef int64_t count, i
    cdef size_t at
    cdef Item item
    cdef char type_byte = c"*"
    if found == LIVE and record.form in (LARGE_MAP, LARGE_SET):
        return reply_of_rows(batch, request, record, 0, size_of(record))
    if found == LIVE and record.form != SMALL_FORMS[row.kind]:
        return GENERAL
    if row.kind == STRING:
        return (put_bulk(out, record.payload, record.size) if found == LIVE else put_nil(out, batch.is_resp3)) + ANSWERED
    if batch.is_resp3 and (row.kind == SET or row.reply == PAIRS):
        type_byte = c"~" if row.kind == SET else c"%"
    if found != LIVE:
        return put_line(out, type_byte, 0) + ANSWERED
    count = size_of(record)
    at = items_start(record) if count >= 0 else record.size + 1
    if at > record.size or record.size > REPLY_BYTES_MAX or (row.kind == SET and count > ENTRIES_MAX):
        return GENERAL
    put_line(out, type_byte, 2 * count if row.reply == PAIRS and not batch.is_resp3 else count)
    if row.kind == SET or row.reply == PAIRS:
        return put(out, record.payload + at, record.size - at) + ANSWERED
    for i in range(2 * count):  # fields and values take turns
        if next_item(record, i, &at, &item) == GENERAL:
            return GENERAL
        if (i & 1) == (row.reply == TEXTS):
            put_bulk(out, item.at, item.size)
    return ANSWERED


cdef inline int reply_of_scan(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with all elements of a small record, at any cursor, or with some of a large map or set."""
    cdef Output* out = batch.out
    cdef Word* words = &batch.words[request.first_word]
    cdef int64_t number = 0, wanted = SCAN_COUNT, count = 0, i
    cdef size_t start, at
    cdef Item item
    if not integer(&words[1], &number) or number < 0:
        return GENERAL
    if request.words == 3 or (request.words == 4 and not is_word(&words[2], b"count", 5)):
        return GENERAL
    if request.words == 4 and (not integer(&words[3], &wanted) or wanted < 1):
        return GENERAL
    if found == LIVE and record.form in (LARGE_MAP, LARGE_SET):
        return reply_of_rows(batch, request, record, <uint64_t>number, wanted)
    if found == LIVE and record.form != SMALL_FORMS[rows[request.command].kind]:
        return GENERAL
    put(out, b"*2\r\n$1\r\n0\r\n", 11)
    if found != LIVE:
        return put(out, b"*0\r\n", 4) + ANSWERED
    count = size_of(record)
    if count < 0 or count > ENTRIES_MAX or record.size > REPLY_BYTES_MAX:
        return GENERAL
    put_line(out, c"*", count if rows[request.command].reply == TEXTS else 2 * count)
    if record.form != SMALL_SORTED_SET:
        start = (2 if record.form == SMALL_MAP else 4) + 4 * <size_t>count
        return put(out, record.payload + start, record.size - start) + ANSWERED if start <= record.size else GENERAL
    at = items_start(record)
    for i in range(count):
        if next_item(record, i, &at, &item) == GENERAL:
            return GENERAL
        put_bulk(out, item.at, item.size)
        put_double(out, item.score, False)
    return ANSWERED


cdef inline int put_list_blocks(LookupBatch batch, Request* request, const Record* record, int64_t first, int64_t last) except -2:
    """Write the elements of a long list from `first` up to `last` (exclusive): its blocks are rows of a table."""
    cdef Pages pages = pages_of(batch, request)
    cdef uint64_t list_id = u64(record.payload)
    cdef int64_t start = <int64_t>u64(record.payload + 8), at = start + first, end = start + last, stop, begin
    cdef size_t before = batch.out.used
    cdef Record block
    cdef ByteRange part
    cdef Walk walk
    cdef int found = pages.first_row(&pages.blocks, &walk, list_id, <uint64_t>at, True)
    while at < end:
        if found != FOUND or walk.lookup.high != list_id or <int64_t>walk.lookup.low > at:
            return GENERAL
        begin = <int64_t>walk.lookup.low
        block.payload, block.size = walk.lookup.record, walk.lookup.size
        stop = min(end, begin + list_count(&block))
        if stop <= at or list_range(&block, at - begin, stop - begin, &part) == GENERAL:
            return GENERAL
        put(batch.out, part.at, part.size)
        if batch.out.used - before > REPLY_BYTES_MAX:
            return GENERAL
        at = stop
        if at < end:
            found = pages.next_row(&pages.blocks, &walk)
    return ANSWERED


cdef inline int reply_of_string_range(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with a range of a value's bytes; negative positions count from the end."""
    cdef int64_t first = 0, last = 0, size
    if not integer(&batch.words[request.first_word + 1], &first):
        return GENERAL
    if not integer(&batch.words[request.first_word + 2], &last):
        return GENERAL
    size = <int64_t>record.size
    if first < 0 and last < 0 and first > last:
        size = 0
    first = max(first + size, 0) if first < 0 else first
    last = min(size, 1 + (max(last + size, 0) if last < 0 else last))
    if not size or first >= last:
        return put(batch.out, b"$0\r\n\r\n", 6) + ANSWERED
    return put_bulk(batch.out, record.payload + first, last - first) + ANSWERED


cdef inline int reply_of_list(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with an element or a range of a list."""
    cdef Output* out = batch.out
    cdef bint is_range = rows[request.command].is_array
    cdef int64_t count = size_of(record), first = 0, last = 0
    cdef ByteRange part
    if count < 0:
        return GENERAL
    if not is_range and found != LIVE:
        return put_nil(out, batch.is_resp3) + ANSWERED
    if not integer(&batch.words[request.first_word + 1], &first):
        return GENERAL
    if is_range and not integer(&batch.words[request.first_word + 2], &last):
        return GENERAL
    if first < 0:
        first += count
    if not is_range:
        if not 0 <= first < count:
            return put_nil(out, batch.is_resp3) + ANSWERED
        last = first + 1
    else:
        last = (last + count if last < 0 else last) + 1
        first, last = max(first, 0), min(last, count)
        if first >= last:
            return put(out, b"*0\r\n", 4) + ANSWERED
        if last - first > ENTRIES_MAX:
            return GENERAL
        put_line(out, c"*", last - first)
    if record.form == LONG_LIST:
        return put_list_blocks(batch, request, record, first, last)
    if list_range(record, first, last, &part) == GENERAL:
        return GENERAL
    return put(out, part.at, part.size) + ANSWERED


cdef inline int put_element(LookupBatch batch, const Record* record, int64_t i, bint has_value) except -2:
    """Write an element of a small record: a field or member, and its value or score if asked."""
    cdef Output* out = batch.out
    cdef size_t at = items_start(record)
    cdef ByteRange part
    cdef Item field, value
    if record.form == SMALL_SORTED_SET:
        if read_run(record.payload, record.size, i, i + 1, &field) == GENERAL:
            return GENERAL
        return put_item(batch, &field, has_value) + ANSWERED
    if record.form == SMALL_SET:
        if list_range(record, i, i + 1, &part) == GENERAL:
            return GENERAL
        return put(out, part.at, part.size) + ANSWERED
    at += u32(record.payload + 2 + 4 * i) if at <= record.size else 0
    if next_item(record, 0, &at, &field) == GENERAL or (has_value and next_item(record, 1, &at, &value) == GENERAL):
        return GENERAL
    if has_value and batch.is_resp3:
        put(out, b"*2\r\n", 4)
    put_bulk(out, field.at, field.size)
    return (put_bulk(out, value.at, value.size) if has_value else 0) + ANSWERED


cdef inline int reply_of_random(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with one or some elements of a small record, each as likely as any other."""
    cdef Output* out = batch.out
    cdef Word* words = &batch.words[request.first_word]
    cdef int64_t size = size_of(record), count = 0, left, i, chosen
    cdef bint has_values = request.words == 3
    cdef uint16_t order[RANDOM_MAX]
    if size < 0 or (found == LIVE and not size) or size > RANDOM_MAX:
        return GENERAL
    if request.words > 1 and not integer(&words[1], &count):
        return GENERAL
    if has_values and not is_word(&words[2], b"withvalues" if record.form == SMALL_MAP else b"withscores", 10):
        return GENERAL
    if has_values and found != LIVE:
        return GENERAL
    if request.words == 1:
        if found != LIVE:
            return put_nil(out, batch.is_resp3) + ANSWERED
        return put_element(batch, record, random_below(batch, size), False)
    left = min(count, size) if count >= 0 else -count if size else 0
    if left > ENTRIES_MAX:
        return GENERAL
    put_line(out, c"*", 2 * left if has_values and not batch.is_resp3 else left)
    if count < 0:
        for i in range(left):
            if put_element(batch, record, random_below(batch, size), has_values) == GENERAL:
                return GENERAL
        return ANSWERED
    for i in range(size):
        order[i] = <uint16_t>i
    for i in range(left):  # the first steps of a shuffle
        chosen = i + random_below(batch, size - i)
        order[i], order[chosen] = order[chosen], order[i]
        if put_element(batch, record, order[i], has_values) == GENERAL:
            return GENERAL
    return ANSWERED


cdef inline int reply_of_search(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with the index of the first element of a short list that is equal to an argument."""
    cdef const Word* element = &batch.words[request.first_word + 1]
    cdef double score
    cdef int64_t i = index_of(record, size_of(record), element, &score)
    if i == -2:
        return GENERAL
    return (put_line(batch.out, c":", i) if i >= 0 else put_nil(batch.out, batch.is_resp3)) + ANSWERED


cdef inline int reply_of_sort(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with the elements of a small list, set or sorted set in the order of their numbers, or of their texts."""
    cdef Word* words = &batch.words[request.first_word]
    cdef bint is_descending = False, is_alpha = False
    cdef int64_t start = 0, wanted = -1, size, i
    cdef size_t at = 1
    cdef Word word
    cdef Item* items
    while at < request.words:
        if request.words - at > 2 and is_word(&words[at], b"limit", 5):
            if not integer(&words[at + 1], &start) or not integer(&words[at + 2], &wanted):
                return GENERAL
            at += 2
        elif is_word(&words[at], b"alpha", 5):
            is_alpha = True
        elif is_word(&words[at], b"asc", 3) or is_word(&words[at], b"desc", 4):
            is_descending = words[at].size == 4
        else:
            return GENERAL
        at += 1
    size = size_of(record) if record.form < 0 or record.form in (SHORT_LIST, SMALL_SET, SMALL_SORTED_SET) else -1
    if not 0 <= size <= ENTRIES_MAX:
        return GENERAL
    batch.scratch.used = 0
    reserve(&batch.scratch, (size + 1) * sizeof(Item))
    items, at = <Item*>batch.scratch.data, items_start(record) if size else 0
    for i in range(size):
        if next_item(record, i, &at, &items[i]) == GENERAL:
            return GENERAL
        word.at, word.size, items[i].score = items[i].at, items[i].size, 0.0
        if memchr(word.at, 0, word.size) != NULL or not (is_alpha or exact_double(&word, &items[i].score)):
            return GENERAL  # in Redis a zero byte ends a text
    qsort(items, size, sizeof(Item), by_score)
    start = min(max(start, 0), size)
    wanted = size - start if wanted < 0 else min(wanted, size - start)
    put_line(batch.out, c"*", wanted)
    for i in range(start, start + wanted):
        put_item(batch, &items[size - 1 - i if is_descending else i], False)
    return ANSWERED
