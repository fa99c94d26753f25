# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The commands that the core answers."""

from libc.stdint cimport uint32_t

from resp_server.native.records cimport (
    LARGE_MAP, LARGE_SET, LARGE_SORTED_SET, LONG_LIST, LONG_VALUE, SHORT_LIST, SMALL_MAP, SMALL_SET, SMALL_SORTED_SET, VALUE
)
from resp_server.native.wire cimport add_spec

SMALL_FORMS[:] = [-1, VALUE, SMALL_MAP, SHORT_LIST, SMALL_SET, SMALL_SORTED_SET, -1]
LARGE_FORMS[:] = [-1, LONG_VALUE, LARGE_MAP, LONG_LIST, LARGE_SET, LARGE_SORTED_SET, -1]

# What is special in a command's arguments.
ANY_SLOTS = {"has_any_slots": True}
KEYS_AFTER_COUNT = {"has_key_count": True}
MEMBERS_AFTER_COUNT = {"first_member": 3}  # HTTL key FIELDS 2 field field

# Each command that the core answers: its name, the minimum and maximum of arguments (-1: any number), the kind of its
# keys, what it reads and replies with, whether the reply is an array with an element for each argument, and what is special.
ROWS = (
    (b"get", 1, 1, STRING, WHOLE, TEXTS, False),
    (b"mget", 1, -1, STRING, KEYS, TEXTS, True),
    (b"state|mget", 1, -1, STRING, KEYS, TEXTS, True, ANY_SLOTS),
    (b"strlen", 1, 1, STRING, SIZE, LENGTHS, False),
    (b"getrange", 3, 3, STRING, BYTES, TEXTS, False),
    (b"substr", 3, 3, STRING, BYTES, TEXTS, False),
    (b"getbit", 2, 2, STRING, BITS, FLAGS, False),
    (b"bitcount", 1, 4, STRING, BITS, LENGTHS, False),
    (b"bitpos", 2, 5, STRING, BITS, PLACES, False),
    (b"bitfield_ro", 4, -1, STRING, BIT_FIELDS, NUMBERS, True),
    (b"hget", 2, 2, HASH, MEMBERS, TEXTS, False),
    (b"hmget", 2, -1, HASH, MEMBERS, TEXTS, True),
    (b"hexists", 2, 2, HASH, MEMBERS, FLAGS, False),
    (b"hstrlen", 2, 2, HASH, MEMBERS, LENGTHS, False),
    (b"hlen", 1, 1, HASH, SIZE, LENGTHS, False),
    (b"hgetall", 1, 1, HASH, WHOLE, PAIRS, False),
    (b"hkeys", 1, 1, HASH, WHOLE, FIELDS, False),
    (b"hvals", 1, 1, HASH, WHOLE, TEXTS, False),
    (b"hrandfield", 1, 3, HASH, RANDOM, PAIRS, False),
    (b"httl", 4, -1, HASH, MEMBERS, SECONDS, True, MEMBERS_AFTER_COUNT),
    (b"hpttl", 4, -1, HASH, MEMBERS, MILLISECONDS, True, MEMBERS_AFTER_COUNT),
    (b"hexpiretime", 4, -1, HASH, MEMBERS, SECONDS_AT, True, MEMBERS_AFTER_COUNT),
    (b"hpexpiretime", 4, -1, HASH, MEMBERS, MILLISECONDS_AT, True, MEMBERS_AFTER_COUNT),
    (b"hscan", 2, 4, HASH, SCAN, PAIRS, True),
    (b"llen", 1, 1, LIST, SIZE, LENGTHS, False),
    (b"lindex", 2, 2, LIST, INDEXES, TEXTS, False),
    (b"lrange", 3, 3, LIST, INDEXES, TEXTS, True),
    (b"lpos", 2, 2, LIST, SEARCH, PLACES, False),
    (b"scard", 1, 1, SET, SIZE, LENGTHS, False),
    (b"smembers", 1, 1, SET, WHOLE, TEXTS, False),
    (b"sismember", 2, 2, SET, MEMBERS, FLAGS, False),
    (b"smismember", 2, -1, SET, MEMBERS, FLAGS, True),
    (b"srandmember", 1, 2, SET, RANDOM, TEXTS, False),
    (b"sinter", 1, -1, SET, COMBINED, IN_ALL, True),
    (b"sunion", 1, -1, SET, COMBINED, IN_ANY, True),
    (b"sdiff", 1, -1, SET, COMBINED, IN_FIRST, True),
    (b"sintercard", 2, -1, SET, COMBINED, COUNT_IN_ALL, False, KEYS_AFTER_COUNT),
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
    (b"zinter", 2, -1, SORTED_SET, COMBINED, IN_ALL, True, KEYS_AFTER_COUNT),
    (b"zunion", 2, -1, SORTED_SET, COMBINED, IN_ANY, True, KEYS_AFTER_COUNT),
    (b"zdiff", 2, -1, SORTED_SET, COMBINED, IN_FIRST, True, KEYS_AFTER_COUNT),
    (b"zintercard", 2, -1, SORTED_SET, COMBINED, COUNT_IN_ALL, False, KEYS_AFTER_COUNT),
    (b"geopos", 1, -1, SORTED_SET, MEMBERS, POINTS, True),
    (b"geohash", 1, -1, SORTED_SET, MEMBERS, GEOHASHES, True),
    (b"geodist", 3, 4, SORTED_SET, TWO_MEMBERS, NUMBERS, False),
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
    (b"memory|usage", 1, 1, ANY_KIND, ROW_SIZE, LENGTHS, False),
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
    (b"multi", 0, 0, ANY_KIND, TRANSACTION, OK, False),
    (b"exec", 0, 0, ANY_KIND, TRANSACTION, REPLIES, True),
    (b"discard", 0, 0, ANY_KIND, TRANSACTION, OK, False),
)
NAMES = tuple(row[0] for row in ROWS)


def _fill_rows():
    global COMMANDS, MULTI, EXEC, DISCARD, FREQ
    cdef int command
    for name, least, most, kind, reads, reply, is_array, *special in ROWS:
        command = add_spec(&specs, name, least, <uint32_t><int>most)
        facts = special[0] if special else {}
        rows[command] = Row(
            kind, reads, reply, is_array, b"|" in name, facts.get("has_any_slots", False), facts.get("first_member", 1),
            facts.get("has_key_count", False),
        )
        COMMANDS = command + 1
    MULTI, EXEC, DISCARD, FREQ = [NAMES.index(name) for name in (b"multi", b"exec", b"discard", b"object|freq")]


_fill_rows()
