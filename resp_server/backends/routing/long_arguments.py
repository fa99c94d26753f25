"""Limits the arguments of a request. Values for the upstream may be as long as Redis allows, all others 1 MB.

Keys, channels, patterns, command names and all arguments for states are compared, hashed or matched here. That takes
much longer than forwarding a value. A long value is forwarded as the pieces in which it arrived (`LongArgument`).
"""

from __future__ import annotations

from collections.abc import Collection

from resp_server.protocol.errors import GenericError
from resp_server.protocol.request_parser import FIRST_ARGUMENTS, LONG_ARGUMENT_BYTES, LongRequest, Request

# Standard: the default of Redis' `proto-max-bulk-len`.
VALUE_BYTES_MAX = 512 << 20
# A first argument longer than `LONG_ARGUMENT_BYTES` gets an error. One longer than this ends the connection.
FIRST_ARGUMENT_BYTES_MAX = 8 << 20
# Replaces a long argument while a request is parsed: it is no valid number or option.
STAND_IN = b"(a long word)"


def long_arguments(request: Request) -> Collection[int]:
    """Return the positions of arguments that only the upstream may get; GenericError if a first one is long."""
    if type(request) is not LongRequest or request.size_bytes <= LONG_ARGUMENT_BYTES:
        return ()
    if any(len(argument) > LONG_ARGUMENT_BYTES for argument in request[:FIRST_ARGUMENTS]):
        raise too_long()
    return request.long_at


def without_long_arguments(request: Request, long_at: Collection[int]) -> Request:
    """Return a request for parsing: each `LongArgument` is replaced by `STAND_IN`."""
    return [STAND_IN if index in long_at else argument for index, argument in enumerate(request)]


def too_long() -> GenericError:
    """Return the error for a long argument that is no value for the upstream."""
    return GenericError(f"only a value for the upstream may have more than {LONG_ARGUMENT_BYTES >> 20} MB")
