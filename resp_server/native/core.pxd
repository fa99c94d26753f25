"""What other compiled modules may use of `core`."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from resp_server.native.combined_sets cimport Combination
from resp_server.native.geo cimport Match, Search
from resp_server.native.ranges cimport RankRange
from resp_server.native.records cimport Item, Record
from resp_server.native.wire cimport Output, Word
from state_backend.native.lookup cimport Lookup, Pages, Walk

cdef int record_reads(tracking, tracking_state, list keys) except -1

cdef class InputInterceptor:
    cdef bint has_partial  # it stores the start of a request
    cdef size_t intercept(self, const uint8_t* data, size_t size) except? 0

cdef enum:
    WORDS_MAX = 4096  # of a batch of requests
    REQUEST_WORDS_MAX = 1024
    REQUESTS_MAX = 1024
    LOOKUPS_MAX = 4096
    WORD_BYTES_MAX = 65536
    REPLY_BYTES_MAX = 1 << 20  # of one request; the general path makes larger replies, in steps
    OUTPUT_BYTES_MAX = 256 << 10  # of one call; the last reply may exceed it
    GENERAL_BYTES_MAX = 64 << 10  # of requests that are cut for the general path at once
    ENTRIES_MAX = 4096  # of a reply, some 200 us; the general path sends longer ones, in steps
    SELECTORS_MAX = 8

    COMMANDS_MAX = 128

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

cdef struct Lookahead:  # a buffer whose keys are looked up together with those of other clients' buffers
    const uint8_t* start
    const uint8_t* stopped  # the end, or the first request that the core does not answer
    uint32_t first_request
    uint32_t end_request
    bint is_incomplete, is_out_of_room

cdef struct Counts:
    uint64_t hits, misses
    uint64_t errors  # replies to OBJECT FREQ; all other errors are the general path's

cdef struct Member:  # of a hash, a set or a sorted set
    const uint8_t* at  # its value
    size_t size
    bint is_encoded  # for a reply
    int64_t expire_at_ms  # 0: never
    double score
    int64_t rank  # -1: not computed

cdef class Rules:
    cdef int selectors
    cdef uint64_t commands[SELECTORS_MAX][COMMANDS_MAX >> 6]  # of each selector, one bit per command
    cdef list patterns  # of each selector; None: all keys
    cdef bint allow(self, int command, const Word* keys, size_t count)
    cdef bint allow_keys(self, list patterns, const Word* keys, size_t count)

cdef class KeyFilter:
    cdef bint admits(self, const Word* keys, size_t count) noexcept
    cdef bint admits_all_keys(self) noexcept
    cdef bint admits_transaction_of(self, session) except -1
    cdef bint has_own_clock(self) noexcept

cdef class SessionFields

cdef class JobPages:
    cdef object name
    cdef bytes prefix
    cdef Pages pages
    cdef bint is_readable
    cdef uint64_t renewal  # the view's renewal for which the pages were refreshed
    cdef int64_t now_ms  # at least the epoch's clock, for the clock reading `read_ms`
    cdef int64_t read_ms
    cdef object missing_slots  # slots that the store lacks; None: none
    cdef tuple watch_point  # the lineage and the epoch of its store at the renewal `watch_renewal`
    cdef uint64_t watch_renewal

@cython.final  # calls of its own methods need no table
cdef class Core:
    cdef KeyFilter key_filter  # None: the core answers about all keys, also about missing ones
    cdef object view
    cdef uint64_t routes_version, renewal
    cdef object now  # the view's clock reading in milliseconds
    cdef int64_t now_ms  # the same, or in a transaction after STATE AT, `read_ms`
    cdef int64_t read_ms  # the clock reading of the next transaction; 0: there was no STATE AT
    cdef object epochs_now, read_point_at, epoch_words  # the server's function; what it returned for the renewal `epochs_renewal`
    cdef uint64_t epochs_renewal
    cdef int64_t monotonic_ms
    cdef list jobs
    cdef dict job_by_prefix
    cdef int only_job  # -1: there are several, or none
    cdef int last_job  # the job of the last key
    cdef const uint8_t* owned_slots  # one byte per slot; NULL: all slots
    cdef object owned_slots_object
    cdef bint is_node
    cdef Word words[WORDS_MAX]
    cdef Request requests[REQUESTS_MAX]
    cdef Lookup lookups[LOOKUPS_MAX]
    cdef Lookup* job_lookups[LOOKUPS_MAX]
    cdef int job_of[LOOKUPS_MAX]  # -1: no job
    cdef int64_t clock_of[LOOKUPS_MAX]  # the clock reading of its job, for expiry
    cdef size_t limit  # of the output
    cdef size_t word_count, request_count, lookup_count
    cdef Lookahead lookaheads[REQUESTS_MAX]  # looked up; answered up to next_lookahead
    cdef int lookahead_count, next_lookahead
    cdef Output* out
    cdef Output scratch  # of a request's members, while they are sorted
    cdef bint is_resp3
    cdef readonly bint is_full  # it stopped at the limit of the output
    cdef readonly bint is_incomplete  # it stopped at an incomplete request
    cdef bint is_out_of_room  # parsing stopped because there was no room for more requests
    cdef bint has_more  # parsing stopped before a request that may be for the core
    cdef bint is_cut  # the replies stopped within a transaction whose EXEC is not parsed yet
    cdef int64_t queued  # requests that were queued by the last call of `answer_all`, less those that an EXEC ran
    cdef bint needs_state[COMMANDS_MAX]  # it is not answered while jobs are loading
    cdef uint64_t calls[COMMANDS_MAX]  # since the last call of `FastPath.collect`
    cdef uint64_t answered[COMMANDS_MAX]  # by the last call of `answer_all`
    cdef Counts counts  # since the last call of `FastPath.collect`
    cdef readonly int last_command
    cdef SessionFields session  # whose requests are answered
    cdef list keys_read  # the keys that the client may cache; None: none of its reads are recorded
    cdef bint is_caching_set, is_optin, is_optout  # as in the client's `TrackingState`
    cdef uint64_t random  # of RANDOM
    cdef object count_keys, watch_point, read_clock, report  # see `FastPath`; the server's clock; logs and counts an exception
    cdef int64_t key_count  # in the view; -1: the general path counts them, -2: not counted yet
    cdef bint has_all_listed  # no job of the view has keys that cannot be listed

    cdef size_t answer_all(self, const uint8_t* start, size_t size, int protocol, Rules rules) except? 0
    cdef int use_view(self, view, bint is_node) except -1
    cdef bint is_newest(self)
    cdef int job_at(self, const Word* key) except -3
    cdef bint refresh_job(self, int index) except -1
    cdef const uint8_t* cut_requests(self, const uint8_t* at, const uint8_t* end, Rules rules) except NULL
    cdef bint has_room(self) noexcept
    cdef bint add_request(self, const uint8_t* at, const Word* words, size_t count, Rules rules) except -1
    cdef bint admit(self, Request* request, const Word* words, size_t count, Rules rules) except -1
    cdef list cut_words(self, const uint8_t** start, const uint8_t* end, bint is_all)
    cdef bint may_answer(self, const Word* words, size_t count) noexcept
    cdef bint is_admitted(self, int command, const Word* keys, size_t count) noexcept
    cdef bint prepare_lookups(self, Request* request) except -1
    cdef int read(self, size_t index, const Word* name, Record* record) noexcept
    cdef int read_key(self, size_t index, const Word* key, Record* record) noexcept
    cdef int find_keys_and_members(self) except -1
    cdef int find_in_jobs(self, size_t first, size_t end, bint is_of_members) except -1
    cdef int prepare_member_lookups(self) except -1
    cdef int find_ranks(self) except -1
    cdef bint find_node(self, int job, uint64_t set_id, uint64_t number, Lookup* node) except -1
    cdef int64_t rank_in_tree(self, int job, uint64_t set_id, double score, const Word* member) except -2
    cdef int64_t find_leaf(self, int job, uint64_t set_id, int64_t rank, double score, const Word* member, Lookup* node) except -2
    cdef bint add_lookahead(self, const uint8_t* start, size_t size, Rules rules) except -1
    cdef int drop_lookaheads(self) noexcept
    cdef bint has_lookahead(self, const uint8_t* start) noexcept
    cdef int begin_tracking(self, tracking_state) except -1
    cdef bint records_keys(self, bint is_transaction) noexcept
    cdef int record_keys(self, const Request* request) except -1
    cdef const uint8_t* reply_all(self, uint32_t first, uint32_t end_request, const uint8_t* stopped) except NULL
    cdef int count_requests(self, uint32_t first, uint32_t end_request, bint is_transaction) except -1
    cdef bint may_run_transaction(self) except -1
    cdef int begin_transaction(self) except -1
    cdef const uint8_t* answer_within_transaction(self, const uint8_t* at, const uint8_t* end, Rules rules) except NULL
    cdef int discard(self) except -1
    cdef bint may_queue_slots(self, const Request* request) noexcept
    cdef int note_slots(self, const Request* request, dict slots) except -1
    cdef bint run_queued(self, list queued, Rules rules) except -1
    cdef bint add_queued(self, list queued, Rules rules) except -1
    cdef int64_t exec_of(self, uint32_t first, uint32_t end_request) except -1
    cdef int reply_to_transaction(self, uint32_t multi, uint32_t exec_) except -2
    cdef int reply_to_queued(self, uint32_t first, uint32_t end_request) except -2
    cdef int count_lookup(self, bint is_hit) noexcept
    cdef int reply_to(self, Request* request) except -2
    cdef int reply_to_keys(self, Request* request) except -2
    cdef int reply_without_key(self, Request* request) except -2
    cdef int set_read_point(self, const Word* words, size_t count) except -2
    cdef int reply_of_scan(self, Request* request, int found, const Record* record) except -2
    cdef int reply_of_fact(self, int shape, int found, const Record* record) except -2
    cdef int reply_of_whole(self, Request* request, int found, const Record* record) except -2
    cdef int put_row(self, int shape, const Walk* walk, int64_t now_ms) except -2
    cdef int reply_of_rows(self, Request* request, const Record* record, uint64_t cursor, int64_t wanted) except -2
    cdef int put_list_blocks(self, Request* request, const Record* record, int64_t first, int64_t last) except -2
    cdef int reply_of_string_range(self, Request* request, const Record* record) except -2
    cdef int reply_of_members(self, Request* request, int found, const Record* record) except -2
    cdef int find_member(
        self, Request* request, size_t index, int found, const Record* record, Member* member
    ) except -2
    cdef int put_member(self, Request* request, int has, const Record* record, const Member* member) except -2
    cdef int reply_of_list(self, Request* request, int found, const Record* record) except -2
    cdef int reply_of_random(self, Request* request, int found, const Record* record) except -2
    cdef int64_t below(self, int64_t limit) noexcept
    cdef int put_element(self, const Record* record, int64_t i, bint has_value) except -2
    cdef int reply_of_search(self, Request* request, const Record* record) except -2
    cdef int reply_of_sets(self, Request* request) except -2
    cdef int64_t read_sets(self, Request* request, Combination* wanted) except -2
    cdef int reply_of_sort(self, Request* request, const Record* record) except -2
    cdef int put_item(self, const Item* item, bint has_score) except -1
    cdef int put_scan_head(self, size_t before, uint64_t cursor, int64_t count) except -2
    cdef int reply_of_keys(self, Request* request) except -2
    cdef int reply_of_slot(self, Request* request) except -2
    cdef bint is_listed(self)
    cdef int64_t rank_of_score(self, int job, const Record* record, double score, bint is_after) except -2
    cdef bint range_in(self, int job, const Record* record, RankRange* wanted) except -1
    cdef int reply_of_range(self, Request* request, int found, const Record* record) except -2
    cdef int reply_of_distance(self, Request* request, int found, const Record* record) except -2
    cdef int reply_of_area(self, Request* request, int shape, int found, const Record* record) except -2
    cdef int64_t matches_of(self, Request* request, const Record* record, const Search* wanted, Match** matches) except -2
    cdef tuple watch_point_of(self, JobPages job)
    cdef int watch_keys(self, Request* request) except -2
    cdef bint is_unchanged(self) except -1
    cdef int read_members(self, int job, const Record* record, int64_t first, int64_t last, Item* items) except -2
    cdef int find_score(self, const Request* request, const Record* record, const Word* member, double* score) except -2

cdef class SessionFields:
    cdef public bint can_use_fast_path, can_use_checked_fast_path, can_queue, can_be_forwarded, can_call
    cdef public int protocol
    cdef public object user, transaction, tracking_state, subscriptions, epoch_feed, active_ms, last_command
    cdef public list pushed  # pushes to the client while a command's function is called for it; None: none is called
    cdef public uint64_t calls, input_bytes, output_bytes  # of this client; wrap around

cdef class ConnectionFields:
    cdef public bint is_idle  # it is admitted, and nothing waits: no output, and no input but what the round will answer
    cdef public SessionFields session
    cdef public object input, output, reply, _transport
    cdef public object _next_turn  # of this client; None: none is scheduled
    cdef public bint _is_ending, _is_finishing  # the client has sent its end of stream; this server ends

cdef class CalledCommand:
    cdef object command, command_stats, function, name, converters, is_own
    cdef size_t name_words, least, most
    cdef bint takes_words, keeps_caching, is_for_subscribers, has_slot
    cdef uint64_t calls, nanoseconds
    cdef uint64_t times[64]
    cdef int collect(self) except -1

cdef class FastPath:
    cdef object server, stats, make_rules, record_slow
    cdef public object caller
    cdef object incomplete
    cdef readonly bint needs_turn
    cdef uint64_t errors  # of called commands, with the code ERR, since the last `collect`
    cdef CalledCommand last_called  # of the last request, which `last_words` words name; of `last_caller`
    cdef object last_caller
    cdef size_t last_words
    cdef bytes last_name, last_subcommand  # as typed
    cdef list counted  # the called commands that were counted since the last call of `collect`
    cdef Core core
    cdef Output output
    cdef list command_stats_of, names
    cdef uint64_t nanoseconds[COMMANDS_MAX]
    cdef uint64_t times[COMMANDS_MAX][64]
    cdef bint was_tried  # the core has parsed the last buffer
    cdef object last_user  # of the last lookahead
    cdef Rules last_rules
    cdef int64_t slow_ns  # the duration of a request that is recorded as slow
    cdef bint begin(self) except -1
    cdef bint look_ahead(self, SessionFields session, const uint8_t* data, size_t size) except -1
    cdef int run_lookups(self) except -1
    cdef int drop_lookaheads(self) noexcept
    cdef int expire_view(self) noexcept
    cdef Rules rules_of(self, object user)
    cdef size_t answer_front(self, SessionFields session, const uint8_t* data, size_t size, Output* out) except? 0
    cdef list remaining_requests(self, session, const uint8_t* data, size_t size, size_t* took)
    cdef size_t answer_compiled(self, SessionFields session, const uint8_t* data, size_t size, Output* out) except? 0
    cdef int push_before(self, SessionFields session, Output* out, size_t before, bytes pushes=*) except -1
    cdef size_t call_all(self, SessionFields session, const uint8_t* start, size_t size, Output* out) except? 0
    cdef CalledCommand called_of(self, size_t count)
    cdef bint admits_call(self, SessionFields session, CalledCommand called, size_t count) except -1
    cdef list cut_request(self, size_t count)
    cdef object argument(self, CalledCommand called, size_t i)
    cdef object run(self, context, CalledCommand called, size_t count)
    cdef int64_t call(
        self, SessionFields session, context, CalledCommand called, const uint8_t* request, size_t size, size_t count,
        Output* out, int64_t started_ns
    ) except -1
    cdef int collect_called(self) except -1
    cdef int put_error(self, Output* out, error) except -1
    cdef int count(self, int64_t elapsed_ns) noexcept
