"""The layout of `forwarder`'s class."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from resp_server.native.pipelines cimport PipelineFields
from resp_server.backends.servers.native.client_batch cimport ClientBatch
from resp_server.backends.servers.native.forwardable_requests cimport ForwardableRequests
from resp_server.backends.servers.native.forwarded_commands cimport ForwardedCommands
from resp_server.backends.servers.native.reply_delivery cimport ReplyDelivery
from resp_server.backends.servers.native.stored_reads cimport StateKeys

cdef enum:
    CONNECTIONS_MAX = 512

cdef class Forwarder:
    cdef readonly object cluster
    cdef object server, stats, epochs
    cdef ForwardedCommands commands
    cdef ReplyDelivery delivery
    cdef ForwardableRequests requests  # of the client whose input is being forwarded
    cdef StateKeys state_keys  # which the stores answer
    cdef list batches  # the open one of each connection in use, by the connection's number
    cdef uint32_t new_replies[CONNECTIONS_MAX]  # expected over each connection
    cdef int used[CONNECTIONS_MAX]  # the numbers of the connections in use
    cdef int used_count
    cdef dict read_points  # by connection, the request that has a server read the divided transactions at one epoch
    cdef object clock_ms  # at which they are read
    cdef ClientBatch complete_batch  # the batch that was sent last, if all of its replies were cached
    cdef readonly object last_command
    cdef uint64_t last_count  # requests of the batch that was sent last
    cdef uint64_t input_bytes, output_bytes  # of clients
    cdef size_t forward_buffer(
        self, sink, const uint8_t* data, size_t size, int protocol, database, tracking_state, bint is_of_states=*,
        size_t replied=*
    ) except? 0
    cdef bint reserve_batches(self, sink) except -1
    cdef bint has_room(self, PipelineFields connection, int number) except -1
    cdef PipelineFields connection_of(self, int number, list open_connections)
    cdef int send(self, ClientBatch client_batch) except -1
    cdef int send_mget(self, ClientBatch client_batch, uint32_t index, uint16_t number) except -1
    cdef int send_part(self, ClientBatch client_batch, uint32_t run, uint16_t number) except -1
    cdef int send_listing(self, ClientBatch client_batch, uint32_t index) except -1
    cdef int send_each_key(self, ClientBatch client_batch, uint32_t index) except -1
