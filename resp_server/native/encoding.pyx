# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Replies of commands' functions, and numbers, encoded as `protocol.replies` does."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.conversion cimport PyOS_double_to_string
from cpython.mem cimport PyMem_Free
from libc.math cimport fabs, signbit
from libc.stdint cimport int64_t
from libc.string cimport strlen

from resp_server.native.wire cimport NUMBER_LINE_BYTES, Output, put, put_bulk, put_double_text, put_line, put_nil, write_line

from resp_server.protocol.doubles import double_text
from resp_server.protocol.errors import no_frequency
from resp_server.protocol.rdb_encoder import checksum_table
from resp_server.protocol.replies import Frames, OK, ReplySet, Verbatim

cdef bytes NO_FREQUENCY = b"-%b\r\n" % no_frequency().line


cdef int put_double(Output* out, double number, bint is_resp3) except -1:
    """Write a number as `double_text` does. Integers, and numbers that Python formats alike, need no Python object."""
    cdef char line[NUMBER_LINE_BYTES]
    cdef int64_t whole
    cdef char* shortest
    cdef bytes text
    if -4611686018427387904.0 <= number <= 4611686018427387904.0:
        whole = <int64_t>number
        if <double>whole == number and (whole or not signbit(number)):
            if is_resp3:
                return put_line(out, c",", whole)
            return put_bulk(out, line + 1, write_line(line, c"$", whole) - 3)
    if 1e-3 <= fabs(number) < 1e4:
        shortest = PyOS_double_to_string(number, c"r", 0, 0, NULL)
        try:
            return put_double_text(out, shortest, strlen(shortest), is_resp3)
        finally:
            PyMem_Free(shortest)
    text = double_text(number)
    return put_double_text(out, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text), is_resp3)


cdef int put_text(Output* out, bytes text) except -1:
    return put(out, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))


cdef bint put_reply(Output* out, reply, bint is_resp3) except -1:
    """Write a reply as `protocol.replies` does; False if it has a value of a rare type, and only a part of it is written."""
    kind = type(reply)
    if kind is bytes:
        put_bulk(out, PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply))
    elif kind is int:
        put_line(out, c":", reply)
    elif reply is OK:
        put(out, b"+OK\r\n", 5)
    elif reply is None:
        put_nil(out, is_resp3)
    elif kind is list or kind is tuple:
        put_line(out, c"*", len(reply))
        for each in reply:
            if not put_reply(out, each, is_resp3):
                return False
    elif kind is dict:
        put_line(out, c"%" if is_resp3 else c"*", len(reply) if is_resp3 else 2 * len(reply))
        for name, each in (<dict>reply).items():
            if not (put_reply(out, name, is_resp3) and put_reply(out, each, is_resp3)):
                return False
    elif kind is ReplySet:
        put_line(out, c"~" if is_resp3 else c"*", len(reply))
        for each in reply:
            if not put_reply(out, each, is_resp3):
                return False
    elif kind is str:
        put(out, b"+", 1)
        put_text(out, (<str>reply).encode("utf-8", "surrogateescape"))
        put(out, b"\r\n", 2)
    elif kind is Frames:
        put_text(out, reply.frames)
    elif kind is Verbatim:
        if is_resp3:
            put_line(out, c"=", len(reply.text) + 4)
            put(out, b"txt:", 4)
            put_text(out, reply.text)
            put(out, b"\r\n", 2)
        else:
            put_reply(out, reply.text, is_resp3)
    else:
        return False
    return True


cdef int put_no_frequency(Output* out) except -1:
    """Write the error of OBJECT FREQ."""
    return put_text(out, NO_FREQUENCY)


def _fill_checksums():
    cdef int byte, i
    for byte, checksum in enumerate(checksum_table()):
        checksums[0][byte] = checksum
    for i in range(1, 8):
        for byte in range(256):
            checksums[i][byte] = checksums[0][checksums[i - 1][byte] & 0xFF] ^ checksums[i - 1][byte] >> 8


_fill_checksums()
