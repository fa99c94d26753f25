"""Counts slots that get another server, and the servers that were lost. Pure."""

from __future__ import annotations

from collections.abc import Collection

from resp_server.cluster.topology import Topology


class MovedSlots:
    """The counts since a registry took over.

    Attributes:
        slots: How often a slot got another server.
        failovers: How often the slots of a server that was lost went to others.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.failovers = 0

    def count(self, before: Topology | None, after: Topology, alive: Collection[str]) -> None:
        """Count the changes between two topologies."""
        lost: set[str] = set()
        for slot, node in after.owners.items():
            former = None if before is None else before.owners.get(slot)
            if former is not None and former.id != node.id:
                self.slots += 1
                if former.id not in alive:
                    lost.add(former.id)
        self.failovers += len(lost)
