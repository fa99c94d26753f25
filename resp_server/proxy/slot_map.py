"""A proxy's map of slots to servers: from the topology, and from MOVED errors since."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, groupby, islice
from operator import is_not

from resp_server.cluster.topology import Health, Topology
from state_backend.model.slots import SLOTS

# The term of what is not said by a registry.
NO_TERM = -1


class SlotMap:
    """Addresses of masters by slot, of the highest version heard of; None where nobody answers."""

    def __init__(self) -> None:
        self.version = -1
        self._term = NO_TERM
        # Those of the version, and what was said of single slots since.
        self.owners: list[str | None] = [None] * SLOTS
        self._ends: list[int] | None = None
        # Each master's replicas that can answer.
        self.replicas: Mapping[str, Sequence[str]] = {}
        self._set(self.owners)

    def _set(self, owners_of_version: list[str | None]) -> None:
        """Derive what is asked of a version as a whole: its servers with their numbers of slots, and its gaps."""
        self.owners_of_version = tuple(owners_of_version)
        self.is_whole = None not in owners_of_version
        self.counts = Counter(filter(None, owners_of_version))
        self._lasts = [last for _, last in runs_of(owners_of_version)]

    def take(self, topology: Topology, term: int = NO_TERM) -> bool:
        """Learn a topology; False if it is not newer than what is known. Versions may begin anew with a higher term."""
        is_other_term = NO_TERM != term != self._term != NO_TERM
        if is_other_term and term < self._term:
            return False
        self._term = max(term, self._term)
        if topology.version <= self.version and not is_other_term:
            return False
        self.version = topology.version
        owners: list[str | None] = [None] * SLOTS
        for node in topology.masters:
            for first, last in node.slots.ranges:
                owners[first : last + 1] = [node.address] * (last + 1 - first)
        self.owners, self._ends = owners, None
        self.replicas = {
            node.address: [each.address for each in topology.replicas(node) if each.health is Health.ONLINE]
            for node in topology.masters
        }
        self._set(owners)
        return True

    def moved(self, slot: int, address: str) -> None:
        """Believe a MOVED, until there is a higher version."""
        self.owners[slot], self._ends = address, None

    @property
    def ends(self) -> Sequence[int]:
        """Return the ends of runs of slots that have one owner now: the slots behind them. Runs may meet."""
        if self._ends is None:
            self._ends = ends_of_runs(self.owners)
        return self._ends

    def last_of_run(self, slot: int) -> int:
        """Return the last slot from this one on that has the same owner in this version, without a gap."""
        return self._lasts[bisect_left(self._lasts, slot)]


def ends_of_runs(values: Sequence[object]) -> list[int]:
    """Return the positions behind runs of the same object, in order; the last one is behind them all."""
    return [*compress(range(1, len(values)), map(is_not, values, islice(values, 1, None))), len(values)]


def runs_of(owners: Sequence[str | None]) -> Iterator[tuple[int, int]]:
    """Iterate over the first and last slots of runs of one owner, in order; together they are all slots."""
    first = 0
    for _, run in groupby(owners):
        last = first + len(list(run)) - 1
        yield first, last
        first = last + 1
