# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Reads of states' keys that a proxy answers from the state server's stores, if these are on its machine.

The compiled core answers reads of the stores' jobs' keys at the front of a client's input; the forwarder gets the rest.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.time cimport monotonic_ns
from libc.stdint cimport int64_t, uint8_t

from resp_server.native.client_fields cimport SessionFields
from resp_server.native.core cimport Core
from resp_server.native.fast_path cimport FastPath
from resp_server.native.permissions cimport KeyFilter
from resp_server.native.wire cimport Output, Word, parse_request
from resp_server.backends.servers.native.forwarded_commands cimport WORD_BYTES_MAX, WORDS_MAX
from resp_server.backends.servers.native.key_owners cimport STATES, DatabaseOwners
from resp_server.backends.servers.native.upstream_access cimport UpstreamAccess

cdef int64_t NEVER_NS = <int64_t>1 << 62


cdef class StateKeys(KeyFilter):
    """The keys of database 0 whose forwardable requests states answer, by the forwarder's patterns; none without stores."""

    def __init__(self, DatabaseOwners patterns, UpstreamAccess upstream):
        self.patterns, self.upstream = patterns, upstream

    cdef bint admits_all_keys(self) noexcept:
        return self.admits_all

    cdef bint admits(self, const Word* keys, size_t count) noexcept:
        cdef size_t i
        if not self.has_stores:
            return False
        for i in range(count):
            if self.patterns.first.backend_of(&keys[i]) != STATES:
                return False
        return True

    cdef bint admits_transaction_of(self, session) except -1:
        # A client with a connection of its own may watch keys there.
        upstream = self.upstream.connect
        if not self.has_stores:
            return False
        if upstream is None:
            return True
        connection = upstream(session.id, session.protocol, session.db)
        return connection is not None and not connection.has_watched

    cdef bint has_own_clock(self) noexcept:
        return self.upstream.connect is None


cdef class StoredReads(FastPath):
    """Answers reads of states' keys from the state server's stores, with the core. The forwarder gets all else.

    It also answers requests about the connection alone, and does only that where the proxy reads no stores.
    """

    cdef int use(self, StateKeys keys, stores) except -1:
        """Read these keys of these stores (`server_stores.ServerStores`); None: there are none."""
        keys.has_stores = stores is not None
        self.stores = stores
        self.core.batch.key_filter = keys
        return 0

    cdef bint may_answer(self, SessionFields session, const uint8_t* data, size_t size) except -1:
        """Return whether to try to answer. Before `begin`, the first request is looked at: to begin takes longer."""
        cdef size_t count = 0
        cdef Word* words = self.words
        if session.can_queue:
            return self.stores is not None and session.user.is_unrestricted
        if not (session.can_be_forwarded and session.can_use_checked_fast_path):  # an unrestricted user, in database 0
            return False
        if self.is_fresh and self.stores is not None:
            return True
        if parse_request(data, data + size, words, WORDS_MAX, WORD_BYTES_MAX, &count) <= 0:
            return False
        return self.core.may_answer(words, count)

    cdef bint look_ahead(self, SessionFields session, const uint8_t* data, size_t size) except -1:
        return self.may_answer(session, data, size) and FastPath.look_ahead(self, session, data, size)

    cdef size_t answer_compiled(self, SessionFields session, const uint8_t* data, size_t size, Output* out) except? 0:
        if not self.core.has_lookahead(data) and not self.may_answer(session, data, size):
            self.core.is_incomplete = self.core.is_full = False
            return 0
        return FastPath.answer_compiled(self, session, data, size, out)

    cdef int expire_view(self) noexcept:
        self.is_fresh = False
        return 0

    cdef bint begin(self) except -1:
        """Move to the newest epochs; False while the stores must not be read.

        The state server answers other processes, too: requests may follow its replies to them. So the stores are asked
        for newer epochs each time. The view is renewed if there are any, once a millisecond for its clock, and after
        input that is not a client's: it may be a server's reply.
        """
        cdef int64_t now_ms = monotonic_ns() // 1000000
        self.last_user = self.last_permissions = None
        if self.is_fresh and now_ms == self.renewed_ms and (not self.may_read or self.core.jobs.is_newest()):
            return self.may_read
        self.is_fresh, self.may_read, self.renewed_ms, self.slow_ns = True, False, now_ms, NEVER_NS
        try:
            view = self.server.view if self.stores is None else self.stores.current_view()
            if view is not None:
                self.core.use_view(view, False)
                self.may_read = True
        except Exception as error:
            self.server.report(error)
        return self.may_read

    cdef bytes reply_about_states(self, SessionFields session, const void* request, size_t size):
        """Return the reply of the stores to a request about all keys; None: the general path answers it."""
        cdef Core core = self.core
        cdef bint is_full = core.is_full, is_incomplete = core.is_incomplete
        if not session.can_use_checked_fast_path or not self.begin():
            return None
        core.drop_lookaheads()
        core.begin_tracking(None)
        self.output.used = 0
        core.batch.out, core.batch.monotonic_ms, core.session = &self.output, self.renewed_ms, session
        (<StateKeys>core.batch.key_filter).admits_all = True
        try:
            if core.answer_all(<const uint8_t*>request, size, session.protocol, None) != size:
                return None
            return PyBytes_FromStringAndSize(self.output.data, self.output.used)
        finally:
            (<StateKeys>core.batch.key_filter).admits_all = False
            core.is_full, core.is_incomplete = is_full, is_incomplete

    def collect(self):
        self.core.batch.counts.hits = self.core.batch.counts.misses = 0  # the servers' hits are counted, and the forwarder does not know its own
        FastPath.collect(self)
