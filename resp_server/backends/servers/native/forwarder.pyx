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

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t
from libc.string cimport memset

from resp_server.native.pipelines cimport PipelineFields
from resp_server.native.raw_replies cimport put_scan
from resp_server.native.wire cimport number_line, put, put_line
from resp_server.backends.servers.native.client_batch cimport (
    ARRAY, COUNTED, EXEC_PARTS, NO_ITEM, QUEUED_PART, SCANNED, SUM, UPSTREAM, ClientBatch, Item, Request
)
from resp_server.backends.servers.native.forwardable_requests cimport ForwardableRequests
from resp_server.backends.servers.native.forwarded_commands cimport ForwardedCommands
from resp_server.backends.servers.native.pipeline_batch cimport PipelineBatch
from resp_server.backends.servers.native.reply_delivery cimport ReplyDelivery
from resp_server.backends.servers.native.stored_reads cimport StateKeys, StoredReads

from resp_server.backends.redis.tracking import CACHING_NO, CACHING_YES
from resp_server.backends.servers.min_epochs import has_reached
from resp_server.backends.servers.requests import read_point as encoded_read_point
from resp_server.raw_replies.pipelined_connection import REQUESTS_MAX
from resp_server.raw_replies.reply_splitter import pack

KEY_COUNT = pack((b"DBSIZE",))


cdef class Forwarder:
    """Forwards forwardable requests of a proxy's clients to the servers of one application, and to an upstream.

    commands: `StateForwardSpec`s (see `command_routes`).

    A batch may have cached replies only. Then nothing is sent for it, and its client calls `deliver_complete`.
    """

    def __init__(self, cluster, server, commands):
        self.cluster, self.server, self.stats = cluster, server, server.stats
        self.epochs = cluster.epochs
        self.commands = ForwardedCommands(commands, server)
        self.delivery = ReplyDelivery(server, self.commands.stats)
        self.requests = ForwardableRequests(cluster, server, self.commands, self.delivery)
        self.state_keys = StateKeys(self.requests.database_patterns, self.requests.upstream)
        self.batches = [None] * CONNECTIONS_MAX
        self.stats.collectors.append(self.collect)

    @property
    def has_partial(self):
        """Whether the last input ended with an incomplete request."""
        return self.requests.has_partial

    def hold(self, bint all_requests, bint publishing):
        """Leave all requests to the upstream to the general path, because they may have to wait, or those that send messages."""
        self.requests.holds_upstream, self.requests.holds_publishing = all_requests, publishing

    def set_upstream(self, upstream, dedicated_clients, cache_of, commands):
        """Forward requests for an upstream's keys, and answer those that are cached.

        upstream: returns the connection for a client's id, its protocol version and its database, or of a Redis Cluster the
        `NodeConnections`; None: the client's requests take the general path. dedicated_clients: mappings of the clients with connections
        of their own; empty: no client keeps its connection. cache_of: returns, for a client's id and its
        database, the `ResultCache`; None: the client gets no cached replies. commands: (name, whether it only reads, whether it may send messages,
        its keys, `Policy.special`, whether it is a container without a subcommand, the arity of requests that may be queued, `CommandStats`).
        They replace the commands of an earlier call.
        """
        self.requests.upstream.connect, self.requests.upstream.dedicated_clients = upstream, dedicated_clients
        self.requests.cache_of = cache_of
        self.commands.set_upstream_commands(commands)

    def use_stores(self, StoredReads reads, stores):
        """Have `reads` answer from a state server's stores (`server_stores.ServerStores`); None: there are none."""
        reads.use(self.state_keys, stores)
        self.requests.stored = None if stores is None else reads

    def set_key_owners(self, by_database, others=()):
        """Set which backend answers which keys of each database: `KeyOwner`; the first match decides.

        A key that matches no pattern is the upstream's. others: the patterns of all other databases.
        """
        self.requests.database_patterns.set(by_database, others)

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
        cdef ForwardableRequests requests = self.requests
        took = requests.parse(sink, data, data + size, protocol, database, tracking_state, is_of_states)
        if not took:
            return 0
        # Input with both reads of states and writes to the upstream takes the general path: see the module's docstring.
        if (requests.has_writes and requests.has_states) or not self.reserve_batches(sink) or not requests.set_watched():
            requests.has_partial = False
            return 0
        client_batch = requests.batch_of(sink, data, took, protocol, replied)
        try:
            if tracking_state is not None:
                client_batch.tracking, client_batch.was_caching_set = tracking_state, tracking_state.is_caching_set
                client_batch.full_invalidations = self.server.tracking.full_invalidations
            self.send(client_batch)
            if tracking_state is not None:
                tracking_state.is_caching_set = requests.tracking.is_caching_set
        except BaseException:
            client_batch.is_finished = True  # the general path answers the requests
            raise
        self.complete_batch = None if client_batch.missing else client_batch
        return took

    cdef bint reserve_batches(self, sink) except -1:
        """Open a batch at each connection; False if a connection is full or its server is behind the client's seen epochs."""
        cdef size_t i
        cdef int number
        cdef PipelineBatch batch
        cdef PipelineFields connection
        cdef ForwardableRequests requests = self.requests
        cdef list open_connections = requests.slot_connections.connections
        memset(self.new_replies, 0, sizeof(self.new_replies))
        self.used_count = 0
        for i in range(requests.item_count):
            number = requests.items[i].number
            if not number:
                continue
            if not self.new_replies[number]:
                self.used[self.used_count] = number
                self.used_count += 1
            self.new_replies[number] += 1  # an upper limit: a server sends one reply for all its keys of an MGET
        self.new_replies[UPSTREAM] += requests.tracking.prefixes
        for i in range(self.used_count):
            number = self.used[i]
            self.new_replies[number] += 3 * requests.divided  # STATE AT, MULTI, EXEC
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
            return self.requests.upstream.connection
        if number > UPSTREAM:
            return self.requests.upstream.connection.node_connection(number - UPSTREAM)
        return open_connections[number] if number < len(open_connections) else None

    cdef int send(self, ClientBatch client_batch) except -1:
        """Append the requests to the batches of their connections."""
        cdef size_t i, start
        cdef int j
        cdef PipelineBatch batch
        cdef Request* request
        cdef uint16_t number
        cdef bytes caching
        if self.requests.divided:
            self.read_points, self.clock_ms = {}, self.server.clock()
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
                    caching = CACHING_YES if self.requests.tracking.is_optin else CACHING_NO
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
