"""Decides whether a write with keys of states is refused, dropped, or passed to the upstream, by the keys' rules. Pure.

All keys of a request are checked before anything is decided: one key whose writes are refused refuses the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from resp_server.backends.routing.key_matcher import Decision
from resp_server.backends.routing.rules import Writes
from resp_server.command.policies import policy_of
from resp_server.command.policy import ValueSet
from resp_server.protocol.request_parser import Request

# The options of a plain SET, which replies OK whatever the key holds, and the size of each with its value.
PLAIN_OPTIONS = {b"EX": 2, b"PX": 2, b"EXAT": 2, b"PXAT": 2, b"KEEPTTL": 1}
# The size of a SETEX, and the position of its key's time to live.
SETEX_SIZE, TTL_AT = 4, 2


class WritePlan(NamedTuple):
    """The effect of a write.

    Args:
        refused: The position of a key that refuses it.
        dropped: The positions of dropped keys.
    """

    refused: int | None
    dropped: Sequence[int]


def write_plan(name: str, request: Request, owned: Sequence[tuple[int, Decision]]) -> WritePlan:
    """Return the effect of a write.

    Args:
        owned: The positions of the states' keys, with their decisions.
    """
    is_plain = is_plain_set(name, request)
    dropped = []
    for at, decision in owned:
        writes = Writes.REFUSE if decision.rule is None else decision.rule.writes
        if writes is Writes.REFUSE or (writes is Writes.DROP and not is_plain):
            return WritePlan(at, ())
        if writes is Writes.DROP:
            dropped.append(at)
    return WritePlan(None, dropped)


def without_pairs(request: Request, dropped: Sequence[int]) -> Request:
    """Return an MSET without some keys and their values."""
    left_out = {position for at in dropped for position in (at, at + 1)}
    return [argument for at, argument in enumerate(request) if at not in left_out]


def is_plain_set(name: str, request: Request) -> bool:
    """Return whether a request is a well-formed SET, SETEX, PSETEX or MSET that replies OK, whatever its keys hold."""
    value_set = policy_of(name).value_set
    if value_set is ValueSet.MANY:
        return len(request) > 1 and len(request) % 2 == 1
    if value_set is ValueSet.WITH_TTL:
        return len(request) == SETEX_SIZE and _is_time(request[TTL_AT])
    if value_set is None:
        return False
    at, is_expiring = 3, False
    while at < len(request):
        size = PLAIN_OPTIONS.get(request[at].upper(), 0)
        if not size or is_expiring or at + size > len(request) or (size == 2 and not _is_time(request[at + 1])):
            return False
        at, is_expiring = at + size, True
    return len(request) >= 3


def _is_time(argument: bytes) -> bool:
    """Return whether an argument is a time that Redis takes: a number above 0, in milliseconds below 2^63."""
    return argument.isdigit() and len(argument) <= 15 and argument[:1] != b"0"
