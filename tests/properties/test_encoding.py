"""The encoding of rows a column at a time gives what the plain functions give a row at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from state_backend.codec import packed_list, packed_map
from state_backend.codec.reductions import reduction_of
from state_backend.codec.row_encoding import (
    COLUMN_HASH_BYTES_MAX,
    RowPlan,
    as_bytes,
    encode,
    hash_positions_of,
    joined_in_arrow,
    joined_texts,
    order_in_numpy,
    order_of,
    pack_arrays,
    pack_columns,
    pack_columns_in_arrow,
    positions_in_numpy,
)
from state_backend.model.descriptor import Reduce, StateDescriptor
from state_backend.model.records import Op, changes_in
from state_backend.model.slots import hash_position

KEYS = st.one_of(
    st.binary(max_size=40),
    st.binary(min_size=COLUMN_HASH_BYTES_MAX - 2, max_size=COLUMN_HASH_BYTES_MAX + 3),
    st.lists(st.sampled_from([b"{", b"}", b"a", b"\xff", b":"]), max_size=8).map(b"".join),
)


@settings(deadline=None)
@given(st.lists(KEYS, max_size=30), st.integers(0, 5), st.sampled_from([b"", b"a", b"job:state:", b"{a}"]))
@example([], 0, b"")
@example([b"", b"{}", b"{}{a}", b"{a}b", b"a{", b"x" * COLUMN_HASH_BYTES_MAX], 1, b"")
def test_positions_of_column_are_positions_of_its_keys(keys: list[bytes], offset: int, prefix: bytes) -> None:
    column = pa.array([prefix + key for key in keys], pa.binary()).slice(offset)
    expected = [hash_position(prefix + key) for key in keys[offset:]]
    assert hash_positions_of(column, prefix).tolist() == expected
    assert positions_in_numpy(column, prefix).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 7) | st.integers(0, (1 << 46) - 1), max_size=300))
@example([5] * (1 << 16))
def test_rows_are_ordered_stably_by_position(positions: list[int]) -> None:
    expected = sorted(range(len(positions)), key=positions.__getitem__)
    for ordered, rows in (order(np.array(positions, np.uint64)) for order in (order_of, order_in_numpy)):
        assert rows.tolist() == expected
        assert ordered.tolist() == sorted(positions)


@settings(deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=3)), max_size=20), st.integers(0, 3))
def test_parts_of_keys_are_joined_row_by_row(rows: list[tuple[bytes, bytes]], offset: int) -> None:
    first, second = (pa.array([row[i] for row in rows], pa.binary()).slice(offset) for i in (0, 1))
    expected = [b"job:" + one + b":" + other for one, other in rows[offset:]]
    for join in (joined_texts, joined_in_arrow):
        assert join([b"job:", first, b":", second, b""], len(first)).to_pylist() == expected
    assert joined_texts([b"all"], len(rows)).to_pylist() == [b"all"] * len(rows)


@settings(deadline=None)
@given(
    st.sampled_from([8, 16, 32, 64]).flatmap(
        lambda bits: st.tuples(
            st.just(bits), st.lists(st.none() | st.integers(-1 << bits - 1, (1 << bits - 1) - 1), max_size=20)
        )
    ),
    st.integers(0, 3),
)
@example((64, [0, 9, 10, 99, 100, -1, -(1 << 63), (1 << 63) - 1, None]), 0)
def test_text_of_integer_is_its_digits(given_numbers: tuple[int, list[int | None]], offset: int) -> None:
    bits, numbers = given_numbers
    kind = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[bits]
    texts = as_bytes(pa.array(numbers, kind).slice(offset), "integer")
    assert texts.to_pylist() == [None if number is None else b"%d" % number for number in numbers[offset:]]
    texts.validate(full=True)


COLUMNS = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        st.tuples(*[st.one_of(st.none(), st.binary(max_size=20))] * width).map(list), min_size=1, max_size=20
    )
)


@settings(deadline=None)
@given(COLUMNS, st.lists(st.text(max_size=10), min_size=5, max_size=5, unique=True))
def test_columns_are_packed_as_row_at_a_time_is(table: list[list[bytes | None]], names: list[str]) -> None:
    fields = tuple(names[: len(table[0])])
    columns = [pa.array(column, pa.binary()) for column in zip(*table, strict=True)]
    maps = [
        [(name.encode(), value) for name, value in zip(fields, row, strict=True) if value is not None] for row in table
    ]
    for packed, is_empty in (pack_columns(fields, columns), pack_columns_in_arrow(fields, columns)):
        assert packed.to_pylist() == [packed_map.pack(each) for each in maps]
        assert is_empty.to_pylist() == [not each for each in maps]


@settings(deadline=None)
@given(st.lists(st.none() | st.lists(st.binary(max_size=20), max_size=5), max_size=20), st.integers(0, 3))
def test_arrays_are_packed_as_row_at_a_time_is(rows: list[list[bytes] | None], offset: int) -> None:
    packed, is_empty = pack_arrays(PLAN, pa.array(rows, pa.list_(pa.binary())).slice(offset))
    assert packed.to_pylist() == [packed_list.pack(row or ()) for row in rows[offset:]]
    assert is_empty.to_pylist() == [not row for row in rows[offset:]]


def check_shortest(text: str, number: np.floating, shortest: str) -> None:
    """Compare with the shortest digits, which Python's repr and numpy's find too."""
    assert type(number)(text) == number
    assert math.copysign(1, float(text)) == math.copysign(1, number)
    assert "e" not in text or not 1e-7 <= abs(float(number)) < 1e21
    assert digits(text) == digits(shortest)
    assert "." not in text.partition("e")[0] or not text.partition("e")[0].endswith("0")
    assert re.fullmatch(r"-?[0-9]+(\.[0-9]+)?(e[+-][0-9]+)?", text)


def digits(text: str) -> str:
    """Return the significant digits of a number's text."""
    return re.sub("[^0-9]", "", text.partition("e")[0]).strip("0")


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
@example(1e-7)
@example(1e21)
@example(9.999999999999999e20)
@example(5e-324)
def test_text_of_double_is_shortest_that_round_trips(number: float) -> None:
    (text,) = as_bytes(pa.array([number], pa.float64()), "float").to_pylist()
    check_shortest(text.decode(), np.float64(number), repr(number))


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_text_of_float_is_shortest_that_round_trips(number: float) -> None:
    (text,) = as_bytes(pa.array([number], pa.float32()), "float").to_pylist()
    shortest = np.format_float_scientific(np.float32(number), unique=True)
    check_shortest(text.decode(), np.float32(number), shortest)


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=18))
def test_decimal_is_written_in_plain_digits_with_its_scale(number: Decimal) -> None:
    (text,) = as_bytes(pa.array([str(number)]), "decimal").to_pylist()
    assert text.decode() == format(number, "f")
    assert "e" not in text.decode().lower()


@settings(deadline=None)
@given(st.datetimes())
def test_timestamp_is_iso_8601_in_utc(instant: datetime) -> None:
    (text,) = as_bytes(pa.array([instant.replace(tzinfo=UTC)], pa.timestamp("us", "UTC")), "timestamp").to_pylist()
    assert datetime.fromisoformat(text.decode()) == instant.replace(tzinfo=UTC)
    assert text.endswith(b"Z")
    assert (b"." in text) == bool(instant.microsecond)
    assert not (instant.microsecond and text.endswith(b"0Z"))


PLAN = RowPlan(
    state="s",
    literals=("", ""),
    key_names=("k",),
    key_forms=("text",),
    key_is_open=(False,),
    field_name="f",
    field_form="text",
    value_names=("temp",),
    value_forms=("text",),
    map_fields=(),
    expire_at_ms=None,
    keeps_last=True,
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.none() | st.text(max_size=3)), max_size=30),
    st.lists(st.integers(0, 30), max_size=5),
)
def test_last_row_of_key_and_field_wins(rows: list[tuple[str, str, str | None]], cuts: list[int]) -> None:
    rows.sort(key=lambda row: row[:2])  # as Spark hands them over; of equal keys the later stays later
    columns = zip(*rows, strict=True) if rows else ([], [], [])
    arrays = [*(pa.array(column, pa.string()) for column in columns), pa.array(range(len(rows)), pa.int64())]
    whole = pa.RecordBatch.from_arrays(arrays, names=["k0", "f", "v0", "h"])
    borders = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    batches = [whole.slice(start, end - start) for start, end in pairwise(borders)]

    digest = [0]
    found = [change for run in encode([PLAN], batches, digest) for change in changes_in(run)]

    assert digest[0] == sum(range(len(rows)))
    last = {(key.encode(), field.encode()): None if value is None else value.encode() for key, field, value in rows}
    assert len(found) == len(last)
    assert {(change.key, change.field): change.value for change in found} == last


TOTALS: dict[str, Callable[[list[int]], int]] = {"sum": sum, "count": sum, "min": min, "max": max}


@settings(deadline=None)
@given(
    st.sampled_from(list(TOTALS)),
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.none() | st.integers(-(2**63), 2**63 - 1)),
        max_size=30,
    ),
    st.lists(st.integers(0, 30), max_size=5),
)
def test_rows_of_key_and_field_become_one_fold_in_any_batches(
    how: str, rows: list[tuple[str, str, int | None]], cuts: list[int]
) -> None:
    state = StateDescriptor("s", "k", "n", field="f", reduce=how, columns={"n": "bigint"})
    reduction = reduction_of(state)
    assert reduction is not None
    adds = how in ("sum", "count")
    rows.sort(key=lambda row: (*row[:2], row[2] is not None, row[2] or 0))  # as Spark orders what min and max are of
    keys, fields, numbers = zip(*rows, strict=True) if rows else ((), (), ())
    values = pa.array(numbers, pa.int64())
    whole = pa.RecordBatch.from_pydict(
        {
            "k0": pa.array(keys, pa.string()),
            "f": pa.array(fields, pa.string()),
            "v0": values if adds else values.cast(pa.string()),
            "h": pa.array(range(len(rows)), pa.int64()),
        }
    )
    borders = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    batches = [whole.slice(start, end - start) for start, end in pairwise(borders)]
    plan = replace(
        PLAN,
        value_forms=("integer" if adds else "text",),
        keeps_last=False,
        reduce=Reduce(how),
        add=reduction.fold if adds else None,
    )

    digest = [0]
    found = [change for run in encode([plan], batches, digest) for change in changes_in(run)]

    assert digest[0] == sum(range(len(rows)))
    groups: dict[tuple[bytes, bytes | None], list[int]] = {}
    for key, field, number in rows:
        if number is not None:
            groups.setdefault((key.encode(), field.encode()), []).append(number)
    assert len(found) == len(groups)
    assert all(change.op == Op.FOLD for change in found)
    totals = {place: TOTALS[how](numbers) for place, numbers in groups.items()}
    assert {(change.key, change.field): int(change.value or b"") for change in found} == totals
