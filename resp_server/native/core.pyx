# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The fast path for frequent reads: it parses requests in a buffer, reads records in LMDB's pages and writes replies.

`Core.answer_all` parses requests at the front of a buffer, looks all their keys up together (see
`state_backend.native.lookup`), and writes the replies in order. It stops before the first request that it does not
answer: an unknown command, a wrong number of arguments, a wrong type, a value stored in pieces, a key of another node,
a command or key that the user may not use. The general path answers this request. So the core makes no error reply but one,
and its replies are those of the general path, byte for byte.

The core uses no socket. It reads and changes the session's transaction and watched keys. It holds the GIL, and copies values into its output.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memset

from resp_server.native.arguments cimport integer, is_word
from resp_server.native.bits cimport reply_of_bit_fields, reply_of_bits
from resp_server.native.element_replies cimport (
    reply_of_list, reply_of_random, reply_of_scan, reply_of_search, reply_of_sort, reply_of_string_range, reply_of_whole
)
from resp_server.native.jobs cimport JobPages, Jobs
from resp_server.native.key_replies cimport reply_of_fact, reply_of_stored_bytes, reply_to_keys
from resp_server.native.listings cimport reply_of_keys, reply_of_slot
from resp_server.native.lookup_batch cimport (
    REPLY_BYTES_MAX, REQUESTS_MAX, REQUEST_WORDS_MAX, Counts, LookupBatch, Request, count_lookup, has_room, read_key
)
from resp_server.native.member_replies cimport reply_of_distance, reply_of_members
from resp_server.native.records cimport ANSWERED, GENERAL, LARGE_MAP, LIVE, SMALL_SORTED_SET, Record, size_of
from resp_server.native.rows cimport *
from resp_server.native.permissions cimport Permissions
from resp_server.native.set_replies cimport reply_of_sets
from resp_server.native.sorted_set_replies cimport reply_of_area, reply_of_range
from resp_server.native.wire cimport (
    NUMBER_LINE_BYTES, Output, Word, command_at, parse_request, put, put_bulk, put_line, bytes_of, bytes_list_of, write_line
)
from state_backend.native.little_endian cimport u64
from state_backend.native.lookup cimport EXPIRY_AT, slot_of

from resp_server.protocol.request_parser import ARGUMENT_OVERHEAD_BYTES
from state_backend.model.errors import StoreError

cdef int64_t WORD_OVERHEAD_BYTES = ARGUMENT_OVERHEAD_BYTES

# The watched keys of a client, and the bytes of a record, that make a mark; the general path makes others.
cdef enum:
    WATCHED_MAX = 128
    WATCHED_BYTES_MAX = 65536

ctypedef int (*PartReply)(LookupBatch, Request*, int, const Record*) except -2

# How a part of a key's record is replied with. is_of_small: of small records only. counts_key: the look-up of the key is counted
# before; other functions count what they look up.
cdef struct Part:
    PartReply reply
    bint is_of_small
    bint counts_key

# By what a command reads (`rows`). Without a function, it does not read one key's record.
cdef Part parts[READS]

# The keys of the view were not counted yet.
cdef enum:
    NOT_COUNTED = -2


cdef class Core:
    """Answers requests from a view of jobs. Used by one event loop's thread.

    count_keys: returns the number of all keys that a user sees in a view, or None. epochs_now: returns the function that makes a read
    point, and the words of the view's epochs. report: logs and counts an exception.
    """

    def __cinit__(self, watch_point, count_keys, epochs_now, read_clock, report):
        self.jobs = Jobs(watch_point)
        self.batch, self.last_command = LookupBatch(self.jobs), -1
        self.count_keys, self.epochs_now, self.read_clock, self.report = count_keys, epochs_now, read_clock, report

    cdef size_t answer_all(self, const uint8_t* start, size_t size, int protocol, Permissions permissions) except? 0:
        """Answer requests from the view of the last `use_view`; return their size."""
        cdef LookupBatch batch = self.batch
        cdef const uint8_t* at = start
        cdef const uint8_t* end = start + size
        cdef const uint8_t* stopped
        cdef const uint8_t* begun
        cdef Lookahead* lookahead
        cdef uint32_t first, end_request
        batch.limit, self.queued, self.read_ms = batch.out.used + OUTPUT_BYTES_MAX, 0, 0
        memset(self.answered, 0, COMMANDS * sizeof(uint64_t))
        batch.is_resp3, self.is_incomplete, self.is_full = protocol >= 3, False, False
        while at < end and batch.out.used < batch.limit:
            if self.session.transaction is not None:
                begun, at = at, self.answer_within_transaction(at, end, permissions)
                if at == begun or self.session.transaction is not None:
                    break
                continue
            if self.has_lookahead(at):
                lookahead = &self.lookaheads[self.next_lookahead]
                self.next_lookahead += 1
                first, end_request, stopped, self.is_incomplete, self.is_out_of_room = (
                    lookahead.first_request, lookahead.end_request, lookahead.stopped, lookahead.is_incomplete,
                    lookahead.is_out_of_room,
                )
            else:
                self.drop_lookaheads()
                stopped = self.cut_requests(at, end, permissions)
                if stopped == at:
                    break
                batch.find_all()
                first, end_request = 0, <uint32_t>batch.request_count
            self.has_more = self.is_incomplete or self.is_out_of_room or stopped == end
            at = self.reply_all(first, end_request, stopped)
            if self.is_cut:
                continue
            if at != stopped:
                self.is_incomplete = False
                break
            if self.is_incomplete:
                break
        self.is_full = self.is_full or (start < at < end and batch.out.used >= batch.limit)
        return at - start

    cdef int use_view(self, view, bint is_node) except -1:
        """Answer from a view. is_node: the server is a node of a cluster."""
        if self.jobs.use_view(view, is_node):
            self.drop_lookaheads()  # they read older epochs
            self.key_count = NOT_COUNTED
        return 0

    cdef int drop_lookaheads(self) noexcept:
        self.lookahead_count = self.next_lookahead = 0
        return self.batch.clear()

    cdef bint add_lookahead(self, const uint8_t* start, size_t size, Permissions permissions) except -1:
        """Parse a buffer's requests, and add their look-ups to those of other buffers.

        False if not all of its complete requests were added: there was no room, or the core does not answer one.
        """
        cdef Lookahead* lookahead = &self.lookaheads[self.lookahead_count]
        cdef const uint8_t* end = start + size
        self.is_incomplete = False
        lookahead.start, lookahead.first_request = start, <uint32_t>self.batch.request_count
        lookahead.stopped = self.cut_requests(start, end, permissions)
        if lookahead.stopped > start:
            lookahead.end_request, lookahead.is_incomplete = <uint32_t>self.batch.request_count, self.is_incomplete
            lookahead.is_out_of_room = self.is_out_of_room
            self.lookahead_count += 1
        return self.lookahead_count < REQUESTS_MAX and (self.is_incomplete or lookahead.stopped == end)

    cdef bint has_lookahead(self, const uint8_t* start) noexcept:
        """Return whether the next lookahead begins at `start`."""
        while self.next_lookahead < self.lookahead_count and self.lookaheads[self.next_lookahead].start < start:
            self.next_lookahead += 1  # its connection was closed before it was answered
        return self.next_lookahead < self.lookahead_count and self.lookaheads[self.next_lookahead].start == start

    cdef const uint8_t* cut_requests(self, const uint8_t* at, const uint8_t* end, Permissions permissions) except NULL:
        """Parse requests and add their look-ups; return where parsing stopped.

        It stops before a request that the core does not answer, that is incomplete, or for which there is no room.
        """
        cdef LookupBatch batch = self.batch
        cdef size_t count = 0
        cdef Py_ssize_t took
        cdef Word* words
        cdef Request* request
        cdef int64_t view_ms = self.jobs.now
        cdef bint reads_fresh = batch.reads_fresh
        self.jobs.now_ms = self.read_ms or view_ms
        while True:
            words = batch.words + batch.word_count
            self.is_out_of_room = not has_room(batch)
            if self.is_out_of_room:
                break
            took = parse_request(at, end, words, REQUEST_WORDS_MAX, WORD_BYTES_MAX, &count)
            if took <= 0:
                self.is_incomplete = took == 0 and at < end
                break
            if not self.add_request(at, words, count, permissions):
                break
            request = &batch.requests[batch.request_count - 1]
            if rows[request.command].reply == READ_POINT:  # the next requests are read at its clock reading
                integer(&batch.words[request.first_word + request.words - 1], &self.jobs.now_ms)
            elif request.command == MULTI:  # a transaction reads committed epochs
                batch.reads_fresh = False
            elif request.command in (EXEC, DISCARD):
                self.jobs.now_ms, batch.reads_fresh = view_ms, reads_fresh
            at += took
        batch.reads_fresh = reads_fresh
        return at

    cdef bint add_request(self, const uint8_t* at, const Word* words, size_t count, Permissions permissions) except -1:
        """Add a request and its look-ups; False if the core does not answer it. words: those after `word_count`."""
        cdef LookupBatch batch = self.batch
        cdef Request* request = &batch.requests[batch.request_count]
        if not self.admit(request, words, count, permissions):
            return False
        request.at, request.members = at, 0
        request.first_lookup = <uint32_t>batch.lookup_count
        if not batch.prepare_lookups(request):
            return False
        batch.word_count += count
        batch.request_count += 1
        return True

    cdef bint admit(self, Request* request, const Word* words, size_t count, Permissions permissions) except -1:
        """Set a request's command and arguments; False if the core does not answer it. words: those after `word_count`."""
        cdef int64_t key_count = 0
        cdef int command = command_at(&specs, words, count)
        cdef size_t names
        if command < 0:
            return False
        names = 2 if rows[command].is_two_words else 1
        if not specs.rows[command].least <= count - names <= specs.rows[command].most:
            return False
        request.keys = 1
        if rows[command].reads in (KEYS, COMBINED):
            if rows[command].has_key_count:
                if not integer(&words[names], &key_count) or not 0 < key_count < <int64_t>(count - names):
                    return False
                names += 1
            request.keys = <uint32_t>(key_count if rows[command].has_key_count else <int64_t>(count - names))
        elif rows[command].reads <= TRANSACTION:
            request.keys = 0
        request.command, request.words = command, <uint32_t>(count - names)
        request.first_word = <uint32_t>(self.batch.word_count + names)
        if permissions is not None:
            if rows[command].reads == ALL_KEYS or rows[command].reply == READ_POINT:  # about the keys that the user may read
                return False
            if not permissions.allow(command, words + names, request.keys):
                return False
        return self.batch.key_filter is None or self.is_admitted(command, words + names, request.keys)

    cdef bint may_answer(self, const Word* words, size_t count) noexcept:
        """Return whether a request may be answered if there is a filter of keys, by its command and its first key."""
        cdef int command = command_at(&specs, words, count)
        cdef size_t first_key
        if command < 0:
            return False
        first_key = 1 + rows[command].is_two_words + rows[command].has_key_count
        return self.is_admitted(command, words + first_key, rows[command].reads > TRANSACTION and count > first_key)

    cdef bint is_admitted(self, int command, const Word* keys, size_t count) noexcept:
        """Return whether a request may be answered if there is a filter of keys: it passes, or is about this process alone."""
        cdef LookupBatch batch = self.batch
        if count:
            return batch.key_filter.admits(keys, count)
        if rows[command].reads == NOTHING:
            if rows[command].reply == CLOCK:
                return batch.key_filter.has_own_clock()
            return rows[command].reply in (TEXTS, CLIENT_ID, CACHING, DATABASE)
        return rows[command].reads == TRANSACTION or (rows[command].reads == ALL_KEYS and batch.key_filter.admits_all_keys())

    cdef list cut_words(self, const uint8_t** start, const uint8_t* end, bint is_all):
        """Parse requests for the general path, up to the first one that the core may answer; move `start` past them.

        is_all: parse those, too, up to the end of a transaction. It is set after the core left a request with a known
        command unanswered.
        """
        cdef LookupBatch batch = self.batch
        cdef list requests = []
        cdef const uint8_t* at = start[0]
        cdef size_t count = 0
        cdef Py_ssize_t took
        cdef int command
        end = min(end, at + GENERAL_BYTES_MAX)
        while len(requests) < REQUESTS_MAX:
            took = parse_request(at, end, batch.words, REQUEST_WORDS_MAX, WORD_BYTES_MAX, &count)
            if took <= 0:
                break
            command = command_at(&specs, batch.words, count)
            if not is_all and command >= 0:
                if requests:
                    break
                is_all = True
            requests.append(bytes_list_of(batch.words, count))
            at += took
            if command == EXEC or command == DISCARD:
                break
        start[0] = at
        return requests

    cdef int begin_tracking(self, tracking_state) except -1:
        """Answer the requests of a client with this tracking; None: the client tracks no keys."""
        self.keys_read, self.is_caching_set, self.is_optin, self.is_optout = None, False, False, False
        if tracking_state is not None:
            self.is_caching_set = tracking_state.is_caching_set
            self.is_optin, self.is_optout = tracking_state.is_optin, tracking_state.is_optout
            if tracking_state.is_on and not tracking_state.is_bcast:
                self.keys_read = []
        return 0

    cdef bint records_keys(self, bint is_transaction) noexcept:
        """Return whether the keys of a request are recorded. CLIENT CACHING does not limit them in a transaction."""
        if self.keys_read is None:
            return False
        return is_transaction or not (self.is_optin or self.is_optout) or self.is_caching_set == self.is_optin

    cdef int record_keys(self, const Request* request) except -1:
        cdef uint32_t i
        for i in range(request.first_word, request.first_word + request.keys):
            self.keys_read.append(bytes_of(&self.batch.words[i]))
        return 0

    cdef const uint8_t* reply_all(self, uint32_t first, uint32_t end_request, const uint8_t* stopped) except NULL:
        """Write the replies to requests `first` up to `end_request`; return where the buffer's next request begins.

        Sets `is_cut` if it is within a transaction whose end is not parsed yet.
        """
        cdef LookupBatch batch = self.batch
        cdef uint32_t i = first, last
        cdef size_t before
        cdef Request* request
        cdef Counts counts
        cdef int outcome
        cdef const uint8_t* end = stopped
        self.is_cut = False
        self.jobs.now_ms = self.read_ms or self.jobs.now
        while i < end_request:
            request = &batch.requests[i]
            before, counts, last = batch.out.used, batch.counts, i
            if rows[request.command].reads == TRANSACTION:
                last = <uint32_t>self.exec_of(i, end_request)
                if self.is_cut and i > first and self.is_out_of_room:  # there is room for it next
                    end = request.at
                    break
                if self.is_cut:
                    self.begin_transaction()
                    end = batch.requests[i + 1].at if i + 1 < end_request else stopped
                    break
                outcome = self.reply_to_transaction(i, last) if last > i else GENERAL
            else:
                outcome = self.reply_to(request)
            if outcome == GENERAL or batch.out.used - before > REPLY_BYTES_MAX:
                batch.out.used, batch.counts = before, counts
                end = request.at
                break
            if batch.requests[last].command == DISCARD:  # what was queued is not counted as called
                self.count_requests(i, i + 1, True)
                self.count_requests(last, last + 1, True)
                self.queued += last - i - 1
            else:
                self.count_requests(i, last + 1, last > i)
            if rows[request.command].reply not in (CACHING, CLIENT_ID):  # CLIENT CACHING is about the next other command
                self.is_caching_set = False
            i = last + 1
            if batch.out.used > batch.limit and i < end_request:
                end = batch.requests[i].at
                self.is_full = True
                break
        return end

    cdef int count_requests(self, uint32_t first, uint32_t end_request, bint is_transaction) except -1:
        """Count answered requests, and record the keys that a client may cache."""
        cdef LookupBatch batch = self.batch
        cdef uint32_t i
        cdef bint is_recorded = self.records_keys(is_transaction)
        for i in range(first, end_request):
            self.answered[batch.requests[i].command] += 1
            self.last_command = batch.requests[i].command
            if is_recorded and rows[batch.requests[i].command].reply != WATCHED:
                self.record_keys(&batch.requests[i])
        if is_transaction and self.session.watched:
            self.session.watched = {}
        if is_transaction and self.read_ms:
            self.session.read_point, self.read_ms, self.jobs.now_ms = None, 0, self.jobs.now
        return 0

    cdef int64_t exec_of(self, uint32_t first, uint32_t end_request) except -1:
        """Return the index of the EXEC or DISCARD that ends the transaction of a MULTI; `first` if the general path answers it.

        Sets `is_cut` if the buffer, or the room for requests, ends before it.
        """
        cdef LookupBatch batch = self.batch
        cdef uint32_t i
        if batch.requests[first].command != MULTI or not self.may_run_transaction():
            return first
        for i in range(first + 1, end_request):
            if rows[batch.requests[i].command].reads == TRANSACTION:
                return first if batch.requests[i].command == MULTI else i
        self.is_cut = self.has_more
        return first

    cdef bint may_run_transaction(self) except -1:
        """Return whether the core may run the client's transactions; those of a client that watches keys it may not."""
        if self.session.read_point is not None and not self.read_ms:
            return False
        if self.session.watched and (self.read_ms or not self.is_unchanged()):
            return False
        return self.batch.key_filter is None or self.batch.key_filter.admits_transaction_of(self.session)

    cdef int watch_keys(self, Request* request) except -2:
        """Record marks of keys for the client, but for those that it watches already."""
        cdef LookupBatch batch = self.batch
        cdef const Word* word
        cdef Record record
        cdef size_t i, index
        cdef int found
        cdef dict marks = {}, watched = self.session.watched
        if self.read_ms or len(watched) + request.keys > WATCHED_MAX:
            return GENERAL
        for i in range(request.keys):
            word, index = &batch.words[request.first_word + i], request.first_lookup + i
            found = read_key(batch, index, word, &record)
            if found == GENERAL or batch.job_of[index] < 0:
                return GENERAL
            name = 0, bytes_of(word)
            if name in watched:
                continue
            lineage, epoch = self.jobs.watch_point_of(<JobPages>self.jobs.pages[batch.job_of[index]])
            if found != LIVE:
                marks[name] = lineage, epoch, "", True
                continue
            if batch.lookups[index].size > WATCHED_BYTES_MAX or (record.form == LARGE_MAP and u64(record.payload + 24)):
                return GENERAL  # or fields expire
            digest = PyBytes_FromStringAndSize(<const char*>batch.lookups[index].record, batch.lookups[index].size)
            marks[name] = lineage, epoch, digest, record.form <= SMALL_SORTED_SET
        watched.update(marks)
        return put(batch.out, b"+OK\r\n", 5) + ANSWERED

    cdef bint is_unchanged(self) except -1:
        """Return whether none of the client's watched keys has changed; False: the general path has to find out."""
        cdef JobPages job
        cdef bytes record
        cdef Word word
        cdef int index
        cdef int64_t expire_at_ms
        for (db, key), mark in (<dict>self.session.watched).items():
            if db or type(mark) is not tuple:  # the general path made it
                return False
            word.at, word.size = <const uint8_t*>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)
            index = self.jobs.job_at(&word)
            if index < 0 or not self.jobs.refresh_job(index):
                return False
            job = <JobPages>self.jobs.pages[index]
            if self.jobs.owned_slots != NULL and not self.jobs.owned_slots[slot_of(word.at, word.size)]:
                return False
            if self.jobs.watch_point_of(job) != (mark[0], mark[1]):
                return False
            if mark[2]:
                record = mark[2]
                expire_at_ms = <int64_t>u64(<const uint8_t*>PyBytes_AS_STRING(record) + EXPIRY_AT)
                if 0 < expire_at_ms <= job.now_ms:
                    return False
        return True

    cdef int begin_transaction(self) except -1:
        """Reply to a MULTI whose EXEC has not arrived: the commands before it are queued, as on the general path."""
        self.session.begin_transaction()
        put(self.batch.out, b"+OK\r\n", 5)
        self.last_command = MULTI
        self.answered[MULTI] += 1
        return 0

    cdef const uint8_t* answer_within_transaction(self, const uint8_t* at, const uint8_t* end, Permissions permissions) except NULL:
        """Queue the requests of a client in a transaction, and run them at EXEC; return where the next request begins."""
        cdef LookupBatch batch = self.batch
        cdef size_t count = 0, i
        cdef Py_ssize_t took
        cdef Request request
        cdef int64_t size = 0, added, requests_left, bytes_left
        cdef list requests = []
        cdef bint needs_state = False, may_queue
        cdef int command = MULTI
        transaction = self.session.transaction
        may_queue = not transaction.is_aborted and transaction.db is None  # no SELECT is queued
        requests_left, bytes_left = transaction.room
        self.drop_lookaheads()
        self.is_incomplete = False
        while at < end and batch.out.used < batch.limit and may_queue:
            took = parse_request(at, end, batch.words, REQUEST_WORDS_MAX, WORD_BYTES_MAX, &count)
            self.is_incomplete = took == 0
            if took <= 0 or not self.admit(&request, batch.words, count, permissions):
                break
            command = request.command
            if rows[command].reads == TRANSACTION or rows[command].reply == DATABASE or not is_queueable(&rows[command]):
                break
            if self.jobs.is_node and not self.may_queue_slots(&request):
                break
            added = 0
            for i in range(count):
                added += batch.words[i].size + WORD_OVERHEAD_BYTES
            if <int64_t>len(requests) >= requests_left or size + added > bytes_left:
                break
            if self.jobs.is_node:
                self.note_slots(&request, transaction.slots)
            requests.append(bytes_list_of(batch.words, count))
            size += added
            needs_state |= self.needs_state[request.command]
            put(batch.out, b"+QUEUED\r\n", 9)
            self.last_command = request.command
            at += took
        if requests:
            transaction.extend(requests, size, needs_state=needs_state)
            self.queued += len(requests)
        try:
            if command == DISCARD and self.may_run_transaction():
                return at + took + self.discard()
            return at + took if command == EXEC and self.run_queued(transaction.requests, permissions) else at
        except Exception as error:  # the general path runs what is queued
            self.report(error)
            self.drop_lookaheads()
            return at

    cdef int discard(self) except -1:
        """Reply to a DISCARD, and end the transaction."""
        self.session.end_transaction()
        put(self.batch.out, b"+OK\r\n", 5)
        self.answered[DISCARD] += 1
        self.last_command, self.is_caching_set = DISCARD, False
        return 0

    cdef bint may_queue_slots(self, const Request* request) noexcept:
        """Return whether a request's keys are in slots of this node, and in one of them; else the general path queues it."""
        cdef uint32_t i
        cdef uint16_t slot, first_slot = 0
        for i in range(request.first_word, request.first_word + request.keys):
            slot = slot_of(self.batch.words[i].at, self.batch.words[i].size)
            if i == request.first_word:
                first_slot = slot
            if slot != first_slot and not rows[request.command].has_any_slots:
                return False
            if self.jobs.owned_slots != NULL and not self.jobs.owned_slots[slot]:
                return False
        return True

    cdef int note_slots(self, const Request* request, dict slots) except -1:
        """Add the slots of a queued request's keys to those of its transaction."""
        cdef uint32_t i
        for i in range(request.first_word, request.first_word + request.keys):
            slots[slot_of(self.batch.words[i].at, self.batch.words[i].size)] = None
        return 0

    cdef bint run_queued(self, list queued, Permissions permissions) except -1:
        """Reply to an EXEC, and end the transaction; False if the general path has to run the queued requests."""
        cdef LookupBatch batch = self.batch
        cdef size_t before = batch.out.used
        cdef Counts counts = batch.counts
        cdef bint is_run = self.may_run_transaction() and self.add_queued(queued, permissions)
        if is_run:
            batch.find_all()
            is_run = self.reply_to_queued(0, <uint32_t>batch.request_count) == ANSWERED
        if is_run and batch.out.used - before <= REPLY_BYTES_MAX:
            self.count_requests(0, <uint32_t>batch.request_count, True)
            self.queued -= len(queued)
            self.answered[EXEC] += 1
            self.last_command = EXEC
            self.is_caching_set = False
            self.session.end_transaction()
        else:
            batch.out.used, batch.counts, is_run = before, counts, False
        self.drop_lookaheads()
        return is_run

    cdef bint add_queued(self, list queued, Permissions permissions) except -1:
        """Add queued requests and their look-ups; False if there is no room, or the core does not answer one of them."""
        cdef LookupBatch batch = self.batch
        cdef Word* words
        cdef size_t count
        cdef bytes argument
        batch.reads_fresh = False
        for request in queued:
            words, count = batch.words + batch.word_count, 0
            if not has_room(batch) or len(request) > REQUEST_WORDS_MAX:
                return False
            for argument in request:
                if PyBytes_GET_SIZE(argument) > WORD_BYTES_MAX:
                    return False
                words[count].at = <const uint8_t*>PyBytes_AS_STRING(argument)
                words[count].size = PyBytes_GET_SIZE(argument)
                count += 1
            if not self.add_request(NULL, words, count, permissions):
                return False
        return True

    cdef int reply_to_transaction(self, uint32_t multi, uint32_t exec_) except -2:
        """Reply to MULTI, to the commands that it queues, and to EXEC, which runs them in the view of all requests, or to DISCARD."""
        cdef LookupBatch batch = self.batch
        cdef uint32_t i
        put(batch.out, b"+OK\r\n", 5)
        for i in range(multi + 1, exec_):
            put(batch.out, b"+QUEUED\r\n", 9)
            if batch.requests[exec_].command == DISCARD and not is_queueable(&rows[batch.requests[i].command]):
                return GENERAL
        if batch.requests[exec_].command == DISCARD:
            return put(batch.out, b"+OK\r\n", 5) + ANSWERED
        return self.reply_to_queued(multi + 1, exec_)

    cdef int reply_to_queued(self, uint32_t first, uint32_t end_request) except -2:
        """Reply to EXEC: run the queued commands in the view of all requests."""
        cdef LookupBatch batch = self.batch
        cdef uint32_t i, last
        if self.jobs.is_node and self.session.epoch_feed is None and end_request > first:  # those of a proxy may differ
            last = batch.requests[end_request - 1].first_lookup + batch.requests[end_request - 1].keys
            for i in range(batch.requests[first].first_lookup + 1, last):
                if batch.lookups[i].high >> 48 != batch.lookups[i - 1].high >> 48:  # their slots
                    return GENERAL
        put_line(batch.out, c"*", end_request - first)
        for i in range(first, end_request):
            if not is_queueable(&rows[batch.requests[i].command]) or self.reply_to(&batch.requests[i]) == GENERAL:
                return GENERAL
        return ANSWERED

    cdef int reply_to(self, Request* request) except -2:
        """Reply to a request, with the part of its key's record that its command reads."""
        cdef LookupBatch batch = self.batch
        cdef const Row* row = &rows[request.command]
        cdef const Part* part = &parts[row.reads]
        cdef Record record
        cdef int found
        if part.reply == NULL:
            return self.reply_without_record(request, row)
        found = read_key(batch, request.first_lookup, &batch.words[request.first_word], &record)
        if found == GENERAL:
            return GENERAL
        if row.kind != ANY_KIND and found == LIVE and record.form != SMALL_FORMS[row.kind]:
            if part.is_of_small or record.form != LARGE_FORMS[row.kind]:
                return GENERAL
        if part.counts_key:
            count_lookup(batch, found == LIVE)
        return part.reply(batch, request, found, &record)

    cdef int reply_without_record(self, Request* request, const Row* row) except -2:
        """Reply about several keys, about all keys, or about the connection or the server."""
        if row.reads == KEYS:
            return self.watch_keys(request) if row.reply == WATCHED else reply_to_keys(self.batch, request)
        if row.reads == COMBINED:
            return reply_of_sets(self.batch, request)
        if row.reads != ALL_KEYS:
            return self.reply_without_key(request, row.reply)
        if row.reply == KEY_COUNT:
            return self.reply_of_key_count()
        return reply_of_slot(self.batch, request) if row.reply in (LENGTHS, FIELDS) else reply_of_keys(self.batch, request)

    cdef int reply_without_key(self, Request* request, int reply) except -2:
        """Reply about the connection or the server."""
        cdef Output* out = self.batch.out
        cdef Word* word = &self.batch.words[request.first_word]
        if reply == TEXTS:
            return (put_bulk(out, word.at, word.size) if request.words else put(out, b"+PONG\r\n", 7)) + ANSWERED
        if reply == CLIENT_ID:
            return put_line(out, c":", self.session.id) + ANSWERED
        if reply == CACHING:  # the general path replies with the errors
            if not (self.is_optin and is_word(word, b"yes", 3) or self.is_optout and is_word(word, b"no", 2)):
                return GENERAL
            self.is_caching_set = True
            return put(out, b"+OK\r\n", 5) + ANSWERED
        if reply == READ_POINT:
            return self.set_read_point(word, request.words - 1)
        if reply == DATABASE:  # the core answers clients of database 0
            return put(out, b"+OK\r\n", 5) + ANSWERED if word.size == 1 and word.at[0] == c"0" else GENERAL
        return self.reply_of_clock() if reply == CLOCK else GENERAL

    cdef int reply_of_key_count(self) except -2:
        """Reply with the number of all keys that the client's user sees."""
        if self.key_count == NOT_COUNTED:
            try:
                count = self.count_keys(self.session.user, self.jobs.view)
            except StoreError:
                count = None
            self.key_count = -1 if count is None else count
        return put_line(self.batch.out, c":", self.key_count) + ANSWERED if self.key_count >= 0 else GENERAL

    cdef int reply_of_clock(self) except -2:
        """Reply with the time in seconds, and microseconds."""
        cdef Output* out = self.batch.out
        cdef char line[NUMBER_LINE_BYTES]
        cdef int64_t clock_ms = self.read_clock()
        put(out, b"*2\r\n", 4)
        put_bulk(out, line + 1, write_line(line, c"$", clock_ms // 1000) - 3)
        return put_bulk(out, line + 1, write_line(line, c"$", clock_ms % 1000 * 1000) - 3) + ANSWERED

    cdef int set_read_point(self, const Word* words, size_t count) except -2:
        """Reply to a STATE AT with the view's own epochs: `count` words, and a clock reading."""
        cdef size_t i
        cdef int64_t clock_ms = 0
        cdef bytes expected
        if self.session.epoch_feed is None or not integer(&words[count], &clock_ms) or clock_ms <= 0:
            return GENERAL
        if self.epochs_renewal != self.jobs.renewal:
            self.read_point_at, self.epoch_words = self.epochs_now()
            self.epochs_renewal = self.jobs.renewal
        if <size_t>len(self.epoch_words) != count:
            return GENERAL
        for i in range(count):
            expected = self.epoch_words[i]
            if <size_t>PyBytes_GET_SIZE(expected) != words[i].size:
                return GENERAL
            if memcmp(PyBytes_AS_STRING(expected), words[i].at, words[i].size) != 0:
                return GENERAL
        self.session.read_point = self.read_point_at(clock_ms)
        self.read_ms = self.jobs.now_ms = clock_ms
        return put(self.batch.out, b"+OK\r\n", 5) + ANSWERED


cdef int reply_of_size(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with the number of elements, or of a value's bytes."""
    cdef int64_t size = size_of(record)
    return put_line(batch.out, c":", size) + ANSWERED if size >= 0 else GENERAL


cdef int _fill_parts() except -1:
    parts[FACT] = Part(reply_of_fact, False, True)
    parts[ROW_SIZE] = Part(reply_of_stored_bytes, False, False)
    parts[SIZE] = Part(reply_of_size, False, True)
    parts[WHOLE] = Part(reply_of_whole, False, True)
    parts[BYTES] = Part(reply_of_string_range, True, True)
    parts[BITS] = Part(reply_of_bits, True, True)
    parts[BIT_FIELDS] = Part(reply_of_bit_fields, True, True)
    parts[MEMBERS] = Part(reply_of_members, False, False)
    parts[TWO_MEMBERS] = Part(reply_of_distance, False, True)
    parts[INDEXES] = Part(reply_of_list, False, True)
    parts[RANKS] = parts[SCORES] = parts[TEXT_RANGE] = Part(reply_of_range, False, True)
    parts[RANDOM] = Part(reply_of_random, True, True)
    parts[SEARCH] = Part(reply_of_search, True, True)
    parts[SORTED] = Part(reply_of_sort, False, True)
    parts[SCAN] = Part(reply_of_scan, False, True)
    parts[AREA] = Part(reply_of_area, False, True)
    return 0


_fill_parts()
