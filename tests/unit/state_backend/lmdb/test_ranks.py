"""The tree of a large sorted set: after any changes its ranks are right, and its nodes have a bounded size."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator
from math import inf
from pathlib import Path

import lmdb
import pytest

from state_backend.codec import packed_sorted
from state_backend.codec.checksums import checked
from state_backend.codec.packed_sorted import Pair
from state_backend.lmdb import ranks
from state_backend.lmdb.ranks import NODE_BYTES_MAX, NODE_ENTRIES_MAX, RankTree, RankTreeWriter, bound_of_score
from state_backend.model.errors import StoreDamagedError

SET_ID = (7).to_bytes(8, "big")


class Tree:
    """A tree in a write transaction, and the members that it should have."""

    def __init__(self, txn: lmdb.Transaction[bytes], table: object) -> None:
        self.txn = txn
        self.table = table
        self.tree = RankTreeWriter(txn, table, SET_ID, 0)
        self.members: list[Pair] = []

    def change(self, put: list[Pair], removed: list[Pair]) -> None:
        edits = sorted([(pair, True) for pair in put] + [(pair, False) for pair in removed])
        self.tree.change(edits)
        self.members = sorted({*self.members, *put} - {*removed})

    def by_number(self) -> dict[int, bytes]:
        """Return all nodes by their numbers."""
        rows = [(name, checked(value)) for name, value in self.txn.cursor(db=self.table)]
        assert all(name.startswith(SET_ID) for name, _ in rows)
        return {int.from_bytes(name[8:], "big"): node for name, node in rows}

    def nodes(self) -> list[tuple[int, bytes]]:
        """Return (level, node) of all nodes, except the root."""
        return [(node[-1], node) for number, node in self.by_number().items() if number != ranks.ROOT]

    def check(self) -> None:
        """Compare the tree with its members: each rank, ranges in both directions, and bounds between members."""
        tree = RankTree(self.txn, self.table, SET_ID)
        flat = [(member, score) for score, member in self.members]
        size = len(flat)
        for start, stop in ((0, size), (1, size - 1), (size // 3, size // 2), (size - 5, size), (5, 5)):
            for is_reversed in (False, True):
                found = [each for leaf in tree.leaves(max(start, 0), stop, is_reversed) for each in leaf]
                expected = flat[max(start, 0) : max(stop, 0)]
                assert found == (expected[::-1] if is_reversed else expected)
        for rank in range(0, size, max(1, size // 50)):
            score, member = self.members[rank]
            assert tree.rank(score, member) == rank
            assert tree.count_before((score, member + b"\0")) == rank + 1
            assert tree.count_before((score, b"")) == bisect_left(self.members, (score, b""))
        assert tree.count_before((-inf, b"")) == 0
        assert tree.count_before((inf, b"\xff" * 9)) == size


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    env = lmdb.open(str(tmp_path), max_dbs=1, map_size=1 << 30, sync=False)
    table = env.open_db(b"blocks")
    with env.begin(write=True) as txn:
        yield Tree(txn, table)
    env.close()


def pairs(count: int, step: int = 1, digits: int = 6) -> list[Pair]:
    return [(float(number // 3), b"%0*d" % (digits, number)) for number in range(0, count * step, step)]


def test_members_that_come_and_go_at_random_have_their_ranks(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "NODE_ENTRIES_MAX", 8)
    chance = random.Random(5)
    everything = pairs(1500)
    for target in (20, 900, 880, 1500, 1490, 300, 310, 40, 3, 0, 700, 0):
        present = set(tree.members)
        missing = [pair for pair in everything if pair not in present]
        count = abs(target - len(present))
        put = chance.sample(missing, min(len(missing), count if target > len(present) else 5))
        removed = chance.sample(tree.members, min(len(present), count if target < len(present) else 5))
        tree.change(put, removed)
        tree.check()
    tree.change([], list(tree.members))
    assert tree.nodes() == []


def test_change_of_few_members_writes_few_nodes(tree: Tree) -> None:
    tree.change(pairs(20_000), [])
    tree.check()
    before = tree.by_number()
    tree.change([(3000.0, b"new")], [pairs(20_000)[15_000]])
    tree.check()
    after = tree.by_number()
    assert len(before) > 150
    assert sum(before.get(number) != node for number, node in after.items()) <= 5  # of two leaves each node above


def test_nodes_have_at_most_so_many_entries_and_bytes(tree: Tree) -> None:
    tree.change(pairs(20_000) + [(-1.0, b"x" * 500 + b"%04d" % number) for number in range(300)], [])
    tree.check()
    for level, node in tree.nodes():
        assert packed_sorted.count(node) <= NODE_ENTRIES_MAX
        assert len(node) <= NODE_BYTES_MAX + 600 or level
    leaves = [node for level, node in tree.nodes() if not level]
    assert len(leaves) < 20_300 / (NODE_ENTRIES_MAX // 2) + 300 * 500 / (NODE_BYTES_MAX // 2)


def test_nodes_that_become_small_are_joined(tree: Tree) -> None:
    everything = pairs(20_000)
    tree.change(everything, [])
    tree.change([], [pair for at, pair in enumerate(everything) if at % 20])  # five or so stay in each leaf
    tree.check()
    assert len(tree.members) == 1000
    assert len(tree.nodes()) <= 1000 / (NODE_ENTRIES_MAX // 4) + 2
    for count in range(20):
        tree.change([], [pair for at, pair in enumerate(everything[::20]) if at % 20 == count and at % 200])
    tree.check()
    assert len(tree.members) == 5
    assert tree.nodes() == []
    tree.change(everything[1::400], [])
    tree.change([], tree.members[1:])
    assert len(tree.members) == 1 and tree.nodes() == []  # the root is a leaf again


def test_tree_of_one_leaf_stays_one(tree: Tree) -> None:
    tree.change(pairs(NODE_ENTRIES_MAX), [])
    assert tree.nodes() == []
    tree.change([(0.0, b"one more")], [])
    assert len(tree.nodes()) == 2
    tree.check()
    tree.change([], [])
    tree.check()


def test_bounds_of_children_are_as_short_as_they_may_be(tree: Tree) -> None:
    """Members may be long; the bounds in inner nodes have only the bytes that separate two neighbours."""
    tree.change([(1.0, b"common" * 10 + b"%06d" % number + b"tail" * 10) for number in range(500)], [])
    tree.check()
    root = tree.by_number()[ranks.ROOT]
    bounds = [text for _, text in packed_sorted.pairs(root)]
    assert bounds[0] == b"" and all(60 < len(text) <= 66 for text in bounds[1:])


def test_member_outside_its_tree_node_is_damage(tree: Tree) -> None:
    tree.change(pairs(1000), [])
    for edits in ([((1.5, b"none"), False)], [((1.5, b"none%d" % n), False) for n in range(90)]):
        with pytest.raises(StoreDamagedError, match="the order of a sorted set does not match its members"):
            tree.tree.change(edits)


def test_nothing_is_behind_highest_score() -> None:
    assert bound_of_score(inf, is_after=True) is None
    assert bound_of_score(inf, is_after=False) == (inf, b"")
    assert bound_of_score(1.0, is_after=False) == (1.0, b"")
    above = bound_of_score(1.0, is_after=True)
    assert above is not None and (1.0, b"\xff" * 99) < above < (1.0000001, b"")
