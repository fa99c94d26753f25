"""The fields of a command beside Redis' facts: what answers it, its split, the sessions that may send it.

`policies` has the row of each command for which this is not the default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from resp_server.protocol.errors import ReplyError

# Makes the error reply of a command that is not served: a new exception each time, because exceptions have tracebacks.
Refusal = Callable[[], ReplyError]


class AnsweredBy(Enum):
    """What answers a command at a proxy without an upstream.

    With an upstream it is the same, but for `ALL_KEYS`, and for sections of INFO that are the upstream's.
    """

    LOCAL = auto()  # this process: the proxy, or the server that gets the request
    STATES = auto()  # the state servers that own the request's keys
    ALL_KEYS = auto()  # all state servers, about their keys; with an upstream, it answers about its own
    ALL_JOBS = auto()  # all state servers, about their jobs
    ONE_JOB = auto()  # one of the state servers that have the job


# Of commands without keys that state servers answer.
OF_SERVERS = frozenset((AnsweredBy.ALL_KEYS, AnsweredBy.ALL_JOBS, AnsweredBy.ONE_JOB))


class UpstreamDenial(Enum):
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


class ReplyMerge(Enum):
    """How the replies to the parts of a request are merged."""

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


class SpecialCommand(Enum):
    """The commands that other modules have code for: they change a session, or join replies in their own way."""

    AUTH = auto()
    CLIENT_CACHING = auto()
    CLIENT_REPLY = auto()
    CLIENT_TRACKING = auto()
    CLIENT_UNBLOCK = auto()
    CONFIG_SET = auto()
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


# Of these commands, the compiled forwarder has code for the special ones. None: all that are not special.
TRANSACTION_COMMANDS = frozenset({SpecialCommand.MULTI, SpecialCommand.EXEC})
FORWARDED_TO_STATES = frozenset({None, SpecialCommand.MGET}) | TRANSACTION_COMMANDS
FORWARDED_TO_UPSTREAM = frozenset({None, SpecialCommand.MGET, SpecialCommand.SORT_RO, SpecialCommand.WATCH})


class Split(NamedTuple):
    """How a request with many keys, members or channels is split into parts.

    A long read is split into chunks, if it is answered by state servers or by this process. A write never is.

    Args:
        is_by_slot: A request with keys of several slots is split, too; otherwise it needs keys of one slot.
        item_size: The number of arguments of each key, member or channel: 2 for pairs.
        prefix_size: The number of arguments before the first of them, which each part repeats.
        is_counted: The last argument of the prefix is the number of the arguments after it.
    """

    merge: ReplyMerge
    is_by_slot: bool = False
    item_size: int = 1
    prefix_size: int = 0
    is_counted: bool = False


@dataclass(frozen=True)
class Policy:
    """A row of `policies`.

    Args:
        special: Which of the commands it is that other modules have code for; None: none of them.
        answered_by: What answers it, whatever its keys are; None: the owners of its keys; without keys the upstream, or
            this process if there is none.
        is_internal: Proxies send it to servers, and refuse it from clients.
        denial: Whether it reaches the upstream.
        field_command: Its counterpart about a field of a hash; None: there is none.
        value_set: How it sets strings; None: it is no plain write of strings.
        blocks_by_option: It blocks only with the option BLOCK.
        keeps_caching: After CLIENT CACHING, this command does not use it up.
        split: How a request with many keys, members or channels is split; None: it is not.
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
        kills_a_script: It is not sent over a shared connection: if the script runs there, it would arrive after it.
        changes_replication: It makes the upstream a replica or a master again. Other requests do not reach a replica.
        writes_other_database: A key that it writes in another database is not among its keys in the selected one.
    """

    special: SpecialCommand | None = None
    answered_by: AnsweredBy | None = None
    is_internal: bool = False
    denial: UpstreamDenial = UpstreamDenial.NO
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
    changes_replication: bool = False
    writes_other_database: bool = False

    @property
    def is_split_by_slot(self) -> bool:
        """Whether a request with keys of several slots is split; otherwise it needs keys of one slot."""
        return self.split is not None and self.split.is_by_slot
