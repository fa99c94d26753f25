"""Plan the next topology and each member's directive from the members' reports. Pure: no clock, no sockets.

Slots X move from A to B in an order in which every server that a client may ask either answers or redirects correctly:

    B is to load X -> B owns X, at A's epochs -> the topology gives X to B -> B serves that topology
    -> other servers get it -> A serves it -> A drops X

A failed server still owns its slots until another server has loaded them, because it may still answer clients: perhaps
only the registry cannot reach it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from resp_server.cluster.topology import Health, Node, Topology
from resp_server.registry.sharding import Member, Shard, plan
from state_backend.model.slot_set import ALL, NONE, SlotSet

# The term and epoch of each job that the new owner of slots must reach before it may answer in place of the old owner.
Handover = dict[str, tuple[int, int]]


class Directive(NamedTuple):
    """The message of the registry to one member: the topology to serve and the slots to load."""

    topology: Topology
    desired_slots: SlotSet


class Assignment:
    """Shards, topology and desired slots; `update` fits them to the members."""

    def __init__(self, replicas: int, topology: Topology | None = None) -> None:
        """Start empty, or from the topology of an earlier registry."""
        self.topology = topology
        self.shards = () if topology is None else _shards_of(topology)
        self._replicas = replicas
        self._released = topology
        # The ids of members that get the topology before its release.
        self._early: frozenset[str] = frozenset()
        self._desired_slots: dict[str, SlotSet] = {}
        self._handovers: dict[tuple[str, str], Handover] = {}
        # Whether this registry made the topology.
        self._is_own = False

    def update(self, members: Mapping[str, Member]) -> bool:
        """Plan for these members, all that may serve; return whether there is a new topology.

        No two members that are alive have the same address.
        """
        alive = {member.address for member in members.values() if member.is_alive}
        members = {name: each for name, each in members.items() if each.is_alive or each.address not in alive}
        self.shards = plan(self.shards, members, self._replicas)
        self._release(members)
        is_new = self._renew(members)
        self._desired_slots = {member.id: self._desired_of(member) for member in members.values()}
        return is_new

    def directive_for(self, member_id: str) -> Directive | None:
        """Return a member's directive; None if no topology that it may serve includes it yet."""
        topology = self.topology if member_id in self._early else self._released
        if topology is None or member_id not in topology.by_id:
            return None
        return Directive(topology, self._desired_slots.get(member_id, NONE))

    @property
    def released(self) -> Topology | None:
        """The newest topology that every server and watcher may have."""
        return self._released

    @property
    def waits_for_epochs(self) -> bool:
        """Return whether a move of slots waits until a server reaches some epochs."""
        return bool(self._handovers)

    def desired_slots(self, member_id: str) -> SlotSet:
        """Return the slots that a member should own."""
        return self._desired_slots.get(member_id, NONE)

    def includes(self, member_id: str) -> bool:
        """Return whether a member is in the topology or in a shard."""
        is_included = self.topology is not None and member_id in self.topology.by_id
        return is_included or any(member_id in shard.members for shard in self.shards)

    # -- the topology -------------------------------------------------------------------------------------------------

    def _next_nodes(self, members: Mapping[str, Member]) -> tuple[Node, ...]:
        before = {} if self.topology is None else self.topology.by_id
        alive = {member.address: member.id for member in members.values() if member.is_alive}
        # A node whose address belongs to another server now will not return.
        before = {name: node for name, node in before.items() if name in alive.values() or node.address not in alive}
        slots = self._next_slots({name: node.slots for name, node in before.items()}, members)
        shard_of = {name: shard for shard in self.shards for name in shard.members}
        by_join_order = sorted(members.values(), key=lambda each: each.join_order)
        present = [each.id for each in by_join_order if each.id in shard_of or each.is_connected]
        names = [name for name in before if name in present or slots.get(name)]
        names += [name for name in present if name not in before]
        nodes: dict[str, Node] = {}
        for name in names:
            shard = shard_of.get(name)
            is_replica = shard is not None and shard.master != name and not slots.get(name)
            master = shard.master if shard is not None and is_replica else None
            node = _make_node(name, before, members, slots, master)
            # Of two absent nodes with one address, the first one stays.
            nodes.setdefault(node.address, node)
        ids = {node.id for node in nodes.values()}
        return tuple(node for node in nodes.values() if node.replica_of is None or node.replica_of in ids)

    def _renew(self, members: Mapping[str, Member]) -> bool:
        """Make the next topology if anything differs. Waits while the present one is not released."""
        before = self.topology
        newest = max((member.topology_version for member in members.values()), default=-1)
        is_outdated = before is None or not self._is_own or newest > before.version
        if before is not self._released and not is_outdated:
            return False
        nodes = self._next_nodes(members)
        if not nodes or (before is not None and nodes == before.nodes and not is_outdated):
            return False
        self.topology = Topology(1 + max(newest, -1 if before is None else before.version), nodes)
        self._is_own = True
        self._release(members)
        return True

    def _next_slots(self, current: Mapping[str, SlotSet], members: Mapping[str, Member]) -> dict[str, SlotSet]:
        """Return the slots of each node in the next topology. Slots move once their new owner can answer.

        A node that gains slots loses none in the same topology, because it must serve the gained ones first.
        """
        target = {shard.master: shard.slots for shard in self.shards}
        moves = [
            (old, new, moved)
            for new, slots in _best_owners(target, current, members).items()
            for old, moved in _owners_of(slots - current.get(new, NONE), current)
        ]
        handovers = {(old, new): self._handovers.get((old, new), {}) for old, new, _ in moves}
        self._handovers = handovers
        slots = dict(current)
        losing: set[str] = set()
        gaining: set[str] = set()
        # First the slots that no server answers: their new owner need not wait for the old one.
        for old, new, moved in sorted(moves, key=lambda move: _is_alive(move[0], members)):
            if not _may_take_over(members.get(old), members.get(new), handovers[old, new]):
                continue
            if _is_alive(old, members):
                if old in gaining or new in losing:
                    continue
                losing.add(old)
            gaining.add(new)
            slots[new] = slots.get(new, NONE) | moved
            if old:
                slots[old] -= moved
        return slots

    def _release(self, members: Mapping[str, Member]) -> None:
        """Release the topology once all live members that gained slots serve it; until then only these get it."""
        topology, released = self.topology, self._released
        if topology is None or topology is released:
            return
        serving = frozenset(name for name, member in members.items() if member.topology_version == topology.version)
        had = {} if released is None else {node.id: node.slots for node in released.nodes}
        early = frozenset(
            node.id
            for node in topology.nodes
            if node.slots - had.get(node.id, NONE)
            and (member := members.get(node.id)) is not None
            and member.is_alive
            and node.id not in serving
        )
        # A member that serves the topology already must not get an older one.
        self._early = early | serving
        if not early:
            self._released = topology

    def _desired_of(self, member: Member) -> SlotSet:
        """Return the slots that a member should own: its shard's, and those that clients may still read from it."""
        needed = NONE
        for shard in self.shards:
            if member.id in shard.members:
                needed |= shard.slots
        topology = self.topology
        node = None if topology is None else topology.by_id.get(member.id)
        if topology is not None and node is not None:
            needed |= topology.master_of(node).slots
        if topology is not None and member.topology_version == topology.version:
            return needed
        return needed | self._desired_slots.get(member.id, member.owned_slots)


def _shards_of(topology: Topology) -> tuple[Shard, ...]:
    return tuple(
        Shard(master.id, tuple(replica.id for replica in topology.replicas(master)), master.slots)
        for master in topology.masters
    )


def _make_node(
    name: str,
    before: Mapping[str, Node],
    members: Mapping[str, Member],
    slots: Mapping[str, SlotSet],
    master: str | None,
) -> Node:
    member = members.get(name)
    endpoint = before[name] if member is None else member
    answered = slots.get(name if master is None else master, NONE)
    health = Health.FAIL
    if member is not None and member.is_alive:
        health = Health.LOADING if answered - member.owned_slots else Health.ONLINE
    return Node(name, endpoint.host, endpoint.port, slots.get(name, NONE), master, health, endpoint.zone)


def _may_take_over(old: Member | None, new: Member | None, handover: Handover) -> bool:
    """Return whether the new owner of slots may answer for the old one: it has all jobs, and epochs do not go back.

    The epochs to reach are those at the first call for a handover, so that a new owner that always lags a little does
    not wait for ever. If the old owner does not report, there are none to reach: no client reads from it.
    """
    if old is None or new is None:
        return True
    for job, visible in old.jobs.items():
        handover.setdefault(job, (visible.term, visible.epoch))
        found = new.jobs.get(job)
        if found is None or (old.is_alive and (found.term, found.epoch) < handover[job]):
            return False
    return True


def _is_alive(name: str, members: Mapping[str, Member]) -> bool:
    return name in members and members[name].is_alive


def _best_owners(
    target: Mapping[str, SlotSet], current: Mapping[str, SlotSet], members: Mapping[str, Member]
) -> dict[str, SlotSet]:
    """Return the best owner of each slot now. Each slot that has an owner or a target is listed once.

    The first of these is the best one: the target, if it can answer; the present owner, if it can; another target or
    owner that can; the present owner; the target.
    """

    def answerable(name: str) -> SlotSet:
        return members[name].can_answer if name in members else NONE

    best: dict[str, SlotSet] = {}
    unassigned = ALL
    for candidates in (
        ((name, slots & answerable(name)) for name, slots in target.items()),
        ((name, slots & answerable(name)) for name, slots in current.items()),
        ((name, answerable(name)) for name in (*target, *(name for name, slots in current.items() if slots))),
        current.items(),
        target.items(),
    ):
        for name, slots in candidates:
            if found := slots & unassigned:
                best[name] = best.get(name, NONE) | found
                unassigned -= found
    return best


def _owners_of(slots: SlotSet, current: Mapping[str, SlotSet]) -> Iterator[tuple[str, SlotSet]]:
    """Iterate over the current owners of these slots, with the part that each owns; "" for no owner."""
    for name, owned in current.items():
        if found := slots & owned:
            yield name, found
            slots -= found
    if slots:
        yield "", slots
