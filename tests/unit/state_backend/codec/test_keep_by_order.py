"""An ordered state keeps the rows that its order says, whatever the epochs in which they come."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from state_backend.apply.replay import read_snapshot
from state_backend.codec.keep_by_order import OrderedList, pack, row_order_of
from state_backend.log.change_log import ChangeLog
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import ChangeError
from state_backend.model.records import Change, Op


def state(**arguments: Any) -> StateDescriptor:
    return StateDescriptor("s", **({"key": "k", "value": "v", "columns": {"t": "int"}} | arguments))


@pytest.mark.parametrize(
    ("by", "kept"), [("last_by", [b"3", b"4"]), ("max_by", [b"3", b"4"]), ("first_by", [b"1", b"2"])]
)
def test_list_has_same_elements_in_any_order_of_arrival(by: str, kept: list[bytes]) -> None:
    order = row_order_of(state(kind="list", length_max=2, **{by: "t"}))
    assert order is not None
    for rows in permutations((b"1", b"2", b"3", b"4")):
        current = OrderedList(order, ())
        for row in rows:
            current.add(row, row)
        assert current.elements == current.orders == kept


def test_list_with_lowered_maximum_length_is_cut_by_next_row() -> None:
    order = row_order_of(state(kind="list", length_max=2, last_by="t"))
    assert order is not None
    current = OrderedList(order, (b"1", b"2", b"3", b"4"))
    assert not current.add(b"0", b"zero")
    assert current.add(b"3", b"three")
    assert (current.orders, current.elements) == ([b"3", b"4"], [b"three", 3])


def test_log_without_spark_selects_and_has_format_of_its_own(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, "job", [state(last_by="t")], "q")
    for order, value in ((b"2", b"new"), (b"1", b"old")):
        writer.publish([Change("s", Op.FOLD, b"job:s:a", None, pack(order, value))])
    log = ChangeLog(tmp_path).job("job")
    assert log.description("q.1").format == 4
    with read_snapshot(tmp_path, "job") as snapshot:
        assert snapshot.value(b"job:s:a") == b"new"


@pytest.mark.parametrize(
    ("arguments", "change", "complaint"),
    [
        ({}, Change("s", Op.PUT, b"job:s:a", None, b"1"), "takes FOLD changes of keys.*not PUT"),
        ({}, Change("s", Op.FOLD, b"job:s:a", b"f", pack(b"1", b"1")), "takes FOLD changes of keys"),
        ({"field": "f"}, Change("s", Op.FOLD, b"job:s:a", None, pack(b"1", b"1")), "takes FOLD changes of fields"),
        ({}, Change("s", Op.FOLD, b"job:s:a", None, b"\xff\xff1"), "has no order"),
        ({}, Change("s", Op.FOLD, b"job:s:a", None, pack(b"1" * 1025, b"")), "1025 bytes; the limit is 1024"),
    ],
)
def test_unordered_change_is_refused(tmp_path: Path, arguments: dict[str, str], change: Change, complaint: str) -> None:
    writer = LogWriter(tmp_path, "job", [state(last_by="t", **arguments)], "q")
    with pytest.raises(ChangeError, match=complaint):
        writer.publish([change])
