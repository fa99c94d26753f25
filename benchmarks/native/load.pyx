# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The inner loop of the load generator: one epoll and many connections; replies are counted, not decoded.

A connection sends a full pipeline at once, waits for all of its replies, and sends the next one. All connections send
from one buffer, in which only the random numbers change. Bytes that a socket does not accept are copied and sent later.
A request may be several commands, each with a reply of its own.
"""

from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove, memset

import os

cdef extern from "sys/epoll.h" nogil:
    ctypedef union epoll_data_t:
        uint32_t u32
    cdef struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int)
    int epoll_ctl(int, int, int, epoll_event*)
    int epoll_wait(int, epoll_event*, int, int)
    int EPOLLIN, EPOLLOUT, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLL_CLOEXEC

cdef extern from "unistd.h" nogil:
    int close(int)

cdef extern from "sys/socket.h" nogil:
    ssize_t recv(int, void*, size_t, int)
    ssize_t send(int, const void*, size_t, int)
    int MSG_NOSIGNAL, MSG_DONTWAIT

cdef extern from "time.h" nogil:
    cdef struct timespec:
        int64_t tv_sec
        int64_t tv_nsec
    int clock_gettime(int, timespec*)
    int CLOCK_MONOTONIC

cdef enum:
    DIGITS = 12  # as redis-benchmark fills in `__rand_int__`
    EVENTS_MAX = 256
    INPUT_BYTES = 1 << 18
    LINE_BYTES_MAX = 256  # of a reply's line that came in parts, and of an error's text
    NUMBER_DIGITS_MAX = 15
    SILENCE_MS_MAX = 60000  # a server without any reply for so long has failed (guess)

# The reasons for the end of the loop.
cdef enum End:
    DONE
    ERROR_REPLY
    NO_REPLY
    TOO_MANY_REPLIES
    CLOSED
    SILENCE
    SYSTEM_ERROR
    NO_MEMORY

REASONS = {
    <int>ERROR_REPLY: "the server replied with an error",
    <int>NO_REPLY: "the server sent bytes that are no reply",
    <int>TOO_MANY_REPLIES: "the server sent more replies than there were requests; the first of them",
    <int>CLOSED: "the server closed a connection",
    <int>SILENCE: f"no reply came for {SILENCE_MS_MAX // 1000} s",
}


class LoadError(Exception):
    """The load ended before all replies had come; the text has the reason."""


cdef struct Connection:
    int descriptor
    # The number of pending values: one for each reply; the header of an aggregate replaces one by its elements.
    int64_t values
    int64_t push_values  # those of a push, which replies to no request and comes between replies
    bint is_waiting  # for replies to a pipeline
    int64_t text_remaining  # the pending bytes of a bulk string, with its CRLF
    char* unsent
    size_t unsent_size, unsent_at
    int line_size  # the received bytes of an unfinished line
    char line[LINE_BYTES_MAX]


cdef char[200] PAIRS  # 00 01 .. 99
cdef int _pair
for _pair in range(100):
    PAIRS[2 * _pair], PAIRS[2 * _pair + 1] = 48 + _pair // 10, 48 + _pair % 10


cdef class _Load:
    """One load, which owns its memory."""

    cdef Connection* connections
    cdef int count, epoll, saved_errno, error_size
    cdef char* input
    cdef char* batch  # a full pipeline
    cdef size_t batch_size
    cdef size_t* numbers_at
    cdef int number_count
    cdef int64_t pipeline, requests, replies, sent, replied, received
    cdef bint takes_errors
    cdef uint64_t key_range, state
    cdef char[LINE_BYTES_MAX] error_text

    def __cinit__(
        self, descriptors, bytes request, numbers_at, int64_t pipeline, int64_t requests, key_range, seed, int64_t replies,
        bint takes_errors,
    ):
        cdef size_t each, at
        cdef size_t size = len(request)
        cdef const char* text = request
        self.epoll = -1
        self.count, self.number_count = len(descriptors), len(numbers_at) * pipeline
        self.pipeline, self.requests = pipeline, requests
        self.replies, self.takes_errors = replies, takes_errors
        self.key_range, self.state = key_range, seed | 1  # xorshift never leaves 0
        self.batch_size = size * pipeline
        self.connections = <Connection*>calloc(self.count, sizeof(Connection))
        self.input, self.batch = <char*>malloc(INPUT_BYTES), <char*>malloc(self.batch_size)
        self.numbers_at = <size_t*>calloc(self.number_count + 1, sizeof(size_t))
        if not (self.connections and self.input and self.batch and self.numbers_at):
            raise MemoryError
        self.number_count = 0
        for each in range(<size_t>pipeline):
            memcpy(self.batch + each * size, text, size)
            for at in numbers_at:
                if at + DIGITS > size:
                    raise ValueError("a number is beyond the request's end")
                self.numbers_at[self.number_count] = each * size + at
                memset(self.batch + each * size + at, 48, DIGITS)
                self.number_count += 1
        self.epoll = epoll_create1(EPOLL_CLOEXEC)
        if self.epoll < 0:
            raise OSError(errno, os.strerror(errno))
        for number, descriptor in enumerate(descriptors):
            self.connections[<int>number].descriptor = descriptor
            if self.watch(number, EPOLL_CTL_ADD, EPOLLIN):
                raise OSError(errno, os.strerror(errno))

    def __dealloc__(self):
        cdef int number
        if self.connections:
            for number in range(self.count):
                free(self.connections[number].unsent)
        free(self.connections)
        free(self.input)
        free(self.batch)
        free(self.numbers_at)
        if self.epoll >= 0:
            close(self.epoll)

    cdef int watch(self, int number, int operation, uint32_t events) noexcept nogil:
        cdef epoll_event event
        event.events, event.data.u32 = events, number
        return epoll_ctl(self.epoll, operation, self.connections[number].descriptor, &event)

    cdef End run(self) noexcept nogil:
        """Send requests and count replies until all replies are received."""
        cdef epoll_event events[EVENTS_MAX]
        cdef int number, found
        cdef End end
        for number in range(self.count):
            if end := self.begin(number):
                return end
        while self.replied < self.requests or self.has_partial():
            found = epoll_wait(self.epoll, events, EVENTS_MAX, SILENCE_MS_MAX)
            if found == 0:
                return SILENCE
            if found < 0:
                if errno == EINTR:
                    continue
                return self.system_error()
            for each in range(found):
                number = events[each].data.u32
                if events[each].events & <uint32_t>EPOLLOUT and (end := self.send_rest(number)):
                    return end
                if events[each].events & ~<uint32_t>EPOLLOUT and (end := self.receive(number)):
                    return end
        return DONE

    cdef bint is_partial(self, Connection* connection) noexcept nogil:
        """Return whether a part of a value was received, or of a push."""
        return connection.text_remaining or connection.push_values or connection.line_size

    cdef bint has_partial(self) noexcept nogil:
        """Return whether a connection has such a part, which the next load could not read."""
        cdef int number
        for number in range(self.count):
            if self.is_partial(&self.connections[number]):
                return True
        return False

    cdef End begin(self, int number) noexcept nogil:
        """Send a pipeline with new random numbers, if there are requests left to send."""
        cdef Connection* connection = &self.connections[number]
        cdef ssize_t size
        cdef int64_t each
        if self.sent >= self.requests:
            return DONE
        for each in range(self.number_count):
            self.put_number(self.batch + self.numbers_at[each])
        self.sent += self.pipeline
        connection.values, connection.is_waiting = self.pipeline * self.replies, True
        size = send(connection.descriptor, self.batch, self.batch_size, MSG_NOSIGNAL | MSG_DONTWAIT)
        if size == <ssize_t>self.batch_size:
            return DONE
        if size < 0:
            if errno != EAGAIN and errno != EINTR:
                return self.system_error()
            size = 0
        if connection.unsent == NULL:
            connection.unsent = <char*>malloc(self.batch_size)
            if connection.unsent == NULL:
                return NO_MEMORY
        connection.unsent_at, connection.unsent_size = 0, self.batch_size - size
        memcpy(connection.unsent, self.batch + size, connection.unsent_size)
        return self.system_error() if self.watch(number, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT) else DONE

    cdef End send_rest(self, int number) noexcept nogil:
        cdef Connection* connection = &self.connections[number]
        cdef size_t size_left = connection.unsent_size - connection.unsent_at
        cdef ssize_t size
        cdef char* rest = connection.unsent + connection.unsent_at
        size = send(connection.descriptor, rest, size_left, MSG_NOSIGNAL | MSG_DONTWAIT)
        if size < 0:
            return DONE if errno == EAGAIN or errno == EINTR else self.system_error()
        connection.unsent_at += size
        if connection.unsent_at == connection.unsent_size and self.watch(number, EPOLL_CTL_MOD, EPOLLIN):
            return self.system_error()
        return DONE

    cdef void put_number(self, char* to) noexcept nogil:
        """Write a random number of the range over the digits of the last one; the digits before them stay zeros."""
        cdef uint64_t state = self.state, number
        cdef int at
        state ^= state >> 12
        state ^= state << 25
        state ^= state >> 27
        self.state = state
        number = (state * <uint64_t>2685821657736338717) >> 32  # xorshift64*: its upper half
        number = number * self.key_range >> 32
        for at in range(DIGITS - 2, -2, -2):
            memcpy(to + at, PAIRS + 2 * (number % 100), 2)
            number //= 100

    cdef End receive(self, int number) noexcept nogil:
        """Read the received bytes; after the last reply of a pipeline, send the next pipeline."""
        cdef Connection* connection = &self.connections[number]
        cdef ssize_t size = recv(connection.descriptor, self.input, INPUT_BYTES, MSG_DONTWAIT)
        cdef End end
        if size == 0:
            # A server closes a connection after its last reply to a QUIT.
            if connection.values or connection.text_remaining or self.sent < self.requests:
                return CLOSED
            return self.system_error() if self.watch(number, EPOLL_CTL_DEL, 0) else DONE
        if size < 0:
            return DONE if errno == EAGAIN or errno == EINTR else self.system_error()
        self.received += size
        if end := self.count_replies(connection, self.input, self.input + size):
            return end
        if connection.values or self.is_partial(connection) or not connection.is_waiting:
            return DONE
        connection.is_waiting = False
        self.replied += self.pipeline
        return self.begin(number)

    cdef End count_replies(self, Connection* connection, const char* at, const char* stop) noexcept nogil:
        """Count complete values, and subtract them from the pending ones."""
        cdef const char* line
        cdef const char* start
        cdef int64_t number
        cdef int64_t* pending
        cdef int size
        while at < stop:
            if connection.text_remaining:
                number = min(connection.text_remaining, <int64_t>(stop - at))
                connection.text_remaining -= number
                at += number
                continue
            if connection.values == 0 and connection.push_values == 0:
                if (connection.line[0] if connection.line_size else at[0]) != 62:  # >
                    return self.fail(TOO_MANY_REPLIES, at, stop - at)
            pending = &connection.push_values if connection.push_values else &connection.values
            start = at
            while at < stop and at[0] != 10:
                at += 1
            size = at - start
            if at == stop or connection.line_size:
                if connection.line_size + size > LINE_BYTES_MAX:
                    if connection.line_size:
                        start, size = connection.line, connection.line_size
                    return self.fail(ERROR_REPLY if start[0] == 45 else NO_REPLY, start, size)
                memcpy(connection.line + connection.line_size, start, size)
                connection.line_size += size
                if at == stop:
                    return DONE
                line, size, connection.line_size = connection.line, connection.line_size, 0
            else:
                line = start
            at += 1
            if size < 2 or line[size - 1] != 13:
                return self.fail(NO_REPLY, line, size)
            size -= 1
            if line[0] in b"$=*~%":
                number = length_of(line + 1, size - 1)
                if number < -1:
                    return self.fail(NO_REPLY, line, size)
                pending[0] -= 1
                if number < 0:
                    continue
                if line[0] in b"$=":
                    connection.text_remaining = number + 2
                else:
                    pending[0] += 2 * number if line[0] == 37 else number
            elif line[0] == 62:
                number = length_of(line + 1, size - 1)
                if number < 0:
                    return self.fail(NO_REPLY, line, size)
                connection.push_values = number
            elif line[0] in b"+:_,#(" or (line[0] == 45 and self.takes_errors):
                pending[0] -= 1
            else:
                return self.fail(ERROR_REPLY if line[0] == 45 else NO_REPLY, line, size)
        return DONE

    cdef End fail(self, End end, const char* text, int64_t size) noexcept nogil:
        """Store the received text for the error, and return the reason."""
        self.error_size = <int>min(size, <int64_t>LINE_BYTES_MAX)
        memmove(self.error_text, text, self.error_size)
        return end

    cdef End system_error(self) noexcept nogil:
        self.saved_errno = errno
        return SYSTEM_ERROR

    def check(self, int end):
        """Raise the error for the reason of the load's end, if it is one."""
        if end == SYSTEM_ERROR:
            raise LoadError(f"a connection failed: {os.strerror(self.saved_errno)}")
        if end == NO_MEMORY:
            raise MemoryError
        if end != DONE:
            error_text = f": {self.error_text[:self.error_size]!r}" if self.error_size else ""
            raise LoadError(f"{REASONS[end]}{error_text}, after {self.replied} of {self.requests} requests")


cdef inline int64_t length_of(const char* at, int size) noexcept nogil:
    """Parse a length; -1: a nil; -2: not a number."""
    cdef int64_t number = 0
    cdef int each
    if size == 2 and at[0] == 45 and at[1] == 49:
        return -1
    if size < 1 or size > NUMBER_DIGITS_MAX:
        return -2
    for each in range(size):
        if at[each] < 48 or at[each] > 57:
            return -2
        number = number * 10 + (at[each] - 48)
    return number


def send_all(
    descriptors, bytes request, numbers_at, pipeline, requests, key_range, seed, replies=1, takes_errors=False
):
    """Send requests over connected sockets; return the number of requests, the seconds, and the bytes of the replies.

    Only complete pipelines are sent, so up to pipeline - 1 requests more than `requests`. At each offset in
    `numbers_at`, 12 bytes of the request become a separate random number below key_range (up to 2 ** 32). The sockets
    carry nothing else. A request has `replies` replies, of RESP2 or RESP3; an error is one if takes_errors. Raises
    LoadError.
    """
    if not descriptors or pipeline < 1 or requests < 1 or not 1 <= key_range <= 1 << 32:
        raise ValueError("no connections, no requests, or a range of keys beyond 2 ** 32")
    cdef _Load load = _Load(descriptors, request, numbers_at, pipeline, requests, key_range, seed, replies, takes_errors)
    cdef timespec began, ended
    cdef End end
    with nogil:
        clock_gettime(CLOCK_MONOTONIC, &began)
        end = load.run()
        clock_gettime(CLOCK_MONOTONIC, &ended)
    load.check(end)
    return load.replied, (ended.tv_sec - began.tv_sec) + (ended.tv_nsec - began.tv_nsec) / 1e9, load.received
