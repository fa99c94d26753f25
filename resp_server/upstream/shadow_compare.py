"""Compares the upstream's reply about a key with the state's. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

import hiredis

from resp_server.command_table.facts import Facts

# Replies about a key that does not exist. `:0` is that of EXISTS, STRLEN, LLEN and the like.
ABSENT = (b"$-1\r\n", b"_\r\n", b"*-1\r\n", b"*0\r\n", b"%0\r\n", b"~0\r\n", b":0\r\n", b"+none\r\n")
# Their replies differ although the values are equal: times, places in memory, random choices, cursors.
NEVER_COMPARED = frozenset(
    [
        *("ttl", "pttl", "expiretime", "pexpiretime", "httl", "hpttl", "hexpiretime", "hpexpiretime", "touch"),
        *("object", "memory", "dump", "hrandfield", "srandmember", "zrandmember", "hscan", "sscan", "zscan", "xread"),
    ]
)
# In RESP2, fields and values alternate.
PAIRS = frozenset(["hgetall"])
UNORDERED = frozenset(["hkeys", "hvals", "smembers"])
# Python reads these in numbers, other programs do not.
NOT_IN_NUMBERS = re.compile(rb"[_\s]")


class Outcome(Enum):
    """What a comparison found."""

    EQUAL = "equal"
    DIFFERENT = "different"
    MISSING_IN_UPSTREAM = "missing_in_upstream"
    MISSING_IN_STATE = "missing_in_state"


def is_comparable(name: str, facts: Facts) -> bool:
    """Tell whether the replies to a read of one key can be compared."""
    return name.partition("|")[0] not in NEVER_COMPARED and "blocking" not in facts.flags


def outcome_of(name: str, upstream: bytes, state: bytes, tolerance: float | None = None) -> Outcome:
    """Compare the replies to a read of one key. tolerance: by how much numbers may differ, relative or absolute."""
    if upstream == state:
        return Outcome.EQUAL
    if upstream in ABSENT or state in ABSENT:
        if upstream in ABSENT and state in ABSENT:
            return Outcome.EQUAL
        return Outcome.MISSING_IN_UPSTREAM if upstream in ABSENT else Outcome.MISSING_IN_STATE
    are_equal = _are_equal(value_in(name, upstream), value_in(name, state), tolerance)
    return Outcome.EQUAL if are_equal else Outcome.DIFFERENT


def value_in(name: str, reply: bytes) -> Any:
    """Return the value in a reply: a hash as a mapping, an unordered array as a sorted list; else the reply itself."""
    reader = hiredis.Reader(notEnoughData=None)
    reader.feed(reply)
    try:
        value = reader.gets()
    except (TypeError, hiredis.HiredisError):  # it is malformed, or a map has keys that cannot be hashed
        return reply
    is_flat = isinstance(value, list) and not any(isinstance(each, (list, dict, set)) for each in value)
    if name in PAIRS and is_flat and len(value) % 2 == 0:
        return dict(zip(value[::2], value[1::2], strict=True))
    return sorted(value, key=repr) if name in UNORDERED and isinstance(value, (list, set)) else value


def _are_equal(first: Any, second: Any, tolerance: float | None) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _are_equal(value, second[field], tolerance) for field, value in first.items()
        )
    if _is_row(first) and _is_row(second):
        return len(first) == len(second) and all(map(lambda one, two: _are_equal(one, two, tolerance), first, second))
    if first == second:
        return True
    if tolerance is None:
        return False
    numbers = _number(first), _number(second)
    if numbers[0] is None or numbers[1] is None:
        return False
    return math.isclose(numbers[0], numbers[1], rel_tol=tolerance, abs_tol=tolerance)


def _is_row(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (bytes, str))


def _number(value: Any) -> float | None:
    if isinstance(value, bytes) and NOT_IN_NUMBERS.search(value):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
