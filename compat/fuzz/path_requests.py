"""Random requests for `make fuzz-paths`: one line for each command, whose words are drawn from pools.

A word in capitals is the name of a pool; `NAME?` may be left out, `NAME*` comes up to three times. The others are sent
as they are. What the core does not answer ends its part of a pipeline, so most requests are valid ones that it answers;
the odd ones are sent in short pipelines.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

Words = list[bytes]

KEYS_OF_A_STATE = 9
# Of each kind of keys: those of the store, and a key that is never put.
NAMES = {
    state: [b"j:%b:%d" % (state, number) for number in range(KEYS_OF_A_STATE)]
    for state in (b"v", b"m", b"l", b"s", b"z")
}
GEO_KEY = b"j:z:geo"
MEMBERS = [b"m%d" % number for number in range(24)]
MEMBERS += [b"", b"a\0b", b"\xff\xfe", b"12", b"-3", b"1.5", b"1e3", b"inf", b"x" * 70, b"0", b"00", b"-0", b"9" * 20]
SCORES = b"""-inf inf -0.0 0 0.5 -12.25 0.001 9999.75 10000.5 5e-324 1e300 7 1 1 2 3 0.1 0.2 0.30000000000000004 1e-7
123456789012345680 -1e22 3479099956230698 3479447370796909""".split()

# Commands that `make fuzz-paths` does not send, with the reason.
LEFT_OUT = {
    "acl|genpass": "random",
    "hrandfield": "random",
    "srandmember": "random",
    "zrandmember": "random",
    "randomkey": "random",
    "info": "it has measured times and sizes",
    "latency|histogram": "it has measured times",
    "memory|doctor": "it has measured sizes",
    "memory|malloc-stats": "it has measured sizes",
    "memory|stats": "it has measured sizes",
    "slowlog|get": "it has measured times",
    "monitor": "its output comes between the other replies, at another moment",
    "config|resetstat": "it hides what was counted",
    "config|rewrite": "the servers have no file",
    "state|confirm": "only a proxy with an upstream answers it",
    "state|expect": "a mark has the id of the server's run",
    "state|hold": "of servers among themselves",
    "state|mark": "a mark has the id of the server's run",
    "state|notice": "of servers among themselves",
    "state|owner": "only a proxy with an upstream answers it",
    "state|owners": "only a proxy with an upstream answers it",
    "state|release": "only a proxy with an upstream answers it",
    "state|within": "of servers among themselves",
}

# Requests about stored data that the core answers.
OF_CORE = """
get V / get V / get V / get V / mget V V* / mget V V V V V* / strlen V / getrange V RANK RANK / substr V RANK RANK
getbit V BIT / bitcount V / bitcount V RANK RANK / bitpos V BIT / bitpos V BIT RANK RANK?
bitfield_ro V FIELD* / exists KEY KEY* / touch KEY KEY* / type KEY / ttl KEY / pttl KEY / expiretime KEY
pexpiretime KEY / dump KEY / object encoding KEY / object idletime KEY / object refcount KEY
memory usage KEY SAMPLES? / xlen NONE / hget M MEMBER / hget M MEMBER / hmget M MEMBER MEMBER* / hgetall M
hgetall M / hkeys M / hvals M / hlen M / hexists M MEMBER / hstrlen M MEMBER / hscan M CURSOR SCAN_PART?
httl M FIELDS / hpttl M FIELDS / hexpiretime M FIELDS / hpexpiretime M FIELDS / llen L / lindex L RANK
lrange L RANK RANK / lrange L RANK RANK / lpos L MEMBER / sort_ro SORTED ALPHA SORT? SORT?
scard S / smembers S / sismember S MEMBER / smismember S MEMBER MEMBER* / sscan S CURSOR SCAN_PART? / sinter S S? S?
sunion S S? S? / sdiff S S? S? / sintercard KEYS_OF_SETS LIMIT? / zcard Z / zscore Z MEMBER
zmscore Z MEMBER MEMBER* / zrank Z MEMBER / zrevrank Z MEMBER / zcount Z END END / zlexcount Z TEXT_END TEXT_END
zrange Z RANK RANK WITHSCORES? / zrange Z RANK RANK REV WITHSCORES? / zrange Z END END BYSCORE WITHSCORES?
zrange Z END END BYSCORE LIMIT_OF_TWO / zrevrange Z RANK RANK WITHSCORES?
zrangebyscore Z END END WITHSCORES? LIMIT_OF_TWO? / zrevrangebyscore Z END END
zrevrangebyscore Z END END WITHSCORES? LIMIT_OF_TWO? / zrangebylex Z TEXT_END TEXT_END LIMIT_OF_TWO?
zrevrangebylex Z TEXT_END TEXT_END LIMIT_OF_TWO? / zscan Z CURSOR SCAN_PART? / zunion KEYS_OF_BOTH UNION?
zunion KEYS_OF_BOTH WITHSCORES? / zinter KEYS_OF_BOTH UNION? WITHSCORES? / zdiff KEYS_OF_BOTH WITHSCORES?
zintercard KEYS_OF_BOTH LIMIT? / scan CURSOR SCAN* / keys PATTERN / dbsize / state mget V V* / state mget V V V
ping / echo KEY / client id / time / select DATABASE
"""
# Requests about stored data that it leaves, for their command or for their arguments.
OF_GENERAL_PATH = """
bitcount V RANK RANK UNIT / bitpos V BIT RANK RANK UNIT
lcs V V LCS? LCS? / object freq KEY / hscan M CURSOR SCAN* / lpos L MEMBER LPOS*
sort_ro SORTED SORT* / sscan S CURSOR SCAN* / zscan Z CURSOR SCAN* / zrank Z MEMBER WITHSCORE
zrevrank Z MEMBER WITHSCORE / zrange Z RANK RANK RANGE* / zrange Z END END BYSCORE RANGE*
zrange Z TEXT_END TEXT_END BYLEX RANGE* / zrangebyscore Z END END RANGE* / zrevrangebyscore Z END END RANGE*
zunion KEYS_OF_BOTH UNION* / zinter KEYS_OF_BOTH UNION* / xlen KEY / geopos GEO MEMBER* / geohash GEO MEMBER*
geodist GEO MEMBER MEMBER METRE? / mget / exists / sinter / geosearch GEO CENTRE SHAPE GEO_OPTION*
georadius_ro GEO DEGREE DEGREE LENGTH METRE GEO_OPTION* / georadiusbymember_ro GEO MEMBER LENGTH METRE GEO_OPTION*
"""
# Requests about the connection, the server, its users and its settings; and what gives an error.
OF_SERVER = """
acl cat / acl cat CATEGORY / acl deluser USER / acl dryrun USER get V / acl getuser USER / acl help / acl list
acl load / acl log RANK? / acl save / acl setuser USER RULE* / acl users / acl whoami / asking / auth secret
auth USER secret / client caching YES / client getname / client getredir / client help / client info
client kill id RANK / client kill KEY / client list / client list id RANK / client no-evict ON / client no-touch ON
client pause 0 / client reply REPLY / client setinfo lib-name KEY / client setinfo lib-ver 1 / client setname USER
client trackinginfo / client unblock RANK / client unpause / cluster count-failure-reports x
cluster countkeysinslot SLOT / cluster getkeysinslot SLOT RANK / cluster help / cluster info / cluster keyslot KEY
cluster links / cluster myid / cluster myshardid / cluster nodes / cluster replicas x / cluster shards
cluster slaves x / cluster slots / command count / command docs COMMAND / command getkeys COMMAND KEY KEY*
command getkeysandflags COMMAND KEY KEY* / command help / command info COMMAND* / command list
command list filterby pattern PATTERN / config get SETTING SETTING* / config help / config set CHANGED
function list / lastsave / latency doctor / latency graph x / latency help / latency history x / latency latest
latency reset / lolwut / memory help / memory purge / module list / object help / publish KEY KEY
pubsub channels PATTERN? / pubsub help / pubsub numpat / pubsub numsub KEY* / pubsub shardchannels PATTERN?
pubsub shardnumsub KEY* / readonly / readwrite / role / script exists KEY* / slowlog help / slowlog len
slowlog reset / spublish KEY KEY / state describe STATE / state follow keys? / state follow / state help
state fresh open j r 1 0 x / state freshness committed / state freshness record
state history j / state jobs / state lag / state list j / state locate KEY / state notify x / state publish x
state reload / state shadow x / state topology / state at j 1 EPOCH CLOCK / set KEY KEY / nope KEY / incr KEY
eval x 0 / get / hget M
"""
# Requests after which a client is in another state.
OF_STATE = """
hello PROTOCOL / hello PROTOCOL auth default secret / hello x / multi / multi / multi / exec / exec / discard
watch V V* / unwatch / client tracking ON TRACKING* / client tracking ON / client tracking off / unsubscribe
punsubscribe / sunsubscribe
"""
# Requests after which a client gets no replies, or only errors: they come near the end of a pipeline.
OF_END = """
subscribe USER* / subscribe USER / psubscribe PATTERN / ssubscribe USER / quit / reset / select 1 / client reply off
client kill id 1 skipme no / auth x
"""


class Pool(NamedTuple):
    """What a word is drawn from. valid: what gives no error."""

    valid: Sequence[tuple[bytes, ...]]
    all: Sequence[tuple[bytes, ...]]


def _pool(valid: Iterable[bytes], odd: Iterable[bytes] = ()) -> Pool:
    first = [(word,) for word in valid]
    return Pool(first, [*first, *((word,) for word in odd)])


def _texts(valid: str, odd: str = "") -> Pool:
    """Make a pool of texts that commas separate; a text may have several words."""
    first, second = ([tuple(each.encode().split()) for each in text.split(",") if each] for text in (valid, odd))
    return Pool(first, [*first, *second])


def _keys(of_kind: Iterable[bytes]) -> Pool:
    """Make a pool of keys of some kind; of the odd ones some have another kind."""
    some = list(of_kind)
    others = [b"j:v:1", b"j:m:1", b"j:l:1", b"j:s:1", b"j:z:1", b"nope", b"", b"j:x:1", b"j:v:{a}"]
    return Pool([(key,) for key in [*some[:-1] * 4, some[-1]]], [(key,) for key in [*some * 6, *others]])


def _counted(pool: Pool) -> Pool:
    """Make a pool of numbers of keys with their keys; some of the odd ones are wrong."""
    rng = random.Random(7)
    found: list[list[tuple[bytes, ...]]] = []
    for chosen in pool:
        found.append([])
        for _ in range(300):
            keys = [word for _ in range(rng.choice((1, 1, 2, 2, 3, 4))) for word in rng.choice(chosen)]
            found[-1].append((b"%d" % len(keys), *keys))
    wrong: list[tuple[bytes, ...]] = [
        (count, b"j:s:1", b"j:z:1") for count in b"0 1 3 -1 x 99999999999999999999".split()
    ]
    return Pool(found[0], found[1] + 4 * wrong)


KEYS_OF_ALL = [key for names in NAMES.values() for key in names[:-1]]
MISSING = [names[-1] for names in NAMES.values()]
RANKS = b"0 1 -1 2 5 99 -120 -1000 127 128 129 289 100000".split()
SETS, SORTED = _keys(NAMES[b"s"]), _keys([*NAMES[b"z"], GEO_KEY])
BOTH = Pool([*SETS.valid, *SORTED.valid, *SORTED.valid], [*SETS.all, *SORTED.all, *SORTED.all])
TEXT_ENDS = b"- + [m1 (m1 [m2 (m2 [m12 (m20 [ ( [zz [\xff".split()
POOLS: Mapping[str, Pool] = {
    "V": _keys(NAMES[b"v"]),
    "M": _keys(NAMES[b"m"]),
    "L": _keys(NAMES[b"l"]),
    "S": SETS,
    "Z": SORTED,
    "KEY": _pool(
        [*KEYS_OF_ALL, b"nope"], [*MISSING, b"", b"j:x:1", b"j:v:{a}", b"j:v:" + b"x" * 300, b"*\r\n$3\r\nGET\r\n"]
    ),
    "NONE": _texts("nope,j:x:1"),
    "GEO": _keys([GEO_KEY] * 4 + NAMES[b"z"][:2]),
    "SORTED": _keys([*NAMES[b"l"], *NAMES[b"l"], *NAMES[b"s"], *NAMES[b"z"]]),
    "MEMBER": _pool([*MEMBERS, b"nobody", b"m128"]),
    "RANK": _pool(RANKS, b"x 01 +1 -0 9223372036854775807 9223372036854775808".split()),
    "BIT": _texts("0,1,0,1", "7,8,39,100,-1,x,4294967295,4294967296"),
    "UNIT": _texts("BYTE,BIT,bit", "x"),
    "FIELD": _texts("get u8 0,GET i5 #1,get u63 3,get i64 #0,get u1 37", "get u64 0,get u8,set u8 0 1,overflow sat,x"),
    "LCS": _texts("len,idx,withmatchlen,minmatchlen 2", "minmatchlen x,nope"),
    "SAMPLES": _texts("samples 5,samples 0", "samples x,nope"),
    "CURSOR": _texts(
        "0,0,0,1,7,35184372088832,70368744177664,140737488355328,281474976710656", "-1,x,99999999999999999999"
    ),
    "SCAN_PART": _texts("count 2,COUNT 100,count 5000"),
    "SCAN": _texts(
        "count 2,COUNT 100,count 5000,match *1*,match j:?:*,match m*,type hash,type string,TYPE zset",
        "novalues,count 0,count,x",
    ),
    "FIELDS": _texts(
        "fields 1 m1,FIELDS 2 m1 nobody,fields 3 m0 m1 m2", "fields 2 m1,fields 0,fields x m1,m1,fields 1"
    ),
    "LPOS": _texts("rank 1,rank -1,rank 2,count 0,count 2,maxlen 3,maxlen 0", "rank 0,rank x,count -1,nope,rank"),
    "ALPHA": _texts("alpha,ALPHA"),
    "SORT_NUMBERS": _texts("alpha,desc,limit 0 3"),
    "SORT": _texts("alpha,desc,asc,limit 0 3,limit 1 1,limit -1 -1", "limit 0 x,by nosort,get #,store a,by j:v:*,x"),
    "KEYS_OF_SETS": _counted(SETS),
    "KEYS_OF_BOTH": _counted(BOTH),
    "LIMIT": _texts("limit 1,LIMIT 0,limit 7", "limit -1,limit x,limit,nope"),
    "LIMIT_OF_TWO": _texts("limit 0 2,LIMIT 1 -1,limit 90 5", "limit -1 3,limit 1,limit x 1"),
    "WITHSCORE": _texts("withscore,WITHSCORE", "withscores"),
    "WITHSCORES": _texts("withscores,WITHSCORES", "nope"),
    "REV": _texts("rev,REV"),
    "BYSCORE": _texts("byscore,BYSCORE"),
    "BYLEX": _texts("bylex,BYLEX"),
    "RANGE": _texts("withscores,rev,REV,limit 0 2,limit 1 -1,limit 90 5,byscore,bylex", "limit -1 3,nope"),
    "END": _pool(
        [*SCORES, *(b"(%b" % score for score in SCORES), b"+inf", b"1.5e2", b".5"],
        [b"(", b"", b"x", b"nan", b"0x1", b"3.", b"1e999"],
    ),
    "TEXT_END": _pool(TEXT_ENDS, [b"m1", b"-a", b""]),
    "UNION": _texts(
        "aggregate min,AGGREGATE MAX,aggregate sum",
        "withscores,weights 2,weights 2 0.5,weights 1 -1 3.25,weights inf -inf,weights 0 inf 1 2,aggregate x,weights,"
        "weights 1 x,weights 1e-400,limit 1,nope",
    ),
    "METRE": _texts("m,km,KM,mi,ft", "x"),
    "DEGREE": _texts("13.4,38.1,0,15.08,37.5", "-122.4,180,-180,85.06,85,x,inf"),
    "LENGTH": _texts("0,1,100,200,1000,5000,20037", "1e9,-1,x,inf"),
    "CENTRE": _texts(
        "frommember m1,frommember m2,fromlonlat 13.4 38.1,fromlonlat 15 37",
        "FROMMEMBER nobody,fromlonlat 181 0,fromlonlat x 1,frommember",
    ),
    "SHAPE": _texts(
        "byradius 200 km,BYRADIUS 5000 km,byradius 30000 mi,bybox 400 400 km,bybox 9000 9000 km",
        "byradius -1 m,byradius 1,bybox x 1 m",
    ),
    "GEO_OPTION": _texts("asc,desc,withdist,withcoord,WITHHASH,count 1,count 3,count 2 any", "count 0,any,x"),
    "PATTERN": _texts("*,j:v:*,j:[ms]:*,*1*,nope,[,j:l:?,\\*,a*"),
    "DATABASE": _texts("0", "x"),
    "CATEGORY": _texts("read,scripting", "nope"),
    "USER": _texts("ann,ann,bob,default", "nobody"),
    "RULE": _texts(
        "on,off,nopass,>secret,~j:v:*,%R~j:m:*,+@all,-@all,+get,-hgetall,(+get ~j:v:1),resetkeys,allkeys,reset,&a*",
        "-client|getname,nonsense",
    ),
    "YES": _texts("yes,no,YES", "x"),
    "ON": _texts("on,ON,off", "x"),
    "REPLY": _texts("on,skip", "x"),
    "SLOT": _texts("0,7,8191,16383", "16384,-1,x"),
    "COMMAND": _texts("get,GET,mget,config|get,zunion", "nope,sort,eval,client"),
    "SETTING": _texts("max*,maxclients,timeout,slowlog-log-slower-than,tracking-table-max-keys,*pass*", "nope"),
    "CHANGED": _texts(
        "maxclients 77,slowlog-log-slower-than 0,slowlog-log-slower-than -1",
        "nope 1,maxclients x",
    ),
    "STATE": _texts("j:v,j:m", "j:nope,x"),
    "EPOCH": _texts("0,1,2,3", "99,x"),
    "CLOCK": _texts("1700000000000,1700000005000", "0,x"),
    "PROTOCOL": _texts("2,3,3", "4,x"),
    "TRACKING": _texts("optin,OPTOUT,bcast,bcast prefix j:v:,noloop", "prefix a,redirect 1,nope"),
}
CHANGED_CHANCE = 0.15


class Word(NamedTuple):
    """A part of a line: what it is drawn from, and how often it comes."""

    pool: Pool
    least: int
    most: int


Line = tuple[Word, ...]


def lines_in(text: str) -> list[Line]:
    """Parse lines, which a newline or ` / ` separates."""
    lines = [line for row in text.strip().splitlines() for line in row.split(" / ")]
    return [tuple(_word(each) for each in line.split()) for line in lines]


def _word(text: str) -> Word:
    name = text.rstrip("?*")
    pool = POOLS[name] if name.isupper() else _pool([name.encode()])
    return Word(pool, 0 if name != text else 1, 3 if text.endswith("*") else 1)


CORE_LINES, END_LINES = lines_in(OF_CORE), lines_in(OF_END)
# Those that the core leaves least often: for longer pipelines.
POINT_NAMES = set(
    b"""get mget strlen getrange substr getbit touch ttl pttl type hget hmget hgetall hexists hstrlen hlen llen
lindex lrange scard sismember smismember smembers zcard zscore zmscore zrank zrevrank zcount zrange zrevrange ping echo
expiretime pexpiretime exists state""".split()
)
POINT_LINES = [line for line in CORE_LINES if line[0].pool.all[0][0] in POINT_NAMES]
# The lines of odd requests, and how many of 100 are of each kind.
ODD_GROUPS = [lines_in(text) for text in (OF_CORE, OF_GENERAL_PATH, OF_SERVER, OF_STATE)]
ODD_CUMULATIVE = list(accumulate((35, 20, 30, 15)))


def names() -> set[str]:
    """Return the first words of all lines: a command, or a command with its subcommand."""
    lines = [line for text in (OF_CORE, OF_GENERAL_PATH, OF_SERVER, OF_STATE, OF_END) for line in text.split("\n")]
    words = [each.split() for line in lines for each in line.split(" / ") if each]
    return {each[0] for each in words} | {"|".join(each[:2]) for each in words}


def core_request(rng: random.Random, lines: Sequence[Line] = CORE_LINES) -> Words:
    """Make a valid request about stored data that the core answers, unless what it reads is large or expires."""
    return _request(rng.choice(lines), rng, is_valid=True)


def odd_request(rng: random.Random) -> Words:
    """Make any request, of which many are errors."""
    (group,) = rng.choices(ODD_GROUPS, cum_weights=ODD_CUMULATIVE)
    words = _request(rng.choice(group), rng, is_valid=rng.random() < 0.3)
    return _changed(words, rng) if rng.random() < CHANGED_CHANCE and b"pause" not in words else words  # PAUSE 128 waits


def end_request(rng: random.Random) -> Words:
    """Make a request after which a client gets no replies, or only errors."""
    return _request(rng.choice(END_LINES), rng, is_valid=True)


def _request(line: Line, rng: random.Random, *, is_valid: bool) -> Words:
    words: Words = []
    chance = rng.random
    for pool, least, most in line:
        choices = pool.valid if is_valid else pool.all
        for _ in range(least or int(chance() * (most + 1))):
            words += choices[int(chance() * len(choices))]
    return words


def _changed(words: Words, rng: random.Random) -> Words:
    """Change a request: a word more, less or replaced, or a name in capitals."""
    at = rng.randrange(len(words))
    (any_word, *_) = rng.choice(POOLS[rng.choice(("KEY", "MEMBER", "RANK", "RANGE", "SCAN"))].all)
    match rng.randrange(4):
        case 0:
            words.insert(at + 1, any_word)
        case 1 if at:
            del words[at]
        case 2 if at:
            words[at] = any_word
        case _:
            words[0] = rng.choice((words[0].upper(), words[0].title()))
    return words
