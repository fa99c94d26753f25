"""How each command is routed at a proxy with an upstream, and the positions of the command's keys. Pure.

What a row of `policies` says answers the command. If it says nothing, a command with keys goes to the owners of its
keys, and one without keys to the upstream. The facts of a command are those in the upstream's reply to COMMAND, if the
reply has it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from resp_server.command.command_facts import tells_all_keys
from resp_server.command.keys import KeyRange, key_ranges, single_key_position
from resp_server.command.policies import MOST_USED, NO_POLICY, policy_of
from resp_server.command.policy import FORWARDED_TO_UPSTREAM, AnsweredBy, Policy, SpecialCommand, UpstreamDenial
from resp_server.command.spec import CommandSpec
from resp_server.command.spellings import BySpelling
from resp_server.command.table import Command, CommandTable
from resp_server.protocol.errors import GenericError, unknown_command, unknown_subcommand, wrong_arity
from resp_server.protocol.request_parser import Request


class Routing(Enum):
    """What decides where the requests of a command go, at a proxy with an upstream."""

    BY_ROW = auto()  # the command's row of `policies`
    BY_KEYS = auto()  # the owners of the request's keys
    UPSTREAM = auto()  # nothing more: they go to the upstream
    DENIED = auto()  # nothing more: this process refuses them


class OverlayCommand(NamedTuple):
    """How one command is routed.

    Args:
        command: The row of the command table; None: the table lacks it.
        single_key_at: The position of the only key; 0: the command has no key, or may have several.
        needs_getkeys: Only the upstream knows the keys of a request.
        is_subscription: The upstream may send frames without a request from then on.
    """

    name: str
    routing: Routing
    facts: CommandSpec
    command: Command | None = None
    is_read: bool = False
    single_key_at: int = 0
    needs_getkeys: bool = False
    is_subscription: bool = False
    policy: Policy = NO_POLICY

    @property
    def answered_by_row(self) -> AnsweredBy | None:
        """What answers the command, if its row says so."""
        return self.policy.answered_by if self.routing is Routing.BY_ROW else None

    @property
    def is_served(self) -> bool:
        """Whether states answer the command."""
        return self.command is not None and self.command.handler is not None

    @property
    def is_split(self) -> bool:
        """Whether a read is split over the states and the upstream. Writes never are."""
        return self.is_read and self.policy.is_split_by_slot


class UpstreamForwardSpec(NamedTuple):
    """A command whose requests may go to the upstream unchanged, over a shared connection.

    Args:
        publishes: Its requests may send messages.
        keys: The keys of its requests, whose owners decide about them; empty: the upstream answers it.
        special: WATCH, which needs a connection of the client's own.
        is_container: Only a request without a subcommand is one of this command.
        queued_arity: The arity of requests that the upstream queues after MULTI; 0: it queues none.
    """

    name: str
    is_read: bool
    publishes: bool
    keys: Sequence[KeyRange]
    special: SpecialCommand | None
    is_container: bool
    queued_arity: int


class OverlayCommands:
    """How all commands are routed, by the name as typed.

    Args:
        allowed: Denied commands that go to the upstream.
        answered_here: Other denied commands, which the proxy answers.
    """

    def __init__(self, table: CommandTable, allowed: Collection[str] = (), answered_here: Collection[str] = ()) -> None:
        self._table, self._allowed, self._answered_here = table, allowed, answered_here
        self._upstream_facts: Mapping[str, CommandSpec] = {}
        self._routed = BySpelling(lambda typed: self._find(typed.lower().decode("utf-8", "replace")))

    def take_facts(self, facts: Mapping[str, CommandSpec]) -> None:
        """Take the facts of the upstream's commands."""
        self._upstream_facts = facts
        self._routed.clear()

    def of(self, request: Request) -> OverlayCommand | None:
        """Return how a request's command is routed; None for an unknown command."""
        name = request[0]
        routed = self._routed[name]
        if routed is None or not routed.facts.subcommands or len(request) < 2:
            return routed
        return self._routed[name + b"|" + request[1]] or routed

    def check_form(self, routed: OverlayCommand, request: Request) -> None:
        """Raise the error with which the upstream would refuse to queue a request after MULTI."""
        name, _, sub = routed.name.partition("|")
        if self._upstream_facts and name not in self._upstream_facts:
            raise unknown_command(request)
        subcommands = self._upstream_facts[name].subcommands if self._upstream_facts else routed.facts.subcommands
        if subcommands and len(request) > 1 and sub not in subcommands:
            raise unknown_subcommand(name, request[1])
        if not routed.facts.has_arity_of(request):
            raise wrong_arity(routed.name)
        if "no_multi" in routed.facts.flags:
            raise GenericError("Command not allowed inside a transaction")

    def upstream_forward_specs(self) -> Sequence[UpstreamForwardSpec]:
        """Return the commands that may be forwarded, by their rows, the most used ones first."""
        found = []
        theirs = [f"{name}|{sub}" for name, facts in self._upstream_facts.items() for sub in facts.subcommands]
        names = [*MOST_USED, *self._upstream_facts, *(each.name for each in self._table.with_subcommands()), *theirs]
        for name in dict.fromkeys(names):
            routed = self._find(name)
            keys = None if routed is None else _forwarded_keys(routed)
            if routed is not None and keys is not None:
                facts, policy = routed.facts, routed.policy
                arity = facts.arity if "no_multi" not in facts.flags and self._is_known(name) else 0
                row = (name, routed.is_read, policy.publishes, keys, policy.special, bool(facts.subcommands), arity)
                found.append(UpstreamForwardSpec(*row))
        return found

    def _is_known(self, name: str) -> bool:
        """Return whether the upstream has a command, as far as its commands are known."""
        container, _, sub = name.partition("|")
        theirs = self._upstream_facts.get(container)
        if theirs is None:
            return not self._upstream_facts
        return not sub or sub in theirs.subcommands

    def _find(self, name: str) -> OverlayCommand | None:
        command = self._table.get(name.encode())
        facts = self._facts(name, command)
        if facts is None:
            return None
        container = name.partition("|")[0]
        routing = Routing.UPSTREAM
        needs_getkeys = command is None and ("movablekeys" in facts.flags or not tells_all_keys(facts))
        policy = policy_of(name)
        is_denied = policy.denial is not UpstreamDenial.NO
        is_allowed = is_denied and (name in self._allowed or container in self._allowed)
        if is_denied and not is_allowed and name not in self._answered_here:
            routing = Routing.DENIED
        elif policy.answered_by is not None and not is_allowed:
            routing = Routing.BY_ROW
        elif needs_getkeys or any("not_key" not in spec["flags"] for spec in facts.key_specs):
            routing = Routing.BY_KEYS
        is_read = "readonly" in facts.flags
        is_subscription = routing is Routing.UPSTREAM and _subscribes(facts, is_ours=command is not None)
        single_key_at = 0 if needs_getkeys else single_key_position(name, facts)
        return OverlayCommand(
            name, routing, facts, command, is_read, single_key_at, needs_getkeys, is_subscription, policy
        )

    def _facts(self, name: str, command: Command | None) -> CommandSpec | None:
        container, _, sub = name.partition("|")
        theirs = self._upstream_facts.get(container)
        if theirs is not None and sub:
            theirs = theirs.subcommands.get(sub)
        # The keys of SORT and MIGRATE are found by the code that knows these two commands.
        if theirs is not None and (command is None or tells_all_keys(theirs)):
            return theirs
        return command.facts if command is not None else None


def _forwarded_keys(routed: OverlayCommand) -> Sequence[KeyRange] | None:
    """Return the keys of a command that may be forwarded; None: its requests need the general path."""
    facts, policy = routed.facts, routed.policy
    if routed.answered_by_row is AnsweredBy.ALL_KEYS:
        return ()
    needs_dedicated = (
        "blocking" in facts.flags or policy.waits_for_writes or policy.kills_a_script or routed.is_subscription
    )
    if (
        needs_dedicated
        or policy.changes_replication
        or policy.writes_other_database
        or policy.special not in FORWARDED_TO_UPSTREAM
    ):
        return None
    if routed.needs_getkeys:
        return None
    if routed.routing is Routing.UPSTREAM:
        return ()
    return (key_ranges(facts) or None) if routed.routing is Routing.BY_KEYS else None


def _subscribes(facts: CommandSpec, *, is_ours: bool) -> bool:
    """Tell by its flags whether a command without keys may subscribe the connection.

    Args:
        is_ours: The command table has it. Such a command never does: the proxy itself answers all that subscribe.
    """
    return not facts.key_specs and "pubsub" in facts.flags and not is_ours
