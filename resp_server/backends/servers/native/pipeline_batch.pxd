"""The layout of `pipeline_batch`'s class."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t

from resp_server.native.pipelines cimport RequestBatch
from resp_server.native.wire cimport Output
from resp_server.backends.servers.native.client_batch cimport ClientBatch, PendingReply
from resp_server.backends.servers.native.reply_delivery cimport ReplyDelivery

cdef class PipelineBatch(RequestBatch):
    cdef ReplyDelivery delivery
    cdef object cluster, connection
    cdef readonly double deadline_s
    cdef public double sent_s
    cdef readonly bint is_batch, is_blocking
    cdef bint passes_errors  # an error is the reply of an upstream that sends no redirects
    cdef PendingReply* pending
    cdef size_t size, room
    cdef Output out
    cdef bytes text
    cdef bytes moved  # the last MOVED within a transaction at a node of a Redis Cluster; None: there was none
    cdef size_t moved_at  # its index
    cdef list client_batches
    cdef int add(
        self, ClientBatch client_batch, uint32_t request, uint32_t item, uint16_t slot, uint16_t number, size_t start,
        bint is_done=*
    ) except -1
    cdef int accept(self, size_t index, const char* data, size_t size, epochs) except -1
    cdef int accept_long(self, size_t index, reply, epochs) except -1
    cdef int note_keys(self, const PendingReply* entry, ClientBatch client_batch, epochs) except -1
    cdef int fail_at_upstream(self, size_t at, ClientBatch client_batch, error) except -1
    cdef int follow(self, request, const PendingReply* entry) except -1
    cdef bytes error_at_node(self, size_t index, bytes reply)
