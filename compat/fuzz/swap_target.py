"""A proxy with an upstream that sends scripted bytes, of each kind; and the requests of its clients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from compat.conformance.wire import Reply, request
from compat.fuzz.loop import Loop
from compat.fuzz.targets import (
    EPOCHS,
    LOADING,
    NODE,
    PASSWORD,
    PORT,
    STATES,
    USER,
    ProxyTarget,
    ScriptedReplies,
    ScriptedServer,
)
from resp_server.backends.overlay.overlay_backend import OverlayBackend
from resp_server.backends.redis.pushed_frames import CONFIRMATIONS, MESSAGES, first_word, is_monitor_line
from resp_server.backends.redis.upstream import upstream_at
from resp_server.backends.redis.url import UpstreamUrl
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.rules import Rules, parse_rules
from resp_server.backends.servers.servers_backend import ServersBackend
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.limits import DEDICATED_CONNECTIONS_MAX
from resp_server.pipeline.batched import Backend
from resp_server.pipeline.context import ServerContext
from state_backend.model.slots import SLOTS
from state_backend.store.keyspace import Keyspace

# What the options of other targets mean for this one.
RULES, BOTH_SCRIPTED, OF_MANY, SENTINEL = EPOCHS, LOADING, USER, USER | NODE
SWAP_OPTIONS = PASSWORD | NODE | RULES | BOTH_SCRIPTED | OF_MANY
# The silence of an upstream that counts as a failure.
UPSTREAM_TIMEOUT_S = 2.0
UPSTREAM_HOSTS = ("10.255.0.1", "10.255.0.2")
# One rule of each kind.
RULES_TEXT = """
[[rule]]
keys = "n/<key>"
owner = "state"
state_key = "j:v:<key>"

[[rule]]
keys = "f/<key>/<name>"
owner = "state"
state_key = "j:m:<key>"
field = "<name>"

[[rule]]
keys = "j:v:3"
owner = "prefer-state"

[[rule]]
keys = "p/<key>"
owner = "prefer-state"
state_key = "j:v:<key>"

[[rule]]
keys = "q/<key>/<name>"
owner = "prefer-state"
state_key = "j:m:<key>"
field = "<name>"

[[rule]]
keys = "j:m:<key>"
owner = "shadow"

[[rule]]
keys = "w/<key>"
owner = "shadow"
state_key = "j:v:<key>"
compare = "number:1e-9"

[[rule]]
keys = "c:<key>"
owner = "upstream"
cache = "5s"

[[rule]]
keys = "t:<key>"
owner = "upstream"
cache = "tracking"

[[rule]]
keys = "j:v:5"
owner = "state"
writes = "drop"

[[rule]]
keys = "j:v:6"
owner = "state"
writes = "pass"

[[rule]]
keys = "d:<key>"
owner = "state"
state_key = "j:z:<key>"
database = 3
"""
UPSTREAM_REQUESTS = [
    [each.split() for each in line.split(b" | ")]
    for line in b"""
GET u:1
GET u:1 | GET u:2 | SET u:1 a | GET j:v:1
SET u:1 a | INCR u:2 | GET u:1
HELLO 3 | HGETALL u:1 | SMEMBERS u:2 | GET u:3
MGET u:1 j:v:1 u:2 j:v:2 | EXISTS u:1 j:v:1 | TOUCH j:v:3 u:3
DEL u:1 u:2 | DEL u:1 j:v:1 | MSET u:1 a u:2 b
DBSIZE | KEYS * | RANDOMKEY
SCAN 0 | SCAN 0 COUNT 3 MATCH u:* | SCAN 99999999999
INFO | CONFIG GET * | COMMAND COUNT | TIME
WATCH u:1 | MULTI | SET u:1 a | GET j:v:1 | GET u:1 | EXEC
MULTI | GET u:1 | SET u:2 b | EXEC | GET u:1
SELECT 3 | GET u:1 | SET u:1 a
EVALSHA abc 1 u:1 | SCRIPT LOAD x | EVAL x 0
PUBLISH a b | PUBSUB CHANNELS | OBJECT ENCODING u:1
BLPOP u:1 u:2 0 | GET u:1 | GET j:v:1
HELLO 3 | BZPOPMIN u:1 9 | XREAD BLOCK 9 STREAMS u:1 0 | BLMOVE u:1 u:2 LEFT LEFT 1 | SET u:1 a
SUBSCRIBE a | PSUBSCRIBE b* | PING | UNSUBSCRIBE a | RESET | GET u:1
HELLO 3 | SUBSCRIBE a | GET u:1 | SSUBSCRIBE b | PUNSUBSCRIBE b* | GET j:v:1
PSUBSCRIBE __keyspace@0__:* | SUBSCRIBE __keyevent@0__:set
HELLO 3 | PSUBSCRIBE __key*__:* | SUBSCRIBE __keyspace@0__:f/l/f0 | GET u:1 | GET f/l/f0
MONITOR | GET u:1 | GET j:v:1 | RESET | GET u:1
HELLO 3 | CLIENT TRACKING ON | GET u:1 | GET j:v:1 | MGET u:1 j:v:1 | GET n/1 | GET u:1 | CLIENT TRACKING OFF
HELLO 3 | CLIENT TRACKING ON BCAST PREFIX u: NOLOOP | GET u:1 | GET f/s/a | MULTI | GET u:2 | GET n/1 | EXEC
HELLO 3 | CLIENT TRACKING ON OPTIN | CLIENT CACHING YES | GET u:1 | SET u:1 a
SET u:1 a | WAIT 1 9 | WAITAOF 0 1 9 | GET u:1
WATCH u:1 j:v:1 | GET u:1 | UNWATCH | WATCH u:2 | MULTI | INCR u:2 | BLPOP u:1 0 | DISCARD
WATCH j:v:1 | MULTI | MGET n/1 f/s/a u:1 | LPUSH u:1 a | EXEC | BLPOP u:1 9
GET n/1 | GET f/s/a | MGET n/1 f/s/a u:1 j:v:1 | HGETALL n/1 | TYPE f/s/b | TTL f/t/a
GET j:v:3 | MGET j:v:3 u:1 j:v:1 | EXISTS j:v:3 j:v:8 | SET j:v:3 a | WATCH j:v:3 | MULTI | GET j:v:3 | EXEC
GET p/1 | GET q/s/a | TTL q/s/a | MGET p/1 q/s/a u:1 j:v:1 | KEYS ?/* | GETRANGE q/s/a 0 0
WATCH p/1 q/s/a | MULTI | GET p/2 | TTL q/s/b | MGET p/1 u:1 q/s/a | EXEC
HGETALL j:m:s | HMGET j:m:s a b | GET w/1 | MGET w/1 w/2 | GET w/1 | HELLO 3 | HGETALL j:m:s
GET c:1 | GET c:1 | SET c:1 a | GET c:1 | HELLO 3 | GET c:1 | MGET c:1 c:2 | DEL c:1 c:2 | GET c:2
GET t:1 | GET t:1 | MGET t:1 t:2 | SET t:1 a | GET t:1 | HELLO 3 | GET t:1 | STRLEN t:1 | MULTI | GET t:1 | EXEC
HELLO 3 | CLIENT TRACKING ON REDIRECT 1 | GET u:1 | GET j:v:1 | CLIENT TRACKING OFF | CLIENT TRACKING ON REDIRECT 9
SET j:v:5 a | MSET j:v:5 a u:1 b | SET j:v:6 a | MSET j:v:6 a u:1 b | DEL j:v:5 | INCR j:v:6 | GET j:v:6
SELECT 3 | ZRANGE d:l 0 3 | SCAN 0 | KEYS d:* | DBSIZE | GET u:1
SCAN 0 COUNT 5 MATCH f/* | KEYS * | RANDOMKEY | SCAN 0 TYPE string | KEYS n/*
STATE OWNERS | STATE OWNER u:1 j:v:1 n/1 | STATE SHADOW | INFO proxy | STATE RELEASE j | GET j:v:1 | STATE CONFIRM j
FUNCTION LIST | FCALL f 1 u:1 | SCRIPT EXISTS a | FLUSHALL | LOLWUT
GET j:v:1 | GET u:1 | MGET j:v:1 j:v:2 j:v:3 u:1 | EXISTS u:1 j:v:1 j:v:2 | SCAN 0 | KEYS * | DBSIZE
""".strip().splitlines()
]
# Requests that get messages in place of replies in RESP3.
SUBSCRIBING = re.compile(rb"[PS]?(UN)?SUBSCRIBE")


class SwapTarget(ProxyTarget):
    """A proxy in front of two servers, and of an upstream that sends scripted bytes.

    With `BOTH_SCRIPTED` the servers send them, too. With `OF_MANY` the upstream is a Redis Cluster, with `SENTINEL` the
    master that a sentinel knows. A server that greets knows where the cluster's slots are, or the master.
    """

    _has_upstream = True

    def __init__(self, options: int, loop: Loop, replies: ScriptedReplies) -> None:
        self._upstream_replies = replies._replace(known=_places(options))
        self._kind = options
        super().__init__(options & ~(LOADING | USER), loop, replies if options & BOTH_SCRIPTED else None)

    def _backend(self, server: ServerContext, clusters: StateClusters, number: int) -> Backend:
        greeter = self._new_server(Keyspace())
        self._servers.append(greeter)
        for host in UPSTREAM_HOSTS:
            self._addresses.append(f"{host}:{PORT}")
            self._loop.listening[f"{host}:{PORT}"] = lambda: ScriptedServer(greeter, self._upstream_replies)
        url = UpstreamUrl.parse(_url_of(self._kind))
        upstream = upstream_at(url, UPSTREAM_TIMEOUT_S, 1, None, DEDICATED_CONNECTIONS_MAX)
        servers = ServersBackend(server, clusters, is_routed=True)
        made = OverlayBackend(server, servers, upstream, self._ownership())
        upstream.start()
        made.start()
        return made

    def _ownership(self) -> Ownership:
        """Return the owners of keys: known from the start if the state servers may not tell them."""
        made = Ownership()
        if self._kind & BOTH_SCRIPTED:
            made.learn({"j": {state.name: f"j:{state.name}:<k>" for state in STATES}})
            made.complete()
        if self._kind & RULES:
            made.take_rules(_rules())
        return made

    @property
    def is_idle(self) -> bool:
        # The upstream may leave requests of the proxy itself unanswered.
        return not self.server._connections and not self.server.context.sessions

    def close(self) -> None:
        self.server.pipeline.stop()
        super().close()


def is_complete(chosen: Sequence[Sequence[bytes]], replies: Sequence[Reply]) -> bool:
    """Return whether each request has one reply. Pushes, messages and confirmations of subscriptions are no replies."""
    is_monitor, is_subscriber = ([b"MONITOR"] in chosen), any(SUBSCRIBING.match(each[0]) for each in chosen)

    def is_reply(each: Reply) -> bool:
        if each.type == ">" or (is_monitor and is_monitor_line(each.raw)):
            return False
        return not is_subscriber or first_word(each.raw) not in MESSAGES | CONFIRMATIONS

    least = sum(not SUBSCRIBING.match(each[0]) for each in chosen)  # the reply to a subscription may be an error
    return least <= sum(map(is_reply, replies)) <= len(chosen)


@cache
def _rules() -> Rules:
    return parse_rules(RULES_TEXT, "the target")


def _url_of(options: int) -> str:
    one, *others = (f"{host}:{PORT}" for host in UPSTREAM_HOSTS)
    if options & OF_MANY == 0:
        return f"redis://{one}"
    return f"redis+sentinel://{others[0]}/m" if options & SENTINEL == SENTINEL else f"redis+cluster://{one}"


def _places(options: int) -> dict[bytes, bytes]:
    """Return the requests that an upstream has to answer before a client's request reaches it, with the replies."""
    one, two = UPSTREAM_HOSTS
    half = SLOTS // 2
    slots = b"*2\r\n" + b"".join(
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n" % (first, first + half - 1, len(host), host.encode(), PORT)
        for first, host in ((0, one), (half, two))
    )
    if options & SENTINEL == SENTINEL:
        return {request("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "m"): request(one, PORT)}
    return {request("CLUSTER", "SLOTS"): slots} if options & OF_MANY else {}
