"""FUNCTION LIST, which some clients send. The list is always empty, because no library can be loaded."""

from __future__ import annotations

from resp_server.command.handler import command
from resp_server.pipeline.context import CommandContext
from resp_server.protocol.errors import GenericError, client_text
from resp_server.protocol.replies import Reply


@command("function|list")
def function_list(context: CommandContext, *options: bytes) -> Reply:
    """Returns information about all libraries."""
    arguments, seen = iter(options), set[bytes]()
    for argument in arguments:
        option = argument.upper()
        if option not in (b"WITHCODE", b"LIBRARYNAME") or option in seen:
            raise GenericError(f"Unknown argument {client_text(argument)}")
        seen.add(option)
        if option == b"LIBRARYNAME" and next(arguments, None) is None:
            raise GenericError("library name argument was not given")
    return []
