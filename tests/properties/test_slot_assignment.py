"""State servers come, go, hang and load: each asked server leads to an answer, and in the end nothing moves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from resp_server.cluster.topology import Health, Topology
from resp_server.registry.assignment import Assignment
from resp_server.registry.sharding import RESTART_GRACE_S, RETURN_GRACE_S, Member, Shard, plan, spread_slots
from resp_server.serving.applier_process import Visible
from state_backend.model.slot_set import ALL, NONE, SlotSet
from state_backend.model.slots import SLOTS

STEPS_MAX = 60
SERVERS_MAX = 9


def of(name: str, join_order: int = 0, **given: Any) -> Member:
    return Member(name, "127.0.0.1", 7000 + int(name[1:]), join_order, **given)


@dataclass
class Server:
    """A server in the play: it loads its desired slots when it gets to it, and serves the topology that it is sent."""

    name: str
    join_order: int
    desired_slots: SlotSet = NONE
    owned_slots: SlotSet = NONE
    topology: Topology | None = None
    absent_s: float = 0.0
    is_draining: bool = False
    has_room: bool = True
    is_up: bool = True
    epoch: int = 0
    versions: list[int] = field(default_factory=list)

    def member(self) -> Member:
        version = -1 if self.topology is None else self.topology.version
        jobs = {"job": Visible("g", 1, self.epoch)}
        return of(
            self.name,
            self.join_order,
            owned_slots=self.owned_slots,
            topology_version=version,
            absent_s=self.absent_s,
            is_draining=self.is_draining,
            is_connected=not self.absent_s,
            jobs=jobs,
            has_room=self.has_room,
        )


def topology_of(server: Server) -> Topology:
    assert server.topology is not None
    return server.topology


class Play:
    """A registry's decisions and servers that follow them, one small thing at a time."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.assignment = Assignment(replicas)
        self.servers: dict[str, Server] = {}
        self.join_order = 0
        self.reported: dict[str, Member] = {}
        self.has_lost_nobody = False

    def join(self) -> None:
        self.join_order += 1
        name = f"s{self.join_order}"
        self.servers[name] = Server(name, self.join_order)

    def report(self, server: Server) -> None:
        self.reported[server.name] = server.member()

    def step(self) -> bool:
        for server in self.servers.values():
            if server.absent_s:
                self.report(server)
        before = self.assignment.topology
        is_new = self.assignment.update(self.reported)
        after = self.assignment.topology
        if is_new:
            assert after is not None
            assert before is None or after.version > before.version
        for name in list(self.reported):
            if not self.assignment.includes(name) and self.servers[name].absent_s:
                del self.reported[name]
        return is_new

    def tell(self, server: Server) -> None:
        directive = self.assignment.directive_for(server.name)
        if directive is None or server.absent_s:
            return
        if server.topology is not None:
            assert directive.topology.version >= server.topology.version
        server.topology = directive.topology
        server.desired_slots = directive.desired_slots
        server.owned_slots &= directive.desired_slots
        self.check()

    def load(self, server: Server, part: SlotSet = ALL) -> None:
        if server.has_room and not server.absent_s:
            server.owned_slots |= server.desired_slots & part

    def do(self, kind: str, *given_: Any) -> None:
        """Have something happen."""
        if kind == "join":
            if self.join_order < SERVERS_MAX:
                self.join()
            return
        if kind == "step":
            self.step()
            return
        if kind == "settle":
            self.settle()
            return
        server = list(self.servers.values())[given_[0] % len(self.servers)]
        if kind == "lose":
            server.absent_s = 0.5
        elif kind == "forget" and server.absent_s:
            server.absent_s = RETURN_GRACE_S
        elif kind == "return" and server.absent_s:
            server.absent_s, server.is_draining = 0.0, False
            if given_[1]:
                server.owned_slots = NONE
            self.report(server)
        elif kind == "drain" and not server.absent_s:
            server.is_draining = True
        elif kind == "fill" and not server.absent_s:
            server.has_room = not server.has_room
        elif kind == "report" and not server.absent_s:
            self.report(server)
        elif kind == "tell":
            self.tell(server)
        elif kind == "load":
            self.load(server, SlotSet.parse(given_[1]))

    def check(self) -> None:
        """Ask each server for all that is shown anywhere: nobody is sent round in circles by those that are up.

        If nobody was ever lost, who answers in the end has the slot.
        """
        up = {each.name: each for each in self.servers.values() if not each.absent_s and each.topology is not None}
        firsts = {first for each in up.values() for node in topology_of(each).masters for first, _ in node.slots.ranges}
        for start in up:
            for first in firsts:
                at, forwarders = start, 0
                while at in up and first in topology_of(up[at]).owners:
                    owner = topology_of(up[at]).owners[first].id
                    if owner == at:
                        break
                    at, forwarders = owner, forwarders + 1
                    assert forwarders <= len(self.servers), f"slot {first}: sent in circles"
                if self.has_lost_nobody:
                    assert first in up[at].owned_slots, f"slot {first}: {at} is asked, and does not have it"

    def settle(self) -> int:
        """Let everything happen that is under way; return in how many rounds."""
        for rounds in range(STEPS_MAX):
            before = (
                self.assignment.topology,
                [(each.desired_slots, each.owned_slots, each.topology) for each in self.servers.values()],
            )
            for server in self.servers.values():
                if not server.absent_s:
                    self.report(server)
            self.step()
            for server in self.servers.values():
                self.tell(server)
                self.load(server)
            after = (
                self.assignment.topology,
                [(each.desired_slots, each.owned_slots, each.topology) for each in self.servers.values()],
            )
            if before == after:
                return rounds
        raise AssertionError(f"nothing is settled after {STEPS_MAX} rounds")

    def check_settled(self) -> None:
        here = [each for each in self.servers.values() if not each.absent_s]
        topology = self.assignment.topology
        if all(each.is_draining for each in here):
            return
        assert topology is not None
        assert sum(len(node.slots) for node in topology.masters) == SLOTS
        shards = self.assignment.shards
        mates = {name: [self.servers[mate] for mate in each.members] for each in shards for name in each.members}
        may_serve = [each for each in here if not each.is_draining]
        serving = [each for each in may_serve if any(mate.has_room for mate in mates.get(each.name, [each]))]
        if 2 * len(serving) < len(may_serve) or not all(each.has_room for each in serving):
            return  # who has no room cannot have what it is to have
        assert {each.name for each in serving} == set(mates)
        owners = {node.id for node in topology.masters if node.slots}
        assert owners <= {each.name for each in serving}
        assert len(owners) == max(1, len(serving) // (self.replicas + 1))
        sizes = [len(topology.node(name).slots) for name in owners]
        assert max(sizes) - min(sizes) <= 1
        copies = [1 + len(list(topology.replicas(topology.node(name)))) for name in owners]
        assert sum(copies) == len(serving)
        assert max(copies) - min(copies) <= 1
        for each in serving:
            assert each.desired_slots == each.owned_slots == topology.master_of(topology.node(each.name)).slots
            assert topology.node(each.name).health is Health.ONLINE


SERVER_NUMBERS = st.integers(0, SERVERS_MAX)
EVENTS_WITHOUT_LOSS = (
    st.just(("join",)),
    st.tuples(st.just("drain"), SERVER_NUMBERS),
    st.tuples(st.just("fill"), SERVER_NUMBERS),
    st.tuples(st.just("report"), SERVER_NUMBERS),
    st.tuples(st.just("tell"), SERVER_NUMBERS),
    st.tuples(st.just("load"), SERVER_NUMBERS, st.sampled_from(["0-4000", "8000-12000", "0-16383"])),
    st.just(("step",)),
    st.just(("settle",)),
)
LOSSES = (
    st.tuples(st.just("lose"), SERVER_NUMBERS),
    st.tuples(st.just("forget"), SERVER_NUMBERS),
    st.tuples(st.just("return"), SERVER_NUMBERS, st.booleans()),
)


@settings(deadline=None)
@given(st.integers(0, 2), st.integers(1, 5), st.lists(st.one_of(*EVENTS_WITHOUT_LOSS), max_size=60))
def test_each_node_leads_to_owner_while_slots_move(replicas: int, first: int, events: list[tuple[Any, ...]]) -> None:
    play = Play(replicas)
    for _ in range(first):
        play.join()
    play.settle()
    play.has_lost_nobody = True
    for event in events:
        play.do(*event)
        play.check()


@settings(deadline=None)
@given(st.integers(0, 2), st.integers(1, 5), st.lists(st.one_of(*EVENTS_WITHOUT_LOSS, *LOSSES), max_size=40))
def test_assignment_settles_with_all_slots_answered_after_any_events(
    replicas: int, first: int, events: list[tuple[Any, ...]]
) -> None:
    play = Play(replicas)
    for _ in range(first):
        play.join()
    for event in events:
        play.do(*event)
    for server in play.servers.values():
        if server.absent_s:
            server.absent_s = RETURN_GRACE_S
    play.settle()
    play.check_settled()
    version = None if play.assignment.topology is None else play.assignment.topology.version
    assert play.settle() == 0
    assert version == (None if play.assignment.topology is None else play.assignment.topology.version)


def test_server_with_newer_topology_is_sent_no_older_one() -> None:
    play = Play(0)
    for count in (1, 2):
        for _ in range(count):
            play.join()
        for server in play.servers.values():
            play.report(server)
        play.step()
        for server in play.servers.values():
            play.tell(server)
            play.load(server)
            play.report(server)
    play.step()  # both that came later hold their slots, and are to show that first
    first = play.servers["s2"]
    play.tell(first)
    play.report(first)
    play.step()
    assert play.assignment.topology is first.topology is not play.assignment.released
    play.tell(first)
    assert play.assignment.topology is first.topology


SHARES = st.lists(st.integers(0, SLOTS - 1), min_size=0, max_size=5, unique=True).map(sorted)


def _parts(cuts: list[int]) -> list[SlotSet]:
    ends = [0, *cuts, SLOTS]
    return [SlotSet.of([(first, last - 1)]) for first, last in pairwise(ends) if first < last]


@given(SHARES, st.lists(st.integers(0, 5), max_size=6))
def test_slots_are_spread_evenly_with_fewest_moves(cuts: list[int], gone: list[int]) -> None:
    given_ = [NONE if at in gone else each for at, each in enumerate(_parts(cuts))]
    made = spread_slots(given_, [NONE] * len(given_))
    sizes = [len(each) for each in made]
    assert sum(sizes) == SLOTS
    assert max(sizes) - min(sizes) <= 1
    assert not any(one & other for at, one in enumerate(made) for other in made[:at])
    surplus = sum(max(0, len(each) - SLOTS // len(given_) - 1) for each in given_)
    surplus_max = sum(max(0, len(each) - SLOTS // len(given_)) for each in given_)
    lost = sum(len(before - after) for before, after in zip(given_, made, strict=True))
    assert surplus <= lost <= surplus_max
    assert spread_slots(made, [NONE] * len(made)) == made


def test_server_that_joins_or_leaves_moves_little_more_than_its_share() -> None:
    slots = [ALL]
    for count in range(2, 40):
        before, slots = slots, spread_slots([*slots, NONE], [NONE] * count)
        assert sum(len(old - new) for old, new in zip(before, slots, strict=False)) == len(slots[-1])
        assert len(slots[-1]) == SLOTS // count
        assert sum(len(each.ranges) for each in slots) <= count * count // 2
    while len(slots) > 1:
        before = slots[:1] + slots[2:]
        slots = spread_slots(before, [NONE] * len(before))
        assert all(not old - new for old, new in zip(before, slots, strict=True))
    assert slots == [ALL]


def test_slots_are_assigned_to_servers_that_loaded_them() -> None:
    halves = [SlotSet.parse("0-8191"), SlotSet.parse("8192-16383")]
    owned_slots = SlotSet.parse("5000-7729,9000-11730")
    first, second, back = spread_slots([*halves, NONE], [NONE, NONE, owned_slots])
    assert not owned_slots - back
    assert len(back) == SLOTS // 3
    assert not first - halves[0]
    assert not second - halves[1]
    assert spread_slots([NONE, NONE], [halves[1], halves[0]]) == halves[::-1]


def _members(count: int, **of_first: Any) -> dict[str, Member]:
    made = {f"s{number}": of(f"s{number}", number, owned_slots=ALL) for number in range(1, count + 1)}
    made["s1"] = replace(made["s1"], **of_first)
    return made


def test_members_make_shards_of_master_and_its_replicas() -> None:
    for count, replicas, sizes in (
        (1, 0, [1]),
        (3, 0, [1, 1, 1]),
        (1, 1, [1]),
        (3, 1, [3]),
        (4, 1, [2, 2]),
        (7, 2, [4, 3]),
    ):
        shards = plan((), _members(count), replicas)
        assert [len(shard.members) for shard in shards] == sizes
        assert sorted(name for shard in shards for name in shard.members) == sorted(_members(count))


def test_replica_with_newest_epochs_replaces_lost_master() -> None:
    shards = (Shard("s1", ("s2", "s3"), ALL),)
    members = _members(3, absent_s=0.1)
    members["s2"] = replace(members["s2"], jobs={"job": Visible("g", 1, 7)})
    members["s3"] = replace(members["s3"], jobs={"job": Visible("g", 2, 3)})
    assert plan(shards, members, 2) == (Shard("s3", ("s1", "s2"), ALL),)
    members["s3"] = replace(members["s3"], owned_slots=NONE)
    assert plan(shards, members, 2) == (Shard("s2", ("s1", "s3"), ALL),)


def test_absent_server_keeps_its_slots_for_a_while_and_its_shard_for_longer() -> None:
    halves = [SlotSet.parse("0-8191"), SlotSet.parse("8192-16383")]
    alone = (Shard("s1", (), halves[0]), Shard("s2", (), halves[1]))
    assert plan(alone, _members(2, absent_s=RESTART_GRACE_S - 0.1), 0) == alone
    assert plan(alone, _members(2, absent_s=RESTART_GRACE_S), 0) == (Shard("s2", (), ALL),)
    pairs = (Shard("s1", ("s2",), halves[0]), Shard("s3", ("s4",), halves[1]))
    assert plan(pairs, _members(4, absent_s=RESTART_GRACE_S), 1) == (Shard("s2", ("s1",), halves[0]), pairs[1])
    assert len(plan(pairs, _members(4, absent_s=RETURN_GRACE_S), 1)) == 1


def test_full_server_is_relieved_unless_replicas_are_complete_or_most_are_full() -> None:
    halves = [SlotSet.parse("0-8191"), SlotSet.parse("8192-16383")]
    alone = (Shard("s1", (), halves[0]), Shard("s2", (), halves[1]))
    assert plan(alone, _members(2, has_room=False), 0) == (Shard("s2", (), ALL),)
    assert plan((Shard("s2", (), ALL),), _members(2, has_room=False), 0) == (Shard("s2", (), ALL),)
    pairs = (Shard("s1", ("s2",), halves[0]), Shard("s3", ("s4",), halves[1]))
    members = _members(4, has_room=False)
    assert plan(pairs, members, 1) == pairs
    members["s2"] = replace(members["s2"], has_room=False)
    assert plan(pairs, members, 1) == (Shard("s3", ("s4",), ALL),)
    members["s3"] = replace(members["s3"], has_room=False)
    members["s4"] = replace(members["s4"], has_room=False)
    assert plan(pairs, members, 1) == pairs


def _shown(play: Play) -> list[tuple[str, str, str]]:
    topology = play.assignment.topology
    assert topology is not None
    return [(node.id, str(node.slots), str(node.health)) for node in topology.nodes]


def test_slots_move_in_order_in_which_they_are_always_answered() -> None:
    play = Play(0)
    play.join()
    play.settle()
    assert _shown(play) == [("s1", "0-16383", "online")]
    play.join()
    first, second = play.servers.values()
    play.report(second)
    play.step()
    for server in (first, second):
        play.tell(server)
        play.report(server)
    play.step()
    play.tell(second)
    assert str(second.desired_slots) == "8192-16383"
    assert str(first.desired_slots) == "0-16383"
    assert _shown(play) == [("s1", "0-16383", "online"), ("s2", "", "online")]
    play.load(second, SlotSet.parse("8192-9000"))
    play.report(second)
    assert play.step()
    assert _shown(play)[1] == ("s2", "8192-9000", "online")
    directive = play.assignment.directive_for("s1")
    assert directive is not None and first.topology is not None
    assert directive.topology.version == first.topology.version, "the one who gains is told first"
    play.tell(second)
    play.report(second)
    play.step()
    play.tell(first)
    assert str(first.topology.node("s1").slots) == "0-8191,9001-16383"
    assert str(first.desired_slots) == "0-16383", "until it says that it shows that"
    play.report(first)
    play.step()
    play.tell(first)
    assert str(first.desired_slots) == "0-8191,9001-16383"


def test_slots_just_handed_over_return_if_new_owner_is_lost() -> None:
    play = Play(0)
    play.join()
    play.settle()
    play.join()
    first, second = play.servers.values()
    for _ in range(2):
        for server in (first, second):
            play.report(server)
        play.step()
        for server in (first, second):
            play.tell(server)
    play.load(second)
    play.report(second)
    assert play.step()
    assert _shown(play)[1] == ("s2", "8192-16383", "online")
    second.absent_s = 0.1
    play.step()
    assert _shown(play) == [("s1", "0-16383", "online"), ("s2", "", "fail")]


def test_server_takes_no_slots_before_it_knows_jobs_and_their_epochs() -> None:
    play = Play(0)
    play.join()
    play.settle()
    play.join()
    first, second = play.servers.values()
    first.epoch, second.epoch = 5, 4
    for _ in range(3):
        for server in (first, second):
            play.report(server)
        play.step()
        for server in (first, second):
            play.tell(server)
            play.load(server)
    assert _shown(play)[1] == ("s2", "", "online")
    play.reported["s2"] = replace(second.member(), jobs={})
    assert not play.step()
    first.epoch, second.epoch = 6, 5  # it is behind still, but has seen what was there when it was to take over
    play.report(first)
    play.report(second)
    assert play.step()
    assert _shown(play)[1] == ("s2", "8192-16383", "online")


def test_slots_of_lost_server_remain_until_others_loaded_them() -> None:
    play = Play(0)
    play.join()
    play.join()
    play.settle()
    first, second = play.servers.values()
    second.absent_s = RESTART_GRACE_S
    play.step()
    assert _shown(play) == [("s1", "0-8191", "online"), ("s2", "8192-16383", "fail")]
    play.tell(first)
    assert first.desired_slots == ALL
    play.load(first)
    play.report(first)
    play.step()
    assert _shown(play) == [("s1", "0-16383", "online")]


def test_next_registry_continues_from_shown_topology() -> None:
    play = Play(0)
    for _ in range(3):
        play.join()
    play.settle()
    served = _shown(play)
    for topology in (play.assignment.topology, None):
        version = max(each.topology.version for each in play.servers.values() if each.topology is not None)
        play.assignment = Assignment(0, topology)
        play.settle()
        assert _shown(play) == served
        assert play.assignment.topology is not None
        assert play.assignment.topology.version == version + 1


def test_server_does_not_return_to_address_of_another_server() -> None:
    play = Play(0)
    play.join()
    play.join()
    play.settle()
    first = play.servers["s1"]
    first.absent_s = 0.1
    play.step()
    play.servers["s3"] = third = Server("s3", 3)
    play.reported["s3"] = replace(third.member(), port=of("s1").port)
    play.step()
    assert [name for name, _, _ in _shown(play)] == ["s2", "s3"]


@given(
    zones=st.lists(st.sampled_from(["app", "rack1", "rack2", ""]), min_size=2, max_size=12),
    replicas=st.integers(1, 3),
)
def test_plan_with_zones_is_stable(zones: list[str], replicas: int) -> None:
    members = {f"s{at}": of(f"s{at}", at, zone=zone) for at, zone in enumerate(zones)}
    planned = plan((), members, replicas)
    assert plan(planned, members, replicas) == planned


def test_each_shard_keeps_member_when_executors_leave_in_any_order() -> None:
    shards: tuple[Shard, ...] = ()
    members = {}
    for at, zone in enumerate(["app", "app", "", "", "app", ""]):
        members[f"s{at}"] = of(f"s{at}", at, zone=zone)
        shards = plan(shards, members, 1)
    assert len(shards) == 3
    assert all({members[name].zone for name in shard.members} == {"app", ""} for shard in shards)


def test_replicas_are_on_different_hosts_if_possible() -> None:
    members = {f"s{at}": replace(of(f"s{at}", at), host=host) for at, host in enumerate(["a", "a", "b", "b"])}
    assert all({members[name].host for name in shard.members} == {"a", "b"} for shard in plan((), members, 1))
