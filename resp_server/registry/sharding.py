"""Which servers make a shard, and which slots each shard is to have in the end: pure, and no topology yet.

A shard is a master and its replicas, as in Redis Cluster. `n` members make max(1, n // (replicas + 1)) shards; those
left over are further replicas. Slots are spread evenly, members of a shard are of different zones and hosts where that
can be, and members, roles and slots stay where they are as far as that allows. What is planned once is planned again:
nothing moves until members come or go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, product

from resp_server.serving.appliers import Visible
from state_backend.model.key_groups import ALL, NONE, KeyGroups
from state_backend.model.slots import SLOTS

# A server that dies may be started again and have its slots as they were: nobody else begins to load them before.
GRACE_S = 1.0
# Where others answer what it had, there is no hurry (guess: a server starts in two or three).
RETURN_S = 10.0


@dataclass(frozen=True)
class Member:
    """A state server as the registry knows it.

    joined: a number; those who came first have lower ones. away_s: how long nothing was heard of it; 0 while it is
    there. held: what it can answer. shown: the version of the topology that it shows. is_connected: a server that is
    silent may be. zone: servers of one may be lost together; empty: those of its host. has_room: its store can be
    written; where it cannot, readers get no newer epochs.
    """

    id: str
    host: str
    port: int
    joined: int
    held: KeyGroups = NONE
    shown: int = -1
    away_s: float = 0.0
    wants_nothing: bool = False
    is_connected: bool = True
    jobs: Mapping[str, Visible] = field(default_factory=dict)
    zone: str = ""
    has_room: bool = True

    @property
    def address(self) -> str:
        """Where clients find it."""
        return f"{self.host}:{self.port}"

    @property
    def is_here(self) -> bool:
        """Tell whether it was heard just now."""
        return self.away_s == 0

    @property
    def can_answer(self) -> KeyGroups:
        """The slots that it can be asked for now."""
        return self.held if self.is_here else NONE


@dataclass(frozen=True)
class Shard:
    """A master, its replicas, and the slots that all of them are to hold."""

    master: str
    replicas: tuple[str, ...] = ()
    slots: KeyGroups = NONE

    @property
    def members(self) -> tuple[str, ...]:
        """All of them, the master first."""
        return (self.master, *self.replicas)


def plan(shards: Sequence[Shard], members: Mapping[str, Member], replicas: int) -> tuple[Shard, ...]:
    """Return the shards that members are to make, from those that they make now, with `replicas` of each master."""
    fit = _fit(shards, members)
    if not fit:
        return tuple(shards)
    count = max(1, len(fit) // (replicas + 1))
    kept = [made for shard in shards if (made := _without(shard, fit, members)) is not None]
    while len(kept) > count:
        kept.remove(min(reversed(kept), key=lambda shard: (len(shard.members), len(shard.slots))))
    taken = set(chain.from_iterable(shard.members for shard in kept))
    free = [name for name in fit if name not in taken]
    while len(kept) < count:
        kept.append(Shard(free.pop(0) if free else _taken_from(kept)))
    for name in free:

        def rank(shard: Shard, name: str = name) -> tuple[int, int, int]:
            near = sum(_nearness(members[name], members[mate]) for mate in shard.members)
            return len(shard.members), near, -len(members[name].held & shard.slots)

        smallest = min(kept, key=rank)
        _replace(kept, smallest, replace(smallest, replicas=(*smallest.replicas, name)))
    _level(kept)
    _part(kept, members)
    slots = spread([shard.slots for shard in kept], [members[shard.master].held for shard in kept])
    return tuple(replace(shard, slots=each) for shard, each in zip(kept, slots, strict=True))


def _fit(shards: Sequence[Shard], members: Mapping[str, Member]) -> list[str]:
    """Return those who count, the first to join first: they are there, or may come back, and do not want to go.

    One without room does not, unless others of its shard have the newer epochs. But where most have none the rest
    would not have it for long: then room does not matter.
    """
    mates: dict[str, list[Member]] = {each.id: [] for each in members.values()}
    for shard in shards:
        here = [members[name] for name in shard.members if name in members and members[name].is_here]
        for name in shard.members:
            mates[name] = [mate for mate in here if mate.id != name]
    fit = [
        each
        for each in sorted(members.values(), key=lambda each: each.joined)
        if not each.wants_nothing and each.away_s < (RETURN_S if mates[each.id] else GRACE_S)
    ]
    roomy = [each for each in fit if each.has_room or any(mate.has_room for mate in mates[each.id])]
    return [each.id for each in (roomy if 2 * len(roomy) >= len(fit) else fit)]


def _without(shard: Shard, fit: Sequence[str], members: Mapping[str, Member]) -> Shard | None:
    """Return a shard without those who are gone, with a master who is there if there is one; None if all are gone."""
    left = [name for name in shard.members if name in fit]
    if not left:
        return None
    here = [members[name] for name in left if members[name].is_here]
    is_orphan = left[0] != shard.master or not members[left[0]].is_here
    master = _best(here, shard.slots).id if here and is_orphan else left[0]
    return Shard(master, tuple(name for name in left if name != master), shard.slots)


def _best(candidates: Sequence[Member], slots: KeyGroups) -> Member:
    """Return who can answer most slots, at the newest epochs of most jobs."""
    newest: dict[str, tuple[int, int]] = {}
    for each in candidates:
        for job, seen in each.jobs.items():
            newest[job] = max(newest.get(job, (0, -1)), (seen.term, seen.epoch))

    def rank(member: Member) -> tuple[int, int, int]:
        firsts = sum((seen.term, seen.epoch) == newest[job] for job, seen in member.jobs.items())
        return len(member.held & slots), firsts, -member.joined

    return max(candidates, key=rank)


def _taken_from(shards: list[Shard]) -> str:
    """Take the last replica out of the largest shard."""
    largest = max(shards, key=lambda shard: len(shard.replicas))
    _replace(shards, largest, replace(largest, replicas=largest.replicas[:-1]))
    return largest.replicas[-1]


def _level(shards: list[Shard]) -> None:
    """Move replicas until no shard has two members more than another."""
    while True:
        smallest = min(shards, key=lambda shard: len(shard.members))
        if len(max(shards, key=lambda shard: len(shard.members)).members) - len(smallest.members) < 2:
            return
        name = _taken_from(shards)
        _replace(shards, smallest, replace(smallest, replicas=(*smallest.replicas, name)))


def _nearness(one: Member, other: Member) -> int:
    """Tell how likely two members are lost together: all else being equal, zones count more than hosts."""
    is_same_host = one.host == other.host
    is_same_zone = (one.zone or one.host) == (other.zone or other.host)
    return 2 * is_same_zone + is_same_host


def _part(shards: list[Shard], members: Mapping[str, Member]) -> None:
    """Exchange replicas of shards while members that may be lost together come apart by that."""
    if len({(member.zone, member.host) for member in members.values()}) == 1:
        return

    def near(mates: Sequence[str]) -> int:
        return sum(_nearness(members[one], members[other]) for one, other in combinations(mates, 2))

    def exchanged(at: int, other: int) -> tuple[Shard, Shard] | None:
        one, two = shards[at], shards[other]
        before = near(one.members) + near(two.members)
        for mine, theirs in product(one.replicas, two.replicas):
            made = replace(one, replicas=tuple(theirs if name == mine else name for name in one.replicas))
            met = replace(two, replicas=tuple(mine if name == theirs else name for name in two.replicas))
            if near(made.members) + near(met.members) < before:
                return made, met
        return None

    # Each exchange takes away from a sum of small numbers, so that it comes to an end.
    is_better = True
    while is_better:
        is_better = False
        for at, other in combinations(range(len(shards)), 2):
            if near(shards[at].members) + near(shards[other].members) and (found := exchanged(at, other)):
                shards[at], shards[other] = found
                is_better = True


def _replace(shards: list[Shard], old: Shard, new: Shard) -> None:
    shards[shards.index(old)] = new


def spread(given: Sequence[KeyGroups], held: Sequence[KeyGroups]) -> list[KeyGroups]:
    """Spread all slots evenly over shards that have some: as few as can be move, if possible to who holds them."""
    base, larger = divmod(SLOTS, len(given))
    by_size = sorted(range(len(given)), key=lambda at: -len(given[at]))
    quota = {at: base + (rank < larger) for rank, at in enumerate(by_size)}
    slots = list(given)
    pool = ALL
    for each in slots:
        pool -= each
    takers = [at for at in range(len(slots)) if len(slots[at]) < quota[at]]
    known = KeyGroups.of(chain.from_iterable(held[at].ranges for at in takers))
    for at, each in enumerate(slots):
        if (surplus := len(each) - quota[at]) > 0:
            lost = _some(each & known, surplus, pool, smallest_first=False)
            lost |= _some(each - lost, surplus - len(lost), pool, smallest_first=True)
            slots[at] -= lost
            pool |= lost
    for wanted in (held, [ALL] * len(slots)):
        for at in takers:
            gained = _some(pool & wanted[at], quota[at] - len(slots[at]), slots[at], smallest_first=False)
            slots[at] |= gained
            pool -= gained
    return slots


def _some(groups: KeyGroups, count: int, beside: KeyGroups, *, smallest_first: bool) -> KeyGroups:
    """Return so many of these slots, or all: in few ranges, and beside others where that can be."""

    def touches(bounds: tuple[int, int]) -> bool:
        return bounds[0] - 1 in beside or bounds[1] + 1 in beside

    def rank(bounds: tuple[int, int]) -> tuple[bool, int]:
        size = bounds[1] - bounds[0] + 1
        return (smallest_first or not touches(bounds)), size if smallest_first else -size

    taken: list[tuple[int, int]] = []
    for first, last in sorted(groups.ranges, key=rank):
        size = min(count, last - first + 1)
        if size:
            is_head = first - 1 in beside if smallest_first else last + 1 not in beside or first - 1 in beside
            taken.append((first, first + size - 1) if is_head else (last - size + 1, last))
            count -= size
    return KeyGroups.of(taken)
