# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Commands whose functions the core calls, without a turn of the event loop for each (see `pipeline.keyless_commands`)."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.time cimport monotonic_ns
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memchr, memcmp

from resp_server.native.call_counts cimport count_calls, move_counts
from resp_server.native.client_fields cimport SessionFields
from resp_server.native.core cimport OUTPUT_BYTES_MAX, WORD_BYTES_MAX, Core
from resp_server.native.encoding cimport put_reply, put_text
from resp_server.native.lookup_batch cimport REQUEST_WORDS_MAX
from resp_server.native.wire cimport Output, Word, parse_request, insert, put, bytes_of, bytes_list_of

from resp_server.protocol.errors import GenericError
from resp_server.protocol.replies import Pending, Sliced, encode

# Functions that are called for one client before others have their turn (guess: below a turn's time, as it ends after a call).
cdef int64_t CALLS_NS_MAX = 1_000_000
# Where a shorter request is slow, sessions are observed, and the core calls nothing (see `context.ONE_BY_ONE_US`).
cdef int64_t ONE_BY_ONE_NS = 1_000_000

cdef enum:
    NOT_ASKED = -1


cdef inline bint is_text(const Word* word, bytes text) noexcept:
    return word.size == <size_t>PyBytes_GET_SIZE(text) and memcmp(word.at, PyBytes_AS_STRING(text), word.size) == 0


cdef int push_before(server, SessionFields session, Output* out, size_t before, bytes pushes=b"") except -1:
    """Write pushes, and a client's pending ones, in front of the replies that were written from `before` on."""
    tracking_state, epoch_feed = session.tracking_state, session.epoch_feed
    if tracking_state is not None and tracking_state.has_pending:
        if tracking_state.redirect:
            server.clients.push_invalidations(tracking_state)
        else:
            pushes += server.take_invalidations(session)
    if epoch_feed is not None and server.change_counter != epoch_feed.change_counter:
        pushes = server.pending_pushes(epoch_feed) + pushes
    if pushes:
        insert(out, before, PyBytes_AS_STRING(pushes), PyBytes_GET_SIZE(pushes))
    return 0


cdef class KeylessCommand:
    """A command whose function the core calls, and its counts since the last `FastPath.collect`.

    name_words, least, most: the number of words in its name, and in its requests. takes_words: its function takes the words
    after the name, each through its function of `converters`, or as it is. keeps_caching: see `command.policy`.
    is_for_subscribers: a client with subscriptions may call it.
    has_slot: in a cluster, the pipeline checks first whether this node has the slot of its channel.
    is_local, is_connected: see `pipeline.keyless_commands.LocalRequests`; None: this process answers each request alone; it asks `is_local` for each.
    """

    def __init__(
        self, command, command_stats, size_t name_words, size_t least, size_t most, bint takes_words, converters,
        bint keeps_caching, bint is_for_subscribers, bint has_slot, is_local, is_connected
    ):
        self.command, self.command_stats, self.function = command, command_stats, command.handler.body
        self.name, self.name_words, self.least, self.most = command.name, name_words, least, most
        self.converters, self.is_local, self.is_connected = converters, is_local, is_connected
        self.takes_words, self.keeps_caching, self.is_for_subscribers = takes_words, keeps_caching, is_for_subscribers
        self.has_slot = has_slot


cdef class CommandCalls:
    """Calls commands' functions for the clients of a server.

    command_caller: the `pipeline.keyless_commands.CommandCaller` of the commands; None: none is called. incomplete: the reply of the
    command that was called last, if it is to be completed later, or None. needs_turn: then the connection continues in a turn, even if no input is left.
    """

    def __cinit__(self, server, Core core):
        self.server, self.core, self.counted = server, core, []

    cdef size_t call_all(self, SessionFields session, const uint8_t* start, size_t size, Output* out) except? 0:
        """Call the functions of the commands at the front of a buffer; append the replies to `out`; return the requests' size.

        Sets the core's `is_incomplete` and `is_full`, and `needs_turn`.
        """
        cdef Core core = self.core
        cdef const uint8_t* at = start
        cdef const uint8_t* end = start + size
        cdef size_t count = 0, before = out.used
        cdef Py_ssize_t took
        cdef int64_t now_ns = 0, ends_ns = 0
        cdef KeylessCommand command
        if self.command_caller is None or not session.can_call:
            return 0
        core.drop_lookaheads()  # a function may change anything
        context, self.connected = None, NOT_ASKED
        try:
            while at < end and session.can_call and self.incomplete is None:
                took = parse_request(at, end, core.batch.words, REQUEST_WORDS_MAX, WORD_BYTES_MAX, &count)
                core.is_incomplete = took == 0 and at > start
                command = self.command_of(count) if took > 0 else None
                if command is None or not command.least <= count <= command.most:
                    break
                if command.has_slot and self.server.cluster is not None:
                    break
                if not session.can_be_forwarded and not self.admits_call(session, command, count):
                    break
                if command.is_local is not None and not self.is_local(session, command, count):
                    break
                if context is None:
                    context, now_ns = self.command_caller.begin(session), monotonic_ns()
                    if context is None:
                        break
                    session.pushed, ends_ns = [], now_ns + CALLS_NS_MAX
                now_ns = self.call(session, context, command, at, took, count, out, now_ns)
                at += took
                session.calls += 1
                core.is_full = now_ns >= ends_ns or out.used - before > OUTPUT_BYTES_MAX
                if core.is_full:
                    core.is_full = at < end
                    break
        finally:
            session.pushed = None
        self.needs_turn = context is not None and (not session.can_call or self.incomplete is not None)
        return at - start

    cdef KeylessCommand command_of(self, size_t count):
        """Return the command of the request that was cut; None: no function is called for it."""
        cdef const Word* words = self.core.batch.words
        if self.last_caller is self.command_caller and count >= self.last_words and is_text(&words[0], self.last_name):
            if self.last_words == 1 or is_text(&words[1], self.last_subcommand):
                return self.last_command
        name, subcommand = bytes_of(&words[0]), None
        found = self.command_caller.commands[name]
        if found is not None and type(found) is not KeylessCommand:
            if count > 1:
                subcommand = bytes_of(&words[1])
            found = found[subcommand]
            if subcommand is None:
                return found
        if found is not None:
            self.last_caller, self.last_command, self.last_words = self.command_caller, found, 1 if subcommand is None else 2
            self.last_name, self.last_subcommand = name, subcommand
        return found

    cdef bint admits_call(self, SessionFields session, KeylessCommand command, size_t count) except -1:
        """Return whether a client with subscriptions, or a restricted user, may send the request that was cut."""
        if session.subscriptions is not None and not command.is_for_subscribers:
            return False
        return session.user.is_unrestricted or session.user.denial(command.command, self.cut_request(count)) is None

    cdef bint is_local(self, SessionFields session, KeylessCommand command, size_t count) except -1:
        """Return whether this process alone answers the request that was cut. No called function connects a client elsewhere."""
        if command.is_connected is not None:
            if self.connected == NOT_ASKED:
                self.connected = command.is_connected(session)
            if not self.connected:
                return True
        return session.user.is_unrestricted and command.is_local(session, self.cut_request(count))

    cdef list cut_request(self, size_t count):
        """Return the words of the request that was cut."""
        return bytes_list_of(self.core.batch.words, count)

    cdef object argument(self, KeylessCommand command, size_t i):
        """Return an argument of the request that was cut, as the command's function takes it."""
        text = bytes_of(&self.core.batch.words[command.name_words + i])
        convert = None if command.converters is None else command.converters[i]
        return text if convert is None else convert(text)

    cdef object run(self, context, KeylessCommand command, size_t count):
        """Call the function of the command that was cut."""
        cdef size_t i
        if not command.takes_words:
            return command.command.execute(context, [self.cut_request(count)])[0]
        count -= command.name_words
        if count == 0:  # to call a function with few arguments needs no tuple
            return command.function(context)
        if count == 1:
            return command.function(context, self.argument(command, 0))
        if count == 2:
            return command.function(context, self.argument(command, 0), self.argument(command, 1))
        return command.function(context, *[self.argument(command, i) for i in range(count)])

    cdef int64_t call(
        self, SessionFields session, context, KeylessCommand command, const uint8_t* request, size_t size, size_t count,
        Output* out, int64_t started_ns
    ) except -1:
        """Call a command's function, and write its reply; return the time then. request: its bytes, which were cut."""
        cdef size_t before = out.used
        cdef int64_t now_ns, elapsed_ns
        session.last_command = command.name
        reply = b""
        try:
            reply = self.run(context, command, count)
            if not put_reply(out, reply, session.protocol >= 3):
                out.used = before
                if isinstance(reply, (Sliced, Pending)):
                    self.incomplete = reply
                else:
                    put_text(out, encode(reply, session.protocol))
        except Exception as error:
            command.command_stats.failed += 1
            out.used = before
            self.put_error(out, error)
        now_ns = monotonic_ns()
        elapsed_ns = now_ns - started_ns
        if session.can_call and self.incomplete is None and (elapsed_ns < ONE_BY_ONE_NS or elapsed_ns < self.server.observation.slow_ns):
            if not command.counts.calls:
                self.counted.append(command)
            count_calls(&command.counts, 1, elapsed_ns)
        else:
            parse_request(request, request + size, self.core.batch.words, REQUEST_WORDS_MAX, WORD_BYTES_MAX, &count)
            command.command_stats.calls += 1
            self.command_caller.record(context, command.command, command.command_stats, self.cut_request(count), reply, elapsed_ns)
            if session.replies_suppressed:
                out.used = before
        if session.tracking_state is not None and not command.keeps_caching:
            session.tracking_state.is_caching_set = False
        if session.pushed:
            pushes, session.pushed = b"".join(session.pushed), []
            push_before(self.server, session, out, before, pushes)
        elif session.tracking_state is not None or session.epoch_feed is not None:
            push_before(self.server, session, out, before)
        return now_ns

    cdef int put_error(self, Output* out, error) except -1:
        """Write the reply to an exception, and count it."""
        cdef const char* text
        cdef Py_ssize_t size
        if type(error) is GenericError and error.text.isascii():
            text = PyUnicode_AsUTF8AndSize(error.text, &size)
            if memchr(text, c"\r", size) == NULL and memchr(text, c"\n", size) == NULL:
                put(out, b"-ERR ", 5)
                put(out, text, size)
                self.errors += 1
                return put(out, b"\r\n", 2)
        return put_text(out, self.command_caller.error_reply(error))

    cdef int collect(self) except -1:
        """Add the counts to the server's statistics."""
        cdef KeylessCommand command
        for command in self.counted:
            move_counts(&command.counts, command.command_stats)
        self.counted.clear()
        if self.errors:
            self.server.stats.count_error(GenericError.code, self.errors)
            self.errors = 0
        return 0
