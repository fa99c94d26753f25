"""Replies in a server's data: their sizes, and what a proxy reads of them."""

from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memchr, memcmp

from resp_server.native.arguments cimport integer
from resp_server.native.wire cimport NUMBER_LINE_BYTES, Output, Word, number_line, put, put_line, write_line

cdef enum:
    LINE_BYTES_MAX = 65536
    DEPTH_MAX = 8
    DIGITS_MAX = 19  # of an integer of 64 bits


cdef inline Py_ssize_t line_bytes(const uint8_t* start, const uint8_t* end) noexcept nogil:
    """Return the size of a line; 0: it is incomplete; -1: it is too long."""
    cdef const uint8_t* at = start
    while at < end:
        at = <const uint8_t*>memchr(at, c"\r", end - at)
        if at == NULL or at + 1 == end:
            break
        if at[1] == c"\n":
            return at + 2 - start if at - start <= LINE_BYTES_MAX else -1
        at += 1
    return 0 if end - start <= LINE_BYTES_MAX else -1


cdef inline bint number_in(const Word* word, size_t* number) noexcept nogil:
    """Parse a word that is a number in its canonical form; return whether it is one."""
    return number_line(word.at, word.at + word.size + 2, number) == <Py_ssize_t>word.size + 2


cdef inline Py_ssize_t bulk_bytes(const uint8_t* at, const uint8_t* end, Word* word) noexcept nogil:
    """Return the size of a string in a complete reply, and find its text; -1: it is something else."""
    cdef size_t size = 0
    cdef Py_ssize_t took = number_line(at + 1, end, &size) if at < end and at[0] == c"$" else 0
    if took <= 0 or <size_t>(end - at) < 1 + took + size + 2:
        return -1
    word.at, word.size = at + 1 + took, size
    return 1 + took + size + 2


cdef inline int put_number(Output* out, int64_t number) except -1:
    """Append a number as a string."""
    cdef char line[NUMBER_LINE_BYTES]
    cdef int size = write_line(line, c"$", number)
    put_line(out, c"$", size - 3)
    return put(out, line + 1, size - 1)


cdef inline int put_scan(Output* out, const uint8_t* at, const uint8_t* cursor_at, const uint8_t* end) except -1:
    """Append a SCAN with the cursor of the backend that the client's cursor names: the number without its lowest bit."""
    cdef Word word
    cdef int64_t cursor = 0
    cdef Py_ssize_t took = bulk_bytes(cursor_at, end, &word)
    integer(&word, &cursor)
    put(out, at, cursor_at - at)
    put_number(out, cursor >> 1)
    return put(out, cursor_at + took, end - cursor_at - took)


cdef inline int64_t integer_in(const char* reply, size_t size) noexcept nogil:
    """Return the number in a reply that is one, of a count of keys."""
    cdef int64_t found = 0
    cdef size_t i
    for i in range(1, size):
        if c"0" <= reply[i] <= c"9":
            found = found * 10 + (reply[i] - c"0")
    return found


cdef inline Py_ssize_t integer_bytes(const uint8_t* start, const uint8_t* end) noexcept nogil:
    """Return the size of a reply that is an integer; 0: it is incomplete; -1: it is something else."""
    cdef const uint8_t* at = start + 1
    cdef const uint8_t* digits
    if at < end and at[0] == c"-":
        at += 1
    digits = at
    while at < end and c"0" <= at[0] <= c"9":
        at += 1
    if at - digits > DIGITS_MAX:
        return -1
    if at == end or (at + 1 == end and at[0] == c"\r" and at > digits):
        return 0
    return at + 2 - start if at > digits and at[0] == c"\r" and at[1] == c"\n" else -1


cdef inline Py_ssize_t reply_bytes(const uint8_t* start, const uint8_t* end, int depth) noexcept nogil:
    """Return the size of a reply; 0: it is incomplete; -1: the general path handles it.

    The general path handles errors, pushes, attributes, blob errors, verbatim strings and streamed strings.
    """
    cdef const uint8_t* at = start
    cdef size_t size = 0, i
    cdef Py_ssize_t took
    if at == end:
        return 0
    if (at[0] == c"$" or at[0] == c"*") and end - at >= 2 and at[1] == c"-":
        if end - at < 5:
            return 0 if memcmp(at + 1, b"-1\r\n", end - at - 1) == 0 else -1
        return 5 if memcmp(at + 1, b"-1\r\n", 4) == 0 else -1
    if at[0] == c"$":
        took = number_line(at + 1, end, &size)
        if took <= 0:
            return took
        at += 1 + took
        if <size_t>(end - at) < size + 2:
            return 0
        return at + size + 2 - start if at[size] == c"\r" and at[size + 1] == c"\n" else -1
    if (at[0] == c"*" or at[0] == c"%" or at[0] == c"~") and depth < DEPTH_MAX:
        took = number_line(at + 1, end, &size)
        if took <= 0:
            return took
        at += 1 + took
        if start[0] == c"%":
            size *= 2
        for i in range(size):
            took = reply_bytes(at, end, depth + 1)
            if took <= 0:
                return took
            at += took
        return at - start
    if at[0] == c"+" or at[0] == c"_" or at[0] == c"#" or at[0] == c"," or at[0] == c"(":
        return line_bytes(at, end)
    if at[0] == c":":
        return integer_bytes(at, end)
    return -1
