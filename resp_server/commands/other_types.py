"""Reads of Redis types that no state kind maps to: a missing key replies as in Redis, any other key is a WRONGTYPE.

Only commands whose reply for a missing key is fixed are here.
"""

from __future__ import annotations

from resp_server.command.handler import command
from resp_server.pipeline.context import ReadContext
from resp_server.protocol.errors import WrongTypeError


@command("xlen")
def xlen(context: ReadContext, key: bytes) -> int:
    """Return the number of messages in a stream."""
    if context.key_info(key) is not None:
        raise WrongTypeError
    return 0
