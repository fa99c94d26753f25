"""The layout of `fast_path`'s class."""

from libc.stdint cimport int64_t, uint8_t

from resp_server.native.call_counts cimport CallCounts
from resp_server.native.keyless_commands cimport CommandCalls
from resp_server.native.client_fields cimport SessionFields
from resp_server.native.core cimport Core
from resp_server.native.rows cimport COMMANDS_MAX
from resp_server.native.permissions cimport Permissions
from resp_server.native.wire cimport Output

cdef class FastPath:
    cdef object server, stats, make_permissions, record_slow
    cdef CommandCalls keyless
    cdef Core core
    cdef Output output
    cdef list command_stats_of, names
    cdef CallCounts counts[COMMANDS_MAX]
    cdef bint was_tried  # the core has parsed the last buffer
    cdef object last_user  # of the last lookahead
    cdef Permissions last_permissions
    cdef int64_t slow_ns  # the duration of a request that is recorded as slow
    cdef bint begin(self) except -1
    cdef bint look_ahead(self, SessionFields session, const uint8_t* data, size_t size) except -1
    cdef int run_lookups(self) except -1
    cdef int drop_lookaheads(self) noexcept
    cdef int expire_view(self) noexcept
    cdef Permissions permissions_of(self, object user)
    cdef size_t answer_front(self, SessionFields session, const uint8_t* data, size_t size, Output* out) except? 0
    cdef list remaining_requests(self, session, const uint8_t* data, size_t size, size_t* took)
    cdef size_t answer_compiled(self, SessionFields session, const uint8_t* data, size_t size, Output* out) except? 0
    cdef int count(self, int64_t elapsed_ns) noexcept
