# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The fast path of a server's clients: the core with the stages around it, and the functions that it calls."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.time cimport monotonic_ns
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc

from resp_server.native.call_counts cimport count_calls, move_counts
from resp_server.native.keyless_commands cimport CommandCalls, push_before
from resp_server.native.client_fields cimport SessionFields, record_reads
from resp_server.native.core cimport Core
from resp_server.native.lookup_batch cimport Counts
from resp_server.native.rows cimport COMMANDS, FREQ
from resp_server.native.permissions cimport Permissions
from resp_server.native.wire cimport Output

from resp_server.native.rows import NAMES


cdef class FastPath:
    """The core with the stages around it, for one server: access control, pushes before the replies, statistics.

    make_permissions: makes the `Permissions` of a user. record_slow: records slow requests. count_keys, watch_point: see `Core` and `Jobs`.
    (A proxy's needs the last two only, to read a server's stores.) What the core does not answer, `keyless` calls, if the command is one of its caller's.
    """

    def __cinit__(self, server, make_permissions=None, record_slow=None, count_keys=None, watch_point=None):
        self.server, self.stats, self.make_permissions, self.record_slow = server, server.stats, make_permissions, record_slow
        self.core = Core(watch_point, count_keys, server.epochs_now, server.clock, server.report)
        self.keyless = CommandCalls(server, self.core)
        self.output.data, self.output.size = <char*>malloc(16384), 16384
        if self.output.data == NULL:
            raise MemoryError
        self.names = [name.decode() for name in NAMES]
        self.command_stats_of = [server.stats.command_stats(name) for name in self.names]
        for command, name in enumerate(NAMES):
            self.core.needs_state[command] = "loading" not in server.table.get(name).facts.flags
        self.stats.collectors.append(self.collect)

    def __dealloc__(self):
        free(self.output.data)

    def take_incomplete(self):
        """Return the incomplete reply of the command that was called last, or None; it is returned once."""
        incomplete, self.keyless.incomplete = self.keyless.incomplete, None
        return incomplete

    @property
    def command_caller(self):
        """The `pipeline.keyless_commands.CommandCaller` of the commands that are called; None: none is."""
        return self.keyless.command_caller

    @command_caller.setter
    def command_caller(self, caller):
        self.keyless.command_caller = caller

    @property
    def needs_turn(self):
        """Return whether the connection continues in a turn, even if no input is left."""
        return self.keyless.needs_turn

    @property
    def is_full(self):
        """Return whether the last buffer has more requests for the core, deferred because the replies are long."""
        return self.core.is_full

    @property
    def is_incomplete(self):
        """Return whether the last buffer ended with an incomplete request."""
        return self.core.is_incomplete

    def answer(self, session, bytes data):
        """Answer requests at the front of a buffer, and parse those after them for the general path.

        Return the replies, the words of the parsed requests, and the remaining bytes. The caller has renewed the
        server's view.
        """
        cdef size_t took, size = PyBytes_GET_SIZE(data)
        cdef const uint8_t* start = <const uint8_t*>PyBytes_AS_STRING(data)
        cdef list requests
        self.output.used = 0
        took = self.answer_front(session, start, size, &self.output)
        requests = self.remaining_requests(session, start, size, &took)
        replies = PyBytes_FromStringAndSize(self.output.data, self.output.used)
        return replies, requests, data[took:] if took else data

    cdef list remaining_requests(self, session, const uint8_t* data, size_t size, size_t* took):
        """Parse the requests behind those that `answer_front` answered, for the general path.

        took: the bytes that `answer_front` answered; the bytes of the parsed requests are added.
        """
        cdef const uint8_t* at = data + took[0]
        if took[0] == size or self.core.is_full or self.core.is_incomplete or self.keyless.needs_turn or not session.is_authenticated:
            return []  # before authentication, the parser limits the length of a request
        requests = self.core.cut_words(&at, data + size, not self.was_tried)
        took[0] = at - data
        return requests

    cdef bint look_ahead(self, SessionFields session, const uint8_t* data, size_t size) except -1:
        """Prepare a buffer's look-ups, to be made together with those of other clients.

        False if no later buffer should be added: there is no room, or `answer_front` or the general path has to answer
        this one alone. `run_lookups` makes the look-ups, then `answer_front` answers the buffers in the same order. If
        anything else runs in between, `drop_lookaheads` has to be called.
        """
        if not session.can_use_checked_fast_path:
            return False
        if session.epoch_feed is not None:
            return False
        try:
            # Nothing changes while lookaheads are added, so what they have in common is read once.
            if not self.core.lookahead_count and not self.begin():
                return False
            if session.user is not self.last_user:
                self.last_user, self.last_permissions = session.user, self.permissions_of(session.user)
            self.core.batch.reads_fresh = not session.reads_committed
            return self.core.add_lookahead(data, size, self.last_permissions)
        except Exception as error:
            self.server.report(error)
            self.core.drop_lookaheads()
            return False

    cdef bint begin(self) except -1:
        """Read what all requests depend on; False while the server is loading."""
        server = self.server
        self.last_user = self.last_permissions = None
        self.slow_ns = server.observation.slow_ns
        if server.is_loading:
            return False
        self.core.use_view(server.view, server.cluster is not None)
        return True

    cdef int run_lookups(self) except -1:
        """Make the prepared look-ups."""
        self.core.batch.monotonic_ms = monotonic_ns() // 1_000_000
        try:
            self.core.batch.find_all()
        except Exception as error:
            self.server.report(error)
            self.core.drop_lookaheads()
        return 0

    cdef int drop_lookaheads(self) noexcept:
        """Drop the look-ups that were made ahead."""
        return self.core.drop_lookaheads()

    cdef int expire_view(self) noexcept:
        """Renew the view before the next answers. The poller renews a server's view, so this does nothing."""
        return 0

    cdef Permissions permissions_of(self, object user):
        """Return a user's permissions; None: no restrictions."""
        if user.is_unrestricted:
            return None
        if user.compiled is None:
            user.compiled = self.make_permissions(user)
        return user.compiled

    cdef size_t answer_front(self, SessionFields session, const uint8_t* data, size_t size, Output* out) except? 0:
        """Answer requests at the front of a buffer, and append the replies to `out`; return the requests' size."""
        cdef Core core = self.core
        cdef size_t took = 0, called = 1
        self.keyless.needs_turn, self.keyless.incomplete = False, None
        while called and not self.keyless.needs_turn:
            took += self.answer_compiled(session, data + took, size - took, out)
            if took == size or core.is_incomplete or core.is_full:
                break
            called = self.keyless.call_all(session, data + took, size - took, out)
            took += called
            if took == size or core.is_incomplete or core.is_full:
                break
        return took

    cdef size_t answer_compiled(self, SessionFields session, const uint8_t* data, size_t size, Output* out) except? 0:
        """Answer requests at the front of a buffer with the core, as `answer_front` does."""
        cdef Permissions permissions
        cdef size_t before = out.used, took
        cdef Counts counts = self.core.batch.counts
        cdef int64_t started_ns, elapsed_ns
        cdef Core core = self.core
        server = self.server
        core.is_incomplete = core.is_full = self.was_tried = False
        if not core.has_lookahead(data):
            if not (session.can_use_checked_fast_path or session.can_queue) or not self.begin():
                return 0
        permissions = self.permissions_of(session.user)
        core.begin_tracking(session.tracking_state)
        self.was_tried = True
        started_ns = monotonic_ns()
        core.batch.out, core.batch.monotonic_ms, core.session = out, started_ns // 1_000_000, session
        core.batch.reads_fresh = not session.reads_committed
        try:
            took = core.answer_all(data, size, session.protocol, permissions)
        except Exception as error:
            # `report` logs and counts the exception, and the general path answers the requests. More input or output
            # room would not help the core.
            server.report(error)
            core.batch.counts = counts
            core.is_incomplete = core.is_full = False
            core.drop_lookaheads()
            took = 0
        if not took:
            out.used = before
            return 0
        elapsed_ns = monotonic_ns() - started_ns
        session.calls += self.count(elapsed_ns) + core.queued
        session.active_ms = core.jobs.now
        session.last_command = self.names[core.last_command]
        if elapsed_ns >= self.slow_ns:
            self.record_slow(session, PyBytes_FromStringAndSize(<const char*>data, took), elapsed_ns)
        if session.tracking_state is not None:
            session.tracking_state.is_caching_set = core.is_caching_set
        push_before(server, session, out, before)
        if core.keys_read:  # recording may evict keys, whose invalidations are sent after the replies
            record_reads(server.tracking, session.tracking_state, core.keys_read)
        return took

    cdef int count(self, int64_t elapsed_ns) noexcept:
        """Count the calls that the core just answered, and return their number; each gets the same share of the time."""
        cdef int command
        cdef uint64_t total = 0, mean
        cdef Core core = self.core
        for command in range(COMMANDS):
            total += core.answered[command]
        if not total:
            return 0
        mean = <uint64_t>elapsed_ns // total
        for command in range(COMMANDS):
            if core.answered[command]:
                count_calls(&self.counts[command], core.answered[command], mean)
        return total

    def collect(self):
        """Add the counts to the server's statistics."""
        cdef int command
        cdef Counts* counts = &self.core.batch.counts
        for command in range(COMMANDS):
            move_counts(&self.counts[command], self.command_stats_of[command])
        self.stats.hits += counts.hits
        self.stats.misses += counts.misses
        if counts.errors:
            self.stats.count_error("ERR", counts.errors)
            self.command_stats_of[FREQ].failed += counts.errors
        counts[0] = Counts(0, 0, 0)
        self.keyless.collect()
