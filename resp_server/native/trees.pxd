"""Large sorted sets: the nodes of a tree are rows of a table. A leaf is a run of members, in their order."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from resp_server.native.records cimport RANK_BITS, members_in_run, rank_in_run
from resp_server.native.wire cimport Word
from state_backend.native.little_endian cimport u64
from state_backend.native.lookup cimport FOUND, Lookup, Pages

# A tree that is not damaged is not deeper. A damaged one may have a cycle.
cdef enum:
    TREE_DEPTH_MAX = 16


cdef inline bint find_node(Pages pages, uint64_t set_id, uint64_t number, Lookup* node) except -1:
    """Look up a node of a sorted set's tree."""
    node.high, node.low, node.bytes_ = set_id, number, 16
    return pages.find_block(node, pages.moment_ms) == FOUND and node.size >= 5


cdef inline int64_t find_leaf(Pages pages, uint64_t set_id, int64_t rank, double score, const Word* member, Lookup* node) except -2:
    """Find the leaf of a rank, or of a member if the rank is negative; return its first member's rank, -1 if the tree is damaged."""
    cdef uint64_t number = 0
    cdef int64_t count, low, high, middle, before = 0
    cdef const uint8_t* ends
    cdef int depth
    for depth in range(TREE_DEPTH_MAX):
        if not find_node(pages, set_id, number, node):
            return -1
        count = members_in_run(node.record, node.size - 1)
        if node.record[node.size - 1] == 0:
            return before if count >= 0 else -1
        if count < 1 or node.size < 5 + 28 * <size_t>count:
            return -1
        ends = node.record + node.size - 1 - 8 * count
        low, high = 0, count - 1
        if rank < 0:
            # The lowest members of the children are a run; a member before all of them belongs to the first child.
            low = rank_in_run(node.record, node.size - 1 - 16 * count, score, member, True)
            if low < 0:
                return -1
            low = high = max(0, low - 1)
        while low < high:
            middle = (low + high) >> 1
            if <int64_t>u64(ends + 8 * middle) <= rank - before:
                low = middle + 1
            else:
                high = middle
        number = u64(ends - 8 * count + 8 * low)
        before += <int64_t>(u64(ends + 8 * (low - 1)) & ((<uint64_t>1 << RANK_BITS) - 1)) if low else 0
    return -1


cdef inline int64_t rank_in_tree(Pages pages, uint64_t set_id, double score, const Word* member) except -2:
    """Return a member's rank in a large sorted set; -1 if the tree is damaged."""
    cdef Lookup leaf
    cdef int64_t rank = find_leaf(pages, set_id, -1, score, member, &leaf), within
    if rank < 0:
        return -1
    within = rank_in_run(leaf.record, leaf.size - 1, score, member, False)
    return -1 if within < 0 else rank + within
