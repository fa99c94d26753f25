"""The fields of a command beside Redis' facts: the servers that answer it, its split, the sessions that may send it.

`ours` has the row of each command for which this is not the default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from resp_server.protocol.errors import ReplyError

# Makes the error reply of a command that is not served: a new exception each time, because exceptions have tracebacks.
Refusal = Callable[[], ReplyError]


class RequestPolicy(Enum):
    """Which servers answer a command at a proxy."""

    LOCAL = auto()  # the proxy itself
    BY_KEYS = auto()  # the owners of the request's keys
    ALL_SHARDS = auto()  # every shard, about its own keys
    BY_CURSOR = auto()  # the owner of the cursor's slot
    ALL_JOBS = auto()  # every shard, about the jobs that it serves
    ONE_JOB = auto()  # one server of the application that has the job


class Destination(Enum):
    """The destination of a request at a proxy with an upstream: the states, the upstream, both, or the proxy itself."""

    LOCAL = auto()
    STATES = auto()
    UPSTREAM = auto()
    BOTH = auto()
    PORTIONS = auto()  # both, for a long read: the upstream's keys in one request, the states' keys in chunks
    ALL_KEYS = auto()  # both: a command about all keys
    SELECT = auto()  # the proxy; the upstream says whether it has the database
    BY_SECTIONS = auto()  # INFO: the sections decide
    MAPPED = auto()  # the states, by a request that has the states' own names of its keys
    PREFERRED = auto()  # the states if they have the only key, otherwise the upstream
    DROPPED = auto()  # the proxy: a write that gets OK and is not run
    DENIED = auto()  # an error
    BY_KEYS = auto()  # the keys decide: only in a `RoutedCommand`, never in a `Route`


class Denial(Enum):
    """Whether a command reaches the upstream."""

    NO = auto()
    UNLESS_ALLOWED = auto()  # it would stop or reconfigure the upstream, or harm its host
    ALWAYS = auto()  # it would end or change a connection that clients share, or block the upstream for one client


class Comparison(Enum):
    """How the replies of the states and of the upstream to a read are compared."""

    EXACT = auto()
    PAIRS = auto()  # in RESP2, fields and values alternate
    UNORDERED = auto()
    # The replies differ although the values are equal: times, places in memory, random choices, cursors.
    NEVER = auto()


class Redaction(Enum):
    """Which arguments of a command are secret, so that neither SLOWLOG nor MONITOR shows them."""

    NOTHING = auto()
    ALL = auto()
    ALL_OF_SUBCOMMAND = auto()
    CREDENTIALS = auto()  # the user and the password after AUTH or AUTH2
    SETTINGS = auto()  # the values of secret settings


class Joined(Enum):
    """How the replies to the chunks of a long request are joined."""

    LIST = auto()
    SUM = auto()
    FRAMES = auto()  # one after another
    ONE_OK = auto()


class ValueSet(Enum):
    """How a command sets strings and replies OK, whatever they held before."""

    ONE = auto()  # SET, if it has no option that asks for what was there
    WITH_TTL = auto()  # key, time to live, value
    MANY = auto()  # pairs of keys and values


class FieldKind(Enum):
    """The result of a read of a key, for a key that is a field of a state's hash."""

    VALUE = auto()
    TYPE = auto()
    TIME = auto()  # the earlier end of the field and of its hash


class FieldCommand(NamedTuple):
    """The command about a field in place of one about a key.

    Args:
        name: The name in upper case.
    """

    name: bytes
    kind: FieldKind = FieldKind.VALUE


class SlotSplit(NamedTuple):
    """How a request with keys of several slots is split.

    Args:
        words: The words of each key.
        joined: How the replies are joined.
    """

    words: int
    joined: Joined


class Verb(Enum):
    """The effect of a command on a subscription."""

    SUBSCRIBE = auto()
    UNSUBSCRIBE = auto()


# Redis' prefix of commands with patterns of channels' names; those of shards' channels have `s`, others none.
PATTERNS = b"p"


class Channels(NamedTuple):
    """A subscribing or unsubscribing command.

    Args:
        kind: Its prefix.
    """

    verb: Verb
    kind: bytes


class Role(Enum):
    """The part of a command in a session or in a request to several servers, which other modules have code for."""

    AUTH = auto()
    CLIENT_CACHING = auto()
    CLIENT_REPLY = auto()
    CLIENT_TRACKING = auto()
    CLIENT_UNBLOCK = auto()
    DBSIZE = auto()
    DISCARD = auto()
    EXEC = auto()
    HELLO = auto()
    INFO = auto()
    KEYS = auto()
    MGET = auto()
    MOVE = auto()
    MONITOR = auto()
    MULTI = auto()
    RANDOMKEY = auto()
    RESET = auto()
    SCAN = auto()
    SELECT = auto()
    SORT_RO = auto()
    STATE_HISTORY = auto()
    STATE_LAG = auto()
    STATE_LIST = auto()
    STATE_LOCATE = auto()
    SWAPDB = auto()
    UNWATCH = auto()
    WATCH = auto()


class Split(NamedTuple):
    """How a long request is split into chunks.

    Args:
        prefix_words: The number of words after the name that each chunk repeats.
        is_counted: The last of them is the number of the words after it.
    """

    joined: Joined
    prefix_words: int = 0
    is_counted: bool = False


@dataclass(frozen=True)
class Policy:
    """A row of `ours`.

    Args:
        role: What other modules have code for.
        at_proxy: Which servers answer the command at a proxy, if it has no keys.
        is_internal: Proxies send it to servers, and refuse it from clients.
        with_upstream: What answers it at a proxy with an upstream; None: the owners of its keys, or the upstream.
        denial: Whether it reaches the upstream.
        split_by_slot: How a request with keys of several slots is split; None: it needs keys of one slot.
        field_command: Its counterpart about a field of a hash; None: there is none.
        value_set: How it sets strings; None: it is no plain write of strings.
        blocks_by_option: It blocks only with the option BLOCK.
        keeps_caching: CLIENT CACHING is not about this command, but about the next one that is another.
        split: How a long request is split; None: it is not.
        channels: What the command does with subscriptions.
        channel_at: The position of the channel to which it publishes; 0: none.
        publishes: It may send messages, itself or by the commands that it runs.
        is_queued: MULTI queues it.
        runs_in_transaction: A proxy takes it in a transaction.
        runs_while_subscribed: A subscribed client of RESP2 may send it, since its reply is no message.
        may_replicate: CLIENT PAUSE ... WRITE delays it with the writes (Redis' flag CMD_MAY_REPLICATE).
        refusal: Makes its error, if it is not served, but clients expect exactly that error.
        is_refused_at_once: Redis refuses it before MULTI queues it.
        comparison: How shadow rules compare its replies.
        is_cacheable: A proxy may cache its replies; not those with times.
        redaction: The arguments that no log shows.
        waits_for_writes: It blocks until the writes of its connection are done; other blocking commands wait for keys.
        kills_a_script: A connection that is shared may be that of the script, and would deliver it after its end.
        changes_role: It makes the upstream a replica or a master again. Other requests do not reach a replica.
        writes_other_database: A key that it writes in another database is not among its keys in the selected one.
    """

    role: Role | None = None
    at_proxy: RequestPolicy | None = None
    is_internal: bool = False
    with_upstream: Destination | None = None
    denial: Denial = Denial.NO
    split_by_slot: SlotSplit | None = None
    field_command: FieldCommand | None = None
    value_set: ValueSet | None = None
    blocks_by_option: bool = False
    keeps_caching: bool = False
    split: Split | None = None
    channels: Channels | None = None
    channel_at: int = 0
    publishes: bool = False
    is_queued: bool = True
    runs_in_transaction: bool = True
    runs_while_subscribed: bool = False
    may_replicate: bool = False
    refusal: Refusal | None = None
    is_refused_at_once: bool = False
    comparison: Comparison = Comparison.EXACT
    is_cacheable: bool = True
    redaction: Redaction = Redaction.NOTHING
    waits_for_writes: bool = False
    kills_a_script: bool = False
    changes_role: bool = False
    writes_other_database: bool = False
