"""Reads of Redis types that no state is: a key that is missing reads as in Redis, any other is of the wrong kind.

Only those are here whose answer for a missing key follows from the command alone.
"""

from __future__ import annotations

from resp_server.command_table.declaration import command
from resp_server.execution.context import CommandContext
from resp_server.protocol.errors import WrongTypeError


@command("xlen")
def xlen(context: CommandContext, key: bytes) -> int:
    """Return the number of messages in a stream."""
    if context.entry(key) is not None:
        raise WrongTypeError
    return 0
