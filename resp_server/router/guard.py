"""Whom a proxy may ask: on no slot does time run backwards, whichever servers answer it one after another. Pure.

A server says which epochs its replies are from (STATE FOLLOW). When other servers answer a slot from now on, what those
before were known to have reached is the slot's *floor*: nothing is asked of a server that has not reached it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from resp_server.protocol.following import GONE, Reached
from state_backend.slots import SLOTS

# What was reached in each job.
Epochs = Mapping[str, Reached]

NOTHING: Epochs = {}


def has_reached(told: Epochs, floor: Epochs, gone: Collection[str] = ()) -> bool:
    """Tell whether a server that told this has all that a floor asks for; jobs that are gone do not count."""
    return all(told.get(job, GONE) >= reached for job, reached in floor.items() if job not in gone)


def latest(first: Epochs, second: Epochs) -> Epochs:
    """Return what was reached in each job by either."""
    return {job: max(first.get(job, GONE), second.get(job, GONE)) for job in first.keys() | second.keys()}


class Floors:
    """The floor of each slot. Slots with the same history share one."""

    def __init__(self) -> None:
        self.by_slot: list[Epochs] = [NOTHING] * SLOTS

    def leave(self, slots: Iterable[int], told: Epochs) -> None:
        """Take in that somebody else answers these slots from now on; who did had reached this."""
        made: dict[int, tuple[Epochs, Epochs]] = {}  # by identity; the floor before is kept so that it stays its own
        for slot in slots:
            before = self.by_slot[slot]
            if id(before) not in made:
                made[id(before)] = before, latest(before, told)
            self.by_slot[slot] = made[id(before)][1]
