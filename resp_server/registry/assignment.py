"""Plan the next topology and each member's directive from the members' reports. Pure: no clock, no sockets.

Slots X move from A to B in an order in which every server that a client may ask either answers or redirects correctly:

    B is to load X -> B owns X, at A's epochs -> the topology gives X to B -> B serves that topology
    -> other servers get it -> A serves it -> A drops X

If the owner of a slot has failed, the slot stays in its name until another server has loaded it: the owner may still
answer clients while only the registry cannot reach it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from resp_server.cluster.topology import Health, Node, Topology
from resp_server.registry.sharding import Member, Shard, plan
from state_backend.model.key_groups import ALL, NONE, KeyGroups

# The term and epoch of each job that a taker must reach before it may answer in place of a giver.
Handover = dict[str, tuple[int, int]]


class Directive(NamedTuple):
    """What the registry sends to one member: the topology to serve and the slots to load."""

    topology: Topology
    desired_slots: KeyGroups


class Assignment:
    """Shards, topology and desired slots; `update` fits them to the members."""

    def __init__(self, replicas: int, topology: Topology | None = None) -> None:
        """Start empty, or from the topology of an earlier registry."""
        self.topology = topology
        self.shards = () if topology is None else _shards_of(topology)
        self._replicas = replicas
        self._released = topology
        self._early: frozenset[str] = frozenset()  # ids of members that get the topology before its release
        self._desired_slots: dict[str, KeyGroups] = {}
        self._handovers: dict[tuple[str, str], Handover] = {}
        self._is_own = False  # whether this registry made the topology

    def update(self, members: Mapping[str, Member]) -> bool:
        """Plan for these members, all that may serve; return whether there is a new topology.

        No two members that are alive have the same address.
        """
        alive = {each.address for each in members.values() if each.is_alive}
        members = {name: each for name, each in members.items() if each.is_alive or each.address not in alive}
        self.shards = plan(self.shards, members, self._replicas)
        self._release(members)
        is_new = self._renew(members)
        self._desired_slots = {each.id: self._desired_of(each) for each in members.values()}
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
        """Tell whether a move of slots waits until a server reaches some epochs."""
        return bool(self._handovers)

    def desired_slots(self, member_id: str) -> KeyGroups:
        """Return the slots that a member should own."""
        return self._desired_slots.get(member_id, NONE)

    def includes(self, member_id: str) -> bool:
        """Tell whether a member is in the topology or in a shard."""
        is_included = self.topology is not None and member_id in self.topology.by_id
        return is_included or any(member_id in shard.members for shard in self.shards)

    # -- the topology -------------------------------------------------------------------------------------------------

    def _next_nodes(self, members: Mapping[str, Member]) -> tuple[Node, ...]:
        before = {} if self.topology is None else self.topology.by_id
        alive = {each.address: each.id for each in members.values() if each.is_alive}
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
            nodes.setdefault(node.address, node)  # of two absent nodes at one address the earlier stays
        ids = {node.id for node in nodes.values()}
        return tuple(node for node in nodes.values() if node.replica_of is None or node.replica_of in ids)

    def _renew(self, members: Mapping[str, Member]) -> bool:
        """Make the next topology if anything differs. Waits while the present one is not released."""
        before = self.topology
        newest = max((each.topology_version for each in members.values()), default=-1)
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

    def _next_slots(self, current: Mapping[str, KeyGroups], members: Mapping[str, Member]) -> dict[str, KeyGroups]:
        """Return the slots of each node in the next topology: moved to their target where it can answer, else unmoved.

        A node that gains slots gives none away in the same topology, as it must serve the gained ones first.
        """
        target = {shard.master: shard.slots for shard in self.shards}
        moves = [
            (source, name, moved)
            for name, slots in _best_owners(target, current, members).items()
            for source, moved in _owners_of(slots - current.get(name, NONE), current)
        ]
        handovers = {(source, name): self._handovers.get((source, name), {}) for source, name, _ in moves}
        self._handovers = handovers
        slots = dict(current)
        givers: set[str] = set()
        gainers: set[str] = set()
        # First the slots that no server answers: they need not wait for a giver.
        for source, name, moved in sorted(moves, key=lambda move: _is_alive(move[0], members)):
            if not _may_take_over(members.get(source), members.get(name), handovers[source, name]):
                continue
            if _is_alive(source, members):
                if source in gainers or name in givers:
                    continue
                givers.add(source)
            gainers.add(name)
            slots[name] = slots.get(name, NONE) | moved
            if source:
                slots[source] -= moved
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
        self._early = early | serving  # members that serve it already get none that is older
        if not early:
            self._released = topology

    def _desired_of(self, member: Member) -> KeyGroups:
        """Return the slots that a member should own: its shard's, and those for which it serves or may still serve."""
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
        Shard(master.id, tuple(each.id for each in topology.replicas(master)), master.slots)
        for master in topology.masters
    )


def _make_node(
    name: str,
    before: Mapping[str, Node],
    members: Mapping[str, Member],
    slots: Mapping[str, KeyGroups],
    master: str | None,
) -> Node:
    member = members.get(name)
    endpoint = before[name] if member is None else member
    answered = slots.get(name if master is None else master, NONE)
    health = Health.FAIL
    if member is not None and member.is_alive:
        health = Health.LOADING if answered - member.owned_slots else Health.ONLINE
    return Node(name, endpoint.host, endpoint.port, slots.get(name, NONE), master, health)


def _may_take_over(giver: Member | None, taker: Member | None, handover: Handover) -> bool:
    """Tell whether a taker may answer for a giver: it has all jobs, and no reader sees an epoch go back.

    The epochs to reach are those at the first call of a handover, so that a taker that always lags a little does not
    wait for ever. A giver that does not report has none to reach: no client reads from it.
    """
    if giver is None or taker is None:
        return True
    for job, visible in giver.jobs.items():
        handover.setdefault(job, (visible.term, visible.epoch))
        found = taker.jobs.get(job)
        if found is None or (giver.is_alive and (found.term, found.epoch) < handover[job]):
            return False
    return True


def _is_alive(source: str, members: Mapping[str, Member]) -> bool:
    return source in members and members[source].is_alive


def _best_owners(
    target: Mapping[str, KeyGroups], current: Mapping[str, KeyGroups], members: Mapping[str, Member]
) -> dict[str, KeyGroups]:
    """Return the best owner of each slot now. Each slot that has an owner or a target is listed once."""

    def answerable(name: str) -> KeyGroups:
        return members[name].can_answer if name in members else NONE

    best: dict[str, KeyGroups] = {}
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


def _owners_of(slots: KeyGroups, current: Mapping[str, KeyGroups]) -> Iterator[tuple[str, KeyGroups]]:
    """Iterate over the current owners of these slots, with the part that each owns; "" for no owner."""
    for name, owned in current.items():
        if found := slots & owned:
            yield name, found
            slots -= found
    if slots:
        yield "", slots
