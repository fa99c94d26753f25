"""The layout of `permissions`' classes."""

from libc.stdint cimport uint64_t

from resp_server.native.rows cimport COMMANDS_MAX
from resp_server.native.wire cimport Word

cdef enum:
    SELECTORS_MAX = 8

cdef size_t PATTERN_BYTES_MAX  # of a longer one, the general path matches keys

cdef class Permissions:
    cdef int selectors
    cdef uint64_t commands[SELECTORS_MAX][COMMANDS_MAX >> 6]  # of each selector, one bit per command
    cdef list patterns  # of each selector; None: all keys
    cdef bint allow(self, int command, const Word* keys, size_t count)
    cdef bint allow_keys(self, list patterns, const Word* keys, size_t count)
cdef class KeyFilter:
    cdef bint admits(self, const Word* keys, size_t count) noexcept
    cdef bint admits_all_keys(self) noexcept
    cdef bint admits_transaction_of(self, session) except -1
    cdef bint has_own_clock(self) noexcept
