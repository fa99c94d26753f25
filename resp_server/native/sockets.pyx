# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Clients' sockets on an epoll of our own, which the event loop watches as one descriptor.

In each round all sockets that have something are read, and what the core knows is answered without a Python object in
between; then all of these replies are sent. What the core leaves goes to the connection, as asyncio would hand it over:
`Transport` is what asyncio calls a transport, for plain TCP and unix sockets.

Epoll tells of a socket once, when something new has come (edge-triggered), so that sockets which were read are not looked
at again. What a read left in a socket is noted by its transport, which then has a turn of its own. A round goes on while
more comes, for a millisecond; then the event loop's other work has its turn.

A client that does not take its replies is not read (back-pressure): what it did not take is kept, and the connection is
told to pause when that is more than its limit.
"""

from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBUF_WRITE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.time cimport monotonic_ns
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

import os
import ssl

from resp_server.native.core cimport Hearer, Reads

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
    INPUT_BYTES = 65536  # of one read, with what is kept of a request in parts
    HEARD_BYTES = 8192  # of several reads: what came is looked up together (guess: some 200 requests)
    BEGUN_BYTES_MAX = 32768  # of a request in parts; the general path keeps a longer one
    OUTPUT_BYTES_MAX = 1 << 20  # of a round: beyond, it is sent at once
    HIGH_BYTES = 65536
    SEALED_BYTES = 262144  # encrypted at a time
    ROUND_NS_MAX = 5000000  # what is left has to wait until others were heard
    TURN_NS = 1000000  # of the event loop: no other round begins behind it
    BEGUN_BYTES_KEPT = 4096  # an idle client keeps no larger buffer


cdef class Poller:
    """The sockets of one event loop. reads: what answers first of what comes, if there is something."""

    def __cinit__(self, loop, server, Reads reads=None):
        self.callbacks = []
        self.loop, self.server, self.stats, self.reads = loop, server, server.stats, reads
        self.transports, self.waiting, self.closed = set(), [], []
        self.going, self.ready, self.heard = [], [], []
        self.descriptor = -1
        self.input = <char*>malloc(HEARD_BYTES + INPUT_BYTES)
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
        """Take a connected socket, which does not block, for a protocol."""
        return self.begin(Transport(self, sock, protocol))

    def add_encrypted(self, sock, protocol, tls, incoming, outgoing):
        """Take a connected socket behind its TLS handshake: an `ssl.SSLObject` and its two `ssl.MemoryBIO`."""
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
        """Cut what is still open, and stop watching."""
        for transport in list(self.transports):
            (<Transport>transport).end_now(None)
        if self.descriptor >= 0:
            self.loop.remove_reader(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1

    def run(self):
        """Answer what has come on all sockets that have something, then send; and again while more comes, for a while."""
        cdef int64_t began_ns = monotonic_ns(), ends_ns = began_ns + TURN_NS
        cdef bint is_renewed = False
        self.is_due = False
        while self.descriptor >= 0:
            if self.next_event >= self.event_count and not self.going:
                self.closed.clear()
                self.looks += 1
                self.going, self.ready = self.ready, self.going
                self.next_event, self.event_count = 0, epoll_wait(self.descriptor, self.events, EVENTS_MAX, 0)
            if self.next_event >= self.event_count and not self.going:
                if self.waiting or self.callbacks:
                    self.flush()
                return
            try:
                if not is_renewed:
                    is_renewed = True
                    self.server.renew()
                self.run_round(began_ns)
            except BaseException:
                self.run_soon()  # epoll does not tell of what is left again
                raise
            began_ns = monotonic_ns()
            if began_ns >= ends_ns:
                return self.run_soon()

    cdef int run_round(self, int64_t began_ns) except -1:
        """Answer what epoll told of, and what is left of rounds before, as much as time allows; then send."""
        self.is_in_round = True
        try:
            self.go_on(began_ns + ROUND_NS_MAX)
            self.hear(began_ns + ROUND_NS_MAX)
        finally:
            self.is_in_round = False
            self.flush()
            self.rounds += 1
            self.rounds_ns += monotonic_ns() - began_ns
        return 0

    def count(self):
        """Add what was counted of rounds, bytes and calls of the system to the server's numbers."""
        stats = self.stats
        stats.input_bytes += self.input_bytes
        stats.output_bytes += self.output_bytes
        self.input_bytes = self.output_bytes = 0
        stats.reads += self.reads_done
        stats.writes += self.writes_done
        stats.rounds += self.rounds
        stats.rounds_ns += self.rounds_ns
        self.reads_done = self.writes_done = self.rounds = self.rounds_ns = 0

    cdef int go_on(self, int64_t ends_ns) except -1:
        """Answer what is left of rounds before; whose turn does not come is first in the next round."""
        cdef list going = self.going
        cdef Transport transport
        cdef Py_ssize_t taken = 0
        for transport in going:
            if taken and monotonic_ns() > ends_ns:
                break
            taken += 1
            transport.is_ready = False
            transport.take_turn(0)
            if self.out.used > OUTPUT_BYTES_MAX:
                self.flush()
        del going[:taken]
        return self.answer_heard()

    cdef int hear(self, int64_t ends_ns) except -1:
        """Read sockets that have something. The next round goes on where time ends this one: epoll would begin anew."""
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
                self.flush()
        return self.answer_heard()

    cdef int answer_heard(self) except -1:
        """Answer what was read from several sockets; their keys are looked up together."""
        cdef list heard = self.heard
        cdef Transport transport
        cdef Py_ssize_t at = 0, end
        if not heard:
            return 0
        self.heard, self.input_used = [], 0
        while at < len(heard):
            # What stops the look ahead is answered behind those before it, and the others are looked up anew behind it.
            end = at + 1
            if self.reads is not None and len(heard) - at > 1:
                while self.looks_ahead(<Transport>heard[end - 1]) and end < len(heard):
                    end += 1
                self.reads.find()
            for transport in heard[at:end]:
                transport.answer_input()
                if self.out.used > OUTPUT_BYTES_MAX:
                    self.flush()
            if self.reads is not None:
                self.reads.forget()
            at = end
        return 0

    cdef bint looks_ahead(self, Transport transport) except -1:
        protocol = transport.protocol
        return (
            protocol.is_calm
            and not transport.is_closed
            and self.reads.look_ahead(protocol.session, <const uint8_t*>transport.input, transport.input_bytes)
        )

    cdef int run_soon(self) except -1:
        if not self.is_due:
            self.is_due = True
            self.loop.call_soon(self.run)
        return 0

    def soon(self, callback):
        """Call back in this round, or else the next one, when all that came was looked at and before it is sent."""
        self.callbacks.append(callback)
        if not self.is_in_round:
            self.run_soon()

    cdef int call_back(self) except -1:
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
        """Send what waits.

        What callbacks write goes first: a proxy's questions, which servers work on while clients are sent replies.
        """
        cdef Transport transport
        cdef list waiting = self.waiting
        if self.callbacks:
            self.waiting = []
            self.call_back()
            waiting = self.waiting + waiting
        if waiting:
            self.waiting = []
            for transport in waiting:
                transport.is_waiting = False
                if transport.is_closed:
                    continue
                try:
                    transport.send_all()
                except Exception as error:
                    transport.fail(error)
        self.out.used = 0

    cdef int send_later(self, Transport transport) except -1:
        """Have a transport send at the end of the round."""
        if not transport.is_waiting:
            transport.is_waiting = True
            self.waiting.append(transport)
            if not self.is_in_round:
                self.run_soon()
        return 0


cdef class Transport:
    """A client's socket, as asyncio's transports are. What is written is sent at the end of the round."""

    def __cinit__(self, Poller poller not None, sock, protocol):
        self.poller, self.sock, self.protocol = poller, sock, protocol
        self.descriptor = sock.fileno()
        self.wants_input = True
        self.high, self.low = HIGH_BYTES, HIGH_BYTES // 4
        self.names = {}

    def __dealloc__(self):
        free(self.begun)
        free(self.unsent)

    # -- what asyncio's transports do ---------------------------------------------------------------------------------

    def get_extra_info(self, name, default=None):
        if name == "socket":
            return self.sock
        if name not in ("peername", "sockname"):
            return default
        if name not in self.names:
            try:
                self.names[name] = self.sock.getpeername() if name == "peername" else self.sock.getsockname()
            except OSError:
                self.names[name] = default
        return self.names[name]

    def set_protocol(self, protocol):
        self.protocol = protocol

    def hear_first(self, Hearer hearer):
        """Have somebody take what comes before the protocol does."""
        self.hearer = hearer

    def get_protocol(self):
        return self.protocol

    def is_closing(self):
        return self.is_closed or self.is_ending

    def is_reading(self):
        return self.wants_input and not self.is_closing()

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
        self.wants_input = False
        self.watch()

    def resume_reading(self):
        self.wants_input = True
        self.watch()
        if self.has_records:  # epoll knows nothing of these
            self.has_input = True
            self.go_on_later()
            self.poller.run_soon()

    def write(self, data):
        cdef Py_buffer view
        if self.is_closed or self.is_ending or not len(data):
            return
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            self.keep(view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        self.poller.send_later(self)

    def writelines(self, parts):
        self.write(b"".join(parts))

    def close(self):
        """Close once everything is sent; nothing more is read."""
        if not self.is_closing():
            self.is_ending = True
            self.watch()
            self.poller.send_later(self)

    def abort(self):
        """Close; what was not sent is lost."""
        if not self.is_closed:
            self.is_ending = True
            self.unsent_from = self.unsent_bytes = self.sealed_bytes = self.start = self.end = 0
            self.is_stuck = False
            self.watch()
            self.poller.send_later(self)

    # -- the socket ---------------------------------------------------------------------------------------------------

    cdef int watch(self) except -1:
        """Have epoll tell what is wanted now: input, room for output, both, or nothing."""
        cdef epoll_event event
        cdef uint32_t wanted = 0
        if self.is_closed:
            return 0
        if self.wants_input and not self.is_ending:
            wanted |= EPOLLIN | EPOLLRDHUP | EPOLLET
        if self.is_stuck:
            wanted |= EPOLLOUT | EPOLLET
        if wanted == self.watched:
            return 0
        event.events, event.data.ptr = wanted, <void*>self
        if epoll_ctl(
            self.poller.descriptor,
            EPOLL_CTL_DEL if not wanted else EPOLL_CTL_MOD if self.watched else EPOLL_CTL_ADD,
            self.descriptor,
            &event,
        ) < 0:
            raise OSError(errno, os.strerror(errno))
        self.watched = wanted
        return 0

    cdef int take_turn(self, uint32_t events) except -1:
        """Do what epoll told, or go on with what is left (0). What fails ends this connection alone."""
        try:
            if self.is_unfinished and not events and not self.is_closed:
                self.is_unfinished = False
                memcpy(self.poller.input + self.poller.input_used, self.begun, self.begun_bytes)
                self.answer(self.poller.input + self.poller.input_used, self.begun_bytes)
            if events & (EPOLLOUT | EPOLLERR | EPOLLHUP) and self.is_stuck and not self.is_closed:
                self.send_all()  # which also tells that the peer is gone
            if events & (EPOLLIN | EPOLLERR | EPOLLHUP | EPOLLRDHUP):
                self.has_input = True
            if events & EPOLLRDHUP:
                self.is_at_end = True
            if self.has_input and not self.is_closed:
                if self.read_at == self.poller.looks:
                    self.go_on_later()
                else:
                    self.read_at = self.poller.looks
                    self.read()
        except Exception as error:
            self.fail(error)
        return 0

    cdef int read(self) except -1:
        """Take what came, to be answered with what other sockets brought."""
        cdef Poller poller = self.poller
        cdef ssize_t got
        cdef size_t room = INPUT_BYTES - self.begun_bytes
        if self.is_unfinished or self.input_bytes:
            return 0  # what came before is answered first
        if not self.wants_input or self.is_ending:
            return 0  # sending tells whether the peer is gone; epoll tells again when input is wanted again
        poller.reads_done += 1
        self.input = poller.input + poller.input_used
        got = self.receive(self.input + self.begun_bytes, room)
        if got <= 0:
            return self.read_end() if got == 0 else 0
        if self.begun_bytes:
            memcpy(self.input, self.begun, self.begun_bytes)
        self.input_bytes = self.begun_bytes + got
        poller.input_used += self.input_bytes
        poller.heard.append(self)
        return poller.answer_heard() if poller.input_used >= HEARD_BYTES else 0

    cdef ssize_t receive(self, char* into, size_t room) except -2:
        """Read: how many bytes came, 0 at the end, -1 where none did or the connection broke. `has_input`: there may be more."""
        cdef ssize_t got = recv(self.descriptor, into, room, MSG_DONTWAIT)
        while got < 0 and errno == EINTR:
            got = recv(self.descriptor, into, room, MSG_DONTWAIT)
        # A read that is not full took all, and what comes behind it is told of; but the end is told of once.
        self.has_input = got > 0 and (<size_t>got == room or self.is_at_end)
        if got < 0 and errno != EAGAIN:
            self.end_now(OSError(errno, os.strerror(errno)))
        return got

    cdef ssize_t transmit(self, const char* data, size_t size) except -2:
        """Write: how many bytes were taken. Ends a connection that broke."""
        cdef ssize_t sent = send(self.descriptor, data, size, MSG_NOSIGNAL | MSG_DONTWAIT)
        if sent >= 0:
            return sent
        if errno != EAGAIN and errno != EINTR:
            self.end_now(OSError(errno, os.strerror(errno)))
        return 0

    cdef int answer_input(self) except -1:
        """Answer what was read, if the connection is still there. What fails ends this connection alone."""
        cdef size_t size = self.input_bytes
        self.input_bytes = 0
        try:
            if not self.is_closed:
                self.answer(self.input, size)
            if self.has_input:
                self.go_on_later()
        except Exception as error:
            self.fail(error)
        return 0

    cdef int go_on_later(self) except -1:
        """Have a turn behind those who have one now, without a word from epoll."""
        if not self.is_ready and not self.is_closed:
            self.is_ready = True
            self.poller.ready.append(self)
        return 0

    cdef int answer(self, char* data, size_t size) except -1:
        """Answer so many bytes: those that were kept, and what was read behind them."""
        cdef Poller poller = self.poller
        cdef size_t took = 0, answered, before = poller.out.used
        protocol = self.protocol
        cdef bint is_calm = poller.reads is not None and protocol.is_calm
        if self.hearer is not None and self.hearer.hear(<const uint8_t*>data, size):
            return 0
        if is_calm:
            took = poller.reads.take(protocol.session, <const uint8_t*>data, size, &poller.out)
            if took:
                poller.input_bytes += took
                self.take_replies(before)
            if took == size:
                return self.drop_begun()
            if size - took <= BEGUN_BYTES_MAX and (poller.reads.core.is_incomplete or poller.reads.core.is_full):
                self.keep_begun(data + took, size - took)
                if poller.reads.core.is_full:
                    self.is_unfinished = True
                    self.go_on_later()
                return 0
        self.drop_begun()
        if poller.reads is not None:
            poller.reads.forget()  # what was looked up ahead: anything may happen now
        if is_calm:
            answered = took
            requests = poller.reads.left(protocol.session, <const uint8_t*>data, size, &took)
            poller.input_bytes += took - answered
            protocol.requests_received(requests, PyBytes_FromStringAndSize(data + took, size - took))
        else:
            protocol.data_received(PyBytes_FromStringAndSize(data, size))
        return 0

    cdef int read_end(self) except -1:
        """The client says nothing more; the protocol may still have something to say."""
        if self.protocol.eof_received():
            self.wants_input = False
            return self.watch()
        self.close()
        return 0

    cdef int fail(self, error) except -1:
        self.poller.server.report(error)
        self.abort()
        return 0

    cdef int keep_begun(self, const char* data, size_t size) except -1:
        """Keep what was read of a request that is not all here."""
        cdef char* grown
        if size > self.begun_size:
            grown = <char*>realloc(self.begun, size)
            if grown == NULL:
                raise MemoryError
            self.begun, self.begun_size = grown, size
        memcpy(self.begun, data, size)
        self.begun_bytes = size
        return 0

    cdef int drop_begun(self) except -1:
        self.begun_bytes = 0
        if self.begun_size > BEGUN_BYTES_KEPT:
            free(self.begun)
            self.begun, self.begun_size = NULL, 0
        return 0

    cdef int take_replies(self, size_t before) except -1:
        """Take what the core wrote into the round's output, from a byte on, as this client's."""
        cdef Poller poller = self.poller
        poller.output_bytes += poller.out.used - before  # what the connection writes it counts itself
        if self.unsent_bytes or self.start != self.end:
            self.keep(poller.out.data + before, poller.out.used - before)
            poller.out.used = before
        else:
            self.start, self.end = before, poller.out.used
        poller.send_later(self)
        return 0

    cdef int keep(self, const void* data, size_t size) except -1:
        """Keep something to be sent behind all that waits."""
        cdef char* grown
        cdef size_t start = self.start, wanted = self.end - start
        if wanted:
            self.start = self.end = 0
            self.keep(self.poller.out.data + start, wanted)
        # What was sent stands before what was not: the rest is moved when that is no more than what was sent.
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
        self.pause_if_much()
        return 0

    cdef int pause_if_much(self) except -1:
        if self.unsent_bytes > self.high and not self.is_paused and self.is_stuck:
            self.is_paused = True
            self.protocol.pause_writing()
        return 0

    cdef int send_all(self) except -1:
        """Send what waits, as much as the client takes."""
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
        self.is_stuck = <size_t>sent < size or self.sealed_bytes > 0
        if self.end != self.start:
            self.start = self.end = 0
            if <size_t>sent < size:
                self.keep(data + sent, size - sent)
        else:
            self.unsent_bytes -= sent
            self.unsent_from = self.unsent_from + sent if self.unsent_bytes else 0
            if not self.unsent_bytes and self.unsent_size > HIGH_BYTES:
                free(self.unsent)
                self.unsent, self.unsent_size = NULL, 0
        self.pause_if_much()
        if self.is_paused and self.unsent_bytes <= self.low:
            self.is_paused = False
            self.protocol.resume_writing()
        if self.is_ending and not self.is_stuck:
            return self.end_now(None)
        return self.watch()

    cdef int end_now(self, error) except -1:
        """Close the socket, and tell the protocol."""
        if self.is_closed:
            return 0
        if self.watched:
            epoll_ctl(self.poller.descriptor, EPOLL_CTL_DEL, self.descriptor, NULL)
        self.is_closed = True
        self.begun_bytes = self.unsent_bytes = self.sealed_bytes = self.start = self.end = 0
        self.poller.closed.append(self)  # an event of this round may still name it
        self.poller.transports.discard(self)
        self.sock.close()
        self.poller.loop.call_soon(self.protocol.connection_lost, error)
        return 0


cdef class TlsTransport(Transport):
    """A client's socket behind its TLS handshake: Python's `ssl`, working on memory, between the socket and the core."""

    def get_extra_info(self, name, default=None):
        if name == "ssl_object":
            return self.tls
        if name == "sslcontext":
            return self.tls.context
        return Transport.get_extra_info(self, name, default)

    cdef ssize_t receive(self, char* into, size_t room) except -2:
        """Read and decrypt; what was read before comes first."""
        cdef ssize_t got
        cdef size_t taken = 0
        if not self.has_records and not self.is_over:
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
                self.is_over = got == 0
                self.has_records = got > 0 and (self.incoming.pending > 0 or self.tls.pending() > 0)
        except ssl.SSLWantReadError:  # the rest of a record has not come
            self.has_records = False
        except OSError as error:
            self.end_now(error)
            return -1
        if self.outgoing.pending and self.sealed is None:  # the answer to what is not data
            self.seal()
            self.poller.send_later(self)
        self.has_input = self.may_have_more or self.has_records or self.is_at_end or self.is_over
        if taken or self.is_over:
            return taken
        if self.has_input:
            self.go_on_later()
        return -1

    cdef ssize_t transmit(self, const char* data, size_t size) except -2:
        """Encrypt and write, a part at a time; the last part that was encrypted may be kept."""
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
        """Send what is encrypted; False where the client does not take all of it, or is gone."""
        if self.sealed_bytes:
            self.sealed_bytes -= Transport.transmit(
                self, <const char*>self.sealed + len(self.sealed) - self.sealed_bytes, self.sealed_bytes
            )
        if self.sealed_bytes or self.is_closed:
            return False
        self.sealed = None
        return True

    cdef int end_now(self, error) except -1:
        """Say goodbye, unless a record is half sent, and close."""
        if error is None and self.sealed is None and not self.is_closed:
            try:
                self.tls.unwrap()
            except OSError:
                pass  # the client's goodbye is not waited for
            self.seal()
            send(self.descriptor, <const char*>self.sealed, len(self.sealed), MSG_NOSIGNAL | MSG_DONTWAIT)
        return Transport.end_now(self, error)
