"""The policy of each command: what Redis' facts do not say.

No other module of `resp_server` names commands in a table, but those in `lint_command_names.OTHER_NAMES`, and
`native/rows.pyx`, which lists what the compiled core answers. A subcommand without a row has that of its container. A
command without a row is routed by its keys, is not split, and is neither denied nor special in any other way.
"""

from __future__ import annotations

from collections.abc import Mapping

from resp_server.command.policy import (
    AnsweredBy,
    Channels,
    Comparison,
    FieldCommand,
    FieldKind,
    Policy,
    Redaction,
    ReplyMerge,
    SpecialCommand,
    Split,
    UpstreamDenial,
    ValueSet,
    Verb,
)
from resp_server.command.refusals import debug_refused, wait_refused, waitaof_refused
from resp_server.protocol.errors import NoScriptError, cluster_disabled

_LOCAL = AnsweredBy.LOCAL
_NOT_COMPARED = Policy(comparison=Comparison.NEVER)
_UNORDERED = Policy(comparison=Comparison.UNORDERED)
_OF_FIELDS = Split(ReplyMerge.LIST, prefix_size=3, is_counted=True)
_OF_MEMBERS = Policy(split=Split(ReplyMerge.LIST, prefix_size=1))
_SUMMED = Split(ReplyMerge.SUM, is_by_slot=True)
_NOT_CACHED = Policy(is_cacheable=False)
_DENIED_BY_DEFAULT = Policy(denial=UpstreamDenial.UNLESS_ALLOWED)
_ALWAYS_DENIED = Policy(denial=UpstreamDenial.ALWAYS)


def _subscribing(verb: Verb, kind: bytes) -> Policy:
    return Policy(
        answered_by=_LOCAL, split=Split(ReplyMerge.FRAMES), channels=Channels(verb, kind), runs_while_subscribed=True
    )


def _time(of_field: bytes) -> Policy:
    return Policy(field_command=FieldCommand(of_field, FieldKind.TIME), comparison=Comparison.NEVER)


def _state(
    answered_by: AnsweredBy = _LOCAL, *, is_internal: bool = False, split: Split | None = None, channel_at: int = 0
) -> Policy:
    return Policy(answered_by=answered_by, is_internal=is_internal, split=split, channel_at=channel_at)


POLICIES: Mapping[str, Policy] = {
    # -- connections and transactions
    "asking": Policy(answered_by=_LOCAL),
    "auth": Policy(special=SpecialCommand.AUTH, answered_by=_LOCAL, redaction=Redaction.ALL),
    "client": Policy(answered_by=_LOCAL, keeps_caching=True),
    "client|caching": Policy(special=SpecialCommand.CLIENT_CACHING, answered_by=_LOCAL, keeps_caching=True),
    "client|reply": Policy(
        special=SpecialCommand.CLIENT_REPLY, answered_by=_LOCAL, keeps_caching=True, runs_in_transaction=False
    ),
    "client|tracking": Policy(special=SpecialCommand.CLIENT_TRACKING, answered_by=_LOCAL, keeps_caching=True),
    "client|unblock": Policy(special=SpecialCommand.CLIENT_UNBLOCK, answered_by=_LOCAL, keeps_caching=True),
    "discard": Policy(special=SpecialCommand.DISCARD, answered_by=_LOCAL, is_queued=False),
    "echo": Policy(answered_by=_LOCAL),
    "exec": Policy(special=SpecialCommand.EXEC, answered_by=_LOCAL, is_queued=False),
    "hello": Policy(
        special=SpecialCommand.HELLO, answered_by=_LOCAL, runs_in_transaction=False, redaction=Redaction.CREDENTIALS
    ),
    "multi": Policy(special=SpecialCommand.MULTI, answered_by=_LOCAL, is_queued=False),
    "ping": Policy(answered_by=_LOCAL, runs_while_subscribed=True),
    "quit": Policy(answered_by=_LOCAL, is_queued=False, runs_while_subscribed=True),
    "readonly": Policy(answered_by=_LOCAL),
    "readwrite": Policy(answered_by=_LOCAL),
    "reset": Policy(special=SpecialCommand.RESET, answered_by=_LOCAL, is_queued=False, runs_while_subscribed=True),
    "select": Policy(special=SpecialCommand.SELECT, answered_by=_LOCAL, runs_in_transaction=False),
    "unwatch": Policy(special=SpecialCommand.UNWATCH, answered_by=_LOCAL),
    "watch": Policy(special=SpecialCommand.WATCH, is_queued=False, split=Split(ReplyMerge.ONE_OK)),
    # -- keys
    "copy": Policy(writes_other_database=True),
    "dbsize": Policy(special=SpecialCommand.DBSIZE, answered_by=AnsweredBy.ALL_KEYS),
    "dump": _NOT_COMPARED,
    "del": Policy(split=_SUMMED),
    "exists": Policy(split=_SUMMED, field_command=FieldCommand(b"HEXISTS")),
    "expiretime": _time(b"HEXPIRETIME"),
    "keys": Policy(special=SpecialCommand.KEYS, answered_by=AnsweredBy.ALL_KEYS),
    "move": Policy(special=SpecialCommand.MOVE, writes_other_database=True),
    "pexpiretime": _time(b"HPEXPIRETIME"),
    "pttl": _time(b"HPTTL"),
    "randomkey": Policy(special=SpecialCommand.RANDOMKEY, answered_by=AnsweredBy.ALL_KEYS),
    "scan": Policy(special=SpecialCommand.SCAN, answered_by=AnsweredBy.ALL_KEYS),
    "sort_ro": Policy(special=SpecialCommand.SORT_RO),
    "swapdb": Policy(special=SpecialCommand.SWAPDB),
    "touch": Policy(
        split=_SUMMED,
        field_command=FieldCommand(b"HEXISTS"),
        comparison=Comparison.NEVER,
    ),
    "ttl": _time(b"HTTL"),
    "type": Policy(field_command=FieldCommand(b"HEXISTS", FieldKind.TYPE)),
    "unlink": Policy(split=_SUMMED),
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
        special=SpecialCommand.MGET,
        split=Split(ReplyMerge.LIST, is_by_slot=True),
        field_command=FieldCommand(b"HMGET"),
    ),
    "mset": Policy(split=Split(ReplyMerge.ONE_OK, is_by_slot=True, item_size=2), value_set=ValueSet.MANY),
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
    "acl": Policy(answered_by=_LOCAL),
    "acl|deluser": Policy(answered_by=_LOCAL, denial=UpstreamDenial.UNLESS_ALLOWED),
    "acl|load": Policy(answered_by=_LOCAL, denial=UpstreamDenial.UNLESS_ALLOWED),
    "acl|save": Policy(answered_by=_LOCAL, denial=UpstreamDenial.UNLESS_ALLOWED),
    "acl|setuser": Policy(
        answered_by=_LOCAL, denial=UpstreamDenial.UNLESS_ALLOWED, redaction=Redaction.ALL_OF_SUBCOMMAND
    ),
    "cluster": Policy(refusal=cluster_disabled, answered_by=_LOCAL),
    "config|set": Policy(
        special=SpecialCommand.CONFIG_SET, denial=UpstreamDenial.UNLESS_ALLOWED, redaction=Redaction.SETTINGS
    ),
    "debug": Policy(refusal=debug_refused, denial=UpstreamDenial.UNLESS_ALLOWED, is_refused_at_once=True),
    "failover": Policy(denial=UpstreamDenial.UNLESS_ALLOWED, changes_replication=True),
    "info": Policy(special=SpecialCommand.INFO, answered_by=AnsweredBy.ALL_JOBS),
    "latency": Policy(answered_by=_LOCAL),
    "memory": _NOT_COMPARED,
    "migrate": Policy(denial=UpstreamDenial.UNLESS_ALLOWED, redaction=Redaction.CREDENTIALS),
    "module": _DENIED_BY_DEFAULT,
    "module|help": Policy(),
    "module|list": Policy(),
    "monitor": Policy(special=SpecialCommand.MONITOR, answered_by=_LOCAL),
    "object": _NOT_COMPARED,
    "psync": _ALWAYS_DENIED,
    "replconf": _ALWAYS_DENIED,
    "replicaof": Policy(denial=UpstreamDenial.UNLESS_ALLOWED, changes_replication=True),
    "shutdown": _DENIED_BY_DEFAULT,
    "slaveof": Policy(denial=UpstreamDenial.UNLESS_ALLOWED, changes_replication=True),
    "slowlog": Policy(answered_by=_LOCAL),
    "sync": _ALWAYS_DENIED,
    "wait": Policy(refusal=wait_refused, waits_for_writes=True),
    "waitaof": Policy(refusal=waitaof_refused, waits_for_writes=True),
    # -- states
    "state": Policy(answered_by=_LOCAL),
    "state|at": _state(is_internal=True),
    "state|confirm": _state(),
    "state|describe": _state(AnsweredBy.ONE_JOB),
    "state|expect": _state(is_internal=True, split=Split(ReplyMerge.ONE_OK)),
    "state|follow": _state(),
    "state|fresh": _state(is_internal=True),
    "state|freshness": _state(),
    "state|help": _state(),
    "state|history": Policy(special=SpecialCommand.STATE_HISTORY, answered_by=AnsweredBy.STATES),
    "state|hold": _state(is_internal=True),
    "state|jobs": _state(AnsweredBy.ALL_JOBS),
    "state|lag": Policy(special=SpecialCommand.STATE_LAG, answered_by=AnsweredBy.ALL_JOBS),
    "state|list": Policy(special=SpecialCommand.STATE_LIST, answered_by=AnsweredBy.ALL_JOBS),
    "state|locate": Policy(special=SpecialCommand.STATE_LOCATE, answered_by=AnsweredBy.STATES),
    "state|mget": _state(AnsweredBy.STATES, split=Split(ReplyMerge.LIST)),
    "state|notice": _state(is_internal=True),
    "state|notify": _state(is_internal=True),
    "state|owner": _state(),
    "state|owners": _state(),
    "state|publish": _state(is_internal=True, channel_at=3),
    "state|release": _state(),
    "state|reload": _state(),
    "state|shadow": _state(),
    "state|topology": _state(),
    "state|within": _state(is_internal=True),
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
    found = POLICIES.get(name)
    return found if found is not None else POLICIES.get(name.partition("|")[0], NO_POLICY)


def special_of(name: bytes) -> SpecialCommand | None:
    """Return which special command has a name, in any case; None if it is not special."""
    return policy_of(name.lower().decode("latin-1")).special


def denied(denial: UpstreamDenial) -> list[str]:
    """Return the sorted names of the commands with this denial."""
    return sorted(name for name, policy in POLICIES.items() if policy.denial is denial)
