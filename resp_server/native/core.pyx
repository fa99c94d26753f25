# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The fast path for frequent reads: it parses requests in a buffer, reads records in LMDB's pages and writes replies.

`Core.answer_all` parses requests at the front of a buffer, looks all their keys up together (see
`state_backend.native.lookup`), and writes the replies in order. It stops before the first request that it does not
answer: an unknown command, a wrong number of arguments, a wrong type, a value stored in pieces, a key of another node,
a command or key that the user may not use. The general path answers this request. So the core makes no error reply but one,
and its replies are those of the general path, byte for byte.

The core uses no socket and no session. It holds the GIL, and copies values into its output.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.conversion cimport PyOS_double_to_string
from cpython.dict cimport PyDict_GetItem
from cpython.mem cimport PyMem_Free
from cpython.ref cimport PyObject
from cpython.time cimport monotonic_ns
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.math cimport INFINITY, fabs, nextafter, signbit
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memchr, memcmp, memcpy, memset, strlen

from resp_server.native.arguments cimport exact_double, integer, is_word
from resp_server.native.bits cimport count_leading_zeros, put_bits, put_numbers
from resp_server.native.combined_sets cimport Combination, ScoredMember, WeightedSet, combine, parse_combination
from resp_server.native.dumps cimport Checksums, put_dump, put_encoding
from resp_server.native.geo cimport Match, Search, by_order, parse_search, put_distance, put_match, put_place, unit_of
from resp_server.native.geohash cimport CELLS_MAX, Cell, cells_of, distance, distance_within, first_score, is_place, point_of
from resp_server.native.glob cimport GLOB_STEPS_MAX, glob
from resp_server.native.ranges cimport RankRange, parse_range, text_ranks
from resp_server.native.records cimport (
    ABSENT, ANSWERED, GENERAL, LARGE_MAP, LARGE_SET, LARGE_SORTED_SET, LIVE, LONG_LIST, LONG_VALUE, RANK_BITS, SHORT_LIST, SMALL_MAP,
    SMALL_SET, SMALL_SORTED_SET, VALUE, ByteRange, Item, Record, by_score, index_of, items_start, list_count, list_range, map_value,
    members_in_run, name_member, next_item, rank_in_run, read_record, read_run, size_of
)
from resp_server.native.rows cimport *
from resp_server.native.wire cimport (
    NUMBER_LINE_BYTES, Output, Specs, Word, add_spec, command_at, cut, insert, number_line, put, put_bulk, put_double_text, put_line,
    put_nil, reserve, write_line
)
from state_backend.native.little_endian cimport f64, u32, u64
from state_backend.native.lookup cimport EXPIRY_AT, FORM_AT, FOUND, HEADER_BYTES, MISSING, Lookup, Pages, Walk, crc32_of, slot_of

from resp_server.protocol.doubles import double_text
from resp_server.protocol.errors import GenericError, no_frequency
from resp_server.protocol.glob import PATTERN_BYTES_MAX as PATTERN_BYTES
from resp_server.protocol.replies import Frames, OK, Pending, ReplySet, Sliced, Verbatim, encode
from resp_server.protocol.request_parser import ARGUMENT_OVERHEAD_BYTES
from resp_server.protocol.rdb_encoder import checksum_table
from state_backend.model.errors import StoreError

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *)
    Py_ssize_t PyTuple_GET_SIZE(object)
    PyObject* PyTuple_GET_ITEM(object, Py_ssize_t)

# The form of a kind's small records, whose elements are in the record, and that of its large ones.
cdef int[7] SMALL_FORMS = [-1, VALUE, SMALL_MAP, SHORT_LIST, SMALL_SET, SMALL_SORTED_SET, -1]
cdef int[7] LARGE_FORMS = [-1, LONG_VALUE, LARGE_MAP, LONG_LIST, LARGE_SET, LARGE_SORTED_SET, -1]
ctypedef const char* Text
cdef Text[6] TYPE_REPLIES = [b"", b"+string\r\n", b"+hash\r\n", b"+list\r\n", b"+set\r\n", b"+zset\r\n"]

# Each command that the core answers: its name, the minimum and maximum of arguments (-1: any number), the kind of its
# keys, what it reads and replies with, and whether the reply is an array with an element for each argument.
ROWS = (
    (b"get", 1, 1, STRING, WHOLE, TEXTS, False),
    (b"mget", 1, -1, STRING, KEYS, TEXTS, True),
    (b"state|mget", 1, -1, STRING, KEYS, TEXTS, True),
    (b"strlen", 1, 1, STRING, SIZE, LENGTHS, False),
    (b"getrange", 3, 3, STRING, RANKS, TEXTS, False),
    (b"substr", 3, 3, STRING, RANKS, TEXTS, False),
    (b"getbit", 2, 2, STRING, BITS, FLAGS, False),
    (b"bitcount", 1, 4, STRING, BITS, LENGTHS, False),
    (b"bitpos", 2, 5, STRING, BITS, PLACES, False),
    (b"bitfield_ro", 4, -1, STRING, BITS, NUMBERS, True),
    (b"hget", 2, 2, HASH, MEMBERS, TEXTS, False),
    (b"hmget", 2, -1, HASH, MEMBERS, TEXTS, True),
    (b"hexists", 2, 2, HASH, MEMBERS, FLAGS, False),
    (b"hstrlen", 2, 2, HASH, MEMBERS, LENGTHS, False),
    (b"hlen", 1, 1, HASH, SIZE, LENGTHS, False),
    (b"hgetall", 1, 1, HASH, WHOLE, PAIRS, False),
    (b"hkeys", 1, 1, HASH, WHOLE, FIELDS, False),
    (b"hvals", 1, 1, HASH, WHOLE, TEXTS, False),
    (b"hrandfield", 1, 3, HASH, RANDOM, PAIRS, False),
    (b"httl", 4, -1, HASH, MEMBERS, SECONDS, True),
    (b"hpttl", 4, -1, HASH, MEMBERS, MILLISECONDS, True),
    (b"hexpiretime", 4, -1, HASH, MEMBERS, SECONDS_AT, True),
    (b"hpexpiretime", 4, -1, HASH, MEMBERS, MILLISECONDS_AT, True),
    (b"hscan", 2, 4, HASH, SCAN, PAIRS, True),
    (b"llen", 1, 1, LIST, SIZE, LENGTHS, False),
    (b"lindex", 2, 2, LIST, RANKS, TEXTS, False),
    (b"lrange", 3, 3, LIST, RANKS, TEXTS, True),
    (b"lpos", 2, 2, LIST, SEARCH, PLACES, False),
    (b"scard", 1, 1, SET, SIZE, LENGTHS, False),
    (b"smembers", 1, 1, SET, WHOLE, TEXTS, False),
    (b"sismember", 2, 2, SET, MEMBERS, FLAGS, False),
    (b"smismember", 2, -1, SET, MEMBERS, FLAGS, True),
    (b"srandmember", 1, 2, SET, RANDOM, TEXTS, False),
    (b"sinter", 1, -1, SET, COMBINED, IN_ALL, True),
    (b"sunion", 1, -1, SET, COMBINED, IN_ANY, True),
    (b"sdiff", 1, -1, SET, COMBINED, IN_FIRST, True),
    (b"sintercard", 2, -1, SET, COMBINED, COUNT_IN_ALL, False),
    (b"sscan", 2, 4, SET, SCAN, TEXTS, True),
    (b"zcard", 1, 1, SORTED_SET, SIZE, LENGTHS, False),
    (b"zscore", 2, 2, SORTED_SET, MEMBERS, SCORES_OF, False),
    (b"zmscore", 2, -1, SORTED_SET, MEMBERS, SCORES_OF, True),
    (b"zrank", 2, 2, SORTED_SET, MEMBERS, RANKS_OF, False),
    (b"zrevrank", 2, 2, SORTED_SET, MEMBERS, REVERSED_RANKS_OF, False),
    (b"zrange", 3, 8, SORTED_SET, RANKS, FROM_LOWEST, True),
    (b"zrevrange", 3, 4, SORTED_SET, RANKS, FROM_HIGHEST, True),
    (b"zrangebyscore", 3, 7, SORTED_SET, SCORES, FROM_LOWEST, True),
    (b"zrevrangebyscore", 3, 7, SORTED_SET, SCORES, FROM_HIGHEST, True),
    (b"zcount", 3, 3, SORTED_SET, SCORES, LENGTHS, False),
    (b"zrangebylex", 3, 6, SORTED_SET, TEXT_RANGE, FROM_LOWEST, True),
    (b"zrevrangebylex", 3, 6, SORTED_SET, TEXT_RANGE, FROM_HIGHEST, True),
    (b"zlexcount", 3, 3, SORTED_SET, TEXT_RANGE, LENGTHS, False),
    (b"zrandmember", 1, 3, SORTED_SET, RANDOM, PAIRS, False),
    (b"zscan", 2, 4, SORTED_SET, SCAN, PAIRS, True),
    (b"zinter", 2, -1, SORTED_SET, COMBINED, IN_ALL, True),
    (b"zunion", 2, -1, SORTED_SET, COMBINED, IN_ANY, True),
    (b"zdiff", 2, -1, SORTED_SET, COMBINED, IN_FIRST, True),
    (b"zintercard", 2, -1, SORTED_SET, COMBINED, COUNT_IN_ALL, False),
    (b"geopos", 1, -1, SORTED_SET, MEMBERS, POINTS, True),
    (b"geohash", 1, -1, SORTED_SET, MEMBERS, GEOHASHES, True),
    (b"geodist", 3, 4, SORTED_SET, MEMBERS, DISTANCE, False),
    (b"geosearch", 6, -1, SORTED_SET, AREA, WITHIN, True),
    (b"georadius_ro", 5, -1, SORTED_SET, AREA, AROUND_POINT, True),
    (b"georadiusbymember_ro", 4, -1, SORTED_SET, AREA, AROUND_MEMBER, True),
    (b"xlen", 1, 1, STREAM, SIZE, LENGTHS, False),
    (b"sort_ro", 1, -1, ANY_KIND, SORTED, TEXTS, True),
    (b"exists", 1, -1, ANY_KIND, KEYS, FLAGS, False),
    (b"touch", 1, -1, ANY_KIND, KEYS, FLAGS, False),
    (b"watch", 1, -1, ANY_KIND, KEYS, WATCHED, False),
    (b"type", 1, 1, ANY_KIND, FACT, TYPES, False),
    (b"object|encoding", 1, 1, ANY_KIND, FACT, ENCODINGS, False),
    (b"object|refcount", 1, 1, ANY_KIND, FACT, NONE_OR_ONE, False),
    (b"object|freq", 1, 1, ANY_KIND, FACT, NONE_OR_ERROR, False),
    (b"object|idletime", 1, 1, ANY_KIND, FACT, NONE_OR_ZERO, False),
    (b"dump", 1, 1, ANY_KIND, FACT, DUMPS, False),
    (b"memory|usage", 1, 1, ANY_KIND, FACT, STORED_BYTES, False),
    (b"ttl", 1, 1, ANY_KIND, FACT, SECONDS, False),
    (b"pttl", 1, 1, ANY_KIND, FACT, MILLISECONDS, False),
    (b"expiretime", 1, 1, ANY_KIND, FACT, SECONDS_AT, False),
    (b"pexpiretime", 1, 1, ANY_KIND, FACT, MILLISECONDS_AT, False),
    (b"ping", 0, 1, ANY_KIND, NOTHING, TEXTS, False),
    (b"echo", 1, 1, ANY_KIND, NOTHING, TEXTS, False),
    (b"select", 1, 1, ANY_KIND, NOTHING, DATABASE, False),
    (b"client|id", 0, 0, ANY_KIND, NOTHING, CLIENT_ID, False),
    (b"client|caching", 1, 1, ANY_KIND, NOTHING, CACHING, False),
    (b"time", 0, 0, ANY_KIND, NOTHING, CLOCK, True),
    (b"state|at", 1, -1, ANY_KIND, NOTHING, READ_POINT, False),
    (b"dbsize", 0, 0, ANY_KIND, ALL_KEYS, KEY_COUNT, False),
    (b"scan", 1, 5, ANY_KIND, ALL_KEYS, TEXTS, True),
    (b"keys", 1, 1, ANY_KIND, ALL_KEYS, ALL_TEXTS, True),
    (b"randomkey", 0, 0, ANY_KIND, ALL_KEYS, ONE_TEXT, True),
    (b"cluster|countkeysinslot", 1, 1, ANY_KIND, ALL_KEYS, LENGTHS, False),
    (b"cluster|getkeysinslot", 2, 2, ANY_KIND, ALL_KEYS, FIELDS, True),
    (b"multi", 0, 0, ANY_KIND, TRANSACTION, FLAGS, False),
    (b"exec", 0, 0, ANY_KIND, TRANSACTION, TEXTS, True),
    (b"discard", 0, 0, ANY_KIND, TRANSACTION, FLAGS, False),
)
NAMES = tuple(row[0] for row in ROWS)

cdef Specs specs
cdef Row rows[COMMANDS_MAX]
cdef int COMMANDS = 0


def _fill_rows():
    global COMMANDS
    cdef int command
    for name, least, most, kind, part, shape, is_array in ROWS:
        command = add_spec(&specs, name, least, <uint32_t><int>most)
        first_member = 3 if part == MEMBERS and shape in (SECONDS, MILLISECONDS, SECONDS_AT, MILLISECONDS_AT) else 1
        rows[command] = Row(
            kind, part, shape, is_array, b"|" in name, name == b"state|mget", first_member,
            part == COMBINED and (kind == SORTED_SET or shape == COUNT_IN_ALL),
        )
        COMMANDS = command + 1


_fill_rows()

cdef int MULTI = NAMES.index(b"multi")
cdef int EXEC = NAMES.index(b"exec")
cdef int DISCARD = NAMES.index(b"discard")
cdef int FREQ = NAMES.index(b"object|freq")
cdef bytes NO_FREQUENCY = b"-%b\r\n" % no_frequency().line
cdef int64_t WORD_OVERHEAD_BYTES = ARGUMENT_OVERHEAD_BYTES
cdef size_t PATTERN_BYTES_MAX = PATTERN_BYTES

# A key's job, if it is not the index of one.
cdef enum:
    NO_JOB = -1
    UNDECIDED = -2

# What a key's row has beside its record: a name, a checksum, and LMDB's part (see `state_backend.lmdb.sizes`).
cdef enum:
    ROW_BYTES = 6 + 4 + 10

# A tree that is not damaged is not deeper. A damaged one may have a cycle.
cdef enum:
    TREE_DEPTH_MAX = 16

# The watched keys of a client, and the bytes of a record, that make a mark; the general path makes others.
cdef enum:
    WATCHED_MAX = 128
    WATCHED_BYTES_MAX = 65536

# The keys of the view were not counted yet.
cdef enum:
    NOT_COUNTED = -2

# Elements of a scan without COUNT, as in Redis; more rows that it visits than elements; positions of fields, and
# of keys.
cdef enum:
    SCAN_COUNT = 10
    SCAN_VISITS_MAX = 1024
    KEYS_MAX = 16384  # that KEYS walks, some 2 ms; the general path walks more of them, in steps
    VISITED_BYTES_MAX = 4 << 20  # of their records
cdef uint64_t POSITIONS = <uint64_t>1 << 48, KEY_POSITIONS = <uint64_t>1 << 46

# Elements of a record of which some are chosen at random.
cdef enum:
    RANDOM_MAX = 512
# Functions that are called for one client before others have their turn (guess: below a turn's time, as it ends after a call).
cdef int64_t CALLED_NS_MAX = 1_000_000
# Where a shorter request is slow, sessions are observed, and the core calls nothing (see `context.ONE_BY_ONE_US`).
cdef int64_t ONE_BY_ONE_NS = 1_000_000

# --- output -----------------------------------------------------------------------------------------------------------


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


# Of RDB (see `dumps.pxd`).
cdef Checksums checksums[8]


def _fill_checksums():
    cdef int byte, i
    for byte, checksum in enumerate(checksum_table()):
        checksums[0][byte] = checksum
    for i in range(1, 8):
        for byte in range(256):
            checksums[i][byte] = checksums[0][checksums[i - 1][byte] & 0xFF] ^ checksums[i - 1][byte] >> 8


_fill_checksums()

# --- access control ---------------------------------------------------------------------------------------------------


cdef class Rules:
    """A user's permissions for the core's commands: per selector, allowed commands and key patterns."""

    def __init__(self, selectors):
        """selectors: for each, the names of allowed commands, and the patterns of readable keys; None: all keys."""
        cdef int i = 0, command
        self.patterns = []
        for allowed, patterns in selectors[:SELECTORS_MAX]:
            for name in allowed:
                if name in NAMES:
                    command = NAMES.index(name)
                    self.commands[i][command >> 6] |= <uint64_t>1 << (command & 63)
            self.patterns.append(None if patterns is None else list(patterns))
            i += 1
        self.selectors = i

    cdef bint allow(self, int command, const Word* keys, size_t count):
        cdef int i
        for i in range(self.selectors):
            if self.commands[i][command >> 6] >> (command & 63) & 1 and self.allow_keys(self.patterns[i], keys, count):
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
                found = glob(
                    <const uint8_t*>PyBytes_AS_STRING(pattern), PyBytes_GET_SIZE(pattern), keys[i].at, keys[i].size, &steps
                )
                if found or steps > GLOB_STEPS_MAX:
                    break
            if not found:  # or it takes too long: the general path uses a regular expression
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
    cdef uint64_t steps = 0
    return bool(
        glob(
            <const uint8_t*>PyBytes_AS_STRING(pattern), PyBytes_GET_SIZE(pattern),
            <const uint8_t*>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text), &steps,
        )
    )


cdef inline bint is_text(const Word* word, bytes text) noexcept:
    return word.size == <size_t>PyBytes_GET_SIZE(text) and memcmp(word.at, PyBytes_AS_STRING(text), word.size) == 0


cdef inline bint is_client_of(tuple clients, PyObject* client) noexcept:
    """Return whether a client is one of those that cache a key; none: all are."""
    cdef Py_ssize_t i, count = PyTuple_GET_SIZE(clients)
    for i in range(count):
        if PyTuple_GET_ITEM(clients, i) == client:
            return True
    return count == 0


cdef int record_reads(tracking, tracking_state, list keys) except -1:
    """Record in the tracking table that a client read keys, except those that it is recorded for already: most of them."""
    cdef list new = []
    cdef dict clients_by_key = tracking.clients_by_key
    cdef PyObject* clients
    for key in keys:
        clients = PyDict_GetItem(clients_by_key, key)
        if clients == NULL or not is_client_of(<tuple>clients, <PyObject*>tracking_state):
            new.append(key)
    if new:
        tracking.record_keys(tracking_state, new)
    return 0


cdef class KeyFilter:
    """The keys about which a core may answer. It answers only about stored ones, as another process has the others."""

    cdef bint admits(self, const Word* keys, size_t count) noexcept:
        """Return whether the core may answer a request with these keys, at least one."""
        return False

    cdef bint admits_all_keys(self) noexcept:
        """Return whether the core may answer requests about all keys."""
        return False

    cdef bint admits_transaction_of(self, session) except -1:
        """Return whether the core may answer a client's transactions."""
        return False

    cdef bint has_own_clock(self) noexcept:
        """Return whether this process says what time it is."""
        return False


# --- the core ---------------------------------------------------------------------------------------------------------


cdef class JobPages:
    """A job's LMDB pages, refreshed once per buffer."""

    def __init__(self, name):
        self.name = name
        self.prefix = name.encode()
        self.renewal = self.watch_renewal = 0


cdef int has_key(const Walk* walk, int64_t now_ms) noexcept nogil:
    """Return LIVE if the record at a walk's place has a key at this clock reading, ABSENT if it expired; GENERAL: undecided."""
    cdef const uint8_t* record = walk.lookup.record
    cdef size_t size = walk.lookup.size
    if size < HEADER_BYTES or u32(record) > size - HEADER_BYTES:
        return GENERAL
    size -= HEADER_BYTES + u32(record)
    if record[FORM_AT] == LARGE_MAP and (size < 32 or 0 < <int64_t>u64(record + HEADER_BYTES + u32(record) + 24) <= now_ms):
        return GENERAL  # some fields have expired, perhaps all
    return ABSENT if 0 < <int64_t>u64(record + EXPIRY_AT) <= now_ms else LIVE


cdef class Core:
    """Answers requests from a view of jobs. Used by one event loop's thread."""

    def __cinit__(self):
        self.view, self.routes_version, self.jobs, self.job_by_prefix = None, 0, [], {}
        self.only_job, self.last_job, self.last_command = NO_JOB, 0, -1
        self.random = <uint64_t>monotonic_ns() | 1

    cdef size_t answer_all(self, const uint8_t* start, size_t size, int protocol, Rules rules) except? 0:
        """Answer requests from the view of the last `use_view`; return their size."""
        cdef const uint8_t* at = start
        cdef const uint8_t* end = start + size
        cdef const uint8_t* stopped
        cdef const uint8_t* begun
        cdef Lookahead* lookahead
        cdef uint32_t first, end_request
        self.limit, self.queued, self.read_ms = self.out.used + OUTPUT_BYTES_MAX, 0, 0
        memset(self.answered, 0, COMMANDS * sizeof(uint64_t))
        self.is_resp3, self.is_incomplete, self.is_full = protocol >= 3, False, False
        while at < end and self.out.used < self.limit:
            if self.session.transaction is not None:
                begun, at = at, self.answer_within_transaction(at, end, rules)
                if at == begun or self.session.transaction is not None:
                    break
                continue
            if self.has_lookahead(at):
                lookahead = &self.lookaheads[self.next_lookahead]
                self.next_lookahead += 1
                first, end_request, stopped, self.is_incomplete, self.is_out_of_room = (
                    lookahead.first_request, lookahead.end_request, lookahead.stopped, lookahead.is_incomplete,
                    lookahead.is_out_of_room,
                )
            else:
                self.drop_lookaheads()
                stopped = self.cut_requests(at, end, rules)
                if stopped == at:
                    break
                self.find_keys_and_members()
                first, end_request = 0, <uint32_t>self.request_count
            self.has_more = self.is_incomplete or self.is_out_of_room or stopped == end
            at = self.reply_all(first, end_request, stopped)
            if self.is_cut:
                continue
            if at != stopped:
                self.is_incomplete = False
                break
            if self.is_incomplete:
                break
        self.is_full = self.is_full or (start < at < end and self.out.used >= self.limit)
        return at - start

    cdef int use_view(self, view, bint is_node) except -1:
        """Read the view's current jobs and slots. is_node: the server is a node of a cluster."""
        cdef uint64_t renewal = view.renewals
        self.is_node = is_node
        if renewal != self.renewal:
            self.drop_lookaheads()  # they read an older epoch
            self.key_count, self.has_all_listed = NOT_COUNTED, False
        self.now = view.now_ms
        self.now_ms, self.renewal = self.now, renewal
        if view is not self.view or self.routes_version != <uint64_t>view.routes_version:
            self.drop_lookaheads()
            self.key_count, self.has_all_listed = NOT_COUNTED, False
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
            if job.is_readable and job.read_ms != self.now_ms:
                job.read_ms, job.now_ms = self.now_ms, self.view.snapshot_of(job.name).clock_at(self.now_ms)
            return job.is_readable
        try:
            snapshot = self.view.snapshot_of(job.name)
        except StoreError:
            return False
        job.pages, job.read_ms = snapshot.pages, self.now_ms
        job.is_readable = job.pages is not None
        job.missing_slots = self.view.slots_missing(job.name)
        if job.is_readable:
            job.now_ms = snapshot.clock_at(self.now_ms)
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
            lookahead.is_out_of_room = self.is_out_of_room
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
        cdef size_t count = 0
        cdef Py_ssize_t took
        cdef Word* words
        cdef Request* request
        cdef int64_t view_ms = self.now
        self.now_ms = self.read_ms or view_ms
        while True:
            words = self.words + self.word_count
            self.is_out_of_room = not self.has_room()
            if self.is_out_of_room:
                break
            took = cut(at, end, words, REQUEST_WORDS_MAX, WORD_BYTES_MAX, &count)
            if took <= 0:
                self.is_incomplete = took == 0 and at < end
                break
            if not self.add_request(at, words, count, rules):
                break
            request = &self.requests[self.request_count - 1]
            if rows[request.command].shape == READ_POINT:  # the next requests are read at its clock reading
                integer(&self.words[request.first_word + request.words - 1], &self.now_ms)
            elif request.command == EXEC:
                self.now_ms = view_ms
            at += took
        return at

    cdef bint add_request(self, const uint8_t* at, const Word* words, size_t count, Rules rules) except -1:
        """Add a request and its look-ups; False if the core does not answer it. words: those after `word_count`."""
        cdef Request* request = &self.requests[self.request_count]
        if not self.admit(request, words, count, rules):
            return False
        request.at, request.members = at, 0
        request.first_lookup = <uint32_t>self.lookup_count
        if not self.prepare_lookups(request):
            return False
        self.word_count += count
        self.request_count += 1
        return True

    cdef bint admit(self, Request* request, const Word* words, size_t count, Rules rules) except -1:
        """Set a request's command and arguments; False if the core does not answer it. words: those after `word_count`."""
        cdef int64_t key_count = 0
        cdef int command = command_at(&specs, words, count)
        cdef size_t names
        if command < 0:
            return False
        names = 2 if rows[command].is_two_words else 1
        if not specs.rows[command].least <= count - names <= specs.rows[command].most:
            return False
        request.keys = 1
        if rows[command].part in (KEYS, COMBINED):
            if rows[command].has_key_count:
                if not integer(&words[names], &key_count) or not 0 < key_count < <int64_t>(count - names):
                    return False
                names += 1
            request.keys = <uint32_t>(key_count if rows[command].has_key_count else <int64_t>(count - names))
        elif rows[command].part <= TRANSACTION:
            request.keys = 0
        request.command, request.words = command, <uint32_t>(count - names)
        request.first_word = <uint32_t>(self.word_count + names)
        if rules is not None:
            if rows[command].part == ALL_KEYS or rows[command].shape == READ_POINT:  # about the keys that the user may read
                return False
            if not rules.allow(command, words + names, request.keys):
                return False
        return self.key_filter is None or self.is_admitted(command, words + names, request.keys)

    cdef bint may_answer(self, const Word* words, size_t count) noexcept:
        """Return whether a request may be answered if there is a filter of keys, by its command and its first key."""
        cdef int command = command_at(&specs, words, count)
        cdef size_t first_key
        if command < 0:
            return False
        first_key = 1 + rows[command].is_two_words + rows[command].has_key_count
        return self.is_admitted(command, words + first_key, rows[command].part > TRANSACTION and count > first_key)

    cdef bint is_admitted(self, int command, const Word* keys, size_t count) noexcept:
        """Return whether a request may be answered if there is a filter of keys: it passes, or is about this process alone."""
        if count:
            return self.key_filter.admits(keys, count)
        if rows[command].part == NOTHING:
            if rows[command].shape == CLOCK:
                return self.key_filter.has_own_clock()
            return rows[command].shape in (TEXTS, CLIENT_ID, CACHING, DATABASE)
        return rows[command].part == TRANSACTION or (rows[command].part == ALL_KEYS and self.key_filter.admits_all_keys())

    cdef list cut_words(self, const uint8_t** start, const uint8_t* end, bint is_all):
        """Parse requests for the general path, up to the first one that the core may answer; move `start` past them.

        is_all: parse those, too, up to the end of a transaction. It is set after the core left a request with a known
        command unanswered.
        """
        cdef list requests = [], words
        cdef const uint8_t* at = start[0]
        cdef size_t count = 0, i
        cdef Py_ssize_t took
        cdef int command
        end = min(end, at + GENERAL_BYTES_MAX)
        while len(requests) < REQUESTS_MAX:
            took = cut(at, end, self.words, REQUEST_WORDS_MAX, WORD_BYTES_MAX, &count)
            if took <= 0:
                break
            command = command_at(&specs, self.words, count)
            if not is_all and command >= 0:
                if requests:
                    break
                is_all = True
            words = []
            for i in range(count):
                words.append(PyBytes_FromStringAndSize(<const char*>self.words[i].at, self.words[i].size))
            requests.append(words)
            at += took
            if command == EXEC or command == DISCARD:
                break
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
            if self.is_node and slot != first_slot and not rows[request.command].has_any_slots:
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
        return read_record(&self.lookups[index], name, self.clock_of[index], record)

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
                pages.moment_ms = self.monotonic_ms
                pages.find(&pages.fields if is_of_members else &pages.keys, self.job_lookups, count)
            done += count
        return 0

    cdef int prepare_member_lookups(self) except -1:
        """Prepare look-ups of members and fields that have records of their own."""
        cdef size_t i, j
        cdef Request* request
        cdef Record record
        cdef Word* member
        cdef int form, first
        for i in range(self.request_count):
            request = &self.requests[i]
            if rows[request.command].part != MEMBERS:
                continue
            form = LARGE_FORMS[rows[request.command].kind]
            if self.read(request.first_lookup, &self.words[request.first_word], &record) != LIVE:
                continue
            first = rows[request.command].first_member
            if record.form != form or record.size < 24 or request.words - first > LOOKUPS_MAX - self.lookup_count:
                continue
            request.first_member, request.members = <uint32_t>self.lookup_count, request.words - first
            request.rank = -1
            for j in range(request.members):
                member = &self.words[request.first_word + first + j]
                name_member(&record, member, &self.lookups[self.lookup_count])
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
            if request.members and rows[request.command].shape in (RANKS_OF, REVERSED_RANKS_OF):
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
        cdef Lookup leaf
        cdef int64_t rank = self.find_leaf(job, set_id, -1, score, member, &leaf), within
        if rank < 0:
            return -1
        within = rank_in_run(leaf.record, leaf.size - 1, score, member, False)
        return -1 if within < 0 else rank + within

    cdef int64_t find_leaf(self, int job, uint64_t set_id, int64_t rank, double score, const Word* member, Lookup* node) except -2:
        """Find the leaf of a rank, or of a member if the rank is negative; return its first member's rank, -1 if the tree is damaged."""
        cdef uint64_t number = 0
        cdef int64_t count, low, high, middle, before = 0
        cdef const uint8_t* ends
        cdef int depth
        for depth in range(TREE_DEPTH_MAX):
            if not self.find_node(job, set_id, number, node):
                return -1
            count = members_in_run(node.record, node.size - 1)
            if node.record[node.size - 1] == 0:
                return before if count >= 0 else -1
            if count < 1 or node.size < 5 + 28 * <size_t>count:
                return -1
            ends = node.record + node.size - 1 - 8 * count
            low, high = 0, count - 1
            if rank < 0:
                # The lowest members of the children are a run; a member before all of them belongs to the first child.
                low = rank_in_run(node.record, node.size - 1 - 16 * count, score, member, True)
                if low < 0:
                    return -1
                low = high = max(0, low - 1)
            while low < high:
                middle = (low + high) >> 1
                if <int64_t>u64(ends + 8 * middle) <= rank - before:
                    low = middle + 1
                else:
                    high = middle
            number = u64(ends - 8 * count + 8 * low)
            before += <int64_t>(u64(ends + 8 * (low - 1)) & ((<uint64_t>1 << RANK_BITS) - 1)) if low else 0
        return -1

    cdef int begin_tracking(self, tracking_state) except -1:
        """Answer the requests of a client with this tracking; None: the client tracks no keys."""
        self.keys_read, self.is_caching_set, self.is_optin, self.is_optout = None, False, False, False
        if tracking_state is not None:
            self.is_caching_set = tracking_state.is_caching_set
            self.is_optin, self.is_optout = tracking_state.is_optin, tracking_state.is_optout
            if tracking_state.is_on and not tracking_state.is_bcast:
                self.keys_read = []
        return 0

    cdef bint records_keys(self, bint is_transaction) noexcept:
        """Return whether the keys of a request are recorded. CLIENT CACHING does not limit them in a transaction."""
        if self.keys_read is None:
            return False
        return is_transaction or not (self.is_optin or self.is_optout) or self.is_caching_set == self.is_optin

    cdef int record_keys(self, const Request* request) except -1:
        cdef uint32_t i
        for i in range(request.first_word, request.first_word + request.keys):
            self.keys_read.append(PyBytes_FromStringAndSize(<const char*>self.words[i].at, self.words[i].size))
        return 0

    cdef const uint8_t* reply_all(self, uint32_t first, uint32_t end_request, const uint8_t* stopped) except NULL:
        """Write the replies to requests `first` up to `end_request`; return where the buffer's next request begins.

        Sets `is_cut` if it is within a transaction whose end is not parsed yet.
        """
        cdef uint32_t i = first, last
        cdef size_t before
        cdef Request* request
        cdef Counts counts
        cdef int outcome
        cdef const uint8_t* end = stopped
        self.is_cut = False
        self.now_ms = self.read_ms or self.now
        while i < end_request:
            request = &self.requests[i]
            before, counts, last = self.out.used, self.counts, i
            if rows[request.command].part == TRANSACTION:
                last = <uint32_t>self.exec_of(i, end_request)
                if self.is_cut and i > first and self.is_out_of_room:  # there is room for it next
                    end = request.at
                    break
                if self.is_cut:
                    self.begin_transaction()
                    end = self.requests[i + 1].at if i + 1 < end_request else stopped
                    break
                outcome = self.reply_to_transaction(i, last) if last > i else GENERAL
            else:
                outcome = self.reply_to(request)
            if outcome == GENERAL or self.out.used - before > REPLY_BYTES_MAX:
                self.out.used, self.counts = before, counts
                end = request.at
                break
            if self.requests[last].command == DISCARD:  # what was queued is not counted as called
                self.count_requests(i, i + 1, True)
                self.count_requests(last, last + 1, True)
                self.queued += last - i - 1
            else:
                self.count_requests(i, last + 1, last > i)
            if rows[request.command].shape not in (CACHING, CLIENT_ID):  # CLIENT CACHING is about the next other command
                self.is_caching_set = False
            i = last + 1
            if self.out.used > self.limit and i < end_request:
                end = self.requests[i].at
                self.is_full = True
                break
        return end

    cdef int count_requests(self, uint32_t first, uint32_t end_request, bint is_transaction) except -1:
        """Count answered requests, and record the keys that a client may cache."""
        cdef uint32_t i
        cdef bint is_recorded = self.records_keys(is_transaction)
        for i in range(first, end_request):
            self.answered[self.requests[i].command] += 1
            self.last_command = self.requests[i].command
            if is_recorded and rows[self.requests[i].command].shape != WATCHED:
                self.record_keys(&self.requests[i])
        if is_transaction and self.session.watched:
            self.session.watched = {}
        if is_transaction and self.read_ms:
            self.session.read_point, self.read_ms, self.now_ms = None, 0, self.now
        return 0

    cdef int64_t exec_of(self, uint32_t first, uint32_t end_request) except -1:
        """Return the index of the EXEC or DISCARD that ends the transaction of a MULTI; `first` if the general path answers it.

        Sets `is_cut` if the buffer, or the room for requests, ends before it.
        """
        cdef uint32_t i
        if self.requests[first].command != MULTI or not self.may_run_transaction():
            return first
        for i in range(first + 1, end_request):
            if rows[self.requests[i].command].part == TRANSACTION:
                return first if self.requests[i].command == MULTI else i
        self.is_cut = self.has_more
        return first

    cdef bint may_run_transaction(self) except -1:
        """Return whether the core may run the client's transactions; those of a client that watches keys it may not."""
        if self.session.read_point is not None and not self.read_ms:
            return False
        if self.session.watched and (self.read_ms or not self.is_unchanged()):
            return False
        return self.key_filter is None or self.key_filter.admits_transaction_of(self.session)

    cdef tuple watch_point_of(self, JobPages job):
        """Return the lineage and the epoch of a job's store in the view."""
        if job.watch_renewal != self.renewal:
            job.watch_point, job.watch_renewal = self.watch_point(job.name), self.renewal
        return job.watch_point

    cdef int watch_keys(self, Request* request) except -2:
        """Record marks of keys for the client, but for those that it watches already."""
        cdef const Word* word
        cdef Record record
        cdef size_t i, index
        cdef int found
        cdef dict marks = {}, watched = self.session.watched
        if self.read_ms or len(watched) + request.keys > WATCHED_MAX:
            return GENERAL
        for i in range(request.keys):
            word, index = &self.words[request.first_word + i], request.first_lookup + i
            found = self.read_key(index, word, &record)
            if found == GENERAL or self.job_of[index] < 0:
                return GENERAL
            name = 0, PyBytes_FromStringAndSize(<const char*>word.at, word.size)
            if name in watched:
                continue
            lineage, epoch = self.watch_point_of(<JobPages>self.jobs[self.job_of[index]])
            if found != LIVE:
                marks[name] = lineage, epoch, "", True
                continue
            if self.lookups[index].size > WATCHED_BYTES_MAX or (record.form == LARGE_MAP and u64(record.payload + 24)):
                return GENERAL  # or fields expire
            digest = PyBytes_FromStringAndSize(<const char*>self.lookups[index].record, self.lookups[index].size)
            marks[name] = lineage, epoch, digest, record.form <= SMALL_SORTED_SET
        watched.update(marks)
        return put(self.out, b"+OK\r\n", 5) + ANSWERED

    cdef bint is_unchanged(self) except -1:
        """Return whether none of the client's watched keys has changed; False: the general path has to find out."""
        cdef JobPages job
        cdef bytes record
        cdef Word word
        cdef int index
        cdef int64_t expire_at_ms
        for (db, key), mark in (<dict>self.session.watched).items():
            if db or type(mark) is not tuple:  # the general path made it
                return False
            word.at, word.size = <const uint8_t*>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)
            index = self.job_at(&word)
            if index < 0 or not self.refresh_job(index):
                return False
            job = <JobPages>self.jobs[index]
            if self.owned_slots != NULL and not self.owned_slots[slot_of(word.at, word.size)]:
                return False
            if self.watch_point_of(job) != (mark[0], mark[1]):
                return False
            if mark[2]:
                record = mark[2]
                expire_at_ms = <int64_t>u64(<const uint8_t*>PyBytes_AS_STRING(record) + EXPIRY_AT)
                if 0 < expire_at_ms <= job.now_ms:
                    return False
        return True

    cdef int begin_transaction(self) except -1:
        """Reply to a MULTI whose EXEC has not arrived: the commands before it are queued, as on the general path."""
        self.session.begin_transaction()
        put(self.out, b"+OK\r\n", 5)
        self.last_command = MULTI
        self.answered[MULTI] += 1
        return 0

    cdef const uint8_t* answer_within_transaction(self, const uint8_t* at, const uint8_t* end, Rules rules) except NULL:
        """Queue the requests of a client in a transaction, and run them at EXEC; return where the next request begins."""
        cdef size_t count = 0, i
        cdef Py_ssize_t took
        cdef Request request
        cdef int64_t size = 0, added, requests_left, bytes_left
        cdef list words, requests = []
        cdef bint needs_state = False, may_queue
        cdef int command = MULTI
        transaction = self.session.transaction
        may_queue = not transaction.is_aborted and transaction.db is None  # no SELECT is queued
        requests_left, bytes_left = transaction.room
        self.drop_lookaheads()
        self.is_incomplete = False
        while at < end and self.out.used < self.limit and may_queue:
            took = cut(at, end, self.words, REQUEST_WORDS_MAX, WORD_BYTES_MAX, &count)
            self.is_incomplete = took == 0
            if took <= 0 or not self.admit(&request, self.words, count, rules):
                break
            command = request.command
            if rows[command].part == TRANSACTION or rows[command].shape == DATABASE or not is_queueable(&rows[command]):
                break
            if self.is_node and not self.may_queue_slots(&request):
                break
            words, added = [], 0
            for i in range(count):
                words.append(PyBytes_FromStringAndSize(<const char*>self.words[i].at, self.words[i].size))
                added += self.words[i].size + WORD_OVERHEAD_BYTES
            if <int64_t>len(requests) >= requests_left or size + added > bytes_left:
                break
            if self.is_node:
                self.note_slots(&request, transaction.slots)
            requests.append(words)
            size += added
            needs_state |= self.needs_state[request.command]
            put(self.out, b"+QUEUED\r\n", 9)
            self.last_command = request.command
            at += took
        if requests:
            transaction.extend(requests, size, needs_state=needs_state)
            self.queued += len(requests)
        try:
            if command == DISCARD and self.may_run_transaction():
                return at + took + self.discard()
            return at + took if command == EXEC and self.run_queued(transaction.requests, rules) else at
        except Exception as error:  # the general path runs what is queued
            self.report(error)
            self.drop_lookaheads()
            return at

    cdef int discard(self) except -1:
        """Reply to a DISCARD, and end the transaction."""
        self.session.end_transaction()
        put(self.out, b"+OK\r\n", 5)
        self.answered[DISCARD] += 1
        self.last_command, self.is_caching_set = DISCARD, False
        return 0

    cdef bint may_queue_slots(self, const Request* request) noexcept:
        """Return whether a request's keys are in slots of this node, and in one of them; else the general path queues it."""
        cdef uint32_t i
        cdef uint16_t slot, first_slot = 0
        for i in range(request.first_word, request.first_word + request.keys):
            slot = slot_of(self.words[i].at, self.words[i].size)
            if i == request.first_word:
                first_slot = slot
            if slot != first_slot and not rows[request.command].has_any_slots:
                return False
            if self.owned_slots != NULL and not self.owned_slots[slot]:
                return False
        return True

    cdef int note_slots(self, const Request* request, dict slots) except -1:
        """Add the slots of a queued request's keys to those of its transaction."""
        cdef uint32_t i
        for i in range(request.first_word, request.first_word + request.keys):
            slots[slot_of(self.words[i].at, self.words[i].size)] = None
        return 0

    cdef bint run_queued(self, list queued, Rules rules) except -1:
        """Reply to an EXEC, and end the transaction; False if the general path has to run the queued requests."""
        cdef size_t before = self.out.used
        cdef Counts counts = self.counts
        cdef bint is_run = self.may_run_transaction() and self.add_queued(queued, rules)
        if is_run:
            self.find_keys_and_members()
            is_run = self.reply_to_queued(0, <uint32_t>self.request_count) == ANSWERED
        if is_run and self.out.used - before <= REPLY_BYTES_MAX:
            self.count_requests(0, <uint32_t>self.request_count, True)
            self.queued -= len(queued)
            self.answered[EXEC] += 1
            self.last_command = EXEC
            self.is_caching_set = False
            self.session.end_transaction()
        else:
            self.out.used, self.counts, is_run = before, counts, False
        self.drop_lookaheads()
        return is_run

    cdef bint add_queued(self, list queued, Rules rules) except -1:
        """Add queued requests and their look-ups; False if there is no room, or the core does not answer one of them."""
        cdef Word* words
        cdef size_t count
        cdef bytes argument
        for request in queued:
            words, count = self.words + self.word_count, 0
            if not self.has_room() or len(request) > REQUEST_WORDS_MAX:
                return False
            for argument in request:
                if PyBytes_GET_SIZE(argument) > WORD_BYTES_MAX:
                    return False
                words[count].at = <const uint8_t*>PyBytes_AS_STRING(argument)
                words[count].size = PyBytes_GET_SIZE(argument)
                count += 1
            if not self.add_request(NULL, words, count, rules):
                return False
        return True

    cdef bint has_room(self) noexcept:
        """Return whether there is room for another request."""
        return (
            self.request_count < REQUESTS_MAX
            and WORDS_MAX - self.word_count >= REQUEST_WORDS_MAX
            and LOOKUPS_MAX - self.lookup_count >= 2 * REQUEST_WORDS_MAX
        )

    cdef int reply_to_transaction(self, uint32_t multi, uint32_t exec_) except -2:
        """Reply to MULTI, to the commands that it queues, and to EXEC, which runs them in the view of all requests, or to DISCARD."""
        cdef uint32_t i
        put(self.out, b"+OK\r\n", 5)
        for i in range(multi + 1, exec_):
            put(self.out, b"+QUEUED\r\n", 9)
            if self.requests[exec_].command == DISCARD and not is_queueable(&rows[self.requests[i].command]):
                return GENERAL
        if self.requests[exec_].command == DISCARD:
            return put(self.out, b"+OK\r\n", 5) + ANSWERED
        return self.reply_to_queued(multi + 1, exec_)

    cdef int reply_to_queued(self, uint32_t first, uint32_t end_request) except -2:
        """Reply to EXEC: run the queued commands in the view of all requests."""
        cdef uint32_t i, last
        if self.is_node and self.session.epoch_feed is None and end_request > first:  # those of a proxy may differ
            last = self.requests[end_request - 1].first_lookup + self.requests[end_request - 1].keys
            for i in range(self.requests[first].first_lookup + 1, last):
                if self.lookups[i].high >> 48 != self.lookups[i - 1].high >> 48:  # their slots
                    return GENERAL
        put_line(self.out, c"*", end_request - first)
        for i in range(first, end_request):
            if not is_queueable(&rows[self.requests[i].command]) or self.reply_to(&self.requests[i]) == GENERAL:
                return GENERAL
        return ANSWERED

    cdef int count_lookup(self, bint is_hit) noexcept:
        if is_hit:
            self.counts.hits += 1
        else:
            self.counts.misses += 1
        return is_hit

    cdef int reply_to(self, Request* request) except -2:
        cdef const Row* row = &rows[request.command]
        cdef Word* word = &self.words[request.first_word]
        cdef Record record
        cdef int found
        cdef int64_t size
        if row.part == KEYS:
            return self.watch_keys(request) if row.shape == WATCHED else self.reply_to_keys(request)
        if row.part == COMBINED:
            return self.reply_of_sets(request)
        if row.part == ALL_KEYS and row.shape in (LENGTHS, FIELDS):
            return self.reply_of_slot(request)
        if row.part <= ALL_KEYS:
            return self.reply_of_keys(request) if row.is_array and row.part == ALL_KEYS else self.reply_without_key(request)
        found = self.read_key(request.first_lookup, word, &record)
        if found == GENERAL:
            return GENERAL
        if row.part == FACT and row.shape == STORED_BYTES:
            if record.form > SMALL_SORTED_SET:
                return GENERAL
            size = self.lookups[request.first_lookup].size + ROW_BYTES
            return (put_line(self.out, c":", size) if found == LIVE else put_nil(self.out, self.is_resp3)) + ANSWERED
        if row.kind != ANY_KIND and found == LIVE and record.form not in (SMALL_FORMS[row.kind], LARGE_FORMS[row.kind]):
            return GENERAL
        if row.part == MEMBERS and row.shape != DISTANCE:
            return self.reply_of_members(request, found, &record)
        self.count_lookup(found == LIVE)
        if row.part == FACT:
            return self.reply_of_fact(row.shape, found, &record)
        if row.part == MEMBERS:
            return self.reply_of_distance(request, found, &record)
        if row.part == AREA:
            return self.reply_of_area(request, row.shape, found, &record)
        if row.part == SORTED:
            return self.reply_of_sort(request, &record)
        if row.kind == SORTED_SET and row.part in (RANKS, SCORES, TEXT_RANGE):
            return self.reply_of_range(request, found, &record)
        if row.kind == LIST and row.part == RANKS:
            return self.reply_of_list(request, found, &record)
        if row.part == SIZE:
            size = size_of(&record)
            return put_line(self.out, c":", size) + ANSWERED if size >= 0 else GENERAL
        if row.part == SCAN:
            return self.reply_of_scan(request, found, &record)
        if row.part == WHOLE and found == LIVE and record.form in (LARGE_MAP, LARGE_SET):
            return self.reply_of_rows(request, &record, 0, size_of(&record))
        if found == LIVE and record.form != SMALL_FORMS[row.kind]:
            return GENERAL
        if row.part == RANDOM:
            return self.reply_of_random(request, found, &record)
        if row.part == BITS and row.is_array:
            return put_numbers(self.out, word, request.words, &record)
        if row.part == BITS:
            return put_bits(self.out, word, request.words, row.shape, &record)
        if row.part == SEARCH:
            return self.reply_of_search(request, &record)
        if row.part == RANKS:
            return self.reply_of_string_range(request, &record)
        return self.reply_of_whole(request, found, &record)

    cdef int reply_without_key(self, Request* request) except -2:
        """Reply about the connection or the server."""
        cdef Output* out = self.out
        cdef Word* word = &self.words[request.first_word]
        cdef int shape = rows[request.command].shape
        cdef char line[NUMBER_LINE_BYTES]
        cdef int64_t clock_ms
        if shape == TEXTS:
            return (put_bulk(out, word.at, word.size) if request.words else put(out, b"+PONG\r\n", 7)) + ANSWERED
        if shape == CLIENT_ID:
            return put_line(out, c":", self.session.id) + ANSWERED
        if shape == CACHING:  # the general path replies with the errors
            if not (self.is_optin and is_word(word, b"yes", 3) or self.is_optout and is_word(word, b"no", 2)):
                return GENERAL
            self.is_caching_set = True
            return put(out, b"+OK\r\n", 5) + ANSWERED
        if shape == READ_POINT:
            return self.set_read_point(word, request.words - 1)
        if shape == DATABASE:  # the core answers clients of database 0
            return put(out, b"+OK\r\n", 5) + ANSWERED if word.size == 1 and word.at[0] == c"0" else GENERAL
        if shape == KEY_COUNT:
            if self.key_count == NOT_COUNTED:
                try:
                    count = self.count_keys(self.session.user, self.view)
                except StoreError:
                    count = None
                self.key_count = -1 if count is None else count
            return put_line(out, c":", self.key_count) + ANSWERED if self.key_count >= 0 else GENERAL
        clock_ms = self.read_clock()
        put(out, b"*2\r\n", 4)
        put_bulk(out, line + 1, write_line(line, c"$", clock_ms // 1000) - 3)
        return put_bulk(out, line + 1, write_line(line, c"$", clock_ms % 1000 * 1000) - 3) + ANSWERED

    cdef int set_read_point(self, const Word* words, size_t count) except -2:
        """Reply to a STATE AT with the view's own epochs: `count` words, and a clock reading."""
        cdef size_t i
        cdef int64_t clock_ms = 0
        cdef bytes expected
        if self.session.epoch_feed is None or not integer(&words[count], &clock_ms) or clock_ms <= 0:
            return GENERAL
        if self.epochs_renewal != self.renewal:
            self.read_point_at, self.epoch_words = self.epochs_now()
            self.epochs_renewal = self.renewal
        if <size_t>len(self.epoch_words) != count:
            return GENERAL
        for i in range(count):
            expected = self.epoch_words[i]
            if <size_t>PyBytes_GET_SIZE(expected) != words[i].size:
                return GENERAL
            if memcmp(PyBytes_AS_STRING(expected), words[i].at, words[i].size) != 0:
                return GENERAL
        self.session.read_point = self.read_point_at(clock_ms)
        self.read_ms = self.now_ms = clock_ms
        return put(self.out, b"+OK\r\n", 5) + ANSWERED

    cdef int reply_of_scan(self, Request* request, int found, const Record* record) except -2:
        """Reply with all elements of a small record, at any cursor, or with some of a large map or set."""
        cdef Output* out = self.out
        cdef Word* words = &self.words[request.first_word]
        cdef int64_t number = 0, wanted = SCAN_COUNT, count = 0, i
        cdef size_t start, at
        cdef Item item
        if not integer(&words[1], &number) or number < 0:
            return GENERAL
        if request.words == 3 or (request.words == 4 and not is_word(&words[2], b"count", 5)):
            return GENERAL
        if request.words == 4 and (not integer(&words[3], &wanted) or wanted < 1):
            return GENERAL
        if found == LIVE and record.form in (LARGE_MAP, LARGE_SET):
            return self.reply_of_rows(request, record, <uint64_t>number, wanted)
        if found == LIVE and record.form != SMALL_FORMS[rows[request.command].kind]:
            return GENERAL
        put(out, b"*2\r\n$1\r\n0\r\n", 11)
        if found != LIVE:
            return put(out, b"*0\r\n", 4) + ANSWERED
        count = size_of(record)
        if count < 0 or count > ENTRIES_MAX or record.size > REPLY_BYTES_MAX:
            return GENERAL
        put_line(out, c"*", count if rows[request.command].shape == TEXTS else 2 * count)
        if record.form != SMALL_SORTED_SET:
            start = (2 if record.form == SMALL_MAP else 4) + 4 * <size_t>count
            return put(out, record.payload + start, record.size - start) + ANSWERED if start <= record.size else GENERAL
        at = items_start(record)
        for i in range(count):
            if next_item(record, i, &at, &item) == GENERAL:
                return GENERAL
            put_bulk(out, item.at, item.size)
            put_double(out, item.score, False)
        return ANSWERED

    cdef int reply_of_fact(self, int shape, int found, const Record* record) except -2:
        """Reply with a fact about a key, or with a number that is the same for all keys."""
        cdef Output* out = self.out
        cdef int64_t number
        if shape == TYPES:
            if found != LIVE:
                return put(out, b"+none\r\n", 7) + ANSWERED
            for number in range(STRING, STREAM):
                if record.form in (SMALL_FORMS[number], LARGE_FORMS[number]):
                    return put(out, TYPE_REPLIES[number], strlen(TYPE_REPLIES[number])) + ANSWERED
            return GENERAL
        if shape in (ENCODINGS, DUMPS):
            if found != LIVE:
                return put_nil(out, self.is_resp3) + ANSWERED
            return put_encoding(out, record) if shape == ENCODINGS else put_dump(out, record, checksums)
        if shape == NONE_OR_ERROR and found == LIVE:
            self.counts.errors += 1
            return put(out, PyBytes_AS_STRING(NO_FREQUENCY), PyBytes_GET_SIZE(NO_FREQUENCY)) + ANSWERED
        if shape in (NONE_OR_ZERO, NONE_OR_ONE, NONE_OR_ERROR):
            return (put_line(out, c":", shape == NONE_OR_ONE) if found == LIVE else put_nil(out, self.is_resp3)) + ANSWERED
        if found != LIVE or record.expire_at_ms == 0:
            return put_line(out, c":", -1 if found == LIVE else -2) + ANSWERED
        number = record.expire_at_ms
        if shape in (SECONDS, MILLISECONDS):
            number -= self.now_ms
        if shape in (SECONDS, SECONDS_AT):
            number = (number + 500) // 1000
        return put_line(out, c":", number) + ANSWERED

    cdef int reply_to_keys(self, Request* request) except -2:
        """Reply with values of keys, or with the number of existing ones."""
        cdef bint has_values = rows[request.command].is_array
        cdef size_t i, count = 0, before = self.out.used
        cdef Record record
        cdef int found
        if has_values:
            if request.keys > ENTRIES_MAX:
                return GENERAL
            put_line(self.out, c"*", request.keys)
        for i in range(request.keys):
            found = self.read_key(request.first_lookup + i, &self.words[request.first_word + i], &record)
            if found == GENERAL:
                return GENERAL
            if not has_values:
                count += self.count_lookup(found == LIVE)
                continue
            if found == LIVE and record.form == LONG_VALUE:
                return GENERAL
            # A key of another type is nil, as in Redis.
            if self.count_lookup(found == LIVE and record.form == VALUE):
                put_bulk(self.out, record.payload, record.size)
            else:
                put_nil(self.out, self.is_resp3)
            if self.out.used - before > REPLY_BYTES_MAX:
                return GENERAL
        if not has_values:
            put_line(self.out, c":", count)
        return ANSWERED

    cdef int reply_of_whole(self, Request* request, int found, const Record* record) except -2:
        """Reply with all of a small record."""
        cdef Output* out = self.out
        cdef const Row* row = &rows[request.command]
        cdef int64_t count, i
        cdef size_t at
        cdef Item item
        cdef char type_byte = c"*"
        if row.kind == STRING:
            return (put_bulk(out, record.payload, record.size) if found == LIVE else put_nil(out, self.is_resp3)) + ANSWERED
        if self.is_resp3 and (row.kind == SET or row.shape == PAIRS):
            type_byte = c"~" if row.kind == SET else c"%"
        if found != LIVE:
            return put_line(out, type_byte, 0) + ANSWERED
        count = size_of(record)
        at = items_start(record) if count >= 0 else record.size + 1
        if at > record.size or record.size > REPLY_BYTES_MAX or (row.kind == SET and count > ENTRIES_MAX):
            return GENERAL
        put_line(out, type_byte, 2 * count if row.shape == PAIRS and not self.is_resp3 else count)
        if row.kind == SET or row.shape == PAIRS:
            return put(out, record.payload + at, record.size - at) + ANSWERED
        for i in range(2 * count):  # fields and values take turns
            if next_item(record, i, &at, &item) == GENERAL:
                return GENERAL
            if (i & 1) == (row.shape == TEXTS):
                put_bulk(out, item.at, item.size)
        return ANSWERED

    cdef int put_row(self, int shape, const Walk* walk, int64_t now_ms) except -2:
        """Write a row's field, value or member: LIVE, ABSENT if it has expired, or GENERAL if the core cannot read it."""
        cdef const uint8_t* record = walk.lookup.record
        cdef size_t size = walk.lookup.size, name_size
        cdef int64_t expire_at_ms
        if size < HEADER_BYTES or u32(record) > size - HEADER_BYTES or record[FORM_AT] != VALUE:
            return GENERAL
        name_size, expire_at_ms = u32(record), <int64_t>u64(record + EXPIRY_AT)
        if 0 < expire_at_ms <= now_ms:
            return ABSENT
        record += HEADER_BYTES
        if shape in (MEMBERS, FIELDS, PAIRS):
            put_bulk(self.out, record, name_size)
        if shape in (TEXTS, PAIRS):
            put_bulk(self.out, record + name_size, size - HEADER_BYTES - name_size)
        return LIVE

    cdef int reply_of_rows(self, Request* request, const Record* record, uint64_t cursor, int64_t wanted) except -2:
        """Reply with all of a large map or set, or with elements from a cursor on, which is a field's position in the table."""
        cdef Output* out = self.out
        cdef const Row* row = &rows[request.command]
        cdef Pages pages = (<JobPages>self.jobs[self.job_of[request.first_lookup]]).pages
        cdef int64_t now_ms = self.clock_of[request.first_lookup], count = 0, visits = 0
        cdef uint64_t row_id = u64(record.payload), last = 0, next_cursor = 0
        cdef size_t before = out.used, visited = 0
        cdef Walk walk
        cdef int has, found, shape = row.shape if record.form == LARGE_MAP else MEMBERS
        cdef char head[NUMBER_LINE_BYTES]
        cdef char type_byte = c"*"
        if not 0 <= wanted <= ENTRIES_MAX or cursor >= POSITIONS:
            return GENERAL
        found = pages.first_row(&pages.fields, &walk, row_id, cursor << 16, False)
        while found == FOUND and walk.lookup.high == row_id:
            if count >= wanted and walk.lookup.low >> 16 != last:
                next_cursor = walk.lookup.low >> 16
                break
            if visits >= SCAN_VISITS_MAX + wanted or visited > REPLY_BYTES_MAX:
                return GENERAL
            last = walk.lookup.low >> 16
            visited += walk.lookup.size
            has = self.put_row(shape, &walk, now_ms)
            if has == GENERAL:
                return GENERAL
            count += has == LIVE
            visits += 1
            found = pages.next_row(&pages.fields, &walk)
        if found != FOUND and found != MISSING:
            return GENERAL
        if row.part == SCAN:
            return self.put_scan_head(before, next_cursor, 2 * count if shape == PAIRS else count)
        if next_cursor or count != wanted:
            return GENERAL
        if self.is_resp3 and (row.kind == SET or row.shape == PAIRS):
            type_byte = c"~" if row.kind == SET else c"%"
        return insert(out, before, head, write_line(head, type_byte, 2 * count if shape == PAIRS and not self.is_resp3 else count)) + ANSWERED

    cdef int put_scan_head(self, size_t before, uint64_t cursor, int64_t count) except -2:
        """Write the head of a scan's reply whose elements were written from `before` on."""
        cdef char head[4 * NUMBER_LINE_BYTES]
        cdef char number[NUMBER_LINE_BYTES]
        cdef size_t size, digits = write_line(number, c"$", cursor) - 3
        memcpy(head, b"*2\r\n", 4)
        size = 4 + write_line(head + 4, c"$", digits)
        memcpy(head + size, number + 1, digits + 2)
        size += digits + 2
        size += write_line(head + size, c"*", count)
        return insert(self.out, before, head, size) + ANSWERED

    cdef int reply_of_keys(self, Request* request) except -2:
        """Reply with keys of the only job from a cursor on, which is a position (see `Snapshot.scan`), with all, or with any."""
        cdef Output* out = self.out
        cdef int shape = rows[request.command].shape
        cdef Word* words = &self.words[request.first_word]
        cdef const Word* pattern = NULL
        cdef int64_t cursor = 0, wanted = SCAN_COUNT, left, visits = 0, count = 0, now_ms
        cdef uint64_t last = 0, next_cursor = 0, steps = 0
        cdef size_t before = out.used, visited = 0, at = 1
        cdef Pages pages
        cdef Walk walk
        cdef const uint8_t* record
        cdef int found, has
        cdef char head[NUMBER_LINE_BYTES]
        while at < request.words:
            if at + 1 == request.words:
                return GENERAL
            if is_word(&words[at], b"match", 5):
                pattern = &words[at + 1]
            elif not is_word(&words[at], b"count", 5) or not integer(&words[at + 1], &wanted):
                return GENERAL
            at += 2
        if shape == ALL_TEXTS:
            pattern, wanted = words, KEYS_MAX
        elif shape == ONE_TEXT:
            cursor, wanted = self.below(1 << 23) << 23 | self.below(1 << 23), 1
        elif not integer(words, &cursor) or not 0 <= cursor < <int64_t>KEY_POSITIONS or not 0 < wanted <= ENTRIES_MAX:
            return GENERAL
        if pattern != NULL and pattern.size > PATTERN_BYTES_MAX:
            return GENERAL
        if self.only_job < 0 or self.owned_slots != NULL or not self.refresh_job(self.only_job):
            return GENERAL
        if (<JobPages>self.jobs[self.only_job]).missing_slots is not None or not self.is_listed():
            return GENERAL
        pages, now_ms, left = (<JobPages>self.jobs[self.only_job]).pages, (<JobPages>self.jobs[self.only_job]).now_ms, wanted
        found = pages.first_row(&pages.keys, &walk, <uint64_t>cursor << 16, 0, False)
        if found == MISSING and shape == ONE_TEXT:  # after the last key comes the first one
            found = pages.first_row(&pages.keys, &walk, 0, 0, False)
        while found == FOUND and not (shape == ONE_TEXT and count):
            if (left <= 0 or visits >= SCAN_VISITS_MAX + wanted) and walk.lookup.high >> 16 != last >> 16:
                next_cursor = walk.lookup.high >> 16
                break
            if visits and walk.lookup.high <= last:
                return GENERAL  # damaged
            record = walk.lookup.record
            last, visits, visited = walk.lookup.high, visits + 1, visited + walk.lookup.size
            has = has_key(&walk, now_ms)
            if visited > VISITED_BYTES_MAX or has == GENERAL:
                return GENERAL
            if has == LIVE:
                left -= 1
                if pattern == NULL or glob(pattern.at, pattern.size, record + HEADER_BYTES, u32(record), &steps):
                    put_bulk(out, record + HEADER_BYTES, u32(record))
                    count += 1
                if steps > GLOB_STEPS_MAX:
                    return GENERAL
            found = pages.next_row(&pages.keys, &walk)
        if found != FOUND and found != MISSING:
            return GENERAL
        if shape == TEXTS:
            return self.put_scan_head(before, next_cursor, count)
        if shape == ONE_TEXT:
            return ANSWERED if count else GENERAL
        if next_cursor or not self.limit:  # or a second one in a transaction
            return GENERAL
        self.limit = 0  # it took long: the next request has another turn
        return insert(out, before, head, write_line(head, c"*", count)) + ANSWERED

    cdef int reply_of_slot(self, Request* request) except -2:
        """Reply with the number of a slot's keys, or with some of them."""
        cdef Word* words = &self.words[request.first_word]
        cdef int64_t slot = 0, wanted = ENTRIES_MAX + 1, visits = 0, count = 0
        cdef bint has_texts = rows[request.command].is_array
        cdef size_t before = self.out.used
        cdef JobPages job
        cdef Walk walk
        cdef int found, has
        cdef char head[NUMBER_LINE_BYTES]
        if not self.is_node or not integer(&words[0], &slot) or not 0 <= slot < 1 << 14:
            return GENERAL
        if has_texts and (not integer(&words[1], &wanted) or wanted < 0):
            return GENERAL
        if self.only_job < 0 or (self.owned_slots != NULL and not self.owned_slots[slot]) or not self.refresh_job(self.only_job):
            return GENERAL
        job = <JobPages>self.jobs[self.only_job]
        if job.missing_slots is not None or not self.is_listed():
            return GENERAL
        found = job.pages.first_row(&job.pages.keys, &walk, <uint64_t>slot << 48, 0, False)
        while found == FOUND and walk.lookup.high >> 48 == <uint64_t>slot and count < wanted:
            has, visits = has_key(&walk, job.now_ms), visits + 1
            if has == GENERAL or visits > ENTRIES_MAX:
                return GENERAL
            if has == LIVE:
                count += 1
                if has_texts:
                    put_bulk(self.out, walk.lookup.record + HEADER_BYTES, u32(walk.lookup.record))
            found = job.pages.next_row(&job.pages.keys, &walk)
        if found != FOUND and found != MISSING:
            return GENERAL
        if has_texts:
            return insert(self.out, before, head, write_line(head, c"*", count)) + ANSWERED
        return put_line(self.out, c":", count) + ANSWERED

    cdef bint is_listed(self):
        """Return whether all jobs are there, so that their keys can be listed."""
        if not self.has_all_listed:
            try:
                self.view.check_all_listed()
            except StoreError:
                return False
            self.has_all_listed = True
        return True

    cdef int put_list_blocks(self, Request* request, const Record* record, int64_t first, int64_t last) except -2:
        """Write the elements of a long list from `first` up to `last` (exclusive): its blocks are rows of a table."""
        cdef Pages pages = (<JobPages>self.jobs[self.job_of[request.first_lookup]]).pages
        cdef uint64_t list_id = u64(record.payload)
        cdef int64_t start = <int64_t>u64(record.payload + 8), at = start + first, end = start + last, stop, begin
        cdef size_t before = self.out.used
        cdef Record block
        cdef ByteRange part
        cdef Walk walk
        cdef int found = pages.first_row(&pages.blocks, &walk, list_id, <uint64_t>at, True)
        while at < end:
            if found != FOUND or walk.lookup.high != list_id or <int64_t>walk.lookup.low > at:
                return GENERAL
            begin = <int64_t>walk.lookup.low
            block.payload, block.size = walk.lookup.record, walk.lookup.size
            stop = min(end, begin + list_count(&block))
            if stop <= at or list_range(&block, at - begin, stop - begin, &part) == GENERAL:
                return GENERAL
            put(self.out, part.at, part.size)
            if self.out.used - before > REPLY_BYTES_MAX:
                return GENERAL
            at = stop
            if at < end:
                found = pages.next_row(&pages.blocks, &walk)
        return ANSWERED

    cdef int reply_of_string_range(self, Request* request, const Record* record) except -2:
        """Reply with a range of a value's bytes; negative positions count from the end."""
        cdef int64_t first = 0, last = 0, size
        if not integer(&self.words[request.first_word + 1], &first):
            return GENERAL
        if not integer(&self.words[request.first_word + 2], &last):
            return GENERAL
        size = <int64_t>record.size
        if first < 0 and last < 0 and first > last:
            size = 0
        first = max(first + size, 0) if first < 0 else first
        last = min(size, 1 + (max(last + size, 0) if last < 0 else last))
        if not size or first >= last:
            return put(self.out, b"$0\r\n\r\n", 6) + ANSWERED
        return put_bulk(self.out, record.payload + first, last - first) + ANSWERED

    cdef int reply_of_members(self, Request* request, int found, const Record* record) except -2:
        """Reply with values, scores, ranks or expiries of members or fields, or whether they exist."""
        cdef const Row* row = &rows[request.command]
        cdef size_t i, members = request.words - row.first_member
        cdef Word* options = &self.words[request.first_word + 1]
        cdef int has
        cdef int64_t number = 0
        cdef Member member
        if row.first_member == 3:  # FIELDS, their number, fields
            if not is_word(options, b"fields", 6) or not integer(options + 1, &number) or number != <int64_t>members:
                return GENERAL
        if members > ENTRIES_MAX:
            return GENERAL
        if row.kind == SET or (row.is_array and row.kind == SORTED_SET):
            self.count_lookup(found == LIVE)
        if row.is_array:
            put_line(self.out, c"*", members)
        for i in range(members):
            has = self.find_member(request, i, found, record, &member)
            if has == GENERAL:
                return GENERAL
            if row.kind != SET and not row.is_array:
                self.count_lookup(has == LIVE)
            if self.put_member(request, has, record, &member) == GENERAL:
                return GENERAL
        return ANSWERED

    cdef int find_member(
        self, Request* request, size_t index, int found, const Record* record, Member* member
    ) except -2:
        """Find a member: LIVE, ABSENT or GENERAL."""
        cdef const Word* word = &self.words[request.first_word + rows[request.command].first_member + index]
        cdef int kind = rows[request.command].kind
        cdef Record row
        cdef ByteRange value
        cdef int has
        member.at, member.size, member.is_encoded, member.expire_at_ms = NULL, 0, False, 0
        member.score, member.rank = 0, -1
        if found != LIVE:
            return ABSENT
        if record.form == SMALL_MAP:
            has = map_value(record, word, &value)
            if has == LIVE:
                member.at, member.size, member.is_encoded = value.at, value.size, True
            return has
        if record.form in (SMALL_SET, SMALL_SORTED_SET):
            member.rank = index_of(record, size_of(record), word, &member.score)
            return LIVE if member.rank >= 0 else ABSENT if member.rank == -1 else GENERAL
        if index >= request.members:
            return GENERAL
        has = self.read(request.first_member + index, word, &row)
        if has != LIVE:
            return has
        if kind == SORTED_SET:
            if row.size != 8:
                return GENERAL
            member.score, member.rank = f64(row.payload), request.rank
        elif kind == HASH:
            if row.form != VALUE:
                return GENERAL
            member.at, member.size, member.expire_at_ms = row.payload, row.size, row.expire_at_ms
        return LIVE

    cdef int put_member(self, Request* request, int has, const Record* record, const Member* member) except -2:
        """Write what the reply has of a member."""
        cdef Output* out = self.out
        cdef int shape = rows[request.command].shape
        cdef size_t size = 0
        cdef int64_t count
        if shape == FLAGS:
            return put_line(out, c":", has == LIVE) + ANSWERED
        if shape == LENGTHS:
            size = member.size
            if has == LIVE and member.is_encoded and number_line(member.at + 1, member.at + member.size, &size) <= 0:
                return GENERAL
            return put_line(out, c":", size if has == LIVE else 0) + ANSWERED
        if shape in (SECONDS, MILLISECONDS, SECONDS_AT, MILLISECONDS_AT):
            if has != LIVE or not member.expire_at_ms:
                return put_line(out, c":", -1 if has == LIVE else -2) + ANSWERED
            count = member.expire_at_ms
            if shape in (SECONDS, MILLISECONDS):
                count -= self.clock_of[request.first_lookup]
            return put_line(out, c":", (count + 999) // 1000 if shape in (SECONDS, SECONDS_AT) else count) + ANSWERED
        if has != LIVE:
            return (put(out, b"*-1\r\n", 5) if shape == POINTS and not self.is_resp3 else put_nil(out, self.is_resp3)) + ANSWERED
        if shape in (POINTS, GEOHASHES):
            return put_place(out, shape, member.score, self.is_resp3)
        if shape == TEXTS:
            return (put(out, member.at, member.size) if member.is_encoded else put_bulk(out, member.at, member.size)) + ANSWERED
        if shape == SCORES_OF:
            return put_double(out, member.score, self.is_resp3) + ANSWERED
        if member.rank < 0:
            return GENERAL
        if shape == RANKS_OF:
            return put_line(out, c":", member.rank) + ANSWERED
        count = size_of(record)
        if member.rank >= count:
            return GENERAL
        return put_line(out, c":", count - 1 - member.rank) + ANSWERED

    cdef int reply_of_distance(self, Request* request, int found, const Record* record) except -2:
        """Reply with the distance of two members."""
        cdef Member one, other
        cdef const Word* words = &self.words[request.first_word]
        cdef double unit = unit_of(&words[3]) if request.words == 4 else 1.0, meters
        cdef int has_one = self.find_member(request, 0, found, record, &one)
        cdef int has_other = self.find_member(request, 1, found, record, &other)
        if not unit or has_one == GENERAL or has_other == GENERAL:
            return GENERAL
        if has_one != LIVE or has_other != LIVE:
            return put_nil(self.out, self.is_resp3) + ANSWERED
        meters = distance(point_of(one.score), point_of(other.score))
        if not (is_place(one.score) and is_place(other.score) and meters >= 0):
            return GENERAL
        return put_distance(self.out, meters, unit) + ANSWERED

    cdef int reply_of_area(self, Request* request, int shape, int found, const Record* record) except -2:
        """Reply with the members in an area, in the order of Redis."""
        cdef Search wanted
        cdef Match* matches
        cdef double score = 0
        cdef int64_t count, i
        if not parse_search(&self.words[request.first_word + 1], request.words - 1, shape, &wanted):
            return GENERAL
        if found != LIVE:
            return put(self.out, b"*0\r\n", 4) + ANSWERED
        if wanted.member != NULL:
            if self.find_score(request, record, wanted.member, &score) != LIVE or not is_place(score):
                return GENERAL
            wanted.shape.center = point_of(score)
        count = self.matches_of(request, record, &wanted, &matches)
        if count < 0:
            return GENERAL
        if wanted.is_ordered:
            qsort(matches, count, sizeof(Match), by_order)
        count = min(count, wanted.count) if wanted.count else count
        put_line(self.out, c"*", count)
        for i in range(count):
            put_match(self.out, &matches[i], &wanted, self.is_resp3)
        return ANSWERED

    cdef int64_t matches_of(
        self, Request* request, const Record* record, const Search* wanted, Match** matches
    ) except -2:
        """Find the members in an area, with ANY up to COUNT; return their number, -1 for the general path."""
        cdef Cell cells[CELLS_MAX]
        cdef int64_t first[CELLS_MAX]
        cdef int64_t last[CELLS_MAX]
        cdef int64_t total = 0, found = 0, i
        cdef int job = self.job_of[request.first_lookup], cell_count = cells_of(&wanted.shape, cells), cell
        cdef Item* items
        cdef double meters
        for cell in range(cell_count):
            first[cell] = self.rank_of_score(job, record, first_score(cells[cell], 0), False)
            last[cell] = self.rank_of_score(job, record, first_score(cells[cell], 1), False)
            if first[cell] < 0 or last[cell] < 0:
                return -1
            total += max(0, last[cell] - first[cell])
        if total > ENTRIES_MAX:
            return -1
        self.scratch.used = 0
        reserve(&self.scratch, (total + 1) * (sizeof(Match) + sizeof(Item)))
        matches[0], items = <Match*>self.scratch.data, <Item*>(self.scratch.data + (total + 1) * sizeof(Match))
        for cell in range(cell_count):
            if first[cell] >= last[cell]:
                continue
            if self.read_members(job, record, first[cell], last[cell], items) == GENERAL:
                return -1
            for i in range(last[cell] - first[cell]):
                meters = distance_within(&wanted.shape, point_of(items[i].score))
                if meters != meters or not is_place(items[i].score):
                    return -1
                if meters < 0:
                    continue
                matches[0][found] = Match(items[i], -meters if wanted.is_descending else meters, found)
                found += 1
                if wanted.is_any and found == wanted.count:
                    return found
        return found

    cdef int reply_of_list(self, Request* request, int found, const Record* record) except -2:
        """Reply with an element or a range of a list."""
        cdef Output* out = self.out
        cdef bint is_range = rows[request.command].is_array
        cdef int64_t count = size_of(record), first = 0, last = 0
        cdef ByteRange part
        if count < 0:
            return GENERAL
        if not is_range and found != LIVE:
            return put_nil(out, self.is_resp3) + ANSWERED
        if not integer(&self.words[request.first_word + 1], &first):
            return GENERAL
        if is_range and not integer(&self.words[request.first_word + 2], &last):
            return GENERAL
        if first < 0:
            first += count
        if not is_range:
            if not 0 <= first < count:
                return put_nil(out, self.is_resp3) + ANSWERED
            last = first + 1
        else:
            last = (last + count if last < 0 else last) + 1
            first, last = max(first, 0), min(last, count)
            if first >= last:
                return put(out, b"*0\r\n", 4) + ANSWERED
            if last - first > ENTRIES_MAX:
                return GENERAL
            put_line(out, c"*", last - first)
        if record.form == LONG_LIST:
            return self.put_list_blocks(request, record, first, last)
        if list_range(record, first, last, &part) == GENERAL:
            return GENERAL
        return put(out, part.at, part.size) + ANSWERED

    cdef int reply_of_random(self, Request* request, int found, const Record* record) except -2:
        """Reply with one or some elements of a small record, each as likely as any other."""
        cdef Output* out = self.out
        cdef Word* words = &self.words[request.first_word]
        cdef int64_t size = size_of(record), count = 0, left, i, chosen
        cdef bint has_values = request.words == 3
        cdef uint16_t order[RANDOM_MAX]
        if size < 0 or (found == LIVE and not size) or size > RANDOM_MAX:
            return GENERAL
        if request.words > 1 and not integer(&words[1], &count):
            return GENERAL
        if has_values and not is_word(&words[2], b"withvalues" if record.form == SMALL_MAP else b"withscores", 10):
            return GENERAL
        if has_values and found != LIVE:
            return GENERAL
        if request.words == 1:
            if found != LIVE:
                return put_nil(out, self.is_resp3) + ANSWERED
            return self.put_element(record, self.below(size), False)
        left = min(count, size) if count >= 0 else -count if size else 0
        if left > ENTRIES_MAX:
            return GENERAL
        put_line(out, c"*", 2 * left if has_values and not self.is_resp3 else left)
        if count < 0:
            for i in range(left):
                if self.put_element(record, self.below(size), has_values) == GENERAL:
                    return GENERAL
            return ANSWERED
        for i in range(size):
            order[i] = <uint16_t>i
        for i in range(left):  # the first steps of a shuffle
            chosen = i + self.below(size - i)
            order[i], order[chosen] = order[chosen], order[i]
            if self.put_element(record, order[i], has_values) == GENERAL:
                return GENERAL
        return ANSWERED

    cdef int64_t below(self, int64_t limit) noexcept:
        """Return a random number from 0 up to a limit of at most some thousands (exclusive)."""
        # xorshift64*: its upper half is even enough for that.
        self.random ^= self.random >> 12
        self.random ^= self.random << 25
        self.random ^= self.random >> 27
        return <int64_t>(((self.random * 0x2545F4914F6CDD1DULL) >> 32) % <uint64_t>limit)

    cdef int put_element(self, const Record* record, int64_t i, bint has_value) except -2:
        """Write an element of a small record: a field or member, and its value or score if asked."""
        cdef Output* out = self.out
        cdef size_t at = items_start(record)
        cdef ByteRange part
        cdef Item field, value
        if record.form == SMALL_SORTED_SET:
            if read_run(record.payload, record.size, i, i + 1, &field) == GENERAL:
                return GENERAL
            return self.put_item(&field, has_value) + ANSWERED
        if record.form == SMALL_SET:
            if list_range(record, i, i + 1, &part) == GENERAL:
                return GENERAL
            return put(out, part.at, part.size) + ANSWERED
        at += u32(record.payload + 2 + 4 * i) if at <= record.size else 0
        if next_item(record, 0, &at, &field) == GENERAL or (has_value and next_item(record, 1, &at, &value) == GENERAL):
            return GENERAL
        if has_value and self.is_resp3:
            put(out, b"*2\r\n", 4)
        put_bulk(out, field.at, field.size)
        return (put_bulk(out, value.at, value.size) if has_value else 0) + ANSWERED

    cdef int reply_of_search(self, Request* request, const Record* record) except -2:
        """Reply with the index of the first element of a short list that is equal to an argument."""
        cdef const Word* element = &self.words[request.first_word + 1]
        cdef double score
        cdef int64_t i = index_of(record, size_of(record), element, &score)
        if i == -2:
            return GENERAL
        return (put_line(self.out, c":", i) if i >= 0 else put_nil(self.out, self.is_resp3)) + ANSWERED

    cdef int reply_of_sets(self, Request* request) except -2:
        """Reply with members of small sets: those in all of them, in any, or in the first one only; or with their number."""
        cdef const Row* row = &rows[request.command]
        cdef Combination wanted
        cdef int64_t total, count, i, kept = 0
        cdef uint32_t buckets = 16
        cdef ScoredMember* members
        total = self.read_sets(request, &wanted) if parse_combination(&self.words[request.first_word], request.words, request.keys, row, &wanted) else -1
        if not 0 <= total <= ENTRIES_MAX:
            return GENERAL
        while buckets < total:
            buckets *= 2
        self.scratch.used = 0
        reserve(&self.scratch, (total + 1) * sizeof(ScoredMember) + buckets * sizeof(uint32_t))
        members = <ScoredMember*>self.scratch.data
        memset(&members[total + 1], 0, buckets * sizeof(uint32_t))
        count = combine(&wanted, request.keys, row.shape == IN_ANY, members, <uint32_t*>&members[total + 1], buckets - 1)
        for i in range(count):
            if row.shape == IN_ANY or members[i].sets == (1 if row.shape == IN_FIRST else request.keys):
                members[kept] = members[i]
                kept += 1
        if count < 0 or row.shape == COUNT_IN_ALL:
            kept = min(kept, wanted.limit) if wanted.limit else kept
            return put_line(self.out, c":", kept) + ANSWERED if count >= 0 else GENERAL
        if row.kind == SORTED_SET:
            qsort(members, kept, sizeof(ScoredMember), by_score)
        count = 2 * kept if wanted.has_scores and not self.is_resp3 else kept
        put_line(self.out, c"~" if self.is_resp3 and row.kind == SET else c"*", count)
        for i in range(kept):
            self.put_item(&members[i].item, wanted.has_scores)
        return ANSWERED

    cdef int64_t read_sets(self, Request* request, Combination* wanted) except -2:
        """Read the sets of all keys, in the order in which they are combined; return the number of members, -1 for the general path."""
        cdef const Row* row = &rows[request.command]
        cdef bint is_ordered = row.shape in (IN_ALL, COUNT_IN_ALL) or (row.shape == IN_ANY and row.kind == SORTED_SET)
        cdef WeightedSet one
        cdef WeightedSet* sets = wanted.sets
        cdef int64_t total = 0
        cdef size_t i, j
        cdef int found
        for i in range(request.keys):
            found = self.read_key(request.first_lookup + i, &self.words[request.first_word + i], &one.record)
            if found == GENERAL or (found == LIVE and one.record.form not in (SMALL_SET, SMALL_FORMS[row.kind])):
                return -1
            self.count_lookup(found == LIVE)
            one.count, one.weight = size_of(&one.record), wanted.weights[i]
            if one.count < 0:
                return -1
            total += one.count
            j = i
            while is_ordered and j and sets[j - 1].count > one.count:  # smaller ones come first
                sets[j] = sets[j - 1]
                j -= 1
            sets[j] = one
        return total

    cdef int reply_of_sort(self, Request* request, const Record* record) except -2:
        """Reply with the elements of a small list, set or sorted set in the order of their numbers, or of their texts."""
        cdef Word* words = &self.words[request.first_word]
        cdef bint is_descending = False, is_alpha = False
        cdef int64_t start = 0, wanted = -1, size, i
        cdef size_t at = 1
        cdef Word word
        cdef Item* items
        while at < request.words:
            if request.words - at > 2 and is_word(&words[at], b"limit", 5):
                if not integer(&words[at + 1], &start) or not integer(&words[at + 2], &wanted):
                    return GENERAL
                at += 2
            elif is_word(&words[at], b"alpha", 5):
                is_alpha = True
            elif is_word(&words[at], b"asc", 3) or is_word(&words[at], b"desc", 4):
                is_descending = words[at].size == 4
            else:
                return GENERAL
            at += 1
        size = size_of(record) if record.form < 0 or record.form in (SHORT_LIST, SMALL_SET, SMALL_SORTED_SET) else -1
        if not 0 <= size <= ENTRIES_MAX:
            return GENERAL
        self.scratch.used = 0
        reserve(&self.scratch, (size + 1) * sizeof(Item))
        items, at = <Item*>self.scratch.data, items_start(record) if size else 0
        for i in range(size):
            if next_item(record, i, &at, &items[i]) == GENERAL:
                return GENERAL
            word.at, word.size, items[i].score = items[i].at, items[i].size, 0.0
            if memchr(word.at, 0, word.size) != NULL or not (is_alpha or exact_double(&word, &items[i].score)):
                return GENERAL  # in Redis a zero byte ends a text
        qsort(items, size, sizeof(Item), by_score)
        start = min(max(start, 0), size)
        wanted = size - start if wanted < 0 else min(wanted, size - start)
        put_line(self.out, c"*", wanted)
        for i in range(start, start + wanted):
            self.put_item(&items[size - 1 - i if is_descending else i], False)
        return ANSWERED

    cdef int64_t rank_of_score(self, int job, const Record* record, double score, bint is_after) except -2:
        """Return how many members have a lower score; -1 if the set is damaged. is_after: those with this score, too."""
        cdef Word no_member = Word(<const uint8_t*>b"", 0)
        if is_after:
            if score == INFINITY:
                return size_of(record)
            score = nextafter(score, INFINITY)
        if record.form == SMALL_SORTED_SET:
            return rank_in_run(record.payload, record.size, score, &no_member, False)
        return self.rank_in_tree(job, u64(record.payload), score, &no_member)

    cdef bint range_in(self, int job, const Record* record, RankRange* wanted) except -1:
        """Turn a range into ranks from the lowest, the last one exclusive; False if the set is damaged."""
        cdef int64_t count = size_of(record), length
        if count < 0:
            return False
        if wanted.is_by_text:
            if record.form != SMALL_SORTED_SET or not text_ranks(record, count, wanted):
                return False
        elif not wanted.is_by_score:
            wanted.first = wanted.first + count if wanted.first < 0 else wanted.first
            wanted.last = (wanted.last + count if wanted.last < 0 else wanted.last) + 1
            wanted.first, wanted.last = max(wanted.first, 0), min(wanted.last, count)
            if wanted.is_reversed:
                wanted.first, wanted.last = count - wanted.last, count - wanted.first
            return True
        else:
            wanted.first = self.rank_of_score(job, record, wanted.low, wanted.excludes_low)
            wanted.last = self.rank_of_score(job, record, wanted.high, not wanted.excludes_high)
        if wanted.first < 0 or wanted.last < 0:
            return False
        length = max(0, wanted.last - wanted.first - wanted.offset) if wanted.last > wanted.first else 0
        if 0 <= wanted.count < length:
            length = wanted.count
        if wanted.is_reversed:
            wanted.last -= wanted.offset
            wanted.first = wanted.last - length
        else:
            wanted.first += wanted.offset
            wanted.last = wanted.first + length
        return True

    cdef int reply_of_range(self, Request* request, int found, const Record* record) except -2:
        """Reply with the members of a range by rank or by score, or with their number."""
        cdef Output* out = self.out
        cdef int job = self.job_of[request.first_lookup]
        cdef int64_t first = 0, last = 0, i
        cdef RankRange wanted
        cdef Item* items
        if not parse_range(&self.words[request.first_word], request.words, &rows[request.command], &wanted):
            return GENERAL
        if found == LIVE and record.form == LARGE_SORTED_SET and record.size < 24:
            return GENERAL
        if found == LIVE:
            if not self.range_in(job, record, &wanted):
                return GENERAL
            first, last = wanted.first, wanted.last
        if rows[request.command].shape == LENGTHS:
            return put_line(out, c":", max(0, last - first)) + ANSWERED
        if first >= last:
            return put(out, b"*0\r\n", 4) + ANSWERED
        if last - first > ENTRIES_MAX:
            return GENERAL
        put_line(out, c"*", (last - first) * (2 if wanted.has_scores and not self.is_resp3 else 1))
        self.scratch.used = 0
        reserve(&self.scratch, (last - first) * sizeof(Item))
        items = <Item*>self.scratch.data
        if self.read_members(job, record, first, last, items) == GENERAL:
            return GENERAL
        for i in range(last - first):
            self.put_item(&items[last - first - 1 - i if wanted.is_reversed else i], wanted.has_scores)
        return ANSWERED

    cdef int read_members(self, int job, const Record* record, int64_t first, int64_t last, Item* items) except -2:
        """Read the members of a sorted set from rank `first` up to `last` (exclusive)."""
        cdef int64_t at = first, start, stop
        cdef Lookup leaf
        if record.form == SMALL_SORTED_SET:
            return read_run(record.payload, record.size, first, last, items)
        while at < last:
            start = self.find_leaf(job, u64(record.payload), at, 0.0, NULL, &leaf)
            if start < 0:
                return GENERAL
            stop = min(last, start + members_in_run(leaf.record, leaf.size - 1))
            if not start <= at < stop or read_run(leaf.record, leaf.size - 1, at - start, stop - start, items + (at - first)) == GENERAL:
                return GENERAL
            at = stop
        return LIVE

    cdef int find_score(self, const Request* request, const Record* record, const Word* member, double* score) except -2:
        """Find the score of a member that was not looked up with the others: LIVE, ABSENT or GENERAL."""
        cdef Pages pages
        cdef Lookup lookup
        cdef Lookup* lookups = &lookup
        cdef Record row
        cdef int64_t rank
        cdef int found
        if record.form == SMALL_SORTED_SET:
            rank = index_of(record, size_of(record), member, score)
            return LIVE if rank >= 0 else ABSENT if rank == -1 else GENERAL
        if record.size < 24:
            return GENERAL
        pages = (<JobPages>self.jobs[self.job_of[request.first_lookup]]).pages
        name_member(record, member, &lookup)
        pages.find(&pages.fields, &lookups, 1)
        found = read_record(&lookup, member, self.clock_of[request.first_lookup], &row)
        if found == LIVE and row.size != 8:
            return GENERAL
        score[0] = f64(row.payload) if found == LIVE else 0
        return found

    cdef int put_item(self, const Item* item, bint has_score) except -1:
        if has_score and self.is_resp3:
            put(self.out, b"*2\r\n", 4)
        put_bulk(self.out, item.at, item.size)
        return put_double(self.out, item.score, self.is_resp3) if has_score else 0


cdef class SessionFields:
    """The fields of a session that the core uses with each request (`session.Session` has the others)."""


cdef class ConnectionFields:
    """The fields of a connection that its transport reads with each request (`client.Connection` has the others)."""


cdef class InputInterceptor:
    """Processes a socket's input before its protocol does, without making Python objects."""

    cdef size_t intercept(self, const uint8_t* data, size_t size) except? 0:
        """Process input from the front; return the number of processed bytes."""
        return 0


cdef class CalledCommand:
    """A command whose function the core calls (see `pipeline.called`), and its counters since the last `FastPath.collect`.

    name_words, least, most: the number of words in its name, and in its requests. takes_words: its function takes the words
    after the name, each through its function of `converters`, or as it is. keeps_caching: see `command.policy`. is_for_subscribers: a client with subscriptions may call it.
    has_slot: in a cluster, the pipeline checks first whether this node has the slot of its channel.
    is_own: returns whether a request of a session is answered by this process alone; None: each is.
    """

    def __init__(
        self, command, command_stats, size_t name_words, size_t least, size_t most, bint takes_words, converters,
        bint keeps_caching, bint is_for_subscribers, bint has_slot, is_own
    ):
        self.command, self.command_stats, self.function = command, command_stats, command.handler.body
        self.name, self.name_words, self.least, self.most = command.name, name_words, least, most
        self.converters, self.is_own = converters, is_own
        self.takes_words, self.keeps_caching, self.is_for_subscribers = takes_words, keeps_caching, is_for_subscribers
        self.has_slot = has_slot

    cdef int collect(self) except -1:
        """Add the counts to the command's statistics."""
        cdef int bits
        self.command_stats.calls += self.calls
        self.command_stats.nanoseconds += self.nanoseconds
        took = self.command_stats.took
        for bits in range(64):
            if self.times[bits]:
                took[bits] += self.times[bits]
                self.times[bits] = 0
        self.calls = self.nanoseconds = 0


cdef class FastPath:
    """The core with the stages around it, for one server: access control, pushes before the replies, statistics.

    make_rules: makes the `Rules` of a user. record_slow: records slow requests. count_keys: returns the number of all keys
    that a user sees in a view, or None. watch_point: returns the lineage and the epoch of a job's store, in the view.
    (A proxy's needs the last two only, to read a server's stores.) caller: the `pipeline.called.Caller` of the
    commands that it calls; None: it calls none.

    After `answer_front`, needs_turn: the connection continues in a turn, even if no input is left. incomplete: the reply that is
    to be completed then, or None.
    """

    def __cinit__(self, server, make_rules=None, record_slow=None, count_keys=None, watch_point=None):
        self.server, self.stats, self.make_rules, self.record_slow = server, server.stats, make_rules, record_slow
        self.core = Core()
        self.core.count_keys, self.core.read_clock, self.core.report = count_keys, server.clock, server.report
        self.core.epochs_now, self.core.watch_point = server.epochs_now, watch_point
        self.output.data, self.output.size = <char*>malloc(16384), 16384
        if self.output.data == NULL:
            raise MemoryError
        self.names = [name.decode() for name in NAMES]
        self.command_stats_of = [server.stats.command_stats(name) for name in self.names]
        for command, name in enumerate(NAMES):
            self.core.needs_state[command] = "loading" not in server.table.get(name).facts.flags
        self.stats.collectors.append(self.collect)
        self.counted = []

    def __dealloc__(self):
        free(self.output.data)

    def take_incomplete(self):
        """Return the incomplete reply of the command that was called last, or None; it is returned once."""
        incomplete, self.incomplete = self.incomplete, None
        return incomplete

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
        if took[0] == size or self.core.is_full or self.core.is_incomplete or self.needs_turn or not session.is_authenticated:
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
        if session.epoch_feed is not None:
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
        self.core.monotonic_ms = monotonic_ns() // 1_000_000
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
        cdef Core core = self.core
        cdef size_t took = 0, called = 1
        self.needs_turn, self.incomplete = False, None
        while called and not self.needs_turn:
            took += self.answer_compiled(session, data + took, size - took, out)
            if took == size or core.is_incomplete or core.is_full:
                break
            called = self.call_all(session, data + took, size - took, out)
            took += called
            if took == size or core.is_incomplete or core.is_full:
                break
        return took

    cdef size_t answer_compiled(self, SessionFields session, const uint8_t* data, size_t size, Output* out) except? 0:
        """Answer requests at the front of a buffer with the core, as `answer_front` does."""
        cdef Rules rules
        cdef size_t before = out.used, took
        cdef Counts counts = self.core.counts
        cdef int64_t started_ns, elapsed_ns
        cdef Core core = self.core
        server = self.server
        core.is_incomplete = core.is_full = self.was_tried = False
        if not core.has_lookahead(data):
            if not (session.can_use_checked_fast_path or session.can_queue) or not self.begin():
                return 0
        rules = self.rules_of(session.user)
        core.begin_tracking(session.tracking_state)
        self.was_tried = True
        started_ns = monotonic_ns()
        core.out, core.monotonic_ms, core.session = out, started_ns // 1_000_000, session
        try:
            took = core.answer_all(data, size, session.protocol, rules)
        except Exception as error:
            # `report` logs and counts the exception, and the general path answers the requests. More input or output
            # room would not help the core.
            server.report(error)
            core.counts = counts
            core.is_incomplete = core.is_full = False
            core.drop_lookaheads()
            took = 0
        if not took:
            out.used = before
            return 0
        elapsed_ns = monotonic_ns() - started_ns
        session.calls += self.count(elapsed_ns) + core.queued
        session.active_ms = core.now
        session.last_command = self.names[core.last_command]
        if elapsed_ns >= self.slow_ns:
            self.record_slow(session, PyBytes_FromStringAndSize(<const char*>data, took), elapsed_ns)
        if session.tracking_state is not None:
            session.tracking_state.is_caching_set = core.is_caching_set
        self.push_before(session, out, before)
        if core.keys_read:  # recording may evict keys, whose invalidations are sent after the replies
            record_reads(server.tracking, session.tracking_state, core.keys_read)
        return took

    cdef int push_before(self, SessionFields session, Output* out, size_t before, bytes pushes=b"") except -1:
        """Write pushes, and a client's pending ones, in front of the replies that were written from `before` on."""
        server, tracking_state, epoch_feed = self.server, session.tracking_state, session.epoch_feed
        if tracking_state is not None and tracking_state.has_pending:
            if tracking_state.redirect:
                server.clients.push_invalidations(tracking_state)
            else:
                pushes += server.pending_invalidations(session)
        if epoch_feed is not None and server.change_counter != epoch_feed.change_counter:
            pushes = server.pending_pushes(epoch_feed) + pushes
        if pushes:
            insert(out, before, PyBytes_AS_STRING(pushes), PyBytes_GET_SIZE(pushes))
        return 0

    cdef size_t call_all(self, SessionFields session, const uint8_t* start, size_t size, Output* out) except? 0:
        """Call the functions of the commands at the front of a buffer, as `answer_front` answers them."""
        cdef Core core = self.core
        cdef const uint8_t* at = start
        cdef const uint8_t* end = start + size
        cdef size_t count = 0, before = out.used
        cdef Py_ssize_t took
        cdef int64_t now_ns = 0, ends_ns = 0
        cdef CalledCommand called
        if self.caller is None or not session.can_call:
            return 0
        core.drop_lookaheads()  # a function may change anything
        context = None
        try:
            while at < end and session.can_call and self.incomplete is None:
                took = cut(at, end, core.words, REQUEST_WORDS_MAX, WORD_BYTES_MAX, &count)
                core.is_incomplete = took == 0 and at > start
                called = self.called_of(count) if took > 0 else None
                if called is None or not called.least <= count <= called.most:
                    break
                if called.has_slot and self.server.cluster is not None:
                    break
                if not session.can_be_forwarded and not self.admits_call(session, called, count):
                    break
                if called.is_own is not None and not called.is_own(session, self.cut_request(count)):
                    break
                if context is None:
                    context, now_ns = self.caller.begin(session), monotonic_ns()
                    if context is None:
                        break
                    session.pushed, ends_ns = [], now_ns + CALLED_NS_MAX
                now_ns = self.call(session, context, called, at, took, count, out, now_ns)
                at += took
                session.calls += 1
                core.is_full = now_ns >= ends_ns or out.used - before > OUTPUT_BYTES_MAX
                if core.is_full:
                    core.is_full = at < end
                    break
        finally:
            session.pushed = None
        self.needs_turn = context is not None and (not session.can_call or self.incomplete is not None)
        return at - start

    cdef CalledCommand called_of(self, size_t count):
        """Return the command of the request that was cut; None: no function is called for it."""
        cdef const Word* words = self.core.words
        if self.last_caller is self.caller and count >= self.last_words and is_text(&words[0], self.last_name):
            if self.last_words == 1 or is_text(&words[1], self.last_subcommand):
                return self.last_called
        name, subcommand = PyBytes_FromStringAndSize(<const char*>words[0].at, words[0].size), None
        found = self.caller.commands[name]
        if found is not None and type(found) is not CalledCommand:
            if count > 1:
                subcommand = PyBytes_FromStringAndSize(<const char*>words[1].at, words[1].size)
            found = found[subcommand]
            if subcommand is None:
                return found
        if found is not None:
            self.last_caller, self.last_called, self.last_words = self.caller, found, 1 if subcommand is None else 2
            self.last_name, self.last_subcommand = name, subcommand
        return found

    cdef bint admits_call(self, SessionFields session, CalledCommand called, size_t count) except -1:
        """Return whether a client with subscriptions, or a restricted user, may send the request that was cut."""
        if session.subscriptions is not None and not called.is_for_subscribers:
            return False
        return session.user.is_unrestricted or session.user.denial(called.command, self.cut_request(count)) is None

    cdef list cut_request(self, size_t count):
        """Return the words of the request that was cut."""
        cdef const Word* words = self.core.words
        cdef size_t i
        return [PyBytes_FromStringAndSize(<const char*>words[i].at, words[i].size) for i in range(count)]

    cdef object argument(self, CalledCommand called, size_t i):
        """Return an argument of the request that was cut, as the command's function takes it."""
        cdef const Word* word = &self.core.words[called.name_words + i]
        text = PyBytes_FromStringAndSize(<const char*>word.at, word.size)
        convert = None if called.converters is None else called.converters[i]
        return text if convert is None else convert(text)

    cdef object run(self, context, CalledCommand called, size_t count):
        """Call the function of the command that was cut."""
        cdef size_t i
        if not called.takes_words:
            return called.command.execute(context, [self.cut_request(count)])[0]
        count -= called.name_words
        if count == 0:  # to call a function with few arguments needs no tuple
            return called.function(context)
        if count == 1:
            return called.function(context, self.argument(called, 0))
        if count == 2:
            return called.function(context, self.argument(called, 0), self.argument(called, 1))
        return called.function(context, *[self.argument(called, i) for i in range(count)])

    cdef int64_t call(
        self, SessionFields session, context, CalledCommand called, const uint8_t* request, size_t size, size_t count,
        Output* out, int64_t started_ns
    ) except -1:
        """Call a command's function, and write its reply; return the time then. request: its bytes, which were cut."""
        cdef size_t before = out.used
        cdef int64_t now_ns, elapsed_ns
        session.last_command = called.name
        reply = b""
        try:
            reply = self.run(context, called, count)
            if not put_reply(out, reply, session.protocol >= 3):
                out.used = before
                if isinstance(reply, (Sliced, Pending)):
                    self.incomplete = reply
                else:
                    put_text(out, encode(reply, session.protocol))
        except Exception as error:
            called.command_stats.failed += 1
            out.used = before
            self.put_error(out, error)
        now_ns = monotonic_ns()
        elapsed_ns = now_ns - started_ns
        if session.can_call and self.incomplete is None and (elapsed_ns < ONE_BY_ONE_NS or elapsed_ns < self.server.slow_ns):
            if not called.calls:
                self.counted.append(called)
            called.calls += 1
            called.nanoseconds += elapsed_ns
            called.times[64 - count_leading_zeros(elapsed_ns | 1)] += 1
        else:
            cut(request, request + size, self.core.words, REQUEST_WORDS_MAX, WORD_BYTES_MAX, &count)
            called.command_stats.calls += 1
            self.caller.record(context, called.command, called.command_stats, self.cut_request(count), reply, elapsed_ns)
            if session.replies_suppressed:
                out.used = before
        if session.tracking_state is not None and not called.keeps_caching:
            session.tracking_state.is_caching_set = False
        if session.pushed:
            pushes, session.pushed = b"".join(session.pushed), []
            self.push_before(session, out, before, pushes)
        elif session.tracking_state is not None or session.epoch_feed is not None:
            self.push_before(session, out, before)
        return now_ns

    cdef int put_error(self, Output* out, error) except -1:
        """Write the reply to an exception, and count it."""
        cdef const char* text
        cdef Py_ssize_t size
        if type(error) is GenericError and error.text.isascii():
            text = PyUnicode_AsUTF8AndSize(error.text, &size)
            if memchr(text, c"\r", size) == NULL and memchr(text, c"\n", size) == NULL:
                put(out, b"-ERR ", 5)
                put(out, text, size)
                self.errors += 1
                return put(out, b"\r\n", 2)
        return put_text(out, self.caller.error_reply(error))

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
        stats.hits += core.counts.hits
        stats.misses += core.counts.misses
        if core.counts.errors:
            stats.count_error("ERR", core.counts.errors)
            self.command_stats_of[FREQ].failed += core.counts.errors
        core.counts = Counts(0, 0, 0)
        if self.errors:
            stats.count_error(GenericError.code, self.errors)
            self.errors = 0
        self.collect_called()

    cdef int collect_called(self) except -1:
        """Add the counts of called commands to the server's statistics."""
        cdef CalledCommand called
        for called in self.counted:
            called.collect()
        self.counted.clear()
