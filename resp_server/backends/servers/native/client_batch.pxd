"""The layout of `client_batch`'s classes, of the requests of a batch, and of their replies."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from resp_server.native.client_fields cimport InputInterceptor, SessionFields
from resp_server.native.wire cimport Output
from resp_server.backends.servers.native.key_owners cimport KeyOwnerTable

cdef enum:
    UPSTREAM = 256  # the number of the connection to the upstream; those to the nodes of a Redis Cluster come after it
    NO_ITEM = 1 << 30  # a reply that is only checked, as are those before that to EXEC

cdef struct Item:  # one value of a client's replies
    size_t at  # in the buffer of replies
    size_t size
    uint16_t slot  # of its keys
    uint16_t number  # of the connection, in `open_connections`; 0: the value is cached
    uint8_t epochs

# How the replies for the keys of a request are joined, if they are in several slots.
cdef enum Join:
    NOT_JOINED = 0  # the request is sent as it is
    ARRAY = 1  # an MGET, sent as one STATE MGET to each server
    SUM = 2  # sent once for each key
    QUEUED_PART = 3  # of a transaction over several servers: its item is the value that EXEC has for it
    EXEC_PARTS = 4  # EXEC of such a transaction, an array of these values
    # Requests about all keys. The first item is the reply of the states' stores, and the others are the upstream's.
    COUNTED = 5  # DBSIZE
    LISTED = 6  # KEYS
    DRAWN = 7  # RANDOMKEY
    SCANNED = 8  # a SCAN of the upstream, whose reply is the only item

cdef struct Request:
    const uint8_t* at
    size_t size
    const uint8_t* name  # the name and its header
    const uint8_t* keys  # the first word after it
    uint32_t first  # of its items
    uint32_t items
    uint32_t queued  # of an EXEC the number of commands before it, which it runs
    uint32_t total  # of a random key the item with the upstream's number of keys
    uint16_t random  # of a random key a random number, which chooses one of two keys
    uint16_t command
    uint8_t join
    # Flags, as bytes: there is one request for each of a client's.
    uint8_t is_read
    uint8_t is_in_transaction
    uint8_t is_error  # the reply is an error, stored in the first item
    uint8_t is_recorded  # the client may cache its keys
    uint8_t has_caching  # CLIENT CACHING precedes it

cdef struct PendingReply:  # a server's reply that has not arrived yet
    void* client_batch
    size_t start  # of the request in the pipeline's text
    size_t end
    uint32_t request
    uint32_t item  # of an ARRAY the first one of the request
    uint16_t slot
    uint16_t number  # of the connection, in `open_connections`
    bint is_done

cdef class BatchClient(InputInterceptor):
    cdef readonly object client_id
    cdef SessionFields fields  # of the session
    cdef object shared  # its connection to database 0 of the upstream, in a version of the protocol, unless it has one of its own
    cdef int shared_protocol
    cdef int send_replies(self, reply, epochs) except -1

cdef class ClientBatch:
    cdef object sink
    cdef object data  # the requests as received
    cdef int protocol
    cdef Output buffer
    cdef Request* requests
    cdef Item* items  # in the same allocation
    cdef size_t item_count, request_count, missing
    cdef size_t replied  # the first requests, MULTI and queued commands, whose replies were sent when they arrived
    cdef bint has_writes  # at the upstream; then no request of this batch is sent again
    cdef size_t ends_at  # the first request that the upstream did not answer: the client's connection ends before its reply
    cdef list epoch_sets  # the distinct epochs of replies, by their ids
    cdef object last_epochs
    cdef uint8_t last_epochs_id
    cdef bint is_finished
    cdef dict long_replies  # replies of more than a megabyte, by the index of their request
    cdef size_t long_reply_bytes
    cdef object tracking  # the client's `TrackingState`; None: it tracks no keys
    cdef bint was_caching_set  # before the requests
    cdef uint64_t full_invalidations  # of the tracking table, when the requests were sent
    cdef list noted  # the keys of state servers' replies that are not recorded yet; None: there are none
    cdef KeyOwnerTable patterns  # of the client's database
    cdef object at_epochs  # at which transactions over several servers are read
    cdef int epochs_id(self, epochs) except -1
    cdef bint note_keys(self, const PendingReply* entry, epochs) except -1
    cdef int note_keys_of(self, const Request* request, const PendingReply* entry) except -1
    cdef int add_reply(self, const PendingReply* entry, const char* data, size_t size, epochs) except -1
    cdef int add_cached(self, list replies) except -1
    cdef int add_long_reply(self, const PendingReply* entry, reply, epochs) except -1
    cdef bint join_listing(self, Request* request) except -1
    cdef bint put_drawn(self, Output* out, const Request* request) except -1
    cdef void set_error(self, Request* request, size_t at, size_t size) noexcept
    cdef bint split_array(self, Request* request, uint16_t number, size_t start, size_t stop) noexcept
    cdef joined_replies(self)
    cdef bytes reply_text(self, size_t index)
    cdef int put_reply(self, Output* out, size_t index) except -1
    cdef int put_value(self, Output* out, const Item* item) except -1
    cdef epochs(self)
    cdef bint has_older_reply(self) except -1
