"""Patterns of keys, as Redis matches them."""

from libc.stdint cimport int8_t, uint8_t, uint64_t

cdef enum:
    # Bytes of patterns that a request's keys are compared with: those of its user, or of a scan. Some 3 ms.
    GLOB_STEPS_MAX = 1 << 20


cdef inline bint matches_class(const uint8_t** pattern, const uint8_t* end, uint8_t byte) noexcept nogil:
    """Return whether a byte is in the class that begins after a `[`; move the pattern to the class's last byte."""
    cdef const uint8_t* at = pattern[0]
    cdef inline bint is_not = at < end and at[0] == c"^", found = False
    cdef int8_t first, last  # Redis compares the bytes of a range as signed characters
    if is_not:
        at += 1
    while True:
        if end - at >= 2 and at[0] == c"\\":
            at += 1
            found |= at[0] == byte
        elif at >= end:
            at -= 1
            break
        elif at[0] == c"]":
            break
        elif end - at >= 3 and at[1] == c"-":
            first, last = <int8_t>at[0], <int8_t>at[2]
            at += 2
            found |= min(first, last) <= <int8_t>byte <= max(first, last)
        else:
            found |= at[0] == byte
        at += 1
    pattern[0] = at
    return found != is_not


cdef inline bint glob(const uint8_t* pattern, size_t pattern_size, const uint8_t* text, size_t size, uint64_t* steps) noexcept nogil:
    """Match a glob as Redis does, with backtracking to the last star only, which is sufficient.

    steps: the bytes of patterns that were compared are added. Above GLOB_STEPS_MAX, the result is wrong.
    """
    cdef const uint8_t* end = pattern + pattern_size
    cdef const uint8_t* text_end = text + size
    cdef const uint8_t* star = NULL
    cdef const uint8_t* star_text = NULL
    cdef const uint8_t* at = pattern
    cdef const uint8_t* begun = pattern
    cdef inline bint fits
    if not size:  # as in Redis, an empty text matches only an empty pattern and `*`
        return not pattern_size or (pattern_size == 1 and pattern[0] == c"*")
    while True:
        if pattern < end and pattern[0] == c"*":
            while pattern < end and pattern[0] == c"*":
                pattern += 1
            if pattern == end:
                return True
            star, star_text = pattern, text
            continue
        if text == text_end:
            return pattern == end
        fits = False
        if pattern < end:
            at = pattern
            if at[0] == c"?":
                fits = True
            elif at[0] == c"[":
                at += 1
                fits = matches_class(&at, end, text[0])
            else:
                if at[0] == c"\\" and end - at >= 2:
                    at += 1
                fits = at[0] == text[0]
            if fits:
                pattern, text = at + 1, text + 1
                continue
        steps[0] += at + 1 - begun
        if star == NULL or steps[0] > GLOB_STEPS_MAX:
            return False
        star_text += 1
        pattern, text, at, begun = star, star_text, star, star
