"""Random requests of the clients of an overlay.

Words in angle brackets are replaced when a client sends them: `<tag>` by the client's hash tag at a Redis Cluster, so
that its keys are in one slot, `<other>` by another tag, `<cars>` by the name that the rules give to speeds, `<client>`
by the client's number, and `<id>` by the id of another client.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from hypothesis import strategies as st

from compat.conformance.wire import Words
from tests import worlds
from tests.worlds import ACCOUNTS, CARS, MEMBERS, METRICS, Written

KEYS = ["s", "n", "h", "l", "set", "z", "x", "other", "job:speed", "dash/7", "car", "ghost/1"]
WORDS = ["0", "1", "-1", "2", "a", "b", "10", "1.5", "", "nan", "(1", "-", "+", "*", "9223372036854775807"]
STRINGS = [
    *(f"job:speed:{car}" for car in CARS),
    *(f"<cars>/{car}" for car in CARS),
    "job:speed:absent",
    "dash/7/apdex",
]
HASHES, SET, SORTED_SET = [f"job:facts:{each.decode()}" for each in ACCOUNTS], "job:ids:1", "job:top:1"
FACTS = [f"fact/{account.decode()}/{metric.decode()}" for account in ACCOUNTS for metric in METRICS]
# The states never have the last one. The others are in several slots of a Redis Cluster.
PREFERRED = ["board/0", "board/1", "board/2", "board/9<tag>"]
PREFERRED_BY_STATES = [each.encode() for each in PREFERRED[:-1]]
# A Redis Cluster has no other database.
MOVED_PREFIX = b"base/"
MOVED = [f"base/{account.decode()}" for account in ACCOUNTS]
CHANNELS = ["a", "b", "ab", "job:speed:1", "__redis__:invalidate"]
PATTERNS = ["a*", "?", "job:*", "__keyspace@0__:[jdcf]*", "__keyspace@0__:[sn]*", "__keyevent@?__:zadd", "__key*:hset"]
CHOSEN = {
    "K": [f"{key}<tag>" for key in KEYS],
    "Y": [f"{key}<other>" for key in KEYS],
    "W": WORDS,
    "C": CHANNELS,
    "P": PATTERNS,
    "S": STRINGS,
    "H": HASHES,
    "T": [SET],
    "Z": [SORTED_SET],
    "N": [*STRINGS, *HASHES, SET, SORTED_SET],
    "F": FACTS,
    "B": PREFERRED,
    "U": ["board/9<tag>"],
    "D": MOVED,
    "Q": ["cached:<client>:1<tag>"],
    "DB": ["0", "0", "1", "2", "2", "99", "x", ""],
}


class Line(NamedTuple):
    """A request. refused_in: it would write a state's key of this database."""

    words: Words
    refused_in: int | None = None


def split(templates: str) -> list[str]:
    """Return the templates of a text."""
    return templates.strip().replace("\n", "|").split("|")


# K is a key, W any word. By group: what is random, or depends on the clock, is left out.
LINES = split("""
SET K W|SET K W NX GET|SET K W XX|SETNX K W|GET K|GETSET K W|GETDEL K|APPEND K W|STRLEN K|INCR K|DECRBY K W
INCRBYFLOAT K W
GETRANGE K W W|SETRANGE K 3 W|MSET K W K W|MSETNX K W K W|MGET K K K|GETEX K PERSIST|SETBIT K 3 1|GETBIT K W
BITCOUNT K
BITOP AND K K K|BITFIELD K SET u8 0 W GET u4 W|SUBSTR K 0 W|LCS K K
HSET K a W b W|HSETNX K W W|HGET K W|HMGET K a b W|HGETALL K|HDEL K a W|HLEN K|HINCRBY K a W|HINCRBYFLOAT K a W
HKEYS K|HVALS K
HEXISTS K a|HSTRLEN K W|HSCAN K 0
LPUSH K W W|RPUSH K W W|LPUSHX K W|LPOP K|RPOP K W|LLEN K|LRANGE K W W|LINDEX K W|LINSERT K BEFORE a W|LSET K W W
LREM K W a
LTRIM K W W|LPOS K a|LMOVE K K LEFT RIGHT|RPOPLPUSH K K|LMPOP 2 K K LEFT
SADD K 1 2 3|SADD K W|SREM K 1 W|SISMEMBER K W|SMISMEMBER K 1 W|SCARD K|SMEMBERS K|SINTER K K|SUNION K K|SDIFF K K
SINTERSTORE K K K|SUNIONSTORE K K K|SMOVE K K 1|SINTERCARD 2 K K|SSCAN K 0
ZADD K 1 a 2 b W c|ZADD K XX CH W a|ZADD K INCR 1 a|ZSCORE K W|ZMSCORE K a W|ZINCRBY K W a|ZRANK K a|ZREVRANK K b
ZCARD K
ZRANGE K W W WITHSCORES|ZRANGEBYSCORE K W +inf|ZCOUNT K W W|ZPOPMIN K|ZREM K a|ZUNIONSTORE K 2 K K
ZDIFF 2 K K WITHSCORES
ZRANGESTORE K K 0 -1|ZLEXCOUNT K - +|ZREMRANGEBYRANK K 0 W
XADD K 5-1 a W|XADD K 7-1 b W|XLEN K|XRANGE K - +|XREVRANGE K + -|XREAD COUNT 2 STREAMS K K 0 0|XDEL K 5-1
XTRIM K MAXLEN W
XGROUP CREATE K g 0 MKSTREAM|XREADGROUP GROUP g W COUNT 1 STREAMS K >|XACK K g 5-1|XPENDING K g|XINFO STREAM K
DEL K K|UNLINK K|EXISTS K K K|TOUCH K K|TYPE K|RENAME K K|RENAMENX K K|COPY K K|COPY K K REPLACE|PERSIST K|EXPIRE K W
TTL nokey
OBJECT ENCODING K|OBJECT REFCOUNT nokey|DUMP nokey|SORT K ALPHA|SORT K BY nosort GET # STORE K|SORT_RO K LIMIT 0 W
PFADD K a W|PFCOUNT K K|GEOADD K 13.3 38.1 a|GEOPOS K a W|GEODIST K a b
BLPOP K K 0.001|BRPOP K 0.001|BLMOVE K K LEFT RIGHT 0.001|BRPOPLPUSH K K 0.001|BLMPOP 0.001 2 K K LEFT
BZPOPMIN K 0.001|BZPOPMAX K K 0.001|BZMPOP 0.001 2 K K MIN|BLPOP K -1|BLPOP K nan|BLPOP 0|BZMPOP 0 0 K MIN
WAIT 0 0|WAIT W -1
XREAD BLOCK 1 STREAMS K K 0 $|XREAD BLOCK -1 STREAMS K 0|XREADGROUP GROUP g W BLOCK 1 COUNT 1 STREAMS K >
EVAL return_redis.call('get',KEYS[1]) 1 K|EVAL return_{1,'two',{ok='fine'},false} 0|EVAL return_ARGV[1] W K
EVALSHA ffff 0|FCALL nope 1 K|SCRIPT LOAD return_1|EVALSHA LOADED 0|EVAL return_nonsense 0|EVAL return_1 -1
SETEX K 1000 W|SETEX K 0 W|SETEX K W|PSETEX K 100000 W|BITPOS K 1|BITPOS K 0 W|BITPOS K 1 0 -1 BIT
GEOADD K 15.1 37.5 b 13.3 38.1 a|GEOHASH K a W b|GEOSEARCH K FROMMEMBER a BYRADIUS 300 km ASC WITHDIST WITHCOORD
GEOSEARCH K FROMLONLAT 15 37 BYBOX 400 400 km DESC COUNT 3 WITHHASH|GEOSEARCH K FROMLONLAT W 37 BYRADIUS 9 m
GEOSEARCHSTORE K K FROMLONLAT 15 37 BYRADIUS 300 km ASC STOREDIST
ZINTER 2 K K WITHSCORES|ZINTER 2 K K WEIGHTS 2 W|ZUNION 2 K K|ZUNION 2 K K AGGREGATE MAX WITHSCORES|ZINTERCARD 2 K K
ZREVRANGE K 0 W WITHSCORES|ZREVRANGEBYSCORE K +inf W|ZREVRANGEBYLEX K + -|ZRANDMEMBER nokey
XGROUP CREATECONSUMER K g W|XCLAIM K g b 0 5-1|XCLAIM K g b 0 5-1 7-1 FORCE JUSTID|XAUTOCLAIM K g c 0 0 COUNT 2
XAUTOCLAIM K g c 0 W JUSTID|XINFO GROUPS K|XSETID K 9-1
FUNCTION LOAD REPLACE LIBRARY|FUNCTION LOAD LIBRARY|FCALL read 1 K|FCALL_RO read 1 K|FCALL read 2 K K
FUNCTION DELETE lib
EVAL_RO return_redis.call('get',KEYS[1]) 1 K|EVAL_RO return_redis.call('set',KEYS[1],'x') 1 K|EVALSHA_RO ffff 1 K
DUMP K|RESTORE K 0 DUMPED|RESTORE K 0 DUMPED REPLACE|RESTORE K -1 DUMPED|RESTORE K 0 W
RESTORE K 0 DUMPED ABSTTL IDLETIME 5
PUBLISH W W|PUBSUB NUMSUB W|SCRIPT EXISTS W|TIME x|ECHO W|CONFIG GET maxmemory|FUNCTION LIST|LOLWUT VERSION x
OBJECT HELP x|SCAN 0 COUNT 0|SCAN 0 COUNT x|SCAN 0 MATCH|SCAN x|SCAN 18446744073709551616|SCAN 1 NO|SCAN|KEYS|DBSIZE x
WAITAOF 1 0 0|WAITAOF 0 0 1|WAIT 0
GET|SET K|MGET|HSET K a|NOSUCH W|ZADD K|LPUSH|XADD K|DEL|INCR K W|OBJECT NOPE K|XGROUP NOPE K
""")
# These change the connection of the client.
OF_CONNECTIONS = split("""
SELECT 0|SELECT W|SELECT -1|SELECT 99|CLIENT SETNAME W|CLIENT SETNAME a_{b}|CLIENT GETNAME|CLIENT NO-EVICT W
CLIENT GETREDIR|CLIENT NO-EVICT on|CLIENT TRACKINGINFO|CLIENT CACHING yes|CLIENT UNBLOCK 99999999|CLIENT UNBLOCK W
CLIENT LIST ID 99999999
CLIENT TRACKING maybe|CLIENT TRACKING ON REDIRECT|CLIENT TRACKING ON REDIRECT 99999999|CLIENT TRACKING ON PREFIX a
CLIENT KILL 1.1.1.1:1|CLIENT KILL ID 99999999|CLIENT NOPE|CLIENT|CLIENT PAUSE W x|CLIENT REPLY W|CLIENT TRACKING off
""")
LIBRARY = (
    b"#!lua name=lib\nredis.register_function{function_name='read', flags={'no-writes'}, callback=function(keys)\n"
)
LIBRARY += b"return redis.call('get', keys[1]) end}"
DUMPED = b"\x00\x03abc\n\x00\xd9\xac0=Ar\xa2\xe2"  # the string `abc`, by redis-server 7.0
LOADED = b"e0e1f9fabfc9d4800c877a703b823ac0578ff8db"  # the name of the script `return 1`
GIVEN = {"LIBRARY": LIBRARY, "DUMPED": DUMPED, "LOADED": LOADED}


def lines(templates: Sequence[str], refused_in: int | None = None) -> st.SearchStrategy[Line]:
    """Draw a request."""

    @st.composite
    def line(draw: st.DrawFn) -> Line:
        name, *parts = draw(st.sampled_from(templates)).split(" ")
        words = [name.encode(), *(word_of(draw, part) for part in parts)]
        return Line(words, refused_in)

    return line()


def word_of(draw: st.DrawFn, part: str) -> bytes:
    """Draw the word for a part of a template."""
    if part in GIVEN:
        return GIVEN[part]
    if part in CHOSEN:
        part = draw(st.sampled_from(CHOSEN[part]))
    elif part in ("l", "z", "x", "nokey"):
        part += "<tag>"
    elif "return_" in part:
        part = part.replace("_", " ")
    return part.encode()


# In a table of hashes, their items have another order at each server, and what expires does so at another time.
UNEQUAL = ("EXPIRE K W", "SADD K W", "PUBLISH W W", "PUBSUB NUMSUB W")
OF_UPSTREAM = [line for line in LINES if line not in UNEQUAL]
OF_UPSTREAM += split("""
EXPIRE K 1000|EXPIRE K -1|EXPIRE K x|SADD K 4 5|CLIENT CACHING yes|CLIENT CACHING no
GET Q|INCR Q|STRLEN Q|EXISTS Q|SET Q W|SET Q W
""")
# A Redis Cluster refuses a SORT with the first word. Before the others each master gets a key, which DBSIZE counts
# until the master notices that it has expired.
NOT_IN_CLUSTERS = (b"nosort", b"WAIT", b"WAITAOF")
# Requests that the overlay splits among the nodes of a Redis Cluster.
OF_SEVERAL_SLOTS = split("""
MGET K Y K|MGET Y S K|EXISTS K Y S|DEL K Y|UNLINK Y K|TOUCH Y K|MSET K W Y W|MGET Y F K
""")
# S, H, T and Z are keys of states: a string, a hash, a set, a sorted set, and N is any.
OF_STATES = split("""
GET F|EXISTS F F|STRLEN F|TYPE F|TTL F|TOUCH F S|MGET F S F|GET S|GET S|GET N|MGET N S|EXISTS N N|STRLEN S
GETRANGE S 0 W|TYPE N|TTL N|PTTL S|SUBSTR S 0 1
HGET H errors|HGET H W|HMGET H errors W users|HGETALL H|HLEN H|HEXISTS H users|HKEYS H|HVALS H|HSTRLEN H users|HGET S a
SISMEMBER T a|SMISMEMBER T a W|SCARD T|SCARD S|SINTERCARD 1 T
ZSCORE Z a|ZMSCORE Z a W c|ZRANGE Z 0 -1|ZRANGE Z 0 W WITHSCORES|ZRANGEBYSCORE Z W +inf|ZRANK Z b|ZREVRANK Z c|ZCARD Z
ZCOUNT Z - W|LRANGE S 0 -1|LLEN H|GET H
""")
READS = OF_STATES + split("""
GET|STRLEN S W|MGET F K S F|EXISTS F F K|TOUCH F S|MGET S K S|MGET N S Q|EXISTS N K N|TOUCH S K
GET B|GET B|MGET B K S B|MGET B F|EXISTS B U K|TYPE B|TTL B|STRLEN B|GETRANGE B 0 1|TOUCH B B
GET D|GET D|MGET D K D|EXISTS D K|STRLEN D|TYPE D|TTL D|LRANGE D 0 -1
""")
OF_UPSTREAM += split("""
SET U W|INCR U|APPEND U W|DEL U K|MSET U W K W|EXPIRE U 1000|RPUSH U W|LRANGE U 0 -1|HSET U a W|GETDEL U
""")
WRITES = split("""
SET S W|DEL N|DEL K N K|UNLINK K S|MSET K W S W|MSETNX K W S W|EXPIRE S 5|RENAME K S|RENAME S K|COPY S K|LPUSH S W
INCR S|SET F W|DEL F|MSET K W F W
SADD T W|ZADD Z 1 W|HSET H a W|APPEND S W|SINTERSTORE K K T|SORT K STORE S|EVAL return(1) 2 K S|EVALSHA ffff 1 S
GETDEL S
BLPOP K S 0.001|BRPOPLPUSH S K 0.001|LMOVE K S LEFT LEFT|XREAD BLOCK 1 STREAMS S 0|XADD S 1-1 a W|PFADD S a
SETRANGE S 0 W|GETEX S EX 5
""")
WRITES_OF_MOVED = split("SET D W|DEL D K|INCR D|MSET K W D W|APPEND D W|RENAME K D|LPUSH D W")
BLOCKING = split("""
BLPOP K l 0|BRPOP l 0|BLMOVE l K LEFT RIGHT 0|BRPOPLPUSH l K 0|BLMPOP 0 2 K l LEFT|BZPOPMIN z 0|BZPOPMAX K z 0
BZMPOP 0 1 z MIN
XREAD BLOCK 0 STREAMS x $|BLPOP l 0|XREADGROUP GROUP g me BLOCK 0 STREAMS x >
""")
PUSHES = split("RPUSH l W|RPUSH l a b c|LPUSH l W|ZADD z 1.5 a|ZADD z 1 b 2 c|XADD x * a W|RPUSH l 1|DEL l|DEL z")
SUBSCRIPTIONS = split("""
SUBSCRIBE C|SUBSCRIBE C C|UNSUBSCRIBE C|PSUBSCRIBE P|PSUBSCRIBE P P|PUNSUBSCRIBE P|SSUBSCRIBE C|SUNSUBSCRIBE C|PING W
RESET|MONITOR
""")
MESSAGES = split("PUBLISH C W|PUBLISH C W|SPUBLISH C W|PUBSUB NUMSUB C C|PUBSUB NUMPAT|PUBSUB SHARDNUMSUB C")
# With BCAST, names of fields are invalidated only if they were read, and keys of WAIT at a Redis Cluster are. The last
# ones are mistakes.
TRACKING = [
    "",
    "OPTIN",
    "OPTOUT",
    "NOLOOP",
    "BCAST PREFIX job: PREFIX set PREFIX n PREFIX dash",
    "BCAST NOLOOP PREFIX ca",
]
TRACKING += ["OPTIN OPTOUT", "PREFIX a", "BCAST PREFIX a PREFIX ab", "NOPE"]
LISTED = ["*", "*", "job:*", "car*", "fact/*/errors", "fact/7/*", "board/*", "[sn]*", "?", "job:speed:[0-2]", "base/?"]
# Cached keys, and those that the states may have: they are few among all requests, and their order matters.
OF_RULES = [line for line in (*OF_UPSTREAM, *READS) if {"Q", "U", "B"}.intersection(line.split(" "))]
REQUESTS = st.lists(
    st.one_of(
        lines(OF_UPSTREAM),
        lines(OF_RULES),
        lines([*READS, *OF_SEVERAL_SLOTS]),
        lines(READS),
        lines(WRITES, refused_in=0),
        lines(WRITES_OF_MOVED, refused_in=2),
    ),
    min_size=1,
    max_size=8,
)
# No two values of states are the same, so that each epoch changes what it writes.
VALUES = count(1000)
CHANGES: st.SearchStrategy[list[Written]] = st.lists(
    st.one_of(
        st.builds(lambda car: worlds.speed(car, b"%d" % next(VALUES)), st.sampled_from(CARS)),
        st.builds(lambda car: worlds.speed(car, None), st.sampled_from(CARS)),
        st.builds(lambda account: worlds.apdex(account, b"0.%d" % next(VALUES)), st.sampled_from(ACCOUNTS)),
        st.builds(
            lambda *of: worlds.fact(*of, b"%d" % next(VALUES)), st.sampled_from(ACCOUNTS), st.sampled_from(METRICS)
        ),
        st.builds(lambda member: worlds.score(member, next(VALUES)), st.sampled_from(MEMBERS)),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda each: each.keys[0],
)
