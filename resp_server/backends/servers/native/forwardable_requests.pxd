"""The layout of `forwardable_requests`' class."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from resp_server.native.client_fields cimport SessionFields
from resp_server.native.wire cimport Word
from resp_server.backends.servers.native.client_batch cimport ClientBatch, Item, Request
from resp_server.backends.servers.native.forwarded_commands cimport WORDS_MAX, ForwardedCommands, Plan
from resp_server.backends.servers.native.key_owners cimport DatabaseOwners, KeyOwnerTable
from resp_server.backends.servers.native.reply_delivery cimport ReplyDelivery
from resp_server.backends.servers.native.stored_reads cimport StoredReads
from resp_server.backends.servers.native.upstream_access cimport UpstreamAccess

cdef enum:
    ITEMS_MAX = 4096

cdef struct Tracking:
    bint is_on  # the client tracks keys
    bint is_caching_set, is_optin, is_optout  # as in its `TrackingState`
    bint is_recording  # its reads are recorded: it is not in the mode BCAST
    uint32_t prefixes  # requests to the upstream that CLIENT CACHING precedes

cdef struct TransactionStart:
    uint32_t multi  # the request
    bint has_states, has_writes, is_caching_set  # before it

cdef class ForwardableRequests:
    cdef object server, epochs
    cdef object all_slot_connections  # by protocol version
    cdef ForwardedCommands commands
    cdef ReplyDelivery delivery
    cdef UpstreamAccess upstream
    cdef DatabaseOwners database_patterns
    cdef bint holds_upstream, holds_publishing  # see `Forwarder.hold`
    # Of the client, and of its requests:
    cdef object slot_connections
    cdef bytes slot_numbers  # of these connections, by slot
    cdef KeyOwnerTable patterns  # of the client's database
    cdef Tracking tracking
    cdef Word words[WORDS_MAX]  # of the last request
    cdef Word keys[WORDS_MAX]
    cdef Item items[ITEMS_MAX]
    cdef Request requests[ITEMS_MAX]
    cdef size_t item_count, request_count
    cdef bint has_partial  # the input ends with an incomplete request
    cdef bint has_states, has_writes  # some requests read states; some write at the upstream
    cdef uint32_t divided  # transactions over several servers
    cdef list watched  # the keys that the requests watch at the upstream, after the last EXEC
    cdef bint ends_watch  # they have an EXEC at the upstream
    # Of the requests that are answered here:
    cdef list cached  # the replies: cached ones, those to CLIENT CACHING, and those of the states' stores
    cdef object cache_of, cache  # a function that returns the `ResultCache` for a client, or None; and that cache
    cdef bint has_cache  # `cache` is that of the client
    cdef uint64_t cache_hits
    cdef StoredReads stored  # answers requests about all of the states' keys; None: the general path does
    cdef bytes key_count  # its reply to DBSIZE
    cdef int64_t listed_keys  # the states' keys that KEYS among the requests have walked
    cdef uint32_t total  # the item with the upstream's number of keys; 0: none needed it yet
    cdef ClientBatch batch_of(self, sink, const uint8_t* data, size_t size, int protocol, size_t replied)
    cdef int begin_tracking(self, tracking_state) except -1
    cdef bint set_caching(self, size_t count) noexcept
    cdef size_t parse(
        self, sink, const uint8_t* start, const uint8_t* end, int protocol, database, tracking_state, bint is_of_states
    ) except? 0
    cdef void begin_transaction(self, TransactionStart* start, int command, const uint8_t* at, size_t size) noexcept
    cdef void drop_transaction(self, const TransactionStart* start) noexcept
    cdef bint add_exec(
        self, sink, const TransactionStart* start, int command, const uint8_t* at, size_t size, int protocol, database
    ) except -1
    cdef void add_boundary(self, int command, const uint8_t* at, size_t size) noexcept
    cdef Item* add_item(self, size_t i) noexcept
    cdef void add_request(self, int command, const uint8_t* at, size_t size, uint32_t items) noexcept
    cdef int add_caching(self, const uint8_t* at, size_t size) except -1
    cdef int add_items(
        self, sink, const Plan* plan, size_t count, const uint8_t* at, size_t size, int protocol, database, bint is_of_states,
        bint is_queued
    ) except -1
    cdef int add_upstream_item(self, sink, const Plan* plan, size_t keys, int protocol, database, bint is_queued) except -1
    cdef int add_state_items(self, const Plan* plan, size_t count, size_t keys, bint is_queued) except -1
    cdef int add_listing(self, sink, const Plan* plan, size_t count, const uint8_t* at, size_t size, int protocol, database) except -1
    cdef bytes reply_of_states(self, SessionFields session, int listing, const uint8_t* at, size_t size)
    cdef int add_cached_item(self, sink, const uint8_t* at, size_t size, int protocol, database) except -1
    cdef bint end_transaction(self, sink, uint32_t begin, int protocol, database, bint has_caching) except -1
    cdef bint divide(self, uint32_t begin) except -1
    cdef int queued_command(self, size_t count) except -2
    cdef bint set_watched(self) except -1
    cdef bytes cache_key(self, const uint8_t* at, size_t size)
    cdef int slot_of_keys(self, size_t count) noexcept
