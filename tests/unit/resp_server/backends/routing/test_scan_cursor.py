"""Cursors over an upstream and the states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resp_server.backends.routing.scan_cursor import STATES_START, ScanPosition, after, cursor_of, position_of
from resp_server.protocol.errors import GenericError


def test_scan_walks_nodes_in_order_then_states() -> None:
    found, cursor = [], 0
    for inner in (7, 0, 0, 5, 0, 9, 0):
        found.append(position_of(cursor, 3))
        cursor = after(found[-1], inner, 3)
    assert [each.node for each in found] == [0, 0, 1, 2, 2, None, None]
    assert [each.inner for each in found] == [0, 7, 0, 0, 5, 0, 9]
    assert cursor == 0


@given(st.integers(1, 1000), st.integers(0, 2**53 - 1), st.data())
def test_every_position_has_own_cursor_and_only_start_zero(node_count: int, inner: int, data: st.DataObject) -> None:
    node = data.draw(st.none() | st.integers(0, node_count - 1))
    position = ScanPosition(node, inner)
    cursor = cursor_of(position, node_count)
    assert position_of(cursor, node_count) == position
    assert 0 <= cursor < 2**64 and (cursor == 0) == (position == ScanPosition(0, 0))


@given(st.integers(0, 2**64 - 1), st.integers(1, 1000))
def test_any_number_is_cursor(cursor: int, node_count: int) -> None:
    node, _ = position_of(cursor, node_count)
    assert node is None or 0 <= node < node_count


def test_node_that_upstream_no_longer_has_is_passed_over() -> None:
    cursor = cursor_of(ScanPosition(5, 77), 6)
    assert position_of(cursor, 3) == STATES_START


def test_cursors_of_one_redis_and_of_states_stay_small() -> None:
    assert cursor_of(ScanPosition(0, 2**52 - 1)) < 2**53
    assert cursor_of(ScanPosition(None, 2**46 - 1)) < 2**47


@pytest.mark.parametrize(("node_count", "bits"), [(1, 63), (2, 53)])
def test_cursor_without_room_for_backend_is_error(node_count: int, bits: int) -> None:
    cursor_of(ScanPosition(0, 2**bits - 1), node_count)
    with pytest.raises(GenericError, match=f"the cursor {2**bits} of the upstream's SCAN has more than {bits} bits"):
        cursor_of(ScanPosition(0, 2**bits), node_count)
