"""From what members say to what they are told: the next topology that may be shown, by whom first, and wanted slots.

Slots X move from A to B so that at any moment whoever is asked answers, or knows who does:

    B wants X -> B holds X, at epochs of A -> the topology says B -> B shows it -> others are told -> A shows it
    -> A wants X no more

Slots whose owner is gone stay in its name until another one holds them: it may answer all the same, and only the
registry does not hear it. Pure: no clock, no sockets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from resp_server.cluster.topology import Health, Node, Topology
from resp_server.registry.sharding import Member, Shard, plan
from state_backend.model.key_groups import ALL, NONE, KeyGroups

# What a taker has to have seen before it may answer for a giver: a term and an epoch of each job.
Handover = dict[str, tuple[int, int]]


class Told(NamedTuple):
    """What one member is told: the topology that it is to show, and the slots that it is to hold."""

    topology: Topology
    wanted: KeyGroups


class Assignment:
    """Shards, topology and wanted slots, kept in step with members by `step`."""

    def __init__(self, replicas: int, topology: Topology | None = None) -> None:
        """Begin with nothing, or go on from a topology that another registry made."""
        self.topology = topology
        self.shards = () if topology is None else _shards_of(topology)
        self._replicas = replicas
        self._released = topology
        self._ahead: frozenset[str] = frozenset()  # those that are told the topology before it is released
        self._wanted: dict[str, KeyGroups] = {}
        self._handovers: dict[tuple[str, str], Handover] = {}
        self._is_own = False  # the topology is one that was made here

    def step(self, members: Mapping[str, Member]) -> bool:
        """Take what is known of all members that are to serve; return whether there is a new topology.

        Those that are here have addresses of their own.
        """
        here = {each.address for each in members.values() if each.is_here}
        members = {name: each for name, each in members.items() if each.is_here or each.address not in here}
        self.shards = plan(self.shards, members, self._replicas)
        self._release(members)
        is_new = self._renew(members)
        self._wanted = {each.id: self._wants(each) for each in members.values()}
        return is_new

    def told(self, member_id: str) -> Told | None:
        """Return what a member is to be told now; None if it is in no topology yet that it may show."""
        topology = self.topology if member_id in self._ahead else self._released
        if topology is None or member_id not in topology.by_id:
            return None
        return Told(topology, self._wanted.get(member_id, NONE))

    @property
    def released(self) -> Topology | None:
        """The newest topology that everybody may be told."""
        return self._released

    @property
    def waits_for_epochs(self) -> bool:
        """Tell whether slots may move as soon as some server has seen some epochs."""
        return bool(self._handovers)

    def wanted(self, member_id: str) -> KeyGroups:
        """Return the slots that a member is to hold."""
        return self._wanted.get(member_id, NONE)

    def keeps(self, member_id: str) -> bool:
        """Tell whether a member is in the topology or in a shard."""
        is_shown = self.topology is not None and member_id in self.topology.by_id
        return is_shown or any(member_id in shard.members for shard in self.shards)

    # -- the topology -------------------------------------------------------------------------------------------------

    def _next_nodes(self, members: Mapping[str, Member]) -> tuple[Node, ...]:
        before = {} if self.topology is None else self.topology.by_id
        here = {each.address: each.id for each in members.values() if each.is_here}
        # Where another one listens now, nobody comes back.
        before = {name: node for name, node in before.items() if name in here.values() or node.address not in here}
        slots = self._next_slots({name: node.slots for name, node in before.items()}, members)
        mates = {name: shard for shard in self.shards for name in shard.members}
        joined = sorted(members.values(), key=lambda each: each.joined)
        present = [each.id for each in joined if each.id in mates or each.is_connected]
        names = [name for name in before if name in present or slots.get(name)]
        names += [name for name in present if name not in before]
        nodes: dict[str, Node] = {}
        for name in names:
            shard = mates.get(name)
            is_replica = shard is not None and shard.master != name and not slots.get(name)
            master = shard.master if shard is not None and is_replica else None
            node = _node(name, before, members, slots, master)
            nodes.setdefault(node.address, node)  # of two that are away, who was known first
        ids = {node.id for node in nodes.values()}
        return tuple(node for node in nodes.values() if node.replica_of is None or node.replica_of in ids)

    def _renew(self, members: Mapping[str, Member]) -> bool:
        """Make the next topology if there is to be one: not while some have yet to show this one first."""
        before = self.topology
        seen = max((each.shown for each in members.values()), default=-1)
        is_outdated = before is None or not self._is_own or seen > before.version
        if before is not self._released and not is_outdated:
            return False
        nodes = self._next_nodes(members)
        if not nodes or (before is not None and nodes == before.nodes and not is_outdated):
            return False
        self.topology = Topology(1 + max(seen, -1 if before is None else before.version), nodes)
        self._is_own = True
        self._release(members)
        return True

    def _next_slots(self, owned: Mapping[str, KeyGroups], members: Mapping[str, Member]) -> dict[str, KeyGroups]:
        """Return who is to be shown as the owner of which slots: who is to have them, if it can, or who has them.

        Who gains slots gives none to others in the same step: it shows them before others do.
        """
        target = {shard.master: shard.slots for shard in self.shards}
        moves = [
            (source, name, moved)
            for name, slots in _wishes(target, owned, members).items()
            for source, moved in _sources(slots - owned.get(name, NONE), owned)
        ]
        handovers = {(source, name): self._handovers.get((source, name), {}) for source, name, _ in moves}
        self._handovers = handovers
        slots = dict(owned)
        givers: set[str] = set()
        gainers: set[str] = set()
        # Slots that nobody can be asked for come first: they need wait for no one.
        for source, name, moved in sorted(moves, key=lambda move: _is_shown(move[0], members)):
            if not _may_follow(members.get(source), members.get(name), handovers[source, name]):
                continue
            if _is_shown(source, members):
                if source in gainers or name in givers:
                    continue
                givers.add(source)
            gainers.add(name)
            slots[name] = slots.get(name, NONE) | moved
            if source:
                slots[source] -= moved
        return slots

    def _release(self, members: Mapping[str, Member]) -> None:
        """Find those who have to show the topology before others may: who is here, and gained slots."""
        topology, released = self.topology, self._released
        if topology is None or topology is released:
            return
        show_it = frozenset(name for name, member in members.items() if member.shown == topology.version)
        had = {} if released is None else {node.id: node.slots for node in released.nodes}
        first = frozenset(
            node.id
            for node in topology.nodes
            if node.slots - had.get(node.id, NONE)
            and (member := members.get(node.id)) is not None
            and member.is_here
            and node.id not in show_it
        )
        self._ahead = first | show_it  # those who show it already are told nothing older
        if not first:
            self._released = topology

    def _wants(self, member: Member) -> KeyGroups:
        """Return what a member is to hold: all that is planned, and all that it shows, or may still show."""
        needed = NONE
        for shard in self.shards:
            if member.id in shard.members:
                needed |= shard.slots
        topology = self.topology
        node = None if topology is None else topology.by_id.get(member.id)
        if topology is not None and node is not None:
            needed |= topology.master_of(node).slots
        if topology is not None and member.shown == topology.version:
            return needed
        return needed | self._wanted.get(member.id, member.held)


def _shards_of(topology: Topology) -> tuple[Shard, ...]:
    return tuple(
        Shard(master.id, tuple(each.id for each in topology.replicas(master)), master.slots)
        for master in topology.masters
    )


def _node(
    name: str,
    before: Mapping[str, Node],
    members: Mapping[str, Member],
    slots: Mapping[str, KeyGroups],
    master: str | None,
) -> Node:
    member = members.get(name)
    where = before[name] if member is None else member
    shown = slots.get(name if master is None else master, NONE)
    health = Health.FAIL
    if member is not None and member.is_here:
        health = Health.LOADING if shown - member.held else Health.ONLINE
    return Node(name, where.host, where.port, slots.get(name, NONE), master, health)


def _may_follow(giver: Member | None, taker: Member | None, handover: Handover) -> bool:
    """Tell whether keys that one answers may be asked of another: it knows all the jobs, and readers lose no epochs.

    The epochs are those of the moment when this was asked first, so that a taker that is always a little behind does
    not wait for ever. Those of one that is away do not count: nobody reads them.
    """
    if giver is None or taker is None:
        return True
    for job, seen in giver.jobs.items():
        handover.setdefault(job, (seen.term, seen.epoch))
        found = taker.jobs.get(job)
        if found is None or (giver.is_here and (found.term, found.epoch) < handover[job]):
            return False
    return True


def _is_shown(source: str, members: Mapping[str, Member]) -> bool:
    return source in members and members[source].is_here


def _wishes(
    target: Mapping[str, KeyGroups], owned: Mapping[str, KeyGroups], members: Mapping[str, Member]
) -> dict[str, KeyGroups]:
    """Return each slot's best owner now; all slots that are owned, or are to be owned, are there once."""

    def can(name: str) -> KeyGroups:
        return members[name].can_answer if name in members else NONE

    wishes: dict[str, KeyGroups] = {}
    left = ALL
    for choice in (
        ((name, slots & can(name)) for name, slots in target.items()),
        ((name, slots & can(name)) for name, slots in owned.items()),
        ((name, can(name)) for name in (*target, *(name for name, slots in owned.items() if slots))),
        owned.items(),
        target.items(),
    ):
        for name, slots in choice:
            if found := slots & left:
                wishes[name] = wishes.get(name, NONE) | found
                left -= found
    return wishes


def _sources(slots: KeyGroups, owned: Mapping[str, KeyGroups]) -> Iterator[tuple[str, KeyGroups]]:
    """Iterate over who has some of these slots, an empty name for nobody, and which."""
    for name, theirs in owned.items():
        if found := slots & theirs:
            yield name, found
            slots -= found
    if slots:
        yield "", slots
