"""The positions of the keys in a request, from the key specifications of its command.

Two commands have incomplete specifications, and their keys are found as redis-server finds them. SORT's option STORE
may be anywhere. MIGRATE's key argument is empty if the request has the option KEYS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from resp_server.command.handler import INTEGER
from resp_server.command.spec import CommandSpec

# The position of MIGRATE's first option, and the number of arguments of some options of MIGRATE and SORT.
MIGRATE_OPTIONS = 6
MIGRATE_SKIPPED = {b"AUTH": 1, b"AUTH2": 2}
SORT_SKIPPED = {b"LIMIT": 2, b"GET": 1, b"BY": 1}

# Redis' commands whose keys are in ranges have at most so many; the compiled forwarder's rows have room for them.
RANGES_MAX = 2

FlaggedKeys = list[tuple[bytes, Sequence[str]]]


class KeyRange(NamedTuple):
    """Keys at positions that follow from the size of a request, or from a number in it.

    Args:
        first: The position of the first key; if the keys are counted, that of their number.
        last: The position of the last key, from `first` on; if negative, from the end of the request.
        step: The distance between two keys.
        counted_from: The distance from the number of keys to the first key; 0: the keys are not counted.
    """

    first: int
    last: int = 0
    step: int = 1
    counted_from: int = 0


def keys_of(facts: CommandSpec, request: Sequence[bytes]) -> FlaggedKeys | None:
    """Return the keys of a request with their access flags; None if the request does not match a specification."""
    positions = key_positions(facts, request)
    return None if positions is None else [(request[at], flags) for at, flags in positions]


def key_positions(facts: CommandSpec, request: Sequence[bytes]) -> list[tuple[int, Sequence[str]]] | None:
    """Return the positions of the keys of a request, with their access flags; None as for `keys_of`."""
    runs = key_runs(facts, request)
    return None if runs is None else [(at, flags) for positions, flags in runs for at in positions]


def key_runs(facts: CommandSpec, request: Sequence[bytes]) -> list[tuple[Sequence[int], Sequence[str]]] | None:
    """Return the key positions of each key specification, with its access flags; None as for `keys_of`.

    This takes no longer for many keys, unless a specification searches for a keyword.
    """
    found: list[tuple[Sequence[int], Sequence[str]]] = []
    for spec in facts.key_specs:
        if "incomplete" in spec["flags"]:
            return _migrate_positions(found, request)
        positions = _positions(spec, request)
        if positions is None:
            return None
        found.append((positions, spec["flags"]))
    return found


def single_key_position(name: str, facts: CommandSpec) -> int:
    """Return the position of the only key of a command; 0: there are several, or none at a fixed position."""
    if len(facts.key_specs) != 1 or "not_key" in facts.key_specs[0]["flags"]:
        return 0
    is_fixed = "|" not in name and "movablekeys" not in facts.flags
    return facts.first_key if is_fixed and 0 < facts.first_key == facts.last_key else 0


def key_ranges(facts: CommandSpec) -> Sequence[KeyRange] | None:
    """Return the ranges that have all keys of a command, at most RANGES_MAX; None: they are found in another way."""
    found = []
    for spec in facts.key_specs:
        search, find = spec["begin_search"], spec["find_keys"]
        if search["type"] == "unknown" and "update" not in spec["flags"]:
            continue  # `key_runs` finds no such keys, which SORT_RO reads by patterns
        if search["type"] != "index" or not {"incomplete", "not_key"}.isdisjoint(spec["flags"]):
            return None
        first, rule = int(search["spec"]["index"]), find["spec"]
        if find["type"] == "range" and rule["limit"] <= 1:
            found.append(KeyRange(first, rule["lastkey"], rule["keystep"]))
        elif find["type"] == "keynum" and rule["firstkey"] > rule["keynumidx"]:
            at = first + rule["keynumidx"]
            found.append(KeyRange(at, 0, rule["keystep"], rule["firstkey"] - rule["keynumidx"]))
        else:
            return None
    return found if len(found) <= RANGES_MAX else None


def searches_keyword(facts: CommandSpec) -> bool:
    """Return whether finding the keys of a request means searching all its words for a keyword."""
    return any(spec["begin_search"]["type"] != "index" for spec in facts.key_specs)


def _migrate_positions(
    found: list[tuple[Sequence[int], Sequence[str]]], request: Sequence[bytes]
) -> list[tuple[Sequence[int], Sequence[str]]]:
    """Return the positions of MIGRATE's keys: the key argument, or the keys after KEYS; none if it has both."""
    ((key_argument,), flags), at = found[0], MIGRATE_OPTIONS
    while at < len(request):
        word = request[at].upper()
        if word == b"KEYS" and at + 1 < len(request):
            return [] if request[key_argument] else [(range(at + 1, len(request)), flags)]
        at += 1 + MIGRATE_SKIPPED.get(word, 0)
    return found


def _sort_destination(request: Sequence[bytes]) -> Sequence[int]:
    """Return the position of the key after SORT's last STORE."""
    found: Sequence[int] = ()
    at = 2
    while at < len(request):
        word = request[at].upper()
        if word == b"STORE" and at + 1 < len(request):
            found = (at + 1,)
        at += 1 + SORT_SKIPPED.get(word, 0)
    return found


def _positions(spec: Mapping[str, Any], request: Sequence[bytes]) -> Sequence[int] | None:
    if spec["begin_search"]["type"] == "unknown" and "update" in spec["flags"]:
        return _sort_destination(request)
    first = _search_start(spec["begin_search"], request)
    if first is None:
        return ()
    rule = spec["find_keys"]["spec"]
    match spec["find_keys"]["type"]:
        case "range":
            return _range(first, rule["lastkey"], rule["keystep"], rule["limit"], len(request))
        case "keynum":
            return _counted_positions(first, rule, request)
        case _:
            return ()


def _search_start(search: Mapping[str, Any], request: Sequence[bytes]) -> int | None:
    """Return the position at which the search for keys begins: fixed, or after a keyword; None if there is none."""
    rule = search["spec"]
    if search["type"] == "index":
        return int(rule["index"])
    if search["type"] != "keyword":
        return None
    word = rule["keyword"].upper().encode()
    start, step = rule["startfrom"], 1
    if start < 0:
        start, step = len(request) + start, -1
    positions = range(start, 0 if step < 0 else len(request), step)
    return next((at + 1 for at in positions if request[at].upper() == word), None)


def _range(first: int, last: int, step: int, limit: int, size: int) -> Sequence[int] | None:
    """Return the positions from `first` to `last`, which is relative to `first` or, if negative, to the request's end.

    With last -1, `limit` divides the rest of the request: with 2, the first half of it are keys.
    """
    if last >= 0:
        end = first + last
    elif limit <= 1:
        end = size + last
    else:
        end = first + (size - first) // limit + last
    return range(first, end + 1, step) if first < size and end < size else None


def _counted_positions(first: int, rule: Mapping[str, int], request: Sequence[bytes]) -> Sequence[int] | None:
    """Return as many positions as an argument of the request gives; None for an invalid number, or for 0."""
    at = first + rule["keynumidx"]
    if at >= len(request) or not INTEGER.fullmatch(request[at]) or int(request[at]) <= 0:
        return None
    start = first + rule["firstkey"]
    end = start + int(request[at]) * rule["keystep"]
    return range(start, end, rule["keystep"]) if end <= len(request) else None
