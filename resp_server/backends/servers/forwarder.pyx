# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""A proxy's forwarder: forwards forwardable requests from a client's input buffer to their servers, and returns the replies.

Reads of states' keys are forwardable. They go to the servers of their slots. With an upstream, a request is also forwardable if all
its keys are the upstream's, or it has none and the upstream answers it, and if it does not block. It goes over a connection to the
upstream, of a Redis Cluster to the master of its keys' slot. The general path follows redirects, as they are errors. A read of
keys whose replies the proxy caches is forwardable if its reply is cached. The rows of the commands say where their keys are.

A transaction is forwardable if MULTI, EXEC and the commands between them are in one buffer, and all go over one connection. They
are sent unchanged, in one write, so that no request of another client comes between them. Each of them has its reply. One that a
node of a Redis Cluster refuses, because its slot has moved, is sent again as a whole. The commands of one that arrives in pieces are
queued in the client's session, and forwarded at EXEC.

The forwarder splits a client's input into requests. It appends each request unchanged to a `PipelineBatch`: the requests that
are sent over one connection in one round of the event loop. An MGET becomes one STATE MGET for each server. Replies are
copied out of a server's data without decoding. When all replies of a `ClientBatch` have arrived, the client gets them.

The forwarder stops at the first request that is not forwardable. The general path answers that request. It also answers input that
contains both reads of states and writes to the upstream: the reads may have to be sent again, the writes must not be.
Pushes, incomplete replies, lost connections, and errors except those of a single upstream are handled by the general path, too. It
treats a batch as an `InFlightRequest`.

The keys of a client that tracks keys are noted when a state server's reply to them arrives, and recorded in the tracking
table before anything else runs (see `tracked_reads`). The upstream's keys are tracked by the upstream: the requests of
such a client go over its dedicated connection. CLIENT CACHING is answered here, and precedes the next request, or
transaction, to the upstream. The keys of a transaction are read by EXEC, so they are noted with its reply.

If the state server's stores are on this machine (`backends/servers/server_stores.py`), `StoredReads` comes before the forwarder: the
compiled core answers reads of its jobs' keys at the front of a client's input, and the forwarder forwards the rest. It also answers
requests about all keys, with the upstream's reply and that of the stores.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.time cimport monotonic_ns
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memset

cdef extern from "<strings.h>" nogil:
    int strncasecmp(const char*, const char*, size_t)

from resp_server.native.client_fields cimport ConnectionFields, InputInterceptor, SessionFields, record_reads
from resp_server.native.core cimport Core
from resp_server.native.fast_path cimport FastPath
from resp_server.native.lookup_batch cimport below
from resp_server.native.raw_replies cimport bulk_bytes, integer_bytes, integer_in, line_bytes, number_in, put_scan, reply_bytes
from resp_server.native.rules cimport KeyFilter
from resp_server.backends.servers.key_patterns cimport CACHED, STATES, UPSTREAM_BACKEND, KeyPatterns
from resp_server.native.pipelines cimport PipelineFields, RequestBatch
from resp_server.native.arguments cimport integer
from resp_server.native.wire cimport (
    Output, SPECS_MAX, Spec, Specs, Word, add_spec, command_at, cut, number_line, put, put_line, reserve, text_of, texts_of
)
from state_backend.native.lookup cimport slot_of

from resp_server.command.policy import Joined, Role
from resp_server.session.epoch_feed import NO_EPOCHS, indexes_behind, union_of
from resp_server.pipeline.transactions import FORWARDED_BYTES_MAX
from resp_server.protocol.request_parser import ARGUMENT_OVERHEAD_BYTES, RequestParser
from resp_server.forwarding.pipelined_connection import REQUESTS_MAX
from resp_server.forwarding.reply_sinks import UnansweredError, malformed_reply
from resp_server.backends.servers.transaction_plan import PACKED_EXEC
from resp_server.backends.servers.requests import SENDS_MAX, ServerRequest, read_point as encoded_read_point, send_mget_by_slots
from resp_server.forwarding.raw_replies import JOINED_BYTES_MAX, RawReplySender
from resp_server.forwarding.reply_splitter import PING, FrameError, pack
from resp_server.backends.servers.min_epochs import has_reached
from resp_server.backends.redis.connection import UpstreamRequest
from resp_server.backends.servers.delegation import DELEGATED_REPLIES, NO_TURN
from resp_server.backends.redis.tracking import CACHING_NO, CACHING_YES

OK = b"+OK\r\n"
PONG = b"+PONG\r\n"
KEY_COUNT = pack((b"DBSIZE",))
cdef enum:
    WORDS_MAX = 1024  # of a request; the general path forwards a longer one in chunks
    WORD_BYTES_MAX = 16384
    BATCH_REQUESTS_MAX = 256  # of one client's batch; limits the buffered replies. A transaction that has begun may have more
    TRANSACTION_REQUESTS_MAX = 1024  # of one with a transaction, whose requests have two replies, of which one is a line
    ITEMS_MAX = 4096
    NO_ITEM = 1 << 30  # a reply that is only checked, as are those before that to EXEC
    CONNECTIONS_MAX = 512
    UPSTREAM = 256  # the number of the connection to the upstream; those to the nodes of a Redis Cluster come after it
    SLOTS = 16384
    # Of an incomplete request or transaction, which is parsed again when more input arrives: at most some 1,000 words (guess).
    KEPT_BYTES_MAX = 131072
    LISTED_KEYS_MAX = 4096  # of states, that KEYS of one batch walk (guess: half a millisecond)
    DRAWN_MAX = 1024  # random keys from which the share of hidden ones is estimated (guess)
    RANGES_MAX = 2  # see `resp_server.command.keys`

# Those commands about all keys that both sides answer, by their roles.
LISTINGS = {Role.DBSIZE: COUNTED, Role.KEYS: LISTED, Role.RANDOMKEY: DRAWN, Role.SCAN: SCANNED}

cdef int64_t NEVER_NS = <int64_t>1 << 62
cdef int64_t WORD_OVERHEAD_BYTES = ARGUMENT_OVERHEAD_BYTES
cdef int64_t MAX_FORWARDED_BYTES = FORWARDED_BYTES_MAX  # of a transaction whose EXEC arrived alone

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

# The part of a command in a transaction.
cdef enum Part:
    QUEUED = 0
    BEGIN = 1
    RUN = 2
    WATCHED = 3

cdef struct KeyRange:  # see `resp_server.command.keys.KeyRange`
    int32_t first, last, step, counted_from

cdef struct Plan:  # how the forwarder may forward a command
    bint reads_states  # it may be forwarded to state servers
    bint is_for_upstream  # it may be forwarded to the upstream
    bint is_read  # it does not write at the upstream, so it may be sent twice
    bint publishes  # it may send messages
    uint8_t part
    uint8_t join  # by state servers
    uint8_t listing  # how a request about all keys is joined; NOT_JOINED: it is about no keys, or about some
    int queued_arity  # of requests that the upstream would queue, as Redis says it; 0: the general path queues them
    int ranges
    KeyRange keys[RANGES_MAX]


cdef class ClientBatch:
    """Requests that were forwarded together from one client's input, and their replies so far."""

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
    cdef KeyPatterns patterns  # of the client's database
    cdef object at_epochs  # at which transactions over several servers are read

    def __cinit__(self):
        self.epoch_sets = []
        self.long_replies = {}

    def __dealloc__(self):
        free(self.buffer.data)
        free(self.requests)

    cdef int epochs_id(self, epochs) except -1:
        """Return the id of a reply's epochs."""
        cdef int i
        if epochs is not self.last_epochs:
            for i in range(len(self.epoch_sets)):
                if self.epoch_sets[i] is epochs:
                    break
            else:
                i = len(self.epoch_sets)
                if i == 255:  # never reached by the replies of one round
                    self.epoch_sets[254] = union_of(self.epoch_sets[254], epochs)
                    return 254
                self.epoch_sets.append(epochs)
            self.last_epochs, self.last_epochs_id = epochs, i
        return self.last_epochs_id

    cdef bint note_keys(self, const PendingReply* entry, epochs) except -1:
        """Note the keys of a state server's reply that the client may cache; return whether they are the first ones."""
        cdef Request* request = &self.requests[entry.request]
        cdef uint32_t queued
        cdef bint is_first = self.noted is None
        if entry.number >= UPSTREAM or not request.is_recorded or (request.is_in_transaction and not request.queued):
            return False  # the keys of a queued command are read by EXEC
        if is_first:
            self.noted = []
        if request.join == EXEC_PARTS and epochs is not self.at_epochs:  # newer invalidations may have been sent
            self.full_invalidations = NEVER_NS
        for queued in range(entry.request - request.queued, entry.request):
            self.note_keys_of(&self.requests[queued], NULL)
        if not request.queued:
            self.note_keys_of(request, entry)
        return is_first

    cdef int note_keys_of(self, const Request* request, const PendingReply* entry) except -1:
        """Note the keys of a request, or those that one reply is about."""
        cdef const Item* item = &self.items[request.first]
        cdef const uint8_t* base = <const uint8_t*>PyBytes_AS_STRING(self.data)
        cdef const uint8_t* end = base + PyBytes_GET_SIZE(self.data)
        cdef const uint8_t* at = base + (request.keys - self.requests[0].at)
        cdef size_t i, size = 0
        for i in range(request.items):
            at += 1 + number_line(at + 1, end, &size)
            if entry == NULL or (item[i].number == entry.number if request.join == ARRAY else request.first + i == entry.item):
                self.noted.append(PyBytes_FromStringAndSize(<const char*>at, size))
            at += size + 2
        return 0

    cdef int add_reply(self, const PendingReply* entry, const char* data, size_t size, epochs) except -1:
        """Store the reply to a request, or to a part of it for one server; return whether it has to be sent again."""
        cdef Request* request = &self.requests[entry.request]
        cdef Item* item = &self.items[entry.item]
        cdef int number = self.epochs_id(self.at_epochs if request.join == EXEC_PARTS else epochs)
        cdef size_t at = self.buffer.used, i
        put(&self.buffer, data, size)
        if request.join != ARRAY and request.join != EXEC_PARTS:
            item.epochs = number
            self.missing -= 1
            if request.join >= COUNTED:
                if data[0] == c"-":
                    self.set_error(request, at, size)
                elif not request.is_error:
                    item.at, item.size = at, size
                return entry.item + 1 == request.first + request.items and not (request.is_error or self.join_listing(request))
            if request.join == NOT_JOINED or (size and data[0] == c":" and not request.is_error):
                item.at, item.size = at, size
                return 0
        else:
            for i in range(request.items):
                if item[i].number == entry.number:
                    item[i].epochs = number
                    self.missing -= 1
        if request.join == EXEC_PARTS:
            return not self.split_array(request, entry.number, at, at + size)
        if size and data[0] == c"-":
            self.set_error(request, at, size)
        elif request.join == SUM or not self.split_array(request, entry.number, at, at + size):
            reply = malformed_reply(FrameError("the reply for some keys has another form"))
            at = self.buffer.used
            put(&self.buffer, PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply))
            self.set_error(request, at, PyBytes_GET_SIZE(reply))
        return 0

    cdef int add_cached(self, list replies) except -1:
        """Store the cached replies, in the order of their requests."""
        cdef bytes reply
        cdef size_t at = 0
        for reply in replies:
            while self.items[at].number:
                at += 1
            self.items[at].at, self.items[at].size = self.buffer.used, PyBytes_GET_SIZE(reply)
            self.items[at].epochs = self.epochs_id(NO_EPOCHS)
            put(&self.buffer, PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply))
            at += 1
        self.missing -= len(replies)
        return 0

    cdef int add_long_reply(self, const PendingReply* entry, reply, epochs) except -1:
        """Store a long reply, which is not copied, to a request with one item."""
        self.items[entry.item].epochs = self.epochs_id(epochs)
        self.long_replies[entry.request] = reply
        self.long_reply_bytes += len(reply)
        self.missing -= 1
        return 0

    cdef bint join_listing(self, Request* request) except -1:
        """Make one reply to a request about all keys of those of both sides; False: the general path answers it."""
        cdef Item* item = &self.items[request.first]
        cdef const char* data = self.buffer.data
        cdef const uint8_t* first = <const uint8_t*>data + item.at
        cdef size_t count = 0, at = self.buffer.used
        cdef bint is_joined = True
        cdef Output out
        if request.join == COUNTED:
            put_line(&self.buffer, c":", integer_in(data + item.at, item.size) + integer_in(data + item[1].at, item[1].size))
            item.at, item.size, request.join, request.items = at, self.buffer.used - at, NOT_JOINED, 1
            return True
        out.data, out.used, out.size = NULL, 0, 0
        try:
            if request.join == DRAWN:
                is_joined = self.put_drawn(&out, request)
            elif request.join == SCANNED:
                is_joined = self.patterns.put_page(&out, first, item.size, UPSTREAM_BACKEND)
            else:
                is_joined = self.patterns.put_owned(&out, first, item.size, STATES, &count)
                first = <const uint8_t*>data + item[1].at
                is_joined = is_joined and self.patterns.put_owned(&out, first, item[1].size, UPSTREAM_BACKEND, &count)
                put_line(&self.buffer, c"*", count)
            put(&self.buffer, out.data, out.used)
        finally:
            free(out.data)
        item.at, item.size, request.join, request.items = at, self.buffer.used - at, NOT_JOINED, 1
        return is_joined

    cdef bint put_drawn(self, Output* out, const Request* request) except -1:
        """Write the random key of one side; False: the general path draws one. The states' item has their number of keys, and a key.

        Some of the upstream's keys are hidden: copies of states' keys. Their share follows from all keys drawn so far. In place of a hidden
        one the states' key is taken, so the upstream's key is chosen so often that each visible key is equally probable.
        """
        cdef const Item* drawn = &self.items[request.first + request.items - 1]
        cdef const Item* total = &self.items[request.total]
        cdef const uint8_t* at = <const uint8_t*>self.buffer.data + self.items[request.first].at
        cdef const uint8_t* end = at + self.items[request.first].size
        cdef const uint8_t* theirs = <const uint8_t*>self.buffer.data + drawn.at
        cdef KeyPatterns patterns = self.patterns
        cdef Py_ssize_t took = integer_bytes(at, end), theirs_took
        cdef double states = integer_in(<const char*>at, took), others = integer_in(self.buffer.data + total.at, total.size), share
        cdef Word key
        at += took
        theirs_took = bulk_bytes(theirs, theirs + drawn.size, &key)
        if theirs_took > 0:
            patterns.drawn += 1
            if patterns.owner_of(&key) == UPSTREAM_BACKEND:
                patterns.visible += 1
                share = <double>patterns.visible / patterns.drawn
                if request.random * (states + others * share) < others * 65536.0:
                    return put(out, theirs, theirs_took) == 0
            if patterns.drawn >= DRAWN_MAX:
                patterns.drawn, patterns.visible = patterns.drawn >> 1, patterns.visible >> 1
        took = bulk_bytes(at, end, &key)
        return took > 0 and patterns.owner_of(&key) == STATES and put(out, at, took) == 0

    cdef void set_error(self, Request* request, size_t at, size_t size) noexcept:
        if not request.is_error:
            request.is_error = True
            self.items[request.first].at, self.items[request.first].size = at, size

    cdef bint split_array(self, Request* request, uint16_t number, size_t start, size_t stop) noexcept:
        """Split an array in the buffer into the values that were requested from one server; False: it has others."""
        cdef const uint8_t* base = <const uint8_t*>self.buffer.data
        cdef const uint8_t* at = base + start
        cdef const uint8_t* end = base + stop
        cdef size_t count = 0, i
        cdef Item* item = &self.items[request.first]
        cdef Py_ssize_t took
        if at == end or at[0] != c"*":
            return False
        took = number_line(at + 1, end, &count)
        if took <= 0:
            return False
        at += 1 + took
        for i in range(request.items):
            if item[i].number != number:
                continue
            if at == end or (request.join == ARRAY and at[0] != c"$" and at[0] != c"_"):
                return False
            if end - at > 11 and memcmp(at, b"-WRONGTYPE ", 11) == 0:
                took = line_bytes(at, end)
            else:
                took = reply_bytes(at, end, 0)
            if took <= 0 or not count:
                return False
            if not request.is_error:
                item[i].at, item[i].size = at - base, took
            at += took
            count -= 1
        return at == end and not count

    cdef joined_replies(self):
        """Return the replies in order, as bytes; if they are long, as a sender that sends them in steps."""
        cdef Output out
        cdef size_t i
        if self.buffer.used + self.long_reply_bytes > <size_t>JOINED_BYTES_MAX:
            return RawReplySender(self.reply_texts(), self.buffer.used + self.long_reply_bytes)
        if self.request_count == 1 and not self.replied and self.requests[0].join == NOT_JOINED and self.protocol == 2:
            return PyBytes_FromStringAndSize(self.buffer.data + self.items[0].at, self.items[0].size)
        out.data, out.used, out.size = NULL, 0, 0
        try:
            reserve(&out, self.buffer.used + 16 * self.request_count)
            for i in range(self.replied, self.request_count):
                self.put_reply(&out, i)
            return PyBytes_FromStringAndSize(out.data, out.used)
        finally:
            free(out.data)

    def reply_texts(self):
        """Iterate over the replies; each is one text of at most a megabyte, or the chunks of a long reply."""
        for i in range(self.replied, self.request_count):
            if i in self.long_replies:
                yield from self.long_replies.pop(i).texts
            else:
                yield self.reply_text(i)

    cdef bytes reply_text(self, size_t index):
        """Return the reply to a request."""
        cdef Output out
        out.data, out.used, out.size = NULL, 0, 0
        try:
            reserve(&out, 64)
            self.put_reply(&out, index)
            return PyBytes_FromStringAndSize(out.data, out.used)
        finally:
            free(out.data)

    cdef int put_reply(self, Output* out, size_t index) except -1:
        """Write the reply to a request."""
        cdef Request* request = &self.requests[index]
        cdef size_t i
        cdef int64_t total = 0
        if request.is_error:
            return self.put_value(out, &self.items[request.first])
        if request.join == SUM:
            for i in range(request.items):
                total += integer_in(self.buffer.data + self.items[request.first + i].at, self.items[request.first + i].size)
            return put_line(out, c":", total)
        if request.join == QUEUED_PART:
            return put(out, b"+QUEUED\r\n", 9)
        if request.join == ARRAY or request.join == EXEC_PARTS:
            put_line(out, c"*", request.items)
        for i in range(request.items):
            self.put_value(out, &self.items[request.first + i])
        return 0

    cdef int put_value(self, Output* out, const Item* item) except -1:
        cdef const char* data = self.buffer.data + item.at
        if self.protocol != 2 and item.size == 5 and memcmp(data, b"$-1\r\n", 5) == 0:
            return put(out, b"_\r\n", 3)
        return put(out, data, item.size)

    cdef epochs(self):
        """Return the epochs of the replies."""
        cdef object epochs = NO_EPOCHS
        for each in self.epoch_sets:
            epochs = union_of(epochs, each)
        return epochs

    cdef bint has_older_reply(self) except -1:
        """Return whether a reply is from an earlier epoch than a reply before it."""
        cdef size_t i, j
        cdef Request* request
        cdef list each = []
        if self.request_count == 1 or len(self.epoch_sets) == 1:
            return False
        if sum([bool(some) for some in self.epoch_sets]) <= 1:  # the upstream's have none
            return False
        for i in range(self.request_count):
            request, epochs = &self.requests[i], NO_EPOCHS
            for j in range(request.items):
                epochs = union_of(epochs, self.epoch_sets[self.items[request.first + j].epochs])
            each.append(epochs)
        return bool(indexes_behind(each))


cdef class PipelineBatch(RequestBatch):
    """The requests over one connection in one round: an `InFlightRequest` (see `resp_server.backends.servers.requests`)."""

    cdef Forwarder forwarder
    cdef object connection
    cdef readonly double deadline_s
    cdef public double sent_s
    cdef readonly bint is_batch, is_blocking
    cdef bint passes_errors  # an error is the reply of an upstream that sends no redirects
    cdef PendingReply* pending
    cdef size_t size, room
    cdef Output out
    cdef bytes text
    cdef bytes moved  # the last MOVED within a transaction at a node of a Redis Cluster; None: there was none
    cdef size_t moved_at  # its index
    cdef list client_batches

    def __cinit__(self, Forwarder forwarder, connection, double deadline_s, size_t room):
        self.forwarder, self.connection, self.deadline_s, self.room = forwarder, connection, deadline_s, room
        self.client_batches = []
        self.is_batch = True
        self.passes_errors = connection is forwarder.upstream_connection and connection.follow is None

    def __dealloc__(self):
        free(self.pending)
        free(self.out.data)

    @property
    def remaining(self):
        return self.count - self.next

    @remaining.setter
    def remaining(self, size_t remaining):
        self.next = self.count - min(remaining, self.count)

    cdef int add(
        self, ClientBatch client_batch, uint32_t request, uint32_t item, uint16_t slot, uint16_t number, size_t start,
        bint is_done=False
    ) except -1:
        """Expect one more reply, to the request that the output contains from `start` on. is_done: it is dropped."""
        cdef PendingReply* pending
        cdef PendingReply* entry
        if self.count == self.size:
            pending = <PendingReply*>realloc(self.pending, (self.size * 2 + 16) * sizeof(PendingReply))
            if pending == NULL:
                raise MemoryError
            self.pending, self.size = pending, self.size * 2 + 16
        entry = &self.pending[self.count]
        entry.client_batch, entry.request, entry.item = <void*>client_batch, request, item
        entry.slot, entry.number = slot, number
        entry.start, entry.end, entry.is_done = start, self.out.used, is_done
        self.count += 1
        self.room -= 1
        return 0

    def close(self):
        """Close the batch to further requests; return its requests encoded."""
        self.text = PyBytes_FromStringAndSize(self.out.data, self.out.used)
        free(self.out.data)
        self.out.data, self.out.used, self.out.size = NULL, 0, 0
        return self.text

    cdef size_t accept_all(self, const uint8_t* start, const uint8_t* end, epochs) except? 0:
        """Take replies from received data; return their size.

        The rest of the data is an incomplete reply (`has_partial`), or the general path handles it.
        """
        cdef const uint8_t* at = start
        cdef Py_ssize_t took = 1
        cdef size_t index
        self.has_partial = False
        while self.next < self.count:
            took = reply_bytes(at, end, 0)
            if took < 0 and at[0] == c"-" and self.passes_errors:
                took = line_bytes(at, end)
                if took > 0 and memcmp(at, b"-READONLY ", min(took, 10)) == 0:  # the general path looks for a new master
                    took = -1
            if took <= 0:
                break
            index = self.next
            self.next += 1
            self.accept(index, <const char*>at, took, epochs)
            at += took
        self.forwarder.record_noted()
        self.has_partial = took == 0
        return at - start

    def take(self, replies, epochs):
        """Take the next replies."""
        cdef bytes reply
        cdef size_t index
        for reply in replies:
            if self.next >= self.count:
                raise FrameError("more replies than requests")
            index = self.next
            self.next += 1
            self.accept(index, PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply), epochs)
        self.forwarder.record_noted()

    cdef int accept(self, size_t index, const char* data, size_t size, epochs) except -1:
        """Take a reply. After the last reply of a client's batch, send the client all of them. An exception fails only this batch."""
        cdef PendingReply* entry = &self.pending[index]
        cdef ClientBatch client_batch = <ClientBatch>entry.client_batch
        if entry.is_done:
            return 0
        entry.is_done = True
        if client_batch.is_finished or entry.item == NO_ITEM:
            return 0
        try:
            self.note_keys(entry, client_batch, epochs)
            if client_batch.add_reply(entry, data, size, epochs):
                self.forwarder.restart(client_batch)
            elif not client_batch.missing:
                self.forwarder.deliver(client_batch)
        except Exception as error:
            self.forwarder.fail_batch(client_batch, error)
        return 0

    cdef int accept_long(self, size_t index, reply, epochs) except -1:
        """Take a long reply, as `accept` takes a short one."""
        cdef PendingReply* entry = &self.pending[index]
        cdef ClientBatch client_batch = <ClientBatch>entry.client_batch
        entry.is_done = True
        try:
            self.note_keys(entry, client_batch, epochs)
            client_batch.add_long_reply(entry, reply, epochs)
            if not client_batch.missing:
                self.forwarder.deliver(client_batch)
        except Exception as error:
            self.forwarder.fail_batch(client_batch, error)
        return self.forwarder.record_noted()

    cdef int note_keys(self, const PendingReply* entry, ClientBatch client_batch, epochs) except -1:
        """Note the keys of a reply, if its client tracks keys."""
        if client_batch.tracking is not None and client_batch.note_keys(entry, epochs):
            self.forwarder.noted.append(client_batch)
        return 0

    def fail_all(self, error):
        """Fail all pending replies."""
        cdef size_t index
        for index in range(self.next, self.count):
            self.fail(index, error)

    def fail(self, index, error):
        """Fail a pending reply. index: see `put`."""
        cdef size_t at = -1 - index if index < 0 else index
        cdef ClientBatch client_batch = <ClientBatch>self.pending[at].client_batch
        if self.pending[at].is_done:
            return
        if self.pending[at].number >= UPSTREAM:
            self.fail_at_upstream(at, client_batch, error)
            return
        self.pending[at].is_done = True
        if not client_batch.is_finished:
            self.forwarder.fail_batch(client_batch, error)

    cdef int fail_at_upstream(self, size_t at, ClientBatch client_batch, error) except -1:
        """Reply to a request with an exception's error; if the request may have run, end the client's connection instead."""
        cdef bytes reply = b""
        if type(error) is UnansweredError:
            client_batch.ends_at = min(client_batch.ends_at, self.pending[at].request)
        elif not client_batch.is_finished:
            reply = client_batch.sink.error_reply(error)
        self.accept(at, PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply), NO_EPOCHS)

    def next_request(self):
        """Return the next request, for the general path.

        At a state server a PING stands for a part of an MGET or of a transaction: `put` has them answered in another way, and
        they must not be sent again alone.
        """
        cdef size_t index = self.next
        cdef PendingReply* entry = &self.pending[index]
        cdef Request* pending
        if index >= self.count:
            raise IndexError("no reply is pending")
        self.next += 1
        pending = &(<ClientBatch>entry.client_batch).requests[entry.request]
        if entry.number >= UPSTREAM:
            is_read = pending.is_read and not pending.is_in_transaction
            request = UpstreamRequest(self.text[entry.start : entry.end], self, index, is_read, 1, self.sent_s)
            if self.connection.follow is not None and not pending.is_in_transaction:
                self.follow(request, entry)
            return request
        key = self.connection.key
        if pending.join == ARRAY or pending.is_in_transaction:
            return ServerRequest(
                PING, 0, key.protocol, self.deadline_s, self, index, key.address, sends=SENDS_MAX
            )
        return ServerRequest(
            self.text[entry.start : entry.end], entry.slot, key.protocol, self.deadline_s, self, index, sends=1
        )

    cdef int follow(self, request, const PendingReply* entry) except -1:
        """Have a request follow redirects of a Redis Cluster."""
        return self.connection.follow(request, (<ClientBatch>entry.client_batch).sink.client_id, self.connection.protocol) or 0

    cdef bytes error_at_node(self, size_t index, bytes reply):
        """Return the reply for an error within a transaction at a node of a Redis Cluster; None: it follows a redirect.

        The commands are queued for the client, as the general path queues them. When EXEC has been refused, nothing has run,
        so the whole transaction is sent to the node that a MOVED names. Its slot is being moved after an ASK.
        """
        cdef PendingReply* entry = &self.pending[index]
        cdef uint32_t queued = (<ClientBatch>entry.client_batch).requests[entry.request].queued
        if not queued:
            if reply[:7] == b"-MOVED ":
                self.moved, self.moved_at = reply, index
            return b"+QUEUED\r\n" if reply[:7] == b"-MOVED " or reply[:5] == b"-ASK " else reply
        text = self.text[self.pending[index - queued - 1].start : entry.end]
        request = UpstreamRequest(text, self, -1 - <Py_ssize_t>index, False, replies_before=queued + 1)
        self.follow(request, entry)
        request.sink.put(0, self.moved if self.moved is not None and self.moved_at >= index - queued else reply)
        return None

    def seen_epochs(self, index):
        """Return the epochs that the client has seen."""
        cdef size_t at = -1 - index if index < 0 else index
        return (<ClientBatch>self.pending[at].client_batch).sink.seen

    def put(self, index, reply, epochs=NO_EPOCHS):
        """Take the reply to a request of `next_request`.

        Index -1 - i stands for the request with index i that was sent again: an MGET by slots, or a transaction to another node.
        """
        cdef size_t at = -1 - index if index < 0 else index
        cdef PendingReply* entry = &self.pending[at]
        cdef ClientBatch client_batch = <ClientBatch>entry.client_batch
        cdef bint is_array = client_batch.requests[entry.request].join == ARRAY
        cdef bint is_transaction = client_batch.requests[entry.request].is_in_transaction and entry.number < UPSTREAM
        if entry.is_done or client_batch.is_finished:
            return
        # The general path merges long replies to an MGET, and follows the errors of a transaction at a state server. The
        # reply `+PONG` arrives here if a PING replaced the request because its connection was busy with a long reply.
        if (is_array or client_batch.requests[entry.request].join >= EXEC_PARTS) and type(reply) is not bytes:
            self.forwarder.has_long_listings |= client_batch.requests[entry.request].join == LISTED
            self.forwarder.restart(client_batch)
            return
        if type(reply) is not bytes:
            self.accept_long(at, reply, epochs)
            return
        if index >= 0 and ((is_array and reply[:1] == b"+") or (is_transaction and (reply == PONG or reply[:1] == b"-"))):
            self.forwarder.restart(client_batch)
            return
        if index >= 0 and entry.number > UPSTREAM and reply[:1] == b"-" and client_batch.requests[entry.request].is_in_transaction:
            reply = self.error_at_node(at, reply)
            if reply is None:
                return
        if index >= 0 and is_array and reply[:1] == b"-" and self.forwarder.cluster.access.clock() < self.deadline_s:
            try:
                keys = RequestParser().feed(self.text[entry.start : entry.end])[0][2:]
                send_mget_by_slots(self.forwarder.cluster.send, keys, self.deadline_s, self.forwarder.cluster.defer, self, -1 - index)
            except Exception as error:
                self.fail(index, error)
            return
        self.accept(at, PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply), epochs)
        self.forwarder.record_noted()


cdef class Forwarder:
    """Forwards forwardable requests of a proxy's clients to the servers of one application, and to an upstream.

    commands: `ForwardedCommand`s (see `command_routes`).
    has_partial: the last input ends with an incomplete request. holds_upstream: the general path gets the upstream's
    requests, which may have to wait; holds_publishing: those that may send messages.

    A batch may have cached replies only. Then nothing is sent for it, and its client calls `deliver_complete`.
    """

    cdef object upstream  # a function that returns a client's connection to a database; None: there is no upstream
    cdef object own_clients  # mappings of the clients with connections of their own; empty: no client keeps its connection
    cdef object cache_of, cache  # a function that returns the `ResultCache` for a client, or None; and that cache
    cdef list cached  # the replies to those of `requests` that are answered here: cached ones, and those to CLIENT CACHING
    cdef uint64_t cache_hits  # cached replies among them
    cdef bint has_cache  # `cache` is that of the client whose input is being forwarded
    cdef ClientBatch complete_batch  # the batch that was sent last, if all of its replies were cached
    cdef dict patterns_by_database
    cdef KeyPatterns first_patterns, other_patterns  # of database 0, and of databases without patterns of their own
    cdef object upstream_connection  # of the client whose input is being forwarded; of a Redis Cluster, to all nodes
    cdef object node_table  # of these nodes; None: it is no Redis Cluster
    cdef bint is_upstream_open  # `upstream_connection` was asked for
    cdef KeyPatterns patterns  # of the client's database
    cdef Plan plans[SPECS_MAX]
    cdef dict command_indexes
    cdef bint has_states, has_writes  # of `requests`: some read states; some write at the upstream
    cdef bint has_cached  # some keys of the upstream are cached
    cdef object stored  # the `StoredReads` that answer requests about all of the states' keys; None: the general path does
    cdef bytes key_count  # their reply to DBSIZE, while a client's input is being forwarded
    cdef int64_t listed_keys  # the states' keys that KEYS among `requests` have walked
    cdef uint32_t total  # of `requests`: the item with the upstream's number of keys; 0: none needed it yet
    cdef bint has_long_listings  # the upstream's replies to KEYS are long
    cdef list watched  # the keys that `requests` watch at the upstream, after the last EXEC
    cdef bint ends_watch  # they have an EXEC at the upstream
    cdef readonly object cluster
    cdef object slot_connections, epochs  # the connections of the client's protocol version
    cdef bytes slot_numbers  # of these connections, by slot
    cdef object server, stats
    cdef list names, command_stats
    cdef Specs specs
    cdef uint64_t calls[SPECS_MAX]
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
    cdef list noted  # the batches with noted keys

    def __init__(self, cluster, server, commands):
        cdef int i = 0
        self.cluster, self.server, self.stats = cluster, server, server.stats
        self.epochs = cluster.epochs
        self.names, self.command_stats, self.batches, self.cached = [], [], [None] * CONNECTIONS_MAX, []
        self.command_indexes, self.noted = {}, []
        self.set_patterns({})
        self.watched = []
        for name, least, most, keys, joined, role, command_stats in commands:
            i = self.add_command(name, least, most, keys, role, command_stats)
            self.plans[i].reads_states = True
            self.plans[i].join = ARRAY if joined is Joined.LIST else SUM if joined is Joined.SUM else NOT_JOINED
        self.caching_command = self.add_command("client|caching", 0, 0, (), None, server.stats.command_stats("client|caching"))
        self.stats.collectors.append(self.collect)

    cdef int add_command(self, name, least, most, keys, role, command_stats, is_container=False) except -1:
        """Add a command that the forwarder forwards; return its index."""
        cdef int i = add_spec(&self.specs, name.encode(), least, most, is_container)
        cdef Plan* plan = &self.plans[i]
        cdef KeyRange* keys_of_range
        memset(plan, 0, sizeof(Plan))
        plan.listing = LISTINGS.get(role, NOT_JOINED)
        plan.part = BEGIN if role is Role.MULTI else RUN if role is Role.EXEC else WATCHED if role is Role.WATCH else QUEUED
        for each in keys:
            keys_of_range = &plan.keys[plan.ranges]
            keys_of_range.first, keys_of_range.last, keys_of_range.step, keys_of_range.counted_from = each
            plan.ranges += 1
        self.names.append(name)
        self.command_stats.append(command_stats)
        self.command_indexes[name] = i
        return i

    def set_upstream(self, upstream, own_clients, cache_of, commands):
        """Forward requests for an upstream's keys, and answer those that are cached.

        upstream: returns the connection for a client's id, its protocol version and its database, or of a Redis Cluster the
        `NodeConnections`; None: the client's requests take the general path. own_clients: mappings of the clients with connections
        of their own; empty: no client keeps its connection. cache_of: returns, for a client's id and its
        database, the `ResultCache`; None: the client gets no cached replies. commands: (name, whether it only reads, whether it may send messages,
        its keys, its role, whether it is a container without a subcommand, the arity of requests that may be queued, `CommandStats`).
        They replace the commands of an earlier call.
        """
        cdef int i
        self.upstream, self.own_clients, self.cache_of = upstream, own_clients, cache_of
        for i in range(self.specs.count):
            self.plans[i].is_for_upstream = False
        for name, is_read, publishes, keys, role, is_container, queued_arity, command_stats in commands:
            if name not in self.command_indexes:
                if self.specs.count == SPECS_MAX:
                    continue  # the general path answers it
                self.add_command(name, 1, WORDS_MAX, keys, role, command_stats, is_container)
            i = self.command_indexes[name]
            if self.plans[i].reads_states and not self.has_keys(&self.plans[i], keys):
                continue
            self.plans[i].is_for_upstream, self.plans[i].is_read, self.plans[i].publishes = True, is_read, publishes
            self.plans[i].queued_arity = queued_arity

    cdef bint has_keys(self, const Plan* plan, keys) except -1:
        """Return whether the keys of a command's requests are in these ranges."""
        cdef int i
        rows = [(plan.keys[i].first, plan.keys[i].last, plan.keys[i].step, plan.keys[i].counted_from) for i in range(plan.ranges)]
        return rows == [tuple(each) for each in keys]

    def set_patterns(self, by_database, others=()):
        """Set which backend answers which keys of each database: `ForwardedKeys`; the first match decides.

        A key that matches no pattern is the upstream's. others: the patterns of all other databases.
        """
        cdef dict made = {database: KeyPatterns(patterns) for database, patterns in by_database.items()}
        self.other_patterns = KeyPatterns(others)
        self.has_cached = any(each.is_cached for patterns in [*by_database.values(), others] for each in patterns)
        self.first_patterns = made.get(0, self.other_patterns)
        self.patterns_by_database = made

    cdef KeyPatterns patterns_of(self, database):
        """Return the patterns of a database."""
        return self.patterns_by_database.get(database, self.other_patterns) if database else self.first_patterns

    cdef Py_ssize_t find_keys(self, const Plan* plan, size_t count) noexcept:
        """Find the keys of a request with so many words; return their number; -1: the general path finds them."""
        cdef const KeyRange* part
        cdef int64_t first, last
        cdef size_t found = 0, number = 0
        cdef int i
        for i in range(plan.ranges):
            part = &plan.keys[i]
            first = part.first
            last = part.last + (first if part.last >= 0 else <int64_t>count)
            if part.counted_from:
                if first >= <int64_t>count or not number_in(&self.words[first], &number):
                    return -1
                first += part.counted_from
                last = first + (<int64_t>number - 1) * part.step
                if not number:
                    continue
            if first >= <int64_t>count or last >= <int64_t>count:
                return -1
            while first <= last:
                if found == WORDS_MAX:
                    return -1
                self.keys[found] = self.words[first]
                found += 1
                first += part.step
        return found

    cdef int slot_of_keys(self, size_t count) noexcept:
        """Return the slot of the keys; -1 if they are in several slots."""
        cdef size_t i
        cdef int slot = slot_of(self.keys[0].at, self.keys[0].size)
        for i in range(1, count):
            if <int>slot_of(self.keys[i].at, self.keys[i].size) != slot:
                return -1
        return slot

    def forward(self, sink, bytes data, int protocol, database=0, bint is_of_states=False, tracking_state=None):
        """Forward the forwardable requests at the front of a buffer; return their size; 0: none can be forwarded now.

        database: the one that the client has selected. is_of_states: all keys have the states' own names, of their database,
        to which the patterns do not apply. tracking_state: the client's; None: it tracks no keys.
        """
        cdef const uint8_t* start = <const uint8_t*>PyBytes_AS_STRING(data)
        return self.forward_buffer(sink, start, PyBytes_GET_SIZE(data), protocol, database, tracking_state, is_of_states)

    cdef size_t forward_buffer(
        self, sink, const uint8_t* data, size_t size, int protocol, database, tracking_state, bint is_of_states=False,
        size_t replied=0
    ) except? 0:
        cdef size_t took
        cdef ClientBatch client_batch
        self.upstream_connection, self.slot_connections = None, self.cluster.slot_connections[protocol]
        self.slot_numbers = self.slot_connections.numbers
        self.begin_tracking(tracking_state)
        self.node_table, self.is_upstream_open = None, False
        took = self.cut_requests(sink, data, data + size, protocol, database, is_of_states)
        if not took:
            return 0
        if self.has_writes and self.has_states:  # see the module's docstring
            self.has_partial = False
            return 0
        if not self.reserve_batches(sink) or not self.set_watched():
            self.has_partial = False
            return 0
        client_batch = ClientBatch.__new__(ClientBatch)
        client_batch.sink, client_batch.protocol, client_batch.patterns = sink, protocol, self.patterns
        client_batch.replied = replied
        client_batch.data = PyBytes_FromStringAndSize(<const char*>data, took)
        client_batch.requests = <Request*>malloc(self.request_count * sizeof(Request) + self.item_count * sizeof(Item))
        if client_batch.requests == NULL:
            raise MemoryError
        client_batch.items = <Item*>(client_batch.requests + self.request_count)
        memcpy(client_batch.items, self.items, self.item_count * sizeof(Item))
        memcpy(client_batch.requests, self.requests, self.request_count * sizeof(Request))
        client_batch.item_count = client_batch.missing = self.item_count
        client_batch.at_epochs = self.epochs.newest_shared if self.divided else NO_EPOCHS
        client_batch.request_count = client_batch.ends_at = self.request_count
        client_batch.has_writes = self.has_writes
        if self.cached:
            client_batch.add_cached(self.cached)
        if self.cache_hits:
            self.cache.hits += self.cache_hits
        try:
            if tracking_state is not None:
                client_batch.tracking, client_batch.was_caching_set = tracking_state, tracking_state.is_caching_set
                client_batch.full_invalidations = self.server.tracking.full_invalidations
            self.send(client_batch)
            if tracking_state is not None:
                tracking_state.is_caching_set = self.is_caching_set
        except BaseException:
            client_batch.is_finished = True  # the general path answers the requests
            raise
        self.complete_batch = None if client_batch.missing else client_batch
        return took

    cdef int begin_tracking(self, tracking_state) except -1:
        """Forward the requests of a client with this tracking; None: the client tracks no keys."""
        self.tracking, self.prefixes = tracking_state, 0
        self.is_caching_set = self.is_optin = self.is_optout = self.is_recording = False
        if tracking_state is not None:
            self.is_caching_set = tracking_state.is_caching_set
            self.is_optin, self.is_optout = tracking_state.is_optin, tracking_state.is_optout
            self.is_recording = tracking_state.is_on and not tracking_state.is_bcast
        return 0

    cdef bint set_caching(self, size_t count) noexcept:
        """Set CLIENT CACHING, a request of `count` words; return whether the client's mode allows it."""
        cdef Word* words = self.words
        if count != 3:
            return False
        if self.is_optin and words[2].size == 3 and strncasecmp(<char*>words[2].at, b"yes", 3) == 0:
            self.is_caching_set = True
            return True
        if self.is_optout and words[2].size == 2 and strncasecmp(<char*>words[2].at, b"no", 2) == 0:
            self.is_caching_set = True
            return True
        return False

    cdef size_t cut_requests(
        self, sink, const uint8_t* start, const uint8_t* end, int protocol, database, bint is_of_states
    ) except? 0:
        """Parse the forwardable requests at the front of a buffer, and find the connection of each key; return their size."""
        cdef const uint8_t* at = start
        cdef const uint8_t* multi = NULL  # the MULTI of a transaction without EXEC yet
        cdef uint32_t begin = 0
        cdef size_t requests_max = BATCH_REQUESTS_MAX
        cdef bint had_states = False, had_writes = False, had_caching = False
        cdef size_t count = 0
        cdef Py_ssize_t took
        cdef int command, items
        cdef Plan* plan
        self.has_partial = self.has_states = self.has_writes = self.ends_watch = False
        self.item_count = self.request_count = 0
        self.cache_hits, self.has_cache, self.divided, self.key_count, self.total, self.listed_keys = 0, False, 0, None, 0, 0
        self.patterns = self.patterns_of(database)
        if self.cached:
            self.cached = []
        if self.watched:
            self.watched = []
        if self.upstream is None and database:  # without an upstream, other databases are empty
            return 0
        while at < end and self.item_count < ITEMS_MAX and self.request_count < (requests_max if multi == NULL else ITEMS_MAX):
            took = cut(at, end, self.words, WORDS_MAX, WORD_BYTES_MAX, &count)
            if took <= 0:
                self.has_partial = took == 0
                break
            command = command_at(&self.specs, self.words, count)
            if command == self.caching_command and multi == NULL and self.set_caching(count):
                self.add_caching(at, took)
                at += took
                continue
            if command < 0 or command == self.caching_command:
                break
            plan = &self.plans[command]
            if plan.part == BEGIN or plan.part == RUN:
                self.add_item(0)
                if (plan.part == BEGIN) != (multi == NULL) or count > 1 or is_of_states:
                    break
                if sink.watches_states:
                    break
                if plan.part == BEGIN:
                    multi, begin, had_states, had_writes = at, self.request_count, self.has_states, self.has_writes
                    had_caching = self.is_caching_set
                elif not self.end_transaction(sink, begin, protocol, database, had_caching):
                    break
                items, self.requests[self.request_count].join, self.requests[self.request_count].has_caching = 1, NOT_JOINED, False
                if plan.part == RUN and self.requests[begin + 1].join == QUEUED_PART:
                    items, self.requests[self.request_count].join = 0, EXEC_PARTS
            else:
                items = self.add_items(sink, plan, count, at, took, protocol, database, is_of_states, multi != NULL)
                if not items:
                    break
            self.add_request(command, at, took, items)
            self.requests[self.request_count - 1].is_in_transaction = multi != NULL
            if self.listed_keys > LISTED_KEYS_MAX:  # the client's other requests have another turn
                requests_max = self.request_count
            if plan.part == RUN:
                multi, requests_max = NULL, TRANSACTION_REQUESTS_MAX
                self.requests[self.request_count - 1].queued = self.request_count - begin - 2
                if not items:
                    self.requests[self.request_count - 1].first = self.requests[begin + 1].first
                    self.requests[self.request_count - 1].items = self.request_count - begin - 2
                self.requests[self.request_count - 1].is_recorded = self.is_recording  # CLIENT CACHING does not limit it
            at += took
        if multi != NULL:
            self.request_count, self.item_count = begin, self.requests[begin].first
            self.has_states, self.has_writes, at = had_states, had_writes, multi
            self.is_caching_set = had_caching
        return at - start

    cdef inline Item* add_item(self, size_t i) noexcept:
        """Return item i of the request that is being cut, empty."""
        cdef Item* item = &self.items[self.item_count + i]
        memset(item, 0, sizeof(Item))
        return item

    cdef void add_request(self, int command, const uint8_t* at, size_t size, uint32_t items) noexcept:
        """Add the request whose words were cut, with the next items; its `join` is set."""
        cdef Request* request = &self.requests[self.request_count]
        request.at, request.size = at, size
        request.name = <const uint8_t*>memchr(at, c"\n", size) + 1
        request.keys = self.words[0].at + self.words[0].size + 2
        request.first, request.items = self.item_count, items
        request.command, request.is_error, request.is_read = command, False, self.plans[command].is_read
        request.is_recorded, request.queued = self.is_recording, 0
        if self.is_optin or self.is_optout:
            request.is_recorded &= self.is_caching_set == self.is_optin
        self.is_caching_set = False
        self.item_count += items
        self.request_count += 1

    cdef int add_caching(self, const uint8_t* at, size_t size) except -1:
        """Add a CLIENT CACHING, which is answered here."""
        cdef Request* request = &self.requests[self.request_count]
        self.cached.append(OK)
        self.add_item(0)
        memset(request, 0, sizeof(Request))
        request.at, request.size, request.is_read = at, size, True
        request.first, request.items, request.command = <uint32_t>self.item_count, 1, self.caching_command
        self.item_count += 1
        self.request_count += 1

    cdef int add_items(
        self, sink, const Plan* plan, size_t count, const uint8_t* at, size_t size, int protocol, database, bint is_of_states,
        bint is_queued
    ) except -1:
        """Find where a request is answered; return the number of its items; 0: the general path answers it."""
        cdef Py_ssize_t keys = self.find_keys(plan, count)
        cdef int backend = STATES
        cdef Word none
        self.requests[self.request_count].join, self.requests[self.request_count].has_caching = NOT_JOINED, False
        if plan.listing:
            return 0 if is_queued else self.add_listing(sink, plan, count, at, size, protocol, database)
        if keys < 0:
            return 0
        if self.upstream is not None and not is_of_states:
            none.at, none.size = self.words[0].at, 0
            # The owners of keys have to be known even for a script without keys, so the owner of the empty key answers it.
            backend = self.patterns.backend_of_all(self.keys, keys) if keys else UPSTREAM_BACKEND
            if not keys and plan.ranges:
                backend = self.patterns.backend_of(&none)
        elif not keys:
            return 0
        if backend == UPSTREAM_BACKEND:
            return self.add_upstream_item(sink, plan, keys, protocol, database, is_queued)
        if backend == STATES:
            return self.add_state_items(plan, count, keys, is_queued)
        if backend == CACHED and plan.is_read and not is_queued:
            return self.add_cached_item(sink, at, size, protocol, database)
        return 0

    cdef bint open_upstream(self, sink, int protocol, database) except -1:
        """Find the client's connection to the upstream; False: the general path gets its requests."""
        if not self.is_upstream_open:
            self.is_upstream_open = True
            if type(sink) is ClientForwarder and not database and self.own_clients:
                self.upstream_connection = self.shared_connection(sink, protocol)
                return self.upstream_connection is not None
            self.upstream_connection = self.upstream(sink.client_id, protocol, database)
            self.node_table = None if self.upstream_connection is None else self.upstream_connection.node_numbers
        return self.upstream_connection is not None

    cdef object shared_connection(self, ClientForwarder sink, int protocol):
        """Return the client's connection to database 0 of a single upstream; None: the general path gets its requests."""
        for clients in self.own_clients:
            if sink.client_id in clients:
                return self.upstream(sink.client_id, protocol, 0)
        if sink.shared is None or sink.shared_protocol != protocol:
            sink.shared, sink.shared_protocol = self.upstream(sink.client_id, protocol, 0), protocol
        return sink.shared

    cdef int add_upstream_item(self, sink, const Plan* plan, size_t keys, int protocol, database, bint is_queued) except -1:
        """Add the item of a request to the upstream; return 1, or 0: the general path answers it."""
        cdef Item* item = self.add_item(0)
        cdef int slot
        cdef size_t i
        if self.holds_upstream or (plan.publishes and self.holds_publishing):
            return 0
        if not plan.is_for_upstream or not self.open_upstream(sink, protocol, database):
            return 0
        if not keys and not plan.is_read and self.has_cached:  # it may change any key
            return 0
        item.number = UPSTREAM
        if self.node_table is not None:
            slot = self.slot_of_keys(keys) if keys else -1
            if slot < 0 or plan.part == WATCHED or not (<bytes>self.node_table)[slot]:
                return 0
            if self.is_caching_set:  # a redirect has to send it again, which the general path does
                return 0
            item.slot, item.number = slot, UPSTREAM + <uint8_t>(<bytes>self.node_table)[slot]
        elif plan.part == WATCHED:
            if is_queued or self.is_caching_set or sink.watches_states or not self.upstream_connection.may_watch:
                return 0
            for i in range(keys):
                self.watched.append(text_of(&self.keys[i]))
        self.has_writes |= not plan.is_read
        self.requests[self.request_count].has_caching = self.is_caching_set
        self.prefixes += self.is_caching_set
        return 1

    cdef int add_state_items(self, const Plan* plan, size_t count, size_t keys, bint is_queued) except -1:
        """Add the items of a read of states' keys; return their number, or 0: the general path answers it."""
        cdef const uint8_t* numbers = <const uint8_t*>PyBytes_AS_STRING(self.slot_numbers)
        cdef size_t i, items = keys
        cdef int slot = self.slot_of_keys(keys)
        cdef const Spec* spec = &self.specs.rows[plan - &self.plans[0]]
        cdef Item* item
        if not plan.reads_states or PyBytes_GET_SIZE(self.slot_numbers) < SLOTS or not spec.least <= count <= spec.most:
            return 0
        if slot >= 0 and (plan.join != ARRAY or keys == 1 or is_queued):
            items = 1
        elif plan.join == NOT_JOINED or is_queued or self.item_count + keys > ITEMS_MAX:
            return 0
        else:
            self.requests[self.request_count].join = plan.join
        if self.is_recording and (items < keys or self.keys[0].at != self.words[1].at):
            return 0  # the keys of a reply that the client may cache are noted by their places
        for i in range(items):
            item = self.add_item(i)
            item.slot = slot_of(self.keys[i].at, self.keys[i].size) if slot < 0 else slot
            item.number = numbers[item.slot]
            if not item.number:
                self.slot_connections.open()
                return 0
        self.has_states = True
        return items

    cdef int add_listing(self, sink, const Plan* plan, size_t count, const uint8_t* at, size_t size, int protocol, database) except -1:
        """Add the items of a request about all keys; return their number, or 0: the general path answers it."""
        cdef Item* item = self.add_item(0)
        cdef Request* request = &self.requests[self.request_count]
        cdef StoredReads stored = self.stored
        cdef int64_t cursor = 0
        cdef int items = 3 if plan.listing == DRAWN and not self.total else 2
        cdef bytes found
        if stored is None or database or self.tracking is not None or type(sink) is not ClientForwarder:
            return 0
        if self.has_writes or self.holds_upstream or not self.patterns.has_two_owners or self.item_count + items > ITEMS_MAX:
            return 0
        if not self.open_upstream(sink, protocol, database) or self.node_table is not None:
            return 0
        if plan.listing == SCANNED:
            if count < 2 or not integer(&self.words[1], &cursor) or cursor < 0:
                return 0
            items = 1
        elif count != (2 if plan.listing == LISTED else 1) or (plan.listing == LISTED and self.has_long_listings):
            return 0
        if plan.listing != SCANNED or cursor & 1:
            found = self.reply_of_states((<ClientForwarder>sink).fields, plan.listing, at, size)
            if found is None:
                return 0
            self.cached.append(found)
            request.join = NOT_JOINED if items == 1 else plan.listing
        else:
            item.number, request.join = UPSTREAM, SCANNED
        self.has_states = True
        if items == 3:
            self.total = self.item_count + 1
        for i in range(1, items):
            self.add_item(i).number = UPSTREAM
        request.total, request.random = self.total, <uint16_t>below(stored.core.batch, 1 << 16)
        return items

    cdef bytes reply_of_states(self, SessionFields session, int listing, const uint8_t* at, size_t size):
        """Return the states' part of the reply to a request about all keys; None: the general path answers it."""
        cdef StoredReads stored = self.stored
        cdef Output out
        cdef bytes found
        if listing != SCANNED:
            if self.key_count is None:
                self.key_count = stored.reply_about_states(session, PyBytes_AS_STRING(KEY_COUNT), PyBytes_GET_SIZE(KEY_COUNT))
            if self.key_count is None or listing == COUNTED:
                return self.key_count
            found = stored.reply_about_states(session, at, size)
            if listing == LISTED or found is None:
                self.listed_keys += 1 + integer_in(PyBytes_AS_STRING(self.key_count), PyBytes_GET_SIZE(self.key_count))
                return found
            return self.key_count + found
        out.data, out.used, out.size = NULL, 0, 0
        try:
            put_scan(&out, at, self.words[0].at + self.words[0].size + 2, at + size)
            found = stored.reply_about_states(session, out.data, out.used)
            if found is None:
                return None
            out.used = 0
            if not self.patterns.put_page(&out, <const uint8_t*>PyBytes_AS_STRING(found), PyBytes_GET_SIZE(found), STATES):
                return None
            return PyBytes_FromStringAndSize(out.data, out.used)
        finally:
            free(out.data)

    cdef int add_cached_item(self, sink, const uint8_t* at, size_t size, int protocol, database) except -1:
        """Add the cached reply to a read; return 1, or 0: the general path answers it."""
        cdef bytes reply
        if not self.has_cache:
            self.cache, self.has_cache = self.cache_of(sink.client_id, database), True
        if self.cache is None:
            return 0
        reply = self.cache.get((database, protocol, self.cache_key(at, size)))
        if reply is None:
            return 0
        self.add_item(0)
        self.cached.append(reply)
        self.cache_hits += 1
        return 1

    cdef bint end_transaction(self, sink, uint32_t begin, int protocol, database, bint has_caching) except -1:
        """Have MULTI and EXEC follow the commands between them, if these go over one connection; False if not.

        EXEC compares the keys that the client watches at the upstream, over its connection there.
        """
        cdef uint32_t i
        cdef bint is_divided = False
        cdef Item* item = &self.items[self.requests[begin].first]
        if self.request_count == begin + 1:
            return False
        for i in range(begin + 2, self.request_count):
            if item[i - begin].number != item[1].number:
                if item[i - begin].number >= UPSTREAM or item[1].number >= UPSTREAM:
                    return False
                is_divided = True
        if self.upstream is not None:
            if not self.open_upstream(sink, protocol, database):
                return False
            if item[1].number < UPSTREAM and (self.watched or self.upstream_connection.has_watched):
                return False
            if item[1].number > UPSTREAM and (has_caching or self.upstream_connection.has_watched):
                return False  # a redirect has to repeat CLIENT CACHING; the keys may be watched at another node
            if item[1].number == UPSTREAM:
                if self.upstream_connection.is_dirty:
                    return False
                self.ends_watch, self.watched = True, []
                self.requests[begin].has_caching = has_caching
                self.prefixes += has_caching
        if is_divided:
            return self.divide(begin)
        item[0].slot, item[0].number = item[1].slot, item[1].number
        item[self.request_count - begin].slot, item[self.request_count - begin].number = item[1].slot, item[1].number
        return True

    cdef bint divide(self, uint32_t begin) except -1:
        """Have each server get its commands of a transaction; False if the servers may not be at the same epochs.

        MULTI and the commands are answered here.
        """
        cdef uint32_t i
        if not self.epochs.is_aligned or self.epochs.outages.common:
            return False
        if not self.divided:
            self.read_points, self.clock_ms = {}, self.server.clock()
        self.divided += 1
        memset(&self.items[self.requests[begin].first], 0, sizeof(Item))
        self.cached.append(OK)
        for i in range(begin + 1, self.request_count):
            self.requests[i].join = QUEUED_PART
        return True

    cdef int queued_command(self, size_t count) except -2:
        """Return the index of the command of a request of `words` that is queued after MULTI; -1: the general path queues it.

        Its keys have one owner, and one slot if it reads states (`has_states`), in database 0. What the upstream would refuse
        is not queued.
        """
        cdef int command = command_at(&self.specs, self.words, count), arity
        cdef Py_ssize_t keys
        cdef Plan* plan
        cdef int backend = STATES
        if command < 0 or command == self.caching_command:
            return -1
        plan = &self.plans[command]
        keys = self.find_keys(plan, count)
        if plan.part != QUEUED or keys <= 0:
            return -1
        if self.upstream is not None:
            backend = self.first_patterns.backend_of_all(self.keys, keys)
        self.has_states = backend == STATES
        if backend == STATES:
            is_queued = plan.reads_states and self.specs.rows[command].least <= count <= self.specs.rows[command].most
            return command if is_queued and self.slot_of_keys(keys) >= 0 and not self.server.is_loading else -1
        arity = plan.queued_arity
        if backend != UPSTREAM_BACKEND or not plan.is_for_upstream or not arity:
            return -1
        return command if (<int>count == arity if arity > 0 else <int>count >= -arity) else -1

    cdef bint set_watched(self) except -1:
        """Note the keys that the client watches at the upstream after `requests`; False if there are too many."""
        if not self.ends_watch and not self.watched:
            return True
        return self.upstream_connection.change_watched(self.ends_watch, self.watched)

    cdef bytes cache_key(self, const uint8_t* at, size_t size):
        """Return a request with its name, the first of `words`, in lower case."""
        cdef bytes made = PyBytes_FromStringAndSize(<const char*>at, size)
        cdef char* name = PyBytes_AS_STRING(made) + (self.words[0].at - at)
        cdef size_t i
        for i in range(self.words[0].size):
            if c"A" <= name[i] <= c"Z":
                name[i] += 32
        return made

    cdef bint reserve_batches(self, sink) except -1:
        """Open a batch at each connection; False if a connection is full or its server is behind the client's seen epochs."""
        cdef size_t i
        cdef int number
        cdef PipelineBatch batch
        cdef PipelineFields connection
        cdef list open_connections = self.slot_connections.connections
        memset(self.new_replies, 0, sizeof(self.new_replies))
        self.used_count = 0
        for i in range(self.item_count):
            number = self.items[i].number
            if not number:
                continue
            if not self.new_replies[number]:
                self.used[self.used_count] = number
                self.used_count += 1
            self.new_replies[number] += 1  # an upper limit: a server sends one reply for all its keys of an MGET
        self.new_replies[UPSTREAM] += self.prefixes
        for i in range(self.used_count):
            number = self.used[i]
            self.new_replies[number] += 3 * self.divided  # STATE AT, MULTI, EXEC
            connection = self.connection_of(number, open_connections)
            if connection is None:
                return False
            batch = connection.batch
            if number < UPSTREAM and not self.epochs.is_aligned:
                min_epochs = self.epochs.client_min_epochs(sink.seen)
                if not has_reached(connection.epochs, min_epochs, self.epochs.removed_jobs):
                    return False
            if batch is None:
                if not self.has_room(connection, number):
                    return False
            elif batch.room < self.new_replies[number]:
                return False
            self.batches[number] = batch
        for i in range(self.used_count):
            number = self.used[i]
            if self.batches[number] is None:
                connection = self.connection_of(number, open_connections)
                deadline_s = self.cluster.deadline_s() if number < UPSTREAM else 0.0  # the upstream's pool has another limit
                batch = PipelineBatch(self, connection, deadline_s, REQUESTS_MAX - min(<size_t>REQUESTS_MAX, <size_t>connection.awaited_replies))
                connection.begin_batch(batch)
                self.batches[number] = batch
        return True

    cdef bint has_room(self, PipelineFields connection, int number) except -1:
        """Return whether the new requests may be sent over a connection without an open batch."""
        if number >= UPSTREAM and connection.link is not None and not connection.in_flight:
            return True  # nothing waits
        return connection.has_room(self.new_replies[number])

    cdef PipelineFields connection_of(self, int number, list open_connections):
        """Return the connection with a number; None: it is not open."""
        if number == UPSTREAM:
            return self.upstream_connection
        if number > UPSTREAM:
            return self.upstream_connection.node_connection(number - UPSTREAM)
        return open_connections[number] if number < len(open_connections) else None

    cdef int send(self, ClientBatch client_batch) except -1:
        """Append the requests to the batches of their connections."""
        cdef size_t i, start
        cdef int j
        cdef PipelineBatch batch
        cdef Request* request
        cdef uint16_t number
        cdef bytes caching
        for j in range(self.used_count):
            batch = self.batches[self.used[j]]
            batch.client_batches.append(client_batch)
        for i in range(client_batch.request_count):
            request = &client_batch.requests[i]
            self.calls[request.command] += i > 0 or not client_batch.replied  # that MULTI was counted
            if request.join == ARRAY:
                for j in range(self.used_count):
                    self.send_mget(client_batch, i, self.used[j])
            elif request.join == SUM:
                self.send_each_key(client_batch, i)
            elif request.join == EXEC_PARTS:
                for j in range(self.used_count):
                    self.send_part(client_batch, i, self.used[j])
            elif request.join == QUEUED_PART:
                continue
            elif client_batch.items[request.first].number:
                number = client_batch.items[request.first].number
                batch = <PipelineBatch>self.batches[number]
                start = batch.out.used
                if request.has_caching:
                    caching = CACHING_YES if self.is_optin else CACHING_NO
                    put(&batch.out, PyBytes_AS_STRING(caching), PyBytes_GET_SIZE(caching))
                    batch.add(client_batch, i, request.first, 0, number, start, True)
                    start = batch.out.used
                if request.join == SCANNED:
                    put_scan(&batch.out, request.at, request.keys, request.at + request.size)
                else:
                    put(&batch.out, request.at, request.size)
                batch.add(client_batch, i, request.first, client_batch.items[request.first].slot, number, start)
            elif request.join >= COUNTED:
                self.send_listing(client_batch, i)
        for j in range(self.used_count):
            self.batches[self.used[j]] = None
        self.last_command = self.names[client_batch.requests[client_batch.request_count - 1].command]
        self.last_count = client_batch.request_count
        return 0

    cdef int send_mget(self, ClientBatch client_batch, uint32_t index, uint16_t number) except -1:
        """Append a STATE MGET for those keys of an MGET that one server owns, if there are any."""
        cdef Request* request = &client_batch.requests[index]
        cdef Item* item = &client_batch.items[request.first]
        cdef PipelineBatch batch = <PipelineBatch>self.batches[number]
        cdef size_t i, count = 0, size = 0, start = batch.out.used
        cdef const uint8_t* at = request.keys
        cdef const uint8_t* end = request.at + request.size
        cdef Py_ssize_t took
        for i in range(request.items):
            count += item[i].number == number
        if not count:
            return 0
        put_line(&batch.out, c"*", count + 2)
        put(&batch.out, b"$5\r\nSTATE\r\n$4\r\nMGET\r\n", 21)
        for i in range(request.items):
            took = 1 + number_line(at + 1, end, &size) + size + 2
            if item[i].number == number:
                put(&batch.out, at, took)
            at += took
        return batch.add(client_batch, index, request.first, 0, number, start)

    cdef int send_part(self, ClientBatch client_batch, uint32_t run, uint16_t number) except -1:
        """Append those commands of a transaction whose keys one server has, to be read at the newest epochs."""
        cdef Request* requests = client_batch.requests
        cdef PipelineBatch batch = <PipelineBatch>self.batches[number]
        cdef uint32_t i, begin = run - requests[run].queued - 1
        cdef Item* item
        cdef bytes read_point = None
        for i in range(begin + 1, run):
            item = &client_batch.items[requests[i].first]
            if item.number != number:
                continue
            if read_point is None:
                read_point = self.read_points.get(number)
                if read_point is None:
                    read_point = self.read_points[number] = encoded_read_point(self.epochs.newest_at(batch.connection.key.address), self.clock_ms)
                put(&batch.out, PyBytes_AS_STRING(read_point), PyBytes_GET_SIZE(read_point))
                put(&batch.out, requests[begin].at, requests[begin].size)
                batch.add(client_batch, run, NO_ITEM, 0, number, batch.out.used)
                batch.add(client_batch, run, NO_ITEM, 0, number, batch.out.used)
            put(&batch.out, requests[i].at, requests[i].size)
            batch.add(client_batch, run, NO_ITEM, 0, number, batch.out.used)
        if read_point is not None:
            put(&batch.out, requests[run].at, requests[run].size)
            batch.add(client_batch, run, requests[run].first, 0, number, batch.out.used)
        return 0

    cdef int send_listing(self, ClientBatch client_batch, uint32_t index) except -1:
        """Append a request about all keys, which the upstream answers for its own; for the first random key, also their number."""
        cdef Request* request = &client_batch.requests[index]
        cdef PipelineBatch batch = <PipelineBatch>self.batches[UPSTREAM]
        cdef size_t start = batch.out.used
        if request.items == 3:
            put(&batch.out, PyBytes_AS_STRING(KEY_COUNT), PyBytes_GET_SIZE(KEY_COUNT))
            batch.add(client_batch, index, request.first + 1, 0, UPSTREAM, start)
            start = batch.out.used
        put(&batch.out, request.at, request.size)
        return batch.add(client_batch, index, request.first + request.items - 1, 0, UPSTREAM, start)

    cdef int send_each_key(self, ClientBatch client_batch, uint32_t index) except -1:
        """Append a request for each key of a request whose replies are added up."""
        cdef Request* request = &client_batch.requests[index]
        cdef PipelineBatch batch
        cdef const uint8_t* at = request.keys
        cdef const uint8_t* end = request.at + request.size
        cdef Item* item
        cdef size_t i, size = 0, start
        cdef Py_ssize_t took
        for i in range(request.first, request.first + request.items):
            item = &client_batch.items[i]
            batch, took = <PipelineBatch>self.batches[item.number], 1 + number_line(at + 1, end, &size) + size + 2
            start = batch.out.used
            put(&batch.out, b"*2\r\n", 4)
            put(&batch.out, request.name, request.keys - request.name)
            put(&batch.out, at, took)
            batch.add(client_batch, index, i, item.slot, item.number, start)
            at += took
        return 0

    def collect(self):
        """Add the counts of requests and bytes to the server's statistics."""
        cdef int i
        self.stats.input_bytes += self.input_bytes
        self.stats.output_bytes += self.output_bytes
        self.input_bytes = self.output_bytes = 0
        for i in range(self.specs.count):
            self.command_stats[i].calls += self.calls[i]
            self.calls[i] = 0

    cdef int record_noted(self) except -1:
        """Record the noted keys. A reply that was requested before all keys were invalidated is followed by an invalidation."""
        cdef ClientBatch client_batch
        cdef list noted = self.noted
        if not noted:
            return 0
        self.noted = []
        tracking = self.server.tracking
        for client_batch in noted:
            keys, client_batch.noted = client_batch.noted, None
            try:
                if tracking.full_invalidations == client_batch.full_invalidations:
                    record_reads(tracking, client_batch.tracking, keys)
                else:
                    tracking.enqueue_resend(client_batch.tracking, keys)
            except Exception as error:
                self.server.report(error)
                self.server.clients.cut(client_batch.tracking.session_id, "its keys could not be recorded")
        return 0

    cdef int deliver(self, ClientBatch client_batch) except -1:
        """Send a client its replies; if one is from an earlier epoch than a reply before it, resend the requests."""
        self.record_noted()  # the client's next request may be answered now, from a later epoch
        client_batch.is_finished = True
        if client_batch.ends_at < client_batch.request_count:
            client_batch.request_count = client_batch.ends_at
            client_batch.sink.end(client_batch.joined_replies())
            return 0
        epochs = client_batch.last_epochs if len(client_batch.epoch_sets) == 1 else client_batch.epochs()
        if client_batch.has_older_reply():
            self.resend(client_batch, epochs)
        elif type(client_batch.sink) is ClientForwarder:
            (<ClientForwarder>client_batch.sink).send_replies(client_batch.joined_replies(), epochs)
        else:
            client_batch.sink.deliver(client_batch.joined_replies(), epochs)
        return 0

    cdef int resend(self, ClientBatch client_batch, epochs) except -1:
        """Have the general path resend a batch's requests; they were counted already."""
        cdef size_t i
        for i in range(client_batch.replied > 0, client_batch.request_count):
            self.command_stats[client_batch.requests[i].command].calls -= 1
        if client_batch.tracking is not None:
            client_batch.tracking.is_caching_set = client_batch.was_caching_set
        client_batch.sink.resend(client_batch.data, epochs)
        return 0

    cdef int restart(self, ClientBatch client_batch) except -1:
        """Drop a batch's replies, and have the general path resend its requests."""
        client_batch.is_finished = True
        try:
            self.resend(client_batch, NO_EPOCHS)
        except Exception as error:
            self.server.report(error)
        return 0

    cdef int fail_batch(self, ClientBatch client_batch, error) except -1:
        """Handle an exception: fail a batch of one request, or resend several, because the exception may concern only one."""
        client_batch.is_finished = True
        try:
            if client_batch.has_writes:
                self.server.report(error)
                client_batch.sink.end(b"")
            elif client_batch.request_count == 1:
                client_batch.sink.fail(error)
            else:
                self.server.report(error)
                self.resend(client_batch, NO_EPOCHS)
        except Exception as another:
            self.server.report(another)
        return 0


cdef class StateKeys(KeyFilter):
    """The keys of database 0 whose forwardable requests states answer, by the forwarder's patterns; none without stores."""

    cdef Forwarder forwarder
    cdef bint has_stores, admits_all

    cdef bint admits_all_keys(self) noexcept:
        return self.admits_all

    cdef bint admits(self, const Word* keys, size_t count) noexcept:
        cdef size_t i
        if not self.has_stores:
            return False
        for i in range(count):
            if self.forwarder.first_patterns.backend_of(&keys[i]) != STATES:
                return False
        return True

    cdef bint admits_transaction_of(self, session) except -1:
        # A client with a connection of its own may watch keys there.
        upstream = self.forwarder.upstream
        if not self.has_stores:
            return False
        if upstream is None:
            return True
        connection = upstream(session.id, session.protocol, session.db)
        return connection is not None and not connection.has_watched

    cdef bint has_own_clock(self) noexcept:
        return self.forwarder.upstream is None


cdef class StoredReads(FastPath):
    """Answers reads of states' keys from the state server's stores, with the core. The forwarder gets all else.

    It also answers requests about the connection alone, and does only that where the proxy reads no stores.
    """

    cdef Forwarder forwarder
    cdef object stores
    cdef bint is_fresh, may_read  # no server's input came since the view was renewed; its stores may be read
    cdef int64_t renewed_ms

    def use(self, Forwarder forwarder, stores):
        """Read these stores (`server_stores.ServerStores`), and keys that the forwarder's patterns give to states.

        stores: None: there are none.
        """
        cdef StateKeys keys = StateKeys()
        keys.has_stores = stores is not None
        self.forwarder = keys.forwarder = forwarder
        self.stores = stores
        forwarder.stored = None if stores is None else self
        self.core.batch.key_filter = keys

    cdef bint may_answer(self, SessionFields session, const uint8_t* data, size_t size) except -1:
        """Return whether to try to answer. Before `begin`, the first request is looked at: to begin takes longer."""
        cdef size_t count = 0
        cdef Word* words = self.forwarder.words
        if session.can_queue:
            return self.stores is not None and session.user.is_unrestricted
        if not (session.can_be_forwarded and session.can_use_checked_fast_path):  # an unrestricted user, in database 0
            return False
        if self.is_fresh and self.stores is not None:
            return True
        if cut(data, data + size, words, WORDS_MAX, WORD_BYTES_MAX, &count) <= 0:
            return False
        return self.core.may_answer(words, count)

    cdef bint look_ahead(self, SessionFields session, const uint8_t* data, size_t size) except -1:
        return self.may_answer(session, data, size) and FastPath.look_ahead(self, session, data, size)

    cdef size_t answer_compiled(self, SessionFields session, const uint8_t* data, size_t size, Output* out) except? 0:
        if not self.core.has_lookahead(data) and not self.may_answer(session, data, size):
            self.core.is_incomplete = self.core.is_full = False
            return 0
        return FastPath.answer_compiled(self, session, data, size, out)

    cdef int expire_view(self) noexcept:
        self.is_fresh = False
        return 0

    cdef bint begin(self) except -1:
        """Move to the newest epochs; False while the stores must not be read.

        The state server answers other processes, too: requests may follow its replies to them. So the stores are asked
        for newer epochs each time. The view is renewed if there are any, once a millisecond for its clock, and after
        input that is not a client's: it may be a server's reply.
        """
        cdef int64_t now_ms = monotonic_ns() // 1000000
        self.last_user = self.last_rules = None
        if self.is_fresh and now_ms == self.renewed_ms and (not self.may_read or self.core.jobs.is_newest()):
            return self.may_read
        self.is_fresh, self.may_read, self.renewed_ms, self.slow_ns = True, False, now_ms, NEVER_NS
        try:
            view = self.server.view if self.stores is None else self.stores.current_view()
            if view is not None:
                self.core.use_view(view, False)
                self.may_read = True
        except Exception as error:
            self.server.report(error)
        return self.may_read

    cdef bytes reply_about_states(self, SessionFields session, const void* request, size_t size):
        """Return the reply of the stores to a request about all keys; None: the general path answers it."""
        cdef Core core = self.core
        cdef bint is_full = core.is_full, is_incomplete = core.is_incomplete
        if not session.can_use_checked_fast_path or not self.begin():
            return None
        core.drop_lookaheads()
        core.begin_tracking(None)
        self.output.used = 0
        core.batch.out, core.batch.monotonic_ms, core.session = &self.output, self.renewed_ms, session
        (<StateKeys>core.batch.key_filter).admits_all = True
        try:
            if core.answer_all(<const uint8_t*>request, size, session.protocol, None) != size:
                return None
            return PyBytes_FromStringAndSize(self.output.data, self.output.used)
        finally:
            (<StateKeys>core.batch.key_filter).admits_all = False
            core.is_full, core.is_incomplete = is_full, is_incomplete

    def collect(self):
        self.core.batch.counts.hits = self.core.batch.counts.misses = 0  # the servers' hits are counted, and the forwarder does not know its own
        FastPath.collect(self)


cdef class ClientForwarder(InputInterceptor):
    """Forwards the forwardable requests of one client of a proxy, and sends it the replies.

    While replies are pending, the client's connection leaves all sending to the forwarder (`delegate`).
    """

    cdef Forwarder forwarder
    cdef readonly object client_id
    cdef object shared  # its connection to database 0 of the upstream, in a version of the protocol, unless it has one of its own
    cdef int shared_protocol
    cdef object session, write, last_epochs
    cdef ConnectionFields connection
    cdef SessionFields fields  # of the session
    cdef uint64_t forwarded  # requests of the batch that waits for its replies
    cdef bytes partial_request  # the start of a request that the forwarder may forward
    cdef object executed  # the transaction of an EXEC that was forwarded alone; None: it was no such EXEC
    cdef ClientBatch complete_batch  # it waits for no reply, as all were cached

    def __init__(self, Forwarder forwarder, connection, write):
        self.forwarder, self.connection, self.session, self.write = forwarder, connection, connection.session, write
        self.fields = self.session
        self.client_id, self.partial_request = self.session.id, b""

    cdef size_t intercept(self, const uint8_t* data, size_t size) except? 0:
        cdef size_t took
        if self.has_partial:
            return 0
        took = self.take_if_idle(data, size)
        self.forwarder.input_bytes += took
        self.fields.input_bytes += took
        return took

    def forward_input(self, bytes data):
        """Forward or queue the requests at the front of received data; return the rest, which the general path answers."""
        cdef size_t took
        if self.has_partial:
            data, self.partial_request, self.has_partial = self.partial_request + data, b"", False
        took = self.take_if_idle(<const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        data = data[took:] if took else data
        return b"" if not data or self.store_partial(data) else data

    cdef size_t take_if_idle(self, const uint8_t* data, size_t size) except? 0:
        """Take the requests at the front of received data if the connection is idle; return their size."""
        cdef size_t took
        self.forwarder.has_partial = False
        if not self.connection.is_idle:
            return 0
        took = self.take(data, size)
        if self.complete_batch is not None:
            self.deliver_complete()
        return took

    def forward(self, bytes data):
        """Forward or queue the requests at the front of buffered input; return the rest, which the general path answers."""
        cdef size_t took = self.take(<const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        data = data[took:] if took else data
        return b"" if not data or self.store_partial(data) else data

    cdef size_t take(self, const uint8_t* data, size_t size) except? 0:
        """Forward or queue requests at the front of input; return the size of the input that the caller need not handle.

        That is all input if requests were forwarded: the connection keeps the rest until it has their replies.
        """
        cdef size_t queued, exec_bytes
        if self.fields.can_be_forwarded:
            if self.forward_front(data, size):
                return size
            if self.forwarder.has_partial and size <= KEPT_BYTES_MAX:
                return 0
        queued = self.queue(data, size)
        exec_bytes = self.exec_bytes(data + queued, data + size)
        return size if exec_bytes and self.execute(data + queued + exec_bytes, data + size) else queued

    cdef bint may_queue(self) except -1:
        """Return whether the forwarder may queue requests: the client is in a transaction that it may forward."""
        session = self.session
        transaction = session.transaction
        if transaction is None or not (self.fields.can_queue and session.user.is_unrestricted):
            return False
        return not transaction.is_aborted and transaction.db is None

    cdef size_t queue(self, const uint8_t* data, size_t size) except? 0:
        """Queue requests of a transaction whose EXEC has not arrived; return their size.

        The transaction is the session's, as on the general path, which may queue and run it, too.
        """
        cdef Forwarder forwarder = self.forwarder
        cdef const uint8_t* at = data
        cdef const uint8_t* end = data + size
        cdef size_t count = 0, i
        cdef Py_ssize_t took
        cdef int command, last = -1
        cdef int64_t added, queued_bytes = 0, requests_left, bytes_left
        cdef list requests = []
        cdef bint reads_states = False
        session = self.session
        if session.transaction is None and not self.begin_transaction(&at, end):
            return 0
        if not self.may_queue():
            return at - data
        transaction = session.transaction
        requests_left, bytes_left = transaction.room
        while at < end:
            took = cut(at, end, forwarder.words, WORDS_MAX, WORD_BYTES_MAX, &count)
            if took <= 0:
                forwarder.has_partial = took == 0
                break
            command, added = forwarder.queued_command(count), 0
            if command < 0:
                break
            for i in range(count):
                added += forwarder.words[i].size + WORD_OVERHEAD_BYTES
            if <int64_t>len(requests) >= requests_left or queued_bytes + added > bytes_left:
                break
            requests.append(texts_of(forwarder.words, count))
            queued_bytes += added
            reads_states |= forwarder.has_states
            last = command
            at += took
        if requests:
            transaction.extend(requests, queued_bytes, needs_state=reads_states)
            session.last_command = forwarder.names[last]
            self.fields.calls += <uint64_t>len(requests)
            self.send(b"+QUEUED\r\n" * len(requests))
        return at - data

    cdef size_t exec_bytes(self, const uint8_t* at, const uint8_t* end) except? 0:
        """Return the size of an EXEC at the front of input, after the requests that were queued; 0: there is none."""
        cdef Forwarder forwarder = self.forwarder
        cdef size_t count = 0
        cdef Py_ssize_t took
        cdef int command
        if at == end or not self.may_queue():
            return 0
        took = cut(at, end, forwarder.words, WORDS_MAX, WORD_BYTES_MAX, &count)
        command = command_at(&forwarder.specs, forwarder.words, count) if took > 0 and count == 1 else -1
        return took if command >= 0 and forwarder.plans[command].part == RUN else 0

    cdef bint begin_transaction(self, const uint8_t** at, const uint8_t* end) except -1:
        """Begin the transaction of a MULTI at the front of input, in database 0; return whether there is one."""
        cdef Forwarder forwarder = self.forwarder
        cdef size_t count = 0
        cdef Py_ssize_t took
        cdef int command
        if not self.fields.can_be_forwarded or self.session.db:
            return False
        took = cut(at[0], end, forwarder.words, WORDS_MAX, WORD_BYTES_MAX, &count)
        command = command_at(&forwarder.specs, forwarder.words, count) if took > 0 and count == 1 else -1
        if command < 0 or forwarder.plans[command].part != BEGIN:
            return False
        self.session.begin_transaction()
        self.session.last_command = forwarder.names[command]
        forwarder.calls[command] += 1
        self.fields.calls += 1
        self.send(b"+OK\r\n")
        at[0] += took
        return True

    cdef bint execute(self, const uint8_t* rest, const uint8_t* end) except -1:
        """Forward the queued commands at EXEC, and have the connection keep the rest of its input.

        False: the general path runs them.
        """
        cdef Output out
        cdef list request
        cdef bytes word
        cdef size_t took
        session, transaction = self.session, self.session.transaction
        out.data, out.used, out.size = NULL, 0, 0
        if not transaction.requests or transaction.size_bytes > MAX_FORWARDED_BYTES or session.read_point is not None:
            return False
        try:
            put(&out, b"*1\r\n$5\r\nMULTI\r\n", 15)
            for each in transaction.requests:
                if type(each) is not list:
                    return False
                request = each
                put_line(&out, c"*", len(request))
                for word in request:
                    put_line(&out, c"$", PyBytes_GET_SIZE(word))
                    put(&out, PyBytes_AS_STRING(word), PyBytes_GET_SIZE(word))
                    put(&out, b"\r\n", 2)
            put(&out, b"*1\r\n$4\r\nEXEC\r\n", 14)
            took = self.forwarder.forward_buffer(
                self, <const uint8_t*>out.data, out.used, session.protocol, 0, self.fields.tracking_state,
                False, 1 + len(transaction.requests)
            )
        except Exception as error:
            self.forwarder.server.report(error)
            took = 0
        finally:
            free(out.data)
        if not took:
            return False
        self.executed = transaction
        session.end_transaction()
        self.delegate(rest, end, 1)
        return True

    cdef int send(self, bytes replies) except -1:
        """Send replies of this process."""
        self.session.active_ms = self.forwarder.server.view.now_ms
        self.forwarder.output_bytes += PyBytes_GET_SIZE(replies)
        self.fields.output_bytes += PyBytes_GET_SIZE(replies)
        self.write(replies)
        return 0

    cdef int delegate(self, const uint8_t* rest, const uint8_t* end, uint64_t forwarded) except -1:
        """Send the replies to the batch that was forwarded last when they have arrived. rest: the input after it."""
        self.fields.last_command = self.forwarder.last_command
        self.forwarded = forwarded
        self.fields.calls += forwarded
        self.connection.is_idle = False
        self.connection.reply.pending, self.connection._next_turn = DELEGATED_REPLIES, NO_TURN
        self.connection.input.data = PyBytes_FromStringAndSize(<const char*>rest, end - rest) if rest < end else b""
        self.complete_batch, self.forwarder.complete_batch = self.forwarder.complete_batch, None
        return 0

    cdef bint end_delegation(self) except -1:
        """Let the connection answer requests again; return False if the client has disconnected."""
        self.connection.reply.pending = self.connection._next_turn = None
        return not self.connection._transport.is_closing()

    cdef bint is_drained(self) except -1:
        """Return whether no input or push is buffered, the client reads its output, and the server is not ending."""
        cdef ConnectionFields connection = self.connection
        output, client_input = connection.output, connection.input
        if connection._is_finishing or connection._is_ending or not client_input.is_reading or not output.is_writable:
            return False
        return not client_input.data and output.delayed_pushes is None

    cdef bint forward_front(self, const uint8_t* data, size_t size) except -1:
        """Forward the forwardable requests at the front of input, and have the connection keep the rest; False if there are none."""
        cdef size_t took
        cdef SessionFields fields = self.fields
        try:
            took = self.forwarder.forward_buffer(self, data, size, fields.protocol, self.session.db, fields.tracking_state)
        except Exception as error:  # nothing was sent; the general path raises it again, and replies with its error
            self.forwarder.server.report(error)
            return False
        if not took:
            return False
        self.delegate(data + took, data + size, self.forwarder.last_count)
        return True

    def deliver_complete(self):
        """Send the replies to the last batch if all of them were cached; return whether they were."""
        cdef ClientBatch complete = self.complete_batch
        self.complete_batch = None
        if complete is None:
            return False
        self.forwarder.deliver(complete)
        return True

    def store_partial(self, bytes data):
        """Store data that is the start of a request; return whether it was stored."""
        if not self.forwarder.has_partial or <size_t>PyBytes_GET_SIZE(data) > KEPT_BYTES_MAX:
            return False
        self.partial_request, self.has_partial = data, True
        return True

    @property
    def seen(self):
        """The epochs that this client has seen."""
        return self.session.seen.epochs

    @property
    def watches_states(self):
        """Whether this client watches states' keys, which EXEC has to compare."""
        return bool(self.session.watched)

    def resend(self, data, epochs):
        """Have the general path answer the requests, from servers that have reached these epochs."""
        self.connection.reply.pending = self.connection._next_turn = None
        self.fields.calls -= self.forwarded  # the general path counts them, too
        if self.executed is not None:
            self.session.resume_transaction(self.executed)
            data, self.executed = PACKED_EXEC, None
        self.connection.resend(data, epochs)

    def error_reply(self, error):
        """Return the error reply for an exception."""
        return self.connection.error_reply(error)

    def end(self, replies):
        """Send the last replies, and close the client's connection: the upstream did not answer a request that may have run."""
        connection = self.connection
        try:
            if not self.end_delegation():
                return
            self.session.close()
            if type(replies) is bytes:
                self.forwarder.output_bytes += len(replies)
                self.fields.output_bytes += len(replies)
                self.write(replies)
                connection.close()
            else:
                connection.send_stream(replies)
        except Exception as error:
            connection.close_on_error(error)

    def fail(self, error):
        """Send an error reply for an exception."""
        self.deliver(self.connection.error_reply(error), NO_EPOCHS)

    cdef with_invalidations(self, reply):
        """Return replies with the client's invalidations around them; send those before a reply in steps.

        An invalidation may be of a key with an older value in the replies: it arrived between two of them. So it is sent
        before and after them. With REDIRECT, another client gets it after them.
        """
        tracking_state, server, session = self.fields.tracking_state, self.forwarder.server, self.session
        if not tracking_state.has_pending or tracking_state.redirect:
            return reply
        before = server.pending_invalidations(session, is_within=True)
        if type(reply) is bytes:
            return before + reply + server.pending_invalidations(session)
        self.write(before)
        return reply

    def deliver(self, reply, epochs):
        """Send the replies; see `send_replies`."""
        self.send_replies(reply, epochs)

    cdef int send_replies(self, reply, epochs) except -1:
        """Send the replies, then handle the input that arrived meanwhile. An exception ends this connection only."""
        cdef Forwarder forwarder = self.forwarder
        connection, session = self.connection, self.session
        self.executed = None
        try:
            if not self.end_delegation():
                return 0
            if epochs is not self.last_epochs:  # equal epochs were added with an earlier reply
                session.seen.add(epochs)
                self.last_epochs = epochs
            self.fields.active_ms = forwarder.server.view.now_ms
            if self.fields.tracking_state is not None:
                reply = self.with_invalidations(reply)
            if type(reply) is not bytes:
                connection.send_stream(reply)
                return 0
            forwarder.output_bytes += len(reply)
            self.fields.output_bytes += len(reply)
            self.write(reply)
            if self.fields.tracking_state is not None and self.fields.tracking_state.has_pending:
                forwarder.server.clients.push_invalidations(self.fields.tracking_state)
            if self.is_drained():
                self.connection.is_idle = True
            else:
                connection.continue_after_reply()
        except Exception as error:
            connection.close_on_error(error)
        return 0
