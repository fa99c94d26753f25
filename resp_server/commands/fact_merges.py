"""What a proxy makes of one fact of a job, as several servers report it. Pure.

Each function takes the servers' rows, all of which have the fact, and the fact's name.

Counts of keys are added up. While slots move, two servers may own the same slots. The second server's count is then
multiplied by the share of its slots that the first server does not own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from state_backend.model.slot_set import NONE, SlotSet

Row = dict[str, Any]


def least(rows: Sequence[Row], name: str) -> Any:
    """Return the least value."""
    return min(row[name] for row in rows)


def largest(rows: Sequence[Row], name: str) -> Any:
    """Return the largest value."""
    return max(row[name] for row in rows)


def largest_known(rows: Sequence[Row], name: str) -> Any:
    """Return the largest value that a server knows; None if no server knows it."""
    return _largest(row[name] for row in rows)


def largest_unless_unknown(rows: Sequence[Row], name: str) -> Any:
    """Return the largest value; None if a server does not know it."""
    return None if any(row[name] is None for row in rows) else largest(rows, name)


def total(rows: Sequence[Row], name: str) -> int:
    """Return the sum."""
    return sum(row[name] for row in rows)


def behind_in_epochs(rows: Sequence[Row], name: str) -> Any:
    """Return how far the server that is furthest behind is from the newest epoch that one knows."""
    return max(0, largest(rows, "committed") - least(rows, "applied"))


def newest(rows: Sequence[Row]) -> Row:
    """Return the row of the server that knows the newest epoch."""
    return max(rows, key=lambda row: int(row["committed"]))


def of_newest(rows: Sequence[Row], name: str) -> Any:
    """Return the value of the server that knows the newest epoch."""
    return newest(rows)[name]


def of_oldest(rows: Sequence[Row], name: str) -> Any:
    """Return the value of the server whose clients read the oldest epoch, or none yet."""
    return min(rows, key=lambda row: row["committed_at"] or "")[name]


def of_furthest_from_source(rows: Sequence[Row], name: str) -> Any:
    """Return the value of the server that is furthest behind the sources, or does not know how far."""
    return max(rows, key=lambda row: math.inf if row["source_lag_records"] is None else row["source_lag_records"])[name]


def of_held_back(rows: Sequence[Row], name: str) -> Any:
    """Return the value of the server that holds the newest epoch back, if one does."""
    return max(rows, key=lambda row: -1 if row["held_back_epoch"] is None else row["held_back_epoch"])[name]


def error_texts(rows: Sequence[Row], name: str) -> str:
    """Return all errors, each once."""
    return "; ".join(dict.fromkeys(row[name] for row in rows if row[name]))


def union_of_slots(rows: Sequence[Row], name: str) -> str:
    """Return the slots that one server or more owns."""
    owned = NONE
    for row in rows:
        owned |= SlotSet.parse(row[name])
    return str(owned)


def sum_without_overlap(rows: Sequence[Row], name: str) -> int | None:
    """Return the sum, of slots that two servers own once; None if a server does not know its value."""
    return sum_of([row[name] for row in rows], _shares(rows))


def keys_of_states(rows: Sequence[Row], name: str) -> list[int | None]:
    """Return the number of keys of each state that the newest row names."""
    counts, shares = _by_state(rows, name), _shares(rows)
    return [sum_of([count.get(state, 0) for count in counts], shares) for state in newest(rows)["state_names"]]


def bytes_of_states(rows: Sequence[Row], name: str) -> list[int | None]:
    """Return the bytes of each state, which each server reports for all slots; None if no server knows them."""
    sizes = _by_state(rows, name)
    return [_largest(each.get(state) for each in sizes) for state in newest(rows)["state_names"]]


def shares_of(slots_of_servers: Iterable[SlotSet]) -> list[float]:
    """Return, for each server, the share of its slots that no server before it owns. Its keys count by this share."""
    counted, shares = NONE, []
    for slots in slots_of_servers:
        shares.append(len(slots - counted) / len(slots) if slots else 0.0)
        counted |= slots
    return shares


def sum_of(numbers: Sequence[int | None], shares: Sequence[float]) -> int | None:
    """Return the sum of numbers, weighted by shares; None if one is unknown."""
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return None
    return round(sum(number * share for number, share in zip(known, shares, strict=True)))


def _largest(numbers: Iterable[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)


def _shares(rows: Sequence[Row]) -> list[float]:
    return shares_of(SlotSet.parse(row["slots"]) for row in rows)


def _by_state(rows: Sequence[Row], name: str) -> list[dict[str, int | None]]:
    """Return the values of each row by the names of its states."""
    return [dict(zip(row["state_names"], row[name], strict=True)) for row in rows]
