"""The layout of `lookup_batch`'s class, and what all that answers requests does with it."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from resp_server.native.encoding cimport put_double
from resp_server.native.jobs cimport JobPages, Jobs
from resp_server.native.records cimport ABSENT, GENERAL, Item, Record, read_record
from resp_server.native.permissions cimport KeyFilter
from resp_server.native.wire cimport Output, Word, put, put_bulk
from state_backend.native.lookup cimport Lookup, Pages

cdef enum:
    WORDS_MAX = 4096  # of a batch of requests
    REQUEST_WORDS_MAX = 1024
    REQUESTS_MAX = 1024
    LOOKUPS_MAX = 4096
    REPLY_BYTES_MAX = 1 << 20  # of one request; the general path makes larger replies, in steps
    ENTRIES_MAX = 4096  # of a reply, some 200 us; the general path sends longer ones, in steps

cdef struct Request:
    const uint8_t* at
    int command
    uint32_t first_word  # the first one after the name
    uint32_t words
    uint32_t first_lookup  # the first look-up of its keys
    uint32_t keys
    uint32_t first_member  # the first look-up of its members, of a large set or map
    uint32_t members
    int64_t rank  # of its member in a large sorted set; -1: not computed

cdef struct Counts:
    uint64_t hits, misses
    uint64_t errors  # replies to OBJECT FREQ; all other errors are the general path's

@cython.final  # calls of its own methods need no table
cdef class LookupBatch:
    cdef Jobs jobs
    cdef KeyFilter key_filter  # None: the core answers about all keys, also about all missing ones
    cdef Word words[WORDS_MAX]
    cdef Request requests[REQUESTS_MAX]
    cdef Lookup lookups[LOOKUPS_MAX]
    cdef Lookup* job_lookups[LOOKUPS_MAX]
    cdef int job_of[LOOKUPS_MAX]  # or a layer of its fresh values; -1: no job
    cdef int64_t clock_of[LOOKUPS_MAX]  # the clock reading of its job, for expiry
    cdef size_t word_count, request_count, lookup_count
    cdef int64_t monotonic_ms
    cdef Output* out  # the replies
    cdef size_t limit  # of the output
    cdef Output scratch  # of a request's members, while they are sorted
    cdef bint is_resp3
    cdef bint reads_fresh  # the requests that are cut read values that are not committed yet
    cdef Counts counts  # since the last call of `FastPath.collect`
    cdef uint64_t random  # of RANDOM
    cdef int clear(self) noexcept
    cdef bint prepare_lookups(self, Request* request) except -1
    cdef int find_all(self) except -1


cdef inline int read(LookupBatch batch, size_t index, const Word* name, Record* record) noexcept:
    return read_record(&batch.lookups[index], name, batch.clock_of[index], record)


cdef inline int read_key(LookupBatch batch, size_t index, const Word* key, Record* record) noexcept:
    """Read a key's record. With a filter of keys, the general path answers about missing ones that may be another job's."""
    cdef int found = read(batch, index, key, record)
    if found == ABSENT and batch.key_filter is not None and not batch.jobs.is_named(batch.job_of[index], key):
        return GENERAL
    return found


cdef inline bint has_room(LookupBatch batch) noexcept:
    """Return whether there is room for another request."""
    return (
        batch.request_count < REQUESTS_MAX
        and WORDS_MAX - batch.word_count >= REQUEST_WORDS_MAX
        and LOOKUPS_MAX - batch.lookup_count >= 2 * REQUEST_WORDS_MAX
    )


cdef inline Pages pages_of(LookupBatch batch, const Request* request):
    """Return the pages of the job of a request's first key."""
    return (<JobPages>batch.jobs.pages[batch.job_of[request.first_lookup]]).pages


cdef inline int count_lookup(LookupBatch batch, bint is_hit) noexcept:
    if is_hit:
        batch.counts.hits += 1
    else:
        batch.counts.misses += 1
    return is_hit


cdef inline int64_t random_below(LookupBatch batch, int64_t limit) noexcept:
    """Return a random number from 0 up to a limit of at most some thousands (exclusive)."""
    # xorshift64*: its upper half is even enough for that.
    batch.random ^= batch.random >> 12
    batch.random ^= batch.random << 25
    batch.random ^= batch.random >> 27
    return <int64_t>(((batch.random * 0x2545F4914F6CDD1DULL) >> 32) % <uint64_t>limit)


cdef inline int put_item(LookupBatch batch, const Item* item, bint has_score) except -1:
    if has_score and batch.is_resp3:
        put(batch.out, b"*2\r\n", 4)
    put_bulk(batch.out, item.at, item.size)
    return put_double(batch.out, item.score, batch.is_resp3) if has_score else 0
