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
    FieldCommand,
    FieldKind,
    Joined,
    Policy,
    Redaction,
    RequestPolicy,
    Role,
    SlotSplit,
    Split,
    ValueSet,
    Verb,
)
from resp_server.command.refusals import debug_refused, wait_refused, waitaof_refused
from resp_server.protocol.errors import NoScriptError, cluster_disabled

_LOCAL = RequestPolicy.LOCAL
_PROXY = Destination.LOCAL
_NOT_COMPARED = Policy(comparison=Comparison.NEVER)
_UNORDERED = Policy(comparison=Comparison.UNORDERED)
_OF_FIELDS = Split(Joined.LIST, 3, is_counted=True)
_OF_MEMBERS = Policy(split=Split(Joined.LIST, 1))
_SUMMED = SlotSplit(1, Joined.SUM)
_NOT_CACHED = Policy(is_cacheable=False)
_DENIED_BY_DEFAULT = Policy(denial=Denial.UNLESS_ALLOWED)
_ALWAYS_DENIED = Policy(denial=Denial.ALWAYS)


def _subscribing(verb: Verb, kind: bytes) -> Policy:
    return Policy(
        with_upstream=_PROXY, split=Split(Joined.FRAMES), channels=Channels(verb, kind), runs_while_subscribed=True
    )


def _time(of_field: bytes) -> Policy:
    return Policy(field_command=FieldCommand(of_field, FieldKind.TIME), comparison=Comparison.NEVER)


def _state(
    at_proxy: RequestPolicy | None = None, *, is_internal: bool = False, split: Split | None = None, channel_at: int = 0
) -> Policy:
    return Policy(at_proxy=at_proxy, is_internal=is_internal, with_upstream=_PROXY, split=split, channel_at=channel_at)


ROWS: Mapping[str, Policy] = {
    # -- connections and transactions
    "asking": Policy(with_upstream=_PROXY),
    "auth": Policy(role=Role.AUTH, with_upstream=_PROXY, redaction=Redaction.ALL),
    "client": Policy(with_upstream=_PROXY, keeps_caching=True),
    "client|caching": Policy(role=Role.CLIENT_CACHING, with_upstream=_PROXY, keeps_caching=True),
    "client|reply": Policy(role=Role.CLIENT_REPLY, with_upstream=_PROXY, keeps_caching=True, runs_in_transaction=False),
    "client|tracking": Policy(role=Role.CLIENT_TRACKING, with_upstream=_PROXY, keeps_caching=True),
    "client|unblock": Policy(role=Role.CLIENT_UNBLOCK, with_upstream=_PROXY, keeps_caching=True),
    "discard": Policy(role=Role.DISCARD, with_upstream=_PROXY, is_queued=False),
    "echo": Policy(with_upstream=_PROXY),
    "exec": Policy(role=Role.EXEC, with_upstream=_PROXY, is_queued=False),
    "hello": Policy(role=Role.HELLO, with_upstream=_PROXY, runs_in_transaction=False, redaction=Redaction.CREDENTIALS),
    "multi": Policy(role=Role.MULTI, with_upstream=_PROXY, is_queued=False),
    "ping": Policy(with_upstream=_PROXY, runs_while_subscribed=True),
    "quit": Policy(with_upstream=_PROXY, is_queued=False, runs_while_subscribed=True),
    "readonly": Policy(with_upstream=_PROXY),
    "readwrite": Policy(with_upstream=_PROXY),
    "reset": Policy(role=Role.RESET, with_upstream=_PROXY, is_queued=False, runs_while_subscribed=True),
    "select": Policy(role=Role.SELECT, with_upstream=Destination.SELECT, runs_in_transaction=False),
    "unwatch": Policy(role=Role.UNWATCH, with_upstream=_PROXY),
    "watch": Policy(role=Role.WATCH, is_queued=False, split=Split(Joined.ONE_OK)),
    # -- keys
    "copy": Policy(writes_other_database=True),
    "dbsize": Policy(role=Role.DBSIZE, at_proxy=RequestPolicy.ALL_SHARDS, with_upstream=Destination.ALL_KEYS),
    "dump": _NOT_COMPARED,
    "del": Policy(split_by_slot=_SUMMED),
    "exists": Policy(split=Split(Joined.SUM), split_by_slot=_SUMMED, field_command=FieldCommand(b"HEXISTS")),
    "expiretime": _time(b"HEXPIRETIME"),
    "keys": Policy(role=Role.KEYS, at_proxy=RequestPolicy.ALL_SHARDS, with_upstream=Destination.ALL_KEYS),
    "move": Policy(role=Role.MOVE, writes_other_database=True),
    "pexpiretime": _time(b"HPEXPIRETIME"),
    "pttl": _time(b"HPTTL"),
    "randomkey": Policy(role=Role.RANDOMKEY, at_proxy=RequestPolicy.ALL_SHARDS, with_upstream=Destination.ALL_KEYS),
    "scan": Policy(role=Role.SCAN, at_proxy=RequestPolicy.BY_CURSOR, with_upstream=Destination.ALL_KEYS),
    "sort_ro": Policy(role=Role.SORT_RO),
    "swapdb": Policy(role=Role.SWAPDB),
    "touch": Policy(
        split=Split(Joined.SUM),
        split_by_slot=_SUMMED,
        field_command=FieldCommand(b"HEXISTS"),
        comparison=Comparison.NEVER,
    ),
    "ttl": _time(b"HTTL"),
    "type": Policy(field_command=FieldCommand(b"HEXISTS", FieldKind.TYPE)),
    "unlink": Policy(split_by_slot=_SUMMED),
    # -- values
    "get": Policy(field_command=FieldCommand(b"HGET")),
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
    "mget": Policy(
        role=Role.MGET,
        split=Split(Joined.LIST),
        split_by_slot=SlotSplit(1, Joined.LIST),
        field_command=FieldCommand(b"HMGET"),
    ),
    "mset": Policy(split_by_slot=SlotSplit(2, Joined.ONE_OK), value_set=ValueSet.MANY),
    "pfcount": Policy(may_replicate=True),
    "psetex": Policy(value_set=ValueSet.WITH_TTL),
    "set": Policy(value_set=ValueSet.ONE),
    "setex": Policy(value_set=ValueSet.WITH_TTL),
    "smembers": _UNORDERED,
    "smismember": _OF_MEMBERS,
    "srandmember": _NOT_COMPARED,
    "sscan": _NOT_COMPARED,
    "strlen": Policy(field_command=FieldCommand(b"HSTRLEN")),
    "xinfo|consumers": _NOT_CACHED,
    "xinfo|groups": _NOT_CACHED,
    "xinfo|stream": _NOT_CACHED,
    "xpending": _NOT_CACHED,
    "xread": Policy(blocks_by_option=True, comparison=Comparison.NEVER),
    "xreadgroup": Policy(blocks_by_option=True),
    "zmscore": _OF_MEMBERS,
    "zrandmember": _NOT_COMPARED,
    "zscan": _NOT_COMPARED,
    # -- messages and scripts
    "eval": Policy(publishes=True, may_replicate=True),
    "evalsha": Policy(refusal=NoScriptError, publishes=True, may_replicate=True),
    "evalsha_ro": Policy(refusal=NoScriptError),
    "fcall": Policy(publishes=True, may_replicate=True),
    "function|kill": Policy(kills_a_script=True),
    "psubscribe": _subscribing(Verb.SUBSCRIBE, b"p"),
    "publish": Policy(channel_at=1, publishes=True, may_replicate=True),
    "punsubscribe": _subscribing(Verb.UNSUBSCRIBE, b"p"),
    "script|debug": _ALWAYS_DENIED,
    "script|kill": Policy(kills_a_script=True),
    "spublish": Policy(channel_at=1, publishes=True, may_replicate=True),
    "ssubscribe": _subscribing(Verb.SUBSCRIBE, b"s"),
    "subscribe": _subscribing(Verb.SUBSCRIBE, b""),
    "sunsubscribe": _subscribing(Verb.UNSUBSCRIBE, b"s"),
    "unsubscribe": _subscribing(Verb.UNSUBSCRIBE, b""),
    # -- the server
    "acl": Policy(at_proxy=_LOCAL, with_upstream=_PROXY),
    "acl|deluser": Policy(at_proxy=_LOCAL, with_upstream=_PROXY, denial=Denial.UNLESS_ALLOWED),
    "acl|load": Policy(at_proxy=_LOCAL, with_upstream=_PROXY, denial=Denial.UNLESS_ALLOWED),
    "acl|save": Policy(at_proxy=_LOCAL, with_upstream=_PROXY, denial=Denial.UNLESS_ALLOWED),
    "acl|setuser": Policy(
        at_proxy=_LOCAL, with_upstream=_PROXY, denial=Denial.UNLESS_ALLOWED, redaction=Redaction.ALL_OF_SUBCOMMAND
    ),
    "cluster": Policy(refusal=cluster_disabled, with_upstream=_PROXY),
    "command": Policy(at_proxy=_LOCAL),
    "config": Policy(at_proxy=_LOCAL),
    "config|set": Policy(at_proxy=_LOCAL, denial=Denial.UNLESS_ALLOWED, redaction=Redaction.SETTINGS),
    "debug": Policy(refusal=debug_refused, denial=Denial.UNLESS_ALLOWED, is_refused_at_once=True),
    "failover": Policy(denial=Denial.UNLESS_ALLOWED, changes_role=True),
    "info": Policy(role=Role.INFO, at_proxy=RequestPolicy.ALL_JOBS, with_upstream=Destination.BY_SECTIONS),
    "lastsave": Policy(at_proxy=_LOCAL),
    "latency": Policy(at_proxy=_LOCAL, with_upstream=_PROXY),
    "lolwut": Policy(at_proxy=_LOCAL),
    "memory": Policy(at_proxy=_LOCAL, comparison=Comparison.NEVER),
    "migrate": Policy(denial=Denial.UNLESS_ALLOWED, redaction=Redaction.CREDENTIALS),
    "module": Policy(at_proxy=_LOCAL, denial=Denial.UNLESS_ALLOWED),
    "module|help": Policy(at_proxy=_LOCAL),
    "module|list": Policy(at_proxy=_LOCAL),
    "monitor": Policy(role=Role.MONITOR, at_proxy=_LOCAL, with_upstream=_PROXY),
    "object": Policy(at_proxy=_LOCAL, comparison=Comparison.NEVER),
    "psync": _ALWAYS_DENIED,
    "replconf": _ALWAYS_DENIED,
    "replicaof": Policy(denial=Denial.UNLESS_ALLOWED, changes_role=True),
    "role": Policy(at_proxy=_LOCAL),
    "shutdown": _DENIED_BY_DEFAULT,
    "slaveof": Policy(denial=Denial.UNLESS_ALLOWED, changes_role=True),
    "slowlog": Policy(at_proxy=_LOCAL, with_upstream=_PROXY),
    "sync": _ALWAYS_DENIED,
    "time": Policy(at_proxy=_LOCAL),
    "wait": Policy(refusal=wait_refused, waits_for_writes=True),
    "waitaof": Policy(refusal=waitaof_refused, waits_for_writes=True),
    # -- states
    "state": Policy(with_upstream=_PROXY),
    "state|at": _state(_LOCAL, is_internal=True),
    "state|confirm": _state(_LOCAL),
    "state|describe": _state(RequestPolicy.ONE_JOB),
    "state|expect": _state(_LOCAL, is_internal=True, split=Split(Joined.ONE_OK)),
    "state|follow": _state(_LOCAL),
    "state|help": _state(_LOCAL),
    "state|history": Policy(role=Role.STATE_HISTORY, with_upstream=_PROXY),
    "state|hold": _state(_LOCAL, is_internal=True),
    "state|jobs": _state(RequestPolicy.ALL_JOBS),
    "state|lag": Policy(role=Role.STATE_LAG, at_proxy=RequestPolicy.ALL_JOBS, with_upstream=_PROXY),
    "state|list": Policy(role=Role.STATE_LIST, at_proxy=RequestPolicy.ALL_JOBS, with_upstream=_PROXY),
    "state|locate": Policy(role=Role.STATE_LOCATE, with_upstream=_PROXY),
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


def role_of(name: bytes) -> Role | None:
    """Return the role of a command by its name in any case."""
    return policy_of(name.lower().decode("latin-1")).role


def denied(denial: Denial) -> list[str]:
    """Return the sorted names of the commands with this denial."""
    return sorted(name for name, policy in ROWS.items() if policy.denial is denial)
