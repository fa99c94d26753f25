"""The layout of `client_fields`' classes."""

from libc.stdint cimport uint8_t, uint64_t

cdef int record_reads(tracking, tracking_state, list keys) except -1

cdef class InputInterceptor:
    cdef bint has_partial  # it stores the start of a request
    cdef size_t intercept(self, const uint8_t* data, size_t size) except? 0

cdef class SessionFields:
    cdef public bint can_use_fast_path, can_use_checked_fast_path, can_queue, can_be_forwarded, can_call
    cdef public bint reads_committed
    cdef public int protocol
    cdef public object user, transaction, tracking_state, subscriptions, epoch_feed, active_ms, last_command
    cdef public list pushed  # pushes to the client while a command's function is called for it; None: none is called
    cdef public uint64_t calls, input_bytes, output_bytes  # of this client; wrap around

cdef class ConnectionFields:
    cdef public bint is_idle  # it is admitted, and nothing waits: no output, and no input but what the round will answer
    cdef public SessionFields session
    cdef public object input, output, reply, _transport
    cdef public object _next_turn  # of this client; None: none is scheduled
    cdef public bint _is_ending, _is_finishing  # the client has sent its end of stream; this server ends
