"""The layout of `pipelines`' classes."""

from libc.stdint cimport uint8_t

from resp_server.native.client_fields cimport InputInterceptor

cdef class RequestBatch:
    cdef size_t count, next  # of its replies: all, and those that have arrived
    cdef readonly bint has_partial  # the last input ended within a reply
    cdef size_t accept_all(self, const uint8_t* start, const uint8_t* end, epochs) except? 0

cdef class PipelineFields:
    cdef public object link  # the socket, if requests may be sent over it
    cdef public object at_end_of_round  # calls a function back at the end of this round of the event loop
    cdef public RequestBatch batch  # the open one
    cdef public object in_flight  # a deque of requests and batches
    cdef public Py_ssize_t awaited_replies  # to all of them, without the open batch
    cdef public list out  # the requests of this round
    cdef public bytes partial_reply  # the start of a reply to a batch
    cdef public bint has_received  # something came since this was cleared
    cdef public bint takes_batches  # what comes next is a reply to the first request in flight
    cdef int begin_batch(self, RequestBatch batch) except -1
    cdef RequestBatch first_batch(self)
    cdef size_t take_replies(self, const uint8_t* start, const uint8_t* end, epochs) except? 0

cdef class ReplyInterceptor(InputInterceptor):
    cdef PipelineFields pipeline
    cdef object epochs
