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
treats a `PipelineBatch` as an `InFlightRequest`.

The upstream's keys are tracked by the upstream: the requests of a client that tracks keys go over its dedicated connection. CLIENT
CACHING is answered here, and precedes the next request, or transaction, to the upstream.

If the state server's stores are on this machine (`backends/servers/server_stores.py`), `StoredReads` comes before the forwarder. For
a request about all keys the forwarder joins the reply of these stores and that of the upstream.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memchr, memcpy, memset

cdef extern from "<strings.h>" nogil:
    int strncasecmp(const char*, const char*, size_t)

from resp_server.native.arguments cimport integer
from resp_server.native.client_fields cimport SessionFields
from resp_server.native.lookup_batch cimport below
from resp_server.native.pipelines cimport PipelineFields
from resp_server.native.raw_replies cimport integer_in, put_scan
from resp_server.native.wire cimport Output, Spec, Word, command_at, cut, number_line, put, put_line, text_of
from resp_server.backends.servers.native.client_batch cimport (
    ARRAY, COUNTED, DRAWN, EXEC_PARTS, LISTED, NO_ITEM, NOT_JOINED, QUEUED_PART, SCANNED, SUM, UPSTREAM, BatchClient, ClientBatch,
    Item, Request
)
from resp_server.backends.servers.native.forwarded_commands cimport BEGIN, QUEUED, RUN, WATCHED, WORD_BYTES_MAX, WORDS_MAX, ForwardedCommands, Plan
from resp_server.backends.servers.native.key_patterns cimport CACHED, STATES, UPSTREAM_BACKEND, KeyPatterns
from resp_server.backends.servers.native.pipeline_batch cimport PipelineBatch
from resp_server.backends.servers.native.reply_delivery cimport ReplyDelivery
from resp_server.backends.servers.native.stored_reads cimport StateKeys, StoredReads
from state_backend.native.lookup cimport slot_of

from resp_server.backends.redis.tracking import CACHING_NO, CACHING_YES
from resp_server.backends.servers.min_epochs import has_reached
from resp_server.backends.servers.requests import read_point as encoded_read_point
from resp_server.forwarding.pipelined_connection import REQUESTS_MAX
from resp_server.forwarding.reply_splitter import pack
from resp_server.session.epoch_feed import NO_EPOCHS

OK = b"+OK\r\n"
KEY_COUNT = pack((b"DBSIZE",))
cdef enum:
    BATCH_REQUESTS_MAX = 256  # of one client's batch; limits the buffered replies. A transaction that has begun may have more
    TRANSACTION_REQUESTS_MAX = 1024  # of one with a transaction, whose requests have two replies, of which one is a line
    SLOTS = 16384
    LISTED_KEYS_MAX = 4096  # of states, that KEYS of one batch walk (guess: half a millisecond)


cdef class Forwarder:
    """Forwards forwardable requests of a proxy's clients to the servers of one application, and to an upstream.

    commands: `ForwardedCommand`s (see `command_routes`).
    has_partial: the last input ends with an incomplete request. holds_upstream: the general path gets the upstream's
    requests, which may have to wait; holds_publishing: those that may send messages.

    A batch may have cached replies only. Then nothing is sent for it, and its client calls `deliver_complete`.
    """

    def __init__(self, cluster, server, commands):
        self.cluster, self.server, self.stats = cluster, server, server.stats
        self.epochs = cluster.epochs
        self.commands = ForwardedCommands()
        self.delivery = ReplyDelivery(server, self.commands.stats)
        self.batches, self.cached, self.watched = [None] * CONNECTIONS_MAX, [], []
        self.state_keys = StateKeys()
        self.set_patterns({})
        self.commands.add_states_reads(commands)
        stats = server.stats.command_stats("client|caching")
        self.caching_command = self.commands.add("client|caching", 0, 0, (), None, stats)
        self.stats.collectors.append(self.collect)

    def set_upstream(self, upstream, own_clients, cache_of, commands):
        """Forward requests for an upstream's keys, and answer those that are cached.

        upstream: returns the connection for a client's id, its protocol version and its database, or of a Redis Cluster the
        `NodeConnections`; None: the client's requests take the general path. own_clients: mappings of the clients with connections
        of their own; empty: no client keeps its connection. cache_of: returns, for a client's id and its
        database, the `ResultCache`; None: the client gets no cached replies. commands: (name, whether it only reads, whether it may send messages,
        its keys, its role, whether it is a container without a subcommand, the arity of requests that may be queued, `CommandStats`).
        They replace the commands of an earlier call.
        """
        self.upstream, self.own_clients, self.cache_of = upstream, own_clients, cache_of
        self.state_keys.upstream = upstream
        self.commands.set_upstream_commands(commands)

    def use_stores(self, StoredReads reads, stores):
        """Have `reads` answer from a state server's stores (`server_stores.ServerStores`); None: there are none."""
        reads.use(self.state_keys, stores)
        self.stored = None if stores is None else reads

    def set_patterns(self, by_database, others=()):
        """Set which backend answers which keys of each database: `ForwardedKeys`; the first match decides.

        A key that matches no pattern is the upstream's. others: the patterns of all other databases.
        """
        cdef dict made = {database: KeyPatterns(patterns) for database, patterns in by_database.items()}
        self.other_patterns = KeyPatterns(others)
        self.has_cached = any(each.is_cached for patterns in [*by_database.values(), others] for each in patterns)
        self.first_patterns = self.state_keys.patterns = made.get(0, self.other_patterns)
        self.patterns_by_database = made

    cdef KeyPatterns patterns_of(self, database):
        """Return the patterns of a database."""
        return self.patterns_by_database.get(database, self.other_patterns) if database else self.first_patterns

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
        cdef TransactionStart transaction
        cdef size_t requests_max = BATCH_REQUESTS_MAX
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
            command = command_at(&self.commands.specs, self.words, count)
            if command == self.caching_command and multi == NULL and self.set_caching(count):
                self.add_caching(at, took)
                at += took
                continue
            if command < 0 or command == self.caching_command:
                break
            plan = &self.commands.plans[command]
            if plan.part == BEGIN or plan.part == RUN:
                # A MULTI within a transaction, an EXEC outside of one, and arguments of either are errors.
                if (plan.part == BEGIN) != (multi == NULL) or count > 1 or is_of_states or sink.watches_states:
                    break
                if plan.part == BEGIN:
                    multi = at
                    self.begin_transaction(&transaction, command, at, took)
                else:
                    if not self.add_exec(sink, &transaction, command, at, took, protocol, database):
                        break
                    multi, requests_max = NULL, TRANSACTION_REQUESTS_MAX
            else:
                items = self.add_items(sink, plan, count, at, took, protocol, database, is_of_states, multi != NULL)
                if not items:
                    break
                self.add_request(command, at, took, items)
                self.requests[self.request_count - 1].is_in_transaction = multi != NULL
            if self.listed_keys > LISTED_KEYS_MAX:  # the client's other requests have another turn
                requests_max = self.request_count
            at += took
        if multi != NULL:
            self.drop_transaction(&transaction)
            at = multi
        return at - start

    cdef void begin_transaction(self, TransactionStart* start, int command, const uint8_t* at, size_t size) noexcept:
        """Add a MULTI; note the state of the input before it."""
        start.multi, start.has_states, start.has_writes = self.request_count, self.has_states, self.has_writes
        start.is_caching_set = self.is_caching_set
        self.add_boundary(command, at, size)

    cdef void drop_transaction(self, const TransactionStart* start) noexcept:
        """Remove a MULTI whose EXEC is missing, and the requests after it."""
        self.request_count, self.item_count = start.multi, self.requests[start.multi].first
        self.has_states, self.has_writes = start.has_states, start.has_writes
        self.is_caching_set = start.is_caching_set

    cdef bint add_exec(
        self, sink, const TransactionStart* start, int command, const uint8_t* at, size_t size, int protocol, database
    ) except -1:
        """Add an EXEC; False: the transaction is not forwardable."""
        cdef uint32_t begin = start.multi, queued = self.request_count - begin - 1
        cdef Request* run
        self.add_item(0)
        if not self.end_transaction(sink, begin, protocol, database, start.is_caching_set):
            return False
        self.add_boundary(command, at, size)
        run = &self.requests[self.request_count - 1]
        run.queued, run.is_recorded = queued, self.is_recording  # CLIENT CACHING does not limit it
        if self.requests[begin + 1].join == QUEUED_PART:
            run.join, run.first, run.items = EXEC_PARTS, self.requests[begin + 1].first, queued
            self.item_count -= 1  # its items are those of the queued commands
        return True

    cdef void add_boundary(self, int command, const uint8_t* at, size_t size) noexcept:
        """Add a MULTI or an EXEC."""
        cdef Request* request = &self.requests[self.request_count]
        request.join, request.has_caching, request.is_in_transaction = NOT_JOINED, False, True
        if self.commands.plans[command].part == BEGIN:
            self.add_item(0)
        self.add_request(command, at, size, 1)

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
        request.command, request.is_error, request.is_read = command, False, self.commands.plans[command].is_read
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
        cdef Py_ssize_t keys = self.commands.find_keys(plan, self.words, count, self.keys)
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
            if isinstance(sink, BatchClient) and not database and self.own_clients:
                self.upstream_connection = self.shared_connection(sink, protocol)
                return self.upstream_connection is not None
            self.upstream_connection = self.upstream(sink.client_id, protocol, database)
            self.node_table = None if self.upstream_connection is None else self.upstream_connection.node_numbers
        return self.upstream_connection is not None

    cdef object shared_connection(self, BatchClient sink, int protocol):
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
        cdef const Spec* spec = &self.commands.specs.rows[plan - &self.commands.plans[0]]
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
        cdef int64_t cursor = 0
        cdef int items = 3 if plan.listing == DRAWN and not self.total else 2
        cdef bytes found
        if self.stored is None or database or self.tracking is not None or not isinstance(sink, BatchClient):
            return 0
        if self.has_writes or self.holds_upstream or not self.patterns.has_two_owners or self.item_count + items > ITEMS_MAX:
            return 0
        if not self.open_upstream(sink, protocol, database) or self.node_table is not None:
            return 0
        if plan.listing == SCANNED:
            if count < 2 or not integer(&self.words[1], &cursor) or cursor < 0:
                return 0
            items = 1
        elif count != (2 if plan.listing == LISTED else 1) or (plan.listing == LISTED and self.delivery.has_long_listings):
            return 0
        if plan.listing != SCANNED or cursor & 1:
            found = self.reply_of_states((<BatchClient>sink).fields, plan.listing, at, size)
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
        request.total, request.random = self.total, <uint16_t>below(self.stored.core.batch, 1 << 16)
        return items

    cdef bytes reply_of_states(self, SessionFields session, int listing, const uint8_t* at, size_t size):
        """Return the states' part of the reply to a request about all keys; None: the general path answers it."""
        cdef Output out
        cdef bytes found
        if listing != SCANNED:
            if self.key_count is None:
                self.key_count = self.stored.reply_about_states(session, PyBytes_AS_STRING(KEY_COUNT), PyBytes_GET_SIZE(KEY_COUNT))
            if self.key_count is None or listing == COUNTED:
                return self.key_count
            found = self.stored.reply_about_states(session, at, size)
            if listing == LISTED or found is None:
                self.listed_keys += 1 + integer_in(PyBytes_AS_STRING(self.key_count), PyBytes_GET_SIZE(self.key_count))
                return found
            return self.key_count + found
        out.data, out.used, out.size = NULL, 0, 0
        try:
            put_scan(&out, at, self.words[0].at + self.words[0].size + 2, at + size)
            found = self.stored.reply_about_states(session, out.data, out.used)
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
        cdef int command = command_at(&self.commands.specs, self.words, count), arity
        cdef Py_ssize_t keys
        cdef Plan* plan
        cdef int backend = STATES
        if command < 0 or command == self.caching_command:
            return -1
        plan = &self.commands.plans[command]
        keys = self.commands.find_keys(plan, self.words, count, self.keys)
        if plan.part != QUEUED or keys <= 0:
            return -1
        if self.upstream is not None:
            backend = self.first_patterns.backend_of_all(self.keys, keys)
        self.has_states = backend == STATES
        if backend == STATES:
            is_queued = plan.reads_states and self.commands.specs.rows[command].least <= count <= self.commands.specs.rows[command].most
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
                room = REQUESTS_MAX - min(<size_t>REQUESTS_MAX, <size_t>connection.awaited_replies)
                batch = PipelineBatch(self.delivery, self.cluster, connection, deadline_s, room)
                batch.passes_errors = number == UPSTREAM and (<object>connection).follow is None
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
            self.commands.calls[request.command] += i > 0 or not client_batch.replied  # that MULTI was counted
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
        self.last_command = self.commands.names[client_batch.requests[client_batch.request_count - 1].command]
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
        self.stats.input_bytes += self.input_bytes
        self.stats.output_bytes += self.output_bytes
        self.input_bytes = self.output_bytes = 0
        self.commands.collect()
