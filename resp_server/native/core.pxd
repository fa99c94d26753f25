"""The layout of `core`'s class."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from resp_server.native.client_fields cimport SessionFields
from resp_server.native.jobs cimport Jobs
from resp_server.native.lookup_batch cimport REQUESTS_MAX, LookupBatch, Request
from resp_server.native.rows cimport COMMANDS_MAX, Row
from resp_server.native.permissions cimport Permissions
from resp_server.native.wire cimport Word

cdef enum:
    WORD_BYTES_MAX = 65536
    OUTPUT_BYTES_MAX = 256 << 10  # of one call; the last reply may exceed it
    GENERAL_BYTES_MAX = 64 << 10  # of requests that are cut for the general path at once

cdef struct Lookahead:  # a buffer whose keys are looked up together with those of other clients' buffers
    const uint8_t* start
    const uint8_t* stopped  # the end, or the first request that the core does not answer
    uint32_t first_request
    uint32_t end_request
    bint is_incomplete, is_out_of_room

@cython.final  # calls of its own methods need no table
cdef class Core:
    cdef Jobs jobs
    cdef LookupBatch batch
    cdef int64_t read_ms  # the clock reading of the next transaction; 0: there was no STATE AT
    cdef object read_point_at, epoch_words  # what `epochs_now` returned for the renewal `epochs_renewal`
    cdef uint64_t epochs_renewal
    cdef Lookahead lookaheads[REQUESTS_MAX]  # looked up; answered up to next_lookahead
    cdef int lookahead_count, next_lookahead
    cdef readonly bint is_full  # it stopped at the limit of the output
    cdef readonly bint is_incomplete  # it stopped at an incomplete request
    cdef bint is_out_of_room  # parsing stopped because there was no room for more requests
    cdef bint has_more  # parsing stopped before a request that may be for the core
    cdef bint is_cut  # the replies stopped within a transaction whose EXEC is not parsed yet
    cdef int64_t queued  # requests that were queued by the last call of `answer_all`, less those that an EXEC ran
    cdef bint needs_state[COMMANDS_MAX]  # it is not answered while jobs are loading
    cdef uint64_t answered[COMMANDS_MAX]  # by the last call of `answer_all`
    cdef readonly int last_command
    cdef SessionFields session  # whose requests are answered
    cdef list keys_read  # the keys that the client may cache; None: none of its reads are recorded
    cdef bint is_caching_set, is_optin, is_optout  # as in the client's `TrackingState`
    cdef object count_keys, epochs_now, read_clock, report
    cdef int64_t key_count  # in the view; -1: the general path counts them, -2: not counted yet
    cdef size_t answer_all(self, const uint8_t* start, size_t size, int protocol, Permissions permissions) except? 0
    cdef int use_view(self, view, bint is_node) except -1
    cdef const uint8_t* cut_requests(self, const uint8_t* at, const uint8_t* end, Permissions permissions) except NULL
    cdef bint add_request(self, const uint8_t* at, const Word* words, size_t count, Permissions permissions) except -1
    cdef bint admit(self, Request* request, const Word* words, size_t count, Permissions permissions) except -1
    cdef list cut_words(self, const uint8_t** start, const uint8_t* end, bint is_all)
    cdef bint may_answer(self, const Word* words, size_t count) noexcept
    cdef bint is_admitted(self, int command, const Word* keys, size_t count) noexcept
    cdef bint add_lookahead(self, const uint8_t* start, size_t size, Permissions permissions) except -1
    cdef int drop_lookaheads(self) noexcept
    cdef bint has_lookahead(self, const uint8_t* start) noexcept
    cdef int begin_tracking(self, tracking_state) except -1
    cdef bint records_keys(self, bint is_transaction) noexcept
    cdef int record_keys(self, const Request* request) except -1
    cdef const uint8_t* reply_all(self, uint32_t first, uint32_t end_request, const uint8_t* stopped) except NULL
    cdef int count_requests(self, uint32_t first, uint32_t end_request, bint is_transaction) except -1
    cdef bint may_run_transaction(self) except -1
    cdef int begin_transaction(self) except -1
    cdef const uint8_t* answer_within_transaction(self, const uint8_t* at, const uint8_t* end, Permissions permissions) except NULL
    cdef int discard(self) except -1
    cdef bint may_queue_slots(self, const Request* request) noexcept
    cdef int note_slots(self, const Request* request, dict slots) except -1
    cdef bint run_queued(self, list queued, Permissions permissions) except -1
    cdef bint add_queued(self, list queued, Permissions permissions) except -1
    cdef int64_t exec_of(self, uint32_t first, uint32_t end_request) except -1
    cdef int reply_to_transaction(self, uint32_t multi, uint32_t exec_) except -2
    cdef int reply_to_queued(self, uint32_t first, uint32_t end_request) except -2
    cdef int reply_to(self, Request* request) except -2
    cdef int reply_without_record(self, Request* request, const Row* row) except -2
    cdef int reply_without_key(self, Request* request, int reply) except -2
    cdef int reply_of_key_count(self) except -2
    cdef int reply_of_clock(self) except -2
    cdef int set_read_point(self, const Word* words, size_t count) except -2
    cdef int watch_keys(self, Request* request) except -2
    cdef bint is_unchanged(self) except -1
