"""Replies about keys of any kind: whether they exist, their values, types, encodings and expiry."""

from libc.stdint cimport int64_t
from libc.string cimport strlen

from resp_server.native.dumps cimport put_dump, put_encoding
from resp_server.native.encoding cimport checksums, put_no_frequency
from resp_server.native.lookup_batch cimport ENTRIES_MAX, REPLY_BYTES_MAX, LookupBatch, Request, count_lookup, read_key
from resp_server.native.records cimport ANSWERED, GENERAL, LIVE, LONG_VALUE, SMALL_SORTED_SET, VALUE, Record
from resp_server.native.rows cimport *
from resp_server.native.wire cimport Output, put, put_bulk, put_line, put_nil

ctypedef const char* Text

# What a key's row has beside its record: a name, a checksum, and LMDB's part (see `state_backend.lmdb.sizes`).
cdef enum:
    ROW_BYTES = 6 + 4 + 10


cdef inline int reply_to_keys(LookupBatch batch, Request* request) except -2:
    """Reply with values of keys, or with the number of existing ones."""
    cdef bint has_values = rows[request.command].is_array
    cdef size_t i, count = 0, before = batch.out.used
    cdef Record record
    cdef int found
    if has_values:
        if request.keys > ENTRIES_MAX:
            return GENERAL
        put_line(batch.out, c"*", request.keys)
    for i in range(request.keys):
        found = read_key(batch, request.first_lookup + i, &batch.words[request.first_word + i], &record)
        if found == GENERAL:
            return GENERAL
        if not has_values:
            count += count_lookup(batch, found == LIVE)
            continue
        if found == LIVE and record.form == LONG_VALUE:
            return GENERAL
        # A key of another type is nil, as in Redis.
        if count_lookup(batch, found == LIVE and record.form == VALUE):
            put_bulk(batch.out, record.payload, record.size)
        else:
            put_nil(batch.out, batch.is_resp3)
        if batch.out.used - before > REPLY_BYTES_MAX:
            return GENERAL
    if not has_values:
        put_line(batch.out, c":", count)
    return ANSWERED


cdef inline int reply_of_stored_bytes(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with the bytes that a key's row takes."""
    if record.form > SMALL_SORTED_SET:
        return GENERAL
    if found != LIVE:
        return put_nil(batch.out, batch.is_resp3) + ANSWERED
    return put_line(batch.out, c":", batch.lookups[request.first_lookup].size + ROW_BYTES) + ANSWERED


cdef inline int reply_of_fact(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with a fact about a key, or with a number that is the same for all keys."""
    cdef Output* out = batch.out
    cdef int reply = rows[request.command].reply
    cdef int64_t number
    cdef Text[6] types = [b"", b"+string\r\n", b"+hash\r\n", b"+list\r\n", b"+set\r\n", b"+zset\r\n"]
    if reply == TYPES:
        if found != LIVE:
            return put(out, b"+none\r\n", 7) + ANSWERED
        for number in range(STRING, STREAM):
            if record.form in (SMALL_FORMS[number], LARGE_FORMS[number]):
                return put(out, types[number], strlen(types[number])) + ANSWERED
        return GENERAL
    if reply in (ENCODINGS, DUMPS):
        if found != LIVE:
            return put_nil(out, batch.is_resp3) + ANSWERED
        return put_encoding(out, record) if reply == ENCODINGS else put_dump(out, record, checksums)
    if reply == NONE_OR_ERROR and found == LIVE:
        batch.counts.errors += 1
        return put_no_frequency(out) + ANSWERED
    if reply in (NONE_OR_ZERO, NONE_OR_ONE, NONE_OR_ERROR):
        return (put_line(out, c":", reply == NONE_OR_ONE) if found == LIVE else put_nil(out, batch.is_resp3)) + ANSWERED
    if found != LIVE or record.expire_at_ms == 0:
        return put_line(out, c":", -1 if found == LIVE else -2) + ANSWERED
    number = record.expire_at_ms
    if reply in (SECONDS, MILLISECONDS):
        number -= batch.jobs.now_ms
    if reply in (SECONDS, SECONDS_AT):
        number = (number + 500) // 1000
    return put_line(out, c":", number) + ANSWERED
