"""The layout of `key_owners`' classes."""

from libc.stdint cimport uint8_t, uint32_t

from resp_server.native.wire cimport Output, Word

# Where the requests for a key are answered. GENERAL_PATH: the forwarder does not forward them.
cdef enum Backend:
    GENERAL_PATH = 0
    STATES = 1
    UPSTREAM_BACKEND = 2
    CACHED = 3  # the upstream, whose replies the proxy caches

cdef struct KeyPattern:  # a Redis pattern of keys
    const uint8_t* text
    size_t size
    size_t literal  # the bytes at its beginning that match only themselves
    bint is_literal_and_star  # and after them only a `*`
    int backend

cdef class KeyOwnerTable:
    cdef list texts
    cdef KeyPattern* patterns
    cdef size_t count
    cdef Word word
    cdef uint32_t drawn, visible  # random keys of the upstream, and those among them that are its own
    cdef bint has_two_owners  # each key is either the states' or the upstream's, under the same name
    cdef int backend_of(self, const Word* key) noexcept
    cdef int backend_of_all(self, const Word* keys, size_t count) noexcept
    cdef bint put_owned(self, Output* out, const uint8_t* at, size_t size, int backend, size_t* count) except -1
    cdef int owner_of(self, const Word* key) noexcept
    cdef bint put_page(self, Output* out, const uint8_t* at, size_t size, int backend) except -1

cdef class DatabaseOwners:
    cdef dict by_database
    cdef KeyOwnerTable first, others  # of database 0, and of databases without patterns of their own
    cdef bint has_cached  # some keys of the upstream are cached
    cdef int set(self, by_database, others) except -1
    cdef KeyOwnerTable of(self, database)
