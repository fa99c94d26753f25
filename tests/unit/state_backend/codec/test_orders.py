"""The bytes of an order compare as the columns do that it is made of."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from state_backend.codec.keep_by_order import pack, unpack
from state_backend.codec.orders import orders_of, with_orders
from state_backend.model.records import Change, Op

TIMES = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31))
COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "byte": (pa.int8(), st.integers(-128, 127)),
    "integer": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "double": (pa.float64(), st.floats(allow_nan=False)),
    "boolean": (pa.bool_(), st.booleans()),
    "decimal": (pa.decimal128(38, 4), st.integers(-(10**33), 10**33).map(lambda unit: Decimal(unit).scaleb(-4))),
    "date": (pa.date32(), st.dates(date(1, 1, 1))),
    "timestamp": (pa.timestamp("us", "UTC"), TIMES.map(lambda time: time.replace(tzinfo=UTC))),
    "timestamp_ntz": (pa.timestamp("us"), TIMES),
    "text": (pa.string(), st.text(max_size=3).map(lambda text: text.encode("utf-8", "replace").decode())),
    "bytes": (pa.binary(), st.binary(max_size=3)),
}


def key_of(value: Any) -> Any:
    """Return what to compare a value by: texts by their bytes."""
    return value.encode() if isinstance(value, str) else value


@pytest.mark.parametrize("name", COLUMNS)
@given(data=st.data())
def test_orders_compare_as_values_do(name: str, data: st.DataObject) -> None:
    kind, values = COLUMNS[name]
    given_values = data.draw(st.lists(values, min_size=2, max_size=20))
    column = pa.array([given_values[0], *given_values], kind).slice(1)  # which begins in the middle of its buffers
    orders = orders_of([column]).to_pylist()
    for value, order in zip(given_values, orders, strict=True):
        for other, other_order in zip(given_values, orders, strict=True):
            assert (order < other_order) is (key_of(value) < key_of(other))
            assert (order == other_order) is (value == other)


ROWS = st.tuples(st.text("\0a\xff", max_size=3), st.binary(max_size=2), st.integers(-2, 2))


@given(st.lists(ROWS, min_size=2, max_size=20))
@example([("a", b"\0", 0), ("a\0", b"", 0), ("a", b"", 1)])
def test_next_column_decides_between_equal_orders(rows: list[tuple[str, bytes, int]]) -> None:
    texts, binaries, numbers = zip(*rows, strict=True)
    columns = [pa.array(texts, pa.string()), pa.array(binaries, pa.binary()), pa.array(numbers, pa.int32())]
    orders = orders_of(columns).to_pylist()
    by_value = sorted(range(len(rows)), key=lambda row: (texts[row].encode(), binaries[row], numbers[row]))
    assert [orders[row] for row in by_value] == sorted(orders)


def test_nan_is_above_all_numbers_and_zero_has_no_sign() -> None:
    nan, negative_nan, infinity, zero, negative_zero = orders_of(
        [pa.array([float("nan"), -float("nan"), float("inf"), 0.0, -0.0])]
    ).to_pylist()
    assert nan == negative_nan > infinity > zero == negative_zero


@given(st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=5)), max_size=5))
def test_value_with_its_order_is_read_as_it_was_written(pairs: list[tuple[bytes, bytes]]) -> None:
    orders = pa.array([order for order, _ in pairs], pa.binary())
    packed = with_orders(orders, pa.array([value for _, value in pairs], pa.binary())).to_pylist()
    assert packed == [pack(*pair) for pair in pairs]
    assert [unpack(Change("s", Op.FOLD, b"k", None, each)) for each in packed] == pairs
