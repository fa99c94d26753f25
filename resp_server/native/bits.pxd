"""Bits of a value: GETBIT, BITCOUNT, BITPOS and BITFIELD_RO."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from resp_server.native.arguments cimport integer, is_word
from resp_server.native.lookup_batch cimport LookupBatch, Request
from resp_server.native.records cimport ANSWERED, GENERAL, Record
from resp_server.native.rows cimport FLAGS, LENGTHS, rows
from resp_server.native.wire cimport Output, Word, put_line
from state_backend.native.little_endian cimport u64

cdef extern from *:
    """
    #define BIT_OFFSET_MAX (((int64_t)512 << 23) - 1)
    """
    const int64_t BIT_OFFSET_MAX
    int count_leading_zeros "__builtin_clzll"(unsigned long long) noexcept nogil
    int count_ones "__builtin_popcountll"(unsigned long long) noexcept nogil


cdef inline int reply_of_bits(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with a bit of a value, the number of its set bits, or the place of its first bit. A range is in bytes."""
    cdef Output* out = batch.out
    cdef const Word* words = &batch.words[request.first_word]
    cdef size_t arguments = request.words
    cdef int reply = rows[request.command].reply
    cdef int64_t size = <int64_t>record.size, number = 0, first = 0, last = -1, count = 0
    cdef size_t at = 1 if reply == LENGTHS else 2
    cdef bint has_end = arguments >= at + 2
    cdef uint8_t skipped
    if reply != LENGTHS and not integer(&words[1], &number):
        return GENERAL
    if reply == FLAGS:
        if not 0 <= number <= BIT_OFFSET_MAX:
            return GENERAL
        return put_line(out, c":", record.payload[number >> 3] >> (7 - (number & 7)) & 1 if number >> 3 < size else 0) + ANSWERED
    if arguments > at + 2 or (reply == LENGTHS and arguments == 2) or not 0 <= number <= 1:
        return GENERAL
    if arguments > at and not integer(&words[at], &first):
        return GENERAL
    if has_end and not integer(&words[at + 1], &last):
        return GENERAL
    if record.form < 0:
        return put_line(out, c":", 0 if reply == LENGTHS or not number else -1) + ANSWERED
    if reply == LENGTHS and has_end and first < 0 and last < 0 and first > last:
        return put_line(out, c":", 0) + ANSWERED
    first = max(0, first + size) if first < 0 else first
    last = min(max(0, last + size) if last < 0 else last, size - 1)
    if reply == LENGTHS:
        while first <= last:
            if last - first >= 7:
                count += count_ones(u64(record.payload + first))
                first += 8
            else:
                count += count_ones(record.payload[first])
                first += 1
        return put_line(out, c":", count) + ANSWERED
    if first > last:
        return put_line(out, c":", -1) + ANSWERED
    skipped = 0 if number else 0xFF
    while first <= last and record.payload[first] == skipped:
        first += 1
    if first > last:  # a value without an end is followed by zeros
        return put_line(out, c":", 8 * first if not number and not has_end else -1) + ANSWERED
    skipped = record.payload[first] if number else ~record.payload[first]
    return put_line(out, c":", 8 * first + count_leading_zeros(<uint64_t>skipped << 56)) + ANSWERED


cdef inline int reply_of_bit_fields(LookupBatch batch, Request* request, int found, const Record* record) except -2:
    """Reply with integers at positions of a value's bits."""
    cdef Output* out = batch.out
    cdef const Word* words = &batch.words[request.first_word]
    cdef size_t arguments = request.words
    cdef Word digits
    cdef int64_t size = <int64_t>record.size, bits = 0, position = 0, bit
    cdef uint64_t number
    cdef size_t at
    cdef bint is_signed, is_nth
    if arguments % 3 != 1:
        return GENERAL
    put_line(out, c"*", arguments // 3)
    for at in range(1, arguments, 3):
        is_signed = words[at + 1].size > 0 and words[at + 1].at[0] == c"i"
        is_nth = words[at + 2].size > 0 and words[at + 2].at[0] == c"#"
        digits.at, digits.size = words[at + 1].at + 1, words[at + 1].size - 1
        if not is_word(&words[at], b"get", 3) or words[at + 1].size < 2 or words[at + 1].at[0] not in (c"i", c"u"):
            return GENERAL
        if not integer(&digits, &bits) or not 1 <= bits <= (64 if is_signed else 63):
            return GENERAL
        digits.at, digits.size = words[at + 2].at + is_nth, words[at + 2].size - is_nth
        if not integer(&digits, &position) or not 0 <= position <= (BIT_OFFSET_MAX // bits if is_nth else BIT_OFFSET_MAX):
            return GENERAL
        position, number = position * bits if is_nth else position, 0
        for bit in range(position, position + bits):
            number <<= 1
            if bit >> 3 < size:
                number |= record.payload[bit >> 3] >> (7 - (bit & 7)) & 1
        if is_signed:  # the sign is the highest bit
            number = <uint64_t>(<int64_t>(number << (64 - bits)) >> (64 - bits))
        put_line(out, c":", <int64_t>number)
    return ANSWERED
