"""Plan the shards: which servers form a shard, and which slots each shard should own. Pure; makes no topology.

A shard is a master and its replicas, as in Redis Cluster. `n` members form max(1, n // (replicas + 1)) shards; the
remaining members become further replicas. Slots are spread evenly. Members of one shard are in different zones and on
different hosts where possible. Within these rules members, roles and slots stay where they are. Planning again gives
the same plan: nothing moves until a member joins or leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, product

from resp_server.serving.applier_process import Visible
from state_backend.model.slot_set import ALL, NONE, SlotSet
from state_backend.model.slots import SLOTS

# A server that dies may be restarted with its slots intact, so no other server loads them before this time is over.
RESTART_GRACE_S = 1.0
# The same if other members of the shard answer meanwhile: there is no hurry (guess: a server starts within 3 s).
RETURN_GRACE_S = 10.0


@dataclass(frozen=True)
class Member:
    """A state server as the planner sees it.

    Args:
        join_order: A number that grows with each server that joins.
        absent_s: Seconds since the last report; 0 while reports arrive.
        is_connected: A silent server may still be connected.
        zone: Servers of one zone may fail together; empty: the host is the zone.
        has_room: Its store can be written; without room readers get no newer epochs.
    """

    id: str
    host: str
    port: int
    join_order: int
    owned_slots: SlotSet = NONE
    topology_version: int = -1
    absent_s: float = 0.0
    is_draining: bool = False
    is_connected: bool = True
    jobs: Mapping[str, Visible] = field(default_factory=dict)
    zone: str = ""
    has_room: bool = True

    @property
    def address(self) -> str:
        """The address that clients connect to."""
        return f"{self.host}:{self.port}"

    @property
    def is_alive(self) -> bool:
        """Return whether the server reports."""
        return self.absent_s == 0

    @property
    def can_answer(self) -> SlotSet:
        """The slots that the server can answer now."""
        return self.owned_slots if self.is_alive else NONE


@dataclass(frozen=True)
class Shard:
    """A master, its replicas, and the slots that all of them should own."""

    master: str
    replicas: tuple[str, ...] = ()
    slots: SlotSet = NONE

    @property
    def members(self) -> tuple[str, ...]:
        """The ids of all members, the master's first."""
        return (self.master, *self.replicas)


def plan(shards: Sequence[Shard], members: Mapping[str, Member], replicas: int) -> tuple[Shard, ...]:
    """Return the shards that members should form, given the present ones, with `replicas` per master."""
    eligible = _eligible(shards, members)
    if not eligible:
        return tuple(shards)
    count = max(1, len(eligible) // (replicas + 1))
    remaining = [new for shard in shards if (new := _without_absent(shard, eligible, members)) is not None]
    while len(remaining) > count:
        remaining.remove(min(reversed(remaining), key=lambda shard: (len(shard.members), len(shard.slots))))
    assigned = set(chain.from_iterable(shard.members for shard in remaining))
    free = [name for name in eligible if name not in assigned]
    while len(remaining) < count:
        remaining.append(Shard(free.pop(0) if free else _pop_replica(remaining)))
    for name in free:

        def rank(shard: Shard, name: str = name) -> tuple[int, int, int]:
            near = sum(_nearness(members[name], members[mate]) for mate in shard.members)
            return len(shard.members), near, -len(members[name].owned_slots & shard.slots)

        smallest = min(remaining, key=rank)
        _replace(remaining, smallest, replace(smallest, replicas=(*smallest.replicas, name)))
    _balance(remaining)
    _separate_zones(remaining, members)
    slots = spread_slots(
        [shard.slots for shard in remaining], [members[shard.master].owned_slots for shard in remaining]
    )
    return tuple(replace(shard, slots=each) for shard, each in zip(remaining, slots, strict=True))


def _eligible(shards: Sequence[Shard], members: Mapping[str, Member]) -> list[str]:
    """Return the ids of members that may serve, in join order: present or likely to return, and not draining.

    A member without room is left out, unless another member of its shard has room and so has the newer epochs. If most
    members have no room, the others would soon be full as well, so room does not count.
    """
    others: dict[str, list[Member]] = {member.id: [] for member in members.values()}
    for shard in shards:
        alive = [members[name] for name in shard.members if name in members and members[name].is_alive]
        for name in shard.members:
            others[name] = [mate for mate in alive if mate.id != name]
    eligible = [
        each
        for each in sorted(members.values(), key=lambda each: each.join_order)
        if not each.is_draining and each.absent_s < (RETURN_GRACE_S if others[each.id] else RESTART_GRACE_S)
    ]
    with_room = [each for each in eligible if each.has_room or any(mate.has_room for mate in others[each.id])]
    return [each.id for each in (with_room if 2 * len(with_room) >= len(eligible) else eligible)]


def _without_absent(shard: Shard, eligible: Sequence[str], members: Mapping[str, Member]) -> Shard | None:
    """Return a shard without members that are not eligible, its master alive if possible; None if none is left."""
    present = [name for name in shard.members if name in eligible]
    if not present:
        return None
    alive = [members[name] for name in present if members[name].is_alive]
    is_orphan = present[0] != shard.master or not members[present[0]].is_alive
    master = _best_candidate(alive, shard.slots).id if alive and is_orphan else present[0]
    return Shard(master, tuple(name for name in present if name != master), shard.slots)


def _best_candidate(candidates: Sequence[Member], slots: SlotSet) -> Member:
    """Return the member that can answer most slots; of equal ones, the one with the newest epochs of most jobs."""
    newest: dict[str, tuple[int, int]] = {}
    for candidate in candidates:
        for job, seen in candidate.jobs.items():
            newest[job] = max(newest.get(job, (0, -1)), (seen.term, seen.epoch))

    def rank(member: Member) -> tuple[int, int, int]:
        firsts = sum((seen.term, seen.epoch) == newest[job] for job, seen in member.jobs.items())
        return len(member.owned_slots & slots), firsts, -member.join_order

    return max(candidates, key=rank)


def _pop_replica(shards: list[Shard]) -> str:
    """Take the last replica out of the largest shard."""
    largest = max(shards, key=lambda shard: len(shard.replicas))
    _replace(shards, largest, replace(largest, replicas=largest.replicas[:-1]))
    return largest.replicas[-1]


def _balance(shards: list[Shard]) -> None:
    """Move replicas until the sizes of all shards differ by one at most."""
    while True:
        smallest = min(shards, key=lambda shard: len(shard.members))
        if len(max(shards, key=lambda shard: len(shard.members)).members) - len(smallest.members) < 2:
            return
        name = _pop_replica(shards)
        _replace(shards, smallest, replace(smallest, replicas=(*smallest.replicas, name)))


def _nearness(one: Member, other: Member) -> int:
    """Return how likely it is that two members fail together, 0 to 3: a common zone counts more than a common host."""
    is_same_host = one.host == other.host
    is_same_zone = (one.zone or one.host) == (other.zone or other.host)
    return 2 * is_same_zone + is_same_host


def _separate_zones(shards: list[Shard], members: Mapping[str, Member]) -> None:
    """Exchange replicas between shards as long as this separates members that may fail together."""
    if len({(member.zone, member.host) for member in members.values()}) == 1:
        return

    def nearness(names: Sequence[str]) -> int:
        return sum(_nearness(members[one], members[other]) for one, other in combinations(names, 2))

    def exchanged(at: int, other: int) -> tuple[Shard, Shard] | None:
        one, two = shards[at], shards[other]
        before = nearness(one.members) + nearness(two.members)
        for mine, theirs in product(one.replicas, two.replicas):
            new_one = replace(one, replicas=tuple(theirs if name == mine else name for name in one.replicas))
            new_two = replace(two, replicas=tuple(mine if name == theirs else name for name in two.replicas))
            if nearness(new_one.members) + nearness(new_two.members) < before:
                return new_one, new_two
        return None

    # The loop ends: each exchange lowers a sum of small numbers.
    is_better = True
    while is_better:
        is_better = False
        for at, other in combinations(range(len(shards)), 2):
            if nearness(shards[at].members) + nearness(shards[other].members) and (found := exchanged(at, other)):
                shards[at], shards[other] = found
                is_better = True


def _replace(shards: list[Shard], old: Shard, new: Shard) -> None:
    shards[shards.index(old)] = new


def spread_slots(current: Sequence[SlotSet], owned: Sequence[SlotSet]) -> list[SlotSet]:
    """Return all slots spread evenly over the shards. As few slots as possible move.

    They move first to masters that can answer them already.

    Args:
        owned: For each shard the slots that its master can answer.
    """
    base, larger = divmod(SLOTS, len(current))
    by_size = sorted(range(len(current)), key=lambda at: -len(current[at]))
    quota = {at: base + (rank < larger) for rank, at in enumerate(by_size)}
    slots = list(current)
    pool = ALL
    for slot in slots:
        pool -= slot
    gaining = [at for at in range(len(slots)) if len(slots[at]) < quota[at]]
    owned_by_gaining = SlotSet.of(chain.from_iterable(owned[at].ranges for at in gaining))
    for at, each in enumerate(slots):
        if (surplus := len(each) - quota[at]) > 0:
            lost = _pick(each & owned_by_gaining, surplus, pool, smallest_first=False)
            lost |= _pick(each - lost, surplus - len(lost), pool, smallest_first=True)
            slots[at] -= lost
            pool |= lost
    for preferred in (owned, [ALL] * len(slots)):
        for at in gaining:
            gained = _pick(pool & preferred[at], quota[at] - len(slots[at]), slots[at], smallest_first=False)
            slots[at] |= gained
            pool -= gained
    return slots


def _pick(groups: SlotSet, count: int, beside: SlotSet, *, smallest_first: bool) -> SlotSet:
    """Return `count` of these slots, or all: in few ranges, next to the slots `beside` where possible.

    Of the last range only a part may be needed: the end that touches `beside`. If neither does, it is the front, or the
    back with `smallest_first`.
    """

    def touches(bounds: tuple[int, int]) -> bool:
        return bounds[0] - 1 in beside or bounds[1] + 1 in beside

    def rank(bounds: tuple[int, int]) -> tuple[bool, int]:
        size = bounds[1] - bounds[0] + 1
        return (smallest_first or not touches(bounds)), size if smallest_first else -size

    picked: list[tuple[int, int]] = []
    for first, last in sorted(groups.ranges, key=rank):
        size = min(count, last - first + 1)
        if size:
            is_front = first - 1 in beside if smallest_first else last + 1 not in beside or first - 1 in beside
            picked.append((first, first + size - 1) if is_front else (last - size + 1, last))
            count -= size
    return SlotSet.of(picked)
