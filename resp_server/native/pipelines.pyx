# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The batches of the forwarder on a connection to a server: what happens with each request that is forwarded.

`raw_replies.pipelined_connection` has the rest, also requests that the general path sends over the same connection.
"""

from collections import deque

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t
from libc.string cimport memcmp

from resp_server.native.wire cimport number_line

from resp_server.limits import PARTIAL_REPLY_BYTES_MAX


cdef class RequestBatch:
    """Requests that are sent together over one connection (`backends.servers.native.pipeline_batch.PipelineBatch`)."""

    cdef size_t accept_all(self, const uint8_t* start, const uint8_t* end, epochs) except? 0:
        """Take replies from received data; return their size."""
        return 0

    def feed(self, bytes data, size_t start, epochs):
        """Take replies from received data, from an offset on; return the offset after them."""
        cdef const uint8_t* base = <const uint8_t*>PyBytes_AS_STRING(data)
        return start + self.accept_all(base + start, base + PyBytes_GET_SIZE(data), epochs)


cdef class PipelineFields:
    """The fields of a `PipelinedConnection`, and its batches."""

    def __cinit__(self):
        self.in_flight, self.out, self.partial_reply = deque(), [], b""

    cdef int begin_batch(self, RequestBatch batch) except -1:
        """Open a batch, which is sent at the end of the round, in order. The connection is open."""
        if self.batch is not None:
            self.close_batch()
        if not self.out:
            self.at_end_of_round(self.flush)
        self.in_flight.append(batch)
        self.batch = batch
        return 0

    def close_batch(self):
        """Close the open batch to further requests."""
        cdef RequestBatch batch = self.batch
        self.batch = None
        if batch is None:
            return
        if batch.next == batch.count:  # it is empty
            self.in_flight.pop()
            return
        self.awaited_replies += batch.count - batch.next
        self.out.append(batch.close())

    def take_batch_replies(self, bytes data, epochs):
        """Pass the replies at the front of received data to the batches; return the rest of the data."""
        cdef const uint8_t* start
        cdef RequestBatch batch
        cdef size_t took
        if self.partial_reply:
            data, self.partial_reply = self.partial_reply + data, b""
        start = <const uint8_t*>PyBytes_AS_STRING(data)
        took = self.take_replies(start, start + PyBytes_GET_SIZE(data), epochs)
        data = data[took:] if took else data
        batch = self.first_batch()
        if not data or PyBytes_GET_SIZE(data) > <Py_ssize_t>PARTIAL_REPLY_BYTES_MAX or batch is None or not batch.has_partial:
            return data
        self.partial_reply = data
        return b""

    cdef RequestBatch first_batch(self):
        """Return the batch that gets the next reply; None: a request of the general path gets it."""
        cdef object first = self.in_flight[0] if self.in_flight else None
        return <RequestBatch>first if isinstance(first, RequestBatch) else None

    cdef size_t take_replies(self, const uint8_t* start, const uint8_t* end, epochs) except? 0:
        """Pass the replies at the front of received data to the batches; return their size."""
        cdef const uint8_t* at = start
        cdef RequestBatch batch
        cdef size_t before
        while at < end:
            batch = self.first_batch()
            if batch is None:
                break
            if batch is self.batch:
                self.close_batch()
            before = batch.next
            at += batch.accept_all(at, end, epochs)
            if self.first_batch() is not batch:
                break  # this connection was closed while a client handled its reply
            self.awaited_replies -= batch.next - before
            if batch.next < batch.count:
                break
            self.in_flight.popleft()
        return at - start


cdef class ReplyInterceptor(InputInterceptor):
    """Passes replies from a socket of the core to the batches of a connection. epochs: those of all replies."""

    def __init__(self, PipelineFields pipeline, epochs):
        self.pipeline, self.epochs = pipeline, epochs

    cdef size_t intercept(self, const uint8_t* data, size_t size) except? 0:
        cdef PipelineFields pipeline = self.pipeline
        if not pipeline.takes_batches or pipeline.partial_reply:
            return 0
        pipeline.has_received = True
        return pipeline.take_replies(data, data + size, self.epochs)


def past_items(bytes data, Py_ssize_t at, Py_ssize_t missing):
    """Skip complete items of an array reply from `at` on; return the new position, and the missing items: at least one.

    It skips bulk strings, nils and integers in their canonical form, and stops at anything else.
    """
    cdef const uint8_t* base = <const uint8_t*>PyBytes_AS_STRING(data)
    cdef const uint8_t* place = base + at
    cdef const uint8_t* end = base + PyBytes_GET_SIZE(data)
    cdef const uint8_t* digits
    cdef size_t size = 0
    cdef Py_ssize_t took
    while missing > 1 and end - place >= 3:
        if place[0] == c"_" and place[1] == c"\r" and place[2] == c"\n":
            place += 3
        elif place[0] == c"$" and end - place >= 5 and memcmp(place, b"$-1\r\n", 5) == 0:
            place += 5
        elif place[0] == c"$":
            took = number_line(place + 1, end, &size)
            if took <= 0 or <size_t>(end - place) < 1 + took + size + 2:
                break
            digits = place + 1 + took + size
            if digits[0] != c"\r" or digits[1] != c"\n":
                break
            place = digits + 2
        elif place[0] == c":":
            digits = place + 2 if place[1] == c"-" else place + 1
            took = number_line(digits, end, &size)
            if took <= 0:
                break
            place = digits + took
        else:
            break
        missing -= 1
    return place - base, missing
