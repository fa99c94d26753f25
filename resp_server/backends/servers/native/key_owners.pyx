# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The keys that a forwarder sends to states, to the upstream, or to neither, by the patterns of a database."""

import re

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp

from resp_server.native.arguments cimport integer
from resp_server.native.glob cimport GLOB_STEPS_MAX, glob
from resp_server.native.raw_replies cimport bulk_bytes, put_number
from resp_server.native.wire cimport Output, Word, number_line, put, put_line

from resp_server.backends.routing.rules import Owner

# The beginning of a Redis pattern, up to the first character with a meaning.
LITERAL = re.compile(rb"[^*?\[\]\\^]*")


cdef class KeyOwnerTable:
    """The patterns of one database, in order; the first one that a key matches decides. Without a match, it is the upstream's."""

    def __init__(self, patterns):
        cdef size_t i
        cdef KeyPattern* each
        self.texts = [keys.pattern for keys in patterns]
        self.patterns = <KeyPattern*>malloc((len(self.texts) + 1) * sizeof(KeyPattern))
        if self.patterns == NULL:
            raise MemoryError
        for i, (text, owner, is_cached) in enumerate(patterns):
            each = &self.patterns[i]
            each.text, each.size = <const uint8_t*>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text)
            each.backend = GENERAL_PATH
            if owner is Owner.STATE:
                each.backend = STATES
            elif owner is Owner.UPSTREAM:
                each.backend = CACHED if is_cached else UPSTREAM_BACKEND
            each.literal = LITERAL.match(text).end()
            each.is_literal_and_star = text[each.literal:] == b"*"
        self.count = len(self.texts)
        self.has_two_owners = all([self.patterns[i].backend != GENERAL_PATH for i in range(self.count)])

    def __dealloc__(self):
        free(self.patterns)

    cdef int backend_of(self, const Word* key) noexcept:
        """Return the backend that answers requests for a key."""
        cdef size_t i
        cdef const KeyPattern* each
        cdef uint64_t steps = 0
        for i in range(self.count):
            each = &self.patterns[i]
            # Most patterns are decided by their first bytes. `glob` takes some ten instructions for each byte.
            if key.size < each.literal or memcmp(key.at, each.text, each.literal) != 0:
                continue
            if each.is_literal_and_star or glob(each.text, each.size, key.at, key.size, &steps):
                return each.backend
            if steps > GLOB_STEPS_MAX:
                return GENERAL_PATH
        return UPSTREAM_BACKEND

    cdef int backend_of_all(self, const Word* keys, size_t count) noexcept:
        """Return the backend that answers a request with these keys; GENERAL_PATH if they are of different backends."""
        cdef size_t i
        cdef int backend = self.backend_of(keys)
        for i in range(1, count):
            if self.backend_of(&keys[i]) != backend:
                return GENERAL_PATH
        return backend

    cdef bint put_owned(self, Output* out, const uint8_t* at, size_t size, int backend, size_t* count) except -1:
        """Write those keys of an array that are a backend's, and add their number; False: the general path does it."""
        cdef const uint8_t* end = at + size
        cdef size_t keys = 0, i
        cdef Py_ssize_t took = number_line(at + 1, end, &keys) if size and at[0] == c"*" else 0
        cdef int owner
        cdef Word key
        if took <= 0:
            return False
        at += 1 + took
        for i in range(keys):
            took = bulk_bytes(at, end, &key)
            owner = GENERAL_PATH if took <= 0 else self.owner_of(&key)
            if owner == GENERAL_PATH:
                return False
            if owner == backend:
                put(out, at, took)
                count[0] += 1
            at += took
        return at == end

    cdef int owner_of(self, const Word* key) noexcept:
        """Return the backend that lists a key."""
        cdef int backend = self.backend_of(key)
        return UPSTREAM_BACKEND if backend == CACHED else backend

    cdef bint put_page(self, Output* out, const uint8_t* at, size_t size, int backend) except -1:
        """Write a backend's reply to SCAN with its own keys only, and with the cursor that clients send next.

        See `routing.scan_cursor`. False: the general path does it.
        """
        cdef const uint8_t* end = at + size
        cdef Py_ssize_t took = bulk_bytes(at + 4, end, &self.word) if size > 4 and memcmp(at, b"*2\r\n", 4) == 0 else 0
        cdef int64_t cursor = 0
        cdef size_t count = 0
        cdef Output keys
        if took <= 0 or not integer(&self.word, &cursor) or not 0 <= cursor < <int64_t>1 << 62:
            return False
        at += 4 + took
        keys.data, keys.used, keys.size = NULL, 0, 0
        try:
            if not self.put_owned(&keys, at, end - at, backend, &count):
                return False
            put(out, b"*2\r\n", 4)
            put_number(out, (cursor << 1 | (backend == STATES)) if cursor else backend == UPSTREAM_BACKEND)
            put_line(out, c"*", count)
            put(out, keys.data, keys.used)
            return True
        finally:
            free(keys.data)


cdef class DatabaseOwners:
    """The patterns of all databases. Before `set`, all keys are the upstream's."""

    def __cinit__(self):
        self.set({}, ())

    cdef int set(self, by_database, others) except -1:
        """Set the patterns, as rows of `KeyOwner`, of some databases, and of all others."""
        cdef dict made = {database: KeyOwnerTable(patterns) for database, patterns in by_database.items()}
        self.others = KeyOwnerTable(others)
        self.has_cached = any(each.is_cached for patterns in [*by_database.values(), others] for each in patterns)
        self.first = made.get(0, self.others)
        self.by_database = made
        return 0

    cdef KeyOwnerTable of(self, database):
        """Return the patterns of a database."""
        return self.by_database.get(database, self.others) if database else self.first
