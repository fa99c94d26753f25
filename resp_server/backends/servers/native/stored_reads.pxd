"""The layout of `stored_reads`' classes."""

from libc.stdint cimport int64_t, uint8_t

from resp_server.native.client_fields cimport SessionFields
from resp_server.native.fast_path cimport FastPath
from resp_server.native.permissions cimport KeyFilter
from resp_server.native.wire cimport Word
from resp_server.backends.servers.native.forwarded_commands cimport WORDS_MAX
from resp_server.backends.servers.native.key_owners cimport DatabaseOwners
from resp_server.backends.servers.native.upstream_access cimport UpstreamAccess

cdef class StateKeys(KeyFilter):
    cdef DatabaseOwners patterns
    cdef UpstreamAccess upstream
    cdef bint has_stores, admits_all

cdef class StoredReads(FastPath):
    cdef object stores
    cdef bint is_fresh, may_read  # no server's input came since the view was renewed; its stores may be read
    cdef int64_t renewed_ms
    cdef Word words[WORDS_MAX]  # of the first request of a client's input
    cdef int use(self, StateKeys keys, stores) except -1
    cdef bint may_answer(self, SessionFields session, const uint8_t* data, size_t size) except -1
    cdef bytes reply_about_states(self, SessionFields session, const void* request, size_t size)
