# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""A proxy's hop: sends plain reads from a client's buffer to the servers of their slots, and the replies back in order.

A client's input is cut into requests, and each is appended unchanged to a `PipelineBatch`: the requests over one
connection in one round of the event loop. MGET becomes a STATE MGET for each server. Replies are found in a server's
data and copied undecoded; when all replies of a `ClientBatch` have arrived, they are sent to the client.

The hop stops at any other request, and leaves it to the general path. Errors, pushes, replies in parts and lost
connections are left to the general path, too, which sees a batch as any requests in flight (`InFlightRequest`).
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memset

from resp_server.native.core cimport InputInterceptor
from resp_server.native.wire cimport Output, Spec, Word, command_of, cut, number_line, put, put_line, reserve, set_spec
from state_backend.native.lookup cimport slot_of

from resp_server.session.epoch_feed import NO_EPOCHS
from resp_server.protocol.request_parser import RequestParser
from resp_server.proxy.requests import REQUESTS_MAX, PING, SENDS_MAX, UpstreamRequest, send_mget_by_slots, malformed_reply
from resp_server.proxy.raw_replies import JOINED_BYTES_MAX, ReplyChunks, RawReplySender
from resp_server.proxy.reply_splitter import FrameError
from resp_server.proxy.epoch_floors import behind, has_reached, together

cdef enum:
    WORDS_MAX = 1024  # of a request; a longer one is answered in portions
    WORD_BYTES_MAX = 16384
    QUESTIONS_MAX = 256  # of one client at once, which bounds what is held of replies
    ITEMS_MAX = 2048
    COMMANDS_MAX = 128
    UPSTREAMS_MAX = 256
    SLOTS = 16384
    LINE_BYTES_MAX = 65536
    PARTIAL_BYTES_MAX = 32768  # of what is not all here: what is looked at again with what comes next (guess)
    DEPTH_MAX = 8

cdef struct Item:  # one value that a client waits for
    size_t at  # in what is held
    size_t size
    uint16_t slot
    uint8_t upstream
    uint8_t epochs

cdef struct Question:  # one request
    const uint8_t* at
    size_t size
    const uint8_t* keys  # of an MGET: where they begin
    uint32_t first
    uint32_t items
    uint8_t command
    bint is_array
    bint is_refused  # its error is the first item

cdef struct Entry:  # what one reply is awaited for
    void* client_batch
    size_t start  # of the request in the run's text
    size_t end
    uint32_t question
    uint16_t slot
    uint8_t upstream
    bint is_done


cdef Py_ssize_t line_of(const uint8_t* start, const uint8_t* end) noexcept nogil:
    """Return the bytes of a line; 0: it is incomplete; -1: it is too long."""
    cdef const uint8_t* at = start
    while at < end:
        at = <const uint8_t*>memchr(at, 13, end - at)
        if at == NULL or at + 1 == end:
            break
        if at[1] == 10:
            return at + 2 - start if at - start <= LINE_BYTES_MAX else -1
        at += 1
    return 0 if end - start <= LINE_BYTES_MAX else -1


cdef Py_ssize_t reply_of(const uint8_t* start, const uint8_t* end, int depth) noexcept nogil:
    """Return the bytes of a reply; 0: it is incomplete; -1: it is left to the general path.

    Known here are bulk strings, nils, numbers and simple strings, and arrays of these.
    """
    cdef const uint8_t* at = start
    cdef size_t size = 0, i
    cdef Py_ssize_t took
    if at == end:
        return 0
    if at[0] == 36:
        if end - at >= 2 and at[1] == 45:
            if end - at < 5:
                return 0 if memcmp(at, b"$-1\r\n", end - at) == 0 else -1
            return 5 if memcmp(at, b"$-1\r\n", 5) == 0 else -1
        took = number_line(at + 1, end, &size)
        if took <= 0:
            return took
        at += 1 + took
        if <size_t>(end - at) < size + 2:
            return 0
        return at + size + 2 - start if at[size] == 13 and at[size + 1] == 10 else -1
    if at[0] == 42 and depth < DEPTH_MAX:
        took = number_line(at + 1, end, &size)
        if took <= 0:
            return took
        at += 1 + took
        for i in range(size):
            took = reply_of(at, end, depth + 1)
            if took <= 0:
                return took
            at += took
        return at - start
    if at[0] == 43:
        return line_of(at, end)
    if at[0] == 58:
        at += 1
        if at < end and at[0] == 45:
            at += 1
        took = number_line(at, end, &size)
        return took if took <= 0 else at + took - start
    return -1


cdef class ClientBatch:
    """The requests that one client sent at once, and their replies so far."""

    cdef object sink
    cdef object data  # as it was asked
    cdef int protocol
    cdef Output held
    cdef Item* items
    cdef Question* questions
    cdef size_t item_count, question_count, missing
    cdef list epoch_sets  # what items are from, by their numbers
    cdef object last_epochs
    cdef uint8_t last_number
    cdef bint is_over
    cdef dict longs  # replies of more than a megabyte, by the numbers of their questions
    cdef size_t long_bytes

    def __cinit__(self):
        self.epoch_sets = []
        self.longs = {}

    def __dealloc__(self):
        free(self.held.data)
        free(self.items)
        free(self.questions)

    cdef int number_of(self, epochs) except -1:
        """Return the number of a reply's epochs."""
        cdef int i
        if epochs is not self.last_epochs:
            for i in range(len(self.epoch_sets)):
                if self.epoch_sets[i] is epochs:
                    break
            else:
                i = len(self.epoch_sets)
                if i == 255:  # more than a round has
                    self.epoch_sets[254] = together(self.epoch_sets[254], epochs)
                    return 254
                self.epoch_sets.append(epochs)
            self.last_epochs, self.last_number = epochs, i
        return self.last_number

    cdef int take(self, const Entry* entry, const char* data, size_t size, epochs) except -1:
        """Take a reply: of a request, or of some of an MGET's keys."""
        cdef Question* question = &self.questions[entry.question]
        cdef Item* item = &self.items[question.first]
        cdef int number = self.number_of(epochs)
        cdef size_t at = self.held.used, i
        put(&self.held, data, size)
        if not question.is_array:
            item.at, item.size, item.epochs = at, size, number
            self.missing -= 1
            return 0
        for i in range(question.items):
            if item[i].upstream == entry.upstream:
                item[i].epochs = number
                self.missing -= 1
        if size and data[0] == 45:
            self.refuse(question, at, size)
        elif not self.take_items(question, entry.upstream, at, at + size):
            reply = malformed_reply(FrameError("what came is not one value for each key"))
            at = self.held.used
            put(&self.held, PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply))
            self.refuse(question, at, PyBytes_GET_SIZE(reply))
        return 0

    cdef int take_long(self, const Entry* entry, reply, epochs) except -1:
        """Take a reply that is not copied, of a request that has one item."""
        self.items[self.questions[entry.question].first].epochs = self.number_of(epochs)
        self.longs[entry.question] = reply
        self.long_bytes += len(reply)
        self.missing -= 1
        return 0

    cdef void refuse(self, Question* question, size_t at, size_t size) noexcept:
        if not question.is_refused:
            question.is_refused = True
            self.items[question.first].at, self.items[question.first].size = at, size

    cdef bint take_items(self, Question* question, uint8_t upstream, size_t start, size_t stop) noexcept:
        """Take the values of an array, which is held, for the keys that were asked over a upstream."""
        cdef const uint8_t* base = <const uint8_t*>self.held.data
        cdef const uint8_t* at = base + start
        cdef const uint8_t* end = base + stop
        cdef size_t count = 0, i
        cdef Item* item = &self.items[question.first]
        cdef Py_ssize_t took
        if at == end or at[0] != 42:
            return False
        took = number_line(at + 1, end, &count)
        if took <= 0:
            return False
        at += 1 + took
        for i in range(question.items):
            if item[i].upstream != upstream:
                continue
            if at == end or at[0] != 36:
                return False
            took = reply_of(at, end, 0)
            if took <= 0 or not count:
                return False
            if not question.is_refused:
                item[i].at, item[i].size = at - base, took
            at += took
            count -= 1
        return at == end and not count

    cdef joined(self):
        """Return the replies in order, ready to be sent: long ones in steps."""
        cdef Output out
        cdef size_t i
        if self.held.used + self.long_bytes > <size_t>JOINED_BYTES_MAX:
            return RawReplySender(self.texts(), self.held.used + self.long_bytes)
        if self.question_count == 1 and not self.questions[0].is_array and self.protocol == 2:
            return PyBytes_FromStringAndSize(self.held.data + self.items[0].at, self.items[0].size)
        out.data, out.used, out.size = NULL, 0, 0
        try:
            reserve(&out, self.held.used + 16 * self.question_count)
            for i in range(self.question_count):
                self.put_question(&out, i)
            return PyBytes_FromStringAndSize(out.data, out.used)
        finally:
            free(out.data)

    def texts(self):
        """Make the replies, each of no more than a megabyte but those that are held as they came."""
        for i in range(self.question_count):
            if i in self.longs:
                yield from self.longs.pop(i).texts
            else:
                yield self.text_of(i)

    cdef bytes text_of(self, size_t index):
        """Return the reply to one request."""
        cdef Output out
        out.data, out.used, out.size = NULL, 0, 0
        try:
            reserve(&out, 64)
            self.put_question(&out, index)
            return PyBytes_FromStringAndSize(out.data, out.used)
        finally:
            free(out.data)

    cdef int put_question(self, Output* out, size_t index) except -1:
        """Write the reply to one request."""
        cdef Question* question = &self.questions[index]
        cdef size_t i
        if question.is_refused:
            return self.put_item(out, &self.items[question.first])
        if question.is_array:
            put_line(out, 42, question.items)
        for i in range(question.items):
            self.put_item(out, &self.items[question.first + i])
        return 0

    cdef int put_item(self, Output* out, const Item* item) except -1:
        cdef const char* data = self.held.data + item.at
        if self.protocol != 2 and item.size == 5 and memcmp(data, b"$-1\r\n", 5) == 0:
            return put(out, b"_\r\n", 3)
        return put(out, data, item.size)

    cdef epochs(self):
        """Return the epochs of the replies."""
        cdef object epochs = NO_EPOCHS
        for each in self.epoch_sets:
            epochs = together(epochs, each)
        return epochs

    cdef bint is_uneven(self) except -1:
        """Tell whether a reply is from an earlier epoch than one before it."""
        cdef size_t i, j
        cdef Question* question
        cdef list each = []
        if len(self.epoch_sets) <= 1 or self.question_count == 1:
            return False
        for i in range(self.question_count):
            question, epochs = &self.questions[i], NO_EPOCHS
            for j in range(question.items):
                epochs = together(epochs, self.epoch_sets[self.items[question.first + j].epochs])
            each.append(epochs)
        return bool(behind(each))


cdef class PipelineBatch:
    """What is asked over one connection in one round. `remaining` and the rest are as in `resp_server.proxy.requests.InFlightRequest`."""

    cdef Hop hop
    cdef object upstream
    cdef readonly double deadline_s
    cdef readonly bint has_partial
    cdef Entry* entries
    cdef size_t count, size, next, room
    cdef Output out
    cdef bytes text
    cdef list client_batches

    def __cinit__(self, Hop hop, upstream, double deadline_s, size_t room):
        self.hop, self.upstream, self.deadline_s, self.room = hop, upstream, deadline_s, room
        self.client_batches = []

    def __dealloc__(self):
        free(self.entries)
        free(self.out.data)

    @property
    def remaining(self):
        return self.count - self.next

    @remaining.setter
    def remaining(self, size_t remaining):
        self.next = self.count - min(remaining, self.count)

    cdef int add(self, ClientBatch client_batch, uint32_t question, uint16_t slot, uint8_t upstream, size_t start) except -1:
        """Wait for one more reply; what is asked ends the text so far."""
        cdef Entry* entries
        cdef Entry* entry
        if self.count == self.size:
            entries = <Entry*>realloc(self.entries, (self.size * 2 + 16) * sizeof(Entry))
            if entries == NULL:
                raise MemoryError
            self.entries, self.size = entries, self.size * 2 + 16
        entry = &self.entries[self.count]
        entry.client_batch, entry.question, entry.slot, entry.upstream = <void*>client_batch, question, slot, upstream
        entry.start, entry.end, entry.is_done = start, self.out.used, False
        self.count += 1
        self.room -= 1
        return 0

    def close(self):
        """Close the batch; return its requests."""
        self.text = PyBytes_FromStringAndSize(self.out.data, self.out.used)
        free(self.out.data)
        self.out.data, self.out.used, self.out.size = NULL, 0, 0
        return self.text

    def feed(self, bytes data, size_t start, epochs):
        """Take the replies at the front of what came, from a byte on; return where they end.

        What is left is in parts (`has_partial`), or somebody else's to look at.
        """
        cdef const uint8_t* base = <const uint8_t*>PyBytes_AS_STRING(data)
        return start + self.take_all(base + start, base + PyBytes_GET_SIZE(data), epochs)

    cdef size_t take_all(self, const uint8_t* start, const uint8_t* end, epochs) except? 0:
        cdef const uint8_t* at = start
        cdef Py_ssize_t took = 1
        cdef size_t index
        self.has_partial = False
        while self.next < self.count:
            took = reply_of(at, end, 0)
            if took <= 0:
                break
            index = self.next
            self.next += 1
            self.accept(index, <const char*>at, took, epochs)
            at += took
        self.has_partial = took == 0
        return at - start

    def take(self, replies, epochs):
        """Take the next replies."""
        cdef bytes reply
        cdef size_t index
        for reply in replies:
            if self.next >= self.count:
                raise FrameError("more replies than questions")
            index = self.next
            self.next += 1
            self.accept(index, PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply), epochs)

    cdef int accept(self, size_t index, const char* data, size_t size, epochs) except -1:
        """Take a reply, and answer the client if it was the last one that it waits for. What is raised is its alone."""
        cdef Entry* entry = &self.entries[index]
        cdef ClientBatch client_batch = <ClientBatch>entry.client_batch
        if entry.is_done:
            return 0
        entry.is_done = True
        if client_batch.is_over:
            return 0
        try:
            client_batch.take(entry, data, size, epochs)
            if not client_batch.missing:
                self.hop.finish(client_batch)
        except Exception as error:
            self.hop.give_up(client_batch, error)
        return 0

    cdef int accept_long(self, size_t index, reply, epochs) except -1:
        """Take a long reply, likewise."""
        cdef Entry* entry = &self.entries[index]
        cdef ClientBatch client_batch = <ClientBatch>entry.client_batch
        entry.is_done = True
        try:
            client_batch.take_long(entry, reply, epochs)
            if not client_batch.missing:
                self.hop.finish(client_batch)
        except Exception as error:
            self.hop.give_up(client_batch, error)
        return 0

    def fail_all(self, error):
        """Pass an exception to all clients that still wait."""
        cdef size_t index
        for index in range(self.next, self.count):
            self.fail(index, error)

    def fail(self, index, error):
        """Pass on what was raised instead of the answer to a question of a number."""
        cdef size_t at = -1 - index if index < 0 else index
        cdef ClientBatch client_batch = <ClientBatch>self.entries[at].client_batch
        self.entries[at].is_done = True
        if not client_batch.is_over:
            self.hop.give_up(client_batch, error)

    def next_request(self):
        """Return the next question to be answered as one of its client_floor. One for many keys is not asked again as it is."""
        cdef size_t index = self.next
        cdef Entry* entry = &self.entries[index]
        if index >= self.count:
            raise IndexError("nothing waits")
        self.next += 1
        if (<ClientBatch>entry.client_batch).questions[entry.question].is_array:
            return UpstreamRequest(PING, 0, 2, self.deadline_s, self, index, self.upstream.key.address, sends=SENDS_MAX)
        return UpstreamRequest(self.text[entry.start : entry.end], entry.slot, 2, self.deadline_s, self, index, sends=1)

    def seen_epochs(self, index):
        """Return the epochs that the client has seen."""
        cdef size_t at = -1 - index if index < 0 else index
        return (<ClientBatch>self.entries[at].client_batch).sink.seen

    def put(self, index, reply, epochs=NO_EPOCHS):
        """Take the answer to such a question; below zero: what came when an MGET was asked by slots."""
        cdef size_t at = -1 - index if index < 0 else index
        cdef Entry* entry = &self.entries[at]
        cdef bint is_array = (<ClientBatch>entry.client_batch).questions[entry.question].is_array
        cdef ClientBatch client_batch = <ClientBatch>entry.client_batch
        if entry.is_done or client_batch.is_over:
            return
        # A long reply to an MGET is put together by the general path. The answer to the PING that stands in its place,
        # where its connection was given away, says that there is one.
        if is_array and (type(reply) is not bytes or (index >= 0 and reply[:1] == b"+")):
            self.hop.begin_again(client_batch)
            return
        if type(reply) is not bytes:
            self.accept_long(at, reply, epochs)
            return
        if index >= 0 and is_array and reply[:1] == b"-" and self.hop.cluster.now_s < self.deadline_s:
            try:
                keys = RequestParser().feed(self.text[entry.start : entry.end])[0][2:]
                send_mget_by_slots(self.hop.cluster, keys, self.deadline_s, self, -1 - index)
            except Exception as error:
                self.fail(index, error)
            return
        self.accept(at, PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply), epochs)


cdef class Hop:
    """Asks the servers of one application for what clients ask a proxy for.

    commands: name, the least and the most words, a command_stats of calls; the first one is GET, the second MGET.
    has_partial: what was looked at last ends in the beginning of a request.
    """

    cdef readonly object cluster
    cdef object server, stats
    cdef list names, tallies
    cdef Spec specs[COMMANDS_MAX]
    cdef int commands
    cdef uint64_t calls[COMMANDS_MAX]
    cdef uint64_t input_bytes, output_bytes  # of clients
    cdef Word words[WORDS_MAX]
    cdef Item items[ITEMS_MAX]
    cdef Question questions[QUESTIONS_MAX]
    cdef size_t item_count, question_count
    cdef uint32_t entries[UPSTREAMS_MAX]  # of each connection, by its number
    cdef int upstreams[UPSTREAMS_MAX]
    cdef int upstream_count
    cdef list batches
    cdef public bint has_partial
    cdef readonly object last_command

    def __init__(self, cluster, server, commands):
        cdef int i = 0
        self.cluster, self.server, self.stats = cluster, server, server.stats
        self.names, self.tallies, self.batches = [], [], [None] * UPSTREAMS_MAX
        for name, least, most, command_stats in commands[:COMMANDS_MAX]:
            set_spec(&self.specs[i], name.encode(), least, most)
            self.names.append(name)
            self.tallies.append(command_stats)
            i += 1
        self.commands = i
        self.stats.collectors.append(self.collect)

    def ask(self, sink, bytes data, int protocol):
        """Send the plain reads at the front of a buffer; return how much of it they are, 0: none can be now."""
        return self.ask_for(sink, <const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), protocol)

    cdef size_t ask_for(self, sink, const uint8_t* data, size_t size, int protocol) except? 0:
        cdef size_t took = self.gather(data, data + size, protocol)
        cdef ClientBatch client_batch
        if not took:
            return 0
        if not self.have_room(sink):
            self.has_partial = False
            return 0
        client_batch = ClientBatch.__new__(ClientBatch)
        client_batch.sink, client_batch.protocol = sink, protocol
        client_batch.data = PyBytes_FromStringAndSize(<const char*>data, took)
        client_batch.items = <Item*>malloc(self.item_count * sizeof(Item))
        client_batch.questions = <Question*>malloc(self.question_count * sizeof(Question))
        if client_batch.items == NULL or client_batch.questions == NULL:
            raise MemoryError
        memcpy(client_batch.items, self.items, self.item_count * sizeof(Item))
        memcpy(client_batch.questions, self.questions, self.question_count * sizeof(Question))
        client_batch.item_count = client_batch.missing = self.item_count
        client_batch.question_count = self.question_count
        try:
            self.send(client_batch)
        except BaseException:
            client_batch.is_over = True  # whoever asked does so in another way
            raise
        return took

    cdef size_t gather(self, const uint8_t* start, const uint8_t* end, int protocol) except? 0:
        """Cut plain reads off the front of a buffer, and find over which connections they are asked."""
        cdef const uint8_t* at = start
        cdef bytes table = self.cluster.table
        cdef const uint8_t* numbers = <const uint8_t*>PyBytes_AS_STRING(table)
        cdef size_t count = 0, i, first
        cdef Py_ssize_t took
        cdef int command
        cdef Question* question
        cdef Item* item
        self.has_partial = False
        self.item_count = self.question_count = 0
        if PyBytes_GET_SIZE(table) < SLOTS:
            return 0
        while at < end and self.question_count < QUESTIONS_MAX:
            took = cut(at, end, self.words, WORDS_MAX, WORD_BYTES_MAX, &count)
            if took <= 0:
                self.has_partial = took == 0
                break
            command = command_of(self.specs, self.commands, self.words)
            if command < 0 or (command > 1 and protocol != 2):
                break
            if not self.specs[command].least <= count <= self.specs[command].most:
                break
            count = count - 1 if command == 1 else 1
            first = self.item_count
            if first + count > ITEMS_MAX:
                break
            for i in range(count):
                item = &self.items[first + i]
                item.slot = slot_of(self.words[1 + i].at, self.words[1 + i].size)
                item.upstream = numbers[item.slot]
                item.at = item.size = item.epochs = 0
                if not item.upstream:
                    break
            else:
                question = &self.questions[self.question_count]
                question.at, question.size = at, took
                question.keys = self.words[0].at + self.words[0].size + 2
                question.first, question.items = first, count
                question.command, question.is_array, question.is_refused = command, command == 1, False
                self.item_count += count
                self.question_count += 1
                at += took
                continue
            break
        return at - start

    cdef bint have_room(self, sink) except -1:
        """Tell whether all connections can take these questions, and their servers have reached what a client saw."""
        cdef size_t i
        cdef int number
        cdef PipelineBatch batch
        cdef list open_upstreams = self.cluster.open_upstreams
        memset(self.entries, 0, sizeof(self.entries))
        self.upstream_count = 0
        for i in range(self.item_count):
            number = self.items[i].upstream
            if not self.entries[number]:
                self.upstreams[self.upstream_count] = number
                self.upstream_count += 1
            self.entries[number] += 1  # no more than these
        for i in range(self.upstream_count):
            number = self.upstreams[i]
            upstream_ = open_upstreams[number] if number < len(open_upstreams) else None
            if upstream_ is None:
                return False
            batch = upstream_.batch
            if not self.cluster.is_level:
                floor = self.cluster.client_floor(sink.seen)
                if not has_reached(upstream_.epochs, floor, self.cluster.removed_jobs):
                    return False
            if batch is None:
                if not upstream_.has_room(self.entries[number]):
                    return False
            elif batch.room < self.entries[number]:
                return False
            self.batches[number] = batch
        for i in range(self.upstream_count):
            number = self.upstreams[i]
            if self.batches[number] is None:
                upstream_ = open_upstreams[number]
                batch = PipelineBatch(self, upstream_, self.cluster.deadline_s(), REQUESTS_MAX - min(<size_t>REQUESTS_MAX, upstream_.pending_count))
                upstream_.begin_batch(batch)
                self.batches[number] = batch
        return True

    cdef int send(self, ClientBatch client_batch) except -1:
        """Put questions into the batches of their connections."""
        cdef size_t i, start
        cdef int j
        cdef PipelineBatch batch
        cdef Question* question
        cdef uint8_t number
        for j in range(self.upstream_count):
            batch = self.batches[self.upstreams[j]]
            batch.client_batches.append(client_batch)
        for i in range(client_batch.question_count):
            question = &client_batch.questions[i]
            self.calls[question.command] += 1
            if question.is_array:
                for j in range(self.upstream_count):
                    self.send_keys(client_batch, i, self.upstreams[j])
            else:
                number = client_batch.items[question.first].upstream
                batch = <PipelineBatch>self.batches[number]
                start = batch.out.used
                put(&batch.out, question.at, question.size)
                batch.add(client_batch, i, client_batch.items[question.first].slot, number, start)
        for j in range(self.upstream_count):
            self.batches[self.upstreams[j]] = None
        self.last_command = self.names[client_batch.questions[client_batch.question_count - 1].command]
        return 0

    cdef int send_keys(self, ClientBatch client_batch, uint32_t index, uint8_t number) except -1:
        """Request those keys of an MGET that are asked over a connection, if there are any."""
        cdef Question* question = &client_batch.questions[index]
        cdef Item* item = &client_batch.items[question.first]
        cdef PipelineBatch batch = <PipelineBatch>self.batches[number]
        cdef size_t i, count = 0, size = 0, start = batch.out.used
        cdef const uint8_t* at = question.keys
        cdef const uint8_t* end = question.at + question.size
        cdef Py_ssize_t took
        for i in range(question.items):
            count += item[i].upstream == number
        if not count:
            return 0
        put_line(&batch.out, 42, count + 2)
        put(&batch.out, b"$5\r\nSTATE\r\n$4\r\nMGET\r\n", 21)
        for i in range(question.items):
            took = 1 + number_line(at + 1, end, &size) + size + 2
            if item[i].upstream == number:
                put(&batch.out, at, took)
            at += took
        return batch.add(client_batch, index, 0, number, start)

    def collect(self):
        """Add the counts of requests and bytes to the server's statistics."""
        cdef int i
        self.stats.input_bytes += self.input_bytes
        self.stats.output_bytes += self.output_bytes
        self.input_bytes = self.output_bytes = 0
        for i in range(self.commands):
            self.tallies[i].calls += self.calls[i]
            self.calls[i] = 0

    cdef int finish(self, ClientBatch client_batch) except -1:
        """Answer a client, or request all again where a reply's epoch is before that of an earlier reply."""
        client_batch.is_over = True
        epochs = client_batch.last_epochs if len(client_batch.epoch_sets) == 1 else client_batch.epochs()
        if client_batch.is_uneven():
            self.ask_again(client_batch, epochs)
        else:
            client_batch.sink.answered(client_batch.joined(), epochs)
        return 0

    cdef int ask_again(self, ClientBatch client_batch, epochs) except -1:
        """Have what a client asked asked again, the general way; it was counted when it was asked first."""
        cdef size_t i
        for i in range(client_batch.question_count):
            self.tallies[client_batch.questions[i].command].calls -= 1
        client_batch.sink.ask_again(client_batch.data, epochs)
        return 0

    cdef int begin_again(self, ClientBatch client_batch) except -1:
        """Have what a client asked asked again, the general way, whatever came of it so far."""
        client_batch.is_over = True
        try:
            self.ask_again(client_batch, NO_EPOCHS)
        except Exception as error:
            self.server.report(error)
        return 0

    cdef int give_up(self, ClientBatch client_batch, error) except -1:
        """Take what was raised for what a client asked: of several requests it may be only one's."""
        client_batch.is_over = True
        try:
            if client_batch.question_count == 1:
                client_batch.sink.fail(0, error)
            else:
                self.server.report(error)
                self.ask_again(client_batch, NO_EPOCHS)
        except Exception as another:
            self.server.report(another)
        return 0


cdef class Asker(InputInterceptor):
    """A client of a proxy: requests the plain reads that it sends, and sends it the replies.

    Meanwhile its connection is handed over (see `resp_server.client.connection.Connection.hand_over`).
    """

    cdef Hop hop
    cdef object connection, session, write, last_epochs
    cdef bytes partial_request  # of a request: it may be one that the hop asks for

    def __init__(self, Hop hop, connection, write):
        self.hop, self.connection, self.session, self.write = hop, connection, connection.session, write
        self.partial_request = b""

    cdef size_t intercept(self, const uint8_t* data, size_t size) except? 0:
        if self.partial_request or not self.begin(data, size):
            return 0
        self.hop.input_bytes += size
        return size

    def left_of(self, bytes data):
        """Send the plain reads that are at the front of what came; return all of it where that is none."""
        if self.partial_request:
            data, self.partial_request = self.partial_request + data, b""
        if self.begin(<const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data)) or self.keeps_begun(data):
            return b""
        return data

    cdef bint begin(self, const uint8_t* data, size_t size) except -1:
        """Send the plain reads that are at the front of what came, if nothing is waited for."""
        self.hop.has_partial = False
        return self.connection.is_calm and self.session.is_plain and self.ask_for(data, size)

    def ask(self, bytes data):
        """Send the plain reads that are at the front of what was kept; tell whether there is something."""
        return self.ask_for(<const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))

    cdef bint ask_for(self, const uint8_t* data, size_t size) except -1:
        cdef size_t took
        connection, session = self.connection, self.session
        try:
            took = self.hop.ask_for(self, data, size, session.protocol)
        except Exception as error:  # nothing was asked so far: the general path meets it again, and answers it
            self.hop.server.report(error)
            return False
        if not took:
            return False
        session.last_command = self.hop.last_command
        connection.hand_over(PyBytes_FromStringAndSize(<const char*>data + took, size - took) if took < size else b"")
        return True

    def keeps_begun(self, bytes data):
        """Keep what is no more than the beginning of a request; tell whether it is that."""
        if not self.hop.has_partial or PyBytes_GET_SIZE(data) > PARTIAL_BYTES_MAX:
            return False
        self.partial_request = data
        return True

    @property
    def seen(self):
        """The epochs that this client has seen."""
        return self.session.seen.epochs

    def ask_again(self, data, epochs):
        """Have it asked again, the general way, of servers that have reached all of it."""
        self.connection.ask_again(data, epochs)

    def fail(self, index, error):
        """Take an exception in place of the replies."""
        self.answered(self.connection.error_reply(error), NO_EPOCHS)

    def answered(self, reply, epochs):
        """Send what was waited for, and go on with what came meanwhile. What is raised ends this connection alone."""
        cdef Hop hop = self.hop
        connection, session = self.connection, self.session
        try:
            if not connection.take_back():
                return
            if epochs is not self.last_epochs:  # what was added once is among what the client has seen
                session.seen.add(epochs)
                self.last_epochs = epochs
            session.active_ms = hop.server.view.now_ms
            if type(reply) is not bytes:
                connection.send_in_steps(reply)
                return
            hop.output_bytes += len(reply)
            self.write(reply)
            if connection.is_drained:
                connection.is_calm = True
            else:
                connection.go_on()
        except Exception as error:
            connection.break_off(error)
