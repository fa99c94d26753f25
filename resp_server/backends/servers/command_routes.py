"""What a proxy knows of a command's name as typed, so that most requests need one look-up."""

from __future__ import annotations

from typing import NamedTuple

from resp_server.command.ours import MOST_USED
from resp_server.command.policy import Destination, Role
from resp_server.command.table import Command, CommandTable
from resp_server.metrics.stats import CommandStats, Stats
from resp_server.pipeline.immediate import SPELLINGS_MAX
from resp_server.protocol.request_parser import CHUNK_ARGUMENTS

# The forwarder leaves commands with longer names to the general path.
FORWARDED_NAME_BYTES_MAX = 16


class CommandRoute(NamedTuple):
    """How to route a command name as typed.

    Args:
        single_key_at: The index of the only key; 0: there may be others.
    """

    command: Command
    single_key_at: int
    command_stats: CommandStats


class CommandRoutes:
    """The routes of all commands."""

    def __init__(self, table: CommandTable, stats: Stats) -> None:
        self._table, self._stats = table, stats
        self._routes: dict[bytes, CommandRoute | None] = {}

    def of(self, name: bytes) -> CommandRoute | None:
        """Return the route of a command's name as typed; None: there is no such command."""
        return self._routes[name] if name in self._routes else self._learn(name)

    def _learn(self, name: bytes) -> CommandRoute | None:
        command = self._table.get(name) if b"|" not in name else None
        route = None
        if command is not None:
            single_key_at = command.single_key_at if command.destination is Destination.STATES else 0
            route = CommandRoute(command, single_key_at, self._stats.command_stats(command.name))
        if len(self._routes) < SPELLINGS_MAX:
            self._routes[name] = route
        return route

    def forwarded(self) -> list[tuple[str, int, int, CommandStats]]:
        """Return the commands that the forwarder forwards: GET, MGET, and those whose only key is the first word."""
        found = []
        for name in dict.fromkeys([*MOST_USED, *(each.name for each in self._table)]):
            route = self.of(name.encode())
            if route is None or len(name) > FORWARDED_NAME_BYTES_MAX:
                continue
            is_mget = route.command.policy.role is Role.MGET
            if route.single_key_at != 1 and not is_mget:
                continue
            arity = route.command.facts.arity
            least = 3 if is_mget else abs(arity)  # an MGET of one key is forwarded as it is
            found.append((name, least, arity if arity > 0 else CHUNK_ARGUMENTS, route.command_stats))
        return found
