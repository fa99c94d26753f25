"""What other compiled modules may use of `encoding`."""

from resp_server.native.dumps cimport Checksums
from resp_server.native.wire cimport Output

cdef Checksums checksums[8]  # of RDB

cdef int put_double(Output* out, double number, bint is_resp3) except -1
cdef int put_text(Output* out, bytes text) except -1
cdef int put_no_frequency(Output* out) except -1
cdef bint put_reply(Output* out, reply, bint is_resp3) except -1
