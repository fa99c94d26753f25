# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""What a proxy's forwarder does for one client: its input is forwarded or queued, and its replies are sent."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free

from resp_server.native.client_fields cimport ConnectionFields, SessionFields
from resp_server.native.wire cimport Output, command_at, parse_request, put, put_line, bytes_list_of
from resp_server.backends.servers.native.client_batch cimport BatchClient, ClientBatch
from resp_server.backends.servers.native.forwarded_commands cimport BEGIN, RUN, WORD_BYTES_MAX, WORDS_MAX
from resp_server.backends.servers.native.forwarder cimport Forwarder

from resp_server.backends.servers.forwarder_replies import FORWARDER_REPLIES, NO_SCHEDULED_TURN
from resp_server.backends.servers.transaction_plan import PACKED_EXEC
from resp_server.pipeline.transactions import FORWARDED_BYTES_MAX
from resp_server.protocol.request_parser import ARGUMENT_OVERHEAD_BYTES
from resp_server.session.epochs import NO_EPOCHS

cdef enum:
    # Of an incomplete request or transaction, which is parsed again when more input arrives: at most some 1,000 words (guess).
    KEPT_BYTES_MAX = 131072

cdef int64_t WORD_OVERHEAD_BYTES = ARGUMENT_OVERHEAD_BYTES
cdef int64_t MAX_FORWARDED_BYTES = FORWARDED_BYTES_MAX  # of a transaction whose EXEC arrived alone


cdef class ClientForwarder(BatchClient):
    """Forwards the forwardable requests of one client of a proxy, and sends it the replies.

    While replies are pending, the client's connection leaves all sending to the forwarder (`delegate`).
    """

    cdef Forwarder forwarder
    cdef object session, write, last_epochs
    cdef ConnectionFields connection
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
        self.forwarder.requests.has_partial = False
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
            if self.forwarder.requests.has_partial and size <= KEPT_BYTES_MAX:
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
            took = parse_request(at, end, forwarder.requests.words, WORDS_MAX, WORD_BYTES_MAX, &count)
            if took <= 0:
                forwarder.requests.has_partial = took == 0
                break
            command, added = forwarder.requests.queued_command(count), 0
            if command < 0:
                break
            for i in range(count):
                added += forwarder.requests.words[i].size + WORD_OVERHEAD_BYTES
            if <int64_t>len(requests) >= requests_left or queued_bytes + added > bytes_left:
                break
            requests.append(bytes_list_of(forwarder.requests.words, count))
            queued_bytes += added
            reads_states |= forwarder.requests.has_states
            last = command
            at += took
        if requests:
            transaction.extend(requests, queued_bytes, needs_state=reads_states)
            session.last_command = forwarder.commands.names[last]
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
        took = parse_request(at, end, forwarder.requests.words, WORDS_MAX, WORD_BYTES_MAX, &count)
        command = command_at(&forwarder.commands.specs, forwarder.requests.words, count) if took > 0 and count == 1 else -1
        return took if command >= 0 and forwarder.commands.plans[command].part == RUN else 0

    cdef bint begin_transaction(self, const uint8_t** at, const uint8_t* end) except -1:
        """Begin the transaction of a MULTI at the front of input, in database 0; return whether there is one."""
        cdef Forwarder forwarder = self.forwarder
        cdef size_t count = 0
        cdef Py_ssize_t took
        cdef int command
        if not self.fields.can_be_forwarded or self.session.db:
            return False
        took = parse_request(at[0], end, forwarder.requests.words, WORDS_MAX, WORD_BYTES_MAX, &count)
        command = command_at(&forwarder.commands.specs, forwarder.requests.words, count) if took > 0 and count == 1 else -1
        if command < 0 or forwarder.commands.plans[command].part != BEGIN:
            return False
        self.session.begin_transaction()
        self.session.last_command = forwarder.commands.names[command]
        forwarder.commands.calls[command] += 1
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
        self.connection.reply.pending, self.connection._next_turn = FORWARDER_REPLIES, NO_SCHEDULED_TURN
        self.connection.input.data = PyBytes_FromStringAndSize(<const char*>rest, end - rest) if rest < end else b""
        self.complete_batch, self.forwarder.complete_batch = self.forwarder.complete_batch, None
        return 0

    cdef bint end_forwarder_replies(self) except -1:
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
        self.forwarder.delivery.deliver(complete)
        return True

    def store_partial(self, bytes data):
        """Store data that is the start of a request; return whether it was stored."""
        if not self.forwarder.requests.has_partial or <size_t>PyBytes_GET_SIZE(data) > KEPT_BYTES_MAX:
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
            if not self.end_forwarder_replies():
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
        before = server.take_invalidations(session, is_reply_pending=True)
        if type(reply) is bytes:
            return before + reply + server.take_invalidations(session)
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
            if not self.end_forwarder_replies():
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
