"""MOVE, COPY with DB, and SWAPDB: the key that a request writes in another database. Pure."""

from __future__ import annotations

from typing import NamedTuple

from resp_server.command.policies import policy_of
from resp_server.command.policy import SpecialCommand
from resp_server.protocol.request_parser import Request

COPY_DESTINATION = 2


class OtherKey(NamedTuple):
    """A key that a request writes in another database."""

    at: int
    number: int


def other_key(name: str, request: Request) -> OtherKey | None:
    """Return the key that a MOVE or COPY writes in the database that it names; None if it names none."""
    if policy_of(name).special is SpecialCommand.MOVE:
        return OtherKey(1, int(request[2])) if len(request) == 3 and is_number(request[2]) else None
    options = [option.upper() for option in request[COPY_DESTINATION + 1 : -1]]
    if b"DB" not in options:
        return None
    number = request[COPY_DESTINATION + 1 + options.index(b"DB") + 1]
    return OtherKey(COPY_DESTINATION, int(number)) if is_number(number) else None


def is_number(argument: bytes) -> bool:
    """Return whether an argument may be the number of a database."""
    return argument.isdigit() and len(argument) <= 10
