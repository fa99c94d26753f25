"""The layout of `forwarded_commands`' class, and of its rows."""

from libc.stdint cimport int32_t, uint8_t, uint64_t

from resp_server.native.wire cimport SPECS_MAX, Specs, Word

cdef enum:
    WORDS_MAX = 1024  # of a request; the general path forwards a longer one in chunks
    WORD_BYTES_MAX = 16384
    RANGES_MAX = 2  # see `resp_server.command.keys`

# The part of a command in a transaction.
cdef enum Part:
    QUEUED = 0
    BEGIN = 1
    RUN = 2
    WATCHED = 3

cdef struct KeyRange:  # see `resp_server.command.keys.KeyRange`
    int32_t first, last, step, counted_from

cdef struct Plan:  # how the forwarder may forward a command
    bint reads_states  # it may be forwarded to state servers
    bint is_for_upstream  # it may be forwarded to the upstream
    bint is_read  # it does not write at the upstream, so it may be sent twice
    bint publishes  # it may send messages
    uint8_t part
    uint8_t join  # by state servers
    uint8_t listing  # how a request about all keys is joined; NOT_JOINED: it is about no keys, or about some
    int queued_arity  # of requests that the upstream would queue, as Redis says it; 0: the general path queues them
    int ranges
    KeyRange keys[RANGES_MAX]

cdef class ForwardedCommands:
    cdef Specs specs
    cdef Plan plans[SPECS_MAX]  # by the same indexes
    cdef uint64_t calls[SPECS_MAX]
    cdef list names, stats
    cdef dict indexes  # by name
    cdef int caching  # the index of CLIENT CACHING
    cdef int add(self, name, least, most, keys, special, command_stats, is_container=*) except -1
    cdef int add_reads_of_states(self, commands) except -1
    cdef int set_upstream_commands(self, commands) except -1
    cdef bint has_keys(self, const Plan* plan, keys) except -1
    cdef Py_ssize_t find_keys(self, const Plan* plan, const Word* words, size_t count, Word* keys) noexcept
    cdef int collect(self) except -1
