# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Which requests the core may answer: by a user's rules, and about which keys, where another process has others."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t

from resp_server.native.glob cimport GLOB_STEPS_MAX, glob
from resp_server.native.wire cimport Word

from resp_server.native.rows import NAMES
from resp_server.protocol.glob import PATTERN_BYTES_MAX as PATTERN_BYTES

PATTERN_BYTES_MAX = PATTERN_BYTES


cdef class Permissions:
    """A user's permissions for the core's commands: per selector, allowed commands and key patterns."""

    def __init__(self, selectors):
        """selectors: for each, the names of allowed commands, and the patterns of readable keys; None: all keys."""
        cdef int i = 0, command
        self.patterns = []
        for allowed, patterns in selectors[:SELECTORS_MAX]:
            for name in allowed:
                if name in NAMES:
                    command = NAMES.index(name)
                    self.commands[i][command >> 6] |= <uint64_t>1 << (command & 63)
            self.patterns.append(None if patterns is None else list(patterns))
            i += 1
        self.selectors = i

    cdef bint allow(self, int command, const Word* keys, size_t count):
        cdef int i
        for i in range(self.selectors):
            if self.commands[i][command >> 6] >> (command & 63) & 1 and self.allow_keys(self.patterns[i], keys, count):
                return True
        return False

    cdef bint allow_keys(self, list patterns, const Word* keys, size_t count):
        cdef size_t i
        cdef bytes pattern
        cdef bint found
        cdef uint64_t steps = 0
        if patterns is None:
            return True
        for i in range(count):
            found = False
            for pattern in patterns:
                found = glob(
                    <const uint8_t*>PyBytes_AS_STRING(pattern), PyBytes_GET_SIZE(pattern), keys[i].at, keys[i].size, &steps
                )
                if found or steps > GLOB_STEPS_MAX:
                    break
            if not found:  # or it takes too long: the general path uses a regular expression
                return False
        return True


def glob_matches(bytes pattern, bytes text):
    """Return whether a glob matches a text; for tests."""
    cdef uint64_t steps = 0
    return bool(
        glob(
            <const uint8_t*>PyBytes_AS_STRING(pattern), PyBytes_GET_SIZE(pattern),
            <const uint8_t*>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text), &steps,
        )
    )


cdef class KeyFilter:
    """The keys about which a core may answer. It answers only about stored ones, as another process has the others."""

    cdef bint admits(self, const Word* keys, size_t count) noexcept:
        """Return whether the core may answer a request with these keys, at least one."""
        return False

    cdef bint admits_all_keys(self) noexcept:
        """Return whether the core may answer requests about all keys."""
        return False

    cdef bint admits_transaction_of(self, session) except -1:
        """Return whether the core may answer a client's transactions."""
        return False

    cdef bint has_own_clock(self) noexcept:
        """Return whether this process says what time it is."""
        return False
