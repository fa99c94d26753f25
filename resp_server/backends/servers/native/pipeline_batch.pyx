# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The requests that are sent over one connection in one round of the event loop, and the arrival of their replies."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp

from resp_server.native.pipelines cimport RequestBatch
from resp_server.native.raw_replies cimport line_bytes, reply_bytes
from resp_server.backends.servers.native.client_batch cimport ARRAY, EXEC_PARTS, LISTED, NO_ITEM, UPSTREAM, ClientBatch, PendingReply, Request
from resp_server.backends.servers.native.reply_delivery cimport ReplyDelivery

from resp_server.backends.redis.connection import UpstreamRequest
from resp_server.backends.servers.requests import ServerRequest, send_mget_by_slots
from resp_server.backends.retries import SENDS_MAX
from resp_server.raw_replies.reply_sinks import UnansweredError
from resp_server.raw_replies.reply_splitter import PING, FrameError
from resp_server.protocol.request_parser import RequestParser
from resp_server.session.epochs import NO_EPOCHS

PONG = b"+PONG\r\n"


cdef class PipelineBatch(RequestBatch):
    """The requests over one connection in one round: an `InFlightRequest` (see `resp_server.backends.servers.requests`)."""

    def __cinit__(self, ReplyDelivery delivery, cluster, connection, double deadline_s, size_t room):
        self.delivery, self.cluster, self.connection = delivery, cluster, connection
        self.deadline_s, self.room = deadline_s, room
        self.client_batches = []
        self.is_batch = True

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
        self.delivery.record_noted()
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
        self.delivery.record_noted()

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
                self.delivery.restart(client_batch)
            elif not client_batch.missing:
                self.delivery.deliver(client_batch)
        except Exception as error:
            self.delivery.fail(client_batch, error)
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
                self.delivery.deliver(client_batch)
        except Exception as error:
            self.delivery.fail(client_batch, error)
        return self.delivery.record_noted()

    cdef int note_keys(self, const PendingReply* entry, ClientBatch client_batch, epochs) except -1:
        """Note the keys of a reply, if its client tracks keys."""
        if client_batch.tracking is not None and client_batch.note_keys(entry, epochs):
            self.delivery.noted.append(client_batch)
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
            self.delivery.fail(client_batch, error)

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
            self.delivery.has_long_listings |= client_batch.requests[entry.request].join == LISTED
            self.delivery.restart(client_batch)
            return
        if type(reply) is not bytes:
            self.accept_long(at, reply, epochs)
            return
        if index >= 0 and ((is_array and reply[:1] == b"+") or (is_transaction and (reply == PONG or reply[:1] == b"-"))):
            self.delivery.restart(client_batch)
            return
        if index >= 0 and entry.number > UPSTREAM and reply[:1] == b"-" and client_batch.requests[entry.request].is_in_transaction:
            reply = self.error_at_node(at, reply)
            if reply is None:
                return
        if index >= 0 and is_array and reply[:1] == b"-" and self.cluster.access.clock() < self.deadline_s:
            try:
                keys = RequestParser().feed(self.text[entry.start : entry.end])[0][2:]
                send_mget_by_slots(self.cluster.send, keys, self.deadline_s, self.cluster.defer, self, -1 - index)
            except Exception as error:
                self.fail(index, error)
            return
        self.accept(at, PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply), epochs)
        self.delivery.record_noted()
