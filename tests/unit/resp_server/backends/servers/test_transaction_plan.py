"""The replies of one server to its part of a transaction."""

from __future__ import annotations

from typing import Any, cast

import pytest

from resp_server.backends.servers.transaction_plan import ServerTransaction
from resp_server.pipeline.exec_runner import NOTHING_RUN
from tests.properties.steps import result_of

NO_CLUSTER = cast(Any, None)


def part_with(*replies: bytes) -> ServerTransaction:
    """Return the part of a transaction that has these replies to MULTI and EXEC."""
    part = ServerTransaction(0, 0, NO_CLUSTER, "127.0.0.1:7400")
    part.replies = list(replies)
    return part


@pytest.mark.parametrize("item", [b"-MOVED 1 127.0.0.1:7401\r\n", b"-TRYAGAIN not there yet\r\n"])
def test_item_of_moved_slot_is_error_of_whole_transaction(item: bytes) -> None:
    assert result_of(part_with(b"+OK\r\n", b"*2\r\n$1\r\nx\r\n" + item).read()) == item


@pytest.mark.parametrize("item", [b"-WRONGTYPE of this command alone\r\n", b"$12\r\n\r\n-MOVED 1 x\r\n"])
def test_other_items_are_no_error_of_transaction(item: bytes) -> None:
    assert result_of(part_with(b"+OK\r\n", b"*2\r\n$1\r\nx\r\n" + item).read()) is None


@pytest.mark.parametrize("protocol", [2, 3])
def test_exec_after_watched_change_is_nil_and_no_error(protocol: int) -> None:
    part = part_with(b"+OK\r\n", NOTHING_RUN[protocol])
    assert part.is_aborted and result_of(part.read()) is None
