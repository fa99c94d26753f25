"""Which server answers which slot, as a proxy knows it: from the topology, and from what servers say of it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from resp_server.cluster.topology import Topology
from state_backend.key_groups import KeyGroups
from state_backend.slots import SLOTS


class SlotMap:
    """Addresses by slot, of the highest version heard of; None where nobody answers."""

    def __init__(self) -> None:
        self.version = -1
        # Those of the version, and what was said of single slots since.
        self.owners: list[str | None] = [None] * SLOTS
        self._set(self.owners)

    def _set(self, told: list[str | None]) -> None:
        """Derive what is asked of a version as a whole: its servers with their numbers of slots, and its gaps."""
        self.told = tuple(told)
        self.counts = Counter(each for each in told if each is not None)
        self.is_whole = None not in told
        self._lasts = [last for _, last in runs_of(told)]

    def take(self, topology: Topology) -> bool:
        """Learn a topology; False if it is not newer than what is known."""
        ranges = [(first, last, node.address) for node in topology.masters for first, last in node.slots.ranges]
        return self.learn(topology.version, ranges)

    def learn(self, version: int, ranges: Sequence[tuple[int, int, str]]) -> bool:
        """Learn who owns what in a version; False if it is not newer than what is known."""
        if version <= self.version:
            return False
        self.version = version
        self.owners = [None] * SLOTS
        for first, last, address in ranges:
            self.owners[first : last + 1] = [address] * (last + 1 - first)
        self._set(self.owners)
        return True

    def moved(self, slot: int, address: str) -> None:
        """Believe a MOVED, until there is a higher version."""
        self.owners[slot] = address

    def last_of_run(self, slot: int) -> int:
        """Return the last slot from this one on that has the same owner in this version, without a gap."""
        return self._lasts[bisect_left(self._lasts, slot)]


def runs_of(owners: Sequence[str | None]) -> Iterator[tuple[int, int]]:
    """Iterate over the first and last slots of runs of one owner, in order; together they are all slots."""
    first = 0
    for _, run in groupby(owners):
        last = first + sum(1 for _ in run) - 1
        yield first, last
        first = last + 1


def parse_nodes(text: str) -> tuple[int, list[tuple[int, int, str]]]:
    """Read what CLUSTER NODES of a state server says: the version, and the ranges with their owners.

    <id> <host:port@bus> <flags> <master> <ping> <pong> <version> <link> <first-last> ...
    """
    version, ranges = -1, []
    for line in text.splitlines():
        _, address, flags, _, _, _, epoch, _, *slots = line.split()
        version = max(version, int(epoch))
        if "master" in flags.split(","):
            own = KeyGroups.parse(",".join(slots))
            ranges += [(first, last, address.partition("@")[0]) for first, last in own.ranges]
    return version, ranges
