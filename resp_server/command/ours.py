"""Our row of each command: what Redis' facts do not say. No other module names commands in a table.

A subcommand without a row has that of its container. A command without a row is routed by its keys, is not split, and
is neither denied nor special in any other way.
"""

from __future__ import annotations

from collections.abc import Mapping

from resp_server.command.policy import (
    Channels,
    Comparison,
    Denial,
    Destination,
    Joined,
    Policy,
    Redaction,
    RequestPolicy,
    Split,
    Verb,
)

_LOCAL = RequestPolicy.LOCAL
_PROXY = Destination.LOCAL
_NOT_COMPARED = Policy(comparison=Comparison.NEVER)
_UNORDERED = Policy(comparison=Comparison.UNORDERED)
_OF_FIELDS = Split(Joined.LIST, 3, is_counted=True)
_OF_MEMBERS = Policy(split=Split(Joined.LIST, 1))
_TIMES = Policy(is_cacheable=False)
_DENIED = Policy(denial=Denial.UNLESS_ALLOWED)
_NEVER = Policy(denial=Denial.ALWAYS)


def _subscribing(verb: Verb, kind: bytes) -> Policy:
    return Policy(
        with_upstream=_PROXY, split=Split(Joined.FRAMES), channels=Channels(verb, kind), runs_while_subscribed=True
    )


def _state(
    at_proxy: RequestPolicy | None = None, *, is_internal: bool = False, split: Split | None = None, channel_at: int = 0
) -> Policy:
    return Policy(at_proxy, is_internal, with_upstream=_PROXY, split=split, channel_at=channel_at)


ROWS: Mapping[str, Policy] = {
    # -- connections and transactions
    "asking": Policy(with_upstream=_PROXY),
    "auth": Policy(with_upstream=_PROXY, redaction=Redaction.ALL),
    "client": Policy(with_upstream=_PROXY),
    "client|reply": Policy(with_upstream=_PROXY, runs_in_transaction=False),
    "discard": Policy(with_upstream=_PROXY, is_queued=False),
    "echo": Policy(with_upstream=_PROXY),
    "exec": Policy(with_upstream=_PROXY, is_queued=False),
    "hello": Policy(with_upstream=_PROXY, runs_in_transaction=False, redaction=Redaction.CREDENTIALS),
    "multi": Policy(with_upstream=_PROXY, is_queued=False),
    "ping": Policy(with_upstream=_PROXY, runs_while_subscribed=True),
    "quit": Policy(with_upstream=_PROXY, is_queued=False, runs_while_subscribed=True),
    "readonly": Policy(with_upstream=_PROXY),
    "readwrite": Policy(with_upstream=_PROXY),
    "reset": Policy(with_upstream=_PROXY, is_queued=False, runs_while_subscribed=True),
    "select": Policy(with_upstream=Destination.SELECT, runs_in_transaction=False),
    "unwatch": Policy(with_upstream=_PROXY),
    "watch": Policy(is_queued=False, split=Split(Joined.ONE_OK)),
    # -- keys
    "copy": Policy(writes_other_database=True),
    "dbsize": Policy(RequestPolicy.ALL_SHARDS, with_upstream=Destination.ALL_KEYS),
    "dump": _NOT_COMPARED,
    "exists": Policy(split=Split(Joined.SUM)),
    "expiretime": _NOT_COMPARED,
    "keys": Policy(RequestPolicy.ALL_SHARDS, with_upstream=Destination.ALL_KEYS),
    "move": Policy(writes_other_database=True),
    "pexpiretime": _NOT_COMPARED,
    "pttl": _NOT_COMPARED,
    "randomkey": Policy(RequestPolicy.ALL_SHARDS, with_upstream=Destination.ALL_KEYS),
    "scan": Policy(RequestPolicy.BY_CURSOR, with_upstream=Destination.ALL_KEYS),
    "touch": Policy(split=Split(Joined.SUM), comparison=Comparison.NEVER),
    "ttl": _NOT_COMPARED,
    # -- values
    "geohash": _OF_MEMBERS,
    "geopos": _OF_MEMBERS,
    "hexpiretime": Policy(split=_OF_FIELDS, comparison=Comparison.NEVER),
    "hgetall": Policy(comparison=Comparison.PAIRS),
    "hkeys": _UNORDERED,
    "hmget": _OF_MEMBERS,
    "hpexpiretime": Policy(split=_OF_FIELDS, comparison=Comparison.NEVER),
    "hpttl": Policy(split=_OF_FIELDS, comparison=Comparison.NEVER),
    "hrandfield": _NOT_COMPARED,
    "hscan": _NOT_COMPARED,
    "httl": Policy(split=_OF_FIELDS, comparison=Comparison.NEVER),
    "hvals": _UNORDERED,
    "mget": Policy(split=Split(Joined.LIST)),
    "pfcount": Policy(may_replicate=True),
    "smembers": _UNORDERED,
    "smismember": _OF_MEMBERS,
    "srandmember": _NOT_COMPARED,
    "sscan": _NOT_COMPARED,
    "xinfo|consumers": _TIMES,
    "xinfo|groups": _TIMES,
    "xinfo|stream": _TIMES,
    "xpending": _TIMES,
    "xread": _NOT_COMPARED,
    "zmscore": _OF_MEMBERS,
    "zrandmember": _NOT_COMPARED,
    "zscan": _NOT_COMPARED,
    # -- messages and scripts
    "eval": Policy(publishes=True, may_replicate=True),
    "evalsha": Policy(publishes=True, may_replicate=True),
    "fcall": Policy(publishes=True, may_replicate=True),
    "function|kill": Policy(kills_a_script=True),
    "psubscribe": _subscribing(Verb.SUBSCRIBE, b"p"),
    "publish": Policy(channel_at=1, publishes=True, may_replicate=True),
    "punsubscribe": _subscribing(Verb.UNSUBSCRIBE, b"p"),
    "script|debug": _NEVER,
    "script|kill": Policy(kills_a_script=True),
    "spublish": Policy(channel_at=1, publishes=True, may_replicate=True),
    "ssubscribe": _subscribing(Verb.SUBSCRIBE, b"s"),
    "subscribe": _subscribing(Verb.SUBSCRIBE, b""),
    "sunsubscribe": _subscribing(Verb.UNSUBSCRIBE, b"s"),
    "unsubscribe": _subscribing(Verb.UNSUBSCRIBE, b""),
    # -- the server
    "acl": Policy(_LOCAL, with_upstream=_PROXY),
    "acl|deluser": Policy(_LOCAL, with_upstream=_PROXY, denial=Denial.UNLESS_ALLOWED),
    "acl|load": Policy(_LOCAL, with_upstream=_PROXY, denial=Denial.UNLESS_ALLOWED),
    "acl|save": Policy(_LOCAL, with_upstream=_PROXY, denial=Denial.UNLESS_ALLOWED),
    "acl|setuser": Policy(
        _LOCAL, with_upstream=_PROXY, denial=Denial.UNLESS_ALLOWED, redaction=Redaction.ALL_OF_SUBCOMMAND
    ),
    "cluster": Policy(with_upstream=_PROXY),
    "command": Policy(_LOCAL),
    "config": Policy(_LOCAL),
    "config|set": Policy(_LOCAL, denial=Denial.UNLESS_ALLOWED, redaction=Redaction.SETTINGS),
    "debug": Policy(denial=Denial.UNLESS_ALLOWED, is_refused_at_once=True),
    "failover": Policy(denial=Denial.UNLESS_ALLOWED, changes_role=True),
    "info": Policy(RequestPolicy.ALL_JOBS, with_upstream=Destination.BY_SECTIONS),
    "lastsave": Policy(_LOCAL),
    "latency": Policy(_LOCAL, with_upstream=_PROXY),
    "lolwut": Policy(_LOCAL),
    "memory": Policy(_LOCAL, comparison=Comparison.NEVER),
    "migrate": Policy(denial=Denial.UNLESS_ALLOWED, redaction=Redaction.CREDENTIALS),
    "module": Policy(_LOCAL, denial=Denial.UNLESS_ALLOWED),
    "module|help": Policy(_LOCAL),
    "module|list": Policy(_LOCAL),
    "monitor": Policy(_LOCAL, with_upstream=_PROXY),
    "object": Policy(_LOCAL, comparison=Comparison.NEVER),
    "psync": _NEVER,
    "replconf": _NEVER,
    "replicaof": Policy(denial=Denial.UNLESS_ALLOWED, changes_role=True),
    "role": Policy(_LOCAL),
    "shutdown": _DENIED,
    "slaveof": Policy(denial=Denial.UNLESS_ALLOWED, changes_role=True),
    "slowlog": Policy(_LOCAL, with_upstream=_PROXY),
    "sync": _NEVER,
    "time": Policy(_LOCAL),
    "wait": Policy(waits_for_writes=True),
    "waitaof": Policy(waits_for_writes=True),
    # -- states
    "state": Policy(with_upstream=_PROXY),
    "state|at": _state(_LOCAL, is_internal=True),
    "state|confirm": _state(_LOCAL),
    "state|describe": _state(RequestPolicy.ONE_JOB),
    "state|expect": _state(_LOCAL, is_internal=True, split=Split(Joined.ONE_OK)),
    "state|follow": _state(_LOCAL),
    "state|help": _state(_LOCAL),
    "state|hold": _state(_LOCAL, is_internal=True),
    "state|jobs": _state(RequestPolicy.ALL_JOBS),
    "state|lag": _state(RequestPolicy.ALL_JOBS),
    "state|list": _state(RequestPolicy.ALL_JOBS),
    "state|mget": _state(split=Split(Joined.LIST)),
    "state|notice": _state(_LOCAL, is_internal=True),
    "state|notify": _state(_LOCAL, is_internal=True),
    "state|owner": _state(_LOCAL),
    "state|owners": _state(_LOCAL),
    "state|publish": _state(_LOCAL, is_internal=True, channel_at=3),
    "state|release": _state(_LOCAL),
    "state|reload": _state(_LOCAL),
    "state|shadow": _state(_LOCAL),
    "state|topology": _state(_LOCAL),
    "state|within": _state(_LOCAL, is_internal=True),
}
# Their single requests are the most frequent ones, so compiled look-ups find them first.
MOST_USED = (
    "get",
    "mget",
    "set",
    "incr",
    "setex",
    "del",
    "hget",
    "hset",
    "hgetall",
    "expire",
    "exists",
    "lpush",
    "rpop",
)
NO_POLICY = Policy()


def policy_of(name: str) -> Policy:
    """Return our row of a command or subcommand (`client|id`) by its name in lower case."""
    found = ROWS.get(name)
    return found if found is not None else ROWS.get(name.partition("|")[0], NO_POLICY)


def denied(denial: Denial) -> list[str]:
    """Return the sorted names of the commands with this denial."""
    return sorted(name for name, policy in ROWS.items() if policy.denial is denial)
