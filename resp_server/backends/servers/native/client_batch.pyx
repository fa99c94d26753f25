# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The requests that a forwarder has sent for one client, and the join of the replies to their parts."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport UINT64_MAX, int64_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport free
from libc.string cimport memcmp

from resp_server.native.raw_replies cimport bulk_bytes, integer_bytes, integer_in, line_bytes, reply_bytes
from resp_server.native.wire cimport Output, Word, number_line, put, put_line, reserve
from resp_server.backends.servers.native.key_owners cimport STATES, UPSTREAM_BACKEND, KeyOwnerTable

from resp_server.raw_replies.raw_reply import JOINED_BYTES_MAX, RawReplySender
from resp_server.raw_replies.reply_sinks import malformed_reply
from resp_server.raw_replies.reply_splitter import FrameError
from resp_server.session.epochs import NO_EPOCHS, indexes_behind, union_of

cdef enum:
    DRAWN_MAX = 1024  # random keys from which the share of hidden ones is estimated (guess)


cdef class BatchClient(InputInterceptor):
    """A client whose replies are sent by compiled code (`client_forwarder.ClientForwarder`)."""

    cdef int send_replies(self, reply, epochs) except -1:
        raise NotImplementedError


cdef class ClientBatch:
    """Requests that were forwarded together from one client's input, and their replies so far."""

    def __cinit__(self):
        self.epoch_sets = []
        self.long_replies = {}

    def __dealloc__(self):
        free(self.buffer.data)
        free(self.requests)

    cdef int epochs_id(self, epochs) except -1:
        """Return the id of a reply's epochs."""
        cdef int i
        if epochs is not self.last_epochs:
            for i in range(len(self.epoch_sets)):
                if self.epoch_sets[i] is epochs:
                    break
            else:
                i = len(self.epoch_sets)
                if i == 255:  # never reached by the replies of one round
                    self.epoch_sets[254] = union_of(self.epoch_sets[254], epochs)
                    return 254
                self.epoch_sets.append(epochs)
            self.last_epochs, self.last_epochs_id = epochs, i
        return self.last_epochs_id

    cdef bint note_keys(self, const PendingReply* entry, epochs) except -1:
        """Note the keys of a state server's reply that the client may cache; return whether they are the first ones."""
        cdef Request* request = &self.requests[entry.request]
        cdef uint32_t queued
        cdef bint is_first = self.noted is None
        if entry.number >= UPSTREAM or not request.is_recorded or (request.is_in_transaction and not request.queued):
            return False  # the keys of a queued command are read by EXEC
        if is_first:
            self.noted = []
        if request.join == EXEC_PARTS and epochs is not self.at_epochs:  # newer invalidations may have been sent
            self.full_invalidations = UINT64_MAX
        for queued in range(entry.request - request.queued, entry.request):
            self.note_keys_of(&self.requests[queued], NULL)
        if not request.queued:
            self.note_keys_of(request, entry)
        return is_first

    cdef int note_keys_of(self, const Request* request, const PendingReply* entry) except -1:
        """Note the keys of a request, or those that one reply is about."""
        cdef const Item* item = &self.items[request.first]
        cdef const uint8_t* base = <const uint8_t*>PyBytes_AS_STRING(self.data)
        cdef const uint8_t* end = base + PyBytes_GET_SIZE(self.data)
        cdef const uint8_t* at = base + (request.keys - self.requests[0].at)
        cdef size_t i, size = 0
        for i in range(request.items):
            at += 1 + number_line(at + 1, end, &size)
            if entry == NULL or (item[i].number == entry.number if request.join == ARRAY else request.first + i == entry.item):
                self.noted.append(PyBytes_FromStringAndSize(<const char*>at, size))
            at += size + 2
        return 0

    cdef int add_reply(self, const PendingReply* entry, const char* data, size_t size, epochs) except -1:
        """Store the reply to a request, or to a part of it for one server; return whether it has to be sent again."""
        cdef Request* request = &self.requests[entry.request]
        cdef Item* item = &self.items[entry.item]
        cdef int number = self.epochs_id(self.at_epochs if request.join == EXEC_PARTS else epochs)
        cdef size_t at = self.buffer.used, i
        put(&self.buffer, data, size)
        if request.join != ARRAY and request.join != EXEC_PARTS:
            item.epochs = number
            self.missing -= 1
            if request.join >= COUNTED:
                if data[0] == c"-":
                    self.set_error(request, at, size)
                elif not request.is_error:
                    item.at, item.size = at, size
                return entry.item + 1 == request.first + request.items and not (request.is_error or self.join_listing(request))
            if request.join == NOT_JOINED or (size and data[0] == c":" and not request.is_error):
                item.at, item.size = at, size
                return 0
        else:
            for i in range(request.items):
                if item[i].number == entry.number:
                    item[i].epochs = number
                    self.missing -= 1
        if request.join == EXEC_PARTS:
            return not self.split_array(request, entry.number, at, at + size)
        if size and data[0] == c"-":
            self.set_error(request, at, size)
        elif request.join == SUM or not self.split_array(request, entry.number, at, at + size):
            reply = malformed_reply(FrameError("the reply for some keys has another form"))
            at = self.buffer.used
            put(&self.buffer, PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply))
            self.set_error(request, at, PyBytes_GET_SIZE(reply))
        return 0

    cdef int add_cached(self, list replies) except -1:
        """Store the cached replies, in the order of their requests."""
        cdef bytes reply
        cdef size_t at = 0
        for reply in replies:
            while self.items[at].number:
                at += 1
            self.items[at].at, self.items[at].size = self.buffer.used, PyBytes_GET_SIZE(reply)
            self.items[at].epochs = self.epochs_id(NO_EPOCHS)
            put(&self.buffer, PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply))
            at += 1
        self.missing -= len(replies)
        return 0

    cdef int add_long_reply(self, const PendingReply* entry, reply, epochs) except -1:
        """Store a long reply, which is not copied, to a request with one item."""
        self.items[entry.item].epochs = self.epochs_id(epochs)
        self.long_replies[entry.request] = reply
        self.long_reply_bytes += len(reply)
        self.missing -= 1
        return 0

    cdef bint join_listing(self, Request* request) except -1:
        """Join the replies of the states and of the upstream to a request about all keys; False: the general path answers it."""
        cdef Item* item = &self.items[request.first]
        cdef const char* data = self.buffer.data
        cdef const uint8_t* first = <const uint8_t*>data + item.at
        cdef size_t count = 0, at = self.buffer.used
        cdef bint is_joined = True
        cdef Output out
        if request.join == COUNTED:
            put_line(&self.buffer, c":", integer_in(data + item.at, item.size) + integer_in(data + item[1].at, item[1].size))
            item.at, item.size, request.join, request.items = at, self.buffer.used - at, NOT_JOINED, 1
            return True
        out.data, out.used, out.size = NULL, 0, 0
        try:
            if request.join == DRAWN:
                is_joined = self.put_drawn(&out, request)
            elif request.join == SCANNED:
                is_joined = self.patterns.put_page(&out, first, item.size, UPSTREAM_BACKEND)
            else:
                is_joined = self.patterns.put_owned(&out, first, item.size, STATES, &count)
                first = <const uint8_t*>data + item[1].at
                is_joined = is_joined and self.patterns.put_owned(&out, first, item[1].size, UPSTREAM_BACKEND, &count)
                put_line(&self.buffer, c"*", count)
            put(&self.buffer, out.data, out.used)
        finally:
            free(out.data)
        item.at, item.size, request.join, request.items = at, self.buffer.used - at, NOT_JOINED, 1
        return is_joined

    cdef bint put_drawn(self, Output* out, const Request* request) except -1:
        """Write the states' or the upstream's random key; False: the general path draws one. The states' item has their number of keys, and a key.

        Some of the upstream's keys are hidden: copies of states' keys. Their share follows from all keys drawn so far. In place of a hidden
        one the states' key is taken, so the upstream's key is chosen so often that each visible key is equally probable.
        """
        cdef const Item* drawn = &self.items[request.first + request.items - 1]
        cdef const Item* total = &self.items[request.total]
        cdef const uint8_t* at = <const uint8_t*>self.buffer.data + self.items[request.first].at
        cdef const uint8_t* end = at + self.items[request.first].size
        cdef const uint8_t* theirs = <const uint8_t*>self.buffer.data + drawn.at
        cdef KeyOwnerTable patterns = self.patterns
        cdef Py_ssize_t took = integer_bytes(at, end), theirs_took
        cdef double states = integer_in(<const char*>at, took), others = integer_in(self.buffer.data + total.at, total.size), share
        cdef Word key
        at += took
        theirs_took = bulk_bytes(theirs, theirs + drawn.size, &key)
        if theirs_took > 0:
            patterns.drawn += 1
            if patterns.owner_of(&key) == UPSTREAM_BACKEND:
                patterns.visible += 1
                share = <double>patterns.visible / patterns.drawn
                if request.random * (states + others * share) < others * 65536.0:
                    return put(out, theirs, theirs_took) == 0
            if patterns.drawn >= DRAWN_MAX:
                patterns.drawn, patterns.visible = patterns.drawn >> 1, patterns.visible >> 1
        took = bulk_bytes(at, end, &key)
        return took > 0 and patterns.owner_of(&key) == STATES and put(out, at, took) == 0

    cdef void set_error(self, Request* request, size_t at, size_t size) noexcept:
        if not request.is_error:
            request.is_error = True
            self.items[request.first].at, self.items[request.first].size = at, size

    cdef bint split_array(self, Request* request, uint16_t number, size_t start, size_t stop) noexcept:
        """Split an array in the buffer into the values that were requested from one server; False: it has others."""
        cdef const uint8_t* base = <const uint8_t*>self.buffer.data
        cdef const uint8_t* at = base + start
        cdef const uint8_t* end = base + stop
        cdef size_t count = 0, i
        cdef Item* item = &self.items[request.first]
        cdef Py_ssize_t took
        if at == end or at[0] != c"*":
            return False
        took = number_line(at + 1, end, &count)
        if took <= 0:
            return False
        at += 1 + took
        for i in range(request.items):
            if item[i].number != number:
                continue
            if at == end or (request.join == ARRAY and at[0] != c"$" and at[0] != c"_"):
                return False
            if end - at > 11 and memcmp(at, b"-WRONGTYPE ", 11) == 0:
                took = line_bytes(at, end)
            else:
                took = reply_bytes(at, end, 0)
            if took <= 0 or not count:
                return False
            if not request.is_error:
                item[i].at, item[i].size = at - base, took
            at += took
            count -= 1
        return at == end and not count

    cdef joined_replies(self):
        """Return the replies in order, as bytes; if they are long, as a sender that sends them in steps."""
        cdef Output out
        cdef size_t i
        if self.buffer.used + self.long_reply_bytes > <size_t>JOINED_BYTES_MAX:
            return RawReplySender(self.reply_texts(), self.buffer.used + self.long_reply_bytes)
        if self.request_count == 1 and not self.replied and self.requests[0].join == NOT_JOINED and self.protocol == 2:
            return PyBytes_FromStringAndSize(self.buffer.data + self.items[0].at, self.items[0].size)
        out.data, out.used, out.size = NULL, 0, 0
        try:
            reserve(&out, self.buffer.used + 16 * self.request_count)
            for i in range(self.replied, self.request_count):
                self.put_reply(&out, i)
            return PyBytes_FromStringAndSize(out.data, out.used)
        finally:
            free(out.data)

    def reply_texts(self):
        """Iterate over the replies; each is one text of at most a megabyte, or the chunks of a long reply."""
        for i in range(self.replied, self.request_count):
            if i in self.long_replies:
                yield from self.long_replies.pop(i).texts
            else:
                yield self.reply_text(i)

    cdef bytes reply_text(self, size_t index):
        """Return the reply to a request."""
        cdef Output out
        out.data, out.used, out.size = NULL, 0, 0
        try:
            reserve(&out, 64)
            self.put_reply(&out, index)
            return PyBytes_FromStringAndSize(out.data, out.used)
        finally:
            free(out.data)

    cdef int put_reply(self, Output* out, size_t index) except -1:
        """Write the reply to a request."""
        cdef Request* request = &self.requests[index]
        cdef size_t i
        cdef int64_t total = 0
        if request.is_error:
            return self.put_value(out, &self.items[request.first])
        if request.join == SUM:
            for i in range(request.items):
                total += integer_in(self.buffer.data + self.items[request.first + i].at, self.items[request.first + i].size)
            return put_line(out, c":", total)
        if request.join == QUEUED_PART:
            return put(out, b"+QUEUED\r\n", 9)
        if request.join == ARRAY or request.join == EXEC_PARTS:
            put_line(out, c"*", request.items)
        for i in range(request.items):
            self.put_value(out, &self.items[request.first + i])
        return 0

    cdef int put_value(self, Output* out, const Item* item) except -1:
        cdef const char* data = self.buffer.data + item.at
        if self.protocol != 2 and item.size == 5 and memcmp(data, b"$-1\r\n", 5) == 0:
            return put(out, b"_\r\n", 3)
        return put(out, data, item.size)

    cdef epochs(self):
        """Return the epochs of the replies."""
        cdef object epochs = NO_EPOCHS
        for each in self.epoch_sets:
            epochs = union_of(epochs, each)
        return epochs

    cdef bint has_older_reply(self) except -1:
        """Return whether a reply is from an earlier epoch than a reply before it."""
        cdef size_t i, j
        cdef Request* request
        cdef list each = []
        if self.request_count == 1 or len(self.epoch_sets) == 1:
            return False
        if sum([bool(some) for some in self.epoch_sets]) <= 1:  # the upstream's have none
            return False
        for i in range(self.request_count):
            request, epochs = &self.requests[i], NO_EPOCHS
            for j in range(request.items):
                epochs = union_of(epochs, self.epoch_sets[self.items[request.first + j].epochs])
            each.append(epochs)
        return bool(indexes_behind(each))
