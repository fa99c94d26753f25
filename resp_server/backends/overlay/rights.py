"""The rights of a proxy's users to requests that may be the upstream's."""

from __future__ import annotations

from resp_server.command.routed_commands import RoutedCommand
from resp_server.pipeline.admission import check_user
from resp_server.pipeline.context import CommandContext
from resp_server.protocol.errors import NoPermError
from resp_server.protocol.request_parser import Request


def check_rights(context: CommandContext, routed: RoutedCommand, request: Request) -> None:
    """Raise NoPermError if the user may not run a request. Commands of modules are for unrestricted users."""
    if context.session.user.is_unrestricted:
        return
    if routed.command is None:
        name = context.session.user.name.decode("utf-8", "surrogateescape")
        raise NoPermError(f"User {name} has no permissions to run the '{routed.name}' command")
    check_user(context, routed.command, request)
