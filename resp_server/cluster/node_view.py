"""The cluster as one of its nodes sees it: the slots that the node answers, and the redirect for all others."""

from __future__ import annotations

from collections.abc import Sequence

from resp_server.cluster.topology import Node, Topology
from resp_server.command.keys import keys_of
from resp_server.command.spec import ANY_SLOTS, CommandSpec
from resp_server.protocol.errors import ClusterDownError, CrossSlotError, MovedError
from state_backend.model.slot_set import SlotSet
from state_backend.model.slots import slot_of


class NodeView:
    """One topology as one of its nodes sees it. Immutable: a new topology makes a new view.

    Attributes:
        slots: The slots that the node answers: its own; for a replica, its master's.
    """

    def __init__(self, topology: Topology, name: str) -> None:
        """Find the node by its id or address; TopologyError if there is none."""
        self.topology = topology
        self.myself: Node = topology.node(name)
        self.master = topology.master_of(self.myself)
        self.slots: SlotSet = self.master.slots
        self._owners = topology.owners

    @property
    def is_replica(self) -> bool:
        """Return whether this node is a replica: it answers its master's slots to clients that sent READONLY."""
        return self.myself.is_replica

    def check(self, facts: CommandSpec, request: Sequence[bytes], is_readonly: bool) -> None:
        """Raise the error for a request that another node has to answer, checked in the order of Redis' getNodeByQuery.

        Any node answers a request without keys.
        """
        keys = keys_of(facts, request) if facts.key_specs else None
        if not keys:
            return
        if ANY_SLOTS in facts.tips:
            self.check_slots([slot_of(key) for key, _ in keys], is_readonly, may_differ=True)
            return
        slot = slot_of(keys[0][0])
        owner = self._owners.get(slot)
        if owner is None:
            raise ClusterDownError
        if len(keys) > 1 and any(slot_of(key) != slot for key, _ in keys):
            raise CrossSlotError
        self._check_owner(slot, owner, is_readonly and not facts.is_write)

    def check_slots(self, slots: Sequence[int], is_readonly: bool, *, may_differ: bool) -> None:
        """Raise the error for reads of these slots that another node has to answer.

        Args:
            may_differ: The slots may differ, if this node answers them all.
        """
        for slot in slots if may_differ else slots[:1]:
            owner = self._owners.get(slot)
            if owner is None:
                raise ClusterDownError
            if len(slots) > 1 and not may_differ:
                raise CrossSlotError
            self._check_owner(slot, owner, is_readonly)

    def _check_owner(self, slot: int, owner: Node, may_be_replica: bool) -> None:
        if owner is not self.myself and not (may_be_replica and owner is self.master):
            raise MovedError(slot, owner.address)
