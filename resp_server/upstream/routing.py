"""Which side answers a request: the states, the upstream, both, or the proxy (or server) itself. Pure.

A command with keys goes to the owners of its keys. A command without keys goes by the tables below, and to the upstream
if it is in none of them. The facts of a command are the upstream's own, where it has told them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from resp_server.command_table.facts import Facts
from resp_server.command_table.key_specs import key_positions
from resp_server.command_table.table import Command, CommandTable
from resp_server.forwarding.raw_replies import RawReply
from resp_server.protocol.errors import (
    LoadingError,
    PlainError,
    client_text,
    unknown_command,
    unknown_subcommand,
    wrong_arity,
)
from resp_server.protocol.request_parser import Request
from resp_server.upstream.command_facts import tells_all_keys
from resp_server.upstream.key_matcher import Decision
from resp_server.upstream.long_words import long_words, too_long
from resp_server.upstream.mapped_names import FieldRead, StateName, field_read, with_names
from resp_server.upstream.ownership import Ownership
from resp_server.upstream.rules import Owner, Rule, Writes
from resp_server.upstream.shadow_compare import is_comparable
from resp_server.upstream.state_writes import without_pairs, write_plan

# Answered here: about this connection, its user, and this process. Some are sent to the upstream as well.
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
# About the keys of both sides.
ALL_KEYS = frozenset(["dbsize", "keys", "randomkey", "scan"])
# They harm the upstream's host, or would take a shared connection out of the protocol.
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
# Subcommands of denied commands that only read.
READS_OF_DENIED = frozenset(["module|help", "module|list"])
# Sections of INFO that only this process has.
OWN_SECTIONS = (b"proxy", b"sparkis")
# Split over both sides. Writes are not: with a state's key nothing of them is done.
SPLIT = ("mget", "exists", "touch")
# The words that an option of XREAD and XREADGROUP takes, with its name.
STREAM_OPTIONS = {b"GROUP": 3, b"COUNT": 2, b"NOACK": 1}
# The compiled hop finds these first.
USUAL = ("get", "mget", "set", "incr", "setex", "del", "hget", "hset", "hgetall", "expire", "exists", "lpush", "rpop")
NO_FIELDS: Mapping[int, Request] = {}
# Spellings of command names that are remembered.
SPELLINGS_MAX = 1024
# Keys that an error names.
NAMED_KEYS_MAX = 8


class Side(Enum):
    """Who answers a request."""

    LOCAL = auto()
    STATES = auto()
    UPSTREAM = auto()
    BOTH = auto()
    ALL_KEYS = auto()  # both sides, all keys of each
    SELECT = auto()  # here: the upstream says whether it has the database
    BY_SECTIONS = auto()  # INFO
    NOT_YET = auto()
    MAPPED = auto()  # the states, which get another request, with their own names of keys
    PREFERRED = auto()  # the states if they have the only key, otherwise the upstream
    DROPPED = auto()  # a write that is answered OK
    DENIED = auto()
    BY_KEYS = auto()  # a rule only, never a decision


class CommandRule(NamedTuple):
    """What is known of a command by its name. command: None: it is not in the command table."""

    name: str
    side: Side
    facts: Facts
    command: Command | None = None
    is_read: bool = False
    single_key_at: int = 0


class Route(NamedTuple):
    """A decision.

    state_keys: for `Side.BOTH`, the positions of the states' keys. is_blocking: the upstream may reply much later, so
    the request needs a connection of its client's own. request: what the side gets instead of the client's request.
    fields: for `Side.BOTH`, the requests for keys that are fields of states' keys, by position. convert: for
    `Side.MAPPED`, makes the states' reply that of the client's request.
    preferred: for `Side.BOTH`, the positions of keys that the states answer if they have them. key_at, unserved: for
    `Side.PREFERRED`, the position of the key, and the error if the states have it, but do not serve the command.
    shadowed: keys to compare.
    """

    side: Side
    rule: CommandRule
    state_keys: Sequence[int] = ()
    is_blocking: bool = False
    request: Request | None = None
    fields: Mapping[int, Request] = NO_FIELDS
    convert: Callable[[RawReply], RawReply] | None = None
    preferred: Sequence[int] = ()
    key_at: int = 0
    unserved: PlainError | None = None
    shadowed: Sequence[Shadowed] = ()


class Shadowed(NamedTuple):
    """A key whose value in the upstream is compared with the state's.

    at: its position among the keys. name, upstream_request: the read of this key alone. request, convert: the state's
    read, and what makes its reply that of the client's.
    """

    rule: Rule
    at: int
    key: bytes
    name: str
    upstream_request: Request
    state_key: bytes
    request: Request
    convert: Callable[[RawReply], RawReply] | None = None


class PlainCommand(NamedTuple):
    """A command whose keys are its first word, or all words."""

    name: str
    is_read: bool
    has_many_keys: bool


class SwapRouter:
    """Decides which side answers a request."""

    def __init__(self, table: CommandTable, ownership: Ownership) -> None:
        self._table = table
        self._ownership = ownership
        self._upstream_facts: Mapping[str, Facts] = {}
        self._rules: dict[bytes, CommandRule | None] = {}

    def take_facts(self, facts: Mapping[str, Facts]) -> None:
        """Take the facts of the upstream's commands."""
        self._upstream_facts = facts
        self._rules.clear()

    def route(self, request: Request, database: int = 0) -> Route | None:
        """Return which side answers; None for an unknown command. ReplyError for a request that no side may answer.

        database: the client's.
        """
        long_at = long_words(request)
        rule = self._rule(request)
        if long_at and (rule is None or rule.side not in (Side.BY_KEYS, Side.UPSTREAM)):
            raise too_long()
        if rule is None:
            return None
        if rule.side is Side.BY_KEYS:
            return self._by_keys(rule, request, database, long_at)
        if rule.side is Side.ALL_KEYS:
            self._check_known()
            if rule.command is not None:
                rule.command.check_arity(request)
            return Route(Side.ALL_KEYS, rule)
        if rule.side is Side.NOT_YET:
            raise not_yet(rule.name)
        if rule.side is Side.DENIED:
            raise PlainError(f"command '{rule.name}' is not passed on to the upstream")
        if rule.side is Side.BY_SECTIONS:
            is_own = any(word.lower() in OWN_SECTIONS for word in request[1:])
            return Route(Side.LOCAL if is_own else Side.UPSTREAM, rule)
        return Route(rule.side, rule, is_blocking=rule.side is Side.UPSTREAM and "blocking" in rule.facts.flags)

    def check_form(self, rule: CommandRule, request: Request) -> None:
        """Raise the error of a request for the upstream that is not queued after MULTI, whatever its arguments are."""
        name, _, sub = rule.name.partition("|")
        if self._upstream_facts and name not in self._upstream_facts:
            raise unknown_command(request)
        subcommands = self._upstream_facts[name].subcommands if self._upstream_facts else rule.facts.subcommands
        if subcommands and len(request) > 1 and sub not in subcommands:
            raise unknown_subcommand(name, request[1])
        arity = rule.facts.arity
        if (len(request) != arity) if arity > 0 else (len(request) < -arity):
            raise wrong_arity(rule.name)
        if "no_multi" in rule.facts.flags:
            raise PlainError("Command not allowed inside a transaction")

    def plain_commands(self) -> Sequence[PlainCommand]:
        """Return the commands that the upstream answers if its keys are at fixed places, the most used ones first."""
        names = [*USUAL, *self._upstream_facts, *(each.name for each in self._table)]
        found = []
        for name in dict.fromkeys(names):
            rule = self._find(name)
            if rule is None or rule.side is not Side.BY_KEYS or rule.facts.subcommands or name == "watch":
                continue
            facts = rule.facts
            has_fixed_keys = facts.first_key == 1 and facts.step == 1 and facts.last_key in (1, -1)
            is_plain = has_fixed_keys and len(facts.key_specs) == 1 and "not_key" not in facts.key_specs[0]["flags"]
            if is_plain and not {"blocking", "movablekeys"} & set(facts.flags):
                found.append(PlainCommand(name, rule.is_read, facts.last_key == -1))
        return found

    def _by_keys(self, rule: CommandRule, request: Request, database: int, long_at: Collection[int]) -> Route:
        self._check_known()
        if rule.single_key_at and rule.single_key_at < len(request):
            positions: Sequence[int] = (rule.single_key_at,)
        else:
            positions = self._positions(rule, request)
        if long_at and not set(long_at).isdisjoint(positions):
            raise too_long()
        decide = self._ownership.matcher.decider(database) if database else self._ownership.decide
        others = [(at, found) for at in positions if (found := decide(request[at])).owner is not Owner.UPSTREAM]
        owned = [row for row in others if row[1].owner is Owner.STATE]
        if not others:
            route = self._to_upstream(rule, request)
            if not self._ownership.has_shadows or not rule.is_read or route.is_blocking:
                return route
            return route._replace(shadowed=_shadowed(rule, request, positions, decide))
        if long_at:
            raise too_long()
        if rule.command is not None:
            rule.command.check_arity(request)
        if rule.name == "watch" and len(owned) < len(positions):
            return self._both(rule, request, others)
        if len(owned) < len(others) and rule.is_read:
            return self._preferred(rule, request, positions, others, database)
        if not owned:
            return self._to_upstream(rule, request)
        if not rule.is_read and rule.name != "watch":
            return self._write(rule, request, positions, owned, database)
        is_served = rule.command is not None and rule.command.declaration is not None
        if len(owned) == len(positions) and is_served:
            return self._states(rule, request, owned, database)
        if rule.name in SPLIT:
            return self._both(rule, request, owned)
        if len(owned) < len(positions):
            raise PlainError(
                f"command '{rule.name}' needs its keys on one side: {self._whose(request, positions, database)}"
            )
        raise PlainError(self._whose(request, [owned[0][0]], database))

    def _preferred(
        self,
        rule: CommandRule,
        request: Request,
        positions: Sequence[int],
        others: Sequence[tuple[int, Decision]],
        database: int,
    ) -> Route:
        """Return the route of a read with keys that the states answer if they have them."""
        if "blocking" in rule.facts.flags and not _is_nonblocking_read(rule, request):
            raise PlainError(f"command '{rule.name}' cannot block: {self._whose(request, positions, database)}")
        if len(positions) == 1:
            is_served = rule.command is not None and rule.command.declaration is not None
            unserved = (
                None
                if is_served
                else PlainError(f"{self._whose(request, positions, database)}, and the states have it")
            )
            return Route(Side.PREFERRED, rule, key_at=positions[0], unserved=unserved)
        if rule.name not in SPLIT:
            raise PlainError(
                f"command '{rule.name}' needs its keys on one side: {self._whose(request, positions, database)}"
            )
        return self._both(rule, request, others)

    def _states(
        self, rule: CommandRule, request: Request, owned: Sequence[tuple[int, Decision]], database: int
    ) -> Route:
        """Return the route of a request with keys of states only."""
        names = _state_names(request, owned)
        if not names:
            return Route(Side.STATES, rule)
        if rule.name == "watch" or all(name.field is None for name in names.values()):
            return Route(Side.MAPPED, rule, request=with_names(request, names))
        if rule.name in SPLIT and len(owned) > 1:
            return self._both(rule, request, owned)
        (at, name), *others = names.items()
        read = None if others or name.field is None else field_read(rule.name, request, name.key, name.field)
        if read is None:
            raise PlainError(
                f"command '{rule.name}' is not available for fields of a state's key: "
                f"{self._whose(request, [at], database)}"
            )
        return Route(Side.MAPPED, rule, request=read.request, convert=read.convert)

    def _both(self, rule: CommandRule, request: Request, others: Sequence[tuple[int, Decision]]) -> Route:
        """Return the route of a request that is split. others: the keys that are not the upstream's."""
        owned = [at for at, found in others if found.owner is Owner.STATE]
        preferred = [at for at, found in others if found.owner is Owner.PREFER_STATE]
        names = _state_names(request, others)
        if not names:
            return Route(Side.BOTH, rule, owned, preferred=preferred)
        fields = {}
        for at, (key, field) in names.items():
            read = None if field is None or rule.name == "watch" else field_read(rule.name, request, key, field)
            if read is not None:
                fields[at] = read.request
        owned = [at for at in owned if at not in fields]
        return Route(Side.BOTH, rule, owned, preferred=preferred, request=with_names(request, names), fields=fields)

    def _to_upstream(self, rule: CommandRule, request: Request) -> Route:
        is_blocking = "blocking" in rule.facts.flags and not _is_nonblocking_read(rule, request)
        return Route(Side.UPSTREAM, rule, is_blocking=is_blocking)

    def _write(
        self,
        rule: CommandRule,
        request: Request,
        positions: Sequence[int],
        owned: Sequence[tuple[int, Decision]],
        database: int,
    ) -> Route:
        plan = write_plan(rule.name, request, owned)
        if plan.refused is not None:
            whose = self._whose(request, [plan.refused], database)
            found = dict(owned)[plan.refused].rule
            if found is not None and found.writes is Writes.DROP:
                whose += f"; the rule '{found.name}' drops plain SET, SETEX, PSETEX and MSET only"
            raise PlainError(whose)
        if not plan.dropped:
            return self._to_upstream(rule, request)
        if len(plan.dropped) == len(positions):
            return Route(Side.DROPPED, rule)
        return Route(Side.UPSTREAM, rule, request=without_pairs(request, plan.dropped))

    def _whose(self, request: Request, positions: Sequence[int], database: int) -> str:
        named = [request[at] for at in positions[:NAMED_KEYS_MAX]]
        return ", ".join(f"key '{client_text(key)}' is {self._ownership.whose(key, database)}" for key in named)

    def _check_known(self) -> None:
        if not self._ownership.is_known:
            raise LoadingError("the key formats of the states are not known yet; retry in a moment")

    def _positions(self, rule: CommandRule, request: Request) -> Sequence[int]:
        if rule.command is None and not tells_all_keys(rule.facts):
            raise PlainError(f"the upstream does not say where the keys of '{rule.name}' are, so it is not passed on")
        found = key_positions(rule.facts, request) or ()
        return sorted({at for at, flags in found if "not_key" not in flags})

    def _rule(self, request: Request) -> CommandRule | None:
        name = request[0]
        try:
            rule = self._rules[name]
        except KeyError:
            rule = self._learn(name, lambda: self._find(name.lower().decode("utf-8", "replace")))
        if rule is None or not rule.facts.subcommands or len(request) < 2:
            return rule
        full_name = name + b"|" + request[1]
        if full_name not in self._rules:
            text = full_name.lower().decode("utf-8", "replace")
            return self._learn(full_name, lambda: self._find(text) or rule)
        return self._rules[full_name]

    def _learn(self, spelling: bytes, find: Callable[[], CommandRule | None]) -> CommandRule | None:
        rule = find()
        if len(self._rules) < SPELLINGS_MAX:
            self._rules[spelling] = rule
        return rule

    def _find(self, name: str) -> CommandRule | None:
        command = self._table.get(name.encode())
        facts = self._facts(name, command)
        if facts is None:
            return None
        container = name.partition("|")[0]
        side = Side.UPSTREAM
        if (name in DENIED or container in DENIED) and name not in READS_OF_DENIED:
            side = Side.DENIED
        elif _subscribes(facts, is_ours=command is not None):
            side = Side.NOT_YET
        elif name in LOCAL or container in LOCAL:
            side = Side.LOCAL
        elif name in ALL_KEYS:
            side = Side.ALL_KEYS
        elif name == "select":
            side = Side.SELECT
        elif name == "info":
            side = Side.BY_SECTIONS
        elif facts.key_specs:
            side = Side.BY_KEYS
        flags = facts.key_specs[0]["flags"] if len(facts.key_specs) == 1 else ("not_key",)
        is_fixed = "not_key" not in flags and "|" not in name and "movablekeys" not in facts.flags
        is_single = is_fixed and 0 < facts.first_key == facts.last_key
        is_read = "readonly" in facts.flags
        return CommandRule(name, side, facts, command, is_read, facts.first_key if is_single else 0)

    def _facts(self, name: str, command: Command | None) -> Facts | None:
        container, _, sub = name.partition("|")
        theirs = self._upstream_facts.get(container)
        if theirs is not None and sub:
            theirs = theirs.subcommands.get(sub)
        # The keys of SORT and MIGRATE are found by the code that knows these two commands.
        if theirs is not None and (command is None or tells_all_keys(theirs)):
            return theirs
        return command.facts if command is not None else None


def _shadowed(
    rule: CommandRule, request: Request, positions: Sequence[int], decide: Callable[[bytes], Decision]
) -> Sequence[Shadowed]:
    """Return the keys of a read to compare: the only one, or those of MGET."""
    is_served = rule.command is not None and rule.command.declaration is not None
    if not is_served or (len(positions) > 1 and rule.name != "mget") or not is_comparable(rule.name, rule.facts):
        return ()
    found = []
    for number, at in enumerate(positions):
        decided = decide(request[at]).rule
        if decided is None or decided.owner is not Owner.SHADOW:
            continue
        key, is_mget = request[at], rule.name == "mget"
        name = "get" if is_mget else rule.name
        alone: Request = (b"GET", key) if is_mget else request
        state_name = StateName(key, None) if decided.mapping is None else decided.mapping.state_name_of(key)
        if state_name.field is None:
            read: FieldRead | None = FieldRead(with_names(alone, {1 if is_mget else at: state_name}))
        else:
            read = field_read(name, alone, state_name.key, state_name.field)
        if read is not None:
            found.append(Shadowed(decided, number, key, name, alone, state_name.key, read.request, read.convert))
    return found


def _state_names(request: Request, others: Sequence[tuple[int, Decision]]) -> Mapping[int, StateName]:
    """Return the states' names of the keys that clients know by another name, by position."""
    found = {}
    for at, decision in others:
        if decision.rule is not None and decision.rule.mapping is not None:
            found[at] = decision.rule.mapping.state_name_of(request[at])
    return found


def not_yet(name: str) -> PlainError:
    """Return the error for a request that needs more than shared connections."""
    return PlainError(f"command '{name}' is not available through --upstream yet")


def _subscribes(facts: Facts, *, is_ours: bool) -> bool:
    """Tell whether a command without keys could change a connection into a subscriber's, by its flags.

    is_ours: the command is Redis' own, so `LOCAL` names it if it subscribes.
    """
    return not facts.key_specs and "pubsub" in facts.flags and not is_ours


def _is_nonblocking_read(rule: CommandRule, request: Request) -> bool:
    """Tell whether a request of a stream's readers, which may block, does not."""
    if rule.name not in ("xread", "xreadgroup"):
        return False
    at = 1
    while at < len(request):
        word = request[at].upper()
        if word == b"BLOCK":
            return False
        if word not in STREAM_OPTIONS:
            break  # STREAMS, or a syntax error
        at += STREAM_OPTIONS[word]
    return True
