"""The layout of `reply_delivery`'s class."""

from resp_server.backends.servers.native.client_batch cimport ClientBatch

cdef class ReplyDelivery:
    cdef object server
    cdef list command_stats  # by the indexes of commands
    cdef list noted  # the batches with noted keys
    cdef bint has_long_listings  # the upstream's replies to KEYS are long
    cdef int record_noted(self) except -1
    cdef int deliver(self, ClientBatch client_batch) except -1
    cdef int resend(self, ClientBatch client_batch, epochs) except -1
    cdef int restart(self, ClientBatch client_batch) except -1
    cdef int fail(self, ClientBatch client_batch, error) except -1
