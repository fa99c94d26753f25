"""What a proxy knows of a command's name as typed, so that most requests need one look-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from resp_server.command.keys import KeyRange, key_ranges
from resp_server.command.policies import MOST_USED
from resp_server.command.policy import FORWARDED_TO_STATES, TRANSACTION_COMMANDS, AnsweredBy, ReplyMerge, SpecialCommand
from resp_server.command.spellings import BySpelling
from resp_server.command.table import Command, CommandTable
from resp_server.metrics.stats import CommandStats, Stats
from resp_server.protocol.request_parser import CHUNK_ARGUMENTS

# The forwarder leaves commands with longer names to the general path.
FORWARDED_NAME_BYTES_MAX = 24


class CommandRoute(NamedTuple):
    """How to route a command name as typed.

    Args:
        single_key_at: The index of the only key; 0: there may be others.
    """

    command: Command
    single_key_at: int
    command_stats: CommandStats


class StateForwardSpec(NamedTuple):
    """A command that the compiled forwarder forwards to state servers.

    Args:
        least, most: The least and the most words of its requests.
        keys: The keys of its requests.
        merge: How the replies for single keys are merged; None: the keys have to be in one slot.
        special: MULTI and EXEC, which are forwarded with the commands between them.
    """

    name: str
    least: int
    most: int
    keys: Sequence[KeyRange]
    merge: ReplyMerge | None
    special: SpecialCommand | None
    command_stats: CommandStats


ALL_ARGUMENTS = [KeyRange(1, -1)]


class CommandRoutes:
    """The routes of all commands."""

    def __init__(self, table: CommandTable, stats: Stats) -> None:
        self._table, self._stats = table, stats
        self._routes = BySpelling(self._find)

    def of(self, name: bytes) -> CommandRoute | None:
        """Return the route of a command's name as typed; None: there is no such command."""
        return self._routes[name]

    def _find(self, name: bytes) -> CommandRoute | None:
        command = self._table.get(name) if b"|" not in name else None
        if command is None:
            return None
        single_key_at = command.single_key_at if command.answered_without_upstream is AnsweredBy.STATES else 0
        return CommandRoute(command, single_key_at, self._stats.command_stats(command.name))

    def state_forward_specs(self) -> list[StateForwardSpec]:
        """Return the commands that the forwarder forwards, by their rows."""
        found = []
        for name in dict.fromkeys([*MOST_USED, *(each.name for each in self._table.with_subcommands())]):
            command = self._table.get(name.encode())
            if command is None or len(name) > FORWARDED_NAME_BYTES_MAX or name.startswith("state|"):
                continue
            policy = command.policy
            keys = key_ranges(command.facts) if command.answered_without_upstream is AnsweredBy.STATES else None
            if policy.special not in FORWARDED_TO_STATES or not (keys or policy.special in TRANSACTION_COMMANDS):
                continue
            arity = command.facts.arity
            most = arity if arity > 0 else CHUNK_ARGUMENTS
            is_split = policy.split is not None and policy.is_split_by_slot and keys == ALL_ARGUMENTS
            merge = policy.split.merge if policy.split is not None and is_split else None
            command_stats = self._stats.command_stats(name)
            found.append(StateForwardSpec(name, abs(arity), most, keys or (), merge, policy.special, command_stats))
        return found
