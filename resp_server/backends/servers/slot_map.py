"""A proxy's map of slots to servers. It comes from the topology and from later MOVED errors."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, groupby, islice
from operator import is_not

from resp_server.cluster.topology import Health, Topology
from state_backend.model.slots import SLOTS

# The term of a topology that is not from a registry.
NO_TERM = -1


class SlotMap:
    """The master's address for each slot, from the newest topology; None for a slot without owner."""

    def __init__(self) -> None:
        self.version = -1
        self._term = NO_TERM
        # The owners in the topology, changed by MOVED errors since.
        self.owners: list[str | None] = [None] * SLOTS
        self._ends: list[int] | None = None
        # The replicas of each master that can answer.
        self.replicas: Mapping[str, Sequence[str]] = {}
        self._set(self.owners)

    def _set(self, owners_of_version: list[str | None]) -> None:
        """Set the fields that depend on the topology version only, not on MOVED errors."""
        self.owners_of_version = tuple(owners_of_version)
        self.is_complete = None not in owners_of_version
        self.counts = Counter(filter(None, owners_of_version))
        self._lasts = [last for _, last in runs_of(owners_of_version)]

    def apply(self, topology: Topology, term: int = NO_TERM) -> bool:
        """Apply a topology; return False if it is not newer. Versions may start again with a higher term."""
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
            node.address: [replica.address for replica in topology.replicas(node) if replica.health is Health.ONLINE]
            for node in topology.masters
        }
        self._set(owners)
        return True

    def moved(self, slot: int, address: str) -> None:
        """Set a slot's owner from a MOVED error, until the next topology version."""
        self.owners[slot], self._ends = address, None

    @property
    def addresses(self) -> list[str]:
        """The addresses of all servers."""
        replicas = [each for some in self.replicas.values() for each in some]
        return list(dict.fromkeys([*self.counts, *self.replicas, *replicas]))

    @property
    def ends(self) -> Sequence[int]:
        """The end of each run of slots with one owner: the slot after the run."""
        if self._ends is None:
            self._ends = ends_of_runs(self.owners)
        return self._ends

    def last_of_run(self, slot: int) -> int:
        """Return the last slot of the run that contains a slot. A run has one owner in this topology version."""
        return self._lasts[bisect_left(self._lasts, slot)]


def ends_of_runs(values: Sequence[object]) -> list[int]:
    """Return the position after each run of the same object, in order; the last position is the length."""
    return [*compress(range(1, len(values)), map(is_not, values, islice(values, 1, None))), len(values)]


def runs_of(owners: Sequence[str | None]) -> Iterator[tuple[int, int]]:
    """Iterate over runs of slots with one owner, as (first, last); the runs cover all slots, in order."""
    first = 0
    for _, run in groupby(owners):
        last = first + len(list(run)) - 1
        yield first, last
        first = last + 1
