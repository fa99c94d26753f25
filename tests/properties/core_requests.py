"""The store, and random requests, for which the compiled core is compared with the general path."""

from __future__ import annotations

from itertools import chain

import hypothesis.strategies as st

from compat.fuzz.targets import NOW_MS, STATES
from state_backend.codec import packed_map
from state_backend.codec.geohash import Point, score_of
from state_backend.lmdb.store import LmdbStore
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.store import EpochChanges

# Texts that look like the protocol are the interesting ones.
ODD_KEYS = [
    b"*",
    b"$",
    b"a*2\r\n$3\r\nGET\r\n$1",
    b"\r\n",
    b"\r\n*2\r\n$3\r\nGET\r\n$3\r\nj:x\r\n",
    b"2\r\n$3\r\nGET\r\n$1",
]
VALUE_KEYS = [b"j:v:%d" % number for number in range(4)] + ODD_KEYS
MAP_KEYS, LIST_KEYS = [b"j:m:small", b"j:m:large", b"j:m:ttl"], [b"j:l:short", b"j:l:long"]
SET_KEYS, RANK_KEYS = (
    [b"j:s:small", b"j:s:ttl", b"j:s:large", b"j:s:other"],
    [b"j:z:small", b"j:z:large", b"j:z:odd", b"j:z:ties"],
)
PLACE_KEYS = [b"j:z:places", b"j:z:map"]  # a small one and a large one
SCORES = [
    b"-inf",
    b"inf",
    b"-0.0",
    b"0",
    b"0.5",
    b"-12.25",
    b"0.001",
    b"9999.75",
    b"10000.5",
    b"5e-324",
    b"1e300",
    b"7",
]
KEYS = [*VALUE_KEYS, *MAP_KEYS, *LIST_KEYS, *SET_KEYS, *RANK_KEYS, *PLACE_KEYS, b"j:v:gone", b"j:v:long", b"", b"nope"]


def changes(turn: int) -> list[Change]:
    put = [Change("v", Op.PUT, key, value=b"%d %b" % (turn, key)) for key in VALUE_KEYS[turn:]]
    put += [Change("v", Op.PUT, b"j:v:long", value=b"x" * 5_000)]
    put += [Change("v", Op.PUT, b"j:v:gone", value=b"x", expire_at_ms=NOW_MS)]
    pairs = [(b"f%d" % number, b"%d" % turn) for number in range(3)]
    put += [Change("m", Op.PUT, b"j:m:small", value=packed_map.pack(pairs))]
    put += [Change("m", Op.PUT, b"j:m:large", b"f%d" % number, b"x") for number in range(packed_map.FIELDS_MAX + 1)]
    put += [Change("m", Op.PUT, b"j:m:ttl", b"f0", b"x", NOW_MS + 1000)]
    put += [
        Change("l", Op.APPEND, key, value=b"%d" % turn) for key in LIST_KEYS for _ in range(2 if b"s" in key else 90)
    ]
    put += [Change("s", Op.PUT, SET_KEYS[0], b"m%d" % (turn + each), b"") for each in range(3)]
    put += [Change("s", Op.PUT, SET_KEYS[1], b"m0", b"", NOW_MS + 1000)]
    put += [Change("s", Op.PUT, SET_KEYS[2], b"m%d" % each, b"") for each in range(300 - turn)]
    put += [Change("s", Op.PUT, SET_KEYS[3], b"m%d" % (each * 2), b"") for each in range(10)]
    put += [Change("z", Op.PUT, RANK_KEYS[0], b"m%d" % each, b"%d" % (each * turn)) for each in range(4)]
    put += [Change("z", Op.PUT, RANK_KEYS[1], b"m%d" % each, b"%d" % (each + turn)) for each in range(300)]
    # A score has many members; one of them is empty, and some are long.
    put += [Change("z", Op.PUT, RANK_KEYS[2], b"", SCORES[turn])]
    put += [
        Change("z", Op.PUT, RANK_KEYS[2], b"m%d" % each + b"x" * (each % 7 * 40), SCORES[(each + turn) % len(SCORES)])
        for each in range(290)
    ]
    put += [
        Change("z", Op.PUT, RANK_KEYS[3], b"m%d" % each, score) for each, score in enumerate([*SCORES, b"0", b"inf"])
    ]
    put += [
        Change("z", Op.PUT, key, b"m%d" % each, b"%d" % score_of(*place(each)))
        for key, count in zip(PLACE_KEYS, (12, 300), strict=True)
        for each in range(turn, count)
    ]
    return put


def place(number: int) -> Point:
    """Return a point: some are near to each other, some at the edges of the map, some twins."""
    at_edges = [(180.0, 85.05112878), (-180.0, -85.05112878), (0.0, 0.0), (-0.0, 85.0), (179.9999, 0.0), (0.0, 0.0)]
    return at_edges[number] if number < len(at_edges) else (13.0 + number % 17 * 0.01, 38.0 + number % 19 * 0.01)


scores = st.sampled_from(
    [
        *SCORES,
        b"+inf",
        b"-INF",
        b"(7",
        b"(-inf",
        b"(0",
        b"-0",
        b"1.5e2",
        b".5",
        b"3.",
        b"0x1",
        b"nan",
        b"(",
        b"",
        b"x",
        b"1e999",
    ]
)
limits = st.sampled_from(
    [
        [],
        [],
        [b"LIMIT", b"0", b"2"],
        [b"limit", b"1", b"-1"],
        [b"LIMIT", b"-1", b"3"],
        [b"LIMIT", b"290", b"5"],
        [b"LIMIT", b"1"],
    ]
)
range_options = st.lists(
    st.sampled_from([b"WITHSCORES", b"withscores", b"REV", b"rev", b"BYSCORE", b"byscore", b"BYLEX", b"nonsense"]),
    max_size=3,
)
text_ends = st.sampled_from([b"-", b"+", b"[m1", b"(m1", b"[m280", b"(m2", b"[", b"(", b"[zz", b"m1", b""])
places = st.sampled_from([*PLACE_KEYS, *PLACE_KEYS, *RANK_KEYS, b"j:v:0", b"nope"])
units = st.sampled_from([b"m", b"km", b"KM", b"ft", b"Mi", b"cm"])
lengths = st.sampled_from([b"0", b"1", b"1.5", b"20", b"800", b"20000", b"1e7", b"-1", b"inf", b"x", b"1e-300"])
coordinates = st.sampled_from([b"13.05", b"38.1", b"0", b"-0", b"180", b"-180", b"85.05112878", b"85.06", b"1e3", b"x"])
centers = st.one_of(
    st.sampled_from([b"m3", b"m7", b"m100", b"nobody"]).map(lambda member: [b"FROMMEMBER", member]),
    st.tuples(st.just(b"fromlonlat"), coordinates, coordinates).map(list),
    st.just([b"FROMLONLAT", b"13.05", b"38.1"]),
)
areas = st.one_of(
    st.tuples(st.just(b"BYRADIUS"), lengths, units).map(list),
    st.tuples(st.just(b"bybox"), lengths, lengths, units).map(list),
)
search_options = st.lists(
    st.sampled_from(
        [
            *([b"WITHDIST"], [b"withhash"], [b"WITHCOORD"], [b"ASC"], [b"desc"], [b"COUNT", b"3"]),
            *([b"count", b"5", b"ANY"], [b"COUNT", b"0"], [b"ANY"], [b"COUNT"], [b"STORE", b"x"]),
        ]
    ),
    max_size=3,
).map(lambda some: list(chain(*some)))
place_reads = st.one_of(
    st.builds(
        lambda name, key, some: [name, key, *some],
        st.sampled_from([b"GEOPOS", b"GEOHASH", b"geopos", b"GEODIST"]),
        places,
        st.lists(st.sampled_from([b"m0", b"m1", b"m2", b"m3", b"m8", b"m11", b"m299", b"nobody"]), max_size=3),
    ),
    st.builds(lambda key, unit: [b"GEODIST", key, b"m7", b"m9", unit], places, units),
    st.builds(
        lambda name, key, parts, options: [name, key, *chain(*parts), *options],
        st.sampled_from([b"GEOSEARCH", b"geosearch"]),
        places,
        st.one_of(st.tuples(centers, areas), st.tuples(areas, centers), st.tuples(centers, centers, areas)),
        search_options,
    ),
    st.builds(
        lambda key, center, length, unit, options: [b"GEORADIUS_RO", key, *center, length, unit, *options],
        places,
        st.one_of(st.tuples(coordinates, coordinates), st.just((b"13.05", b"38.1"))),
        lengths,
        units,
        search_options,
    ),
    st.builds(
        lambda key, member, length, unit, options: [b"GEORADIUSBYMEMBER_RO", key, member, length, unit, *options],
        places,
        st.sampled_from([b"m3", b"m7", b"m100", b"nobody"]),
        lengths,
        units,
        search_options,
    ),
)
keys = st.one_of(st.sampled_from(VALUE_KEYS[:2]), st.sampled_from(KEYS))
members = st.sampled_from([b"m0", b"m1", b"m7", b"m280", b"m299", b"nobody", b""])
numbers = st.sampled_from([b"0", b"1", b"-1", b"99", b"-120", b"-1000", b"289", b"100000", b"x"])
reads = st.one_of(
    place_reads,
    st.tuples(st.sampled_from([b"GET", b"get", b"GeT", b"HGETALL", b"hgetall", b"TYPE"]), keys).map(list),
    st.tuples(st.sampled_from([b"GET", b"HGET"]), keys, st.sampled_from([b"f0", b"f7"])).map(list),
    st.tuples(st.sampled_from([b"LRANGE", b"lrange"]), keys, numbers, numbers).map(list),
    st.tuples(st.sampled_from([b"SMEMBERS", b"SCARD", b"zcard", b"scard"]), keys).map(list),
    st.tuples(st.sampled_from([b"SISMEMBER", b"ZSCORE", b"zrank", b"ZREVRANK"]), keys, members).map(list),
    st.tuples(st.sampled_from([b"ZREVRANGE", b"ZRANGE", b"ZCOUNT", b"zrangebyscore"]), keys, numbers, numbers).map(
        list
    ),
    st.tuples(
        st.sampled_from([b"zrevrange", b"ZRANGE"]),
        st.sampled_from(RANK_KEYS),
        numbers,
        numbers,
        st.sampled_from([b"WITHSCORES", b"withscores", b"REV", b"nonsense"]),
    ).map(list),
    st.tuples(
        st.just(b"ZRANGE"), st.sampled_from(RANK_KEYS), numbers, numbers, st.just(b"REV"), st.just(b"WITHSCORES")
    ).map(list),
    st.builds(
        lambda name, key, ends, limit, options: [name, key, *ends, *limit, *options],
        st.sampled_from([b"ZRANGE", b"ZRANGEBYSCORE", b"ZREVRANGEBYSCORE"]),
        st.sampled_from(RANK_KEYS),
        st.one_of(st.tuples(scores, scores), st.tuples(numbers, numbers)),
        limits,
        range_options,
    ),
    st.tuples(st.sampled_from([b"ZCOUNT", b"ZRANGEBYSCORE", b"zrevrangebyscore"]), keys, scores, scores).map(list),
    st.tuples(
        st.sampled_from([b"HLEN", b"LLEN", b"HKEYS", b"hvals", b"EXPIRETIME", b"pexpiretime", b"ECHO", b"strlen"]), keys
    ).map(list),
    st.tuples(st.sampled_from([b"HEXISTS", b"HSTRLEN"]), keys, st.sampled_from([b"f0", b"f1", b"f7", b""])).map(list),
    st.builds(
        lambda name, key, cursor, options: [name, key, cursor, *options],
        st.sampled_from([b"HSCAN", b"SSCAN", b"ZSCAN"]),
        keys,
        st.sampled_from(
            [b"0", b"0", b"7", b"140737488355328", b"281474976710656", b"-1", b"x", b"99999999999999999999"]
        ),
        st.sampled_from(
            [
                [],
                [],
                *([b"COUNT", b"%d" % count] for count in (2, 200, 5000)),
                [b"count", b"0"],
                [b"COUNT"],
                [b"MATCH", b"f*"],
                [b"NOVALUES"],
            ]
        ),
    ),
    st.tuples(
        st.just(b"OBJECT"), st.sampled_from([b"ENCODING", b"encoding", b"freq", b"IDLETIME", b"refcount"]), keys
    ).map(list),
    st.builds(
        lambda name, key, arguments: [name, key, *arguments],
        st.sampled_from([b"GETBIT", b"BITCOUNT", b"BITPOS", b"bitcount"]),
        keys,
        st.lists(st.sampled_from([b"0", b"1", b"1", b"-1", b"-3", b"7", b"39", b"100", b"x", b"BIT"]), max_size=4),
    ),
    st.builds(
        lambda cursor, options: [b"SCAN", cursor, *(word for option in options for word in option)],
        st.sampled_from([b"0", b"0", b"35184372088832", b"1", b"70368744177664", b"-1", b"x"]),
        st.lists(
            st.sampled_from(
                [
                    *((b"COUNT", b"3"), (b"count", b"100"), (b"MATCH", b"j:?:*"), (b"match", b"*l*")),
                    *((b"TYPE", b"hash"), (b"COUNT", b"0"), (b"COUNT",)),
                ]
            ),
            max_size=2,
        ),
    ),
    st.tuples(st.just(b"LPOS"), keys, st.sampled_from([b"0", b"1", b"3", b"nobody"])).map(list),
    st.builds(
        lambda name, key, low, high, limit: [name, key, low, high, *limit],
        st.sampled_from([b"ZRANGEBYLEX", b"ZREVRANGEBYLEX", b"zlexcount"]),
        keys,
        text_ends,
        text_ends,
        limits,
    ),
    st.builds(
        lambda name, key, fields: [name, key, b"FIELDS", b"%d" % len(fields), *fields],
        st.sampled_from([b"HTTL", b"HPTTL", b"HEXPIRETIME", b"hpexpiretime"]),
        keys,
        st.lists(st.sampled_from([b"f0", b"f1", b"f100", b"nobody"]), max_size=3),
    ),
    st.builds(
        lambda name, some: [name, *some],
        st.sampled_from([b"SINTER", b"SUNION", b"SDIFF", b"sinter"]),
        st.lists(st.one_of(st.sampled_from(SET_KEYS), keys), max_size=4),
    ),
    st.builds(
        lambda number, some, limit: [b"SINTERCARD", number or b"%d" % len(some), *some, *limit],
        st.sampled_from([b"", b"", b"", b"1", b"0", b"x"]),
        st.lists(st.sampled_from([*SET_KEYS, b"nope"]), max_size=4),
        st.sampled_from([[], [], [b"LIMIT", b"1"]]),
    ),
    st.sampled_from([[b"CLIENT", b"ID"], [b"client", b"id"], [b"TIME"], [b"DBSIZE"], [b"SELECT", b"0"]]),
    st.builds(
        lambda name, number, some, options: [name, number or b"%d" % len(some), *some, *chain(*options)],
        st.sampled_from([b"ZUNION", b"ZUNION", b"ZINTER", b"zdiff", b"ZINTERCARD"]),
        st.sampled_from([b"", b"", b"", b"", b"1", b"0", b"x"]),
        st.lists(st.one_of(st.sampled_from([*RANK_KEYS, *SET_KEYS]), keys), max_size=4),
        st.lists(
            st.sampled_from(
                [
                    *([b"WITHSCORES"], [b"withscores"], [b"AGGREGATE", b"MIN"], [b"aggregate", b"max"]),
                    *([b"AGGREGATE", b"SUM"], [b"AGGREGATE", b"x"], [b"WEIGHTS", b"2"], [b"WEIGHTS", b"0.5", b"-1"]),
                    *([b"weights", b"inf", b"-inf", b"0"], [b"WEIGHTS", b"0", b"inf"], [b"WEIGHTS", b"1e-400"]),
                    *([b"WEIGHTS"], [b"WEIGHTS", b"5e-324", b"nan"], [b"LIMIT", b"1"]),
                ]
            ),
            max_size=3,
        ),
    ),
    st.builds(
        lambda key, options: [b"SORT_RO", key, *chain(*options)],
        st.one_of(st.sampled_from([*LIST_KEYS, *SET_KEYS, *RANK_KEYS]), keys),
        st.lists(
            st.sampled_from(
                [
                    *([b"ALPHA"], [b"alpha"], [b"DESC"], [b"asc"], [b"LIMIT", b"1", b"2"], [b"limit", b"-1", b"-1"]),
                    *([b"LIMIT", b"0", b"x"], [b"LIMIT", b"7"], [b"BY", b"nosort"], [b"GET", b"#"], [b"STORE", b"a"]),
                ]
            ),
            max_size=3,
        ),
    ),
    st.builds(
        lambda key, operations: [b"BITFIELD_RO", key, *chain(*operations)],
        keys,
        st.lists(
            st.builds(
                lambda *operation: list(operation),
                st.sampled_from([b"GET", b"GET", b"get", b"SET"]),
                st.sampled_from([b"u8", b"i5", b"u63", b"i64", b"u1", b"i1", b"u64", b"U8", b"u08", b"i", b""]),
                st.sampled_from(
                    [b"0", b"3", b"#1", b"#0", b"37", b"4294967295", b"#4294967295", b"-1", b"x", b"#", b""]
                ),
            ),
            max_size=3,
        ),
    ),
    st.tuples(st.sampled_from([b"DUMP", b"dump", b"XLEN"]), keys).map(list),
    st.builds(
        lambda key, samples: [b"MEMORY", b"USAGE", key, *samples], keys, st.sampled_from([[], [], [b"SAMPLES", b"5"]])
    ),
    st.tuples(st.just(b"KEYS"), st.sampled_from([b"*", b"j:[ms]:*", b"*l*", b"nope", b""])).map(list),
    st.tuples(st.sampled_from([b"GETRANGE", b"SUBSTR"]), keys, numbers, numbers).map(list),
    st.lists(keys, max_size=4).map(lambda some: [b"TOUCH", *some]),
    st.lists(keys, max_size=4).map(lambda some: [b"MGET", *some]),
    st.lists(st.sampled_from(VALUE_KEYS), max_size=4).map(lambda some: [b"mget", *some]),
    st.lists(keys, max_size=4).map(lambda some: [b"STATE", b"MGET", *some]),
    st.lists(keys, max_size=4).map(lambda some: [b"Exists", *some]),
    st.tuples(st.sampled_from([b"STRLEN", b"TTL", b"pttl", b"type", b"PING"]), keys).map(list),
    st.tuples(st.sampled_from([b"LINDEX", b"lindex"]), keys, numbers).map(list),
    st.tuples(
        st.sampled_from([b"HMGET", b"ZMSCORE", b"SMISMEMBER"]), keys, st.sampled_from([b"f0", b"m0", b"m299"]), members
    ).map(list),
)
transactions = st.builds(
    lambda queued, before, last: [*before, [b"MULTI"], *queued, *last],
    st.lists(
        st.one_of(reads, st.sampled_from([[b"MULTI"], [b"SET", b"a", b"b"], [b"NOPE"], [b"CLIENT", b"ID"]])), max_size=4
    ),
    st.sampled_from(
        [
            *([], [], [[b"CLIENT", b"CACHING", b"YES"]], [[b"WATCH"]], [[b"WATCH", b"j:v:0"], [b"WATCH", b"j:v:0"]]),
            *(
                [[b"watch", key]]
                for key in (b"j:v:0", b"j:v:3", b"j:v:gone", b"nope", b"j:m:ttl", b"j:z:map", b"j:l:long")
            ),
        ]
    ),
    st.sampled_from([[[b"EXEC"]], [[b"EXEC"]], [[b"exec"], [b"exec"]], [[b"DISCARD"]], []]),
)
runs = st.lists(keys, min_size=1, max_size=8).map(lambda some: [[b"GET", key] for key in some])
others = st.sampled_from(
    [
        b"PING", b"SELECT 1", b"SELECT 0", b"HELLO 3", b"HELLO 2", b"CLIENT REPLY OFF", b"CLIENT REPLY ON",
        b"CLIENT REPLY SKIP", b"NOPE a", b"AUTH secret", b"AUTH wrong", b"RESET", b"SET a b",
        b"READONLY", b"READONLY", b"READWRITE", b"ASKING",
        b"CLIENT TRACKING ON", b"CLIENT TRACKING ON", b"CLIENT TRACKING OFF", b"CLIENT TRACKING ON BCAST PREFIX j:v:",
        b"CLIENT TRACKING ON OPTIN", b"CLIENT CACHING YES", b"CLIENT TRACKING ON OPTOUT", b"client caching no",
        b"CLIENT TRACKINGINFO",
    ]
)  # fmt: skip
# One request of each command that the core calls, but for those whose replies have measured times and sizes.
CALLED_LINES = b"""
ACL CAT, ACL CAT scripting, ACL CAT nope, ACL DRYRUN default GET j:v:0, ACL GETUSER default, ACL HELP, ACL LIST,
ACL LOAD, ACL LOG, ACL LOG RESET, ACL LOG x, ACL SAVE, ACL USERS, ACL WHOAMI, ACL,
ACL SETUSER ann on nopass ~j:v:* +@all, ACL SETUSER ann -get nonsense, ACL SETUSER default -client|getname,
ACL SETUSER default +client|getname, ACL DELUSER ann, ACL DELUSER default, AUTH ann x, AUTH default secret, AUTH,
CLIENT, CLIENT ID, CLIENT GETNAME, client getname, CLIENT GETNAME more, CLIENT SETNAME ann, CLIENT SETNAME,
CLIENT GETREDIR, CLIENT HELP, CLIENT INFO, CLIENT LIST, CLIENT LIST ID 1 2, CLIENT LIST TYPE nope,
CLIENT KILL ID 1 SKIPME no, CLIENT KILL ID 7, CLIENT KILL id 1, CLIENT KILL ID x, CLIENT KILL MAXAGE 1 ID 7,
CLIENT KILL nobody, CLIENT NO-EVICT on, CLIENT NO-TOUCH off, CLIENT NO-TOUCH x, CLIENT PAUSE 0, CLIENT PAUSE 0 WRITE,
CLIENT PAUSE x, CLIENT UNPAUSE, CLIENT SETINFO lib-name x, CLIENT SETINFO x y, CLIENT TRACKINGINFO, CLIENT UNBLOCK 7,
CLIENT UNBLOCK x, CLIENT NOPE, COMMAND, COMMAND COUNT, COMMAND DOCS get, COMMAND GETKEYS GET a, COMMAND GETKEYS PING,
COMMAND GETKEYSANDFLAGS MGET a b, COMMAND HELP, COMMAND INFO get nope, COMMAND LIST FILTERBY PATTERN z*, COMMAND LIST x,
CONFIG GET max*, CONFIG GET a b c d e f g h i j k l m n o p maxclients, CONFIG GET, CONFIG HELP, CONFIG RESETSTAT,
CONFIG REWRITE, CONFIG SET maxclients 77, CONFIG SET nope 1, CONFIG SET requirepass other,
CONFIG SET slowlog-log-slower-than 0, CONFIG SET slowlog-log-slower-than -1, CONFIG SET tracking-table-max-keys 1,
CLUSTER KEYSLOT a, CLUSTER MYID, CLUSTER COUNTKEYSINSLOT 7, CLUSTER GETKEYSINSLOT 7 9, CLUSTER COUNTKEYSINSLOT 11669,
CLUSTER GETKEYSINSLOT 11669 9, CLUSTER GETKEYSINSLOT 11669 0, cluster getkeysinslot 11669 x,
CLUSTER COUNTKEYSINSLOT 16384, CLUSTER NODES, CLUSTER LINKS, CLUSTER REPLICAS x, DBSIZE, ECHO, FUNCTION LIST, HELLO,
HELLO 4, HELLO 3 SETNAME ann, KEYS j:s:*, LASTSAVE, LATENCY DOCTOR, LATENCY GRAPH x, LATENCY HELP, LATENCY HISTORY x,
LATENCY LATEST, LATENCY RESET, LOLWUT, MEMORY HELP, MEMORY PURGE, MODULE LIST, MONITOR, OBJECT HELP, PING a b,
PUBLISH a b, PUBSUB CHANNELS, PUBSUB NUMPAT, PUBSUB NUMSUB a b, PUBSUB SHARDCHANNELS, PUBSUB SHARDNUMSUB a, PUBSUB HELP,
QUIT, ROLE, SCRIPT EXISTS a b, SLOWLOG LEN, SLOWLOG RESET, SLOWLOG GET x, SLOWLOG HELP, SPUBLISH a b, SUBSCRIBE a b,
SUBSCRIBE a, PSUBSCRIBE a*, SSUBSCRIBE s, UNSUBSCRIBE, UNSUBSCRIBE a, PUNSUBSCRIBE, UNWATCH, SUNSUBSCRIBE s, SELECT x
"""
CALLED = [line.strip() for line in CALLED_LINES.replace(b"\n", b" ").split(b",")]
called = st.lists(st.sampled_from(CALLED), min_size=1, max_size=5).map(lambda lines: [line.split() for line in lines])
requests_sent = st.lists(
    st.one_of(runs, transactions, called, reads.map(lambda read: [read]), others.map(lambda line: [line.split()])),
    max_size=8,
).map(lambda groups: [request for group in groups for request in group])
endings = st.sampled_from(
    [
        b"",
        b"",
        b"*",
        b"?2\r\n$3\r\nGET\r\n$1\r\n*\r\n",
        b"*2\r\n$3\r\nGET\r\n$5\r\nj:v",
        b"GET j:v:0\r\n",
        b"*2\r\n$3\r\nGET\r\n$x\r\n",
        b"QUIT\r\n",
    ]
)


def apply(store: LmdbStore, turn: int) -> None:
    epoch = EpochChanges(
        store.applied.epoch + 1, 1, NOW_MS, list(runs_of(changes(turn), [state.name for state in STATES]))
    )
    store.apply(epoch, STATES)


# One request of each command that is compiled, and of each form that a record has.
COMPILED = [
    b"GET j:v:0", b"MGET j:v:0 j:v:gone j:m:small", b"HGET j:m:small f0", b"HGET j:m:large f1",
    b"HMGET j:m:large f1 f9",
    b"HGETALL j:m:small", b"LRANGE j:l:short 0 -1", b"LINDEX j:l:short 0", b"EXISTS j:v:0 j:nope", b"STRLEN j:v:0",
    b"SISMEMBER j:s:small m0", b"SMISMEMBER j:s:small m0 m9", b"ZSCORE j:z:small m0", b"ZSCORE j:z:large m7",
    b"ZMSCORE j:z:large m7 nobody", b"ZRANK j:z:small m1", b"ZRANK j:z:large m250", b"ZREVRANK j:z:large m250",
    b"ZRANGE j:z:small 0 -1", b"ZRANGE j:z:large 100 299 WITHSCORES", b"ZREVRANGE j:z:large 0 9", b"TTL j:v:0",
    b"PTTL j:m:small", b"TYPE j:z:large", b"PING", b"STATE MGET j:v:0 j:v:1",
    b"HLEN j:m:small", b"HLEN j:m:large", b"HLEN j:m:ttl", b"HEXISTS j:m:small f0", b"HEXISTS j:m:large f9",
    b"HSTRLEN j:m:small f0", b"HSTRLEN j:m:large f9", b"HKEYS j:m:small", b"HVALS j:m:small", b"HRANDFIELD j:m:small",
    b"HGETALL j:m:large", b"HKEYS j:m:large", b"HVALS j:m:large", b"HGETALL j:m:ttl", b"HSCAN j:m:large 0 COUNT 100",
    b"SMEMBERS j:s:large", b"SSCAN j:s:large 7", b"LRANGE j:l:long 0 -1", b"LRANGE j:l:long 3 150",
    b"LINDEX j:l:long -1", b"SCAN 0", b"SCAN 0 MATCH *:s:* COUNT 100",
    b"LLEN j:l:short", b"LLEN j:l:long", b"SCARD j:s:small", b"SMEMBERS j:s:small", b"SRANDMEMBER j:s:small",
    b"ZCARD j:z:small", b"ZCARD j:z:large", b"ZCOUNT j:z:small -inf (2", b"ZCOUNT j:z:large 7 1.5e2",
    b"ZRANGEBYSCORE j:z:large (5 20 WITHSCORES LIMIT 1 3", b"ZREVRANGEBYSCORE j:z:large +inf -inf LIMIT 0 5",
    b"ZRANGE j:z:large 20 5 BYSCORE REV LIMIT 0 2", b"ZRANGE j:z:small 0 -1 REV", b"ZRANDMEMBER j:z:small",
    b"GETRANGE j:v:0 0 1", b"SUBSTR j:v:0 -3 -1", b"STRLEN j:v:long", b"TOUCH j:v:0 j:nope", b"EXPIRETIME j:v:0",
    b"PEXPIRETIME j:v:0", b"ECHO hello", b"HSCAN j:m:small 0", b"SSCAN j:s:small 0 COUNT 5", b"ZSCAN j:z:small 0",
    b"OBJECT FREQ j:v:0", b"OBJECT FREQ nope", b"WATCH j:v:0 nope", b"OBJECT REFCOUNT j:v:0",
    b"OBJECT IDLETIME j:v:0", b"GETBIT j:v:0 3", b"BITCOUNT j:v:0", b"BITCOUNT j:v:0 0 -1",
    b"BITPOS j:v:0 1", b"LPOS j:l:short 0", b"HTTL j:m:small FIELDS 1 f0", b"HPEXPIRETIME j:m:ttl FIELDS 1 f0",
    b"HRANDFIELD j:m:small 2 WITHVALUES", b"SRANDMEMBER j:s:small -5", b"ZRANDMEMBER j:z:small 9 WITHSCORES",
    b"SINTER j:s:small j:s:other", b"SUNION j:s:small j:s:other", b"SDIFF j:s:small j:s:other",
    b"SINTERCARD 2 j:s:small j:s:other", b"ZRANGEBYLEX j:z:small - [m2 LIMIT 0 1", b"ZLEXCOUNT j:z:small (m0 +",
    b"ZREVRANGEBYLEX j:z:small + -",
    b"OBJECT ENCODING j:v:0", b"OBJECT ENCODING j:m:small", b"OBJECT ENCODING j:l:short",
    b"ZUNION 3 j:z:small j:z:ties j:s:small WEIGHTS 1 0 2 AGGREGATE MAX WITHSCORES", b"ZINTER 2 j:z:small j:s:small",
    b"ZDIFF 2 j:z:ties j:z:small WITHSCORES", b"ZINTERCARD 2 j:z:ties j:z:small LIMIT 1",
    b"SINTERCARD 2 j:s:small j:s:other LIMIT 2", b"XLEN j:nope", b"KEYS j:?:l*",
    b"SORT_RO j:l:short DESC", b"SORT_RO j:s:small ALPHA LIMIT 1 1", b"SORT_RO j:z:small ALPHA", b"RANDOMKEY",
    b"BITFIELD_RO j:v:0 GET u8 0 GET i5 #1", b"DUMP j:v:0", b"DUMP j:m:small", b"DUMP j:l:short", b"DUMP j:s:small",
    b"DUMP j:z:ties", b"MEMORY USAGE j:v:0", b"MEMORY USAGE j:z:small",
    b"OBJECT ENCODING j:s:small", b"OBJECT ENCODING j:z:small", b"CLIENT ID", b"TIME", b"DBSIZE", b"SELECT 0",
    b"GEOPOS j:z:places m3 nobody", b"GEOPOS j:z:map m200", b"GEOHASH j:z:places m7", b"GEODIST j:z:map m3 m290 km",
    b"GEOSEARCH j:z:map FROMMEMBER m200 BYBOX 5 5 km ASC COUNT 9 WITHDIST WITHHASH WITHCOORD",
    b"GEOSEARCH j:z:places FROMLONLAT 13.05 38.1 BYRADIUS 20 mi DESC", b"GEORADIUS_RO j:z:map 13.05 38.1 900 m",
    b"GEORADIUSBYMEMBER_RO j:z:places m7 20000 km COUNT 3 ANY WITHDIST",
]  # fmt: skip
