# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The forwardable requests at the front of one client's input, and where each of them is answered."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memchr, memcpy, memset

cdef extern from "<strings.h>" nogil:
    int strncasecmp(const char*, const char*, size_t)

from resp_server.native.arguments cimport integer
from resp_server.native.client_fields cimport SessionFields
from resp_server.native.lookup_batch cimport random_below
from resp_server.native.raw_replies cimport integer_in, put_scan
from resp_server.native.wire cimport Output, Spec, Word, command_at, parse_request, bytes_of
from resp_server.backends.servers.native.client_batch cimport (
    ARRAY, COUNTED, DRAWN, EXEC_PARTS, LISTED, NOT_JOINED, QUEUED_PART, SCANNED, UPSTREAM, BatchClient, ClientBatch, Item, Request
)
from resp_server.backends.servers.native.forwarded_commands cimport BEGIN, QUEUED, RUN, WATCHED, WORD_BYTES_MAX, WORDS_MAX, ForwardedCommands, Plan
from resp_server.backends.servers.native.key_owners cimport CACHED, STATES, UPSTREAM_BACKEND, DatabaseOwners
from resp_server.backends.servers.native.reply_delivery cimport ReplyDelivery
from resp_server.backends.servers.native.stored_reads cimport StoredReads
from resp_server.backends.servers.native.upstream_access cimport UpstreamAccess
from state_backend.native.lookup cimport slot_of

from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.epochs import NO_EPOCHS

OK = b"+OK\r\n"
KEY_COUNT = pack((b"DBSIZE",))
cdef enum:
    BATCH_REQUESTS_MAX = 256  # of one client's batch; limits the buffered replies. A transaction that has begun may have more
    TRANSACTION_REQUESTS_MAX = 1024  # of a batch with a transaction: each queued request has two replies, of which one is a line
    SLOTS = 16384
    LISTED_KEYS_MAX = 4096  # of states, that KEYS of one batch walk (guess: half a millisecond)


cdef class ForwardableRequests:
    """The requests of the client whose input is being forwarded. They are parsed anew for each client."""

    def __init__(self, cluster, server, ForwardedCommands commands, ReplyDelivery delivery):
        self.all_slot_connections, self.epochs, self.server = cluster.slot_connections, cluster.epochs, server
        self.commands, self.delivery = commands, delivery
        self.upstream, self.database_patterns = UpstreamAccess(), DatabaseOwners()
        self.cached, self.watched = [], []

    cdef ClientBatch batch_of(self, sink, const uint8_t* data, size_t size, int protocol, size_t replied):
        """Return a batch of the requests, which are in `data`; it has the replies that are known already."""
        cdef ClientBatch client_batch = ClientBatch.__new__(ClientBatch)
        client_batch.sink, client_batch.protocol, client_batch.patterns = sink, protocol, self.patterns
        client_batch.replied = replied
        client_batch.data = PyBytes_FromStringAndSize(<const char*>data, size)
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
        return client_batch

    cdef int begin_tracking(self, tracking_state) except -1:
        """Parse the requests of a client with this tracking; None: the client tracks no keys."""
        memset(&self.tracking, 0, sizeof(Tracking))
        if tracking_state is not None:
            self.tracking.is_on, self.tracking.is_caching_set = True, tracking_state.is_caching_set
            self.tracking.is_optin, self.tracking.is_optout = tracking_state.is_optin, tracking_state.is_optout
            self.tracking.is_recording = tracking_state.is_on and not tracking_state.is_bcast
        return 0

    cdef bint set_caching(self, size_t count) noexcept:
        """Set CLIENT CACHING, a request of `count` words; return whether the client's mode allows it."""
        cdef Word* words = self.words
        if count != 3:
            return False
        if self.tracking.is_optin and words[2].size == 3 and strncasecmp(<char*>words[2].at, b"yes", 3) == 0:
            self.tracking.is_caching_set = True
            return True
        if self.tracking.is_optout and words[2].size == 2 and strncasecmp(<char*>words[2].at, b"no", 2) == 0:
            self.tracking.is_caching_set = True
            return True
        return False

    cdef size_t parse(
        self, sink, const uint8_t* start, const uint8_t* end, int protocol, database, tracking_state, bint is_of_states
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
        self.slot_connections = self.all_slot_connections[protocol]
        self.slot_numbers = self.slot_connections.numbers
        self.begin_tracking(tracking_state)
        self.upstream.reset()
        self.has_partial = self.has_states = self.has_writes = self.ends_watch = False
        self.item_count = self.request_count = 0
        self.cache_hits, self.has_cache, self.divided, self.key_count, self.total, self.listed_keys = 0, False, 0, None, 0, 0
        self.patterns = self.database_patterns.of(database)
        if self.cached:
            self.cached = []
        if self.watched:
            self.watched = []
        if self.upstream.connect is None and database:  # without an upstream, other databases are empty
            return 0
        while at < end and self.item_count < ITEMS_MAX and self.request_count < (requests_max if multi == NULL else ITEMS_MAX):
            took = parse_request(at, end, self.words, WORDS_MAX, WORD_BYTES_MAX, &count)
            if took <= 0:
                self.has_partial = took == 0
                break
            command = command_at(&self.commands.specs, self.words, count)
            if command == self.commands.caching and multi == NULL and self.set_caching(count):
                self.add_caching(at, took)
                at += took
                continue
            if command < 0 or command == self.commands.caching:
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
        start.is_caching_set = self.tracking.is_caching_set
        self.add_boundary(command, at, size)

    cdef void drop_transaction(self, const TransactionStart* start) noexcept:
        """Remove a MULTI whose EXEC is missing, and the requests after it."""
        self.request_count, self.item_count = start.multi, self.requests[start.multi].first
        self.has_states, self.has_writes = start.has_states, start.has_writes
        self.tracking.is_caching_set = start.is_caching_set

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
        run.queued, run.is_recorded = queued, self.tracking.is_recording  # CLIENT CACHING does not limit it
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
        request.is_recorded, request.queued = self.tracking.is_recording, 0
        if self.tracking.is_optin or self.tracking.is_optout:
            request.is_recorded &= self.tracking.is_caching_set == self.tracking.is_optin
        self.tracking.is_caching_set = False
        self.item_count += items
        self.request_count += 1

    cdef int add_caching(self, const uint8_t* at, size_t size) except -1:
        """Add a CLIENT CACHING, which is answered here."""
        cdef Request* request = &self.requests[self.request_count]
        self.cached.append(OK)
        self.add_item(0)
        memset(request, 0, sizeof(Request))
        request.at, request.size, request.is_read = at, size, True
        request.first, request.items, request.command = <uint32_t>self.item_count, 1, self.commands.caching
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
        if self.upstream.connect is not None and not is_of_states:
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

    cdef int add_upstream_item(self, sink, const Plan* plan, size_t keys, int protocol, database, bint is_queued) except -1:
        """Add the item of a request to the upstream; return 1, or 0: the general path answers it."""
        cdef Item* item = self.add_item(0)
        cdef int slot
        cdef size_t i
        if self.holds_upstream or (plan.publishes and self.holds_publishing):
            return 0
        if not plan.is_for_upstream or not self.upstream.open(sink, protocol, database):
            return 0
        if not keys and not plan.is_read and self.database_patterns.has_cached:  # it may change any key
            return 0
        item.number = UPSTREAM
        if self.upstream.node_table is not None:
            slot = self.slot_of_keys(keys) if keys else -1
            if slot < 0 or plan.part == WATCHED or not (<bytes>self.upstream.node_table)[slot]:
                return 0
            if self.tracking.is_caching_set:  # a redirect has to send it again, which the general path does
                return 0
            item.slot, item.number = slot, UPSTREAM + <uint8_t>(<bytes>self.upstream.node_table)[slot]
        elif plan.part == WATCHED:
            if is_queued or self.tracking.is_caching_set or sink.watches_states or not self.upstream.connection.may_watch:
                return 0
            for i in range(keys):
                self.watched.append(bytes_of(&self.keys[i]))
        self.has_writes |= not plan.is_read
        self.requests[self.request_count].has_caching = self.tracking.is_caching_set
        self.tracking.prefixes += self.tracking.is_caching_set
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
        if self.tracking.is_recording and (items < keys or self.keys[0].at != self.words[1].at):
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
        if self.stored is None or database or self.tracking.is_on or not isinstance(sink, BatchClient):
            return 0
        if self.has_writes or self.holds_upstream or not self.patterns.has_two_owners or self.item_count + items > ITEMS_MAX:
            return 0
        if not self.upstream.open(sink, protocol, database) or self.upstream.node_table is not None:
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
        request.total, request.random = self.total, <uint16_t>random_below(self.stored.core.batch, 1 << 16)
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
        if self.upstream.connect is not None:
            if not self.upstream.open(sink, protocol, database):
                return False
            if item[1].number < UPSTREAM and (self.watched or self.upstream.connection.has_watched):
                return False
            if item[1].number > UPSTREAM and (has_caching or self.upstream.connection.has_watched):
                return False  # a redirect has to repeat CLIENT CACHING; the keys may be watched at another node
            if item[1].number == UPSTREAM:
                if self.upstream.connection.is_dirty:
                    return False
                self.ends_watch, self.watched = True, []
                self.requests[begin].has_caching = has_caching
                self.tracking.prefixes += has_caching
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
        if command < 0 or command == self.commands.caching:
            return -1
        plan = &self.commands.plans[command]
        keys = self.commands.find_keys(plan, self.words, count, self.keys)
        if plan.part != QUEUED or keys <= 0:
            return -1
        if self.upstream.connect is not None:
            backend = self.database_patterns.first.backend_of_all(self.keys, keys)
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
        return self.upstream.connection.change_watched(self.ends_watch, self.watched)

    cdef bytes cache_key(self, const uint8_t* at, size_t size):
        """Return a request with its name, the first of `words`, in lower case."""
        cdef bytes made = PyBytes_FromStringAndSize(<const char*>at, size)
        cdef char* name = PyBytes_AS_STRING(made) + (self.words[0].at - at)
        cdef size_t i
        for i in range(self.words[0].size):
            if c"A" <= name[i] <= c"Z":
                name[i] += 32
        return made

    cdef int slot_of_keys(self, size_t count) noexcept:
        """Return the slot of the keys; -1 if they are in several slots."""
        cdef size_t i
        cdef int slot = slot_of(self.keys[0].at, self.keys[0].size)
        for i in range(1, count):
            if <int>slot_of(self.keys[i].at, self.keys[i].size) != slot:
                return -1
        return slot
