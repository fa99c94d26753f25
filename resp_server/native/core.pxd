"""What other compiled modules may use of `core`."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from resp_server.native.wire cimport Output, Word
from state_backend.native.lookup cimport Lookup

cdef class Hearer:  # takes what comes over a socket before a protocol does
    cdef size_t hear(self, const uint8_t* data, size_t size) except? 0

cdef enum:
    WORDS_MAX = 4096  # of a batch of requests
    REQUEST_WORDS_MAX = 1024
    REQUESTS_MAX = 256
    LOOKUPS_MAX = 4096
    WORD_BYTES_MAX = 65536
    REPLY_BYTES_MAX = 1 << 20  # of one request; more is answered in steps
    OUTPUT_BYTES_MAX = 256 << 10  # of one call, and what the last request adds
    LEFT_BYTES_MAX = 64 << 10  # of requests that are cut for the general path at once
    ENTRIES_MAX = 512  # of a range; more is answered in steps
    SELECTORS_MAX = 8

cdef enum:
    GET, MGET, HGET, HMGET, HGETALL, LRANGE, LINDEX, EXISTS, STRLEN, SISMEMBER, SMISMEMBER, ZSCORE, ZMSCORE
    ZRANK, ZREVRANK, ZRANGE, ZREVRANGE, TTL, PTTL, TYPE, PING, STATE_MGET, COMMANDS

cdef struct Request:
    const uint8_t* at
    int command
    uint32_t first_word  # the first one behind the name
    uint32_t words
    uint32_t first_lookup  # of the key, or of all keys
    uint32_t keys
    uint32_t first_member  # look-ups of members of a large set or map
    uint32_t members
    int64_t rank  # of its member in a large sorted set, once that is known

cdef struct Portion:  # of a buffer: its requests are looked up together with those of other buffers
    const uint8_t* start
    const uint8_t* stopped  # at the end, or at what is not ours to answer
    uint32_t first_request
    uint32_t end_request
    bint is_incomplete

cdef struct Record:  # what stands at a name, its header taken apart
    int form
    int64_t expire_at_ms
    const uint8_t* payload
    size_t size

cdef class Rules:
    cdef int selectors
    cdef uint32_t commands[SELECTORS_MAX]
    cdef list patterns  # of each selector; None: all keys
    cdef bint allow(self, int command, const Word* keys, size_t count)
    cdef bint take_keys(self, list patterns, const Word* keys, size_t count)

cdef class Core:
    cdef object view
    cdef uint64_t version, renewal
    cdef int64_t now_ms
    cdef int64_t moment_ms  # by a clock that does not go back
    cdef list jobs
    cdef dict by_prefix
    cdef int only, last
    cdef const uint8_t* here  # the slots that this server shows, one byte each; NULL: all
    cdef object here_object
    cdef bint is_node
    cdef Word words[WORDS_MAX]
    cdef Request requests[REQUESTS_MAX]
    cdef Lookup lookups[LOOKUPS_MAX]
    cdef Lookup* together[LOOKUPS_MAX]
    cdef int job_of[LOOKUPS_MAX]  # -1: of no job
    cdef int64_t clock_of[LOOKUPS_MAX]  # what has expired by this reading of its job's clock is not there
    cdef size_t limit  # of the output
    cdef size_t word_count, request_count, lookup_count
    cdef Portion portions[REQUESTS_MAX]  # which were looked up and not answered yet, from the next one on
    cdef int portion_count, next_portion
    cdef Output* out
    cdef bint is_resp3
    cdef readonly bint is_full  # it stopped because enough was answered for now
    cdef readonly bint is_incomplete  # it stopped at a request that is not all there
    # What was answered since the last call of `Reads.collect`, and by the last call of `answer_all`.
    cdef uint64_t calls[COMMANDS]
    cdef uint64_t answered[COMMANDS]
    cdef uint64_t hits, misses
    cdef readonly int last_command

    cdef size_t answer_all(self, object view, const uint8_t* start, size_t size, int protocol, Rules rules, bint is_node, list keys_read) except? 0
    cdef int look_at(self, view) except -1
    cdef int job_at(self, const Word* key) except -3
    cdef bint is_fresh(self, int index) except -1
    cdef const uint8_t* gather(self, const uint8_t* at, const uint8_t* end, Rules rules) except NULL
    cdef list words_of(self, const uint8_t** start, const uint8_t* end, bint is_all)
    cdef bint prepare(self, Request* request) except -1
    cdef int read(self, size_t index, const Word* name, Record* record) noexcept
    cdef int find_all(self) except -1
    cdef int find_in_jobs(self, size_t first, size_t end, bint is_of_members) except -1
    cdef int prepare_members(self) except -1
    cdef int find_ranks(self) except -1
    cdef bint find_node(self, int job, uint64_t set_id, uint64_t number, Lookup* node) except -1
    cdef int64_t rank_in_tree(self, int job, uint64_t set_id, double score, const Word* member) except -2
    cdef bint add_portion(self, object view, const uint8_t* start, size_t size, Rules rules, bint is_node) except -1
    cdef int forget_portions(self) noexcept
    cdef bint has_portion(self, const uint8_t* start) noexcept
    cdef const uint8_t* reply_all(self, uint32_t first, uint32_t end, const uint8_t* stopped, list keys_read) except NULL
    cdef int count_look(self, bint is_hit) noexcept
    cdef int reply_to(self, Request* request) except -2
    cdef int64_t left_of(self, int64_t milliseconds, bint is_seconds) noexcept
    cdef int put_type(self, int found, int form) except -2
    cdef int reply_mget(self, Request* request) except -2
    cdef int reply_of_map(self, Request* request, int found, Record* record) except -2
    cdef int reply_of_list(self, Request* request, int found, Record* record) except -2
    cdef int reply_of_set(self, Request* request, int found, Record* record) except -2
    cdef int reply_of_members(self, Request* request, int found, Record* record) except -2
    cdef int64_t size_of(self, const Record* record) noexcept
    cdef int reply_of_range(self, Request* request, int found, Record* record) except -2
    cdef bint leaf_at(self, int job, uint64_t set_id, int64_t rank, Lookup* node, int64_t* start) except -1
    cdef int put_members(self, const uint8_t* run, size_t size, int64_t first, int64_t last, bint is_reversed, bint has_scores) except -2

cdef class Reads:
    cdef object server, stats, table, noted
    cdef Core core
    cdef Output own
    cdef list tallies, names
    cdef uint64_t nanoseconds[COMMANDS]
    cdef uint64_t times[COMMANDS][64]
    cdef bint is_asked  # whether the core looked at the last buffer
    cdef bint look_ahead(self, object session, const uint8_t* data, size_t size) except -1
    cdef int find(self) except -1
    cdef int forget(self) noexcept
    cdef Rules rules_of(self, object user)
    cdef size_t take(self, object session, const uint8_t* data, size_t size, Output* out) except? 0
    cdef list left(self, object session, const uint8_t* data, size_t size, size_t* took)
    cdef int count(self, int64_t elapsed_ns) noexcept
