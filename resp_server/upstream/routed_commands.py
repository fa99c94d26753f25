"""The destination of each command at a proxy, and the positions of the command's keys. Pure.

A command with keys goes to the owners of its keys. A command without keys goes where the tables below say, and to the
upstream if it is in no table. The facts of a command are those in the upstream's reply to COMMAND, if the reply has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from resp_server.command.spec import Facts
from resp_server.command.table import Command, CommandTable
from resp_server.protocol.errors import PlainError, unknown_command, unknown_subcommand, wrong_arity
from resp_server.protocol.request_parser import Request
from resp_server.upstream.command_facts import tells_all_keys
from resp_server.upstream.other_databases import NAMES as OTHER_DATABASES

# The proxy answers these: they are about the connection, its user, or this process. Some also go to the upstream.
LOCAL = frozenset(
    [
        "acl",
        "asking",
        "auth",
        "client",
        "cluster",
        "discard",
        "echo",
        "exec",
        "hello",
        "latency",
        "monitor",
        "multi",
        "ping",
        "psubscribe",
        "punsubscribe",
        "quit",
        "readonly",
        "readwrite",
        "reset",
        "slowlog",
        "ssubscribe",
        "state",
        "subscribe",
        "sunsubscribe",
        "unsubscribe",
        "unwatch",
    ]
)
# These read the keys of both sides.
ALL_KEYS = frozenset(["dbsize", "keys", "randomkey", "scan"])
# Denied unless they are allowed: they would stop or reconfigure the upstream, harm its host, or change a connection
# that clients share.
DENIED = frozenset(
    [
        "acl|deluser",
        "acl|load",
        "acl|save",
        "acl|setuser",
        "config|set",
        "debug",
        "failover",
        "migrate",
        "module",
        "psync",
        "replconf",
        "replicaof",
        "script|debug",
        "shutdown",
        "slaveof",
        "sync",
    ]
)
# Denied always: they would end or change a connection that clients share, or block the upstream for one client.
NEVER_ALLOWED = frozenset(["psync", "replconf", "script|debug", "sync"])
# Blocking commands that wait for the connection's own writes. All others wait for keys. Redis before 7.2 does not flag
# them as blocking.
WRITE_WAITS = ("wait", "waitaof")
# They end a script that runs. A shared connection may be that of the script, and would deliver them after its end.
KILLS = ("script|kill", "function|kill")
# They make the upstream a replica or a master again. Other requests do not reach an upstream that has become a replica.
ROLE_CHANGES = ("replicaof", "slaveof", "failover")
# Subcommands of denied commands that only read.
READS_OF_DENIED = frozenset(["module|help", "module|list"])
# The compiled hop looks these up first.
USUAL = ("get", "mget", "set", "incr", "setex", "del", "hget", "hset", "hgetall", "expire", "exists", "lpush", "rpop")
# The number of cached spellings of command names, such as GET, get and Get.
SPELLINGS_MAX = 1024


class Destination(Enum):
    """What answers a request: a side (the states, the upstream), both of them, or the proxy itself."""

    LOCAL = auto()
    STATES = auto()
    UPSTREAM = auto()
    BOTH = auto()
    PORTIONS = auto()  # both, for a long read: the upstream's keys in one request, the states' keys in portions
    ALL_KEYS = auto()  # both: a command about all keys
    SELECT = auto()  # the proxy; the upstream says whether it has the database
    BY_SECTIONS = auto()  # INFO: the sections decide
    MAPPED = auto()  # the states, by a request that has the states' own names of its keys
    PREFERRED = auto()  # the states if they have the only key, otherwise the upstream
    DROPPED = auto()  # the proxy: a write that gets OK and is not run
    DENIED = auto()  # an error
    BY_KEYS = auto()  # the keys decide: only in a `RoutedCommand`, never in a `Route`


class RoutedCommand(NamedTuple):
    """How one command is routed. command: None if the command table lacks it.

    single_key_at: the position of the only key; 0: the command has no key, or may have several. needs_getkeys: only the
    upstream knows the keys of a request. is_subscription: the upstream may send frames without a request from then on.
    """

    name: str
    destination: Destination
    facts: Facts
    command: Command | None = None
    is_read: bool = False
    single_key_at: int = 0
    needs_getkeys: bool = False
    is_subscription: bool = False


class PlainCommand(NamedTuple):
    """A command of which the first argument is the only key, or all arguments are keys."""

    name: str
    is_read: bool
    has_many_keys: bool


class RoutedCommands:
    """How all commands are routed, by the name as typed.

    allowed: commands of `DENIED` that go to the upstream. own: other commands of `DENIED`, which the proxy answers.
    """

    def __init__(self, table: CommandTable, allowed: Collection[str] = (), own: Collection[str] = ()) -> None:
        self._table, self._allowed, self._own = table, allowed, own
        self._upstream_facts: Mapping[str, Facts] = {}
        self._routed: dict[bytes, RoutedCommand | None] = {}

    def take_facts(self, facts: Mapping[str, Facts]) -> None:
        """Take the facts of the upstream's commands."""
        self._upstream_facts = facts
        self._routed.clear()

    def of(self, request: Request) -> RoutedCommand | None:
        """Return how a request's command is routed; None for an unknown command."""
        name = request[0]
        try:
            routed = self._routed[name]
        except KeyError:
            routed = self._learn(name, lambda: self._find(name.lower().decode("utf-8", "replace")))
        if routed is None or not routed.facts.subcommands or len(request) < 2:
            return routed
        full_name = name + b"|" + request[1]
        if full_name not in self._routed:
            text = full_name.lower().decode("utf-8", "replace")
            return self._learn(full_name, lambda: self._find(text) or routed)
        return self._routed[full_name]

    def check_form(self, routed: RoutedCommand, request: Request) -> None:
        """Raise the error with which the upstream would refuse to queue a request after MULTI."""
        name, _, sub = routed.name.partition("|")
        if self._upstream_facts and name not in self._upstream_facts:
            raise unknown_command(request)
        subcommands = self._upstream_facts[name].subcommands if self._upstream_facts else routed.facts.subcommands
        if subcommands and len(request) > 1 and sub not in subcommands:
            raise unknown_subcommand(name, request[1])
        arity = routed.facts.arity
        if (len(request) != arity) if arity > 0 else (len(request) < -arity):
            raise wrong_arity(routed.name)
        if "no_multi" in routed.facts.flags:
            raise PlainError("Command not allowed inside a transaction")

    def plain_commands(self) -> Sequence[PlainCommand]:
        """Return the commands whose keys are at fixed positions and decide the side, the most used ones first."""
        names = [*USUAL, *self._upstream_facts, *(each.name for each in self._table)]
        found = []
        for name in dict.fromkeys(names):
            routed = self._find(name)
            if (
                routed is None
                or routed.destination is not Destination.BY_KEYS
                or routed.facts.subcommands
                or name == "watch"
            ):
                continue
            facts = routed.facts
            has_fixed_keys = facts.first_key == 1 and facts.step == 1 and facts.last_key in (1, -1)
            is_plain = has_fixed_keys and len(facts.key_specs) == 1 and "not_key" not in facts.key_specs[0]["flags"]
            if (
                is_plain
                and not routed.needs_getkeys
                and name not in OTHER_DATABASES
                and not {"blocking", "movablekeys"} & set(facts.flags)
            ):
                found.append(PlainCommand(name, routed.is_read, facts.last_key == -1))
        return found

    def _learn(self, spelling: bytes, find: Callable[[], RoutedCommand | None]) -> RoutedCommand | None:
        routed = find()
        if len(self._routed) < SPELLINGS_MAX:
            self._routed[spelling] = routed
        return routed

    def _find(self, name: str) -> RoutedCommand | None:
        command = self._table.get(name.encode())
        facts = self._facts(name, command)
        if facts is None:
            return None
        container = name.partition("|")[0]
        destination = Destination.UPSTREAM
        needs_getkeys = command is None and ("movablekeys" in facts.flags or not tells_all_keys(facts))
        is_denied = (name in DENIED or container in DENIED) and name not in READS_OF_DENIED
        is_allowed = is_denied and (name in self._allowed or container in self._allowed)
        if is_denied and not is_allowed and name not in self._own:
            destination = Destination.DENIED
        elif (name in LOCAL or container in LOCAL) and not is_allowed:
            destination = Destination.LOCAL
        elif name in ALL_KEYS:
            destination = Destination.ALL_KEYS
        elif name == "select":
            destination = Destination.SELECT
        elif name == "info":
            destination = Destination.BY_SECTIONS
        elif facts.key_specs or needs_getkeys:
            destination = Destination.BY_KEYS
        flags = facts.key_specs[0]["flags"] if len(facts.key_specs) == 1 else ("not_key",)
        is_fixed = "not_key" not in flags and "|" not in name and "movablekeys" not in facts.flags
        is_single = is_fixed and 0 < facts.first_key == facts.last_key
        is_read = "readonly" in facts.flags
        is_subscription = destination is Destination.UPSTREAM and _subscribes(facts, is_ours=command is not None)
        single_key_at = facts.first_key if is_single and not needs_getkeys else 0
        return RoutedCommand(name, destination, facts, command, is_read, single_key_at, needs_getkeys, is_subscription)

    def _facts(self, name: str, command: Command | None) -> Facts | None:
        container, _, sub = name.partition("|")
        theirs = self._upstream_facts.get(container)
        if theirs is not None and sub:
            theirs = theirs.subcommands.get(sub)
        # The keys of SORT and MIGRATE are found by the code that knows these two commands.
        if theirs is not None and (command is None or tells_all_keys(theirs)):
            return theirs
        return command.facts if command is not None else None


def _subscribes(facts: Facts, *, is_ours: bool) -> bool:
    """Tell by its flags whether a command without keys may subscribe the connection.

    is_ours: the command table has it. Such a command never does: `LOCAL` has all that subscribe.
    """
    return not facts.key_specs and "pubsub" in facts.flags and not is_ours
