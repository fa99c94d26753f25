# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The fast path for frequent reads: it parses requests in a buffer, reads records in LMDB's pages and writes replies.

`Core.answer_all` parses requests at the front of a buffer, looks all their keys up together (see
`state_backend.native.lookup`), and writes the replies in order. It stops before the first request that it does not
answer: an unknown command, a wrong number of arguments, a wrong type, a value stored in pieces, a key of another node,
a command or key that the user may not use. The general path answers this request. So the core makes no error replies,
and its replies are those of the general path, byte for byte.

The core uses no socket and no session. It holds the GIL, and copies values into its output.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.conversion cimport PyOS_double_to_string
from cpython.mem cimport PyMem_Free
from cpython.time cimport monotonic_ns
from libc.math cimport fabs, signbit
from libc.stdint cimport int8_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memchr, memcmp, memcpy, memmove, strlen

from resp_server.native.wire cimport (
    NUMBER_LINE_BYTES, Output, Spec, Word, command_of, cut, number_line, put, put_line, reserve, set_spec, write_line
)
from state_backend.native.little_endian cimport f64, u16, u32, u64
from state_backend.native.lookup cimport (
    EXPIRY_AT, FORM_AT, FOUND, HEADER_BYTES, MISSING, Lookup, Pages, crc16_of, crc32_of, slot_of
)

from resp_server.protocol.doubles import double_text
from state_backend.model.errors import StoreError

cdef extern from *:
    int count_leading_zeros "__builtin_clzll"(unsigned long long) noexcept nogil

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *)

# The records of `state_backend.lmdb.record_format`.
cdef enum:
    VALUE = 0
    SMALL_MAP = 1
    SHORT_LIST = 2
    SMALL_SET = 3
    SMALL_SORTED_SET = 4
    LARGE_MAP = 5
    LONG_LIST = 6
    LONG_VALUE = 7
    LARGE_SET = 8
    LARGE_SORTED_SET = 9

# In the order of the commands' numbers (`core.pxd`), each with the minimum and maximum of words after its name; -1: any
# number.
NAMES = (
    (b"get", 1, 1), (b"mget", 1, -1), (b"hget", 2, 2), (b"hmget", 2, -1), (b"hgetall", 1, 1), (b"lrange", 3, 3),
    (b"lindex", 2, 2), (b"exists", 1, -1), (b"strlen", 1, 1), (b"sismember", 2, 2), (b"smismember", 2, -1),
    (b"zscore", 2, 2), (b"zmscore", 2, -1), (b"zrank", 2, 2), (b"zrevrank", 2, 2), (b"zrange", 3, 4),
    (b"zrevrange", 3, 4), (b"ttl", 1, 1), (b"pttl", 1, 1), (b"type", 1, 1), (b"ping", 0, 1), (b"state|mget", 1, -1),
)

cdef Spec specs[COMMANDS]


def _fill_specs():
    for number, (name, least, most) in enumerate(NAMES):
        set_spec(&specs[number], name, least, <uint32_t><int>most)


_fill_specs()

# The result of a request. GENERAL: the general path has to answer it.
cdef enum:
    GENERAL = -1
    ANSWERED = 1

# Steps of matching a request's keys with the user's patterns: bytes of a key times bytes of a pattern.
cdef enum:
    GLOB_STEPS_MAX = 1 << 20

# More members than any sorted set has. Counts in a tree are masked with it, so that a sum cannot overflow.
cdef int64_t RANKS_MAX = (1 << 53) - 1

# A key's job, if it is not the index of one.
cdef enum:
    NO_JOB = -1
    UNDECIDED = -2

# A tree that is not damaged is not deeper. A damaged one may have a cycle.
cdef enum:
    TREE_DEPTH_MAX = 16

# Whether a key, field or member exists and has not expired.
cdef enum:
    ABSENT = 0
    LIVE = 1


# --- output -----------------------------------------------------------------------------------------------------------


cdef inline int put_bulk(Output* out, const void* data, size_t size) except -1:
    reserve(out, size + 32)
    put_line(out, c"$", size)
    memcpy(out.data + out.used, data, size)
    out.used += size
    out.data[out.used], out.data[out.used + 1] = c"\r", c"\n"
    out.used += 2
    return 0


cdef inline int put_nil(Output* out, bint is_resp3) except -1:
    return put(out, b"_\r\n", 3) if is_resp3 else put(out, b"$-1\r\n", 5)


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


cdef int put_double_text(Output* out, const char* text, size_t size, bint is_resp3) except -1:
    if not is_resp3:
        return put_bulk(out, text, size)
    put(out, b",", 1)
    put(out, text, size)
    return put(out, b"\r\n", 2)


# --- requests ---------------------------------------------------------------------------------------------------------


cdef int integer(const Word* word, int64_t* number) noexcept nogil:
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


cdef inline bint is_word(const Word* word, const char* lower, size_t size) noexcept nogil:
    cdef size_t i
    if word.size != size:
        return False
    for i in range(size):
        if (word.at[i] | 0x20) != <uint8_t>lower[i]:
            return False
    return True


cdef inline int command_at(const Word* words, size_t count) noexcept nogil:
    """Return the number of a request's command; -1 for one that the core does not answer."""
    cdef int command = command_of(specs, STATE_MGET, words)
    if command < 0 and count > 2 and is_word(words, b"state", 5) and is_word(words + 1, b"mget", 4):
        return STATE_MGET
    return command


# --- access control ---------------------------------------------------------------------------------------------------


cdef bint matches_class(const uint8_t** pattern, const uint8_t* end, uint8_t byte) noexcept nogil:
    """Return whether a byte is in the class that begins after a `[`; move the pattern to the class's last byte."""
    cdef const uint8_t* at = pattern[0]
    cdef bint is_not = at < end and at[0] == c"^", found = False
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


cdef bint glob(const uint8_t* pattern, size_t pattern_size, const uint8_t* text, size_t size) noexcept nogil:
    """Match a glob as Redis does, with backtracking to the last star only, which is sufficient."""
    cdef const uint8_t* end = pattern + pattern_size
    cdef const uint8_t* text_end = text + size
    cdef const uint8_t* star = NULL
    cdef const uint8_t* star_text = NULL
    cdef const uint8_t* at
    cdef bint fits
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
        if star == NULL:
            return False
        star_text += 1
        pattern, text = star, star_text


cdef class Rules:
    """A user's permissions for the core's commands: per selector, allowed commands and key patterns."""

    def __init__(self, selectors):
        """selectors: for each, the names of allowed commands, and the patterns of readable keys; None: all keys."""
        cdef int i = 0
        self.patterns = []
        names = [name for name, _, _ in NAMES]
        for allowed, patterns in selectors[:SELECTORS_MAX]:
            self.commands[i] = sum(1 << names.index(name) for name in allowed if name in names)
            self.patterns.append(None if patterns is None else list(patterns))
            i += 1
        self.selectors = i

    cdef bint allow(self, int command, const Word* keys, size_t count):
        cdef int i
        for i in range(self.selectors):
            if self.commands[i] >> command & 1 and self.allow_keys(self.patterns[i], keys, count):
                return True
        return False

    cdef bint allow_keys(self, list patterns, const Word* keys, size_t count):
        cdef size_t i
        cdef bytes pattern
        cdef bint found
        cdef uint64_t steps = 0
        if patterns is None:
            return True
        for i in range(count):
            found = False
            for pattern in patterns:
                steps += <uint64_t>PyBytes_GET_SIZE(pattern) * keys[i].size
                if steps > GLOB_STEPS_MAX:
                    return False  # too slow: the general path uses a regular expression
                if glob(
                    <const uint8_t*>PyBytes_AS_STRING(pattern), PyBytes_GET_SIZE(pattern), keys[i].at, keys[i].size
                ):
                    found = True
                    break
            if not found:
                return False
        return True


def untrack(words):
    """Have the garbage collector skip a list of words: each of its visits to a million words takes some 10 ms.

    Only for a list that never is part of a cycle. It is freed as any other list, with its last reference.
    """
    PyObject_GC_UnTrack(<void *>words)


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


def glob_matches(bytes pattern, bytes text):
    """Return whether a glob matches a text; for tests."""
    return bool(
        glob(
            <const uint8_t*>PyBytes_AS_STRING(pattern), PyBytes_GET_SIZE(pattern),
            <const uint8_t*>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text),
        )
    )


cdef class KeyFilter:
    """The keys about which a core may answer. It answers only about stored ones, as another process has the others."""

    cdef bint admits(self, const Word* keys, size_t count) noexcept:
        """Return whether the core may answer a request with these keys."""
        return False


# --- records ----------------------------------------------------------------------------------------------------------


cdef inline int read_registry_file(const Lookup* lookup, const Word* name, int64_t now_ms, Record* record) noexcept nogil:
    """Parse a record: LIVE, ABSENT, or GENERAL if another name has the same hash, or the record is damaged."""
    cdef uint32_t name_size
    record.form, record.expire_at_ms, record.payload, record.size = -1, 0, NULL, 0
    if lookup.outcome == MISSING:
        return ABSENT
    if lookup.outcome != FOUND or lookup.size < HEADER_BYTES:
        return GENERAL
    name_size = u32(lookup.record)
    if name_size != name.size or lookup.size - HEADER_BYTES < name_size:
        return GENERAL
    if memcmp(lookup.record + HEADER_BYTES, name.at, name_size) != 0:
        return GENERAL
    record.expire_at_ms = <int64_t>u64(lookup.record + EXPIRY_AT)
    if record.expire_at_ms < 0:
        return GENERAL
    if 0 < record.expire_at_ms <= now_ms:
        return ABSENT
    record.form = lookup.record[FORM_AT]
    record.payload = lookup.record + HEADER_BYTES + name_size
    record.size = lookup.size - HEADER_BYTES - name_size
    if record.form == LARGE_MAP and (record.size < 32 or 0 < <int64_t>u64(record.payload + 24) <= now_ms):
        return GENERAL  # some fields have expired, perhaps all
    return LIVE


# Packed maps: count u16 | offsets u32... | body. Packed lists and sets: count u32 | ends u32... | body.
# Packed sorted sets: count u32 | scores f64... | lengths u32... | members.
# Tree nodes: a packed sorted set, called a run | of an inner node: child numbers u64..., then counts u64... | level u8.
# (See `state_backend.lmdb.ranks`. A count is the members in a child and in those before it.)

cdef struct ByteRange:  # of a record
    const uint8_t* at
    size_t size


cdef int map_value(const Record* record, const Word* field, ByteRange* value) noexcept nogil:
    """Find a field's value in a packed map, encoded for a reply: LIVE, ABSENT, or GENERAL if the map is damaged."""
    cdef char line[NUMBER_LINE_BYTES]
    cdef size_t line_size = write_line(line, c"$", field.size)
    cdef size_t count, start, i, at, end, wanted = line_size + field.size + 2
    if record.size < 2:
        return GENERAL
    count = u16(record.payload)
    start = 2 + 4 * count
    if start > record.size:
        return GENERAL
    for i in range(count):
        at = start + u32(record.payload + 2 + 4 * i)
        end = start + u32(record.payload + 6 + 4 * i) if i + 1 < count else record.size
        if end > record.size or at > end:
            return GENERAL
        if end - at < wanted or memcmp(record.payload + at, line, line_size) != 0:
            continue
        if memcmp(record.payload + at + line_size, field.at, field.size) == 0:
            value.at, value.size = record.payload + at + wanted, end - at - wanted
            return LIVE
    return ABSENT


cdef int list_range(const Record* record, size_t first, size_t end, ByteRange* part) noexcept nogil:
    """Find a range of a packed list, encoded for a reply."""
    cdef size_t count = u32(record.payload), body = 4 + 4 * count, start, stop
    start = u32(record.payload + 4 * first) if first else 0
    stop = u32(record.payload + 4 * end) if end else 0
    if stop < start or body + stop > record.size:
        return GENERAL
    part.at, part.size = record.payload + body + start, stop - start
    return LIVE


cdef int64_t list_count(const Record* record) noexcept nogil:
    """Return the number of elements of a packed list or set; -1 if it is damaged."""
    if record.size < 4 or record.size < 4 + 4 * <size_t>u32(record.payload):
        return -1
    return u32(record.payload)


cdef int set_has(const Record* record, const Word* member) noexcept nogil:
    """Return whether a packed set has a member: LIVE, ABSENT, or GENERAL if it is damaged."""
    cdef char line[NUMBER_LINE_BYTES]
    cdef size_t line_size = write_line(line, c"$", member.size), wanted = line_size + member.size + 2
    cdef size_t body, at = 0, end, i
    cdef int64_t count = list_count(record)
    if count < 0:
        return GENERAL
    body = 4 + 4 * <size_t>count
    for i in range(<size_t>count):
        end = u32(record.payload + 4 + 4 * i)
        if end < at or body + end > record.size:
            return GENERAL
        if end - at == wanted and memcmp(record.payload + body + at, line, line_size) == 0:
            if memcmp(record.payload + body + at + line_size, member.at, member.size) == 0:
                return LIVE
        at = end
    return ABSENT


cdef int64_t members_in_run(const uint8_t* run, size_t size) noexcept nogil:
    """Return the number of members of a packed sorted set (a run); -1 if it is damaged."""
    if size < 4 or size < 4 + 12 * <size_t>u32(run):
        return -1
    return u32(run)


cdef int64_t index_in_run(const uint8_t* run, size_t size, const Word* member) noexcept nogil:
    """Return a member's index in a packed sorted set; -1: absent, -2: the set is damaged."""
    cdef int64_t count = members_in_run(run, size), i
    cdef size_t at, length
    if count < 0:
        return -2
    at = 4 + 12 * <size_t>count
    for i in range(count):
        length = u32(run + 4 + 8 * count + 4 * i)
        if length > size - at:
            return -2
        if length == member.size and memcmp(run + at, member.at, length) == 0:
            return i
        at += length
    return -1


cdef int64_t rank_in_run(
    const uint8_t* run, size_t size, double score, const Word* member, bint is_after
) noexcept nogil:
    """Return how many members of a run are before (score, member); -1 if the run is damaged.

    is_after: an equal member counts, too.
    """
    cdef int64_t count = members_in_run(run, size), low = 0, high, middle, i
    cdef const uint8_t* scores = run + 4
    cdef size_t at, length
    cdef int order
    if count < 0:
        return -1
    high = count
    while low < high:
        middle = (low + high) >> 1
        if f64(scores + 8 * middle) < score:
            low = middle + 1
        else:
            high = middle
    if low == count or f64(scores + 8 * low) != score:
        return low
    at = 4 + 12 * <size_t>count
    for i in range(low):
        at += u32(run + 4 + 8 * count + 4 * i)
    for i in range(low, count):
        if f64(scores + 8 * i) != score:
            return i
        length = u32(run + 4 + 8 * count + 4 * i)
        if at > size or length > size - at:
            return -1
        order = memcmp(run + at, member.at, min(length, member.size))
        if order == 0:
            order = -1 if length < member.size else 1 if length > member.size else 0
        if order > 0 or (order == 0 and not is_after):
            return i
        at += length
    return count


# --- the core ---------------------------------------------------------------------------------------------------------


cdef class JobPages:
    """A job's LMDB pages, refreshed once per buffer."""

    cdef object name
    cdef bytes prefix
    cdef Pages pages
    cdef bint is_readable
    cdef uint64_t renewal  # the view's renewal for which the pages were refreshed
    cdef int64_t now_ms  # at least the epoch's clock
    cdef object missing_slots  # slots that the store lacks; None: none

    def __init__(self, name):
        self.name = name
        self.prefix = name.encode()
        self.renewal = 0


cdef class Core:
    """Answers requests from a view of jobs. Used by one event loop's thread."""

    def __cinit__(self):
        self.view, self.routes_version, self.jobs, self.job_by_prefix = None, 0, [], {}
        self.only_job, self.last_job, self.last_command = NO_JOB, 0, -1

    cdef size_t answer_all(
        self, const uint8_t* start, size_t size, int protocol, Rules rules, list keys_read
    ) except? 0:
        """Answer requests from the view of the last `use_view`; return their size."""
        cdef const uint8_t* at = start
        cdef const uint8_t* end = start + size
        cdef const uint8_t* stopped
        cdef Lookahead* lookahead
        cdef uint32_t first, end_request
        self.limit = self.out.used + OUTPUT_BYTES_MAX
        cdef int command
        for command in range(COMMANDS):
            self.answered[command] = 0
        self.is_resp3, self.is_incomplete, self.is_full = protocol >= 3, False, False
        while at < end and self.out.used < self.limit:
            if self.has_lookahead(at):
                lookahead = &self.lookaheads[self.next_lookahead]
                self.next_lookahead += 1
                first, end_request, stopped, self.is_incomplete = (
                    lookahead.first_request, lookahead.end_request, lookahead.stopped, lookahead.is_incomplete
                )
            else:
                self.drop_lookaheads()
                stopped = self.cut_requests(at, end, rules)
                if stopped == at:
                    break
                self.find_keys_and_members()
                first, end_request = 0, <uint32_t>self.request_count
            at = self.reply_all(first, end_request, stopped, keys_read)
            if at != stopped:
                self.is_incomplete = False
            if at != stopped or self.is_incomplete:
                break
        self.is_full = self.is_full or (at < end and self.out.used >= self.limit)
        return at - start

    cdef int use_view(self, view, bint is_node) except -1:
        """Read the view's current jobs and slots. is_node: the server is a node of a cluster."""
        cdef uint64_t renewal = view.renewals
        self.is_node = is_node
        if renewal != self.renewal:
            self.drop_lookaheads()  # they read an older epoch
        self.now = view.now_ms
        self.now_ms, self.renewal = self.now, renewal
        if view is not self.view or self.routes_version != <uint64_t>view.routes_version:
            self.drop_lookaheads()
            self.view, self.routes_version = view, view.routes_version
            names = view.job_names()
            self.jobs = [JobPages(name) for name in names]
            self.job_by_prefix = {(<JobPages>each).prefix: i for i, each in enumerate(self.jobs)}
            self.only_job = 0 if view.has_single_job else NO_JOB
            self.last_job = 0
            self.owned_slots_object = view.served_slots
            self.owned_slots = NULL
            if self.owned_slots_object is not None:
                self.owned_slots = <const uint8_t*>PyBytes_AS_STRING(self.owned_slots_object)
        return 0

    cdef bint is_newest(self):
        """Return whether the view, renewed last for `use_view`, is at the newest epochs of the jobs that were read since."""
        cdef JobPages job
        if self.view is None or self.renewal != <uint64_t>self.view.renewals:
            return False
        for job in self.jobs:
            if job.renewal == self.renewal and not (job.is_readable and job.pages.is_newest()):
                return False
        return True

    cdef int job_at(self, const Word* key) except -3:
        """Return the index of a key's job, NO_JOB, or UNDECIDED: the general path has to find the job."""
        cdef const uint8_t* colon
        cdef JobPages job
        if self.only_job >= 0:
            return self.only_job
        colon = <const uint8_t*>memchr(key.at, c":", key.size) if key.size else NULL
        if colon != NULL and self.last_job < len(self.jobs):
            job = <JobPages>self.jobs[self.last_job]
            if PyBytes_GET_SIZE(job.prefix) == colon - key.at:
                if memcmp(PyBytes_AS_STRING(job.prefix), key.at, colon - key.at) == 0:
                    return self.last_job
        try:
            name = self.view.job_of(PyBytes_FromStringAndSize(<const char*>key.at, key.size))
        except StoreError:
            return UNDECIDED
        if name is None:
            return NO_JOB
        self.last_job = self.job_by_prefix[(<str>name).encode()]
        return self.last_job

    cdef bint refresh_job(self, int index) except -1:
        """Move a job to its newest epoch, once per buffer; False if its pages cannot be read."""
        cdef JobPages job = <JobPages>self.jobs[index]
        if job.renewal == self.renewal:
            return job.is_readable
        try:
            snapshot = self.view.snapshot_of(job.name)
        except StoreError:
            return False
        job.pages = snapshot.pages
        job.is_readable = job.pages is not None
        job.missing_slots = self.view.slots_missing(job.name)
        if job.is_readable:
            job.now_ms = snapshot.now_ms
        job.renewal = self.renewal
        return job.is_readable

    cdef bint add_lookahead(self, const uint8_t* start, size_t size, Rules rules) except -1:
        """Parse a buffer's requests, and add their look-ups to those of other buffers.

        False if not all of its complete requests were added: there was no room, or the core does not answer one.
        """
        cdef Lookahead* lookahead = &self.lookaheads[self.lookahead_count]
        cdef const uint8_t* end = start + size
        self.is_incomplete = False
        lookahead.start, lookahead.first_request = start, <uint32_t>self.request_count
        lookahead.stopped = self.cut_requests(start, end, rules)
        if lookahead.stopped > start:
            lookahead.end_request, lookahead.is_incomplete = <uint32_t>self.request_count, self.is_incomplete
            self.lookahead_count += 1
        return self.lookahead_count < REQUESTS_MAX and (self.is_incomplete or lookahead.stopped == end)

    cdef int drop_lookaheads(self) noexcept:
        self.lookahead_count = self.next_lookahead = 0
        self.word_count = self.request_count = self.lookup_count = 0
        return 0

    cdef bint has_lookahead(self, const uint8_t* start) noexcept:
        """Return whether the next lookahead begins at `start`."""
        while self.next_lookahead < self.lookahead_count and self.lookaheads[self.next_lookahead].start < start:
            self.next_lookahead += 1  # its connection was closed before it was answered
        return self.next_lookahead < self.lookahead_count and self.lookaheads[self.next_lookahead].start == start

    cdef const uint8_t* cut_requests(self, const uint8_t* at, const uint8_t* end, Rules rules) except NULL:
        """Parse requests and add their look-ups; return where parsing stopped.

        It stops before a request that the core does not answer, that is incomplete, or for which there is no room.
        """
        cdef size_t count = 0, names
        cdef Py_ssize_t took
        cdef Word* words
        cdef Request* request
        cdef int command
        cdef const Spec* spec
        while self.request_count < REQUESTS_MAX:
            words = self.words + self.word_count
            if WORDS_MAX - self.word_count < REQUEST_WORDS_MAX:
                break
            if LOOKUPS_MAX - self.lookup_count < 2 * REQUEST_WORDS_MAX:
                break
            took = cut(at, end, words, REQUEST_WORDS_MAX, WORD_BYTES_MAX, &count)
            if took <= 0:
                self.is_incomplete = took == 0
                break
            command = command_at(words, count)
            if command < 0:
                break
            names = 2 if command == STATE_MGET else 1
            spec = &specs[command]
            if not spec.least <= count - names <= spec.most:
                break
            request = &self.requests[self.request_count]
            request.at, request.command, request.words = at, command, <uint32_t>(count - names)
            request.first_word = <uint32_t>(self.word_count + names)
            request.keys = 1
            if command in (MGET, EXISTS, STATE_MGET):
                request.keys = request.words
            elif command == PING:
                request.keys = 0
            request.first_lookup = <uint32_t>self.lookup_count
            request.members = 0
            if rules is not None and not rules.allow(command, words + names, request.keys):
                break
            if self.key_filter is not None and not self.key_filter.admits(words + names, request.keys):
                break
            if not self.prepare_lookups(request):
                break
            self.word_count += count
            self.request_count += 1
            at += took
        return at

    cdef list cut_words(self, const uint8_t** start, const uint8_t* end, bint is_all):
        """Parse requests for the general path, up to the first one that the core may answer; move `start` past them.

        is_all: parse those, too. It is set after the core left a request with a known command unanswered.
        """
        cdef list requests = [], words
        cdef const uint8_t* at = start[0]
        cdef size_t count = 0, i
        cdef Py_ssize_t took
        end = min(end, at + GENERAL_BYTES_MAX)
        while len(requests) < REQUESTS_MAX:
            took = cut(at, end, self.words, REQUEST_WORDS_MAX, WORD_BYTES_MAX, &count)
            if took <= 0:
                break
            if not is_all and command_at(self.words, count) >= 0:
                if requests:
                    break
                is_all = True
            words = []
            for i in range(count):
                words.append(PyBytes_FromStringAndSize(<const char*>self.words[i].at, self.words[i].size))
            requests.append(words)
            at += took
        start[0] = at
        return requests

    cdef bint prepare_lookups(self, Request* request) except -1:
        """Prepare the look-ups of a request's keys; False if the general path has to answer."""
        cdef size_t i
        cdef Word* key
        cdef Lookup* lookup
        cdef uint16_t slot, first_slot = 0
        cdef int job
        for i in range(request.keys):
            key = &self.words[request.first_word + i]
            slot = slot_of(key.at, key.size)
            if i == 0:
                first_slot = slot
            if self.is_node and slot != first_slot and request.command != STATE_MGET:
                return False
            if self.owned_slots != NULL and not self.owned_slots[slot]:
                return False
            job = self.job_at(key)
            if job == UNDECIDED:
                return False
            lookup = &self.lookups[self.lookup_count + i]
            lookup.high = (<uint64_t>slot << 32 | crc32_of(key.at, key.size)) << 16
            lookup.low, lookup.bytes_, lookup.outcome = 0, 6, MISSING
            self.job_of[self.lookup_count + i] = job
            self.clock_of[self.lookup_count + i] = self.now_ms
            if job >= 0:
                if not self.refresh_job(job):
                    return False
                self.clock_of[self.lookup_count + i] = (<JobPages>self.jobs[job]).now_ms
                missing_slots = (<JobPages>self.jobs[job]).missing_slots
                if missing_slots is not None and slot in missing_slots:
                    return False
        self.lookup_count += request.keys
        return True

    cdef int read(self, size_t index, const Word* name, Record* record) noexcept:
        return read_registry_file(&self.lookups[index], name, self.clock_of[index], record)

    cdef int read_key(self, size_t index, const Word* key, Record* record) noexcept:
        """Read a key's record. With a filter of keys, the general path answers about missing ones."""
        cdef int found = self.read(index, key, record)
        return GENERAL if found == ABSENT and self.key_filter is not None else found

    cdef int find_keys_and_members(self) except -1:
        """Look up the keys of all requests, then members of large collections, then ranks of these members."""
        cdef size_t keys = self.lookup_count
        self.find_in_jobs(0, keys, False)
        self.prepare_member_lookups()
        if self.lookup_count > keys:
            self.find_in_jobs(keys, self.lookup_count, True)
            self.find_ranks()
        return 0

    cdef int find_in_jobs(self, size_t first, size_t end, bint is_of_members) except -1:
        cdef size_t i, count, done = 0
        cdef int job
        cdef Pages pages
        for job in range(<int>len(self.jobs)):
            if done == end - first:
                break
            count = 0
            for i in range(first, end):
                if self.job_of[i] == job:
                    self.job_lookups[count] = &self.lookups[i]
                    count += 1
            if count:
                pages = (<JobPages>self.jobs[job]).pages
                pages.find(&pages.fields if is_of_members else &pages.keys, self.job_lookups, count)
            done += count
        return 0

    cdef int prepare_member_lookups(self) except -1:
        """Prepare look-ups of members and fields that have records of their own."""
        cdef size_t i, j
        cdef Request* request
        cdef Record record
        cdef Lookup* lookup
        cdef Word* member
        cdef int form
        for i in range(self.request_count):
            request = &self.requests[i]
            if request.command in (HGET, HMGET):
                form = LARGE_MAP
            elif request.command in (SISMEMBER, SMISMEMBER):
                form = LARGE_SET
            elif request.command in (ZSCORE, ZMSCORE, ZRANK, ZREVRANK):
                form = LARGE_SORTED_SET
            else:
                continue
            if self.read(request.first_lookup, &self.words[request.first_word], &record) != LIVE:
                continue
            if record.form != form or record.size < 24 or request.words - 1 > LOOKUPS_MAX - self.lookup_count:
                continue
            request.first_member, request.members = <uint32_t>self.lookup_count, request.words - 1
            request.rank = -1
            for j in range(request.members):
                member = &self.words[request.first_word + 1 + j]
                lookup = &self.lookups[self.lookup_count]
                lookup.high = u64(record.payload)
                lookup.low = <uint64_t>crc32_of(member.at, member.size) << 32
                lookup.low |= <uint64_t>crc16_of(member.at, member.size) << 16
                lookup.bytes_, lookup.outcome = 14, MISSING
                self.job_of[self.lookup_count] = self.job_of[request.first_lookup]
                self.clock_of[self.lookup_count] = self.clock_of[request.first_lookup]
                self.lookup_count += 1
        return 0

    cdef int find_ranks(self) except -1:
        """Compute the requested ranks of members in large sorted sets."""
        cdef size_t i
        cdef Request* request
        cdef Record key, member
        cdef Word* word
        for i in range(self.request_count):
            request = &self.requests[i]
            if request.members and (request.command == ZRANK or request.command == ZREVRANK):
                word = &self.words[request.first_word + 1]
                self.read(request.first_lookup, &self.words[request.first_word], &key)
                if self.read(request.first_member, word, &member) == LIVE and member.size == 8:
                    request.rank = self.rank_in_tree(
                        self.job_of[request.first_lookup], u64(key.payload), f64(member.payload), word
                    )
        return 0

    cdef bint find_node(self, int job, uint64_t set_id, uint64_t number, Lookup* node) except -1:
        """Look up a node of a sorted set's tree."""
        cdef Pages pages = (<JobPages>self.jobs[job]).pages
        node.high, node.low, node.bytes_ = set_id, number, 16
        return pages.find_block(node, self.monotonic_ms) == FOUND and node.size >= 5

    cdef int64_t rank_in_tree(self, int job, uint64_t set_id, double score, const Word* member) except -2:
        """Return a member's rank in a large sorted set; -1 if the tree is damaged."""
        cdef Lookup node
        cdef uint64_t number = 0
        cdef int64_t rank = 0, child, count
        cdef const uint8_t* ends
        cdef int depth
        for depth in range(TREE_DEPTH_MAX):
            if not self.find_node(job, set_id, number, &node):
                return -1
            if node.record[node.size - 1] == 0:
                child = rank_in_run(node.record, node.size - 1, score, member, False)
                return -1 if child < 0 else rank + child
            count = members_in_run(node.record, node.size - 1)
            if count < 1 or node.size < 5 + 28 * <size_t>count:
                return -1
            # The lowest members of the children are a run; a member before all of them belongs to the first child.
            child = rank_in_run(node.record, node.size - 1 - 16 * count, score, member, True)
            if child < 0:
                return -1
            child = child - 1 if child else 0
            ends = node.record + node.size - 1 - 8 * count
            rank += <int64_t>(u64(ends + 8 * (child - 1)) & RANKS_MAX) if child else 0
            number = u64(ends - 8 * count + 8 * child)
        return -1

    cdef const uint8_t* reply_all(
        self, uint32_t first, uint32_t end_request, const uint8_t* stopped, list keys_read
    ) except NULL:
        """Write the replies to requests `first` up to `end_request`; return where the buffer's next request begins."""
        cdef size_t i, before
        cdef Request* request
        cdef uint64_t hits, misses
        cdef const uint8_t* end = stopped
        for i in range(first, end_request):
            request = &self.requests[i]
            before, hits, misses = self.out.used, self.hits, self.misses
            if self.reply_to(request) == GENERAL or self.out.used - before > REPLY_BYTES_MAX:
                self.out.used, self.hits, self.misses = before, hits, misses
                end = request.at
                break
            self.answered[request.command] += 1
            self.last_command = request.command
            if keys_read is not None:
                for j in range(request.keys):
                    keys_read.append(
                        PyBytes_FromStringAndSize(
                            <const char*>self.words[request.first_word + j].at, self.words[request.first_word + j].size
                        )
                    )
            if self.out.used > self.limit and i + 1 < end_request:
                end = self.requests[i + 1].at
                self.is_full = True
                break
        return end

    cdef int count_lookup(self, bint is_hit) noexcept:
        if is_hit:
            self.hits += 1
        else:
            self.misses += 1
        return is_hit

    cdef int reply_to(self, Request* request) except -2:
        cdef int command = request.command
        cdef Output* out = self.out
        cdef Word* word
        cdef Record record
        cdef int found
        cdef size_t i, count
        if command == MGET or command == STATE_MGET:
            return self.reply_mget(request)
        if command == EXISTS:
            count = 0
            for i in range(request.keys):
                word = &self.words[request.first_word + i]
                found = self.read_key(request.first_lookup + i, word, &record)
                if found == GENERAL:
                    return GENERAL
                count += self.count_lookup(found == LIVE)
            put_line(out, c":", count)
            return ANSWERED
        word = &self.words[request.first_word]
        if command == PING:
            if request.words:
                put_bulk(out, word.at, word.size)
            else:
                put(out, b"+PONG\r\n", 7)
            return ANSWERED
        found = self.read_key(request.first_lookup, word, &record)
        if found == GENERAL:
            return GENERAL
        if command == GET:
            if not self.count_lookup(found == LIVE):
                put_nil(out, self.is_resp3)
            elif record.form == VALUE:
                put_bulk(out, record.payload, record.size)
            else:
                return GENERAL
            return ANSWERED
        if command in (HGET, HMGET, HGETALL):
            return self.reply_of_map(request, found, &record)
        if command in (LRANGE, LINDEX):
            return self.reply_of_list(request, found, &record)
        if command in (SISMEMBER, SMISMEMBER):
            return self.reply_of_set(request, found, &record)
        if command in (ZSCORE, ZMSCORE, ZRANK, ZREVRANK):
            return self.reply_of_members(request, found, &record)
        if command in (ZRANGE, ZREVRANGE):
            return self.reply_of_range(request, found, &record)
        self.count_lookup(found == LIVE)
        if command == STRLEN:
            if found == LIVE and record.form != VALUE:
                return GENERAL
            put_line(out, c":", record.size if found == LIVE else 0)
        elif command == TYPE:
            return self.put_type(found, record.form)
        elif found != LIVE:
            put_line(out, c":", -2)
        elif record.expire_at_ms == 0:
            put_line(out, c":", -1)
        else:
            put_line(out, c":", self.ttl_of(record.expire_at_ms - self.now_ms, command == TTL))
        return ANSWERED

    cdef int64_t ttl_of(self, int64_t milliseconds, bint is_seconds) noexcept:
        return (milliseconds + 500) // 1000 if is_seconds else milliseconds

    cdef int put_type(self, int found, int form) except -2:
        if found != LIVE:
            put(self.out, b"+none\r\n", 7)
        elif form in (VALUE, LONG_VALUE):
            put(self.out, b"+string\r\n", 9)
        elif form in (SMALL_MAP, LARGE_MAP):
            put(self.out, b"+hash\r\n", 7)
        elif form in (SHORT_LIST, LONG_LIST):
            put(self.out, b"+list\r\n", 7)
        elif form in (SMALL_SET, LARGE_SET):
            put(self.out, b"+set\r\n", 6)
        elif form in (SMALL_SORTED_SET, LARGE_SORTED_SET):
            put(self.out, b"+zset\r\n", 7)
        else:
            return GENERAL
        return ANSWERED

    cdef int reply_mget(self, Request* request) except -2:
        cdef size_t i, before = self.out.used
        cdef Record record
        cdef int found
        if request.keys > ENTRIES_MAX:
            return GENERAL
        put_line(self.out, c"*", request.keys)
        for i in range(request.keys):
            found = self.read_key(request.first_lookup + i, &self.words[request.first_word + i], &record)
            if found == GENERAL or (found == LIVE and record.form == LONG_VALUE):
                return GENERAL
            # A key of another type is nil, as in Redis.
            if self.count_lookup(found == LIVE and record.form == VALUE):
                put_bulk(self.out, record.payload, record.size)
            else:
                put_nil(self.out, self.is_resp3)
            if self.out.used - before > REPLY_BYTES_MAX:
                return GENERAL
        return ANSWERED

    cdef int reply_of_map(self, Request* request, int found, Record* record) except -2:
        cdef Output* out = self.out
        cdef ByteRange part = ByteRange(NULL, 0)
        cdef size_t i, count
        cdef int has
        cdef Record field
        if found == LIVE and record.form != SMALL_MAP and (record.form != LARGE_MAP or request.command == HGETALL):
            return GENERAL
        if found == LIVE and record.form == LARGE_MAP and request.members != request.words - 1:
            return GENERAL
        if request.command == HGETALL:
            self.count_lookup(found == LIVE)
            if found != LIVE:
                return put_line(out, c"%" if self.is_resp3 else c"*", 0) + ANSWERED
            if record.size < 2:
                return GENERAL
            count = u16(record.payload)
            if record.size < 2 + 4 * count or record.size > REPLY_BYTES_MAX:
                return GENERAL
            put_line(out, c"%" if self.is_resp3 else c"*", count if self.is_resp3 else 2 * count)
            put(out, record.payload + 2 + 4 * count, record.size - 2 - 4 * count)
            return ANSWERED
        if request.command == HMGET:
            if request.words - 1 > ENTRIES_MAX:
                return GENERAL
            put_line(out, c"*", request.words - 1)
        for i in range(request.words - 1):
            has = ABSENT
            if found == LIVE and record.form == SMALL_MAP:
                has = map_value(record, &self.words[request.first_word + 1 + i], &part)
            elif found == LIVE:
                has = self.read(request.first_member + i, &self.words[request.first_word + 1 + i], &field)
            if has == GENERAL:
                return GENERAL
            if request.command == HGET:
                self.count_lookup(has == LIVE)
            if has != LIVE:
                put_nil(out, self.is_resp3)
            elif record.form == SMALL_MAP:
                put(out, part.at, part.size)
            elif field.form == VALUE:
                put_bulk(out, field.payload, field.size)
            else:
                return GENERAL
        return ANSWERED

    cdef int reply_of_list(self, Request* request, int found, Record* record) except -2:
        cdef Output* out = self.out
        cdef int64_t count = 0, first = 0, last = 0
        cdef ByteRange part
        if found == LIVE and record.form != SHORT_LIST:
            return GENERAL
        if found == LIVE:
            count = list_count(record)
            if count < 0:
                return GENERAL
        if request.command == LINDEX and found != LIVE:
            self.misses += 1
            return put_nil(out, self.is_resp3) + ANSWERED
        if not integer(&self.words[request.first_word + 1], &first):
            return GENERAL
        self.count_lookup(found == LIVE)
        if first < 0:
            first += count
        if request.command == LINDEX:
            if not 0 <= first < count:
                return put_nil(out, self.is_resp3) + ANSWERED
            if list_range(record, first, first + 1, &part) == GENERAL:
                return GENERAL
            return put(out, part.at, part.size) + ANSWERED
        if not integer(&self.words[request.first_word + 2], &last):
            return GENERAL
        last = (last + count if last < 0 else last) + 1
        first, last = max(first, 0), min(last, count)
        if first >= last:
            return put(out, b"*0\r\n", 4) + ANSWERED
        if last - first > ENTRIES_MAX or list_range(record, first, last, &part) == GENERAL:
            return GENERAL
        put_line(out, c"*", last - first)
        put(out, part.at, part.size)
        return ANSWERED

    cdef int reply_of_set(self, Request* request, int found, Record* record) except -2:
        cdef size_t i
        cdef int has
        cdef Record member
        if found == LIVE and record.form != SMALL_SET and (record.form != LARGE_SET or request.members != request.words - 1):
            return GENERAL
        if request.words - 1 > ENTRIES_MAX:
            return GENERAL
        self.count_lookup(found == LIVE)
        if request.command == SMISMEMBER:
            put_line(self.out, c"*", request.words - 1)
        for i in range(request.words - 1):
            has = ABSENT
            if found == LIVE and record.form == SMALL_SET:
                has = set_has(record, &self.words[request.first_word + 1 + i])
            elif found == LIVE:
                has = self.read(request.first_member + i, &self.words[request.first_word + 1 + i], &member)
            if has == GENERAL:
                return GENERAL
            put_line(self.out, c":", has == LIVE)
        return ANSWERED

    cdef int reply_of_members(self, Request* request, int found, Record* record) except -2:
        """Reply with scores or ranks of a sorted set's members."""
        cdef Output* out = self.out
        cdef size_t i
        cdef int64_t at
        cdef double score = 0
        cdef int64_t count
        cdef int has
        cdef Record member
        cdef Word* word
        if found == LIVE and record.form != SMALL_SORTED_SET and (record.form != LARGE_SORTED_SET or request.members != request.words - 1):
            return GENERAL
        if request.words - 1 > ENTRIES_MAX:
            return GENERAL
        if request.command == ZMSCORE:
            self.count_lookup(found == LIVE)
            put_line(out, c"*", request.words - 1)
        for i in range(request.words - 1):
            word = &self.words[request.first_word + 1 + i]
            has, at = ABSENT, -1
            if found == LIVE and record.form == SMALL_SORTED_SET:
                at = index_in_run(record.payload, record.size, word)
                if at == -2:
                    return GENERAL
                has = LIVE if at >= 0 else ABSENT
                score = f64(record.payload + 4 + 8 * at) if at >= 0 else 0
            elif found == LIVE:
                has = self.read(request.first_member + i, word, &member)
                if has == GENERAL or (has == LIVE and member.size != 8):
                    return GENERAL
                score = f64(member.payload) if has == LIVE else 0
                at = request.rank
            if request.command != ZMSCORE:
                self.count_lookup(has == LIVE)
            if has != LIVE:
                put_nil(out, self.is_resp3)
            elif request.command in (ZSCORE, ZMSCORE):
                put_double(out, score, self.is_resp3)
            elif at < 0:
                return GENERAL
            elif request.command == ZRANK:
                put_line(out, c":", at)
            else:
                count = self.size_of(record)
                if at >= count:
                    return GENERAL
                put_line(out, c":", count - 1 - at)
        return ANSWERED

    cdef int64_t size_of(self, const Record* record) noexcept:
        """Return the number of members of a sorted set; -1 if it is damaged."""
        cdef uint64_t count
        if record.form == SMALL_SORTED_SET:
            return members_in_run(record.payload, record.size)
        count = u64(record.payload + 8)
        return <int64_t>count if count <= <uint64_t>RANKS_MAX else -1

    cdef int reply_of_range(self, Request* request, int found, Record* record) except -2:
        """Reply with the members of a rank range."""
        cdef Output* out = self.out
        cdef int64_t first = 0, last = 0, count = 0, at, start = 0, stop, i
        cdef bint has_scores = request.words == 4, is_reversed = request.command == ZREVRANGE
        cdef Lookup leaf
        if has_scores and not is_word(&self.words[request.first_word + 3], b"withscores", 10):
            return GENERAL
        if not integer(&self.words[request.first_word + 1], &first):
            return GENERAL
        if not integer(&self.words[request.first_word + 2], &last):
            return GENERAL
        if found == LIVE and record.form != SMALL_SORTED_SET and (record.form != LARGE_SORTED_SET or record.size < 24):
            return GENERAL
        self.count_lookup(found == LIVE)
        if found == LIVE:
            count = self.size_of(record)
            if count < 0:
                return GENERAL
        first = first + count if first < 0 else first
        last = (last + count if last < 0 else last) + 1
        first, last = max(first, 0), min(last, count)
        if first >= last:
            return put(out, b"*0\r\n", 4) + ANSWERED
        if last - first > ENTRIES_MAX:
            return GENERAL
        put_line(out, c"*", (last - first) * (2 if has_scores and not self.is_resp3 else 1))
        if is_reversed:
            first, last = count - last, count - first
        if record.form == SMALL_SORTED_SET:
            return self.put_members(record.payload, record.size, first, last, is_reversed, has_scores)
        # Leaf by leaf, from the lowest rank or from the highest.
        while first < last:
            at = last - 1 if is_reversed else first
            if not self.leaf_at(self.job_of[request.first_lookup], u64(record.payload), at, &leaf, &start):
                return GENERAL
            stop = start + members_in_run(leaf.record, leaf.size - 1)
            if not start <= at < stop:
                return GENERAL
            if is_reversed:
                i = max(first, start)
                if self.put_members(leaf.record, leaf.size - 1, i - start, last - start, True, has_scores) == GENERAL:
                    return GENERAL
                last = i
            else:
                i = min(last, stop)
                if self.put_members(leaf.record, leaf.size - 1, first - start, i - start, False, has_scores) == GENERAL:
                    return GENERAL
                first = i
        return ANSWERED

    cdef bint leaf_at(self, int job, uint64_t set_id, int64_t rank, Lookup* node, int64_t* start) except -1:
        """Find the leaf of a large sorted set that contains a rank, and the rank of the leaf's first member."""
        cdef uint64_t number = 0
        cdef int64_t count, low, high, middle, before = 0
        cdef const uint8_t* ends
        cdef int depth
        for depth in range(TREE_DEPTH_MAX):
            if not self.find_node(job, set_id, number, node):
                return False
            if node.record[node.size - 1] == 0:
                start[0] = before
                return members_in_run(node.record, node.size - 1) >= 0
            count = members_in_run(node.record, node.size - 1)
            if count < 1 or node.size < 5 + 28 * <size_t>count:
                return False
            ends = node.record + node.size - 1 - 8 * count
            low, high = 0, count - 1
            while low < high:
                middle = (low + high) >> 1
                if <int64_t>u64(ends + 8 * middle) <= rank - before:
                    low = middle + 1
                else:
                    high = middle
            number = u64(ends - 8 * count + 8 * low)
            before += <int64_t>(u64(ends + 8 * (low - 1)) & RANKS_MAX) if low else 0
        return False

    cdef int put_members(
        self, const uint8_t* run, size_t size, int64_t first, int64_t last, bint is_reversed, bint has_scores
    ) except -2:
        """Write the members of a run from `first` up to `last` (exclusive)."""
        cdef int64_t count = members_in_run(run, size), i, at
        cdef size_t text_at, length
        if count < 0 or not 0 <= first <= last <= count:
            return GENERAL
        text_at = 4 + 12 * <size_t>count
        for i in range(last if is_reversed else first):
            text_at += u32(run + 4 + 8 * count + 4 * i)
        for at in range(last - first):
            i = last - 1 - at if is_reversed else first + at
            length = u32(run + 4 + 8 * count + 4 * i)
            if is_reversed:
                text_at -= length
            if text_at > size or length > size - text_at:
                return GENERAL
            if has_scores and self.is_resp3:
                put(self.out, b"*2\r\n", 4)
            put_bulk(self.out, run + text_at, length)
            if has_scores:
                put_double(self.out, f64(run + 4 + 8 * i), self.is_resp3)
            if not is_reversed:
                text_at += length
        return ANSWERED


cdef class SessionFields:
    """The fields of a session that the core uses with each request (`session.Session` has the others)."""


cdef class ConnectionFields:
    """The fields of a connection that its transport reads with each request (`client.Connection` has the others)."""


cdef class InputInterceptor:
    """Processes a socket's input before its protocol does, without making Python objects."""

    cdef size_t intercept(self, const uint8_t* data, size_t size) except? 0:
        """Process input from the front; return the number of processed bytes."""
        return 0


cdef class FastPath:
    """The core with the stages around it, for one server: access control, pushes before the replies, statistics.

    make_rules: makes the `Rules` of a user. record_slow: records slow requests. (A proxy's fast path needs neither.)
    """

    def __cinit__(self, server, make_rules=None, record_slow=None):
        self.server, self.stats, self.make_rules, self.record_slow = server, server.stats, make_rules, record_slow
        self.core = Core()
        self.output.data, self.output.size = <char*>malloc(16384), 16384
        if self.output.data == NULL:
            raise MemoryError
        self.names = [name.decode() for name, _, _ in NAMES]
        self.command_stats_of = [server.stats.command_stats(name) for name in self.names]
        self.stats.collectors.append(self.collect)

    def __dealloc__(self):
        free(self.output.data)

    @property
    def is_full(self):
        """Return whether the last buffer has more requests for the core, deferred because the replies are long."""
        return self.core.is_full

    @property
    def is_incomplete(self):
        """Return whether the last buffer ended with an incomplete request."""
        return self.core.is_incomplete

    def answer(self, session, bytes data):
        """Answer requests at the front of a buffer, and parse those after them for the general path.

        Return the replies, the words of the parsed requests, and the remaining bytes. The caller has renewed the
        server's view.
        """
        cdef size_t took, size = PyBytes_GET_SIZE(data)
        cdef const uint8_t* start = <const uint8_t*>PyBytes_AS_STRING(data)
        cdef list requests
        self.output.used = 0
        took = self.answer_front(session, start, size, &self.output)
        requests = self.remaining_requests(session, start, size, &took)
        replies = PyBytes_FromStringAndSize(self.output.data, self.output.used)
        return replies, requests, data[took:] if took else data

    cdef list remaining_requests(self, session, const uint8_t* data, size_t size, size_t* took):
        """Parse the requests behind those that `answer_front` answered, for the general path.

        took: the bytes that `answer_front` answered; the bytes of the parsed requests are added.
        """
        cdef const uint8_t* at = data + took[0]
        if took[0] == size or self.core.is_full or self.core.is_incomplete or not session.is_authenticated:
            return []  # before authentication, the parser limits the length of a request
        requests = self.core.cut_words(&at, data + size, not self.was_tried)
        took[0] = at - data
        return requests

    cdef bint look_ahead(self, SessionFields session, const uint8_t* data, size_t size) except -1:
        """Prepare a buffer's look-ups, to be made together with those of other clients.

        False if no later buffer should be added: there is no room, or `answer_front` or the general path has to answer
        this one alone. `run_lookups` makes the look-ups, then `answer_front` answers the buffers in the same order. If
        anything else runs in between, `drop_lookaheads` has to be called.
        """
        if not session.can_use_checked_fast_path:
            return False
        if session.tracking_state is not None or session.epoch_feed is not None:
            return False
        try:
            # Nothing changes while lookaheads are added, so what they have in common is read once.
            if not self.core.lookahead_count and not self.begin():
                return False
            if session.user is not self.last_user:
                self.last_user, self.last_rules = session.user, self.rules_of(session.user)
            return self.core.add_lookahead(data, size, self.last_rules)
        except Exception as error:
            self.server.report(error)
            self.core.drop_lookaheads()
            return False

    cdef bint begin(self) except -1:
        """Read what all requests depend on; False while the server is loading."""
        server = self.server
        self.last_user = self.last_rules = None
        self.slow_ns = server.slow_ns
        if server.is_loading:
            return False
        self.core.use_view(server.view, server.cluster is not None)
        return True

    cdef int run_lookups(self) except -1:
        """Make the prepared look-ups."""
        try:
            self.core.find_keys_and_members()
        except Exception as error:
            self.server.report(error)
            self.core.drop_lookaheads()
        return 0

    cdef int drop_lookaheads(self) noexcept:
        """Drop the look-ups that were made ahead."""
        return self.core.drop_lookaheads()

    cdef int expire_view(self) noexcept:
        """Renew the view before the next answers. The poller renews a server's view, so this does nothing."""
        return 0

    cdef Rules rules_of(self, object user):
        """Return a user's rules; None: no restrictions."""
        if user.is_unrestricted:
            return None
        if user.compiled is None:
            user.compiled = self.make_rules(user)
        return user.compiled

    cdef size_t answer_front(self, SessionFields session, const uint8_t* data, size_t size, Output* out) except? 0:
        """Answer requests at the front of a buffer, and append the replies to `out`; return the requests' size."""
        cdef Rules rules = None
        cdef list keys = None
        cdef size_t before = out.used, took
        cdef uint64_t hits = self.core.hits, misses = self.core.misses
        cdef int64_t started_ns, elapsed_ns
        cdef Core core = self.core
        cdef bytes pushes
        server = self.server
        core.is_incomplete = core.is_full = self.was_tried = False
        tracking_state = epoch_feed = None
        if not core.has_lookahead(data):
            if not session.can_use_checked_fast_path or not self.begin():
                return 0
            tracking_state, epoch_feed, rules = session.tracking_state, session.epoch_feed, self.rules_of(session.user)
            if tracking_state is not None:
                if tracking_state.redirect or tracking_state.is_optin or tracking_state.is_optout:
                    return 0
                if tracking_state.records_reads:
                    keys = []
        self.was_tried = True
        started_ns = monotonic_ns()
        core.out, core.monotonic_ms = out, started_ns // 1_000_000
        try:
            took = core.answer_all(data, size, session.protocol, rules, keys)
        except Exception as error:
            # `report` logs and counts the exception, and the general path answers the requests. More input or output
            # room would not help the core.
            server.report(error)
            core.hits, core.misses = hits, misses
            core.is_incomplete = core.is_full = False
            core.drop_lookaheads()
            took = 0
        if not took:
            out.used = before
            return 0
        elapsed_ns = monotonic_ns() - started_ns
        session.calls += self.count(elapsed_ns)
        session.active_ms = core.now
        session.last_command = self.names[core.last_command]
        if elapsed_ns >= self.slow_ns:
            self.record_slow(session, PyBytes_FromStringAndSize(<const char*>data, took), elapsed_ns)
        if tracking_state is not None or epoch_feed is not None:
            pushes = b"" if tracking_state is None else server.pending_invalidations(session)
            if keys is not None:
                server.tracking.record_keys(tracking_state, keys)
            if epoch_feed is not None and server.change_counter != epoch_feed.change_counter:
                pushes = server.pending_pushes(epoch_feed) + pushes
            if pushes:
                reserve(out, PyBytes_GET_SIZE(pushes))
                memmove(out.data + before + PyBytes_GET_SIZE(pushes), out.data + before, out.used - before)
                memcpy(out.data + before, PyBytes_AS_STRING(pushes), PyBytes_GET_SIZE(pushes))
                out.used += PyBytes_GET_SIZE(pushes)
        return took

    cdef int count(self, int64_t elapsed_ns) noexcept:
        """Count the calls that the core just answered, and return their number; each gets the same share of the time."""
        cdef int command, bits
        cdef uint64_t total = 0, mean
        cdef Core core = self.core
        for command in range(COMMANDS):
            total += core.answered[command]
        if not total:
            return 0
        mean = <uint64_t>elapsed_ns // total
        bits = 64 - count_leading_zeros(mean) if mean else 0
        for command in range(COMMANDS):
            if core.answered[command]:
                core.calls[command] += core.answered[command]
                self.nanoseconds[command] += mean * core.answered[command]
                self.times[command][min(bits, 63)] += core.answered[command]
        return total

    def collect(self):
        """Add the counts to the server's statistics."""
        cdef int command, bits
        cdef Core core = self.core
        for command in range(COMMANDS):
            if core.calls[command]:
                command_stats = self.command_stats_of[command]
                command_stats.calls += core.calls[command]
                command_stats.nanoseconds += self.nanoseconds[command]
                took = command_stats.took
                for bits in range(64):
                    if self.times[command][bits]:
                        took[bits] += self.times[command][bits]
                        self.times[command][bits] = 0
                core.calls[command] = self.nanoseconds[command] = 0
        stats = self.stats
        stats.hits += core.hits
        stats.misses += core.misses
        core.hits = core.misses = 0
