# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The hot loops of reading Spark's state files: checksums, and the positions of records.

`state_backend.checkpoint.hashes` and `.records` have the same functions in Python, and the formats. Every size is checked
against the buffer before it is used.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize, PyBytes_AS_STRING
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

cdef enum:
    PUT = 1
    DELETE = 16
    MERGE = 17

cdef uint32_t P1 = 0x9E3779B1u
cdef uint32_t P2 = 0x85EBCA77u
cdef uint32_t P3 = 0xC2B2AE3Du
cdef uint32_t P4 = 0x27D4EB2Fu
cdef uint32_t P5 = 0x165667B1u
cdef uint32_t crc_table[256]


cdef void make_crc_table() noexcept:
    cdef uint32_t crc
    cdef int byte, bit
    for byte in range(256):
        crc = <uint32_t>byte
        for bit in range(8):
            crc = (crc >> 1) ^ (0x82F63B78u if crc & 1 else 0u)
        crc_table[byte] = crc


make_crc_table()


cdef inline uint32_t rotated(uint32_t word, int bits) noexcept nogil:
    return (word << bits) | (word >> (32 - bits))


cdef inline uint32_t little(const uint8_t* at) noexcept nogil:
    cdef uint32_t word
    memcpy(&word, at, 4)
    return word


cdef inline int32_t big(const uint8_t* at) noexcept nogil:
    return <int32_t>(
        (<uint32_t>at[0] << 24) | (<uint32_t>at[1] << 16) | (<uint32_t>at[2] << 8) | <uint32_t>at[3]
    )


def xxhash32(bytes data, uint32_t seed):
    """Return XXH32 of bytes."""
    cdef const uint8_t* at = <const uint8_t*>PyBytes_AS_STRING(data)
    cdef int64_t size = len(data)
    cdef const uint8_t* end = at + size
    cdef uint32_t a, b, c, d, total
    if size >= 16:
        a = seed + P1 + P2
        b = seed + P2
        c = seed
        d = seed - P1
        while end - at >= 16:
            a = rotated(a + little(at) * P2, 13) * P1
            b = rotated(b + little(at + 4) * P2, 13) * P1
            c = rotated(c + little(at + 8) * P2, 13) * P1
            d = rotated(d + little(at + 12) * P2, 13) * P1
            at += 16
        total = rotated(a, 1) + rotated(b, 7) + rotated(c, 12) + rotated(d, 18)
    else:
        total = seed + P5
    total += <uint32_t>size
    while end - at >= 4:
        total = rotated(total + little(at) * P3, 17) * P4
        at += 4
    while at < end:
        total = rotated(total + at[0] * P5, 11) * P1
        at += 1
    total = (total ^ (total >> 15)) * P2
    total = (total ^ (total >> 13)) * P3
    return total ^ (total >> 16)


def crc32c(bytes data, uint32_t crc=0):
    """Return CRC-32C of bytes; crc: that of the bytes before."""
    cdef const uint8_t* at = <const uint8_t*>PyBytes_AS_STRING(data)
    cdef const uint8_t* end = at + len(data)
    crc = ~crc
    while at < end:
        crc = crc_table[(crc ^ at[0]) & 0xFF] ^ (crc >> 8)
        at += 1
    return <uint32_t>~crc


def split_records(bytes content, bint has_kinds, int64_t record_bytes_max):
    """Find the complete records at the beginning of a buffer; see `records.split_records`."""
    cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(content)
    cdef int64_t end = len(content), at = 0, key, value, after, key_size, value_size, count = 0
    # A record takes 8 bytes or more.
    cdef int64_t room = end // 8 + 1
    cdef bytes ops = PyBytes_FromStringAndSize(NULL, room)
    cdef bytes table = PyBytes_FromStringAndSize(NULL, 32 * room)
    cdef uint8_t* op_at = <uint8_t*>PyBytes_AS_STRING(ops)
    cdef int64_t* row = <int64_t*>PyBytes_AS_STRING(table)
    cdef uint8_t op
    cdef int lead = 1 if has_kinds else 0
    cdef bint has_ended = False
    cdef object wrong = None
    while at < end:
        op = 0
        if has_kinds:
            op = data[at]
            if op == 0:
                at += 1
                has_ended = True
                break
            if op != PUT and op != DELETE and op != MERGE:
                wrong = f"a record has the unknown kind {op}"
                break
        if at + lead + 4 > end:
            break
        key_size = big(data + at + lead)
        if key_size == -1 and not has_kinds:
            at += 4
            has_ended = True
            break
        if key_size < 0 or key_size > record_bytes_max:
            wrong = f"a key has the size {key_size}"
            break
        key = at + lead + 4
        value = key + key_size + 4
        if value > end:
            break
        value_size = big(data + value - 4)
        if value_size < -1 or value_size > record_bytes_max or (has_kinds and (value_size == -1) != (op == DELETE)):
            wrong = f"a value has the size {value_size}"
            break
        after = value + (value_size if value_size > 0 else 0)
        if after > end:
            break
        if op == 0:
            op = DELETE if value_size == -1 else PUT
        op_at[count] = op
        row[0] = key
        row[1] = key_size
        row[2] = value
        row[3] = value_size
        row += 4
        count += 1
        at = after
    return ops[:count], table[: 32 * count], at, has_ended, wrong
