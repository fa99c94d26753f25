"""The layout of `sockets`' classes."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from resp_server.native.client_fields cimport ConnectionFields, InputInterceptor
from resp_server.native.fast_path cimport FastPath
from resp_server.native.wire cimport Output

cdef extern from "sys/epoll.h" nogil:
    ctypedef union epoll_data_t:
        void* ptr
    struct epoll_event:
        uint32_t events
        epoll_data_t data

cdef class Poller:
    cdef object loop, server, stats
    cdef bint has_peer_processes  # other processes answer the same clients
    cdef public FastPath fast_path
    cdef public bint renews_by_clock  # the server's own view is only a clock: it has no stores
    cdef int64_t renewed_ms
    cdef int descriptor
    cdef char* input
    cdef size_t input_used
    cdef list unanswered  # transports whose input is answered together
    cdef Output out
    cdef epoll_event events[256]
    cdef int next_event, event_count
    cdef uint64_t polls  # of epoll; each socket is read at most once between two polls
    cdef set transports
    cdef list unsent_transports  # they send at the end of the round
    cdef list resumed  # they have a turn without an event, before those with an event
    cdef list ready  # they are resumed in the next round
    cdef list closed  # events of this round may still point to them
    cdef list callbacks
    cdef bint is_in_round, is_scheduled
    cdef int run_callbacks(self) except -1
    cdef int send_output(self) except -1
    cdef uint64_t input_bytes, output_bytes
    cdef size_t ahead_bytes  # input of all sockets that was read ahead
    cdef public size_t ahead_bytes_max
    cdef uint64_t reads_done, writes_done, rounds, rounds_ns  # since the last call of `count`
    cdef int run_round(self, int64_t began_ns) except -1
    cdef int resume(self, int64_t ends_ns) except -1
    cdef int read_sockets(self, int64_t ends_ns) except -1
    cdef Transport begin(self, Transport transport)
    cdef int answer_batch(self) except -1
    cdef bint look_ahead(self, Transport transport) except -1
    cdef int schedule_run(self) except -1
    cdef int send_later(self, Transport transport) except -1

cdef class Transport:
    cdef Poller poller
    cdef object sock, protocol
    cdef ConnectionFields connection  # the protocol; None: the core does not answer its input
    cdef InputInterceptor interceptor
    cdef dict addresses
    cdef int descriptor
    cdef uint32_t registered_events
    cdef bint reads_input, is_waiting, is_blocked, is_paused, is_ending, is_closed
    cdef bint is_ready  # it is in `ready`
    cdef bint is_unfinished  # `partial` has requests that the core can answer
    cdef uint64_t last_poll  # the poll after which it was read last
    cdef bint has_input  # the socket may have input, of which epoll reports no new event
    cdef bint is_at_end  # the peer has closed its side
    cdef char* partial  # input that is not answered yet, such as an incomplete request
    cdef size_t partial_bytes, partial_size
    cdef char* ahead  # input that was read while the client has too many unread replies; it is answered after `partial`
    cdef size_t ahead_from, ahead_bytes, ahead_size
    cdef char* unsent
    cdef size_t unsent_from, unsent_bytes, unsent_size
    cdef size_t sealed_bytes  # encrypted already, and not taken by the client yet
    cdef bint has_records  # encrypted input was read from the socket and not decrypted yet
    cdef size_t high, low
    cdef size_t start, end  # of its replies in the poller's output
    cdef char* input  # the unanswered input in the poller's buffer
    cdef size_t input_bytes
    cdef int update_events(self) except -1
    cdef int take_turn(self, uint32_t events) except -1
    cdef int read(self) except -1
    cdef bint may_read_ahead(self) noexcept
    cdef int read_ahead(self) except -1
    cdef ssize_t take_ahead(self, char* into, size_t room) noexcept
    cdef int drop_ahead(self) noexcept
    cdef ssize_t receive(self, char* into, size_t room) except -2
    cdef ssize_t transmit(self, const char* data, size_t size) except -2
    cdef int answer_input(self) except -1
    cdef int requeue(self) except -1
    cdef int answer(self, char* data, size_t size) except -1
    cdef bint has_partial_request(self) noexcept
    cdef int read_end(self) except -1
    cdef int fail(self, error) except -1
    cdef int store_partial(self, const char* data, size_t size) except -1
    cdef int drop_partial(self) except -1
    cdef int claim_replies(self, size_t before) except -1
    cdef int buffer_output(self, const void* data, size_t size) except -1
    cdef int check_high_water(self) except -1
    cdef int send_all(self) except -1
    cdef int end_now(self, error) except -1
    cdef int close_socket(self, error) except -1

cdef class TlsTransport(Transport):
    cdef object tls, incoming, outgoing
    cdef bint may_have_more  # the socket may have input that was not read
    cdef bint is_finished  # the client has sent close_notify
    cdef bytes sealed  # encrypted output, whose last `sealed_bytes` are not sent yet
    cdef int seal(self) except -1
    cdef bint send_sealed(self) except -1
