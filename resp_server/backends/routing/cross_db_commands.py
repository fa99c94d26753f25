"""MOVE, COPY with DB, and SWAPDB: the key that a request writes in another database. Pure."""

from __future__ import annotations

from typing import NamedTuple

from resp_server.command.ours import policy_of
from resp_server.command.policy import Role
from resp_server.protocol.request_parser import Request

COPY_DESTINATION = 2


class OtherKey(NamedTuple):
    """A key that a request writes in another database.

    Args:
        at: The key's position.
        number: The database's number.
    """

    at: int
    number: int


def other_key(name: str, request: Request) -> OtherKey | None:
    """Return the key that a MOVE or COPY writes in the database that it names; None if it names none."""
    if policy_of(name).role is Role.MOVE:
        return OtherKey(1, int(request[2])) if len(request) == 3 and is_number(request[2]) else None
    words = [word.upper() for word in request[COPY_DESTINATION + 1 : -1]]
    if b"DB" not in words:
        return None
    number = request[COPY_DESTINATION + 1 + words.index(b"DB") + 1]
    return OtherKey(COPY_DESTINATION, int(number)) if is_number(number) else None


def is_number(word: bytes) -> bool:
    """Return whether a word may be the number of a database."""
    return word.isdigit() and len(word) <= 10
