"""What the comparisons of a proxy with a Redis alone share: random commands, and how their replies are read."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from compat.conformance.wire import LAST_COMMAND, LAST_REPLY, Connection, Reply, Words, replies_in, request, requests
from tests.server.swap import ABSENT, VALUES, Swap

KEYS = ["s", "n", "h", "l", "set", "z", "x", "other", "job:speed", "dash/7", "{a}b"]
WORDS = ["0", "1", "-1", "2", "a", "b", "10", "1.5", "", "nan", "(1", "-", "+", "*", "9223372036854775807"]
# K is a key, W any word. By group: what is random, or depends on the clock, is left out.
TEMPLATES = """
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
EVALSHA ffff 0|FCALL nope 1 K
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
OBJECT HELP x
GET|SET K|MGET|HSET K a|NOSUCH W|ZADD K|LPUSH|XADD K|DEL|INCR K W|OBJECT NOPE K|XGROUP NOPE K
""".replace("\n", "|").strip("|")
LINES = TEMPLATES.split("|")
# These change the connection, so they are not for transactions.
OF_CONNECTIONS = (
    """
SELECT 0|SELECT W|SELECT -1|SELECT 99|CLIENT SETNAME W|CLIENT SETNAME a_{b}|CLIENT GETNAME|CLIENT NO-EVICT W
CLIENT GETREDIR|CLIENT NO-EVICT on|CLIENT TRACKINGINFO|CLIENT CACHING yes|CLIENT UNBLOCK 99999999|CLIENT UNBLOCK W
CLIENT LIST ID 99999999
CLIENT KILL 1.1.1.1:1|CLIENT KILL ID 99999999|CLIENT NOPE|CLIENT|CLIENT PAUSE W x|CLIENT REPLY W|CLIENT TRACKING off
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
LIBRARY = (
    b"#!lua name=lib\nredis.register_function{function_name='read', flags={'no-writes'}, callback=function(keys)\n"
)
LIBRARY += b"return redis.call('get', keys[1]) end}"
DUMPED = b"\x00\x03abc\n\x00\xd9\xac0=Ar\xa2\xe2"  # the string `abc`, by redis-server 7.0
GIVEN = {"LIBRARY": LIBRARY, "DUMPED": DUMPED}


@st.composite
def words(draw: st.DrawFn, lines: Sequence[str] = LINES) -> Words:
    """Draw a request."""
    chosen = {"K": st.sampled_from(KEYS), "W": st.sampled_from(WORDS)}

    def word(part: str) -> bytes:
        if part in GIVEN:
            return GIVEN[part]
        if part in chosen:
            return draw(chosen[part]).encode()
        return (part.replace("_", " ") if "'" in part or "{" in part else part).encode()

    return [word(part) for part in draw(st.sampled_from(lines)).split(" ")]


# Requests about states, and their replies in RESP2: None is nil.
OF_STATES: list[tuple[Words, bytes]] = [
    ([b"GET", key], b"$%d\r\n%b\r\n" % (len(value), value)) for key, value in VALUES.items()
]
OF_STATES += [([b"EXISTS", ABSENT], b":0\r\n"), ([b"STRLEN", b"dash/7/apdex"], b":3\r\n")]
OF_STATES += [
    ([b"SET", b"dash/7/apdex", b"1"], b"-ERR key 'dash/7/apdex' is owned by state job:apdex\r\n"),
    ([b"DEL", b"other", b"job:speed:1"], b"-ERR key 'job:speed:1' is owned by state job:speed\r\n"),
]
# Where a pipeline is cut into chunks.
CUTS = st.lists(st.integers(0, 100_000), max_size=4)


def send_cut(connection: Connection, data: bytes, cuts: Sequence[int]) -> None:
    """Send bytes in chunks."""
    at = 0
    for cut in [*sorted(cut % len(data) for cut in cuts), len(data)]:
        connection.send(data[at:cut])
        at = cut


def exchanged(port: int, pipeline: Sequence[Words], cuts: Sequence[int] = ()) -> bytes:
    """Send a pipeline in chunks on a new connection; return all bytes of the replies."""
    data = requests([*pipeline, (LAST_COMMAND,)])
    with Connection(port) as connection:
        send_cut(connection, data, cuts)
        return connection.read_to_end(LAST_REPLY).removesuffix(LAST_REPLY)


def replies_read(port: int, pipeline: Sequence[Words], cuts: Sequence[int], count: int, *, is_new: bool) -> list[Reply]:
    """Return the first `count` frames after a pipeline: messages may come after the last reply, which must be one."""
    greeting: list[Words] = [[b"HELLO", b"3"]] if is_new else []
    data = requests([*greeting, *pipeline, (LAST_COMMAND,)])
    with Connection(port) as connection:
        send_cut(connection, data, cuts)
        replies = [connection.read() for _ in range(len(greeting) + count + 1)][len(greeting) :]
    replies.remove(next(reply for reply in replies if reply.raw == LAST_REPLY))
    return replies


def replies_at(port: int, pipeline: Sequence[Words], cuts: Sequence[int] = (), *, is_new: bool = False) -> list[Reply]:
    """Return the replies to a pipeline on a new connection. is_new: in RESP3."""
    greeting: list[Words] = [[b"HELLO", b"3"]] if is_new else []
    return replies_in(exchanged(port, [*greeting, *pipeline], cuts))[len(greeting) :]


def replies_of_both(
    swap: Swap, pipeline: Sequence[Words], cuts: Sequence[int], *, is_new: bool, before: Sequence[Words] = ()
) -> tuple[list[Reply], list[Reply]]:
    """Return the replies of the upstream alone and of the proxy, each after `before` at an empty upstream."""
    alone = replies_after(swap, swap.upstream.port, before, pipeline, is_new=is_new)
    return alone, replies_after(swap, swap.proxy.port, before, pipeline, cuts, is_new=is_new)


def replies_after(
    swap: Swap, port: int, before: Sequence[Words], pipeline: Sequence[Words], cuts: Sequence[int] = (), *, is_new: bool
) -> list[Reply]:
    """Return the replies to a pipeline after `before` at an empty upstream."""
    with Connection(port) as connection:  # a proxy's cache learns later of what others write
        connection.send(request("FLUSHALL") + request("FUNCTION", "FLUSH"))
        assert [connection.read().plain for _ in range(2)] == [b"OK", b"OK"]
    if before:
        exchanged(port, before)
    return replies_at(port, pipeline, cuts, is_new=is_new)


def raw(replies: Sequence[Reply]) -> list[bytes]:
    """Return the bytes of replies."""
    return [each.raw for each in replies]
