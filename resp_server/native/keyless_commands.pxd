"""The layout of `keyless_commands`' classes."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from resp_server.native.call_counts cimport CallCounts
from resp_server.native.client_fields cimport SessionFields
from resp_server.native.core cimport Core
from resp_server.native.wire cimport Output

cdef int push_before(server, SessionFields session, Output* out, size_t before, bytes pushes=*) except -1

cdef class KeylessCommand:
    cdef object command, command_stats, function, name, converters, is_local, is_connected
    cdef size_t name_words, least, most
    cdef bint takes_words, keeps_caching, is_for_subscribers, has_slot
    cdef CallCounts counts

cdef class CommandCalls:
    cdef object server, command_caller, incomplete
    cdef Core core
    cdef bint needs_turn
    cdef int connected  # the client has connections or a login at other processes; NOT_ASKED: not asked for this buffer
    cdef uint64_t errors  # with the code ERR, since the last `collect`
    cdef KeylessCommand last_command  # of the last request, which `last_words` words name; of `last_caller`
    cdef object last_caller
    cdef size_t last_words
    cdef bytes last_name, last_subcommand  # as typed
    cdef list counted  # the commands that were counted since the last call of `collect`
    cdef size_t call_all(self, SessionFields session, const uint8_t* start, size_t size, Output* out) except? 0
    cdef KeylessCommand command_of(self, size_t count)
    cdef bint admits_call(self, SessionFields session, KeylessCommand command, size_t count) except -1
    cdef bint is_local(self, SessionFields session, KeylessCommand command, size_t count) except -1
    cdef list cut_request(self, size_t count)
    cdef object argument(self, KeylessCommand command, size_t i)
    cdef object run(self, context, KeylessCommand command, size_t count)
    cdef int64_t call(
        self, SessionFields session, context, KeylessCommand command, const uint8_t* request, size_t size, size_t count,
        Output* out, int64_t started_ns
    ) except -1
    cdef int put_error(self, Output* out, error) except -1
    cdef int collect(self) except -1
