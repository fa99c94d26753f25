"""The order of large sorted sets in an LMDB transaction: for each a tree of counted nodes, to find ranks.

    blocks    set id (8), number of a node (8)  ->  node; the root is number 0; numbers are never reused

    node      packed (see `packed_sorted`) | children | level u8: 0 for a leaf | checksum
    leaf      packed: the members; no children
    inner     packed: the lower bound of each child, as (score, text); the text is cut to the bytes that separate the
              child from the one before; children: n x u64 numbers of the children, then n x u64 counts: how many
              members are in a child and in those before it

A look-up of a rank, or of the member with a rank, reads a node of each level: three for a million members. The changes
of one epoch are applied together: each changed node is written once, and split or joined with a neighbour if needed.

A *bound* is a position in the order, written as a pair (score, member) that need not be in the set.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf, nextafter
from typing import Any, NamedTuple

import lmdb

from state_backend.codec import packed_sorted
from state_backend.codec.checksums import checked, with_checksum
from state_backend.codec.packed_sorted import Pair
from state_backend.model.errors import StoreDamagedError

# A larger node is split into nodes filled to three quarters; below a quarter a node is joined with a neighbour.
WIDTH_MAX = 128
BYTES_MAX = 8192
# Bounds may be as long as members. A node has at least so many children, so that the depth of the tree is bounded.
CHILDREN_MIN = 4

# A leaf with more than one step per so many members is unpacked and rebuilt (about where both take the same time).
STEPS_SHARE = 6

# The number of cached inner nodes of a tree: enough for two million members, some megabytes.
INNER_MAX = 256

LOWEST: Pair = (-inf, b"")
ROOT = 0

# A member, and whether it is put (True) or removed.
Step = tuple[Pair, bool]


def bound_of_score(score: float, is_after: bool) -> Pair | None:
    """Return the bound before, or behind, all members with a score; None if no member can be behind it."""
    if not is_after:
        return score, b""
    return None if score == inf else (nextafter(score, inf), b"")


def node_name(set_id: bytes, number: int) -> bytes:
    """Return the name of a node's row."""
    return set_id + number.to_bytes(8, "big")


def _numbers(node: bytes) -> Sequence[int]:
    """Return the numbers of an inner node's children."""
    n = packed_sorted.count(node)
    return packed_sorted.numbers(n, "Q").unpack_from(node, len(node) - 1 - 16 * n)


def _child_number(node: bytes, index: int) -> int:
    at = len(node) - 1 - 16 * packed_sorted.count(node) + 8 * index
    return int.from_bytes(node[at : at + 8], "little")


def _ends(node: bytes) -> Sequence[int]:
    """Return how many members are in each of an inner node's children and in those before it."""
    n = packed_sorted.count(node)
    return packed_sorted.numbers(n, "Q").unpack_from(node, len(node) - 1 - 8 * n)


class Inner(NamedTuple):
    """An unpacked inner node: the children's lower bounds, their numbers, and how many members are before each."""

    lows: list[Pair]
    numbers: Sequence[int]
    starts: Sequence[int]


class Ranks:
    """The tree of one sorted set, to read, in the table `blocks`.

    inner: a cache for up to `INNER_MAX` unpacked inner nodes; the caller clears it when the tree changes.
    """

    def __init__(
        self, txn: lmdb.Transaction[bytes], table: Any, set_id: bytes, inner: dict[int, Inner] | None = None
    ) -> None:
        self._txn = txn
        self._table = table
        self._set_id = set_id
        self._inner = {} if inner is None else inner

    def _node(self, number: int) -> bytes:
        node: bytes | None = self._txn.get(node_name(self._set_id, number), db=self._table)
        if node is None:
            raise _mismatch()
        return checked(node)

    def before(self, bound: Pair) -> int:
        """Return how many members are before a bound."""
        start, leaf = self._leaf(bound)
        return start + packed_sorted.before(leaf, bound)

    def rank(self, score: float, member: bytes) -> int:
        """Return how many members are before one, given its score."""
        start, leaf = self._leaf((score, member))
        try:
            return start + packed_sorted.rank(leaf, score, member)
        except IndexError:
            raise _mismatch() from None

    def _leaf(self, bound: Pair) -> tuple[int, bytes]:
        """Return how many members are before the leaf that a bound belongs to, and the leaf."""
        start, number, cache = 0, ROOT, self._inner
        while True:
            inner = cache.get(number)
            if inner is None:
                node = self._node(number)
                if not node[-1]:
                    return start, node
                inner = self._unpacked(number, node)
            lows, numbers, starts = inner
            child = bisect_right(lows, bound, 1) - 1  # a bound before all children belongs to the first
            start += starts[child]
            number = numbers[child]

    def _unpacked(self, number: int, node: bytes) -> Inner:
        inner = Inner(packed_sorted.pairs(node), _numbers(node), (0, *_ends(node)))
        if len(self._inner) < INNER_MAX:
            self._inner[number] = inner
        return inner

    def runs(self, start: int, stop: int, is_reversed: bool, number: int = ROOT) -> Iterator[list[tuple[bytes, float]]]:
        """Iterate over (member, score) of the ranks `start` to before `stop`, a leaf at a time, or from the end on."""
        if start >= stop:
            return
        node = self._node(number)
        while node[-1]:
            ends = _ends(node)
            child, last = bisect_right(ends, start), bisect_left(ends, stop)
            if child != last:
                for each in range(last, child - 1, -1) if is_reversed else range(child, last + 1):
                    first = ends[each - 1] if each else 0
                    until = min(stop, ends[each]) - first
                    yield from self.runs(max(start - first, 0), until, is_reversed, _child_number(node, each))
                return
            first = ends[child - 1] if child else 0
            start, stop = start - first, stop - first
            node = self._node(_child_number(node, child))
        found = packed_sorted.members(node, start, stop)
        yield found[::-1] if is_reversed else found


@dataclass(slots=True)
class _Child:
    """A node in its parent. low: its lower bound; size: its members. width and bytes_: only if it was just written."""

    low: Pair
    number: int
    size: int
    width: int | None = None
    bytes_: int = 0

    @property
    def is_small(self) -> bool:
        """Tell whether a node that was just written should be joined with a neighbour."""
        return self.width is not None and self.width < WIDTH_MAX // 4 and self.bytes_ < BYTES_MAX // 4


class RankTree(Ranks):
    """The tree of one sorted set, to change. `next_node` is the number that the next new node gets."""

    def __init__(self, txn: lmdb.Transaction[bytes], table: Any, set_id: bytes, next_node: int) -> None:
        super().__init__(txn, table, set_id)
        self.next_node = next_node

    def change(self, steps: Sequence[Step]) -> None:
        """Apply sorted steps. Members that are put must be missing, and members that are removed must be in the set."""
        if not steps:
            return
        if not self.next_node:
            self._put(self._new_number(), packed_sorted.EMPTY + b"\0")
        level, children = self._changed(ROOT, LOWEST, steps)
        while len(children) > 1:
            # The root keeps its number: its first part gets a new one.
            first = children[0]
            first.number = self._new_number()
            self._put(first.number, self._node(ROOT))
            level += 1
            children = self._write_inner(ROOT, level, LOWEST, children)
        while children and level and children[0].width == 1:
            (only,) = _numbers(self._node(ROOT))
            node = self._node(only)
            self._put(ROOT, node)
            self._delete(only)
            level = node[-1]
            children = [_Child(LOWEST, ROOT, 0, packed_sorted.count(node))]

    def _new_number(self) -> int:
        self.next_node += 1
        return self.next_node - 1

    def _put(self, number: int, node: bytes) -> None:
        self._txn.put(node_name(self._set_id, number), with_checksum(node), db=self._table)

    def _delete(self, number: int) -> None:
        self._txn.delete(node_name(self._set_id, number), db=self._table)

    def _changed(self, number: int, low: Pair, steps: Sequence[Step]) -> tuple[int, list[_Child]]:
        """Apply steps to a node with the lower bound `low`; return its level, and the nodes that it becomes."""
        node = self._node(number)
        level = node[-1]
        if not level:
            return level, self._changed_leaf(number, low, node, steps)
        children = _children(node, low)
        lows = [child.low for child in children]
        changed: list[_Child] = []
        at = done = 0
        while at < len(steps):
            child = max(bisect_right(lows, steps[at][0]) - 1, 0)
            until = bisect_left(steps, (lows[child + 1],), at) if child + 1 < len(lows) else len(steps)
            changed += children[done:child]
            changed += self._changed(children[child].number, lows[child], steps[at:until])[1]
            at, done = until, child + 1
        changed += children[done:]
        return level, self._write_inner(number, level, low, self._joined(changed, level - 1))

    def _changed_leaf(self, number: int, low: Pair, node: bytes, steps: Sequence[Step]) -> list[_Child]:
        if len(steps) * STEPS_SHARE > packed_sorted.count(node):
            return self._write_leaf(number, low, _edited(packed_sorted.pairs(node), steps))
        try:
            run = packed_sorted.edited(node[:-1], steps)
        except KeyError:
            raise _mismatch() from None
        n = packed_sorted.count(run)
        if not 0 < n <= WIDTH_MAX or len(run) > BYTES_MAX:
            return self._write_leaf(number, low, packed_sorted.pairs(run))
        self._put(number, run + b"\0")
        return [_Child(low, number, n, n, len(run))]

    def _write_leaf(self, number: int, low: Pair, pairs: list[Pair]) -> list[_Child]:
        """Write the members of a leaf, to several leaves if they are too many; without members the leaf is deleted."""
        if not pairs:
            self._delete(number)
            return []
        written = []
        for start, stop in _cut([len(member) + 12 for _, member in pairs], 1):
            if start:
                number, low = self._new_number(), _separator(pairs[start - 1], pairs[start])
            node = packed_sorted.pack(pairs[start:stop]) + b"\0"
            self._put(number, node)
            written.append(_Child(low, number, stop - start, stop - start, len(node)))
        return written

    def _write_inner(self, number: int, level: int, low: Pair, children: list[_Child]) -> list[_Child]:
        """Write the children of an inner node, to several nodes if they are too many; without any it is deleted."""
        if not children:
            self._delete(number)
            return []
        children[0].low = low
        written = []
        for start, stop in _cut([len(child.low[1]) + 28 for child in children], CHILDREN_MIN):
            if start:
                number = self._new_number()
            some = children[start:stop]
            ends = list(accumulate(child.size for child in some))
            n = len(some)
            children_of = packed_sorted.numbers(2 * n, "Q").pack(*(child.number for child in some), *ends)
            node = packed_sorted.pack([child.low for child in some]) + children_of + bytes((level,))
            self._put(number, node)
            written.append(_Child(some[0].low, number, ends[-1], n, len(node)))
        return written

    def _joined(self, children: list[_Child], level: int) -> list[_Child]:
        """Join small nodes of a level with a neighbour that has space."""
        if not any(child.is_small for child in children):
            return children
        joined = children[:1]
        for child in children[1:]:
            if not ((child.is_small or joined[-1].is_small) and self._join(joined, child, level)):
                joined.append(child)
        return joined

    def _join(self, before: list[_Child], child: _Child, level: int) -> bool:
        """Move the content of a node into the one before it; False if that has no space."""
        into = before[-1]
        one, other = self._node(into.number), self._node(child.number)
        width = packed_sorted.count(one) + packed_sorted.count(other)
        if width > WIDTH_MAX * 3 // 4 or len(one) + len(other) > BYTES_MAX * 3 // 4:
            return False
        if level:
            made = self._write_inner(
                into.number, level, into.low, _children(one, into.low) + _children(other, child.low)
            )
        else:
            made = self._write_leaf(into.number, into.low, packed_sorted.pairs(one) + packed_sorted.pairs(other))
        self._delete(child.number)
        before[-1:] = made
        return True


def _children(node: bytes, low: Pair) -> list[_Child]:
    """Return the children of an inner node; the first one has the lower bound of the node, `low`."""
    numbers, ends = _numbers(node), _ends(node)
    children = [
        _Child(bound, number, end - start)
        for bound, number, start, end in zip(packed_sorted.pairs(node), numbers, (0, *ends), ends, strict=False)
    ]
    children[0].low = low
    return children


def _edited(pairs: list[Pair], steps: Sequence[Step]) -> list[Pair]:
    """Return the members of a leaf after many steps."""
    removed = {pair for pair, is_put in steps if not is_put}
    remaining = [pair for pair in pairs if pair not in removed]
    if len(remaining) + len(removed) != len(pairs):
        raise _mismatch()
    return sorted(remaining + [pair for pair, is_put in steps if is_put])


def _separator(last: Pair, first: Pair) -> Pair:
    """Return the shortest bound between two neighbours, which is at most the second one."""
    if last[0] != first[0]:
        return first[0], b""
    neighbours = zip(last[1], first[1], strict=False)
    common = next((at for at, (one, other) in enumerate(neighbours) if one != other), len(last[1]))
    return first[0], first[1][: common + 1]


def _cut(sizes: Sequence[int], least: int) -> list[tuple[int, int]]:
    """Divide entries of some sizes among nodes, at least `least` into each; return (start, stop) of each node."""
    n, total = len(sizes), sum(sizes)
    if n <= WIDTH_MAX and total <= BYTES_MAX:
        return [(0, n)]
    width = n if n <= WIDTH_MAX else ceil(n / ceil(n / (WIDTH_MAX * 3 // 4)))
    enough = total if total <= BYTES_MAX else ceil(total / ceil(total / (BYTES_MAX * 3 // 4)))
    cuts = []
    start = filled = 0
    for index, size in enumerate(sizes):
        is_full = filled >= enough or filled + size > BYTES_MAX
        if index - start >= width or (is_full and index - start >= least):
            cuts.append((start, index))
            start, filled = index, 0
        filled += size
    return [*cuts, (start, n)]


def _mismatch() -> StoreDamagedError:
    return StoreDamagedError("the order of a sorted set does not match its members; the store is rebuilt from the log")
