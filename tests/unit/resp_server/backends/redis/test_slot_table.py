"""The table of a Redis Cluster's slots, and the redirects of its nodes."""

from __future__ import annotations

import pytest

from resp_server.backends.redis.slot_table import Redirect, SlotTable, redirect_in
from resp_server.backends.redis.url import UpstreamAddress
from resp_server.protocol.replies import encode
from state_backend.model.slots import SLOTS

A, B, C = (UpstreamAddress("10.0.0.1", port) for port in (1, 2, 3))


def table(*rows: list[object]) -> SlotTable:
    return SlotTable.parse(encode([list(row) for row in rows], 2), A)  # type: ignore[arg-type]


def test_each_slot_has_number_of_its_master() -> None:
    found = SlotTable([A] * 2 + [None] + [B] * (SLOTS - 3))
    assert found.numbers == bytes([1, 1, 0] + [2] * (SLOTS - 3))
    assert [found.numbered(number) for number in (0, 1, 2)] == [None, A, B]
    new = UpstreamAddress("new", 1)
    found.move(0, new)
    found.move(1, B)
    assert found.numbers[:4] == bytes([3, 2, 0, 2]) and found.numbered(3) == new


def test_masters_are_in_order_of_their_first_slots() -> None:
    found = table(
        [100, 200, [b"10.0.0.1", 2, b"id2"], [b"10.0.0.1", 9, b"replica"]],
        [0, 99, [b"10.0.0.1", 1, b"id1"]],
        [300, 400, [b"10.0.0.1", 1, b"id1"]],
    )
    assert list(found.masters) == [A, B]
    assert [found.master_of(slot) for slot in (0, 99, 100, 200, 201, 300, 16383)] == [A, A, B, B, None, A, None]


def test_node_without_host_is_contacted_one() -> None:
    assert table([0, 1, [b"", 1, b"id"]]).masters == [A]
    assert table([0, 1, [None, 1, b"id"]]).masters == [A]


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (b"-ERR no\r\n", ValueError, "^ERR no$"),
        (b"*1\r\n:1\r\n", TypeError, "unpack"),
        (encode([[0, 16384, [b"h", 1, b"i"]]], 2), ValueError, "slots 0 to 16384"),
        (encode([[9, 8, [b"h", 1, b"i"]]], 2), ValueError, "slots 9 to 8"),
    ],
)
def test_other_replies_are_refused(reply: bytes, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SlotTable.parse(reply, A)


def test_moved_slot_changes_its_master_and_no_scan() -> None:
    found = table([0, 16383, [b"10.0.0.1", 1, b"id1"]])
    found.move(7, C)
    assert found.master_of(7) == C and found.master_of(8) == A and list(found.masters) == [A]
    found.move(8, C)
    found.join(A)
    assert found.joined == [C]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b"-MOVED 3999 10.0.0.1:2\r\n", Redirect(3999, B, is_ask=False)),
        (b"-ASK 3999 10.0.0.1:2\r\n", Redirect(3999, B, is_ask=True)),
        (b"-MOVED 1 :3\r\n", Redirect(1, C, is_ask=False)),
        (b"-MOVED 1 ::1:3\r\n", Redirect(1, UpstreamAddress("::1", 3), is_ask=False)),
        (b"-ERR MOVED 1 a:3\r\n", None),
        (b"-MOVED 16384 a:3\r\n", None),
        (b"-MOVED x a:3\r\n", None),
        (b"-MOVED 1 a\r\n", None),
        (b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n", None),
    ],
)
def test_redirect_names_slot_and_node(reply: bytes, expected: Redirect | None) -> None:
    assert redirect_in(reply, A) == expected
