"""The order of a large sorted set in an LMDB transaction: a B+ tree that counts members, to find ranks.

    blocks    set id (8), number of a node (8)  ->  node; the root is number 0; numbers are never reused

    node      packed (see `packed_sorted`) | children | level u8: 0 for a leaf | checksum
    leaf      packed: the members; no children
    inner     packed: the lower bound of each child, as (score, text); the text is cut to the bytes that separate the
              child from the one before; children: n x u64 numbers of the children, then n x u64 counts: how many
              members are in a child and in those before it

A look-up of a rank, or of the member with a rank, reads a node of each level: three for a million members. All changes
of an epoch are applied together: each changed node is written once, and split or joined with a neighbour if needed.

A *bound* is a point in the order: a pair (score, member) that need not be in the set.
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

# A node with more entries or bytes is split into nodes that are three quarters full. A node below a quarter is joined
# with a neighbour.
NODE_ENTRIES_MAX = 128
NODE_BYTES_MAX = 8192
# A node has at least so many children, so that the depth of the tree is bounded even if bounds are as long as members.
CHILDREN_MIN = 4

# A leaf with more than one edit per so many members is unpacked and rebuilt: an edit in place is no faster then.
MEMBERS_PER_EDIT = 6

# The number of cached inner nodes of a tree: enough for two million members, some megabytes.
INNER_MAX = 256

LOWEST: Pair = (-inf, b"")
ROOT = 0

# A pair, and whether it is put (True) or removed.
Edit = tuple[Pair, bool]


def bound_of_score(score: float, is_after: bool) -> Pair | None:
    """Return the bound before (with `is_after`: behind) all members with a score; None if it is behind all members."""
    if not is_after:
        return score, b""
    return None if score == inf else (nextafter(score, inf), b"")


def node_name(set_id: bytes, number: int) -> bytes:
    """Return the name of a node's row."""
    return set_id + number.to_bytes(8, "big")


def _numbers(node: bytes) -> Sequence[int]:
    """Return the numbers of an inner node's children."""
    n = packed_sorted.count(node)
    return packed_sorted.layout_of_numbers(n, "Q").unpack_from(node, len(node) - 1 - 16 * n)


def _child_number(node: bytes, index: int) -> int:
    at = len(node) - 1 - 16 * packed_sorted.count(node) + 8 * index
    return int.from_bytes(node[at : at + 8], "little")


def _ends(node: bytes) -> Sequence[int]:
    """Return how many members are in each of an inner node's children and in those before it."""
    n = packed_sorted.count(node)
    return packed_sorted.layout_of_numbers(n, "Q").unpack_from(node, len(node) - 1 - 8 * n)


class InnerNode(NamedTuple):
    """An unpacked inner node: the children's lower bounds, their numbers, and how many members are before each."""

    lower_bounds: list[Pair]
    numbers: Sequence[int]
    starts: Sequence[int]


class RankTree:
    """Reads the tree of one sorted set.

    Args:
        inner: A cache for up to `INNER_MAX` unpacked inner nodes, by number; the caller clears it when the tree
            changes.
    """

    def __init__(
        self, txn: lmdb.Transaction[bytes], table: Any, set_id: bytes, inner: dict[int, InnerNode] | None = None
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

    def count_before(self, bound: Pair) -> int:
        """Return how many members are before a bound."""
        start, leaf = self._leaf(bound)
        return start + packed_sorted.count_before(leaf, bound)

    def rank(self, score: float, member: bytes) -> int:
        """Return the rank of a member, given its score."""
        start, leaf = self._leaf((score, member))
        try:
            return start + packed_sorted.rank(leaf, score, member)
        except IndexError:
            raise _mismatch() from None

    def _leaf(self, bound: Pair) -> tuple[int, bytes]:
        """Return the leaf that a bound belongs to, and before it the number of members in earlier leaves."""
        start, number, cache = 0, ROOT, self._inner
        while True:
            inner = cache.get(number)
            if inner is None:
                node = self._node(number)
                if not node[-1]:
                    return start, node
                inner = self._unpacked(number, node)
            lower_bounds, numbers, starts = inner
            child = bisect_right(lower_bounds, bound, 1) - 1  # a bound before all children belongs to the first
            start += starts[child]
            number = numbers[child]

    def _unpacked(self, number: int, node: bytes) -> InnerNode:
        inner = InnerNode(packed_sorted.pairs(node), _numbers(node), (0, *_ends(node)))
        if len(self._inner) < INNER_MAX:
            self._inner[number] = inner
        return inner

    def leaves(
        self, start: int, stop: int, is_reversed: bool, number: int = ROOT
    ) -> Iterator[list[tuple[bytes, float]]]:
        """Iterate over (member, score) of the ranks `start` to before `stop`, a leaf at a time.

        With `is_reversed` from the last to the first.

        Args:
            number: The node of the subtree in which the ranks count.
        """
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
                    yield from self.leaves(max(start - first, 0), until, is_reversed, _child_number(node, each))
                return
            first = ends[child - 1] if child else 0
            start, stop = start - first, stop - first
            node = self._node(_child_number(node, child))
        found = packed_sorted.members(node, start, stop)
        yield found[::-1] if is_reversed else found


@dataclass(slots=True)
class _Child:
    """A node as its parent sees it.

    Args:
        size: The number of members in its subtree.
        entries, bytes_: Its numbers of entries (members or children) and of bytes; only if the node was just written.
    """

    lower_bound: Pair
    number: int
    size: int
    entries: int | None = None
    bytes_: int = 0

    @property
    def is_small(self) -> bool:
        """Return whether a node that was just written should be joined with a neighbour."""
        return self.entries is not None and self.entries < NODE_ENTRIES_MAX // 4 and self.bytes_ < NODE_BYTES_MAX // 4


class RankTreeWriter(RankTree):
    """Changes the tree of one sorted set.

    Args:
        next_node: The number of the next new node.
    """

    def __init__(self, txn: lmdb.Transaction[bytes], table: Any, set_id: bytes, next_node: int) -> None:
        super().__init__(txn, table, set_id)
        self.next_node = next_node

    def change(self, edits: Sequence[Edit]) -> None:
        """Apply sorted edits. A pair that is put must not be in the set, and a pair that is removed must be in it."""
        if not edits:
            return
        if not self.next_node:
            self._put(self._new_number(), packed_sorted.EMPTY + b"\0")
        level, children = self._apply(ROOT, LOWEST, edits)
        while len(children) > 1:
            # The root keeps its number. The first of the nodes that it was split into gets a new one.
            first = children[0]
            first.number = self._new_number()
            self._put(first.number, self._node(ROOT))
            level += 1
            children = self._write_inner(ROOT, level, LOWEST, children)
        while children and level and children[0].entries == 1:
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

    def _apply(self, number: int, lower_bound: Pair, edits: Sequence[Edit]) -> tuple[int, list[_Child]]:
        """Apply edits to a node; return its level, and the nodes that replace it."""
        node = self._node(number)
        level = node[-1]
        if not level:
            return level, self._apply_to_leaf(number, lower_bound, node, edits)
        children = _children(node, lower_bound)
        lower_bounds = [child.lower_bound for child in children]
        changed: list[_Child] = []
        at = done = 0
        while at < len(edits):
            child = max(bisect_right(lower_bounds, edits[at][0]) - 1, 0)
            until = bisect_left(edits, (lower_bounds[child + 1],), at) if child + 1 < len(lower_bounds) else len(edits)
            changed += children[done:child]
            changed += self._apply(children[child].number, lower_bounds[child], edits[at:until])[1]
            at, done = until, child + 1
        changed += children[done:]
        return level, self._write_inner(number, level, lower_bound, self._joined(changed, level - 1))

    def _apply_to_leaf(self, number: int, lower_bound: Pair, node: bytes, edits: Sequence[Edit]) -> list[_Child]:
        if len(edits) * MEMBERS_PER_EDIT > packed_sorted.count(node):
            return self._write_leaf(number, lower_bound, _rebuilt(packed_sorted.pairs(node), edits))
        try:
            packed = packed_sorted.edit(node[:-1], edits)
        except KeyError:
            raise _mismatch() from None
        n = packed_sorted.count(packed)
        if not 0 < n <= NODE_ENTRIES_MAX or len(packed) > NODE_BYTES_MAX:
            return self._write_leaf(number, lower_bound, packed_sorted.pairs(packed))
        self._put(number, packed + b"\0")
        return [_Child(lower_bound, number, n, n, len(packed))]

    def _write_leaf(self, number: int, lower_bound: Pair, pairs: list[Pair]) -> list[_Child]:
        """Write members to a leaf, or to several leaves if they are too many; without any, delete the leaf."""
        if not pairs:
            self._delete(number)
            return []
        written = []
        for start, stop in _cut([len(member) + 12 for _, member in pairs], 1):
            if start:
                number, lower_bound = self._new_number(), _separator(pairs[start - 1], pairs[start])
            node = packed_sorted.pack(pairs[start:stop]) + b"\0"
            self._put(number, node)
            written.append(_Child(lower_bound, number, stop - start, stop - start, len(node)))
        return written

    def _write_inner(self, number: int, level: int, lower_bound: Pair, children: list[_Child]) -> list[_Child]:
        """Write children to an inner node, or to several nodes if they are too many; without any, delete the node."""
        if not children:
            self._delete(number)
            return []
        children[0].lower_bound = lower_bound
        written = []
        for start, stop in _cut([len(child.lower_bound[1]) + 28 for child in children], CHILDREN_MIN):
            if start:
                number = self._new_number()
            some = children[start:stop]
            ends = list(accumulate(child.size for child in some))
            n = len(some)
            numbers = [child.number for child in some]
            packed = packed_sorted.pack([child.lower_bound for child in some])
            node = packed + packed_sorted.layout_of_numbers(2 * n, "Q").pack(*numbers, *ends) + bytes((level,))
            self._put(number, node)
            written.append(_Child(some[0].lower_bound, number, ends[-1], n, len(node)))
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
        entries = packed_sorted.count(one) + packed_sorted.count(other)
        if entries > NODE_ENTRIES_MAX * 3 // 4 or len(one) + len(other) > NODE_BYTES_MAX * 3 // 4:
            return False
        if level:
            children = _children(one, into.lower_bound) + _children(other, child.lower_bound)
            made = self._write_inner(into.number, level, into.lower_bound, children)
        else:
            pairs = packed_sorted.pairs(one) + packed_sorted.pairs(other)
            made = self._write_leaf(into.number, into.lower_bound, pairs)
        self._delete(child.number)
        before[-1:] = made
        return True


def _children(node: bytes, lower_bound: Pair) -> list[_Child]:
    """Return the children of an inner node; the first one has the lower bound of the node."""
    numbers, ends = _numbers(node), _ends(node)
    children = [
        _Child(bound, number, end - start)
        for bound, number, start, end in zip(packed_sorted.pairs(node), numbers, (0, *ends), ends, strict=False)
    ]
    children[0].lower_bound = lower_bound
    return children


def _rebuilt(pairs: list[Pair], edits: Sequence[Edit]) -> list[Pair]:
    """Return the members of a leaf after many edits."""
    removed = {pair for pair, is_put in edits if not is_put}
    remaining = [pair for pair in pairs if pair not in removed]
    if len(remaining) + len(removed) != len(pairs):
        raise _mismatch()
    return sorted(remaining + [pair for pair, is_put in edits if is_put])


def _separator(last: Pair, first: Pair) -> Pair:
    """Return the shortest bound that is behind one pair and at most the next."""
    if last[0] != first[0]:
        return first[0], b""
    neighbours = zip(last[1], first[1], strict=False)
    common = next((at for at, (one, other) in enumerate(neighbours) if one != other), len(last[1]))
    return first[0], first[1][: common + 1]


def _cut(sizes: Sequence[int], least: int) -> list[tuple[int, int]]:
    """Divide entries with these sizes among nodes of at least `least` entries; return (start, stop) of each node."""
    n, total = len(sizes), sum(sizes)
    if n <= NODE_ENTRIES_MAX and total <= NODE_BYTES_MAX:
        return [(0, n)]
    entries_wanted = n if n <= NODE_ENTRIES_MAX else ceil(n / ceil(n / (NODE_ENTRIES_MAX * 3 // 4)))
    bytes_wanted = total if total <= NODE_BYTES_MAX else ceil(total / ceil(total / (NODE_BYTES_MAX * 3 // 4)))
    cuts = []
    start = filled = 0
    for index, size in enumerate(sizes):
        is_full = filled >= bytes_wanted or filled + size > NODE_BYTES_MAX
        if index - start >= entries_wanted or (is_full and index - start >= least):
            cuts.append((start, index))
            start, filled = index, 0
        filled += size
    return [*cuts, (start, n)]


def _mismatch() -> StoreDamagedError:
    return StoreDamagedError("the order of a sorted set does not match its members; the store is rebuilt from the log")
