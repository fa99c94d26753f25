"""A sorted set of a million members in a store: written at once and bit by bit, read by rank, replaced, removed."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from state_backend.lmdb import ranks as lmdb_ranks
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.store import EpochChanges, Snapshot

pytestmark = pytest.mark.large

Answer = TypeVar("Answer")

MEMBERS = 1_000_000
TOP = StateDescriptor("top", key="k", member="m", score="s").for_job("job")
KEY = b"job:top:1"
# One to one: what stands at a rank is known without sorting.
FACTOR = 7_368_787
INVERSE = pow(FACTOR, -1, MEMBERS)
# What a run of changes, a transaction and its pages take; the members as Python has them would be 200 MB alone.
MEMORY_MB_MAX = 400
# A node of each level, of which there are four at most, and one more of each where a range crosses their border.
NODES_MAX = 8


def name(number: int) -> bytes:
    return b"member:%07d" % number


def member_at(rank: int, shift: int) -> bytes:
    return name((rank - shift) * INVERSE % MEMBERS)


def changes(shift: int = 0) -> Iterator[Change]:
    for number in range(MEMBERS):
        yield Change("top", Op.PUT, KEY, name(number), b"%d" % ((number * FACTOR + shift) % MEMBERS))


class Nodes:
    """Counts the nodes that are read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.read = 0
        node = lmdb_ranks.RankTree._node

        def counted(ranks: lmdb_ranks.RankTree, number: int) -> bytes:
            self.read += 1
            return node(ranks, number)

        patch.setattr(lmdb_ranks.RankTree, "_node", counted)

    def few(self, ask: Callable[[], Answer]) -> Answer:
        """Ask, and check that few nodes were read for it."""
        self.read = 0
        answer = ask()
        assert self.read <= NODES_MAX
        return answer


def test_sorted_set_of_a_million_members_is_read(tmp_path: Path, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LmdbStore(tmp_path / "store", "g")
    nodes = Nodes(monkeypatch)

    def apply(made: Iterator[Change]) -> None:
        epoch = EpochChanges(store.applied.epoch + 1, 1, 1_000, runs_of(made, ["top"]))
        store.apply(epoch, [TOP])

    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with report.timed("one epoch applied", MEMBERS):
        apply(changes())
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) >> 10
    report("after it", bytes_each=store.used_bytes()[0] // MEMBERS, memory_grew_by_mb=grown_mb)
    with store.snapshot(1_000) as shown:
        _read(shown, nodes, 0)
        with report.timed("read from the first to the last", MEMBERS):
            assert sum(1 for _ in shown.sorted_members(KEY, 0, MEMBERS)) == MEMBERS
    random = Random(1)
    for size in (1, 100, 10_000):
        some = [name(number) for number in sorted(random.sample(range(MEMBERS), size))]
        with report.timed(f"an epoch of {size} other scores", size):
            apply(Change("top", Op.PUT, KEY, each, b"%d" % (MEMBERS + size)) for each in some)
        with store.snapshot(1_000) as shown:
            assert shown.rank_of_score(KEY, MEMBERS + size - 1, is_after=True) == MEMBERS - size
            assert [each for each, _ in shown.sorted_members(KEY, MEMBERS - size, MEMBERS)] == some
    with report.timed("an epoch that gives each another score", MEMBERS):
        apply(changes(shift=10))
    with store.snapshot(1_000) as shown:
        _read(shown, nodes, 10)
        other = LmdbStore(tmp_path / "other", "g")
        with report.timed("what a snapshot of it has, applied", MEMBERS):
            other.apply(EpochChanges(0, 1, 1_000, runs_of(shown.changes(), ["top"])), [TOP])
        with other.snapshot(1_000) as copy:
            assert copy.sorted_size(KEY) == MEMBERS
            _read(copy, nodes, 10)
        other.close()
    gone = (Change("top", Op.DELETE, KEY, name(number)) for number in range(MEMBERS) if number % 1000)
    with report.timed("999 of 1000 taken out", MEMBERS):
        apply(gone)
    with store.snapshot(1_000) as shown:
        left = sorted(((number * FACTOR + 10) % MEMBERS, name(number)) for number in range(0, MEMBERS, 1000))
        nodes.read = 0
        assert [(int(score), each) for each, score in shown.sorted_members(KEY, 0, MEMBERS)] == left
        assert nodes.read < 100
    apply(iter([Change("top", Op.CLEAR, KEY)]))
    assert store.applied.key_count == 0
    while store.expire(1_000, 5_000) >= 5_000:
        pass
    assert store.used_bytes()[0] < 1 << 20
    store.close()
    assert grown_mb < MEMORY_MB_MAX


def _read(shown: Snapshot, nodes: Nodes, shift: int) -> None:
    for rank in (0, MEMBERS // 2, MEMBERS - 10):
        some = [(member_at(each, shift), float(each)) for each in range(rank, rank + 10)]
        assert nodes.few(lambda r=rank: list(shown.sorted_members(KEY, r, r + 10))) == some
        assert nodes.few(lambda r=rank: list(shown.sorted_members(KEY, r, r + 10, is_reversed=True))) == some[::-1]
        assert nodes.few(lambda m=some[3][0]: shown.ranks(KEY, [m])) == [rank + 3]
        assert nodes.few(lambda m=some[3][0]: shown.scores(KEY, [m])) == [some[3][1]]
        assert nodes.few(lambda r=rank: shown.rank_of_score(KEY, r + 0.5, is_after=False)) == rank + 1
