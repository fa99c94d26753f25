"""However servers change and lag, no client of a proxy sees a job's epoch go back on a slot."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from resp_server.backends.servers.min_epochs import MinEpochs, has_reached
from resp_server.backends.servers.replica_choice import BEHIND_S_MAX, ReplicaChoice
from resp_server.session.epochs import (
    EMPTY_EPOCHS,
    REMOVED,
    Epochs,
    JobEpoch,
    SeenEpochs,
    indexes_behind,
    latest,
    union_of,
)

SERVERS = ("a", "b", "c")
JOBS = ("j", "k")
SLOTS = (0, 1, 2)


@dataclass
class Server:
    """A server that applies epochs in order, and a connection to it that may be behind in what it has told."""

    reached: dict[str, JobEpoch] = field(default_factory=dict)
    announced: dict[str, JobEpoch] = field(default_factory=dict)


class Guarded(RuleBasedStateMachine):
    """A proxy's book-keeping, beside what a client of each slot has seen."""

    @initialize()
    def begin(self) -> None:
        self.min_epochs = MinEpochs()
        self.by_name = {name: Server() for name in SERVERS}
        self.active = dict.fromkeys(SLOTS, "a")
        self.seen: dict[int, dict[str, JobEpoch]] = {slot: {} for slot in SLOTS}

    @rule(name=st.sampled_from(SERVERS), job=st.sampled_from(JOBS), term=st.integers(0, 1), epochs=st.integers(1, 3))
    def apply(self, name: str, job: str, term: int, epochs: int) -> None:
        server = self.by_name[name]
        before_term, before = server.reached.get(job, (0, -1))
        server.reached[job] = (before_term + term, before + epochs if not term else epochs)

    @rule(name=st.sampled_from(SERVERS))
    def tell(self, name: str) -> None:
        self.by_name[name].announced = dict(self.by_name[name].reached)

    @rule(slot=st.sampled_from(SLOTS), job=st.sampled_from(JOBS))
    def ask(self, slot: int, job: str) -> None:
        """A reply is of the epoch that was told last, as `STATE FOLLOW` has it."""
        server = self.by_name[self.active[slot]]
        if not has_reached(server.announced, self.min_epochs.by_slot[slot]):
            return
        server.announced = dict(server.reached)
        found = server.announced.get(job, REMOVED)
        assert found >= self.seen[slot].get(job, REMOVED), "time ran backwards"
        self.seen[slot][job] = found

    @rule(slots=st.sets(st.sampled_from(SLOTS), min_size=1), name=st.sampled_from(SERVERS))
    def move(self, slots: set[int], name: str) -> None:
        for slot in slots:
            before = self.active[slot]
            if before != name:
                self.min_epochs.raise_to([slot], dict(self.by_name[before].announced))
                self.active[slot] = name

    @invariant()
    def whoever_has_seen_more_than_the_min_epochs_is_asked(self) -> None:
        for slot in SLOTS:
            min_epochs = self.min_epochs.by_slot[slot]
            assert has_reached(latest(min_epochs, self.seen[slot]), min_epochs)


TestGuarded = Guarded.TestCase


EPOCHS = st.dictionaries(st.sampled_from(JOBS), st.tuples(st.integers(0, 1), st.integers(0, 3)))


@given(st.lists(st.lists(EPOCHS, max_size=2).map(tuple)))
def test_replies_are_in_order_except_those_marked_behind(replies: list[tuple[Epochs, ...]]) -> None:
    found = indexes_behind(replies)
    newest: dict[str, JobEpoch] = {}
    for number, announced in enumerate(replies):
        is_earlier = any(reached < newest.get(job, REMOVED) for each in announced for job, reached in each.items())
        assert is_earlier == (number in found)
        for each in announced:
            newest = {job: max(newest.get(job, REMOVED), each.get(job, REMOVED)) for job in newest.keys() | each.keys()}


@given(st.lists(st.lists(EPOCHS, max_size=2).map(tuple)))
def test_client_has_seen_newest_epochs_of_its_replies(replies: list[tuple[Epochs, ...]]) -> None:
    seen = SeenEpochs()
    for announced in replies:
        seen.add(announced)
    each = [epochs for announced in replies for epochs in announced]
    for job in JOBS:
        assert seen.epochs.get(job, REMOVED) == max([epochs.get(job, REMOVED) for epochs in each], default=REMOVED)


def test_union_has_each_min_epochs_once() -> None:
    one, other = {"j": (1, 1)}, {"j": (1, 1)}
    assert union_of((), (one,)) == (one,)
    assert len(union_of((one,), (one, other))) == 2
    assert union_of((one,), ()) == (one,)


def test_slots_that_leave_together_share_their_min_epochs() -> None:
    min_epochs = MinEpochs()
    min_epochs.raise_to(range(100), {"j": (1, 5)})
    min_epochs.raise_to(range(50), {"j": (1, 4), "k": (1, 1)})
    assert min_epochs.by_slot[0] is min_epochs.by_slot[49]
    assert min_epochs.by_slot[0] == {"j": (1, 5), "k": (1, 1)}
    assert min_epochs.by_slot[50] is min_epochs.by_slot[99]
    assert min_epochs.by_slot[100] is EMPTY_EPOCHS


def test_job_dropped_everywhere_delays_no_reply() -> None:
    assert not has_reached({"j": (1, 5)}, {"j": (1, 5), "k": (1, 1)})
    assert has_reached({"j": (1, 5)}, {"j": (1, 5), "k": (1, 1)}, {"k"})


def test_replica_stands_in_until_its_master_is_back_and_not_behind() -> None:
    shard = ReplicaChoice("m", ["r", "s"])
    assert shard.choose({"m": {"j": (1, 1)}, "r": {"j": (1, 1)}}, 0.0) == "m"
    assert shard.choose({"r": {"j": (1, 1)}, "s": {"j": (1, 2)}}, 0.1) == "s"
    assert shard.choose({"m": {"j": (1, 1)}, "s": {"j": (1, 2)}}, 0.2) == "s"
    assert shard.choose({"m": {"j": (1, 2)}, "s": {"j": (1, 2)}}, 0.3) == "m"
    assert shard.choose({}, 0.4) == "m"


def test_only_server_behind_for_long_gives_way() -> None:
    shard = ReplicaChoice("m", ["r"])
    late = BEHIND_S_MAX + 0.1
    # Always an epoch behind, but never for long.
    for number in range(10):
        assert shard.choose({"m": {"j": (1, number)}, "r": {"j": (1, number + 1)}}, number * 0.9) == "m"
    held_back, goes_on = {"j": (1, 10)}, {"j": (1, 20)}
    assert shard.choose({"m": held_back, "r": goes_on}, 10.0) == "m"
    assert shard.choose({"m": held_back, "r": {"j": (1, 21)}}, 10.0 + late) == "r"
    assert shard.choose({"m": held_back, "r": {"j": (1, 22)}}, 10.1 + late) == "r"
