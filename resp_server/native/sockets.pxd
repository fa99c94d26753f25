"""The layout of `sockets`' classes."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from resp_server.native.core cimport Hearer, Reads
from resp_server.native.wire cimport Output

cdef extern from "sys/epoll.h" nogil:
    ctypedef union epoll_data_t:
        void* ptr
    struct epoll_event:
        uint32_t events
        epoll_data_t data

cdef class Poller:
    cdef object loop, server, stats
    cdef Reads reads
    cdef int descriptor
    cdef char* input
    cdef size_t input_used  # of what is heard
    cdef list heard  # whose input is to be answered together
    cdef Output out
    cdef epoll_event events[256]
    cdef int next_event, event_count
    cdef uint64_t looks  # at epoll: between two of them each socket is read once
    cdef set transports
    cdef list waiting  # to send at the end of the round
    cdef list going  # have a turn, whatever epoll told, before those that it told of last
    cdef list ready  # are to have one when all of these had theirs
    cdef list closed  # that the events may still name
    cdef list callbacks
    cdef bint is_in_round, is_due
    cdef int call_back(self) except -1
    cdef uint64_t input_bytes, output_bytes
    cdef uint64_t reads_done, writes_done, rounds, rounds_ns  # not added up yet
    cdef int run_round(self, int64_t began_ns) except -1
    cdef int go_on(self, int64_t ends_ns) except -1
    cdef int hear(self, int64_t ends_ns) except -1
    cdef Transport begin(self, Transport transport)
    cdef int answer_heard(self) except -1
    cdef bint looks_ahead(self, Transport transport) except -1
    cdef int run_soon(self) except -1
    cdef int send_later(self, Transport transport) except -1

cdef class Transport:
    cdef Poller poller
    cdef object sock, protocol
    cdef Hearer hearer
    cdef dict names
    cdef int descriptor
    cdef uint32_t watched
    cdef bint wants_input, is_waiting, is_stuck, is_paused, is_ending, is_closed
    cdef bint is_ready  # to have a turn without a word from epoll
    cdef bint is_unfinished  # more of what was read is to be answered
    cdef uint64_t read_at  # the look at epoll behind which it was read
    cdef bint has_input  # there may be some that epoll does not tell of again
    cdef bint is_at_end  # the peer sends nothing more
    cdef char* begun  # of a request that is not all here
    cdef size_t begun_bytes, begun_size
    cdef char* unsent
    cdef size_t unsent_from, unsent_bytes, unsent_size
    cdef size_t sealed_bytes  # encrypted already, and not taken by the client yet
    cdef bint has_records  # encrypted input was read from the socket and not decrypted yet
    cdef size_t high, low
    cdef size_t start, end  # of its replies in the round's output
    cdef char* input  # what was read and is to be answered, in the poller's
    cdef size_t input_bytes
    cdef int watch(self) except -1
    cdef int take_turn(self, uint32_t events) except -1
    cdef int read(self) except -1
    cdef ssize_t receive(self, char* into, size_t room) except -2
    cdef ssize_t transmit(self, const char* data, size_t size) except -2
    cdef int answer_input(self) except -1
    cdef int go_on_later(self) except -1
    cdef int answer(self, char* data, size_t size) except -1
    cdef int read_end(self) except -1
    cdef int fail(self, error) except -1
    cdef int keep_begun(self, const char* data, size_t size) except -1
    cdef int drop_begun(self) except -1
    cdef int take_replies(self, size_t before) except -1
    cdef int keep(self, const void* data, size_t size) except -1
    cdef int pause_if_much(self) except -1
    cdef int send_all(self) except -1
    cdef int end_now(self, error) except -1

cdef class TlsTransport(Transport):
    cdef object tls, incoming, outgoing
    cdef bint may_have_more  # the socket, behind what was read of it
    cdef bint is_over  # the client said goodbye
    cdef bytes sealed  # encrypted: its last `sealed_bytes` are to be sent
    cdef int seal(self) except -1
    cdef bint send_sealed(self) except -1
