"""Sets of slots, such as those that a state server owns: sorted ranges that neither touch nor overlap.

A set is written as in Redis' configuration: `0-5460,9000,9100-9110`, both ends included; no slot is an empty text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import randrange
from typing import Self

from state_backend.model.errors import SlotSetError
from state_backend.model.slots import HASH_BITS, SLOTS


@dataclass(frozen=True)
class SlotSet:
    """A set of slots. Made by `of` or `parse`; `ALL` and `NONE` are constants.

    Args:
        ranges: (first, last), in order.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> Self:
        """Make a set from ranges in any order, which may overlap; SlotSetError for an invalid range."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if not 0 <= first <= last < SLOTS:
                raise SlotSetError(
                    f"{first}-{last} is no range of slots: slots are 0 to {SLOTS - 1}, and a range does not end before "
                    f"it begins"
                )
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], last))
            else:
                merged.append((first, last))
        return cls(tuple(merged))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of a set, the inverse of `str`; SlotSetError names an invalid part."""
        return cls.of(_range(part.strip(), text) for part in text.split(",") if text.strip())

    def __str__(self) -> str:
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.ranges)

    def __contains__(self, slot: int) -> bool:
        index = bisect_right(self.ranges, (slot, SLOTS)) - 1
        return index >= 0 and slot <= self.ranges[index][1]

    def __iter__(self) -> Iterator[int]:
        for first, last in self.ranges:
            yield from range(first, last + 1)

    def __len__(self) -> int:
        """Return the number of slots."""
        return sum(last - first + 1 for first, last in self.ranges)

    def random_position(self) -> int:
        """Return a random position (see `slots`) in these slots, uniformly. The set must not be empty."""
        nth = randrange(len(self))
        for first, last in self.ranges:
            if nth <= last - first:
                break
            nth -= last - first + 1
        return (first + nth) << HASH_BITS | randrange(1 << HASH_BITS)

    def __or__(self, other: SlotSet) -> SlotSet:
        return SlotSet.of((*self.ranges, *other.ranges))

    def __and__(self, other: SlotSet) -> SlotSet:
        return self - (ALL - other)

    def __sub__(self, other: SlotSet) -> SlotSet:
        remaining: list[tuple[int, int]] = []
        removed, at = other.ranges, 0
        for first, last in self.ranges:
            while at < len(removed) and removed[at][0] <= last:
                removed_first, removed_last = removed[at]
                if first < removed_first:
                    remaining.append((first, removed_first - 1))
                first = max(first, removed_last + 1)
                if removed_last > last:
                    break  # the removed range may overlap the next range, too
                at += 1
            if first <= last:
                remaining.append((first, last))
        return SlotSet(tuple(remaining))

    def intersects(self, first: int, last: int) -> bool:
        """Return whether any slot from `first` to `last` is in the set."""
        index = bisect_right(self.ranges, (last, SLOTS)) - 1
        return index >= 0 and first <= self.ranges[index][1]

    def covers(self, first: int, last: int) -> bool:
        """Return whether all slots from `first` to `last` are in the set."""
        index = bisect_right(self.ranges, (first, SLOTS)) - 1
        return index >= 0 and last <= self.ranges[index][1]


def _range(part: str, text: str) -> tuple[int, int]:
    first, dash, last = part.partition("-")
    numbers = (first, last) if dash else (first, first)
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise SlotSetError(
            f"{part!r} in {text!r} is no range of slots; write first-last, or one number, and commas between: "
            f"0-5460,9000-9010"
        )
    return int(numbers[0]), int(numbers[1])


ALL = SlotSet(((0, SLOTS - 1),))
NONE = SlotSet()
