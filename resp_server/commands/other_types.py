"""Reads of Redis types that no state is yet: a key that is missing reads as in Redis, any other is of the wrong kind.

Only those are here whose answer for a missing key follows from the command alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resp_server.commands.generic import cursor
from resp_server.commands.spec import INTEGER_MAX, Declaration, Parameter, Parameters, command, integer
from resp_server.errors import PlainError, WrongTypeError, syntax_error
from resp_server.instance import Call
from resp_server.protocol.replies import Reply, ReplySet

TEXT, NUMBER, CURSOR = Parameter(), Parameter(integer), Parameter(cursor)
REST, TEXTS = Parameter(is_required=False, is_repeated=True), Parameter(is_repeated=True)


def _of_missing(reply: Reply) -> Callable[[Sequence[bytes]], Reply]:
    return lambda words: reply


def _for_each(reply: Reply) -> Callable[[Sequence[bytes]], Reply]:
    return lambda words: [reply for _ in words]


def _read(name: str, missing: Reply | Callable[[Sequence[bytes]], Reply], *parameters: Parameter) -> Declaration:
    """Declare `name key <parameters>`; `missing` may be made from the arguments behind the key."""
    answer = missing if callable(missing) else _of_missing(missing)

    def body(call: Call, key: bytes, *words: bytes) -> Reply:
        if call.entry(key) is not None:
            raise WrongTypeError
        return answer(words)

    return Declaration(name, body, Parameters([TEXT, *parameters]))


def _read_all(name: str) -> Declaration:
    """Declare `name key [key ...]` over sets."""

    def body(call: Call, *keys: bytes) -> Reply:
        if any(call.entry(key) is not None for key in keys):
            raise WrongTypeError
        return ReplySet()

    return Declaration(name, body, Parameters([TEXTS]))


@command("srandmember")
def srandmember(call: Call, key: bytes, *count: bytes) -> Reply:
    """Get one or multiple random members from a set"""
    if len(count) > 1:
        raise syntax_error()
    if count and integer(count[0]) < -INTEGER_MAX:  # it could not be made positive
        raise PlainError(f"value is out of range, value must between {-INTEGER_MAX} and {INTEGER_MAX}")
    if call.entry(key) is not None:
        raise WrongTypeError
    return [] if count else None


NO_STEP = [b"0", []]

READS = [
    _read("scard", 0),
    _read("smembers", ReplySet()),
    _read("sismember", 0, TEXT),
    _read("smismember", _for_each(0), TEXTS),
    _read("sscan", NO_STEP, CURSOR, REST),
    _read_all("sinter"),
    _read_all("sunion"),
    _read_all("sdiff"),
    _read("zcard", 0),
    _read("zscore", None, TEXT),
    _read("zmscore", _for_each(None), TEXTS),
    _read("zscan", NO_STEP, CURSOR, REST),
    _read("xlen", 0),
]
