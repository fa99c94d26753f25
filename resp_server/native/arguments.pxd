"""Arguments of requests, parsed in their usual forms; what has another form is left to the general path."""

from cpython.conversion cimport PyOS_string_to_double
from libc.math cimport INFINITY, fabs
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcmp, memcpy
from posix.strings cimport strcasecmp

from resp_server.native.wire cimport Word

# A score, as in a request, that is longer is parsed by the general path.
cdef enum:
    SCORE_BYTES_MAX = 40


cdef inline int integer(const Word* word, int64_t* number) noexcept nogil:
    """Parse an integer in its canonical form; False for anything else, which the general path parses."""
    cdef size_t at = 0
    cdef int64_t found = 0
    cdef bint is_negative = word.size > 0 and word.at[0] == c"-"
    at = 1 if is_negative else 0
    if word.size == at or word.size - at > 18 or (word.at[at] == c"0" and word.size > 1):
        return False
    while at < word.size:
        if not c"0" <= word.at[at] <= c"9":
            return False
        found = found * 10 + (word.at[at] - c"0")
        at += 1
    number[0] = -found if is_negative else found
    return True


cdef inline bint is_number(const Word* word) noexcept nogil:
    """Return whether a text is an integer in its canonical form that has 64 bits."""
    cdef size_t digits, i
    cdef bint is_negative = word.size > 0 and word.at[0] == c"-"
    cdef const uint8_t* at = word.at + is_negative
    digits = word.size - is_negative
    if not 0 < digits <= 19 or (at[0] == c"0" and word.size > 1):
        return False
    for i in range(digits):
        if not c"0" <= at[i] <= c"9":
            return False
    return digits < 19 or memcmp(at, b"9223372036854775808" if is_negative else b"9223372036854775807", 19) <= 0


cdef inline bint is_word(const Word* word, const char* lower, size_t size) noexcept nogil:
    cdef size_t i
    if word.size != size:
        return False
    for i in range(size):
        if (word.at[i] | 0x20) != <uint8_t>lower[i]:
            return False
    return True


cdef inline bint score_of(const Word* word, double* score, bint* is_exclusive) except -1:
    """Parse the end of a range by score; False for what the general path parses, such as an invalid one."""
    cdef char text[SCORE_BYTES_MAX + 1]
    cdef size_t i, size = word.size
    cdef const uint8_t* at = word.at
    cdef Word digits
    cdef int64_t whole = 0
    is_exclusive[0] = size > 0 and at[0] == c"("
    if is_exclusive[0]:
        at, size = at + 1, size - 1
    if not 0 < size <= SCORE_BYTES_MAX:
        return False
    digits.at, digits.size = at, size
    if size < 16 and integer(&digits, &whole):
        score[0] = <double>whole
        return True
    memcpy(text, at, size)
    text[size] = 0
    if strcasecmp(text, b"inf") == 0 or strcasecmp(text, b"+inf") == 0:
        score[0] = INFINITY
        return True
    if strcasecmp(text, b"-inf") == 0:
        score[0] = -INFINITY
        return True
    for i in range(size):
        if not (c"0" <= text[i] <= c"9" or text[i] in (c"-", c"+", c".", c"e", c"E")):
            return False
    try:
        score[0] = PyOS_string_to_double(text, NULL, NULL)
    except ValueError:
        return False
    return score[0] not in (INFINITY, -INFINITY)


cdef inline bint exact_double(const Word* word, double* number) except -1:
    """Parse a number; False for what the general path parses, such as one that is too small for a double."""
    cdef bint is_exclusive = False
    if not score_of(word, number, &is_exclusive) or is_exclusive:
        return False
    return fabs(number[0]) > 1e-300 or word.size <= 5  # shorter ones are greater, or zero


cdef inline bint text_end(const Word* word, uint8_t no_end, const Word** end, bint* is_exclusive) noexcept nogil:
    """Parse the end of a range by text: `[a`, `(a` (exclusive), or `no_end`, as NULL. False: the general path parses it."""
    is_exclusive[0] = word.size > 0 and word.at[0] == c"("
    if word.size == 1 and word.at[0] == no_end:
        end[0] = NULL
        return True
    end[0] = word
    return word.size > 0 and word.at[0] in (c"[", c"(")
