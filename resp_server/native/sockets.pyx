# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Clients' sockets on an epoll instance of our own, which the event loop watches as one descriptor.

In each round all readable sockets are read, and the core answers what it can without making Python objects; then all
replies are sent. Other input goes to the connection as with asyncio: `Transport` is an asyncio transport for TCP and
unix sockets, `TlsTransport` one with TLS.

Epoll is edge-triggered: it reports a socket once when new input arrives. So a transport that has left input in its
socket notes that, and gets a turn without an event. Rounds follow each other for a millisecond while input arrives;
then the event loop's other work runs.

A client that does not read its replies gets no more (back-pressure): its output is buffered, and above a limit the
connection is told to pause. Its socket is read ahead meanwhile, up to a limit (see `client.connection`).
"""

from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBUF_WRITE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.time cimport monotonic_ns
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove

import os
import ssl

from resp_server.native.client_fields cimport ConnectionFields, InputInterceptor
from resp_server.native.fast_path cimport FastPath

from resp_server.limits import AHEAD_BYTES_MAX

cdef extern from "sys/epoll.h" nogil:
    int epoll_create1(int)
    int epoll_ctl(int, int, int, epoll_event*)
    int epoll_wait(int, epoll_event*, int, int)
    uint32_t EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP, EPOLLRDHUP, EPOLLET
    int EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLL_CLOEXEC

cdef extern from "unistd.h" nogil:
    int close_descriptor "close"(int)

cdef extern from "sys/socket.h" nogil:
    ssize_t recv(int, void*, size_t, int)
    ssize_t send(int, const void*, size_t, int)
    int MSG_NOSIGNAL, MSG_DONTWAIT

cdef enum:
    EVENTS_MAX = 256
    INPUT_BYTES = 65536  # of one read, with the partial request before it
    BATCH_BYTES = 8192  # input of several sockets that is looked up together (guess: some 200 requests)
    PARTIAL_BYTES_MAX = 32768  # of an incomplete request; the general path buffers a longer one
    OUTPUT_BYTES_MAX = 1 << 20  # of a round; above, it is sent at once
    HIGH_BYTES = 65536  # default of the output buffer at which a connection pauses
    SEALED_BYTES = 262144  # encrypted at a time
    ROUND_NS_MAX = 5000000  # after this, other sockets wait for the next round
    TURN_NS = 1000000  # after this, no further round begins within this turn of the event loop
    PARTIAL_BYTES_RETAINED = 4096  # an idle client's larger buffer is freed


cdef class Poller:
    """The sockets of one event loop. fast_path: answers requests before the connections do; None: it is not built."""

    def __cinit__(self, loop, server, FastPath fast_path=None, bint has_peer_processes=False):
        self.has_peer_processes, self.ahead_bytes_max = has_peer_processes, AHEAD_BYTES_MAX
        self.callbacks = []
        self.loop, self.server, self.stats, self.fast_path = loop, server, server.stats, fast_path
        self.transports, self.unsent_transports, self.closed = set(), [], []
        self.resumed, self.ready, self.unanswered = [], [], []
        self.descriptor = -1
        self.input = <char*>malloc(BATCH_BYTES + INPUT_BYTES)
        self.out.data, self.out.size = <char*>malloc(OUTPUT_BYTES_MAX), OUTPUT_BYTES_MAX
        if self.input == NULL or self.out.data == NULL:
            raise MemoryError
        self.descriptor = epoll_create1(EPOLL_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(errno, os.strerror(errno))
        loop.add_reader(self.descriptor, self.run)
        self.stats.collectors.append(self.count)

    def __dealloc__(self):
        free(self.input)
        free(self.out.data)
        if self.descriptor >= 0:
            close_descriptor(self.descriptor)

    def add(self, sock, protocol):
        """Add a connected, non-blocking socket for a protocol."""
        return self.begin(Transport(self, sock, protocol))

    def add_encrypted(self, sock, protocol, tls, incoming, outgoing):
        """Add a connected socket after its TLS handshake, with its `ssl.SSLObject` and its two `ssl.MemoryBIO`."""
        cdef TlsTransport transport = TlsTransport(self, sock, protocol)
        transport.tls, transport.incoming, transport.outgoing = tls, incoming, outgoing
        transport.has_records = incoming.pending > 0 or tls.pending() > 0
        return self.begin(transport)

    cdef Transport begin(self, Transport transport):
        self.transports.add(transport)
        try:
            transport.protocol.connection_made(transport)
            transport.resume_reading()
        except Exception as error:
            transport.fail(error)
        return transport

    def close(self):
        """Close all sockets, and stop polling."""
        for transport in list(self.transports):
            (<Transport>transport).end_now(None)
        if self.descriptor >= 0:
            self.loop.remove_reader(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1

    def run(self):
        """Answer the input of all readable sockets, then send; repeat for `TURN_NS` while input arrives."""
        cdef int64_t began_ns = monotonic_ns(), ends_ns = began_ns + TURN_NS
        cdef bint is_renewed = False
        self.is_scheduled = False
        while self.descriptor >= 0:
            if self.next_event >= self.event_count and not self.resumed:
                if self.closed:
                    self.closed.clear()
                self.polls += 1
                self.resumed, self.ready = self.ready, self.resumed
                self.next_event, self.event_count = 0, epoll_wait(self.descriptor, self.events, EVENTS_MAX, 0)
            if self.next_event >= self.event_count and not self.resumed:
                if self.unsent_transports or self.callbacks:
                    self.send_output()
                return
            try:
                if not is_renewed:
                    is_renewed = True
                    if not self.renews_by_clock or began_ns // 1000000 != self.renewed_ms:
                        self.renewed_ms = began_ns // 1000000
                        self.server.renew()
                self.run_round(began_ns)
            except BaseException:
                self.schedule_run()  # epoll does not report the remaining input again
                raise
            began_ns = monotonic_ns()
            if began_ns >= ends_ns:
                return self.schedule_run()

    cdef int run_round(self, int64_t began_ns) except -1:
        """Resume transports of earlier rounds, read sockets with events, as time allows; then send."""
        self.is_in_round = True
        try:
            self.resume(began_ns + ROUND_NS_MAX)
            self.read_sockets(began_ns + ROUND_NS_MAX)
        finally:
            self.is_in_round = False
            self.send_output()
            self.rounds += 1
            self.rounds_ns += monotonic_ns() - began_ns
        return 0

    def count(self):
        """Add the counts of rounds, bytes and system calls to the server's statistics."""
        stats = self.stats
        stats.input_bytes += self.input_bytes
        stats.output_bytes += self.output_bytes
        self.input_bytes = self.output_bytes = 0
        stats.reads += self.reads_done
        stats.writes += self.writes_done
        stats.rounds += self.rounds
        stats.rounds_ns += self.rounds_ns
        self.reads_done = self.writes_done = self.rounds = self.rounds_ns = 0

    cdef int resume(self, int64_t ends_ns) except -1:
        """Give transports of earlier rounds a turn; if time is short, the others are first in the next round."""
        cdef list resumed = self.resumed
        cdef Transport transport
        cdef Py_ssize_t taken = 0
        if not resumed:
            return 0
        for transport in resumed:
            if taken and monotonic_ns() > ends_ns:
                break
            taken += 1
            transport.is_ready = False
            transport.take_turn(0)
            if self.out.used > OUTPUT_BYTES_MAX:
                self.send_output()
        del resumed[:taken]
        return self.answer_batch()

    cdef int read_sockets(self, int64_t ends_ns) except -1:
        """Read sockets with events. If time is short, the next round continues with the remaining events."""
        cdef Transport transport
        cdef epoll_event* event
        cdef bint is_first = True
        while self.next_event < self.event_count and (is_first or monotonic_ns() <= ends_ns):
            event = &self.events[self.next_event]
            self.next_event += 1
            is_first = False
            transport = <Transport>event.data.ptr
            transport.take_turn(event.events)
            if self.out.used > OUTPUT_BYTES_MAX:
                self.send_output()
        return self.answer_batch()

    cdef int answer_batch(self) except -1:
        """Answer the input of several sockets; their keys are looked up together."""
        cdef list unanswered = self.unanswered
        cdef Transport transport
        cdef Py_ssize_t at = 0, end
        if not unanswered:
            return 0
        self.unanswered, self.input_used = [], 0
        if self.has_peer_processes:  # a request may follow their reply, from an epoch that came since the round began
            self.server.renew()
        while at < len(unanswered):
            # The first buffer that cannot be added is answered after those that were; then a new lookahead begins.
            end = at + 1
            if self.fast_path is not None and len(unanswered) - at > 1:
                while self.look_ahead(<Transport>unanswered[end - 1]) and end < len(unanswered):
                    end += 1
                self.fast_path.run_lookups()
            for transport in unanswered[at:end]:
                transport.answer_input()
                if self.out.used > OUTPUT_BYTES_MAX:
                    self.send_output()
            if self.fast_path is not None:
                self.fast_path.drop_lookaheads()
            at = end
        return 0

    cdef bint look_ahead(self, Transport transport) except -1:
        cdef ConnectionFields connection = transport.connection
        return (
            connection is not None
            and connection.is_idle
            and not transport.is_closed
            and not transport.has_partial_request()
            and self.fast_path.look_ahead(connection.session, <const uint8_t*>transport.input, transport.input_bytes)
        )

    cdef int schedule_run(self) except -1:
        if not self.is_scheduled:
            self.is_scheduled = True
            self.loop.call_soon(self.run)
        return 0

    def call_before_flush(self, callback):
        """Call back after all input of this round was processed, before output is sent.

        Outside of a round, it calls back in the next one.
        """
        self.callbacks.append(callback)
        if not self.is_in_round:
            self.schedule_run()

    cdef int run_callbacks(self) except -1:
        cdef bint is_in_round = self.is_in_round
        cdef list callbacks
        self.is_in_round = True
        try:
            while self.callbacks:
                callbacks, self.callbacks = self.callbacks, []
                for callback in callbacks:
                    try:
                        callback()
                    except Exception as error:
                        self.server.report(error)
        finally:
            self.is_in_round = is_in_round
        return 0

    def flush(self):
        """Send all output."""
        self.send_output()

    cdef int send_output(self) except -1:
        """Send all output.

        The output of callbacks goes first. It is a proxy's requests, which servers answer while clients get replies.
        """
        cdef Transport transport
        cdef list waiting = self.unsent_transports
        if self.callbacks:
            self.unsent_transports = []
            self.run_callbacks()
            waiting = self.unsent_transports + waiting
        if waiting:
            self.unsent_transports = []
            for transport in waiting:
                transport.is_waiting = False
                if transport.is_closed:
                    continue
                try:
                    transport.send_all()
                except Exception as error:
                    transport.fail(error)
        self.out.used = 0
        return 0

    cdef int send_later(self, Transport transport) except -1:
        """Let a transport send at the end of the round."""
        if not transport.is_waiting:
            transport.is_waiting = True
            self.unsent_transports.append(transport)
            if not self.is_in_round:
                self.schedule_run()
        return 0


cdef class Transport:
    """A client's socket as an asyncio transport. Output is sent at the end of the round."""

    def __cinit__(self, Poller poller not None, sock, protocol):
        self.poller, self.sock = poller, sock
        self.set_protocol(protocol)
        self.descriptor = sock.fileno()
        self.reads_input = True
        self.high, self.low = HIGH_BYTES, HIGH_BYTES // 4
        self.addresses = {}

    def __dealloc__(self):
        free(self.partial)
        free(self.ahead)
        free(self.unsent)

    # -- the interface of asyncio's transports ------------------------------------------------------------------------

    def get_extra_info(self, name, default=None):
        if name == "socket":
            return self.sock
        if name not in ("peername", "sockname"):
            return default
        if name not in self.addresses:
            try:
                self.addresses[name] = self.sock.getpeername() if name == "peername" else self.sock.getsockname()
            except OSError:
                self.addresses[name] = default
        return self.addresses[name]

    def set_protocol(self, protocol):
        self.protocol = protocol
        self.connection = protocol if isinstance(protocol, ConnectionFields) else None

    def set_interceptor(self, InputInterceptor interceptor):
        """Let an interceptor process input before the protocol."""
        self.interceptor = interceptor

    def get_protocol(self):
        return self.protocol

    def is_closing(self):
        return self.is_closed or self.is_ending

    def is_reading(self):
        return self.reads_input and not self.is_closing()

    def set_write_buffer_limits(self, high=None, low=None):
        self.high = HIGH_BYTES if high is None else high
        self.low = self.high // 4 if low is None else low

    def get_write_buffer_limits(self):
        return self.low, self.high

    def get_write_buffer_size(self):
        return self.unsent_bytes + self.sealed_bytes + self.end - self.start

    def can_write_eof(self):
        return False

    def pause_reading(self):
        self.reads_input = False
        self.update_events()

    def resume_reading(self):
        self.reads_input = True
        self.update_events()
        if self.has_records or self.has_input or self.ahead_bytes:  # epoll does not report these
            self.has_input = True
            self.requeue()
            self.poller.schedule_run()

    def write(self, data):
        cdef Py_buffer view
        if self.is_closed or self.is_ending or not len(data):
            return
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            self.buffer_output(view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        self.poller.send_later(self)

    def writelines(self, parts):
        self.write(b"".join(parts))

    def close(self):
        """Close once all output is sent; no more input is read."""
        if not self.is_closing():
            self.is_ending = True
            self.update_events()
            self.poller.send_later(self)

    def abort(self):
        """Close, and discard unsent output."""
        if not self.is_closed:
            self.is_ending = True
            self.unsent_from = self.unsent_bytes = self.sealed_bytes = self.start = self.end = 0
            self.is_blocked = False
            self.update_events()
            self.poller.send_later(self)

    # -- the socket ---------------------------------------------------------------------------------------------------

    cdef int update_events(self) except -1:
        """Register for the events that are needed now: input, room for output, both, or none."""
        cdef epoll_event event
        cdef uint32_t wanted = 0
        if self.is_closed:
            return 0
        if (self.reads_input and not self.is_ending) or self.may_read_ahead():
            wanted |= EPOLLIN | EPOLLRDHUP | EPOLLET
        if self.is_blocked:
            wanted |= EPOLLOUT | EPOLLET
        if wanted == self.registered_events:
            return 0
        event.events, event.data.ptr = wanted, <void*>self
        if epoll_ctl(
            self.poller.descriptor,
            EPOLL_CTL_DEL if not wanted else EPOLL_CTL_MOD if self.registered_events else EPOLL_CTL_ADD,
            self.descriptor,
            &event,
        ) < 0:
            raise OSError(errno, os.strerror(errno))
        self.registered_events = wanted
        return 0

    cdef int take_turn(self, uint32_t events) except -1:
        """Process events, or continue without one (0). An error ends only this connection."""
        try:
            if self.is_unfinished and not events and not self.is_closed:
                self.is_unfinished = False
                memcpy(self.poller.input + self.poller.input_used, self.partial, self.partial_bytes)
                self.answer(self.poller.input + self.poller.input_used, self.partial_bytes)
            if events & (EPOLLOUT | EPOLLERR | EPOLLHUP) and self.is_blocked and not self.is_closed:
                self.send_all()  # it also detects that the peer has closed
            if events & (EPOLLIN | EPOLLERR | EPOLLHUP | EPOLLRDHUP):
                self.has_input = True
            if events & EPOLLRDHUP:
                self.is_at_end = True
            if self.has_input and not self.is_closed:
                if self.last_poll == self.poller.polls:
                    self.requeue()
                else:
                    self.last_poll = self.poller.polls
                    self.read()
        except Exception as error:
            self.fail(error)
        return 0

    cdef int read(self) except -1:
        """Read input, to be answered together with that of other sockets."""
        cdef Poller poller = self.poller
        cdef ssize_t got
        cdef size_t room = INPUT_BYTES - self.partial_bytes
        if self.is_unfinished or self.input_bytes:
            return 0  # earlier input is answered first
        if not self.reads_input or self.is_ending:
            return self.read_ahead()
        self.input = poller.input + poller.input_used
        if self.ahead_bytes:
            got = self.take_ahead(self.input + self.partial_bytes, room)
        else:
            poller.reads_done += 1
            got = self.receive(self.input + self.partial_bytes, room)
        if got <= 0:
            return self.read_end() if got == 0 else 0
        if self.partial_bytes:
            memcpy(self.input, self.partial, self.partial_bytes)
        self.input_bytes = self.partial_bytes + got
        poller.input_used += self.input_bytes
        poller.unanswered.append(self)
        return poller.answer_batch() if poller.input_used >= BATCH_BYTES else 0

    cdef bint may_read_ahead(self) noexcept:
        """Return whether to read input that is answered once the client has read its replies."""
        return self.is_paused and not self.is_ending and self.poller.ahead_bytes < self.poller.ahead_bytes_max

    cdef int read_ahead(self) except -1:
        """Read a part of the input ahead, if it may be; once the socket is registered again, epoll reports the rest."""
        cdef ssize_t got
        cdef char* grown
        if not self.may_read_ahead():
            return self.update_events()
        if self.ahead_from and self.ahead_from * 2 >= self.ahead_bytes:  # a client may send and read for ever
            memmove(self.ahead, self.ahead + self.ahead_from, self.ahead_bytes - self.ahead_from)
            self.poller.ahead_bytes -= self.ahead_from
            self.ahead_bytes -= self.ahead_from
            self.ahead_from = 0
        if self.ahead_size < self.ahead_bytes + INPUT_BYTES:
            grown = <char*>realloc(self.ahead, 2 * self.ahead_bytes + INPUT_BYTES)
            if grown == NULL:
                raise MemoryError
            self.ahead, self.ahead_size = grown, 2 * self.ahead_bytes + INPUT_BYTES
        self.poller.reads_done += 1
        got = self.receive(self.ahead + self.ahead_bytes, INPUT_BYTES)
        if got > 0 and not self.is_closed:
            self.ahead_bytes += got
            self.poller.ahead_bytes += got
        if got == 0:
            self.has_input = True  # the end of the input comes after what was read ahead
        elif self.has_input:
            self.requeue()
        return 0

    cdef ssize_t take_ahead(self, char* into, size_t room) noexcept:
        """Take input that was read ahead; return the number of bytes."""
        cdef size_t size = min(room, self.ahead_bytes - self.ahead_from)
        memcpy(into, self.ahead + self.ahead_from, size)
        self.ahead_from += size
        if self.ahead_from == self.ahead_bytes:
            self.drop_ahead()
        self.has_input = True
        return size

    cdef int drop_ahead(self) noexcept:
        self.poller.ahead_bytes -= self.ahead_bytes
        free(self.ahead)
        self.ahead, self.ahead_from, self.ahead_bytes, self.ahead_size = NULL, 0, 0, 0
        return 0

    cdef ssize_t receive(self, char* into, size_t room) except -2:
        """Read input, and update `has_input`; return the number of bytes.

        0: the end of the input. -1: there is none, or the connection broke.
        """
        cdef ssize_t got = recv(self.descriptor, into, room, MSG_DONTWAIT)
        while got < 0 and errno == EINTR:
            got = recv(self.descriptor, into, room, MSG_DONTWAIT)
        # A short read has emptied the socket, and epoll reports later input. But epoll reports the end only once.
        self.has_input = got > 0 and (<size_t>got == room or self.is_at_end)
        if got < 0 and errno != EAGAIN:
            error = OSError(errno, os.strerror(errno))
            self.protocol.eof_received()  # now: a blocked client pops nothing that a later request of this round pushes
            self.end_now(error)
        return got

    cdef ssize_t transmit(self, const char* data, size_t size) except -2:
        """Write; return the number of bytes that the socket took. A broken connection is ended."""
        cdef ssize_t sent = send(self.descriptor, data, size, MSG_NOSIGNAL | MSG_DONTWAIT)
        if sent >= 0:
            return sent
        if errno != EAGAIN and errno != EINTR:
            self.end_now(OSError(errno, os.strerror(errno)))
        return 0

    cdef int answer_input(self) except -1:
        """Answer the input, unless the connection was closed. An error ends only this connection."""
        cdef size_t size = self.input_bytes
        self.input_bytes = 0
        try:
            if not self.is_closed:
                self.answer(self.input, size)
            if self.has_input:
                self.requeue()
        except Exception as error:
            self.fail(error)
        return 0

    cdef int requeue(self) except -1:
        """Get a turn in the next round without an event."""
        if not self.is_ready and not self.is_closed:
            self.is_ready = True
            self.poller.ready.append(self)
        return 0

    cdef int answer(self, char* data, size_t size) except -1:
        """Answer input: the partial request and the bytes after it."""
        cdef Poller poller = self.poller
        cdef size_t took = 0, answered, before = poller.out.used
        cdef bint needs_turn = False
        protocol = self.protocol
        cdef bint is_idle = poller.fast_path is not None and self.connection is not None and self.connection.is_idle
        if is_idle and not self.has_partial_request():
            self.connection.session.input_bytes += size  # first: CLIENT INFO shows it
            took = poller.fast_path.answer_front(self.connection.session, <const uint8_t*>data, size, &poller.out)
            self.connection.session.input_bytes -= size - took
            if took:
                poller.input_bytes += took
                self.connection.session.output_bytes += poller.out.used - before
                self.claim_replies(before)
            needs_turn = poller.fast_path.keyless.needs_turn
            if took == size and not needs_turn:
                return self.drop_partial()
            if not needs_turn and size - took <= PARTIAL_BYTES_MAX and (
                poller.fast_path.core.is_incomplete or poller.fast_path.core.is_full
            ):
                self.store_partial(data + took, size - took)
                if poller.fast_path.core.is_full:
                    self.is_unfinished = True
                    self.requeue()
                return 0
        self.drop_partial()
        if self.connection is None and poller.fast_path is not None:
            poller.fast_path.expire_view()  # a request may follow a server's reply, from a newer epoch
        if self.interceptor is not None and not needs_turn:
            took += self.interceptor.intercept(<const uint8_t*>data + took, size - took)
            if took == size:
                return 0
        if poller.fast_path is not None:
            poller.fast_path.drop_lookaheads()  # the general path may change anything now
            poller.fast_path.expire_view()
        if is_idle and (needs_turn or self.interceptor is None):
            answered, incomplete = took, poller.fast_path.take_incomplete()
            requests = poller.fast_path.remaining_requests(self.connection.session, <const uint8_t*>data, size, &took)
            rest = PyBytes_FromStringAndSize(data + took, size - took)
            protocol.requests_received(requests, took - answered, rest, incomplete)
        else:
            protocol.data_received(PyBytes_FromStringAndSize(data + took, size - took))
        return 0

    cdef bint has_partial_request(self) noexcept:
        """Return whether the interceptor stores the start of a request, so that the core cannot parse what comes next."""
        return self.interceptor is not None and self.interceptor.has_partial

    cdef int read_end(self) except -1:
        """Process the end of the input; the protocol may still send replies."""
        if self.protocol.eof_received():
            self.reads_input = False
            return self.update_events()
        self.close()
        return 0

    cdef int fail(self, error) except -1:
        self.poller.server.report(error)
        self.abort()
        return 0

    cdef int store_partial(self, const char* data, size_t size) except -1:
        """Store input that is not answered yet."""
        cdef char* grown
        if size > self.partial_size:
            grown = <char*>realloc(self.partial, size)
            if grown == NULL:
                raise MemoryError
            self.partial, self.partial_size = grown, size
        memcpy(self.partial, data, size)
        self.partial_bytes = size
        return 0

    cdef int drop_partial(self) except -1:
        self.partial_bytes = 0
        if self.partial_size > PARTIAL_BYTES_RETAINED:
            free(self.partial)
            self.partial, self.partial_size = NULL, 0
        return 0

    cdef int claim_replies(self, size_t before) except -1:
        """Claim the round's output from `before` on as this client's replies."""
        cdef Poller poller = self.poller
        poller.output_bytes += poller.out.used - before  # the connection counts its own output
        if self.unsent_bytes or self.start != self.end:
            self.buffer_output(poller.out.data + before, poller.out.used - before)
            poller.out.used = before
        else:
            self.start, self.end = before, poller.out.used
        poller.send_later(self)
        return 0

    cdef int buffer_output(self, const void* data, size_t size) except -1:
        """Append output to the transport's buffer."""
        cdef char* grown
        cdef size_t start = self.start, wanted = self.end - start
        if wanted:
            self.start = self.end = 0
            self.buffer_output(self.poller.out.data + start, wanted)
        # Sent bytes are at the front of the buffer. The unsent ones are moved there once they are not more than these.
        if self.unsent_from and self.unsent_from >= self.unsent_bytes:
            memcpy(self.unsent, self.unsent + self.unsent_from, self.unsent_bytes)
            self.unsent_from = 0
        if self.unsent_from + self.unsent_bytes + size > self.unsent_size:
            wanted = (self.unsent_from + self.unsent_bytes + size) * 2
            grown = <char*>realloc(self.unsent, wanted)
            if grown == NULL:
                raise MemoryError
            self.unsent, self.unsent_size = grown, wanted
        memcpy(self.unsent + self.unsent_from + self.unsent_bytes, data, size)
        self.unsent_bytes += size
        self.check_high_water()
        return 0

    cdef int check_high_water(self) except -1:
        if self.unsent_bytes > self.high and not self.is_paused and self.is_blocked:
            self.is_paused = True
            self.protocol.pause_writing()
        return 0

    cdef int send_all(self) except -1:
        """Send as much output as the socket accepts."""
        cdef size_t size = self.end - self.start
        cdef ssize_t sent = 0
        cdef const char* data = self.poller.out.data + self.start if size else self.unsent + self.unsent_from
        if not size:
            size = self.unsent_bytes
        if size or self.sealed_bytes:
            self.poller.writes_done += 1
            sent = self.transmit(data, size)
            if self.is_closed:
                return 0
        self.is_blocked = <size_t>sent < size or self.sealed_bytes > 0
        if self.end != self.start:
            self.start = self.end = 0
            if <size_t>sent < size:
                self.buffer_output(data + sent, size - sent)
        else:
            self.unsent_bytes -= sent
            self.unsent_from = self.unsent_from + sent if self.unsent_bytes else 0
            if not self.unsent_bytes and self.unsent_size > HIGH_BYTES:
                free(self.unsent)
                self.unsent, self.unsent_size = NULL, 0
        self.check_high_water()
        if self.is_paused and self.unsent_bytes <= self.low:
            self.is_paused = False
            self.protocol.resume_writing()
        if self.is_ending and not self.is_blocked:
            return self.end_now(None)
        return self.update_events()

    cdef int end_now(self, error) except -1:
        """Use the socket no more; soon notify the protocol, and close."""
        if self.is_closed:
            return 0
        if self.registered_events:
            epoll_ctl(self.poller.descriptor, EPOLL_CTL_DEL, self.descriptor, NULL)
        self.is_closed = True
        self.drop_ahead()
        self.partial_bytes = self.unsent_bytes = self.sealed_bytes = self.start = self.end = 0
        self.poller.closed.append(self)  # an event of this round may still point to it
        self.poller.transports.discard(self)
        self.poller.loop.call_soon(self.finish, error)
        return 0

    def finish(self, error):
        """Notify the protocol, and close: whoever sees the end of a connection finds no subscription of it any more."""
        try:
            self.protocol.connection_lost(error)
        finally:
            self.close_socket(error)

    cdef int close_socket(self, error) except -1:
        self.sock.close()
        return 0


cdef class TlsTransport(Transport):
    """A client's socket after its TLS handshake. Python's `ssl` works on memory, between the socket and the core."""

    def get_extra_info(self, name, default=None):
        if name == "ssl_object":
            return self.tls
        if name == "sslcontext":
            return self.tls.context
        return Transport.get_extra_info(self, name, default)

    cdef ssize_t receive(self, char* into, size_t room) except -2:
        """Read and decrypt input; records that were read earlier come first."""
        cdef ssize_t got
        cdef size_t taken = 0
        if not self.has_records and not self.is_finished:
            got = Transport.receive(self, into, room)
            if got <= 0:
                return got
            self.may_have_more = self.has_input
            self.incoming.write(PyMemoryView_FromMemory(into, got, PyBUF_READ))
            self.has_records = True
        try:
            while taken < room and self.has_records:
                got = self.tls.read(room - taken, PyMemoryView_FromMemory(into + taken, room - taken, PyBUF_WRITE))
                taken += got
                self.is_finished = got == 0
                self.has_records = got > 0 and (self.incoming.pending > 0 or self.tls.pending() > 0)
        except ssl.SSLWantReadError:  # the record is incomplete
            self.has_records = False
        except OSError as error:
            self.end_now(error)
            return -1
        if self.outgoing.pending and self.sealed is None:  # a reply of the TLS protocol itself
            self.seal()
            self.poller.send_later(self)
        self.has_input = self.may_have_more or self.has_records or self.is_at_end or self.is_finished
        if taken or self.is_finished:
            return taken
        if self.has_input:
            self.requeue()
        return -1

    cdef ssize_t transmit(self, const char* data, size_t size) except -2:
        """Encrypt and send, a part at a time; the last encrypted part may remain buffered."""
        cdef size_t done = 0, part
        while self.send_sealed() and (done < size or self.outgoing.pending):
            part = min(size - done, <size_t>SEALED_BYTES)
            if part:
                try:
                    done += <size_t>self.tls.write(PyMemoryView_FromMemory(<char*>data + done, part, PyBUF_READ))
                except OSError as error:
                    self.end_now(error)
                    return 0
            self.seal()
        return done

    cdef int seal(self) except -1:
        self.sealed = self.outgoing.read()
        self.sealed_bytes = len(self.sealed)
        return 0

    cdef bint send_sealed(self) except -1:
        """Send the encrypted part; False if the socket does not accept all of it, or is closed."""
        if self.sealed_bytes:
            self.sealed_bytes -= Transport.transmit(
                self, <const char*>self.sealed + len(self.sealed) - self.sealed_bytes, self.sealed_bytes
            )
        if self.sealed_bytes or self.is_closed:
            return False
        self.sealed = None
        return True

    cdef int close_socket(self, error) except -1:
        """Send close_notify, unless a record is partly sent, and close."""
        if error is None and self.sealed is None:
            try:
                self.tls.unwrap()
            except OSError:
                pass  # the client's close_notify is not awaited
            self.seal()
            send(self.descriptor, <const char*>self.sealed, len(self.sealed), MSG_NOSIGNAL | MSG_DONTWAIT)
        return Transport.close_socket(self, error)
