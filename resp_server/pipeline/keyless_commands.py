"""The commands whose functions the compiled core calls itself, so that their requests need no pipeline.

They are Redis' commands about the connection or the server: they have no key, and are not about transactions. In a
cluster, shard channels have slots, so their commands are not called there. The core finds the command by its name as
typed, and checks the number of words and the user's rights. It calls the function, encodes the reply, and counts the
call. Malformed and denied requests are left to the pipeline. So are all requests of a client for which the pipeline has
more to do (`Session.can_call`). Each function is called after all effects of the requests before it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from resp_server import native
from resp_server.command.policy import SpecialCommand
from resp_server.command.spellings import BySpelling
from resp_server.command.table import Command
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.effects import record
from resp_server.pipeline.error_replies import error_reply
from resp_server.protocol.request_parser import Request
from resp_server.session.session import Session


class LocalRequests(NamedTuple):
    """Which requests of a command this process answers alone.

    Args:
        is_local: Returns whether it answers a request of a session, whose user is unrestricted.
        is_connected: Returns whether a client has dedicated connections or a login of its own. Each request of
            a client that has none is answered here. None: `is_local` is asked for each.
    """

    is_local: Callable[[Session, Request], bool]
    is_connected: Callable[[Session], bool] | None = None


def has_slot(command: Command) -> bool:
    """Return whether a command is about shard channels."""
    specs = command.facts.key_specs
    return bool(specs) and all("not_key" in spec["flags"] for spec in specs)


def needs_no_pipeline(command: Command) -> bool:
    """Return whether a command is about the connection or the server."""
    facts, handler = command.facts, command.handler
    is_of_redis = handler is not None and handler.ours is None  # proxies send ours over connections that they share
    is_of_transaction = facts.group == "transactions" and command.policy.special is not SpecialCommand.UNWATCH
    return is_of_redis and (not facts.key_specs or has_slot(command)) and not is_of_transaction


class KeylessCommands(BySpelling[Any]):
    """The commands that need no pipeline, by their name as typed; None for all others.

    A container maps to a table of its subcommands, whose key None has the container itself.
    """

    def __init__(self, commands: Mapping[bytes, Command], command_of: Callable[[Command], Any]) -> None:
        super().__init__(self._find_typed)
        self._commands, self._command_of = commands, command_of
        self._found: dict[bytes, Any] = {}

    def _find_typed(self, typed: bytes) -> Any:
        name = typed.lower()
        if name not in self._found and name in self._commands:
            self._found[name] = self._find_keyless(self._commands[name])
        return self._found.get(name)

    def _find_keyless(self, command: Command) -> Any:
        of_container = self._command_of(command)
        if not command.subcommands:
            return of_container
        found = KeylessCommands(command.subcommands, self._command_of)
        found[None] = of_container
        return found


class CommandCaller:
    """What the core needs to call commands for the clients of a server.

    Args:
        may_call: Whether the process itself answers a command, with nothing to do beside its function; or for which
            requests it does so.
    """

    def __init__(
        self, server: ServerContext, may_call: Callable[[Command], bool | LocalRequests] = needs_no_pipeline
    ) -> None:
        self._server, self._may_call = server, may_call
        self.commands = KeylessCommands({each.name.encode(): each for each in server.table}, self._command_of)
        self.record = record
        # Encodes and counts an error.
        self.error_reply = partial(error_reply, server)

    def _command_of(self, command: Command) -> Any:
        may_call = command.handler is not None and self._may_call(command)
        if command.handler is None or not may_call:
            return None
        assert native.keyless_commands is not None
        arity, parameters = command.facts.arity, command.handler.parameters
        takes_all = not (parameters.has_name or parameters.is_batch)
        converters = None if parameters.needs_no_conversion else tuple(each.convert for each in parameters.each)
        takes_words = takes_all and (converters is None or parameters.count_max is not None)
        most = sys.maxsize if parameters.count_max is None or not takes_words else command.words + parameters.count_max
        return native.keyless_commands.KeylessCommand(
            command,
            self._server.stats.command_stats(command.name),
            command.words,
            abs(arity),
            arity if arity > 0 else most,
            takes_words,
            converters,
            command.policy.keeps_caching,
            command.policy.channels is not None,
            has_slot(command),
            *(may_call if isinstance(may_call, LocalRequests) else (None, None)),
        )

    def begin(self, session: Session) -> CommandContext | None:
        """Return the context for a client's commands; None: they may have to wait until a job is opened."""
        if self._server.loading_waits.may_occur:
            return None
        session.active_ms = self._server.view.now_ms
        return CommandContext(session, self._server)
