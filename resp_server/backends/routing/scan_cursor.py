"""SCAN cursors over an upstream and the states: stateless, so that any proxy continues with any cursor. Pure.

A scan walks the upstream's nodes in order, then the states. A cursor is an unsigned 64-bit number:

    | the upstream node's own cursor | node, `node_bits` | 0 |
    | the states' own cursor                           | 1 |

0 begins at the first node, and ends a scan. The backend is in the lowest bits, so that cursors stay small: some clients
read them as floating-point numbers of 53 bits. An upstream of one node has no bits for the node.
"""

from __future__ import annotations

from typing import NamedTuple

from resp_server.protocol.errors import GenericError

CURSOR_BITS = 64
STATES_MARK = 1
# Redis Cluster is made for up to 1,000 nodes. Their number may change during a scan, so the width does not follow it.
CLUSTER_NODE_BITS = 10


class ScanPosition(NamedTuple):
    """Where a scan continues: the node of the upstream, None for the states; and that backend's own cursor."""

    node: int | None
    inner: int


STATES_START = ScanPosition(None, 0)


def position_of(cursor: int, node_count: int = 1) -> ScanPosition:
    """Return the position of a cursor. Nodes that the upstream no longer has are passed over."""
    if cursor & STATES_MARK:
        return ScanPosition(None, cursor >> 1)
    bits = node_bits(node_count)
    node = cursor >> 1 & ((1 << bits) - 1)
    return ScanPosition(node, cursor >> (1 + bits)) if node < node_count else STATES_START


def cursor_of(position: ScanPosition, node_count: int = 1) -> int:
    """Return the cursor of a position; GenericError if the backend's own cursor leaves no room for the backend."""
    node, inner = position
    bits = node_bits(node_count)
    cursor = inner << 1 | STATES_MARK if node is None else (inner << bits | node) << 1
    if cursor >> CURSOR_BITS:
        raise GenericError(
            f"the cursor {inner} of the upstream's SCAN has more than {CURSOR_BITS - 1 - bits} bits, so that it cannot "
            "be combined with a scan of states; scan the upstream directly"
        )
    return cursor


def after(position: ScanPosition, inner: int, node_count: int = 1) -> int:
    """Return the next cursor, where `inner` is the backend's own next cursor; 0: the scan has ended."""
    if inner:
        return cursor_of(ScanPosition(position.node, inner), node_count)
    if position.node is None:
        return 0
    following = position.node + 1
    return cursor_of(ScanPosition(following, 0) if following < node_count else STATES_START, node_count)


def node_bits(node_count: int) -> int:
    """Return the width of the node's number in cursors."""
    return CLUSTER_NODE_BITS if node_count > 1 else 0
