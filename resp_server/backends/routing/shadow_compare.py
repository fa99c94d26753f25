"""Compares the upstream's reply about a key with the state's, and shows the difference. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

import hiredis

from resp_server.command.policies import policy_of
from resp_server.command.policy import Comparison
from resp_server.command.spec import CommandSpec

# Replies about a key that does not exist. `:0` is that of EXISTS, STRLEN, LLEN and the like.
ABSENT = (b"$-1\r\n", b"_\r\n", b"*-1\r\n", b"*0\r\n", b"%0\r\n", b"~0\r\n", b":0\r\n", b"+none\r\n")
# A sample has so many characters of a request, and of each backend's value.
SHOWN_CHARS_MAX = 160
# Python reads these in numbers, other programs do not.
NOT_IN_NUMBERS = re.compile(rb"[_\s]")
PLAIN_ARGUMENT = re.compile(rb"[!#-&(-\[\]-~]+")


class Outcome(Enum):
    """What a comparison found."""

    EQUAL = "equal"
    DIFFERENT = "different"
    MISSING_IN_UPSTREAM = "missing_in_upstream"
    MISSING_IN_STATE = "missing_in_state"


def is_comparable(name: str, facts: CommandSpec) -> bool:
    """Return whether the replies to a read of one key can be compared."""
    return policy_of(name).comparison is not Comparison.NEVER and "blocking" not in facts.flags


def outcome_of(name: str, upstream: bytes, state: bytes, tolerance: float | None = None) -> Outcome:
    """Compare the replies to a read of one key.

    Args:
        tolerance: The most by which numbers may differ, relative or absolute.
    """
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
    comparison = policy_of(name).comparison
    is_flat = isinstance(value, list) and not any(isinstance(each, (list, dict, set)) for each in value)
    if comparison is Comparison.PAIRS and is_flat and len(value) % 2 == 0:
        return dict(zip(value[::2], value[1::2], strict=True))
    is_unordered = comparison is Comparison.UNORDERED and isinstance(value, (list, set))
    return sorted(value, key=repr) if is_unordered else value


def shown_request(request: Sequence[bytes]) -> str:
    """Return a request as a user types it: arguments with spaces, quotes or other bytes are quoted."""
    arguments = (
        word.decode() if PLAIN_ARGUMENT.fullmatch(word) else _quoted(word) for word in request[:SHOWN_CHARS_MAX]
    )
    return _cut(" ".join(arguments))


def shown_replies(name: str, upstream: bytes, state: bytes, tolerance: float | None = None) -> tuple[str, str]:
    """Return the values in two different replies as texts: what differs of two hashes, sets or lists."""
    first, second = value_in(name, upstream), value_in(name, state)
    prefix = ""
    if isinstance(first, dict) and isinstance(second, dict):
        equal = {each for each in first.keys() & second.keys() if _are_equal(first[each], second[each], tolerance)}
        first, second = ({each: value[each] for each in value if each not in equal} for value in (first, second))
    elif policy_of(name).comparison is Comparison.UNORDERED and _is_row(first) and _is_row(second):
        first, second = [each for each in first if each not in second], [each for each in second if each not in first]
    elif _is_row(first) and _is_row(second):
        pairs = enumerate(zip(first, second, strict=False))
        at = next((at for at, each in pairs if not _are_equal(*each, tolerance)), min(len(first), len(second)))
        first, second = first[at:], second[at:]
        prefix = f"from element {at} on: " if at else ""
    return _cut(prefix + _shown(first)), _cut(prefix + _shown(second))


def _shown(value: Any) -> str:
    if value is None:
        return "(nil)"
    if isinstance(value, bytes):
        return _quoted(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_shown(name)}: {_shown(each)}" for name, each in value.items()) + "}"
    if _is_row(value) or isinstance(value, set):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return str(value)  # a number, or an error


def _quoted(word: bytes) -> str:
    """Return bytes in quotes: as text, or each other byte as \\xff if they are no printable text."""
    try:
        text = word.decode()
    except UnicodeDecodeError:
        text = ""
    if text.isprintable() and (text or not word):
        return json.dumps(text, ensure_ascii=False)
    return (
        '"' + "".join(chr(each) if 32 <= each < 127 and each not in b'"\\' else f"\\x{each:02x}" for each in word) + '"'
    )


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 3] + "..."


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
