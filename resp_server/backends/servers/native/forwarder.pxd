"""The layout of `forwarder`'s class."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from resp_server.native.client_fields cimport SessionFields
from resp_server.native.pipelines cimport PipelineFields
from resp_server.native.wire cimport Word
from resp_server.backends.servers.native.client_batch cimport BatchClient, ClientBatch, Item, Request
from resp_server.backends.servers.native.forwarded_commands cimport WORDS_MAX, ForwardedCommands, Plan
from resp_server.backends.servers.native.key_patterns cimport KeyPatterns
from resp_server.backends.servers.native.reply_delivery cimport ReplyDelivery
from resp_server.backends.servers.native.stored_reads cimport StateKeys, StoredReads

cdef enum:
    ITEMS_MAX = 4096
    CONNECTIONS_MAX = 512

cdef struct TransactionStart:
    uint32_t multi  # the request
    bint has_states, has_writes, is_caching_set  # before it

cdef class Forwarder:
    cdef object upstream  # a function that returns a client's connection to a database; None: there is no upstream
    cdef object own_clients  # mappings of the clients with connections of their own; empty: no client keeps its connection
    cdef object cache_of, cache  # a function that returns the `ResultCache` for a client, or None; and that cache
    cdef list cached  # the replies to those of `requests` that are answered here: cached ones, and those to CLIENT CACHING
    cdef uint64_t cache_hits  # cached replies among them
    cdef bint has_cache  # `cache` is that of the client whose input is being forwarded
    cdef ClientBatch complete_batch  # the batch that was sent last, if all of its replies were cached
    cdef ForwardedCommands commands
    cdef ReplyDelivery delivery
    cdef StateKeys state_keys  # which `stored` answers for
    cdef dict patterns_by_database
    cdef KeyPatterns first_patterns, other_patterns  # of database 0, and of databases without patterns of their own
    cdef object upstream_connection  # of the client whose input is being forwarded; of a Redis Cluster, to all nodes
    cdef object node_table  # of these nodes; None: it is no Redis Cluster
    cdef bint is_upstream_open  # `upstream_connection` was asked for
    cdef KeyPatterns patterns  # of the client's database
    cdef bint has_states, has_writes  # of `requests`: some read states; some write at the upstream
    cdef bint has_cached  # some keys of the upstream are cached
    cdef StoredReads stored  # they answer requests about all of the states' keys; None: the general path does
    cdef bytes key_count  # their reply to DBSIZE, while a client's input is being forwarded
    cdef int64_t listed_keys  # the states' keys that KEYS among `requests` have walked
    cdef uint32_t total  # of `requests`: the item with the upstream's number of keys; 0: none needed it yet
    cdef list watched  # the keys that `requests` watch at the upstream, after the last EXEC
    cdef bint ends_watch  # they have an EXEC at the upstream
    cdef readonly object cluster
    cdef object slot_connections, epochs  # the connections of the client's protocol version
    cdef bytes slot_numbers  # of these connections, by slot
    cdef object server, stats
    cdef uint64_t input_bytes, output_bytes  # of clients
    cdef Word words[WORDS_MAX]
    cdef Word keys[WORDS_MAX]  # of the last request
    cdef Item items[ITEMS_MAX]
    cdef Request requests[ITEMS_MAX]
    cdef size_t item_count, request_count
    cdef uint32_t divided  # transactions over several servers
    cdef dict read_points  # by the number of its connection, the request that has a server read them at one epoch
    cdef object clock_ms  # at which they are read
    cdef uint32_t new_replies[CONNECTIONS_MAX]  # expected over each connection, by its number
    cdef int used[CONNECTIONS_MAX]
    cdef int used_count
    cdef list batches
    cdef public bint has_partial, holds_upstream, holds_publishing
    cdef readonly object last_command
    cdef uint64_t last_count  # requests of the batch that was sent last
    cdef object tracking  # of the client whose input is being forwarded; None: it tracks no keys
    cdef bint is_caching_set, is_optin, is_optout, is_recording  # as in its `TrackingState`; is_recording: without BCAST
    cdef uint32_t prefixes  # requests to the upstream that CLIENT CACHING precedes
    cdef int caching_command  # the index of CLIENT CACHING
    cdef KeyPatterns patterns_of(self, database)
    cdef int slot_of_keys(self, size_t count) noexcept
    cdef size_t forward_buffer(
        self, sink, const uint8_t* data, size_t size, int protocol, database, tracking_state, bint is_of_states=*,
        size_t replied=*
    ) except? 0
    cdef int begin_tracking(self, tracking_state) except -1
    cdef bint set_caching(self, size_t count) noexcept
    cdef size_t cut_requests(
        self, sink, const uint8_t* start, const uint8_t* end, int protocol, database, bint is_of_states
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
    cdef bint open_upstream(self, sink, int protocol, database) except -1
    cdef object shared_connection(self, BatchClient sink, int protocol)
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
    cdef bint reserve_batches(self, sink) except -1
    cdef bint has_room(self, PipelineFields connection, int number) except -1
    cdef PipelineFields connection_of(self, int number, list open_connections)
    cdef int send(self, ClientBatch client_batch) except -1
    cdef int send_mget(self, ClientBatch client_batch, uint32_t index, uint16_t number) except -1
    cdef int send_part(self, ClientBatch client_batch, uint32_t run, uint16_t number) except -1
    cdef int send_listing(self, ClientBatch client_batch, uint32_t index) except -1
    cdef int send_each_key(self, ClientBatch client_batch, uint32_t index) except -1
